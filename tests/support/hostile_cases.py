"""Calls of every public function with hostile values in legal shapes, and what they should give."""

from __future__ import annotations

import inspect

import torch
from hypothesis import strategies as st
from support import hostile_layer_oracles as layer_oracles
from support import hostile_layers as layers
from support import hostile_oracles as oracles
from support.hostile import INF, INT_MAX, INT_MIN, Call, amid, blocks, codes, flag, floats, ints, monotone, some
from support.hostile_draws import (
    FLOATS,
    INDEX_LAYOUTS,
    KEY_LAYOUTS,
    NAN,
    ROUNDED,
    free,
    maybe,
    pick,
    slot_mapping,
    table,
)
from support.index_topk import mxfp4_query

import sparse_attn
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, PlainLayout
from sparse_attn.mxfp4 import mxfp4_quantise
from sparse_attn.testing.ops import public_functions
from sparse_attn.types import StepPlan


def indexer_k_quant_and_cache(draw):
    layout, tokens = pick(draw, INDEX_LAYOUTS), some(draw, 0, 6)
    cache = blocks(draw, layout, some(draw, 0, 3), pick(draw, (1, 3, 4)), fill=flag(draw))
    slots = slot_mapping(draw, some(draw, 0, tokens), cache, pick(draw, (torch.int64, torch.int32)))
    k = floats(draw, (tokens, layout.dim), pick(draw, FLOATS), scale=pick(draw, (1e-6, 1.0, 300.0)))
    count = cache.shape[0] * cache.shape[1]
    for row in range(tokens):
        if row >= len(slots) or not 0 <= slots[row] < count:
            k[row] = NAN
    return dict(k=amid(draw, k), cache=cache, slot_mapping=slots, layout=layout), dict(writes=("cache",))


def write_kv_cache(draw):
    layout, tokens = pick(draw, KEY_LAYOUTS), some(draw, 0, 6)
    cache = blocks(draw, layout, some(draw, 0, 3), pick(draw, (1, 3, 4)), fill=flag(draw))
    slots = slot_mapping(draw, some(draw, 0, tokens), cache, pick(draw, (torch.int64, torch.int32)))
    dtype, count = pick(draw, FLOATS), cache.shape[0] * cache.shape[1]
    values = floats(draw, (tokens, layout.dim), dtype, scale=pick(draw, (1e-6, 1.0, 300.0)))
    for row in range(tokens):
        if row >= len(slots) or not 0 <= slots[row] < count:
            values[row] = NAN
    if flag(draw):  # two views of one tensor, as models make them
        latent, rope = values.split([layout.latent, layout.rope], 1)
    else:
        latent, rope = amid(draw, values[:, : layout.latent].clone()), amid(draw, values[:, layout.latent :].clone())
    return dict(latent=latent, rope=rope, cache=cache, slot_mapping=slots, layout=layout), dict(writes=("cache",))


def gather_indexer_k(draw):
    layout, requests, columns, size = (
        pick(draw, INDEX_LAYOUTS),
        some(draw, 0, 4),
        some(draw, 0, 3),
        pick(draw, (1, 3, 4)),
    )
    cache = blocks(draw, layout, some(draw, 0, 3), size)
    kv_indptr = monotone(draw, requests, columns * size + 2)
    capacity = max(int(kv_indptr[-1]) + some(draw, -3, 5), 0)
    return dict(cache=cache, block_table=table(draw, requests, columns, len(cache)), kv_indptr=amid(draw, kv_indptr),
                capacity=capacity, layout=layout), {}  # fmt: skip


