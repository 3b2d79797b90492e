"""What the bridge does not do, said before anything runs."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

# Linear layers whose weight is read in place: whatever else a layer computes beside its weight would be lost.
PLAIN, FP8 = "Linear", "FP8Linear"


def refuse(name: str, got: object, allowed: str) -> NoReturn:
    raise ValueError(f"{name}: got {got}, allowed: {allowed}")


def check_call(module: nn.Module, hidden: torch.Tensor, options: dict[str, Any]) -> None:
    """Refuse gradients, dropout and attention weights in a call of an attention layer."""
    if torch.is_grad_enabled() and (hidden.requires_grad or any(p.requires_grad for p in module.parameters())):
        refuse(
            "attn_implementation", "sparse_attn where a gradient is wanted, for which no operator has a backward",
            'a call under torch.no_grad() or torch.inference_mode(), or attn_implementation="eager"',
        )  # fmt: skip
    if module.training and getattr(module, "attention_dropout", 0.0):
        refuse("attention_dropout", f"{module.attention_dropout} in training mode", "0, or model.eval()")
    if options.get("output_attentions") or getattr(module.config, "output_attentions", False):
        refuse("output_attentions", "True, but the weights of attention are never held", "False")


def check_absorbable(linear: nn.Module) -> None:
    """Refuse a kv_b_proj whose weight is not all there is to it, as under an adapter or another quantisation."""
    if type(linear).__name__ not in (PLAIN, FP8):
        refuse("kv_b_proj", f"a {type(linear).__name__}", f"{PLAIN} or {FP8}, of which the weight is absorbed")
    if linear.bias is not None:
        refuse("kv_b_proj", "a bias", "a layer without a bias")
    if linear.weight.is_meta:
        refuse("kv_b_proj", "a weight that is not on a device", "weights that are not offloaded")
