"""torch.compile of the whole forward: one graph, two compilations for decode, two for prefill, eager's numbers."""

from __future__ import annotations

import contextlib
import textwrap
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from support.steps import (
    BLOCK,
    MAX_CONTEXT,
    check_decode,
    check_step,
    decode_state,
    filled_caches,
    fresh,
    layer_of,
    model_of,
    no_more_compilations,
    plan_of,
    prefill_plan,
    tensors_of,
)

import sparse_attn
from sparse_attn import Model, workspace
from sparse_attn.framework.target import target_of
from sparse_attn.framework.torch_private import counters, mark_static_address
from sparse_attn.generation.batch import REPEATABLE
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import Bounds, cache_layouts, workspace_size
from sparse_attn.spec import preset

CASES = [("tiny_v32", "fp8"), ("tiny_glm5", "fp32"), ("tiny_v4", "fp8")]


def check_prefill(model, compiled, exact):
    before = counters()["stats"]["unique_graphs"]
    device, steps = model.device, 0
    for counts, starts, capacity in (
        ([30, 7], [0, 3], 60),
        ([90], [0], 90),
        ([5, 80, 11], [100, 0, 9], 300),
        ([2, 3], [200, 100], 320),
        ([64], [128], 192),
    ):
        tokens = torch.randint(0, 256, (sum(counts),), generator=torch.Generator().manual_seed(steps)).to(device)
        steps += 1
        with no_more_compilations() if steps > 2 else contextlib.nullcontext():
            check_step(model, compiled, tokens, prefill_plan(model, counts, starts, capacity), len(counts), exact)
    assert counters()["stats"]["unique_graphs"] - before <= 2


@pytest.mark.parametrize("name,layers", [("tiny_v32", 2), pytest.param("tiny_v4", 3, marks=pytest.mark.few(0))])
def test_two_compilations_serve_every_batch_and_length(name, layers):
    fresh()
    model = model_of(name, "fp8", layers=layers)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    check_decode(model, compiled, exact=True)
    check_prefill(model, compiled, exact=True)
    assert not counters()["graph_break"]


def test_inductor_on_cpu():
    """A layer of V4 with an indexer; of V3.2: test_stacked_cache. The other kinds, and a batch of one, a compilation of
    its own, are left to the test above and to the GPU."""
    fresh()
    spec = layer_of("indexed")
    model = Model(spec, random_params(spec, seed=0), cache_layouts(spec, "fp8"))
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    check_decode(model, compiled, exact=False, alone=False)
    assert not counters()["graph_break"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_of_the_top_are_traced(monkeypatch):
    """Those that stand there, one that is loaded when it is first asked for, and one that left."""
    fresh()
    monkeypatch.delitem(vars(sparse_attn), "Sampling", raising=False)

    def step(scores, ends):
        columns = sparse_attn.top_k_per_row(
            scores * sparse_attn.Sampling(temperature=2.0).temperature, 2, row_ends=ends
        )
        return sparse_attn.token_logprobs(scores, columns[:, 0].long()).drawn, sparse_attn.Ragged(columns, ends)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="eager")
    for rows, width in ((2, 8), (3, 9), (5, 40)):
        inputs = torch.randn(rows, width), torch.arange(rows, dtype=torch.int32) + 2
        torch.testing.assert_close(compiled(*inputs), step(*inputs))
    assert counters()["stats"]["unique_graphs"] == 1 and not counters()["graph_break"]


def op_sequence(model, tokens, plan, batch):
    """The library's ops in one compiled step."""
    fresh()
    sequence = []

    def record(graph, _):
        sequence.extend(node.target.name() for node in graph.graph.nodes if "sparse_attn" in str(node.target))
        return graph

    torch.compile(model, fullgraph=True, dynamic=True, backend=record)(tokens, filled_caches(model, batch), plan)
    return textwrap.fill(" ".join(name.removeprefix("sparse_attn::") for name in sequence), 110)


def test_op_sequence_of_a_decode_layer():
    """A dense layer, an index layer and a layer that shares a selection."""
    spec = preset("tiny_glm5")
    spec = replace(spec, num_layers=3, moe_layers=(False, True, True), index_layers=(True, True, False))
    model = Model(spec, random_params(spec, seed=0, device="cpu"), cache_layouts(spec, "fp8"))
    state = decode_state(2, 9)
    assert_expected_inline(
        op_sequence(model, state.tokens, plan_of(model, state), 2),
        """\
apply_rope indexer_k_quant_and_cache indexer_q_rope_quant index_topk_decode_slots apply_rope write_kv_cache
apply_rope sparse_attn_decode apply_rope indexer_k_quant_and_cache indexer_q_rope_quant
index_topk_decode_slots apply_rope write_kv_cache apply_rope sparse_attn_decode biased_grouped_topk apply_rope
write_kv_cache apply_rope sparse_attn_decode biased_grouped_topk""",
    )


