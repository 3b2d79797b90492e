"""Schedulers of tiny models, at sizes at which everything happens in a few steps."""

from __future__ import annotations

import random
from dataclasses import replace

from sparse_attn import Batching, Model
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import CompressedSpec, preset

NAMES = ("tiny_v32", "tiny_glm5", "tiny_v4")
BLOCK = 8


def model_of(name: str, device="cpu", cache="fp32", layers: int = 3) -> Model:
    spec = preset(name)
    if isinstance(spec, CompressedSpec):
        spec = replace(
            spec, num_layers=layers, layer_kinds=("window", "indexed", "full")[:layers], window=8, full_ratio=BLOCK,
            hash_layers=spec.hash_layers[:layers], index=replace(spec.index, top_k=8),
        )  # fmt: skip
    else:
        spec = replace(
            spec, num_layers=layers, moe_layers=spec.moe_layers[:layers], index_layers=spec.index_layers[:layers],
            index=replace(spec.index, top_k=16),
        )  # fmt: skip
    return Model(spec, random_params(spec, seed=0, device=device), cache_layouts(spec, cache))


def batching_of(model, **options) -> Batching:
    small = dict(rows=3, num_blocks=24, max_context=64, block_size=BLOCK, prefill_tokens=16, piece=2, snapshots=3)
    return Batching(model, **(small | options))


def ids(count: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(count)]
