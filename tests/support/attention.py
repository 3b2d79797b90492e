"""Sparse attention as a plain loop, and FlashMLA's cases of decode, over one cache or two."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from conftest import big
from support.caches import filled_cache
from support.extremes import INF
from support.ragged import WILD, ragged_rows

from sparse_attn.layout import PlanarFp8Layout
from sparse_attn.ops.attention import sparse
from sparse_attn.ops.attention.sparse import reference
from sparse_attn.testing import compare
from sparse_attn.types import Ragged

V4 = PlanarFp8Layout(448, 64)
V4_FNUZ = PlanarFp8Layout(448, 64, flavour="e4m3fnuz")
BLOCK_SIZES = (2, 61, 64, 69, 256, 576)


def slow_attention(q, kv, ragged, scale, d_v, sink=None):
    """float64, one row and head at a time."""
    out = torch.zeros(q.shape[0], q.shape[1], d_v, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -INF, dtype=torch.float64)
    for t in range(q.shape[0]):
        row = ragged.indices[int(ragged.indptr[t]) : int(ragged.indptr[t + 1])].tolist()
        row = [i for i in row if 0 <= i < kv.shape[0]]
        if not row:
            continue
        keys = kv[row].double()
        for h in range(q.shape[1]):
            z = keys @ q[t, h].double() * scale
            lse[t, h] = z.logsumexp(0)
            weight = (z - lse[t, h]).exp()
            if sink is not None:
                weight = weight * (1 / (1 + math.exp(min(float(sink[h] - lse[t, h]), 700))))
                if sink[h] == INF:
                    weight = weight * 0
            out[t, h] = weight @ keys[:, :d_v]
    return out, lse


class Case(NamedTuple):
    """Each cache: layout, blocks, block size, bytes or values between blocks, and keys of every request."""

    heads: int
    next_n: int
    first: tuple
    second: tuple | None
    sink: float | None = None  # of every other head; None: no sink
    dtype: torch.dtype = torch.bfloat16
    invalid: bool = False  # all indices are


def cache_of(part, next_n, invalid, seed, device):
    """(cache, ragged, layout) of one half of a case: tokens of a request have as many keys, but keys of their own."""
    layout, blocks, block_size, padding, lengths = part
    ragged = ragged_rows([length for length in lengths for _ in range(next_n)], blocks * block_size, seed, device)
    if invalid:
        wild = WILD.to(device).repeat(-(-ragged.indices.numel() // 4))[: ragged.indices.numel()]
        ragged = Ragged(wild, ragged.indptr)
    return filled_cache(layout, blocks, block_size, ragged, device, seed, padding), ragged, layout


def check_case(case, seed, device, impl="triton"):
    torch.manual_seed(seed)
    main, ragged, layout = cache_of(case.first, case.next_n, case.invalid, seed, device)
    extra, extra_ragged, extra_layout = None, None, None
    if case.second is not None:
        extra, extra_ragged, extra_layout = cache_of(case.second, case.next_n, case.invalid, seed + 1000, device)
    tokens = ragged.indptr.numel() - 1
    q = torch.randn(case.heads, tokens, layout.dim + 16, device=device).to(case.dtype)
    q = q.transpose(0, 1)[..., : layout.dim]
    sink = None
    if case.sink is not None:
        sink = torch.randn(case.heads + 3, device=device)
        sink[::2] = case.sink
    scale = layout.dim**-0.5
    got, *repeats = (
        sparse.sparse_attn_decode(
            q, main, ragged, scale=scale, layout=layout, extra_cache=extra, extra_ragged=extra_ragged,
            extra_layout=extra_layout, sink=sink, impl=impl,
        )
        for _ in range(1 + big(device))
    )  # fmt: skip
    assert all(torch.equal(got.out, again.out) and torch.equal(got.lse, again.lse) for again in repeats)
    others = (None, None, None, "") if extra is None else (extra, *extra_ragged, extra_layout.name)
    want = reference.sparse_attn_decode(q, main, *ragged, scale, layout.name, *others, sink)
    compare.assert_close(got.out, want[0], compare.DECODE_OUT, f"out of {case}")
    compare.assert_close(got.lse, want[1], compare.DECODE_LSE, f"lse of {case}")
    if case.invalid:
        assert not got.out.any() and torch.isneginf(got.lse).all()
