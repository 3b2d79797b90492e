"""The composition against a dense fp64 oracle that knows nothing of blocks, chunks or ragged lists; planning."""

from dataclasses import replace

import pytest
import torch

from sparse_attn import Model, generate, pipeline, workspace
from sparse_attn.cache import allocate_cache, check_cache
from sparse_attn.framework.target import CPU, H200, target_of
from sparse_attn.layout import IndexFp8Layout, LatentFp8Layout, PlainLayout
from sparse_attn.models.deepseek_v4 import allocate_caches
from sparse_attn.models.params import random_params
from sparse_attn.ops.ragged.step_plans import build_step_plan
from sparse_attn.ops.topk.fused.config import slots_scratch, widths_of_most_scratch
from sparse_attn.pipeline import (
    CACHE_KINDS,
    Bounds,
    CacheLayouts,
    Selection,
    cache_layouts,
    default_block_size,
    workspace_size,
)
from sparse_attn.spec import (
    IndexSpec,
    deepseek_v4_flash,
    deepseek_v4_pro,
    deepseek_v32,
    glm5,
    tiny_glm5,
    tiny_v4,
    tiny_v32,
)
from sparse_attn.types import QuantisedQuery

HEADS, INDEX_HEADS, INDEX_DIM, LATENT, ROPE, TOP_K, BLOCK = 3, 2, 16, 32, 8, 6, 4
SCALE = 0.21
LAYOUTS = CacheLayouts(PlainLayout("fp32", LATENT, ROPE), PlainLayout("fp32", INDEX_DIM))
GENERATOR = torch.Generator().manual_seed(11)


def randn(*shape):
    return torch.randn(shape, generator=GENERATOR)


