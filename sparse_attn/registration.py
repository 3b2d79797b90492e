"""One way to define an operator: schema, fake and a real implementation that is imported when it first runs.

Every schema ends with ``str impl``. The reference and the launcher of an op live in its room under the op's own name
and take the same arguments without ``impl``; so do its rules of debug mode.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from sparse_attn import debug
from sparse_attn.autocast import no_autocast
from sparse_attn.target import resolve_impl

NAMESPACE = "sparse_attn"


def define_op(room: str, name: str, signature: str, fake: Callable) -> torch._ops.OpOverload:
    """Define ``sparse_attn::name`` with ``signature`` (as in "(Tensor x, str impl) -> Tensor"), living in package ``room``."""
    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, signature, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))

    @no_autocast
    def real(*args):
        *arguments, impl = args
        device = next(value.device for value in arguments if isinstance(value, torch.Tensor))
        module = "reference" if resolve_impl(impl, device) == "reference" else "launch"
        if debug.on():
            debug.look(room, name, *arguments)
        return getattr(importlib.import_module(f"{room}.{module}"), name)(*arguments)

    torch.library.impl(qualified, ("cpu", "cuda"))(real)
    torch.library.register_fake(qualified)(lambda *args: fake(*args[:-1]))
    return getattr(getattr(torch.ops, NAMESPACE), name).default
