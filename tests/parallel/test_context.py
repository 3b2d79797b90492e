"""Context parallelism: a rank's part of a step, and a layer over ranks against the same layer of one process.

Ranks are threads here; test_rank_topk and test_context_generate run processes."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from support.rank_threads import Group, over_threads
from support.steps import small

from sparse_attn import Batching, Model, generate, merge_attn_states, pipeline
from sparse_attn.cache import allocate_cache
from sparse_attn.generation.blocks import slots_of
from sparse_attn.generation.generate import Generation
from sparse_attn.generation.selections import Watch
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, LatentFp8Layout, PlainLayout
from sparse_attn.mesh import ALONE, ONE_RANK, Mesh, Ranks
from sparse_attn.models import deepseek_v4, deepseek_v32
from sparse_attn.models.params import random_params
from sparse_attn.ops.indexer.queries import indexer_q_rope_quant
from sparse_attn.ops.ragged.step_plans import build_step_plan
from sparse_attn.pipeline import Bounds, CacheLayouts, cache_layouts, cache_uses, default_block_size
from sparse_attn.pipeline.bounds import check_rank_scores, fitting_rows
from sparse_attn.pipeline.options import Options
from sparse_attn.pipeline.parallel import ranks as pipeline_ranks
from sparse_attn.pipeline.parallel.context import own_bound, own_plan, own_room, own_slots
from sparse_attn.pipeline.parallel.ranks import all_positions, merge_over_ranks, merged_bytes
from sparse_attn.pipeline.select import Search, choose_decode, choose_over_ranks, choose_prefill
from sparse_attn.spec import preset
from sparse_attn.types import AttentionOutput, QuantisedQuery, StepPlan

INDEX_HEADS, INDEX_DIM, HEADS, LATENT, ROPE, TOP_K, BLOCK, SCALE = 1, 32, 3, 32, 8, 11, 4, 0.2
PLAIN = CacheLayouts(PlainLayout("fp32", LATENT, ROPE), PlainLayout("fp32", INDEX_DIM))
FP8 = CacheLayouts(LatentFp8Layout(LATENT, ROPE, group=16), IndexFp8Layout(INDEX_DIM))
MXFP4 = CacheLayouts(PlainLayout("fp32", LATENT, ROPE), IndexMxfp4Layout(INDEX_DIM))


class Step(NamedTuple):
    """lengths, counts: tokens of each request, and those of this step, its last. The first num_decodes requests
    decode."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    num_decodes: int = 0
    padding: int = 0


STEPS = (
    Step((9, 41, 5, 1), (1, 1, 1, 1), 4), Step((9, 41, 3), (2, 2, 2), 3, 2), Step((1, 37, 20), (1, 37, 3), 0, 1),
    Step((14, 3, 50, 2), (2, 2, 23, 1), 2), Step((1,), (1,)), Step((2, 30), (1, 1), 2),
)  # fmt: skip


