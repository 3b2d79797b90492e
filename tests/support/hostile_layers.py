"""Calls of attention, the compressor, and what a layer does beside them, with hostile values in legal shapes."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from support import hostile_bytes as oracles
from support.hostile import INF, INT_MAX, INT_MIN, amid, blocks, flag, floats, ints, some
from support.hostile_draws import (
    FLOATS,
    KEY_LAYOUTS,
    NAN,
    ROUNDED,
    free,
    maybe,
    pick,
    slot_mapping,
)
from support.weights import bytes_of

import sparse_attn
from sparse_attn.layout import PlainLayout
from sparse_attn.types import Ragged
from sparse_attn.weight_layout import PackedWeight


def rows_of(draw, tokens, count):
    """Ragged rows of wild indices; sometimes of wild bounds too. What no row names is INT_MAX or a real index."""
    capacity = some(draw, 0, 40)
    if flag(draw):
        bounds = sorted(draw(st.lists(st.integers(0, capacity), min_size=tokens + 1, max_size=tokens + 1)))
    else:
        wild = st.one_of(st.integers(-2, capacity + 2), st.sampled_from((INT_MIN, INT_MAX)))
        bounds = draw(st.lists(wild, min_size=tokens + 1, max_size=tokens + 1))
    indices = ints(draw, (capacity,), 0, max(count - 1, 0))
    return Ragged(amid(draw, indices), amid(draw, torch.tensor(bounds, dtype=torch.int32)))


def named_by(ragged, count):
    return {i for i in ragged.indices.tolist() if 0 <= i < count}


def sink_of(draw, heads):
    return maybe(draw, amid(draw, floats(draw, (heads + some(draw, 0, 2),), spoilt=(INF, -INF))))


ATTENTION = {
    torch.float32: dict(level=(1e-5, 1e-4), loose=(1e-4, 1e-3)),
    torch.bfloat16: dict(level=(4e-3, 2**-7), loose=(8e-3, 2**-6)),
    torch.float16: dict(level=(1e-3, 2**-9), loose=(2e-3, 2**-8)),
}


def sparse_attn_prefill(draw):
    dtype, tokens, heads, d_qk = pick(draw, FLOATS), some(draw, 0, 3), some(draw, 1, 3), some(draw, 1, 24)

    def source():
        count = some(draw, 0, 9)
        ragged = rows_of(draw, tokens, count)
        kv = amid(draw, floats(draw, (count, d_qk), dtype))
        for row in set(range(count)) - named_by(ragged, count):
            kv[row] = NAN
        return kv.unsqueeze(1) if flag(draw) else kv, ragged

    (kv, ragged), (extra_kv, extra_ragged) = source(), source() if flag(draw) else (None, None)
    return dict(
        q=amid(draw, floats(draw, (tokens, heads, d_qk), dtype)), kv=kv, ragged=ragged, scale=pick(draw, (0.3, -0.3, 0.0)),
        d_v=some(draw, 1, d_qk), extra_kv=extra_kv, extra_ragged=extra_ragged, sink=sink_of(draw, heads),
    ), ATTENTION[dtype]  # fmt: skip


def sparse_attn_decode(draw):
    layout, dtype, tokens, heads = pick(draw, KEY_LAYOUTS), pick(draw, FLOATS), some(draw, 0, 3), some(draw, 1, 3)

    def source(layout):
        cache = blocks(draw, layout, some(draw, 0, 3), pick(draw, (1, 3, 4)))
        count = cache.shape[0] * cache.shape[1]
        ragged = rows_of(draw, tokens, count)
        for slot in set(range(count)) - named_by(ragged, count):
            for place in oracles.fields(cache, layout, slot):
                oracles.flat(cache)[place] = 0xFF if cache.dtype == torch.uint8 else NAN
        return cache, ragged, layout

    cache, ragged, layout = source(layout)
    extra = None, None, None
    if flag(draw):
        alike = [layout, PlainLayout("bf16", layout.value_dim, layout.dim - layout.value_dim)]
        extra = source(pick(draw, alike))
    return dict(
        q=amid(draw, floats(draw, (tokens, heads, layout.dim), dtype, scale=0.3)),
        cache=cache,
        ragged=ragged,
        scale=0.3,
        layout=layout,
        extra_cache=extra[0],
        extra_ragged=extra[1],
        extra_layout=extra[2],
        sink=sink_of(draw, heads),
    ), dict(
        level=tuple(30 * x for x in ATTENTION[dtype]["level"]), loose=tuple(30 * x for x in ATTENTION[dtype]["loose"])
    )


def sparse_attn_into(draw):
    given, levels = sparse_attn_decode(draw)
    tokens, heads, _ = given["q"].shape

    def lengths():
        return maybe(draw, amid(draw, ints(draw, (tokens,), 0, 40)))

    given |= dict(
        out=torch.full((tokens, heads, given["layout"].value_dim), NAN, dtype=given["q"].dtype),
        lse=torch.full((tokens, heads), NAN), max_logits=maybe(draw, torch.full((tokens, heads), NAN)),
        lengths=lengths(), extra_lengths=None if given["extra_cache"] is None else lengths(), inf_lse=flag(draw),
    )  # fmt: skip
    written = ("out", "lse") if given["max_logits"] is None else ("out", "lse", "max_logits")
    return given, levels | dict(writes=written)


def merge_attn_states(draw):
    dtype, shape = pick(draw, FLOATS), (some(draw, 1, 4), some(draw, 0, 3), some(draw, 0, 3), some(draw, 1, 20))
    lses = free(draw, floats(draw, shape[:3], scale=3.0, spoilt=(-INF, -INF)))
    outs = floats(draw, shape, dtype)
    outs[lses.isneginf()] = NAN
    return dict(outs=amid(draw, outs), lses=lses, sink=sink_of(draw, shape[2])), ATTENTION[dtype]


# The compressor, experts, streams, sampling.


def compress_and_cache(draw):
    ratio, overlap, layout = pick(draw, ((2, True, PlainLayout("fp32", 8)), (3, False, PlainLayout("fp32", 12)),
                                         (4, True, PlainLayout("fp32", 8))))  # fmt: skip
    width, requests = layout.dim * (1 + overlap), some(draw, 1, 3)
    size = some(draw, 1, 4)
    columns = -(-ratio * (1 + overlap) // size) + some(draw, 0, 1)
    memory = torch.full((requests * columns + 2, size * 2 * width + 3), NAN)
    state = memory[1:-1, : size * 2 * width].unflatten(1, (size, 2 * width))
    state.copy_(floats(draw, state.shape))
    rings = torch.tensor(draw(st.permutations(range(requests * columns))), dtype=torch.int32).reshape(requests, columns)
    wild = ints(draw, rings.shape, 0, 0)
    cache = blocks(draw, layout, some(draw, 0, 3), pick(draw, (1, 3)), fill=False)
    positions, ids = [], []
    for request in draw(st.permutations(range(requests))):
        for _ in range(some(draw, 0, 2)):  # padding
            wild_position = flag(draw)
            positions.append(pick(draw, (-1, INT_MIN)) if wild_position else some(draw, 0, 9))
            ids.append(request if wild_position else pick(draw, (-1, INT_MIN, requests, INT_MAX)))
        first, rows = some(draw, 0, 9), some(draw, 0, 12)
        positions += range(first, first + rows)
        ids += [request] * rows
    tokens = len(ids)
    kv, gate = floats(draw, (tokens, width)), floats(draw, (tokens, width))
    for row, (position, request) in enumerate(zip(positions, ids)):
        if position < 0 or not 0 <= request < requests:
            kv[row], gate[row] = NAN, NAN
    rotated = 2 * some(draw, 1, 4)
    return dict(
        kv=amid(draw, kv), gate=amid(draw, gate), position_bias=amid(draw, floats(draw, (ratio, width))),
        norm_weight=floats(draw, (layout.dim,), pick(draw, FLOATS)),
        positions=free(draw, torch.tensor(positions, dtype=torch.int32)),
        request_ids=free(draw, torch.tensor(ids, dtype=torch.int32)), state=state,
        state_table=amid(draw, torch.where(wild == 0, rings, wild)), cache=cache,
        slot_mapping=slot_mapping(draw, tokens, cache, torch.int64),
        cos_sin=amid(draw, sparse_attn.rope_table(some(draw, 1, 20), rotated, 100.0, device="cpu")), ratio=ratio,
        overlap=overlap, eps=1e-5, rope_start=2 * some(draw, 0, (layout.dim - rotated) // 2),
        hadamard=flag(draw) and layout.dim == 8, layout=layout,
    ), dict(writes=("state", "cache"), level=(1e-4, 1e-4))  # fmt: skip


GATES = (0.0, 0.3, 0.7, 1.1, 1.9, 2.7, -INF, NAN)  # scores far apart, or equal


def biased_grouped_topk(draw):
    groups, size = pick(draw, ((1, 1), (1, 5), (2, 3), (4, 2), (3, 4)))
    tokens, experts, kept = some(draw, 0, 4), groups * size, some(draw, 1, groups)

    def of(shape, values):
        return torch.tensor(draw(st.lists(st.sampled_from(values), min_size=math.prod(shape), max_size=math.prod(shape)))
                            ).float().reshape(shape)  # fmt: skip

    logits = of((tokens, experts), GATES).to(pick(draw, (torch.float32, torch.bfloat16)))
    return dict(
        logits=free(draw, logits), bias=free(draw, of((experts,), (0.0, 0.0, 4.0, -4.0, -INF, NAN))),
        top_k=some(draw, 1, size * kept), num_groups=groups, top_groups=kept, renormalise=flag(draw), routed_scale=2.5,
        score=pick(draw, ("sigmoid", "sqrtsoftplus")),
    ), dict(level=(1e-6, 1e-5))  # fmt: skip


def _small(draw, *shape):
    """Whole numbers of which any sum is exact."""
    values = draw(st.lists(st.integers(-3, 3), min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(values, dtype=torch.float32).reshape(shape)


def linear(draw):
    rows, columns, outputs = some(draw, 0, 4), some(draw, 1, 5), some(draw, 1, 4)
    dtype = pick(draw, (torch.float32, torch.bfloat16))
    return dict(
        x=free(draw, _small(draw, rows, columns).to(dtype)),
        weight=free(draw, _small(draw, outputs, columns).to(dtype)),
        batch_invariant=pick(draw, (False, True)),
    ), dict()


def grouped_linear(draw):
    rows, columns, outputs, groups = some(draw, 0, 5), some(draw, 1, 5), some(draw, 1, 4), some(draw, 1, 4)
    dtype = pick(draw, (torch.float32, torch.bfloat16))
    ends = sorted(draw(st.lists(st.integers(0, rows), min_size=groups, max_size=groups)))
    return dict(
        rows=free(draw, _small(draw, rows, columns).to(dtype)), ends=free(draw, torch.tensor(ends, dtype=torch.int32)),
        weight=free(draw, _small(draw, groups, outputs, columns).to(dtype)), batch_invariant=pick(draw, (False, True)),
    ), dict()  # fmt: skip


def packed_experts(draw):
    """Codes of e2m1 and scales of one: values are halves, few of which a token takes."""
    tokens, k, experts, blocks = some(draw, 0, 3), some(draw, 1, 3), some(draw, 1, 3), some(draw, 1, 2)
    hidden, inner, dtype = 32 * blocks, 32, pick(draw, (torch.float32, torch.bfloat16))
    seed = draw(st.integers(0, 2**20))

    def weight(rows, columns):
        codes = bytes_of(experts, rows, columns // 2, seed=seed)
        scales = torch.full((experts, rows, columns // 32), 121, dtype=torch.uint8)
        return PackedWeight(free(draw, codes), free(draw, scales), "e2m1/1x32/e8m0")

    return dict(
        x=free(draw, _small(draw, tokens, hidden).to(dtype)), weights=free(draw, _small(draw, tokens, k)),
        ids=free(draw, ints(draw, (tokens, k), -1, experts, torch.int32)), gate_up=weight(2 * inner, hidden),
        down=weight(hidden, inner), clamp=pick(draw, (None, 1.5)), batch_invariant=pick(draw, (False, True)),
        num_experts=pick(draw, (None, experts, 1000)),
    ), dict(level=(5e-2, 5e-2) if dtype == torch.bfloat16 else (1e-4, 1e-4))  # fmt: skip


def hash_routed_experts(draw):
    tokens, experts, rows, k = some(draw, 0, 4), some(draw, 1, 5), some(draw, 1, 4), some(draw, 0, 3)
    dtype = pick(draw, (torch.int32, torch.int64))
    return dict(
        logits=free(draw, floats(draw, (tokens, experts), pick(draw, (torch.float32, torch.bfloat16)))),
        tokens=free(draw, ints(draw, (tokens,), 0, rows - 1, dtype)),
        table=free(draw, ints(draw, (rows, k), 0, experts - 1, dtype)), renormalise=flag(draw), routed_scale=1.5,
        score=pick(draw, ("sigmoid", "sqrtsoftplus")),
    ), dict(level=(1e-6, 1e-5))  # fmt: skip


def streams_of(draw, mixes):
    dtype, tokens, count, hidden = pick(draw, FLOATS), some(draw, 0, 3), some(draw, 1, 4), some(draw, 1, 12)
    streams = amid(draw, floats(draw, (tokens, count, hidden), dtype))
    return (
        dtype,
        streams,
        dict(
            fn=amid(draw, floats(draw, (mixes(count), count * hidden))), base=amid(draw, floats(draw, (mixes(count),)))
        ),
    )


def hyper_mix(draw):
    dtype, streams, weights = streams_of(draw, lambda count: (2 + count) * count)
    return dict(
        streams=streams, **weights, scale=floats(draw, (3,)), iterations=some(draw, 1, 4), eps=1e-6, norm_eps=1e-5
    ), dict(level=tuple(10 * x for x in ROUNDED[dtype]))


def hyper_head(draw):
    dtype, streams, weights = streams_of(draw, lambda count: count)
    return dict(streams=streams, **weights, scale=floats(draw, (1,)), eps=1e-6, norm_eps=1e-5), dict(
        level=tuple(10 * x for x in ROUNDED[dtype])
    )


def hyper_merge(draw):
    dtype, streams, _ = streams_of(draw, lambda count: count)
    tokens, count, hidden = streams.shape
    return dict(
        out=amid(draw, floats(draw, (tokens, hidden), dtype)), streams=streams,
        post=free(draw, floats(draw, (tokens, count))), comb=free(draw, floats(draw, (tokens, count, count))),
    ), dict(level=tuple(10 * x for x in ROUNDED[dtype]))  # fmt: skip
