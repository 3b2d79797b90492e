"""Hyper-connections: a program per token for the mix, per (token, block of columns) for the merge.

Floors, bytes: the mix reads the streams twice, the second time from a cache, and writes one; the merge reads streams
and output once and writes the streams.
"""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.cast import cast


@triton.jit
def _normalised(comb, AXIS: tl.constexpr, eps):
    return comb / tl.expand_dims(tl.sum(comb, AXIS) + eps, AXIS)


@triton.jit
def mix(
    streams,  # [tokens, COUNT, hidden]
    raw,  # fp32 [tokens, (2 + COUNT) * COUNT]
    base,  # fp32 [(2 + COUNT) * COUNT]
    scale,  # fp32 [3]
    collapsed,  # [tokens, hidden]
    post,  # fp32 [tokens, COUNT]
    comb,  # fp32 [tokens, COUNT, COUNT]
    hidden,
    iterations,
    eps,
    norm_eps,
    stride_streams_token,
    stride_streams_stream,
    stride_raw_token,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, PADDED)
    known = stream < COUNT
    source = streams + token * stride_streams_token + stream.to(tl.int64)[:, None] * stride_streams_stream

    # First reading: the root mean square over all streams of the token.
    squares = tl.zeros([PADDED, COLUMNS], tl.float32)
    for start in range(0, hidden, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = known[:, None] & (column < hidden)[None, :]
        value = tl.load(source + column[None, :], mask=there, other=0.0).to(tl.float32)
        squares += value * value
    rms = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(squares, 1), 0) / (COUNT * hidden) + norm_eps)

    # pre: what each stream gives to the layer. post: what it gets back.
    raw_at = raw + token * stride_raw_token
    a = tl.load(raw_at + stream, mask=known, other=0.0) * rms * tl.load(scale) + tl.load(base + stream, mask=known)
    pre = tl.where(known, tl.sigmoid(a) + eps, 0.0)
    b = tl.load(raw_at + COUNT + stream, mask=known, other=0.0) * rms * tl.load(scale + 1)
    b += tl.load(base + COUNT + stream, mask=known)
    tl.store(post + token * COUNT + stream, 2.0 * tl.sigmoid(b), mask=known)

    # comb: how streams mix. Softmax by row, then columns and rows are normalised by turns (Sinkhorn).
    cell = stream[:, None] * COUNT + stream[None, :]
    real = known[:, None] & known[None, :]
    c = tl.load(raw_at + 2 * COUNT + cell, mask=real, other=0.0) * rms * tl.load(scale + 2)
    c += tl.load(base + 2 * COUNT + cell, mask=real, other=0.0)
    c = tl.where(known[None, :], c, float("-inf"))
    e = tl.exp(c - tl.max(c, 1)[:, None])
    weights = tl.where(real, e / tl.sum(e, 1)[:, None] + eps, 0.0)
    weights = _normalised(weights, 0, eps)
    for _ in range(iterations - 1):
        weights = _normalised(weights, 1, eps)
        weights = _normalised(weights, 0, eps)
    tl.store(comb + token * COUNT * COUNT + cell, weights, mask=real)

    # Second reading: the weighed sum of streams, which the layer takes.
    for start in range(0, hidden, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = known[:, None] & (column < hidden)[None, :]
        value = tl.load(source + column[None, :], mask=there, other=0.0).to(tl.float32)
        total = tl.sum(value * pre[:, None], 0)
        tl.store(collapsed + token * hidden + column, cast(total, collapsed.dtype.element_ty), mask=column < hidden)


@triton.jit
def merge(
    out,  # [tokens, hidden]
    streams,  # [tokens, COUNT, hidden]
    post,  # fp32 [tokens, COUNT]
    comb,  # fp32 [tokens, COUNT, COUNT]
    merged,  # [tokens, COUNT, hidden]
    hidden,
    stride_out_token,
    stride_streams_token,
    stride_streams_stream,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    stream = tl.arange(0, PADDED)
    known = stream < COUNT
    # Each stream gets its share of the output, and of all old streams.
    value = tl.load(out + token * stride_out_token + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(post + token * COUNT + stream, mask=known, other=0.0)[:, None] * value[None, :]
    source = streams + token * stride_streams_token
    for j in tl.static_range(COUNT):
        old = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        source += stride_streams_stream
        weight = tl.load(comb + token * COUNT * COUNT + j * COUNT + stream, mask=known, other=0.0)
        total += weight[:, None] * old[None, :]
    target = merged + token * COUNT * hidden + stream[:, None] * hidden + column[None, :]
    tl.store(target, cast(total, merged.dtype.element_ty), mask=known[:, None] & inside[None, :])