def whole_plan(step: Step, size: int) -> StepPlan:
    """Of blocks that ``size`` ranks hold BLOCK positions each of."""
    block, width = BLOCK * size, -(-max(step.lengths) // (BLOCK * size)) + 1
    generator = torch.Generator().manual_seed(3)
    table = torch.randperm(len(step.lengths) * width + 3, generator=generator)[: len(step.lengths) * width].int()
    table = table.view(-1, width)
    for request, length in enumerate(step.lengths):
        table[request, -(-length // block) :] = -1
    slots = [
        table[request].long()[position // block] * block + position % block
        for request, (length, count) in enumerate(zip(step.lengths, step.counts))
        for position in [torch.arange(length - count, length)]
    ]
    return build_step_plan(
        torch.tensor([0, *step.counts]).cumsum(0).int(),
        torch.tensor(step.lengths, dtype=torch.int32),
        table,
        torch.cat([*slots, torch.full((step.padding,), -1)]),
        num_decodes=step.num_decodes,
        next_n=step.counts[0] if step.num_decodes else 1,
        kv_capacity=sum(step.lengths[step.num_decodes :]) + 2,
        max_context=max(step.lengths) + 3,
    )


def filling_plan(step: Step, size: int) -> StepPlan:
    """Of all that earlier steps wrote, and of this step's tokens, in the same blocks."""
    plan = whole_plan(step, size)
    whole = whole_plan(Step(step.lengths, step.lengths), size)
    return whole._replace(block_table=plan.block_table)


class Layer(NamedTuple):
    """All tokens' keys, and the queries of a step's rows."""

    index: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor
    query: QuantisedQuery
    q: torch.Tensor


def layer_of(step: Step, layouts: CacheLayouts, seed: int = 0) -> Layer:
    """One index head: about half of its scores are zero, so that ties fill the rest of most rows' selections."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    tokens, rows = sum(step.lengths), sum(step.counts) + step.padding
    query = indexer_q_rope_quant(
        randn(rows, INDEX_HEADS, INDEX_DIM), randn(rows, INDEX_HEADS).abs(), torch.zeros(rows, dtype=torch.int32),
        torch.cat([torch.ones(1, ROPE // 2), torch.zeros(1, ROPE // 2)], 1), start=0, interleaved=True, hadamard=False,
        weight_scale=1.0, layout=layouts.index,
    )  # fmt: skip
    return Layer(
        randn(tokens, INDEX_DIM), randn(tokens, LATENT), randn(tokens, ROPE), query, randn(rows, HEADS, LATENT + ROPE)
    )


def caches_of(step: Step, layer: Layer, layouts: CacheLayouts, ranks: Ranks, size: int):
    """A rank's index and KV caches, what it does not hold poisoned."""
    plan = filling_plan(step, size)
    block = BLOCK if ranks.size > 1 else BLOCK * size
    plan = own_plan(plan, ranks, block_size=block)
    blocks = int(plan.block_table.max()) + 4
    index, kv = (allocate_cache(layout, blocks, block, "cpu") for layout in (layouts.index, layouts.kv))
    for cache in (index, kv):
        cache.fill_(255 if cache.dtype == torch.uint8 else float("nan"))
    pipeline.write_index_keys(layer.index, index, plan, layouts=layouts)
    pipeline.write_latents(layer.latent, layer.rope, kv, plan, layouts=layouts)
    return index, kv


def run_layer(step: Step, layer: Layer, layouts: CacheLayouts, ranks: Ranks, size: int):
    """(positions of decode rows, of prefill rows, output)."""
    index, kv = caches_of(step, layer, layouts, ranks, size)
    plan = own_plan(whole_plan(step, size), ranks, block_size=BLOCK)
    search = Search(layer.query, index, plan.block_table, plan, layouts.index, TOP_K, Options())
    if ranks.size > 1:
        chosen = choose_over_ranks(search, ranks)
        chosen = [None if c is None else all_positions(c, ranks, block_size=BLOCK) for c in chosen]
    else:
        chosen = [
            choose_decode(search) if step.num_decodes else None,
            choose_prefill(search) if plan.kv_start.shape[0] else None,
        ]
    selection = pipeline.index_select(layer.query, index, plan, layouts=layouts, top_k=TOP_K, ranks=ranks)
    sink = torch.tensor([0.5, -torch.inf, 2.0])
    output = pipeline.attend(
        layer.q, kv, plan, selection, layouts=layouts, scale=SCALE, d_v=LATENT, sink=sink, ranks=ranks
    )
    return *chosen, output


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layouts", (PLAIN, FP8, MXFP4), ids=("fp32", "fp8", "mxfp4"))
@pytest.mark.parametrize("size", (2, 3, 4))
def test_a_layer_over_ranks_selects_what_one_selects(size, layouts):
    """To the bit, and attends to the same keys."""
    for number, step in enumerate(STEPS):
        layer = layer_of(step, layouts, number)
        *want, output = run_layer(step, layer, layouts, ALONE, size)
        for *got, merged in over_threads(size, lambda ranks: run_layer(step, layer, layouts, ranks, size)):
            for one, other in zip(want, got):
                assert (one is None) == (other is None) and (one is None or torch.equal(one, other)), (step, one, other)
            torch.testing.assert_close(merged, output, rtol=1e-5, atol=1e-6)


def test_ties_fill_selections():
    """The test above is about plateaus: rows take some of the keys whose score is zero, and leave others out."""
    step, torn = STEPS[2], 0
    layer = layer_of(step, PLAIN, 2)
    _, chosen, _ = run_layer(step, layer, PLAIN, ALONE, 2)
    for row in range(37):
        scores = (layer.query.query[1 + row, 0] @ layer.index[1 : row + 2].T).relu()
        taken = chosen[1 + row][chosen[1 + row] >= 0].long()
        torn += 0 < int((scores[taken] == 0).sum()) < int((scores == 0).sum())
    assert torn >= 8


@pytest.mark.parametrize("gathered", (True, False))
def test_collectives_of_a_layer(gathered, monkeypatch):
    """One or four select decode and prefill rows together; two merge heads that cannot be sharded."""
    monkeypatch.setattr(pipeline_ranks, "sends_candidates", lambda rows, k, size: gathered)
    step, group = STEPS[3], Group(2)
    layer = layer_of(step, PLAIN)

    def run(ranks):
        index, kv = caches_of(step, layer, PLAIN, ranks, 2)
        plan = own_plan(whole_plan(step, 2), ranks, block_size=BLOCK)
        selection = pipeline.index_select(layer.query, index, plan, layouts=PLAIN, top_k=TOP_K, ranks=ranks)
        pipeline.attend(layer.q, kv, plan, selection, layouts=PLAIN, scale=SCALE, d_v=LATENT, ranks=ranks)

    over_threads(2, run, group)
    rows, decode, prefill = 28, 4, 24
    of_decode = own_bound(53, Ranks(2, 0, "g"), block_size=4) // 4
    of_prefill = -(-own_room(54, 2, Ranks(2, 0, "g"), block_size=4) // 4)
    words = rows * TOP_K + decode * -(-of_decode // 4) + prefill * -(-of_prefill // 4)
    by_digits = [
        ("all_reduce", rows * 2048 * 4), ("all_reduce", rows * 2048 * 4), ("all_reduce", rows * 1024 * 4),
        ("all_gather", decode * of_decode + prefill * of_prefill),
    ]  # fmt: skip
    assert group.sent == [
        *([("all_gather", words * 4)] if gathered else by_digits),
        ("all_gather", rows * HEADS * 4),
        ("all_gather", rows * HEADS * LATENT * 4),
    ]


@pytest.mark.parametrize("tokens", (1, 5))
def test_heads_are_merged_where_they_are_sharded(tokens):
    """As one rank merges all of them, to the bit; what is sent is what is counted."""
    generator, size, heads = torch.Generator().manual_seed(tokens), 3, 6
    outs = torch.randn(size, tokens, heads, 8, generator=generator)
    lses = torch.randn(size, tokens, heads, generator=generator)
    lses[1] = lses[:, 0, :2] = -torch.inf
    sink = torch.randn(heads + 2, generator=generator)
    want, group = merge_attn_states(outs, lses, sink=sink), Group(size)
    for got in over_threads(
        size, lambda own: merge_over_ranks(AttentionOutput(outs[own.rank], lses[own.rank]), own, sink=sink), group
    ):
        assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    share = {"all_gather": size - 1, "all_to_all": (size - 1) / size}
    sent = sum(share[kind] * nbytes for kind, nbytes in group.sent)
    assert sent == merged_bytes(tokens, heads, 8, 4, size) and len(group.sent) == (2 if tokens == 1 else 3)


def test_slots_of_a_rank():
    slots = torch.tensor([-1, 0, 3, 4, 7, 8, 12, 15, 24, -(2**40)])
    own = [own_slots(slots, Ranks(3, rank, "g"), block_size=4).tolist() for rank in range(3)]
    assert own == [
        [-1, 0, 3, -1, -1, -1, 4, 7, 8, -1],
        [-1, -1, -1, 0, 3, -1, -1, -1, -1, -1],
        [-1, -1, -1, -1, -1, 0, -1, -1, -1, -1],
    ]
    assert own_slots(slots, ALONE, block_size=4) is slots


def test_a_plan_of_a_rank_has_room():
    """Whatever the lengths: what a rank holds of every request, of all, and at most a block a request too many."""
    generator = torch.Generator().manual_seed(0)
    for size in (2, 3, 4):
        for _ in range(50):
            count = int(torch.randint(1, 5, (), generator=generator))
            lengths = tuple(torch.randint(1, 60, (count,), generator=generator).tolist())
            plan = whole_plan(Step(lengths, lengths), size)
            parts = [own_plan(plan, Ranks(size, rank, "g"), block_size=BLOCK) for rank in range(size)]
            assert len({(part.kv_capacity, part.max_context) for part in parts}) == 1
            for part in parts:
                held = part.kv_indptr.diff()
                assert int(part.kv_indptr[-1]) <= part.kv_capacity <= sum(lengths) / size + 2 + BLOCK * count
                assert int(held.max()) <= part.max_context and int(part.limits.max()) <= part.max_context
                assert (part.kv_end <= part.kv_indptr[-1]).all() and (part.slot_mapping >= 0).sum() == held.sum()
            assert torch.equal(sum(part.limits for part in parts), plan.limits)
            assert torch.equal(sum(part.kv_indptr for part in parts), plan.kv_indptr)


def test_prefill_steps_of_ranks_fit_the_budget():
    """As many rows as their scores leave room for; the bounds of a step beyond them are refused."""
    spec, mesh = preset("glm5"), Mesh(context=Ranks(2, 0, "g"))
    bounds = Bounds(1, 8192, 131072, mesh=mesh)
    rows = fitting_rows(spec, bounds)
    assert rows == (512 << 20) // (4 * (65536 + 64)) == fitting_rows(spec, replace(bounds, max_batched_tokens=3000))
    assert fitting_rows(spec, replace(bounds, max_batched_tokens=7)) == 7
    assert fitting_rows(spec, replace(bounds, mesh=ONE_RANK)) == 8192
    check_rank_scores(spec, replace(bounds, max_batched_tokens=rows))
    with pytest.raises(ValueError, match=f"0 decode rows .* and {rows + 1} prefill rows against 65600"):
        check_rank_scores(spec, replace(bounds, max_batched_tokens=rows + 1))


@pytest.mark.parametrize("name", ("deepseek_v32", "glm5", "deepseek_v4_flash"))
def test_caches_of_a_rank(name):
    """At most their share and a block a request; rings are whole."""
    spec = preset(name)
    layouts, block = cache_layouts(spec, "fp8"), default_block_size(spec)
    for size, length in ((2, 32768), (8, 131072), (8, 131073), (8, 100), (3, 32767)):
        bounds = Bounds(64, 2048, length, block_size=block)
        sharded = replace(bounds, mesh=Mesh(context=Ranks(size, 1, "g")))
        for whole, own in zip(cache_uses(spec, layouts, bounds), cache_uses(spec, layouts, sharded), strict=True):
            blocks = 0 if whole.kind == "window" or "state" in whole.kind else 64 * -(-length // block)
            if blocks:
                assert own.nbytes <= whole.nbytes / size + 64 * whole.nbytes / blocks
            else:
                assert own == whole


def test_scores_of_a_step_fit_the_budget():
    step = STEPS[0]
    layer, plan = layer_of(step, PLAIN), own_plan(whole_plan(step, 2), Ranks(2, 0, "g"), block_size=BLOCK)
    index, _ = caches_of(step, layer, PLAIN, Ranks(2, 0, "g"), 2)
    with pytest.raises(ValueError, match=r"logits_bytes: got 383, allowed: at least the 384 bytes of 4 decode rows"):
        pipeline.index_select(
            layer.query, index, plan, layouts=PLAIN, top_k=TOP_K, ranks=Ranks(2, 0, "g"), logits_bytes=383
        )


def generated(name: str, cache: str, mesh: Mesh, prefill_tokens: int = 32) -> Generation:
    """Of blocks of 8 or 16 tokens on a rank, so that prompts end on several ranks."""
    spec = small(name, 3) if name == "tiny_v4" else preset(name)
    model = Model(spec, random_params(spec, seed=0), cache_layouts(spec, cache), "reference", mesh=mesh)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (70, 3, 41)]
    block_size = 16 if name == "tiny_v4" else 8
    return generate(
        model, prompts, max_new_tokens=4, prefill_tokens=prefill_tokens, block_size=block_size, keep_logits=True
    )


@pytest.mark.parametrize(
    "name", ("tiny_v4", *(pytest.param(name, marks=pytest.mark.few(0)) for name in ("tiny_v32", "tiny_glm5")))
)
def test_a_model_over_ranks_generates_what_one_does(name):
    want = generated(name, "fp32", ONE_RANK)
    for got in over_threads(3, lambda ranks: generated(name, "fp32", Mesh(context=ranks))):
        assert got.tokens == want.tokens
        assert want.logits
        for own, alone in zip(got.logits, want.logits, strict=True):
            torch.testing.assert_close(own, alone, rtol=0, atol=1e-4)


def step_of_all(model: Model, lengths: list[int], counts: list[int], num_decodes: int, block: int, ring: int):
    """(tokens, plan) of the last counts[n] tokens of each request, of blocks of ``block`` tokens; rings of one block of
    ``ring``."""
    width = -(-(max(lengths) + 2) // block) + 1
    table = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(4)).int().view(-1, width)
    rings = torch.arange(len(lengths) - 1, -1, -1, dtype=torch.int32).unsqueeze(1)
    requests = torch.arange(len(lengths)).repeat_interleave(torch.tensor(counts))
    positions = torch.cat([torch.arange(length - n, length) for length, n in zip(lengths, counts)])
    written = (rings, ring) if model.has_rings else (table, block)
    plan = build_step_plan(
        torch.tensor([0, *counts]).cumsum(0).int(), torch.tensor(lengths, dtype=torch.int32), table,
        slots_of(written[0], requests, positions, written[1]), num_decodes=num_decodes,
        next_n=counts[0] if num_decodes else 1, kv_capacity=sum(lengths[num_decodes:]) + 8,
        max_context=max(lengths) + 2,
    )  # fmt: skip
    tokens = (requests * 31 + positions * 7) % 251
    return tokens, plan._replace(ring_table=rings) if model.has_rings else plan


class Fed(threading.local):
    """What each thread's layers are given in place of their own input, and what that was."""

    given: list[torch.Tensor] | None = None
    seen: list[torch.Tensor]

    def wrap(self, attention):
        def fed(hidden, *args, **kwargs):
            self.seen.append(hidden)
            return attention(hidden if self.given is None else self.given[len(self.seen) - 1], *args, **kwargs)

        return fed


def forwarded(name: str, mesh: Mesh, fed: Fed, given: list[torch.Tensor] | None, in_place: bool):
    """(logits of a mixed step with next_n 2 over filled caches, what every layer was given, what every indexer
    selected). given: let every layer take this in place of its own input."""
    spec = small(name, 3)
    model = Model(spec, random_params(spec, seed=0), cache_layouts(spec, "fp32"), "reference", mesh=mesh)
    module = deepseek_v4 if model.has_rings else deepseek_v32
    block, requests, fed.given, fed.seen = 16, 4, given, []
    caches = model.allocate_caches(60, block * (3 // mesh.context.size), requests=requests, step_rows=64, next_n=2)
    ring = caches.kv[0].shape[1]

    options = dict(prefill_in_place=in_place) if model.has_rings else {}
    selected = []
    for lengths, counts, decodes in (
        ([50, 60, 1, 33], [50, 60, 1, 33], 0), ([52, 62, 3, 34], [2, 2, 2, 1], 3), ([54, 64, 5, 70], [2, 2, 2, 36], 3)
    ):  # fmt: skip
        tokens, plan = step_of_all(model, lengths, counts, decodes, block * 3, ring)
        with Watch(mesh.context) as watch, torch.no_grad():
            logits = module.forward(
                model.params, spec, tokens, caches, plan, layouts=model.layouts, impl="reference", mesh=mesh, **options
            )
        selected += watch.selected
    return logits, fed.seen, selected


@pytest.mark.parametrize(
    "name, in_place",
    (("tiny_glm5", False), ("tiny_v4", False), pytest.param("tiny_v4", True, marks=pytest.mark.few(0))),
)
def test_layers_given_one_process_s_inputs_select_the_same(name, in_place, monkeypatch):
    """To the bit, in prefill, mixed steps and with next_n 2, whatever the layers before rounded."""
    fed = Fed()
    for module in (deepseek_v4, deepseek_v32):
        monkeypatch.setattr(module, "attention", fed.wrap(module.attention))
    logits, given, selected = forwarded(name, ONE_RANK, fed, None, in_place)
    for own, _, chosen in over_threads(3, lambda ranks: forwarded(name, Mesh(context=ranks), fed, given, in_place)):
        torch.testing.assert_close(own, logits, rtol=0, atol=1e-4)
        assert len(chosen) == len(selected) > 0
        assert all(any(torch.equal(one, other) for other in chosen) for one in selected)


@pytest.mark.few(0)
@pytest.mark.parametrize("name", ("tiny_glm5", "tiny_v4"))
def test_batches_over_ranks(name):
    """Of one block size in all: requests that share prefixes, wait for blocks and are preempted, as of one process."""

    def finished(mesh: Mesh) -> list:
        spec = small(name, 3)
        model = Model(spec, random_params(spec, seed=0), cache_layouts(spec, "fp32"), "reference", mesh=mesh)
        batching = Batching(
            model, rows=3, num_blocks=5, max_context=192, block_size=48 // mesh.context.size, prefill_tokens=32,
            snapshots=2,
        )  # fmt: skip
        prompt = [(7 * place) % 251 for place in range(100)]
        for length, new in ((40, 60), (3, 100), (20, 80), (90, 5), (70, 9)):
            batching.submit(prompt[:length], max_new_tokens=new)
        done = sorted(batching.drain())
        batching.submit(prompt[:80], max_new_tokens=4)
        done += batching.drain()
        occupancy = batching.occupancy()
        return [done, occupancy.preempted, occupancy.reused]

    want = finished(ONE_RANK)
    assert want[1] and want[2]
    assert all(got == want for got in over_threads(3, lambda ranks: finished(Mesh(context=ranks))))
