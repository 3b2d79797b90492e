"""The public functions, and running an op through torch's own checks of its schema, fake and functionalisation."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.library import opcheck as torch_opcheck

from sparse_attn import ops
from sparse_attn.framework import torch_private

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck(name: str, *args, checks: tuple[str, ...] = CHECKS) -> None:
    """Check ``sparse_attn::name`` on ``args`` (which end with ``impl``)."""
    torch_opcheck(getattr(torch.ops.sparse_attn, name).default, args, test_utils=checks)


def schema(name: str) -> str:
    """The schema of ``sparse_attn::name`` as a person reads it."""
    return str(torch_private.schema(getattr(torch.ops.sparse_attn, name).default))


def public_functions() -> dict[str, Callable[..., Any]]:
    """The public functions of every operator package, by name."""
    found = {}
    for package in ops.packages():
        module = importlib.import_module(f"sparse_attn.ops.{package}")
        listed = getattr(module, "__all__", ())  # of packages that hand on functions of their files
        for name, value in vars(module).items():
            own = name in listed or getattr(value, "__module__", None) == module.__name__
            if own and inspect.isfunction(value) and not name.startswith("_"):
                found[name] = value
    return found
