"""What a decode layer launches, seen by the profiler."""

from __future__ import annotations

import collections
from dataclasses import replace

import pytest
import torch
from support.launched import launched

from sparse_attn import DecodeGraph, Model, workspace
from sparse_attn.generation.steps import Decode, decode_plan
from sparse_attn.models.params import random_params
from sparse_attn.ops.indexer.queries import indexer_q_rope_quant
from sparse_attn.pipeline import attend, cache_layouts, index_select, write_index_keys, write_latents
from sparse_attn.spec import preset

BLOCK, WIDTH, BATCH = 64, 64, 8
OURS = """
    attend biased_grouped_topk combine compressed_rows entry_indices indexer_q_rope_quant insert_keys keep merge mix
    pack_rows paged_mqa_logits plan_rows pool select_sampled select_single_cta write_rows""".split()
MAX_CONTEXT = BLOCK * WIDTH


@pytest.mark.gpu
@pytest.mark.parametrize("batch, attends", [(8, 1), (34, 2)])
def test_at_most_six_kernels_from_scores_to_combined_output(batch, attends):
    """Also where attention launches full waves and a tail, both of them split."""
    spec = preset("deepseek_v32")
    layouts = cache_layouts(spec, "fp8")
    index_cache = torch.zeros(batch * WIDTH, BLOCK, layouts.index.row, dtype=torch.uint8, device="cuda")
    kv_cache = torch.zeros(batch * WIDTH, BLOCK, layouts.kv.row, dtype=torch.uint8, device="cuda")
    state = Decode(
        torch.zeros(batch, dtype=torch.int64, device="cuda"),
        torch.full((batch,), 3000, dtype=torch.int32, device="cuda"),
        torch.arange(batch * WIDTH, dtype=torch.int32, device="cuda").view(batch, WIDTH),
        torch.arange(batch + 1, dtype=torch.int32, device="cuda"),
        torch.zeros(0, dtype=torch.int64, device="cuda"),
    )
    plan = decode_plan(state, BLOCK, MAX_CONTEXT)
    index = spec.index
    keys = torch.randn(batch, index.head_dim, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(batch, spec.latent_dim, device="cuda", dtype=torch.bfloat16)
    q_index = torch.randn(batch, index.num_heads, index.head_dim, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(batch, index.num_heads, device="cuda")
    rope = torch.randn(MAX_CONTEXT, spec.rope_dim, device="cuda")
    q = torch.randn(batch, spec.num_heads, spec.latent_dim, device="cuda", dtype=torch.bfloat16)

    def prepare():
        write_index_keys(keys, index_cache, plan, layouts=layouts)
        write_latents(rows[:, : spec.kv_lora], rows[:, spec.kv_lora :], kv_cache, plan, layouts=layouts)
        return indexer_q_rope_quant(
            q_index, weights, plan.positions, rope, start=0, interleaved=False, weight_scale=1.0, layout=layouts.index
        )

    query = prepare()

    def sparse_part():
        selection = index_select(query, index_cache, plan, layouts=layouts, top_k=index.top_k)
        return attend(q, kv_cache, plan, selection, layouts=layouts, scale=spec.softmax_scale, d_v=spec.kv_lora)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), workspace.use(workspace.Workspace((0, 0), "cuda")):
        names, others = launched(sparse_part), launched(prepare)
    assert names == [
        "paged_mqa_logits",
        "select_single_cta",
        *["attend"] * attends,
        "combine",
    ], names
    assert sorted(others) == ["indexer_q_rope_quant", "insert_keys", "write_rows"], others


@pytest.mark.gpu
def test_kernels_of_an_indexed_layer():
    """Two caches at once, from scores to combined output as many as with one; the window's slots serve all layers."""
    spec = preset("deepseek_v4_flash")
    spec = replace(
        spec, num_layers=1, layer_kinds=("indexed",), hash_layers=(False,), vocab_size=64, max_positions=MAX_CONTEXT,
        moe=replace(spec.moe, num_experts=8),
    )  # fmt: skip
    model = Model(spec, random_params(spec, seed=0, device="cuda", dtype=torch.bfloat16), cache_layouts(spec, "fp8"))
    block_size = 4 * BLOCK
    width = MAX_CONTEXT // block_size
    caches = model.allocate_caches(BATCH * width, block_size, requests=BATCH, step_rows=1)
    state = Decode(
        torch.zeros(BATCH, dtype=torch.int64, device="cuda"),
        torch.full((BATCH,), 3000, dtype=torch.int32, device="cuda"),
        torch.arange(BATCH * width, dtype=torch.int32, device="cuda").view(BATCH, width),
        torch.arange(BATCH + 1, dtype=torch.int32, device="cuda"),
        torch.zeros(0, dtype=torch.int64, device="cuda"),
        torch.arange(BATCH, dtype=torch.int32, device="cuda").unsqueeze(1),
    )
    plan = decode_plan(state, caches.kv[0].shape[1], MAX_CONTEXT)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), workspace.use(workspace.Workspace((0, 0), "cuda")):
        names = launched(lambda: model(state.tokens, caches, plan))
    ours = [name for name in names if name in OURS]
    assert ours == [
        "pack_rows", "compressed_rows",  # once a step: the window's slots, the entries' plan
        "mix", "write_rows", "pool", "keep", "pool", "keep", "indexer_q_rope_quant",
        "paged_mqa_logits", "select_single_cta", "attend", "combine",
        "merge", "mix", "biased_grouped_topk", "merge",
        "mix",  # the streams' last
    ], ours  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_a_replayed_step_copies_nothing_to_the_host(name):
    spec = preset(name)
    model = Model(spec, random_params(spec, seed=0, device="cuda"), cache_layouts(spec, "fp8"))
    block = 2 * BLOCK
    caches = model.allocate_caches(WIDTH, block, requests=2, step_rows=1)
    graph = DecodeGraph(model, caches, max_context=MAX_CONTEXT, max_blocks=WIDTH // 2, buckets=(2,))
    table = torch.arange(WIDTH, dtype=torch.int32).view(2, WIDTH // 2)
    rings = torch.arange(2, dtype=torch.int32).unsqueeze(1) if model.has_rings else None
    graph.load(torch.tensor([1, 2]), torch.tensor([1, 1], dtype=torch.int32), table, rings)
    names = collections.Counter(launched(lambda: graph.run(3).wait()))
    copies = {name: count for name, count in names.items() if "Memcpy DtoH" in name}
    assert sum(copies.values()) == 3, copies  # the streamed tokens, one row a step, on a stream of their own
    assert not [name for name in names if "Memcpy HtoD" in name]