def gather_kv_cache(draw):
    layout, requests, columns, size = pick(draw, KEY_LAYOUTS), some(draw, 0, 4), some(draw, 0, 3), pick(draw, (1, 3, 4))
    cache = blocks(draw, layout, some(draw, 0, 3), size)
    kv_indptr = monotone(draw, requests, columns * size + 2)
    capacity = max(int(kv_indptr[-1]) + some(draw, -3, 5), 0)
    starts = maybe(draw, amid(draw, ints(draw, (requests,), 0, 9, wild=(-1, -7, INT_MIN))))
    dtype = pick(draw, FLOATS)
    level = None if isinstance(layout, PlainLayout) and layout.dtype == dtype else ROUNDED[dtype]
    return dict(cache=cache, block_table=table(draw, requests, columns, len(cache)), kv_indptr=amid(draw, kv_indptr),
                capacity=capacity, layout=layout, starts=starts, dtype=dtype), dict(level=level)  # fmt: skip


# Queries and rotation.


def turns(draw, tokens, dim):
    """(positions, cos_sin, start, interleaved) for vectors of ``dim``."""
    width, rows = 2 * some(draw, 1, dim // 2), some(draw, 1, 6)
    cos_sin = amid(draw, sparse_attn.rope_table(rows, width, 100.0, device="cpu"))
    dtype = pick(draw, (torch.int32, torch.int64))
    positions = free(draw, ints(draw, (tokens,), 0, rows, dtype))
    return dict(positions=positions, cos_sin=cos_sin, start=some(draw, 0, dim - width), interleaved=flag(draw))


def apply_rope(draw):
    dtype = pick(draw, FLOATS)
    shape = (some(draw, 0, 4), some(draw, 0, 3), 8) if flag(draw) else (some(draw, 0, 4), 10)
    x = free(draw, floats(draw, shape, dtype))
    turned = turns(draw, shape[0], shape[-1])
    for row, position in enumerate(turned["positions"].tolist()):
        if not 0 <= position < turned["cos_sin"].shape[0]:
            x[row, ..., turned["start"] : turned["start"] + turned["cos_sin"].shape[1]] = NAN
    return dict(x=x, **turned, inverse=flag(draw)), dict(level=ROUNDED[dtype])


def hadamard_transform(draw):
    dtype = pick(draw, FLOATS)
    return dict(x=free(draw, floats(draw, (some(draw, 0, 3), 2 ** some(draw, 0, 4)), dtype))), dict(
        level=ROUNDED[dtype]
    )


def indexer_q_rope_quant(draw):
    layout, dtype, tokens, heads = pick(draw, INDEX_LAYOUTS), pick(draw, FLOATS), some(draw, 0, 4), some(draw, 0, 3)
    dim = layout.dim
    q = free(draw, floats(draw, (tokens, heads, dim), dtype))
    weights = free(draw, floats(draw, (tokens, heads), pick(draw, FLOATS)))
    turned = turns(draw, tokens, dim)
    for row, position in enumerate(turned["positions"].tolist()):
        if not 0 <= position < turned["cos_sin"].shape[0]:
            q[row], weights[row] = NAN, NAN
    coarse = ROUNDED[dtype] if dtype != torch.float32 else ROUNDED[getattr(layout, "dtype", dtype)] \
        if isinstance(layout, PlainLayout) else ROUNDED[dtype]  # fmt: skip
    return dict(
        q=q, weights=weights, **turned, hadamard=flag(draw) and dim & (dim - 1) == 0, weight_scale=0.7, layout=layout
    ), dict(level=tuple(4 * bound for bound in coarse))


# Scores.


def mqa(draw, fp8: bool):
    rows, keys, heads, dim = some(draw, 0, 4), some(draw, 0, 9), some(draw, 1, 5), pick(draw, (8, 20, 32))
    spoilt = (NAN, INF, -INF) if flag(draw) else ()
    if fp8:
        nan = bool(spoilt)
        q, k = codes(draw, (rows, heads, dim), nan), codes(draw, (keys, dim), nan)
        flavour = pick(draw, ("e4m3fn", "e4m3fnuz"))
        k_scale = free(draw, floats(draw, (keys,)).abs().exp2() * 1e-3)
        given = dict(k_scale=k_scale, flavour=flavour)
    else:
        dtype = pick(draw, FLOATS)
        q, k = floats(draw, (rows, heads, dim), dtype, spoilt=spoilt), floats(draw, (keys, dim), dtype, spoilt=spoilt)
        given = {}
    bounds = dict(
        kv_start=free(draw, ints(draw, (rows,), 0, keys)), kv_end=free(draw, ints(draw, (rows,), 0, keys + 1))
    )
    named = {n for a, b in zip(*map(torch.Tensor.tolist, bounds.values())) for n in range(max(a, 0), min(b, keys))}
    for key in range(keys):
        if key not in named:  # poison in what no row scores
            k[key] = 0x7F if fp8 else NAN
            if fp8:
                given["k_scale"][key] = NAN
    weights = free(draw, floats(draw, (rows, heads)))
    return dict(q=amid(draw, q), k=amid(draw, k), weights=weights, **bounds, **given)


LOGITS = dict(level=(1e-4, 1e-4), loose=(2e-2, 1e-3))


def fp8_mqa_logits(draw):
    return mqa(draw, True), LOGITS


def bf16_mqa_logits(draw):
    return mqa(draw, False), LOGITS


def mxfp4_mqa_logits(draw):
    rows, keys, heads, groups = some(draw, 0, 4), some(draw, 0, 9), some(draw, 1, 5), some(draw, 1, 3)
    spoilt = (NAN, INF, -INF) if flag(draw) else ()
    q = mxfp4_query(floats(draw, (rows, heads, 32 * groups), spoilt=spoilt))
    k, k_scale = mxfp4_quantise(floats(draw, (keys, 32 * groups), spoilt=spoilt))
    start, end = ints(draw, (rows,), 0, keys), ints(draw, (rows,), 0, keys + 1)
    named = {n for a, b in zip(start.tolist(), end.tolist()) for n in range(max(a, 0), min(b, keys))}
    for key in range(keys):
        if key not in named:  # poison in what no row scores
            k_scale[key] = 0xFF
    return dict(
        q=q, k=amid(draw, k), k_scale=amid(draw, k_scale), weights=free(draw, floats(draw, (rows, heads))),
        kv_start=free(draw, start), kv_end=free(draw, end),
    ), LOGITS  # fmt: skip


def mxfp4_paged_mqa_logits(draw):
    return paged(draw, (IndexMxfp4Layout(32), IndexMxfp4Layout(96))), LOGITS


def paged(draw, layouts, sizes=(1, 4)):
    layout = pick(draw, layouts)
    requests, next_n, heads, size = some(draw, 0, 3), some(draw, 1, 3), some(draw, 1, 5), pick(draw, sizes)
    cache = blocks(draw, layout, some(draw, 0, 4), size)
    columns, dim = some(draw, 0, 3), layout.dim
    fp8 = isinstance(layout, IndexFp8Layout)
    if isinstance(layout, IndexMxfp4Layout):
        q = mxfp4_query(floats(draw, (requests * next_n, heads, dim))).unflatten(0, (requests, next_n))
    else:
        shape = (requests, next_n, heads, dim)
        q = amid(draw, codes(draw, shape) if fp8 else floats(draw, shape, layout.dtype))
    most = some(draw, 0, 12)
    return dict(
        q=q, cache=cache, weights=free(draw, floats(draw, (requests * next_n, heads))),
        context_lens=free(draw, ints(draw, (requests, next_n), 0, most)),
        block_table=table(draw, requests, columns, len(cache)), max_context_len=most, layout=layout,
    )  # fmt: skip


def fp8_paged_mqa_logits(draw):
    return paged(draw, INDEX_LAYOUTS[:2]), LOGITS


def bf16_paged_mqa_logits(draw):
    return paged(draw, INDEX_LAYOUTS[2:]), LOGITS


# Selection.


def top_k_per_row(draw):
    rows, width = some(draw, 0, 4), some(draw, 0, 40)
    spoilt = (NAN, INF, -INF, 0.0, -0.0, 1e-45, -3.4e38)
    logits = amid(draw, floats(draw, (rows, width), spoilt=spoilt))
    starts, ends = ints(draw, (rows,), 0, width), ints(draw, (rows,), 0, width)
    return dict(logits=logits, k=some(draw, 1, width + 3), row_starts=maybe(draw, free(draw, starts)),
                row_ends=maybe(draw, free(draw, ends))), {}  # fmt: skip


def ranked(draw):
    """Scores of a rank and their ranges."""
    given = {name: value for name, value in top_k_per_row(draw)[0].items() if name != "k"}
    return given, given["logits"].shape[0]


def digit_state(draw, rows, bits, digits):
    """Digits found so far, and sums of the next one: mostly none, some of each kind of score."""
    prefix = (torch.tensor([pick(draw, (0x3F800000, 0, 0xBF800000)) for _ in range(rows)]).long() + 2**31) % 2**32
    prefix = torch.where(prefix >= 2**31, prefix, 2**32 - 1 - prefix) >> (32 - bits)
    sums = ints(draw, (rows, digits), 0, 1)
    return dict(sums=sums, state=torch.stack([prefix, torch.arange(rows) + 1], 1).to(torch.int32))


def count_digits(draw):
    given, rows = ranked(draw)
    level = some(draw, 0, 2)
    before = digit_state(draw, rows, 11 * (level - 1), 2048) if level else {}
    return dict(**given, **before, k=some(draw, 1, 40), level=level), {}


def count_ties(draw):
    given, rows = ranked(draw)
    return dict(**given, **digit_state(draw, rows, 22, 1024), block_size=pick(draw, (1, 3, 8, 300))), {}


def take_winners(draw):
    given, rows = ranked(draw)
    ranks, block_size, width = some(draw, 1, 3), pick(draw, (1, 3, 8, 300)), given["logits"].shape[1]
    dtype = torch.uint8 if block_size < 256 else torch.int32
    ties = ints(draw, (ranks, rows, -(-width // block_size)), 0, min(block_size, 3)).clamp(0, 255).to(dtype)
    key = torch.tensor([pick(draw, (0, 0x3F800000, -(2**31), 2**31 - 1)) for _ in range(rows)]).long()
    state = torch.stack([key, torch.arange(rows) + 1], 1).to(torch.int32)
    own, above = counted(given["logits"], state, given["row_starts"], given["row_ends"], block_size, dtype)
    rank = some(draw, 0, ranks - 1)
    ties[rank] = own
    return dict(
        **given, k=some(draw, 1, width + 3), ties=ties, above=above, state=state, block_size=block_size, rank=rank
    ), {}


def own_highest(given, k):
    """A rank's own k highest, as columns."""
    return oracles.top_k_per_row(given["logits"], k, given["row_starts"], given["row_ends"])


def pack_candidates(draw):
    given, _ = ranked(draw)
    columns = own_highest(given, some(draw, 1, given["logits"].shape[1] + 3))
    del given["row_ends"]
    return dict(**given, columns=columns, block_size=pick(draw, (1, 3, 8, 300))), {}


def merge_candidates(draw):
    """Of ranks with the same scores, each other's rows reversed: many ties."""
    given, _ = ranked(draw)
    ranks, k, block_size = some(draw, 1, 3), some(draw, 1, given["logits"].shape[1] + 3), pick(draw, (1, 3, 8, 300))
    columns, candidates = [], []
    for n in range(ranks):
        of_rank = given | dict(logits=given["logits"].flip(0) if n % 2 else given["logits"])
        columns.append(own_highest(of_rank, k))
        packed = oracles.pack_candidates(of_rank["logits"], columns[-1], of_rank["row_starts"], block_size=block_size)
        candidates.append(packed)
    rank = some(draw, 0, ranks - 1)
    return dict(candidates=torch.stack(candidates), columns=columns[rank], block_size=block_size, rank=rank), {}


def counted(logits, state, row_starts, row_ends, block_size, dtype):
    """Of each block of a rank: (ties, scores above the k-th) [rows, blocks]."""
    own, above = torch.zeros(2, logits.shape[0], -(-logits.shape[1] // block_size), dtype=torch.int32)
    for row in range(logits.shape[0]):
        threshold = int(state[row, 0]) + 2**31
        for column, found in oracles.ordered_keys(logits, row, row_starts, row_ends):
            above[row, column // block_size] += found > threshold
            own[row, column // block_size] += found == threshold and found > 0
    return own.to(dtype), above.to(dtype)


def is_defined(call: Call) -> bool:
    """Whether values belong together, as far as a contract asks for it."""
    if call.function.__name__ in ("pack_candidates", "merge_candidates"):
        return belongs(**call.arguments)
    if call.function.__name__ != "take_winners":
        return True
    ties, above, rank = (call.arguments[name] for name in ("ties", "above", "rank"))
    others = (call.arguments[name] for name in ("logits", "state", "row_starts", "row_ends", "block_size"))
    own, higher = counted(*others, ties.dtype)
    return torch.equal(own, ties[rank]) and torch.equal(higher, above)


def belongs(columns, block_size, logits=None, row_starts=None, candidates=None, rank=0, **_):
    """Whether columns are those of scores, or of the rank's candidates."""
    if logits is not None:
        rows, width = logits.shape
        starts = [0] * rows if row_starts is None else [min(max(int(start), 0), width) for start in row_starts]
        return all(
            columns[r].max() < width - starts[r] and logits[r, starts[r] + columns[r][columns[r] >= 0]].gt(-INF).all()
            for r in range(rows)
        )
    k, dtype = columns.shape[1], torch.uint8 if block_size < 256 else torch.int32
    counts = candidates[..., k:].contiguous().view(dtype).long()
    scores = candidates[..., :k].contiguous().view(torch.float32)
    sound = (counts >= 0).all() and torch.equal(counts.sum(2), scores.gt(-INF).sum(2))
    ascending = all((row[row >= 0].diff() > 0).all() and (row[: (row >= 0).sum()] >= 0).all() for row in columns)
    return bool(sound and ascending) and all(
        torch.equal(torch.bincount(row[row >= 0].long() // block_size, minlength=counts.shape[2]), counts[rank, r])
        for r, row in enumerate(columns)
    )


def whole(values: torch.Tensor) -> torch.Tensor:
    """Small integers: sums of products are exact in any order, with many ties."""
    return (values.float() * 2).round().clamp(-3, 3).to(values.dtype)


def index_topk_prefill(draw):
    given = mqa(draw, False)
    dtype = given["q"].dtype
    given["q"], given["weights"] = whole(given["q"].nan_to_num(0, 1, 1)), whole(given["weights"])
    given["k"] = whole(given["k"].nan_to_num(0, 1, 1)).to(dtype)
    return given | dict(k_scale=None, top_k=some(draw, 1, 12), logits_bytes=some(draw, 0, 2000)), {}


def index_topk_decode_slots(draw):
    return index_topk_decode(draw, (4, 32))


def index_topk_decode(draw, sizes=(1, 4)):
    given = paged(draw, INDEX_LAYOUTS[2:], sizes)
    given["q"], given["weights"] = whole(given["q"]), whole(given["weights"])
    given["cache"].copy_(whole(given["cache"]))
    return given | dict(top_k=some(draw, 1, 12), logits_bytes=some(draw, 0, 2000)), {}


# Ragged indices.


def build_ragged_indices_from_dense(draw):
    tokens, width = some(draw, 0, 5), some(draw, 0, 9)
    lengths, offsets = ints(draw, (tokens,), 0, width), ints(draw, (tokens,), -3, 20)
    return dict(
        indices=free(draw, ints(draw, (tokens, width), -1, 20)), lengths=maybe(draw, free(draw, lengths)),
        num_rows=maybe(draw, some(draw, 0, 25)), row_offsets=maybe(draw, free(draw, offsets)),
    ), {}  # fmt: skip


def mapped(draw, tokens):
    requests, columns = some(draw, 0, 3), some(draw, 0, 3)
    return dict(
        request_ids=free(draw, ints(draw, (tokens,), -1, requests)),
        block_table=table(draw, requests, columns, 9),
        block_size=pick(draw, (1, 3, 4)),
    )


def compute_global_topk_ragged_indices_and_indptr(draw):
    tokens, k = some(draw, 0, 5), some(draw, 0, 6)
    return dict(topk=free(draw, ints(draw, (tokens, k), -1, 12)), **mapped(draw, tokens)), {}


def window_indices(draw):
    tokens = some(draw, 0, 5)
    positions = free(draw, ints(draw, (tokens,), -1, 15, wild=(INT_MIN, -1, INT_MAX - 9)))
    return dict(positions=positions, **mapped(draw, tokens), window=some(draw, 1, 6)), {}


def entry_indices(draw):
    tokens, most = some(draw, 0, 5), some(draw, 0, 12)
    return dict(limits=free(draw, ints(draw, (tokens,), 0, most)), **mapped(draw, tokens), max_entries=most), {}


def combine_topk_swa_indices_ragged(draw):
    tokens, k = some(draw, 0, 5), some(draw, 0, 6)
    return dict(
        topk=maybe(draw, free(draw, ints(draw, (tokens, k), -1, 12))), limits=free(draw, ints(draw, (tokens,), 0, 9)),
        positions=free(draw, ints(draw, (tokens,), -1, 12, wild=(INT_MIN, -1, INT_MAX - 9))),
        entry_offsets=free(draw, ints(draw, (tokens,), -3, 9)), window_offsets=free(draw, ints(draw, (tokens,), -9, 9)),
        window=some(draw, 1, 5), max_entries=some(draw, 0, 7), num_rows=some(draw, 0, 30),
    ), {}  # fmt: skip


# Plans.


def build_step_plan(draw):
    decodes, prefills, next_n = some(draw, 0, 3), some(draw, 0, 3), some(draw, 1, 3)
    rows = draw(st.lists(st.integers(0, 4), min_size=prefills, max_size=prefills))
    tokens = decodes * next_n + sum(rows) + some(draw, 0, 3)
    starts = [0, *torch.tensor([next_n] * decodes + rows).cumsum(0).tolist()] if decodes + prefills else [0]
    lengths = ints(draw, (decodes + prefills,), 0, 9, wild=(INT_MIN, -1, 0))
    own = torch.tensor([0] * decodes + rows, dtype=torch.int32)
    lengths = torch.where(lengths > 0, torch.maximum(lengths, own), lengths)  # fewer tokens than rows are refused
    slots = ints(draw, (tokens,), 0, 50, torch.int64, (-1, 2**63 - 1))  # as slots below -1 are
    return dict(
        query_start_loc=free(draw, torch.tensor(starts, dtype=torch.int32)), seq_lens=free(draw, lengths),
        block_table=table(draw, decodes + prefills, 2, 9), slot_mapping=free(draw, slots), max_context=13,
        num_decodes=decodes, next_n=next_n, kv_capacity=39,
    ), {}  # fmt: skip


def plan(draw):
    decodes, prefills, next_n = some(draw, 0, 2), some(draw, 0, 3), some(draw, 1, 3)
    tokens, requests = decodes * next_n + some(draw, 0, 6), decodes + prefills
    kv_indptr = monotone(draw, prefills, 9)
    zero = torch.zeros(tokens - decodes * next_n, dtype=torch.int32)
    positions = free(draw, ints(draw, (tokens,), -1, 20, wild=(INT_MIN, -1, INT_MAX - 40)))
    return StepPlan(
        request_ids=free(draw, ints(draw, (tokens,), -1, requests)), positions=positions, limits=positions + 1,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64), block_table=table(draw, requests, some(draw, 0, 3), 9),
        context_lens=torch.zeros(decodes, next_n, dtype=torch.int32), kv_indptr=free(draw, kv_indptr), kv_start=zero,
        kv_end=zero, kv_capacity=30, max_context=30,
    )  # fmt: skip


def build_compressed_plan(draw):
    return dict(plan=plan(draw), ratio=some(draw, 1, 4), block_size=some(draw, 1, 3)), {}


def build_window_plan(draw):
    """Of steps as build_step_plan makes them: the plan is plain torch, and no reader of wild values."""
    given, _ = build_step_plan(draw)
    given["seq_lens"] = torch.where(given["seq_lens"] > 0, given["seq_lens"] + 4, given["seq_lens"])
    return dict(plan=sparse_attn.build_step_plan(**given), window=some(draw, 1, 6)), {}


# Attention.


FUNCTIONS = public_functions()
CASES = {
    name: value for name, value in (vars(layers) | globals()).items() if inspect.isfunction(value) and name in FUNCTIONS
}


@st.composite
def calls(draw, name):
    arguments, rest = CASES[name](draw)
    return Call(FUNCTIONS[name], arguments, **rest)


def defaults(function, arguments):
    given = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty and name != "impl"
    }
    return given | arguments


def expected(call: Call):
    """What the oracle makes of a call; it writes into the call's memory."""
    name = call.function.__name__
    given = defaults(call.function, call.arguments)
    if name == "build_step_plan":
        keep = ("query_start_loc", "seq_lens", "slot_mapping", "num_decodes", "next_n")
        ids, positions, limits, slots, kv_indptr, start, end = oracles.step_plan(**{key: given[key] for key in keep})
        decodes, next_n = given["num_decodes"], given["next_n"]
        lens = limits[: decodes * next_n].view(decodes, next_n)
        return ids, positions, limits, slots, given["block_table"], lens, kv_indptr, start, end
    if name == "build_compressed_plan":
        limits, slots, kv_indptr, start, end = oracles.compressed_plan(**given)
        lens = given["plan"].context_lens
        return limits, limits[: lens.numel()].view(lens.shape), slots, kv_indptr, start, end
    if name == "build_window_plan":
        return oracles.window_plan(**given)
    if name in ("fp8_paged_mqa_logits", "bf16_paged_mqa_logits", "mxfp4_paged_mqa_logits"):
        return oracles.paged_mqa_logits(**given)
    if name == "index_topk_prefill":
        logits = oracles.bf16_mqa_logits(*(given[key] for key in ("q", "k", "weights", "kv_start", "kv_end")))
        return oracles.top_k_per_row(logits, given["top_k"], given["kv_start"], given["kv_end"])
    if name in ("index_topk_decode", "index_topk_decode_slots"):
        keep = ("q", "cache", "weights", "context_lens", "block_table", "max_context_len", "layout")
        logits = oracles.paged_mqa_logits(**{key: given[key] for key in keep})
        chosen = oracles.top_k_per_row(logits, given["top_k"])
        if name == "index_topk_decode":
            return chosen
        requests = torch.arange(len(chosen)) // given["q"].shape[1]
        return oracles.compute_global_topk_ragged_indices_and_indptr(
            chosen, requests, given["block_table"], given["cache"].shape[1]
        )
    if name == "indexer_q_rope_quant" and isinstance(given["layout"], IndexFp8Layout):
        return None
    return getattr(oracles if hasattr(oracles, name) else layer_oracles, name)(**given)
