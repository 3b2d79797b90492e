"""Running an op through torch's own checks of its schema, fake and functionalisation."""

from __future__ import annotations

import torch
from torch.library import opcheck as torch_opcheck

from sparse_attn.framework import torch_private

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck(name: str, *args, checks: tuple[str, ...] = CHECKS) -> None:
    """Check ``sparse_attn::name`` on ``args`` (which end with ``impl``)."""
    torch_opcheck(getattr(torch.ops.sparse_attn, name).default, args, test_utils=checks)


def schema(name: str) -> str:
    """The schema of ``sparse_attn::name`` as a person reads it."""
    return str(torch_private.schema(getattr(torch.ops.sparse_attn, name).default))