def windowed_sequence(kind, prefill=False):
    spec = layer_of(kind)
    model = Model(spec, random_params(spec, seed=0), cache_layouts(spec, "fp8"))
    if prefill:
        return op_sequence(model, torch.zeros(9, dtype=torch.int64), prefill_plan(model, [7, 2], [0, 30], 60), 2)
    state = decode_state(2, 9, rings=True)
    return op_sequence(model, state.tokens, plan_of(model, state), 2)


def test_op_sequence_of_a_window_layer():
    assert_expected_inline(
        windowed_sequence("window"),
        """\
window_indices hyper_mix apply_rope write_kv_cache apply_rope sparse_attn_decode apply_rope hyper_merge
hyper_mix biased_grouped_topk hyper_merge hyper_mix""",
    )


def test_op_sequence_of_an_indexed_layer():
    assert_expected_inline(
        windowed_sequence("indexed"),
        """\
window_indices compressed_plan hyper_mix apply_rope write_kv_cache compress_and_cache compress_and_cache
indexer_q_rope_quant index_topk_decode_slots apply_rope sparse_attn_decode apply_rope hyper_merge hyper_mix
biased_grouped_topk hyper_merge hyper_mix""",
    )


def test_op_sequence_of_a_full_layer():
    assert_expected_inline(
        windowed_sequence("full"),
        """\
window_indices compressed_plan entry_indices hyper_mix apply_rope write_kv_cache compress_and_cache apply_rope
sparse_attn_decode apply_rope hyper_merge hyper_mix biased_grouped_topk hyper_merge hyper_mix""",
    )


def test_op_sequence_of_an_indexed_layer_in_prefill():
    assert_expected_inline(
        windowed_sequence("indexed", prefill=True),
        """\
compressed_plan hyper_mix apply_rope write_kv_cache compress_and_cache compress_and_cache indexer_q_rope_quant
gather_indexer_k index_topk_prefill combine_topk_swa_indices_ragged apply_rope gather_kv_cache gather_kv_cache
sparse_attn_prefill apply_rope hyper_merge hyper_mix biased_grouped_topk hyper_merge hyper_mix""",
    )


def test_no_graph_that_was_compiled_for_other_sizes_is_taken():
    """torch's cache looks at symbols, not at the sizes that reductions were laid out for."""
    total = torch.compile(lambda x: (x * x).sum(-1), fullgraph=True, dynamic=True, options=REPEATABLE)
    for rows in (7, 3000):
        fresh()
        total(torch.ones(rows, 64))
    assert not counters()["inductor"]["fxgraph_cache_hit"]


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check_decode, check_prefill])
@pytest.mark.parametrize("name,cache", CASES)
def test_inductor_on_gpu(name, cache, check):
    fresh()
    model = model_of(name, cache, "cuda", layers=3)
    check(model, torch.compile(model, fullgraph=True, dynamic=True, options=REPEATABLE), exact=False)
    assert not counters()["graph_break"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_reduce_overhead_skips_no_cudagraph(name):
    fresh()
    model = model_of(name, "fp8", "cuda", layers=3)
    bounds = Bounds(max_batch=8, max_batched_tokens=0, max_model_len=MAX_CONTEXT, block_size=BLOCK, dtype=torch.float32)
    size = workspace_size(model.spec, bounds, target_of(model.device), model.layouts)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), workspace.use(workspace.Workspace(size, "cuda")) as owner:
        owner.lock()
        caches, eager_caches = filled_caches(model, 8), filled_caches(model, 8)
        for cache in tensors_of(caches):
            mark_static_address(cache)
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        state = decode_state(8, MAX_CONTEXT, "cuda", rings=model.has_rings)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            plan = plan_of(model, state)
            got, want = compiled(state.tokens, caches, plan), model(state.tokens, eager_caches, plan)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            state.seq_lens[0] = 1 + state.seq_lens[0] % MAX_CONTEXT
    assert counters()["inductor"]["cudagraph_skips"] == 0
