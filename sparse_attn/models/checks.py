"""Checks of what every forward is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_attn.types import StepPlan


def check_tokens(tokens: torch.Tensor, plan: StepPlan) -> None:
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"tokens: got dtype {tokens.dtype}, allowed: torch.int64, torch.int32")
    if tokens.dim() != 1 or tokens.shape[0] != plan.positions.shape[0]:
        rows = plan.positions.shape[0]
        raise ValueError(f"tokens: got shape {list(tokens.shape)}, allowed: [{rows}], a row per row of the plan")


def check_caches(name: str, caches: Sequence[torch.Tensor | None], present: Sequence[bool]) -> None:
    """One entry per layer, a tensor where ``present`` says so and None elsewhere."""
    if len(caches) != len(present):
        raise ValueError(f"{name}: got {len(caches)} entries, allowed: num_layers = {len(present)}")
    for layer, own in enumerate(present):
        if own != (caches[layer] is not None):
            raise ValueError(
                f"{name}[{layer}]: got {'None' if own else 'a tensor'}, allowed: "
                f"{'a tensor, the layer has such a cache' if own else 'None, the layer has no such cache'}"
            )
