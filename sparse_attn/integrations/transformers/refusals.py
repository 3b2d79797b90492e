"""What the bridge does not do, said before anything runs."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import nn

from sparse_attn.framework.torch_private import has_forward_hooks
from sparse_attn.integrations.transformers.private import implementation


def refuse(name: str, got: object, allowed: str) -> NoReturn:
    raise ValueError(f"{name}: got {got}, allowed: {allowed}")


def check_call(module: nn.Module, hidden: torch.Tensor, cache: Any, options: dict[str, Any]) -> None:
    """Refuse dropout and attention weights in a call of an attention layer, and gradients on a GPU or with a cache."""
    if torch.is_grad_enabled() and (hidden.requires_grad or any(p.requires_grad for p in module.parameters())):
        if hidden.device.type != "cpu":
            refuse(
                "attn_implementation", f"sparse_attn on {hidden.device} where a gradient is wanted",
                'a CPU, a call under torch.no_grad() or torch.inference_mode(), or attn_implementation="eager"',
            )  # fmt: skip
        if cache is not None:
            refuse("use_cache", "a cache where a gradient is wanted", "use_cache=False")
    if module.training and getattr(module, "attention_dropout", 0.0):
        refuse("attention_dropout", f"{module.attention_dropout} in training mode", "0, or model.eval()")
    if options.get("output_attentions") or getattr(module.config, "output_attentions", False):
        refuse("output_attentions", "True, but the weights of attention are never held", "False")


def check_filled(module: Any, cache: Any, ours: bool) -> None:
    """Refuse a cache of an MLA layer whose keys are not those of the implementation that runs: the bridge's are whole
    rows [latent, rotated key], those of any other are latents."""
    layer = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None
    keys = getattr(layer, "keys", None)
    width = module.kv_lora_rank + (module.qk_rope_head_dim if ours else 0)
    if keys is not None and keys.dim() == 4 and keys.shape[-1] != width:
        name, other = implementation(module.config), "another implementation" if ours else "sparse_attn"
        refuse("cache", f"one that {other} has filled", f"an empty one, or one that {name} has filled")


def other_than(module: nn.Module, *kinds: type) -> str | None:
    """What a call of ``module`` runs that is not the forward of one of ``kinds``, or None."""
    if type(module) not in kinds:
        return f"a {type(module).__name__} of {type(module).__module__}"
    if has_forward_hooks(module):
        return "a module with forward hooks"
    if "forward" in module.__dict__ and not _only_moves(module):
        return "a module with a forward of its own, as accelerate gives to those that it offloads"
    return None


def _only_moves(module: nn.Module) -> bool:
    """Whether a forward of ``module``'s own is accelerate's, which moves what comes in and then calls its class's."""
    hooks: Any = sys.modules.get("accelerate.hooks")
    hook: Any = getattr(module, "_hf_hook", None)
    if hooks is None or type(hook) is not hooks.AlignDevicesHook or hook.offload:
        return False
    wrapped = getattr(module.__dict__["forward"], "__wrapped__", None)
    return getattr(wrapped, "__func__", None) is type(module).forward


def check_replaced(name: str, module: nn.Module, *kinds: type) -> None:
    """Refuse a module that the bridge does not call, where a call would run anything but its class's forward."""
    if got := other_than(module, *kinds):
        allowed = " or ".join(f"{kind.__name__} of {kind.__module__}" for kind in kinds)
        refuse(name, got, f"{allowed}, with adapters merged and without hooks: it is computed, and not called")


def check_absorbable(linear: nn.Module) -> None:
    """Refuse a kv_b_proj whose weight is not all there is to it, as under another quantisation, and an adapter's that
    is no product with a matrix."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    if is_adapted(linear):
        wrapper: Any = linear
        check_absorbable(wrapper.get_base_layer())
        if any(isinstance(one, nn.Dropout) and one.p and one.training for one in linear.modules()):
            refuse("kv_b_proj", "an adapter with dropout in training mode", "lora_dropout=0.0, or model.eval()")
        if any(getattr(one, "bias", None) is not None for one in linear.modules()):
            refuse("kv_b_proj", "an adapter with a bias", "lora_bias=False")
        return
    check_replaced("kv_b_proj", linear, nn.Linear, FP8Linear)
    weight: Any = linear.weight
    if linear.bias is not None:
        refuse("kv_b_proj", "a bias", "a layer without a bias")
    if weight.is_meta:
        refuse("kv_b_proj", "a weight that is not on a device", "weights that are not offloaded")
    if hasattr(weight, "__tensor_flatten__"):  # shards of DTensor, and what torchao quantises
        refuse("kv_b_proj", f"a weight that is a {type(weight).__name__}", "a plain tensor")


def is_adapted(linear: nn.Module) -> bool:
    """Whether a call of ``linear`` runs peft's LoRA around a linear layer, and nothing else."""
    lora: Any = sys.modules.get("peft.tuners.lora")
    return lora is not None and other_than(linear, lora.Linear) is None
