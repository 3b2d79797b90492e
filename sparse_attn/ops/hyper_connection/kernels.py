"""Hyper-connections: a program per token for the mix and the head, per (token, block of columns) for the merge.

Floors, bytes: mix and head read the streams twice, the second time from a cache, and write one; the merge reads streams
and output once and writes the streams.
"""

import triton
import triton.language as tl

from sparse_attn.device.cast import cast


@triton.jit
def _normalised(comb, AXIS: tl.constexpr, eps):
    return comb / tl.expand_dims(tl.sum(comb, AXIS) + eps, AXIS)


@triton.jit
def _streams(at, stride_stream, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """(number, whether there is such a stream, where it starts) of a token's streams."""
    stream = tl.arange(0, PADDED)
    return stream, stream < COUNT, at + stream.to(tl.int64)[:, None] * stride_stream


@triton.jit
def _columns(source, known, start, hidden, COLUMNS: tl.constexpr):
    """(number, which values exist, fp32 values) of a block of columns of all streams."""
    column = start + tl.arange(0, COLUMNS)
    there = known[:, None] & (column < hidden)[None, :]
    return column, there, tl.load(source + column[None, :], mask=there, other=0.0).to(tl.float32)


@triton.jit
def _inverse_rms(squares, count, norm_eps):
    return 1.0 / tl.sqrt_rn(tl.sum(tl.sum(squares, 1), 0) / count + norm_eps)


@triton.jit
def _collapse(to, source, weight, known, hidden, COLUMNS: tl.constexpr):
    """A token's streams, summed with a weight each."""
    for start in range(0, hidden, COLUMNS):
        column, there, value = _columns(source, known, start, hidden, COLUMNS)
        total = tl.sum(value * weight[:, None], 0)
        tl.store(to + column, cast(total, to.dtype.element_ty), mask=column < hidden)


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
):
    token = tl.program_id(0).to(tl.int64)
    stream, known, source = _streams(
        streams + token * stride_streams_token, stride_streams_stream, COUNT, PADDED
    )
    squares = tl.zeros([PADDED, COLUMNS], tl.float32)
    for start in range(0, hidden, COLUMNS):
        column, there, value = _columns(source, known, start, hidden, COLUMNS)
        squares += value * value
    rms = _inverse_rms(squares, COUNT * hidden, norm_eps)

    raw_at = raw + token * stride_raw_token
    a = tl.load(raw_at + stream, mask=known, other=0.0) * rms * tl.load(scale) + tl.load(base + stream, mask=known)
    pre = tl.where(known, tl.sigmoid(a) + eps, 0.0)
    b = tl.load(raw_at + COUNT + stream, mask=known, other=0.0) * rms * tl.load(scale + 1)
    b += tl.load(base + COUNT + stream, mask=known)
    tl.store(post + token * COUNT + stream, 2.0 * tl.sigmoid(b), mask=known)

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

    _collapse(collapsed + token * hidden, source, pre, known, hidden, COLUMNS)


@triton.jit
def head(
    streams,  # [tokens, COUNT, hidden]
    fn,  # fp32 [COUNT, COUNT * hidden]
    base,  # fp32 [COUNT]
    scale,  # fp32 [1]
    collapsed,  # [tokens, hidden]
    hidden,
    eps,
    norm_eps,
    stride_streams_token,
    stride_streams_stream,
    stride_fn_row,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    stream, known, source = _streams(
        streams + token * stride_streams_token, stride_streams_stream, COUNT, PADDED
    )
    squares = tl.zeros([PADDED, COLUMNS], tl.float32)
    raw = tl.zeros([PADDED], tl.float32)
    for start in range(0, hidden, COLUMNS):
        column, there, value = _columns(source, known, start, hidden, COLUMNS)
        squares += value * value
        row = fn + stream[:, None] * hidden + column[None, :]
        for n in tl.static_range(COUNT):
            product = tl.sum(tl.sum(value * tl.load(row + n * stride_fn_row, mask=there, other=0.0), 1), 0)
            raw += tl.where(stream == n, product, 0.0)
    rms = _inverse_rms(squares, COUNT * hidden, norm_eps)
    weight = tl.sigmoid(raw * rms * tl.load(scale) + tl.load(base + stream, mask=known, other=0.0)) + eps
    _collapse(collapsed + token * hidden, source, tl.where(known, weight, 0.0), known, hidden, COLUMNS)


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
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    stream = tl.arange(0, PADDED)
    known = stream < COUNT
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
