"""Captured decode against eager decode."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from sparse_attn import DecodeGraph, Model, Sampling, workspace
from sparse_attn.framework.target import target_of
from sparse_attn.framework.torch_private import occupy
from sparse_attn.generation.steps import Decode, decode_plan, decode_step
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import Bounds, cache_layouts, workspace_size
from sparse_attn.spec import CompressedSpec, preset

BLOCK, WIDTH = 16, 12
MAX_CONTEXT = BLOCK * WIDTH  # three times the tiny models' top-k


def model_of(name="tiny_v32", cache="fp8") -> Model:
    spec = preset(name)
    if isinstance(spec, CompressedSpec):  # borders of entries, of the window and of the top-k inside the context
        spec = replace(spec, full_ratio=BLOCK, index=replace(spec.index, top_k=16))
    return Model(spec, random_params(spec, seed=0, device="cuda"), cache_layouts(spec, cache))


def caches_of(model, rows):
    return model.allocate_caches(rows * WIDTH, BLOCK, requests=rows, step_rows=1)


def table_of(rows):
    return torch.arange(rows * WIDTH, dtype=torch.int32).reshape(rows, WIDTH)


def rings_of(model, rows):
    return torch.arange(rows, dtype=torch.int32).unsqueeze(1) if model.has_rings else None


def eager_state(tokens, seq_lens, table, rings=None):
    return Decode(
        tokens.cuda(),
        seq_lens.cuda(),
        table.cuda(),
        torch.arange(tokens.shape[0] + 1, dtype=torch.int32, device="cuda"),
        torch.zeros(0, dtype=torch.int64, device="cuda"),
        None if rings is None else rings.cuda(),
    )


def graph_of(model, caches, buckets, sampling=Sampling()) -> DecodeGraph:
    bounds = Bounds(
        max_batch=max(buckets), max_batched_tokens=0, max_model_len=MAX_CONTEXT, block_size=BLOCK, dtype=torch.float32
    )
    size = workspace_size(model.spec, bounds, target_of(model.device), model.layouts)
    return DecodeGraph(
        model,
        caches,
        max_context=MAX_CONTEXT,
        max_blocks=WIDTH,
        buckets=buckets,
        sampling=sampling,
        workspace_size=size,
    )


def eager_tokens(model, caches, state, steps, sampling=Sampling()):
    drawn = []
    for _ in range(steps):
        decode_step(model, caches, state, sampling, MAX_CONTEXT)
        drawn.append(state.tokens.cpu())
    return torch.stack(drawn)


def test_graphs_need_a_gpu():
    spec = preset("tiny_v32")
    caches = Model(spec, {"embed": torch.empty(0)}, cache_layouts(spec, "fp8")).allocate_caches(
        1, 16, requests=1, step_rows=1
    )
    with pytest.raises(ValueError, match="^caches: got device cpu"):
        DecodeGraph(lambda *_: None, caches, max_context=16, max_blocks=1)
    with pytest.raises(TypeError, match="^stop_ids.1.: got 1.5, allowed: an integer"):
        DecodeGraph(lambda *_: None, caches, max_context=16, max_blocks=1, sampling=Sampling(stop_ids=(1, 1.5)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name,cache",
    [("tiny_v32", "fp8"), ("tiny_glm5", "fp32"), ("tiny_v32", "bf16"), ("tiny_v4", "fp8"), ("tiny_v4", "fp32")],
)
def test_captured_at_nothing_replays_to_the_maximum(name, cache):
    """Capture with every row padding; replay from length 1 past top-k to the last position, every step equal to
    eager."""
    model = model_of(name, cache)
    sampling = Sampling(temperature=0.8, seed=3)
    mine, theirs = caches_of(model, 2), caches_of(model, 2)
    graph = graph_of(model, mine, (2,), sampling)
    assert all(not cache.view(torch.uint8).any() for cache in mine.kv)  # the capture wrote nothing
    tokens, seq_lens = torch.tensor([5, 77]), torch.tensor([1, 40], dtype=torch.int32)
    graph.load(tokens, seq_lens, table_of(2), rings_of(model, 2))
    got = graph.run(MAX_CONTEXT - 1).wait()
    state = eager_state(tokens, seq_lens, table_of(2), rings_of(model, 2))
    want = eager_tokens(model, theirs, state, MAX_CONTEXT - 1, sampling)
    live = torch.arange(MAX_CONTEXT - 1).unsqueeze(1) + seq_lens <= MAX_CONTEXT
    assert torch.equal(got[live], want[live])
    torch.cuda.synchronize()
    for a, b in zip((c for layers in mine for c in layers), (c for layers in theirs for c in layers)):
        assert a is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert graph.captures == 1 and graph.replays == MAX_CONTEXT - 1


@pytest.mark.gpu
def test_captured_rows_draw_from_the_streams_they_are_loaded_with():
    """Three copies of one row: streams of their rows, then seeds of their own, then the rows' again, all by one
    capture."""
    model, sampling, steps = model_of(cache="fp32"), Sampling(temperature=2.0, seed=11), 12
    graph = graph_of(model, caches_of(model, 3), (4,), sampling)
    tokens, lens = torch.tensor([9, 9, 9]), torch.ones(3, dtype=torch.int32)
    own = torch.tensor([5, 2**62, 11])
    for seeds in (None, own, None):
        graph.load(tokens, lens, table_of(3), seeds=seeds)
        got = graph.run(steps).wait()
        state = eager_state(tokens, lens, table_of(3))._replace(seeds=None if seeds is None else seeds.cuda())
        assert torch.equal(got, eager_tokens(model, caches_of(model, 3), state, steps, sampling))
        assert len(set(map(tuple, got.T.tolist()))) == 3
        first = got[:, 0] if seeds is None else got[:, 2]
        alone = eager_state(tokens[:1], lens[:1], table_of(1))
        assert torch.equal(first, eager_tokens(model, caches_of(model, 1), alone, steps, sampling)[:, 0])
    for seeds, error in ((own.int(), TypeError), (own[:2], ValueError)):
        with pytest.raises(error, match="^seeds: got"):
            graph.load(tokens, lens, table_of(3), seeds=seeds)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_batches_shrink_and_grow_between_replays(name):
    model = model_of(name)
    mine, theirs = caches_of(model, 5), caches_of(model, 5)
    graph = graph_of(model, mine, (1, 2, 4, 8))
    for rows, steps, start in ((5, 7, 1), (1, 3, 9), (3, 20, 60), (4, 2, 1), (5, 4, 100)):
        tokens = torch.arange(rows) + 40
        seq_lens = torch.full((rows,), start, dtype=torch.int32)
        if rows > 2:
            seq_lens[1] = 0
        rings = rings_of(model, rows)
        graph.load(tokens, seq_lens, table_of(rows), rings)
        got = graph.run(steps).wait()
        want = eager_tokens(model, theirs, eager_state(tokens, seq_lens, table_of(rows), rings), steps)
        live = seq_lens > 0
        assert torch.equal(got[:, live], want[:, live])
    for name, rows in (("tokens", 0), ("tokens", 9)):
        with pytest.raises(ValueError, match=f"^{name}: got {rows} rows"):
            zeros = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int32)
            graph.load(*zeros, table_of(rows), rings_of(model, rows))


@pytest.mark.gpu
def test_rings_are_checked():
    lengths = torch.ones(2, dtype=torch.int32)
    latent, windowed = model_of(), model_of("tiny_v4")
    with pytest.raises(ValueError, match="^ring_table: got a tensor, allowed: None"):
        graph_of(latent, caches_of(latent, 2), (2,)).load(lengths.long(), lengths, table_of(2), rings_of(windowed, 2))
    graph = graph_of(windowed, caches_of(windowed, 2), (2,))
    with pytest.raises(ValueError, match="^ring_table: got None, allowed: a tensor"):
        graph.load(lengths.long(), lengths, table_of(2))
    with pytest.raises(ValueError, match=r"^ring_table: got shape \[1, 1\], allowed: \[2, ring_blocks = 1\]"):
        graph.load(lengths.long(), lengths, table_of(2), rings_of(windowed, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_two_graphs_on_two_streams(name):
    model = model_of(name)
    caches = [caches_of(model, 2) for _ in range(3)]
    graphs = [graph_of(model, pair, (2,)) for pair in caches[:2]]
    assert graphs[0].stream != graphs[1].stream and graphs[0].workspace is not graphs[1].workspace
    tokens, seq_lens = torch.tensor([9, 8]), torch.tensor([1, 2], dtype=torch.int32)
    rings = rings_of(model, 2)
    for graph in graphs:
        graph.load(tokens, seq_lens, table_of(2), rings)
    streams = [graph.run(100) for graph in graphs]  # both in flight
    want = eager_tokens(model, caches[2], eager_state(tokens, seq_lens, table_of(2), rings), 100)
    for stream in streams:
        assert torch.equal(stream.wait(), want)
        assert torch.equal(torch.stack(list(stream)), want)


@pytest.mark.gpu
def test_what_was_loaded_may_be_overwritten():
    model = model_of()
    tokens, seq_lens, table = (
        torch.tensor([9], device="cuda"),
        torch.ones(1, dtype=torch.int32, device="cuda"),
        table_of(1),
    )
    want = eager_tokens(model, caches_of(model, 1), eager_state(tokens.clone(), seq_lens.clone(), table), 5)
    graph = graph_of(model, caches_of(model, 1), (1,))
    with torch.cuda.stream(graph.stream):
        occupy(100_000_000)  # the graph is behind
    graph.load(tokens, seq_lens, table)
    tokens.fill_(8)
    seq_lens.fill_(0)
    assert torch.equal(graph.run(5).wait(), want)


@pytest.mark.gpu
def test_a_graph_may_be_let_go_of_while_its_tokens_are_on_their_way():
    model = model_of()
    tokens, seq_lens = torch.tensor([9]), torch.ones(1, dtype=torch.int32)
    want = eager_tokens(model, caches_of(model, 1), eager_state(tokens, seq_lens, table_of(1)), 20)
    graph = graph_of(model, caches_of(model, 1), (1,))
    graph.load(tokens, seq_lens, table_of(1))
    torch.cuda.synchronize()
    sizes = [
        value.numel()
        for value in vars(graph).values()
        if isinstance(value, torch.Tensor) and value.dtype == torch.int64
    ]
    streams = graph.stream, graph._copies
    with torch.cuda.stream(graph.stream):
        occupy(200_000_000)
    with torch.cuda.stream(graph._copies):
        occupy(1_000_000_000)  # the copies are far behind the steps
    arriving = graph.run(20)
    del graph
    gc.collect()
    for stream in (torch.cuda.current_stream(), streams[0]):  # whoever takes its memory writes over it
        with torch.cuda.stream(stream):
            overwritten = [torch.full((size,), -7, device="cuda") for size in sizes for _ in range(4)]
    assert torch.equal(arriving.wait(), want)
    del overwritten


@pytest.mark.gpu
def test_stop_ids_end_a_row_on_the_device():
    model = model_of()
    tokens, seq_lens = torch.tensor([9]), torch.tensor([1], dtype=torch.int32)
    graph = graph_of(model, caches_of(model, 1), (1,))
    graph.load(tokens, seq_lens, table_of(1))
    free = graph.run(30).wait()[:, 0].tolist()
    stop = free[10]
    caches = caches_of(model, 1)
    graph = graph_of(model, caches, (1,), Sampling(stop_ids=(stop,)))
    graph.load(tokens, seq_lens, table_of(1))
    graph.run(30).wait()
    torch.cuda.synchronize()
    fed = free.index(stop) + 1
    written = caches.kv[0].flatten(0, 1).view(torch.uint8).any(1)
    assert written[:fed].all() and not written[fed:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_memory_is_stable_over_a_thousand_replays(name):
    model = model_of(name)
    graph = graph_of(model, caches_of(model, 2), (2,))
    graph.load(torch.tensor([1, 2]), torch.tensor([1, 1], dtype=torch.int32), table_of(2), rings_of(model, 2))
    graph.run(10).wait()
    gc.collect()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(10):
        graph.load(torch.tensor([1, 2]), torch.tensor([1, 1], dtype=torch.int32), table_of(2), rings_of(model, 2))
        graph.run(100).wait()
    gc.collect()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert graph.replays == 1010


@pytest.mark.gpu
def test_capture_by_hand_with_plain_torch():
    """A piecewise caller: attention's part of a step captured with torch.cuda.graph and a workspace of its own."""
    model = model_of()
    mine, theirs = caches_of(model, 3), caches_of(model, 3)
    tokens, seq_lens = torch.tensor([4, 5, 6]), torch.tensor([1, 0, 50], dtype=torch.int32)
    state = eager_state(tokens, seq_lens, table_of(3))
    model(state.tokens, theirs, decode_plan(state, BLOCK, MAX_CONTEXT))  # what the warm-up writes
    owner, stream, graph = workspace.Workspace((0, 0), "cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), workspace.use(owner):
        model(state.tokens, mine, decode_plan(state, BLOCK, MAX_CONTEXT))
        owner.lock()
        with torch.cuda.graph(graph, stream=stream):
            logits = model(state.tokens, mine, decode_plan(state, BLOCK, MAX_CONTEXT))
    torch.cuda.current_stream().wait_stream(stream)
    for length in (1, 2, 90, MAX_CONTEXT):
        state.seq_lens.copy_(torch.tensor([length, 0, max(1, length - 7)]))
        graph.replay()
        want = model(state.tokens, theirs, decode_plan(state, BLOCK, MAX_CONTEXT))
        assert torch.equal(logits[::2], want[::2])
