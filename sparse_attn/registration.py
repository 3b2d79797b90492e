"""One way to define an operator: schema, fake and a real implementation that is imported when it first runs.

Every schema ends with ``str impl``. The reference and the launcher of an op live in its room under the op's own name
and take the same arguments without ``impl``; so do its rules of debug mode.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from sparse_attn import debug, streams, workspace
from sparse_attn.autocast import no_autocast
from sparse_attn.target import resolve_impl

NAMESPACE = "sparse_attn"


def define_op(room: str, name: str, signature: str, fake: Callable) -> torch._ops.OpOverload:
    """Define ``sparse_attn::name`` with ``signature`` (as in "(Tensor x, str impl) -> Tensor"), living in package ``room``."""
    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, signature, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    torch.library.impl(qualified, ("cpu", "cuda"))(_implementation(room, name))
    torch.library.register_fake(qualified)(lambda *args: fake(*args[:-1]))
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _implementation(room: str, name: str) -> Callable:
    """What runs: on the device of the tensors, whichever is the current one, with one op's launches in a row."""

    @no_autocast
    def real(*args):
        device = _device_of(name, args)
        if streams.is_current(device):
            return run(device, args)
        with streams.entered(device):
            return run(device, args)

    def run(device: torch.device, args: tuple):
        *arguments, impl = args
        impl = resolve_impl(impl, device)
        if debug.on():
            debug.look(room, name, *arguments)
        if impl == "reference":
            return getattr(importlib.import_module(f"{room}.reference"), name)(*arguments)
        launcher = getattr(importlib.import_module(f"{room}.launch"), name)
        with workspace.launching():
            return launcher(*arguments)

    return real


def _device_of(name: str, args: tuple) -> torch.device:
    """The device that holds all tensors of a call; ValueError where they lie on several."""
    home = None
    for place, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            if home is None:
                home, first = value.device, place
            elif value.device != home:
                names = [argument.name for argument in getattr(getattr(torch.ops, NAMESPACE), name).default._schema.arguments]
                raise ValueError(
                    f"{name}: {names[place]}: got device {value.device}, allowed: {home} (that of {names[first]})"
                )
    return home
