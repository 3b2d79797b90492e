"""Which layouts a model's caches take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparse_attn.framework import checks
from sparse_attn.layout import (
    IndexFp8Layout,
    IndexLayout,
    IndexMxfp4Layout,
    LatentFp8Layout,
    PlainLayout,
    PlanarFp8Layout,
)
from sparse_attn.mxfp4 import MXFP4
from sparse_attn.spec import CompressedSpec, IndexSpec, Spec

CACHE_KINDS = ("fp8", "bf16", "fp32")
INDEX_CACHE_KINDS = (MXFP4, *CACHE_KINDS)
ROWS_PER_BLOCK = 64
PLANAR_GROUP = 64  # values under one scale, where the width allows


@dataclass(frozen=True)
class CacheLayouts:
    """What the bytes of a model's two kinds of cache mean: keys and values, and index keys.

    Attributes:
        kv: of keys and values.
        index: of index keys.
    """

    kv: LatentFp8Layout | PlanarFp8Layout | PlainLayout
    index: IndexLayout

    def hadamard(self, index: IndexSpec) -> bool:
        """Whether index queries and keys are Hadamard-transformed: where the model asks, and under MXFP4, for which
        DeepSeek-V4 was trained so."""
        mxfp4 = isinstance(self.index, IndexMxfp4Layout)
        return index.hadamard or (mxfp4 and index.head_dim & (index.head_dim - 1) == 0)


def cache_layouts(spec: Spec | CompressedSpec, kind: str, *, index_kind: str | None = None) -> CacheLayouts:
    """The layouts of ``spec``'s caches: "fp8" (the field's quantised formats), "bf16" or "fp32" (unquantised).

    Args:
        spec: of the model.
        kind: "fp8", "bf16" or "fp32".
        index_kind: that of the index keys, if it is not ``kind``; also "mxfp4", for which their dim is a multiple of
            32.

    Returns:
        CacheLayouts.

    Raises:
        TypeError: no spec, such as a preset's name.
        ValueError: other names.
    """
    if not isinstance(spec, (Spec, CompressedSpec)):
        raise TypeError(f"spec: got {spec!r}, allowed: a Spec or CompressedSpec, such as preset returns")
    for name, value, allowed in (("kind", kind, CACHE_KINDS), ("index_kind", index_kind or kind, INDEX_CACHE_KINDS)):
        if value not in allowed:
            raise ValueError(f"{name}: got {value!r}, allowed: {', '.join(allowed)}")
    index = _index(index_kind or kind, spec.index.head_dim)
    if kind == "fp8":
        return CacheLayouts(_fp8(spec), index)
    if isinstance(spec, CompressedSpec):
        return CacheLayouts(PlainLayout(kind, spec.head_dim), index)
    return CacheLayouts(PlainLayout(kind, spec.kv_lora, spec.rope_dim), index)


def _index(kind: str, dim: int) -> IndexLayout:
    if kind == MXFP4:
        return IndexMxfp4Layout(dim)
    return IndexFp8Layout(dim) if kind == "fp8" else PlainLayout(kind, dim)


def _fp8(spec: Spec | CompressedSpec) -> LatentFp8Layout | PlanarFp8Layout:
    if isinstance(spec, CompressedSpec):
        group = PLANAR_GROUP
        while spec.nope_dim % group:
            group //= 2
        return PlanarFp8Layout(spec.nope_dim, spec.rope_dim, group)
    group = 128 if spec.kv_lora % 128 == 0 else spec.kv_lora
    return LatentFp8Layout(spec.kv_lora, spec.rope_dim, group=group)


def default_block_size(spec: Spec | CompressedSpec) -> int:
    """Tokens that a block of the paged caches covers by default. It holds 64 rows, of the index cache where a model
    pools tokens, or as many times 64 as it takes to hold whole entries of every ratio."""
    if not isinstance(spec, CompressedSpec) or not spec.ratios:
        return ROWS_PER_BLOCK
    first = spec.indexed_ratio if "indexed" in spec.layer_kinds else spec.full_ratio
    return math.lcm(ROWS_PER_BLOCK * first, *spec.ratios)


def check_block_size(spec: Spec | CompressedSpec, block_size: int) -> None:
    """TypeError or ValueError unless paged caches of ``spec`` can have blocks of so many tokens."""
    checks.check_at_least("block_size", block_size, 1)
    for ratio in spec.ratios if isinstance(spec, CompressedSpec) else ():
        if block_size % ratio:
            raise ValueError(f"block_size: got {block_size}, allowed: multiples of the compression ratio {ratio}")


def window_ring(spec: CompressedSpec, step_rows: int) -> int:
    """Tokens a request's ring of raw keys holds, so that the first of ``step_rows`` rows still finds its window after
    all of them were written."""
    return spec.window - 1 + step_rows


def state_ring(spec: CompressedSpec, layer: int, dim: int, next_n: int) -> tuple[int, int]:
    """(tokens, fp32 values a token) of a request's compressor state for entries of ``dim`` values. It holds the tokens
    that an entry pools, and next_n - 1 more, because as many rejected tokens are overwritten."""
    parts = 2 if spec.layer_kinds[layer] == "indexed" else 1
    return parts * spec.ratio(layer) + next_n - 1, 2 * parts * dim