class World:
    """Requests with keys in dense form and in caches whose unread rows are NaN."""

    def __init__(self, lengths):
        self.lengths = lengths
        width = -(-max(lengths) // BLOCK)
        blocks = torch.randperm(len(lengths) * width + 2, generator=GENERATOR)
        self.block_table = blocks[: len(lengths) * width].int().view(len(lengths), width)
        self.latent = [randn(length, LATENT) for length in lengths]
        self.rope = [randn(length, ROPE) for length in lengths]
        self.index = [randn(length, INDEX_DIM) for length in lengths]
        self.kv_cache = allocate_cache(LAYOUTS.kv, len(blocks), BLOCK, "cpu").fill_(float("nan"))
        self.index_cache = allocate_cache(LAYOUTS.index, len(blocks), BLOCK, "cpu").fill_(float("nan"))

    def slots(self, request, count):
        """Slots of the last ``count`` tokens of a request."""
        positions = torch.arange(self.lengths[request])[-count:]
        return self.block_table[request].long()[positions // BLOCK] * BLOCK + positions % BLOCK

    def step(self, counts, num_decodes, padding=0):
        """(plan, rows): the last counts[r] tokens of each request are this step's; rows lists (request, position)."""
        for request, count in enumerate(counts):  # what earlier steps wrote
            slots = self.slots(request, self.lengths[request])[: self.lengths[request] - count]
            LAYOUTS.kv.encode(self.kv_cache, slots, self.keys(request)[: len(slots)])
            LAYOUTS.index.encode(self.index_cache, slots, self.index[request][: len(slots)])
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        slots = [self.slots(request, count) for request, count in enumerate(counts)]
        plan = build_step_plan(
            starts,
            torch.tensor(self.lengths, dtype=torch.int32),
            self.block_table,
            torch.cat([*slots, torch.full((padding,), -1)]),
            num_decodes=num_decodes,
            next_n=counts[0] if num_decodes else 1,
            kv_capacity=sum(self.lengths[num_decodes:]) + 2,
            max_context=max(self.lengths) + 3,
        )
        rows = [(r, position) for r, n in enumerate(counts) for position in range(self.lengths[r] - n, self.lengths[r])]
        latent = torch.stack([self.latent[r][p] for r, p in rows] + [torch.full((LATENT,), 9.0)] * padding)
        rope = torch.stack([self.rope[r][p] for r, p in rows] + [torch.full((ROPE,), 9.0)] * padding)
        index = torch.stack([self.index[r][p] for r, p in rows] + [torch.full((INDEX_DIM,), 9.0)] * padding)
        pipeline.write_latents(latent, rope, self.kv_cache, plan, layouts=LAYOUTS)
        pipeline.write_index_keys(index, self.index_cache, plan, layouts=LAYOUTS)
        return plan, rows

    def keys(self, request):
        return torch.cat([self.latent[request], self.rope[request]], 1)

    def expected(self, rows, query, q):
        outs, lses = [], []
        for t, (request, position) in enumerate(rows):
            keys = self.index[request][: position + 1].double()
            scores = (query.query[t].double() @ keys.T).relu().T @ query.weights[t].double()
            best = torch.sort(scores, descending=True, stable=True).indices[:TOP_K]
            kv = self.keys(request)[best].double()
            z = q[t].double() @ kv.T * SCALE
            outs.append(z.softmax(-1) @ kv[:, :LATENT])
            lses.append(z.logsumexp(-1))
        return torch.stack(outs).float(), torch.stack(lses).float()


def run(plan, world, query, q, **options):
    selection = pipeline.index_select(query, world.index_cache, plan, layouts=LAYOUTS, top_k=TOP_K, **options)
    output = pipeline.attend(q, world.kv_cache, plan, selection, layouts=LAYOUTS, scale=SCALE, d_v=LATENT)
    return selection, output


def inputs(rows):
    query = QuantisedQuery(randn(rows, INDEX_HEADS, INDEX_DIM), randn(rows, INDEX_HEADS))
    return query, randn(rows, HEADS, LATENT + ROPE)


@pytest.mark.parametrize(
    "lengths, counts, num_decodes, padding",
    [
        ([9, 21, 5], [1, 1, 1], 3, 0),
        ([9, 21, 5], [2, 2, 2], 3, 0),
        ([19, 7], [19, 7], 0, 0),
        ([19, 23], [4, 9], 0, 3),
        ([14, 30, 17, 6], [1, 1, 17, 3], 2, 0),
        ([14, 3, 17], [3, 3, 5], 2, 3),
    ],
)
def test_against_dense_oracle(lengths, counts, num_decodes, padding):
    world = World(lengths)
    plan, rows = world.step(counts, num_decodes, padding)
    query, q = inputs(len(rows) + padding)
    # A byte budget of one row, of a few rows, and of everything.
    for logits_bytes in (1, 300, 1 << 20):
        _, (out, lse) = run(plan, world, query, q, logits_bytes=logits_bytes)
        want_out, want_lse = world.expected(rows, query, q)
        torch.testing.assert_close(out[: len(rows)], want_out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[: len(rows)], want_lse, rtol=1e-5, atol=1e-5)
        assert (out[len(rows) :] == 0).all() and (lse[len(rows) :] == -torch.inf).all()


def test_padded_decode_requests():
    world = World([9, 21, 5])
    plan, rows = world.step([1, 1, 1], 3)
    query, q = inputs(3)
    _, want = run(plan, world, query, q)
    padded = build_step_plan(
        torch.arange(6, dtype=torch.int32),
        torch.tensor([9, 0, 21, 5, -7], dtype=torch.int32),
        torch.cat([world.block_table[:1], torch.full((1, 6), -9, dtype=torch.int32), world.block_table[1:],
                   torch.full((1, 6), 2**31 - 1, dtype=torch.int32)]),
        torch.cat([plan.slot_mapping[:1], torch.tensor([-1]), plan.slot_mapping[1:], torch.tensor([-1])]),
        num_decodes=5, max_context=24,
    )  # fmt: skip
    at = torch.tensor([0, 2, 3])
    wide, wide_q = inputs(5)
    for whole, part in ((wide.query, query.query), (wide.weights, query.weights), (wide_q, q)):
        whole[at] = part
    _, got = run(padded, world, wide, wide_q)
    assert torch.equal(got.out[at], want.out) and torch.equal(got.lse[at], want.lse)
    assert (got.out[[1, 4]] == 0).all() and (got.lse[[1, 4]] == -torch.inf).all()


def test_a_selection_serves_other_layers():
    """Layers without an indexer attend by the last selection, over their own cache."""
    world, other = World([14, 30, 17]), World([14, 30, 17])
    other.block_table = world.block_table
    plan, rows = world.step([1, 6, 17], 1)
    other.step([1, 6, 17], 1)
    query, q = inputs(len(rows))
    selection, _ = run(plan, world, query, q)
    output = pipeline.attend(q, other.kv_cache, plan, selection, layouts=LAYOUTS, scale=SCALE, d_v=LATENT)
    other.index = world.index
    torch.testing.assert_close(output.out, other.expected(rows, query, q)[0], rtol=1e-5, atol=1e-5)


def test_mixed_step_equals_its_parts():
    world = World([14, 30, 17])
    plan, rows = world.step([1, 6, 17], 1)
    query, q = inputs(len(rows))
    selection, output = run(plan, world, query, q)
    decode = pipeline.attend(
        q, world.kv_cache, plan, Selection(selection.decode, None), layouts=LAYOUTS, scale=SCALE, d_v=LATENT
    )
    prefill = pipeline.attend(
        q, world.kv_cache, plan, Selection(None, selection.prefill), layouts=LAYOUTS, scale=SCALE, d_v=LATENT
    )
    assert torch.equal(output.out, torch.cat([decode.out, prefill.out]))
    assert torch.equal(output.lse, torch.cat([decode.lse, prefill.lse]))
    assert output.out.data_ptr() not in (decode.out.data_ptr(), prefill.out.data_ptr())


def test_empty_step():
    plan = build_step_plan(
        torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int64), max_context=8,
    )  # fmt: skip
    world = World([4])
    selection, output = run(plan, world, *inputs(0))
    assert selection == Selection(None, None)
    assert output.out.shape == (0, HEADS, LATENT) and output.lse.shape == (0, HEADS)
    assert output.lse.dtype == torch.float32


def test_cache_layouts():
    assert cache_layouts(deepseek_v32(), "fp8") == CacheLayouts(LatentFp8Layout(512, 64), IndexFp8Layout(128))
    assert cache_layouts(tiny_v32(), "fp8").kv.groups == 1
    assert cache_layouts(tiny_v32(), "bf16").index == PlainLayout("bf16", 32)
    with pytest.raises(ValueError, match="kind: got 'int4', allowed: fp8, bf16, fp32"):
        cache_layouts(tiny_v32(), "int4")


def test_cache_bytes():
    def nbytes(spec, kind, num_blocks, block_size):
        bounds = Bounds(num_blocks, 0, block_size, block_size=block_size)
        return pipeline.cache_bytes(spec, cache_layouts(spec, kind), bounds)

    assert nbytes(deepseek_v32(), "fp8", 1, 64) == 61 * (656 + 132) * 64
    assert nbytes(deepseek_v32(), "bf16", 10, 64) == 61 * (576 + 128) * 2 * 640
    assert nbytes(tiny_glm5(), "fp32", 3, 16) == (6 * 80 + 3 * 32) * 4 * 48
    spec = glm5(4, 3)
    assert nbytes(spec, "fp8", 1, 1) == 78 * 656 + spec.num_index_layers * 132


def test_layers_of_one_kind_take_no_other_cache():
    spec, bounds = replace(tiny_v4(), layer_kinds=("window",) * 5), Bounds(3, 50, 700, block_size=256)
    assert [use.kind for use in pipeline.cache_uses(spec, cache_layouts(spec, "fp8"), bounds)] == ["window"]


def test_cache_bytes_are_those_of_the_tensors():
    spec = tiny_v4()
    for kind, length in (("fp8", 700), ("bf16", 700), ("fp8", 11)):
        bounds = Bounds(3, 50, length, next_n=2, block_size=256)
        model = Model(spec, {"embed": torch.empty(0)}, cache_layouts(spec, kind))
        caches = model.allocate_caches(bounds.num_blocks, 256, requests=3, step_rows=min(50, length), next_n=2)
        tensors = [cache for layers in caches for cache in layers if cache is not None]
        held = sum(cache.untyped_storage().nbytes() for cache in tensors)
        assert held == pipeline.cache_bytes(spec, model.layouts, bounds)


WIDE = 70  # top-k that attention splits over programs when rows are few
SPEC = replace(
    tiny_v32(), num_heads=HEADS, kv_lora=LATENT, rope_dim=ROPE,
    index=IndexSpec(num_heads=INDEX_HEADS, head_dim=INDEX_DIM, top_k=WIDE, rope_interleaved=False),
)  # fmt: skip


def drive(bounds, layouts, device, decodes, prefill_rows):
    """One layer's kernels on a step of ``decodes`` requests and one prefill of ``prefill_rows`` rows, in full-length
    contexts."""
    requests = decodes + (prefill_rows > 0)
    width = -(-bounds.max_model_len // bounds.block_size)
    rows = decodes * bounds.next_n + prefill_rows
    block_table = torch.arange(requests * width, dtype=torch.int32, device=device).view(requests, width)
    starts = [bounds.next_n * request for request in range(decodes + 1)] + [rows] * (prefill_rows > 0)
    plan = build_step_plan(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.full((requests,), bounds.max_model_len, dtype=torch.int32, device=device),
        block_table,
        torch.arange(rows, device=device),
        num_decodes=decodes,
        next_n=bounds.next_n,
        kv_capacity=bounds.max_model_len if bounds.kv_rows is None else bounds.kv_rows,
        max_context=bounds.max_model_len,
        impl="triton",
    )
    kv_cache = allocate_cache(layouts.kv, requests * width, bounds.block_size, device)
    index_cache = allocate_cache(layouts.index, requests * width, bounds.block_size, device)
    query = torch.zeros(rows, INDEX_HEADS, INDEX_DIM, dtype=layouts.index.dtype, device=device)
    weights = torch.ones(rows, INDEX_HEADS, device=device)
    latent, rope, keys, q = (
        torch.ones(rows, *shape, dtype=bounds.dtype, device=device)
        for shape in ((LATENT,), (ROPE,), (INDEX_DIM,), (HEADS, LATENT + ROPE))
    )
    pipeline.write_latents(latent, rope, kv_cache, plan, layouts=layouts, impl="triton")
    pipeline.write_index_keys(keys, index_cache, plan, layouts=layouts, impl="triton")
    selection = pipeline.index_select(
        QuantisedQuery(query, weights), index_cache, plan,
        layouts=layouts, top_k=WIDE, logits_bytes=bounds.logits_bytes, impl="triton",
    )  # fmt: skip
    pipeline.attend(
        q, kv_cache, plan, selection, layouts=layouts, scale=SCALE, d_v=LATENT, batch_invariant=bounds.batch_invariant,
        impl="triton",
    )  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.kernel
@pytest.mark.parametrize("kind", ["fp8", "fp32"])
@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(3, 0, 80, block_size=BLOCK, dtype=torch.float32),
        Bounds(2, 0, 80, next_n=2, block_size=BLOCK, logits_bytes=2 * 4 * 128, dtype=torch.float32),
        Bounds(0, 4, 80, block_size=BLOCK, logits_bytes=1, dtype=torch.float32),
        Bounds(2, 3, 80, block_size=BLOCK, kv_rows=100, dtype=torch.float32),
        Bounds(2, 3, 80, block_size=BLOCK, kv_rows=100, dtype=torch.float32, batch_invariant=True),
    ],
    ids=["decode", "decode of two in chunks", "prefill row by row", "mixed", "batch-invariant"],
)
def test_workspace_size_is_the_high_water_mark(device, bounds, kind):
    layouts = cache_layouts(SPEC, kind)
    planned = workspace_size(SPEC, bounds, target_of(device), layouts)
    owner = workspace.Workspace(planned, device)
    owner.lock()
    with workspace.use(owner):
        for decodes in range(1, bounds.max_batch + 1):
            drive(bounds, layouts, device, decodes, 0)
        for rows in range(1, bounds.max_batched_tokens + 1):
            drive(bounds, layouts, device, 0, rows)
        if bounds.max_batch and bounds.max_batched_tokens:
            drive(bounds, layouts, device, bounds.max_batch, bounds.max_batched_tokens)
    assert owner.high_water == planned


