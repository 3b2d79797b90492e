"""A rank's step under torch.compile: how often it compiles, and the sequence of its operators. Collectives are copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from support.steps import (
    MAX_CONTEXT,
    decode_state,
    filled_caches,
    fresh,
    no_more_compilations,
    plan_of,
    prefill_plan,
    small,
)

from sparse_attn import Model
from sparse_attn.checkpoints.sharding import shard_params
from sparse_attn.framework.torch_private import counters
from sparse_attn.mesh import Mesh, Ranks
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.pipeline.parallel import ranks, rows


@pytest.fixture
def copies(monkeypatch):
    """One process as rank 0 of two, which both hold the same."""
    monkeypatch.setattr(ranks, "all_reduce", lambda value, group: value * 2)
    monkeypatch.setattr(ranks, "all_gather", lambda value, size, group: torch.cat([value] * size))
    monkeypatch.setattr(ranks, "all_to_all", lambda value, size, group: value.clone())


@pytest.mark.few(0)
@pytest.mark.parametrize("mesh", (
    Mesh(context=Ranks(2, 0, "copies")), Mesh(data=Ranks(2, 0, "copies"), expert=Ranks(2, 0, "copies")),
    Mesh(context=Ranks(2, 0, "copies"), data=Ranks(2, 0, "copies"), expert=Ranks(4, 0, "copies")),
    Mesh(tensor=Ranks(2, 0, "copies")),
), ids=("context", "data", "both", "tensor"))  # fmt: skip
@pytest.mark.parametrize("name", ("tiny_glm5", "tiny_v4"))
def test_one_graph_of_a_rank_serves_every_batch_and_length(name, mesh, copies, monkeypatch):
    """As of one process: a compilation, and another for batches of one."""
    monkeypatch.setattr(rows, "SHARDED_KEYS", 1)
    fresh()
    spec = small(name, 3)
    params = shard_params(dict(random_params(spec, seed=0)), mesh)
    model = Model(spec, params, cache_layouts(spec, "fp8"), mesh=mesh)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")

    def check(tokens, plan, batch):
        with torch.no_grad():
            got, want = (run(tokens, filled_caches(model, batch), plan) for run in (compiled, model))
        assert torch.equal(got, want)

    def decode(batch, length, seed=0):
        state = decode_state(batch, length, "cpu", seed, model.has_rings)
        check(state.tokens, plan_of(model, state), batch)

    def prefill(counts, starts, capacity):
        check(torch.arange(sum(counts)) % 251, prefill_plan(model, counts, starts, capacity), len(counts))

    decode(2, 1), decode(1, 5)
    assert counters()["stats"]["unique_graphs"] == 2
    with no_more_compilations():
        for seed, (batch, length) in enumerate(((3, 70), (64, MAX_CONTEXT), (7, 1), (1, MAX_CONTEXT))):
            decode(batch, length, seed)
    prefill([30, 7], [0, 3], 60), prefill([90], [0], 90)
    assert counters()["stats"]["unique_graphs"] <= 4
    with no_more_compilations():
        prefill([5, 80, 11], [100, 0, 9], 300), prefill([64], [128], 192)
    assert not counters()["graph_break"]


def test_op_sequence_of_a_rank_s_decode_layers(copies):
    """A layer that selects, and one that attends by its selection."""
    fresh()
    spec = replace(small("tiny_glm5", 3), num_layers=2, moe_layers=(False, False), index_layers=(True, False))
    mesh, sequence = Mesh(context=Ranks(2, 0, "copies")), []
    model = Model(spec, random_params(spec, seed=0), cache_layouts(spec, "fp8"), mesh=mesh)

    def record(graph, _):
        sequence.extend(node.target.name() for node in graph.graph.nodes if "sparse_attn" in str(node.target))
        return graph

    state = decode_state(2, 9)
    with torch.no_grad():
        torch.compile(model, fullgraph=True, dynamic=True, backend=record)(
            state.tokens, filled_caches(model, 2), plan_of(model, state)
        )
    assert_expected_inline(
        "\n".join(name.removeprefix("sparse_attn::") for name in sequence),
        """\
apply_rope
indexer_k_quant_and_cache
indexer_q_rope_quant
paged_mqa_logits
top_k_per_row
pack_candidates
merge_candidates
compute_global_topk_ragged_indices_and_indptr
apply_rope
write_kv_cache
apply_rope
sparse_attn_decode
merge_attn_states
merge_attn_states
apply_rope
write_kv_cache
apply_rope
sparse_attn_decode
merge_attn_states
merge_attn_states""",
    )
