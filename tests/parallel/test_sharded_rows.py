"""Rows of the indexer that ranks with the same keys share: the same selection as of one process, to the bit. Prefill
rows that context ranks share.

Ranks are threads here."""

from __future__ import annotations

import pytest
import torch
from support.rank_threads import over_mesh
from support.steps import decode_state, filled_caches, plan_of, prefill_plan, small

from sparse_attn import Model
from sparse_attn.checkpoints.sharding import shard_params
from sparse_attn.mesh import ALONE, Mesh, planned_mesh
from sparse_attn.models.exchange import step_bytes
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.pipeline.parallel import rows as deal
from sparse_attn.pipeline.parallel.ranks import merge_over_ranks, merge_own_rows, own_rows, shard_rows, whole_rows
from sparse_attn.pipeline.parallel.rows import sharded_bytes, shards_rows
from sparse_attn.spec import preset
from sparse_attn.types import AttentionOutput

STEPS = ((2, 40), (7, 90), (1, 9))  # requests, most tokens of one
PREFILLS = (([30, 7], [0, 3], 60), ([2], [60], 64))


@pytest.mark.few(2)
@pytest.mark.parametrize("cache", ("fp32", "fp8"))
@pytest.mark.parametrize("name", ("tiny_glm5", "tiny_v4"))
@pytest.mark.parametrize("sizes", (dict(tensor=2), dict(tensor=2, context=2)), ids=str)
def test_ranks_that_share_rows_select_what_each_would_alone(sizes, name, cache, monkeypatch):
    spec = small(name, 2 if name == "tiny_v4" else 3)
    params, asked = dict(random_params(spec, seed=0)), []

    def run(mesh: Mesh):
        model = Model(spec, shard_params(params, mesh), cache_layouts(spec, cache), "reference", mesh=mesh)
        found = []
        for batch, length in STEPS:
            state = decode_state(batch, length, "cpu", batch, model.has_rings)
            found.append(model(state.tokens, filled_caches(model, batch), plan_of(model, state)))
        for counts, starts, capacity in PREFILLS:
            plan = prefill_plan(model, counts, starts, capacity)
            found.append(model(torch.arange(sum(counts)) % 251, filled_caches(model, len(counts)), plan))
        return found

    with torch.no_grad():
        want = over_mesh(run, **sizes)
        whole = deal.choose_sharded
        monkeypatch.setattr(deal, "SHARDED_KEYS", 1)
        for module in ("latent", "windowed"):
            monkeypatch.setattr(
                f"sparse_attn.pipeline.{module}.choose_sharded",
                lambda *args, **kw: asked.append(1) or whole(*args, **kw),
            )
        got = over_mesh(run, **sizes)
    assert len(asked) >= 2 * (len(STEPS) - 1 + len(PREFILLS))
    for own, alone in zip(got, want, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(own, alone, strict=True))


def test_when_rows_are_sharded(monkeypatch):
    two, eight = planned_mesh(tensor=2).tensor, planned_mesh(tensor=8).tensor
    model = Model(
        preset("tiny_v32"), dict(random_params(preset("tiny_v32"), 0)), cache_layouts(preset("tiny_v32"), "fp8")
    )
    lone, some = (plan_of(model, decode_state(batch, 9)) for batch in (1, 3))
    prefill = prefill_plan(model, [4, 5], [0, 0], 60)
    assert not any(shards_rows(plan, two) for plan in (lone, some, prefill))
    monkeypatch.setattr(deal, "SHARDED_KEYS", 1)
    assert [shards_rows(plan, two) for plan in (lone, some, prefill)] == [False, True, True]
    assert not shards_rows(some, ALONE)
    assert [shard_rows(units, eight) for units in (2, 3, 16, 17, 64)] == [2, 2, 2, 3, 8]
    assert sharded_bytes(64, 2048, eight) == 7 * 8 * 2048 * 4 and sharded_bytes(1, 2048, eight) == 0
    monkeypatch.undo()
    long, short = (
        step_bytes(
            preset("deepseek_v32"), planned_mesh(tensor=8), 64, torch.bfloat16, max_context=tokens, block_size=64
        )
        for tokens in (131072, 8192)
    )
    assert long["tensor"] - short["tensor"] == 61 * sharded_bytes(64, 2048, eight)


@pytest.mark.parametrize("rows", (2, 7, 12))
@pytest.mark.parametrize("size", (2, 3, 4))
def test_rows_that_are_sharded_and_merged(size, rows):
    """A rank's own rows are those of the whole; what it merges is what all merge, to the bit."""

    def run(mesh: Mesh):
        ranks, generator = mesh.context, torch.Generator().manual_seed(mesh.context.rank)
        local = AttentionOutput(torch.randn(rows, 4, 8, generator=generator), torch.randn(rows, 4, generator=generator))
        local.lse[:, ranks.rank] = -torch.inf
        sink = torch.arange(4.0)
        own, whole = (merge(local, ranks, sink=sink) for merge in (merge_own_rows, merge_over_ranks))
        assert all(torch.equal(mine, own_rows(of_all, ranks)) for mine, of_all in zip(own, whole))
        return torch.equal(whole_rows(own.out, rows, ranks), whole.out)

    assert all(over_mesh(run, context=size))


@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
@pytest.mark.parametrize("sizes", (dict(context=3), dict(context=2, tensor=2, expert=4)), ids=str)
def test_prefill_rows_that_are_sharded_give_the_same_logits(sizes, name, monkeypatch):
    """And so do decode rows behind them: the same keys were written."""
    spec = small(name, 2)
    if spec.moe.num_experts % sizes.get("expert", 1):
        pytest.skip("experts that cannot be sharded")
    params = dict(random_params(spec, seed=0))

    def run(mesh: Mesh):
        model = Model(spec, shard_params(params, mesh), cache_layouts(spec, "fp32"), "reference", mesh=mesh)
        caches, found = filled_caches(model, 2), []
        for counts, starts in (([30, 7], [0, 3]), ([5, 0], [30, 10])):
            plan = prefill_plan(model, counts, starts, 60)
            found.append(model(torch.arange(sum(counts)) % 251, caches, plan))
        state = decode_state(2, 30, "cpu", 0, model.has_rings)
        return [*found, model(state.tokens, caches, plan_of(model, state))]

    with torch.no_grad():
        got = over_mesh(run, **sizes)
        for module in ("deepseek_v32", "deepseek_v4"):
            monkeypatch.setattr(f"sparse_attn.models.{module}.shards_prefill", lambda *_: False)
        want = over_mesh(run, **sizes)
    for own, alone in zip(got, want, strict=True):
        for one, other in zip(own, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    assert all(torch.equal(one, got[0][0]) for one, *_ in got)