def test_workspace_size():
    bounds = Bounds(64, 8192, 163840)
    size = workspace_size(deepseek_v32(), bounds, H200)
    assert bounds.logits_bytes - 4 * 163840 < size.nbytes < 1.1 * bounds.logits_bytes
    assert size.counters >= 8192
    assert workspace_size(deepseek_v32(), bounds, CPU) == (0, 0)
    assert workspace_size(deepseek_v32(), replace(bounds, logits_bytes=1 << 20), H200).nbytes < size.nbytes
    assert bounds.num_blocks == 64 * 2560


def test_workspace_serves_a_narrower_decode_that_takes_more():
    """Beside its logits, because it has group maxima, than the widest."""
    wide, narrow = (slots_scratch(400, width, 2048, 1 << 30, H200) for width in widths_of_most_scratch(270000))
    assert workspace.size_of(narrow).nbytes > workspace.size_of(wide).nbytes
    planned = workspace_size(deepseek_v32(), Bounds(400, 0, 270000, logits_bytes=1 << 30), H200)
    assert planned.nbytes >= workspace.size_of(narrow).nbytes


@pytest.mark.parametrize(
    "name", ["max_batch", "max_batched_tokens", "max_model_len", "next_n", "block_size", "logits_bytes"]
)
def test_bounds_are_checked(name):
    values = {"max_batch": 1, "max_batched_tokens": 1, "max_model_len": 1} | {name: -1}
    with pytest.raises(ValueError, match=name + ": got -1, allowed: at least"):
        Bounds(**values)


