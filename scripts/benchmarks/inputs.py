"""Random inputs, made on the device they are used on."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_attn.cache import allocate_cache
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, LatentFp8Layout, Layout
from sparse_attn.mxfp4 import mxfp4_quantise
from sparse_attn.types import Ragged

BLOCK = 64
INDEX_DIM = 128
D_QK, D_V = 576, 512
INDEX_LAYOUT, MXFP4_LAYOUT = IndexFp8Layout(INDEX_DIM), IndexMxfp4Layout(INDEX_DIM)
# Powers of two, because FlashMLA multiplies in bf16: raw scales would be rounded there.
LATENT_LAYOUT = LatentFp8Layout(512, 64, scale_rule="pow2")
ELEMENTS_AT_ONCE = 1 << 28


def normal(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values about 0.1, as keys and queries are."""
    return torch.randn(shape, device=device, dtype=dtype).mul_(0.1)


def fp8_normal(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)


def distinct_rows(rows: int, values: int, k: int, device: str) -> torch.Tensor:
    """int32 [rows, k]: k distinct values below ``values`` per row, in random order."""
    chosen = torch.empty(rows, k, dtype=torch.int32, device=device)
    for part in chosen.split(max(1, ELEMENTS_AT_ONCE // values)):
        part.copy_(torch.rand(part.shape[0], values, dtype=torch.float32, device=device).topk(k).indices)
    return chosen


def packed(dense: torch.Tensor) -> Ragged:
    """Dense rows [tokens, k] without gaps, as they are."""
    tokens, k = dense.shape
    return Ragged(dense.flatten(), torch.arange(tokens + 1, dtype=torch.int32, device=dense.device) * k)


def filled_cache(layout: Layout, blocks: int, device: str) -> torch.Tensor:
    """[blocks, BLOCK, row] of ``layout`` with normal values."""
    cache = allocate_cache(layout, blocks, BLOCK, device)
    for part in cache.split(max(1, ELEMENTS_AT_ONCE // (4 * BLOCK * layout.dim))):
        slots = torch.arange(part.shape[0] * BLOCK, device=device)
        layout.encode(part, slots, normal(slots.numel(), layout.dim, device=device, dtype=torch.float32))
    return cache


class PrefillIndex(NamedTuple):
    """The last ``rows`` tokens of a context score all of its keys, causally."""

    q: torch.Tensor  # fp8 [rows, heads, INDEX_DIM]
    k: torch.Tensor  # fp8 [context, INDEX_DIM]
    k_scale: torch.Tensor  # fp32 [context]
    weights: torch.Tensor  # fp32 [rows, heads]
    kv_start: torch.Tensor  # int32 [rows]
    kv_end: torch.Tensor  # int32 [rows]


def prefill_index(rows: int, context: int, heads: int, device: str) -> PrefillIndex:
    return PrefillIndex(
        fp8_normal(rows, heads, INDEX_DIM, device=device),
        fp8_normal(context, INDEX_DIM, device=device),
        torch.rand(context, dtype=torch.float32, device=device) + 0.5,
        torch.randn(rows, heads, dtype=torch.float32, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
        torch.arange(context - rows + 1, context + 1, dtype=torch.int32, device=device),
    )


class DecodeIndex(NamedTuple):
    """``sets`` steps of requests that score their own blocks of one pool; tables, queries and weights differ."""

    q: torch.Tensor  # fp8 [sets, requests, next_n, heads, INDEX_DIM]
    weights: torch.Tensor  # fp32 [sets, requests * next_n, heads]
    tables: list[torch.Tensor]  # int32 [requests, context / BLOCK] each
    context_lens: torch.Tensor  # int32 [requests, next_n], the last row of a request sees all of its context


def mxfp4_query(*shape: int, device: str) -> torch.Tensor:
    """Random queries [*shape, MXFP4_LAYOUT.row], a row's heads a block of the layout."""
    *rows, heads = shape
    codes, scales = mxfp4_quantise(torch.randn(*shape, INDEX_DIM, dtype=torch.float32, device=device))
    block = torch.cat([codes.flatten(-2), scales.flatten(-2)], -1)
    return block.view(*rows, heads, MXFP4_LAYOUT.row)


def decode_index(
    sets: int, requests: int, next_n: int, context: int, pool: int, heads: int, device: str
) -> DecodeIndex:
    """pool: blocks there are."""
    blocks = context // BLOCK
    shuffled = torch.randperm(pool, device=device).to(torch.int32)
    firsts = [index * requests * blocks % max(1, pool - requests * blocks + 1) for index in range(sets)]
    behind = torch.arange(1 - next_n, 1, dtype=torch.int32, device=device)
    return DecodeIndex(
        fp8_normal(sets, requests, next_n, heads, INDEX_DIM, device=device),
        torch.randn(sets, requests * next_n, heads, dtype=torch.float32, device=device),
        [shuffled[first : first + requests * blocks].view(requests, blocks).clone() for first in firsts],
        (context + behind).repeat(requests, 1),
    )
