"""The models that are trained, their first weights, and the stages they go through."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from sparse_attn.models.params import INTEGER_NAMES, model_rope_tables
from sparse_attn.models.shapes import param_shapes
from sparse_attn.spec import CompressedSpec, Spec, tiny_v4, tiny_v32
from sparse_attn.spec.compressed import first_layers

_RESIDUAL = ("attn.o", "attn.o_b", "mlp.down", "moe.down", "moe.shared_down")
IDENTITY_LOGIT = 4.0  # of a stream's own share in what hyper-connections carry on


class Stage(NamedTuple):
    """Steps of one kind. kind: "dense", everything but the indexers by the dense forward; "warmup", the indexers alone,
    by the dense attention; "sparse", everything, by what the indexers select."""

    kind: str
    length: int
    steps: int


def reader_v32(top_k: int) -> Spec:
    """A byte-level model of DeepSeek-V3.2's architecture that is small enough to ship."""
    base = tiny_v32()
    return replace(
        base, name="reader_v32", hidden_size=256, q_lora=128, dense_intermediate_size=512,
        index=replace(base.index, top_k=top_k),
    )  # fmt: skip


def reader_v4(top_k: int) -> CompressedSpec:
    """The same of DeepSeek-V4's, with all three kinds of layer."""
    base = tiny_v4()
    kinds = ("window", "window", "indexed", "full", "indexed", "window")
    return replace(
        base, name="reader_v4", hidden_size=192, num_layers=len(kinds), layer_kinds=kinds, num_heads=8, q_lora=128,
        o_lora=96, hash_layers=first_layers(len(kinds), 1), sinkhorn_iterations=8,
        index=replace(base.index, top_k=top_k),
    )  # fmt: skip


MODELS = {"v32": reader_v32, "v4": reader_v4}
TOP_K = {"v32": 128, "v4": 32}


def stages(length: int, dense: int, warmup: int, sparse: int) -> list[Stage]:
    """Dense steps on contexts that double up to ``length``, then indexer warm-up and sparse steps there."""
    shares = {length // 8: 0.15, length // 4: 0.2, length // 2: 0.25, length: 0.4}
    return [
        *(Stage("dense", context, round(dense * share)) for context, share in shares.items()),
        Stage("warmup", length, warmup),
        Stage("sparse", length, sparse),
    ]


def is_index(name: str) -> bool:
    """Whether a weight belongs to an indexer."""
    return ".index." in name


def first_weights(spec: Spec | CompressedSpec, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights to start from, fp32 (tables of experts int32), and the rope tables."""
    drawing = dict(generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32, device="cpu")
    weights = {}
    for name, shape in param_shapes(spec).items():
        if name.endswith(INTEGER_NAMES):
            value = torch.rand(shape[0], spec.moe.num_experts, **drawing).argsort(dim=1)[:, : shape[1]].int()
        else:
            value = _first(name, torch.randn(shape, **drawing), spec)
        weights[name] = value.to(device)
    return weights | {name: table.data for name, table in model_rope_tables(spec, device).items()}


def _first(name: str, noise: torch.Tensor, spec: Spec | CompressedSpec) -> torch.Tensor:
    if name.endswith("norm"):
        return torch.ones_like(noise)
    if name.endswith(("bias", ".sink")):
        return 0.02 * noise if name.endswith("position_bias") else torch.zeros_like(noise)
    if name.endswith(".scale"):
        return torch.full_like(noise, 0.05)
    if name.endswith(".base"):
        return _hyper_base(noise, spec.streams)
    if name == "embed":
        return 0.5 * noise
    fan_in = noise.shape[-2] if name.endswith("w_uv") else noise.shape[-1]
    residual = (2 * spec.num_layers) ** -0.5 if name.endswith(_RESIDUAL) else 1.0
    return noise * residual * fan_in**-0.5


def _hyper_base(noise: torch.Tensor, streams: int) -> torch.Tensor:
    """Gates under which the streams start as one: their mean goes in, the output to all of them, each keeps to
    itself."""
    base = 0.02 * noise
    base[:streams] += -math.log(max(streams - 1, 1e-3))
    if len(base) > streams:
        base[2 * streams :] += IDENTITY_LOGIT * torch.eye(streams, dtype=base.dtype, device=base.device).flatten()
    return base