def test_default_block_sizes_of_published_models():
    published = deepseek_v32(), glm5(), deepseek_v4_flash(), deepseek_v4_pro(), tiny_v4()
    assert [default_block_size(spec) for spec in published] == [64, 64, 256, 256, 256]


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_default_blocks_hold_whole_entries_of_every_ratio(kind):
    """Of any two ratios, either of them the larger one, and of one or none."""
    pairs = [(indexed, full) for indexed in (1, 2, 3, 4, 5, 7, 8, 127, 128) for full in (1, 3, 4, 5, 6, 9, 96, 128)]
    for indexed, full in pairs:
        for kinds in (("indexed", "full"), ("window", "full"), ("indexed", "window"), ("window", "window")):
            spec = replace(tiny_v4(), layer_kinds=(*kinds, *kinds[:1] * 3), indexed_ratio=indexed, full_ratio=full)
            spec = replace(spec, index=replace(spec.index, head_dim=34))
            layouts, size = cache_layouts(spec, kind), default_block_size(spec)
            caches = allocate_caches(spec, layouts, 2, size, "meta", requests=1, step_rows=1)
            for paged, layout in ((caches.compressed, layouts.kv), (caches.index, layouts.index)):
                for cache in (cache for cache in paged if cache is not None):
                    check_cache("cache", cache, layout)
            assert "indexed" not in kinds or size // indexed % 64 == 0


@pytest.mark.parametrize("indexed, full", [(3, 5), (4, 6), (4, 96), (6, 4)])
def test_every_pair_of_ratios_generates(indexed, full):
    spec = replace(
        tiny_v4(), num_layers=3, layer_kinds=("window", "indexed", "full"), hash_layers=(True, False, False),
        indexed_ratio=indexed, full_ratio=full,
    )  # fmt: skip
    model = Model(spec, random_params(spec, seed=2), cache_layouts(spec, "fp32"))
    prompt = [n * 7 % 250 for n in range(120)]
    whole = generate(model, [prompt], max_new_tokens=3, keep_logits=True)
    pieces = generate(
        model, [prompt], max_new_tokens=3, keep_logits=True, prefill_tokens=17, block_size=3 * default_block_size(spec)
    )
    assert whole.tokens == pieces.tokens
    torch.testing.assert_close(whole.logits[0], pieces.logits[0], atol=1e-4, rtol=0)
