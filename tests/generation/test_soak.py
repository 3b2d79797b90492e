"""Long decoding with requests that come and go: no drift against eager decoding, no memory growth, no error.

Rows arrive with prompts of any length, cross the borders of blocks, windows, entries, top-k and the longest context,
and leave at random or at the end. Between arrivals their steps are replayed; some stretches are decoded eagerly as
well, from the same state and copies of the caches, and must draw the same tokens and write the same bytes.
"""

from __future__ import annotations

import gc
import os
import random
from dataclasses import replace

import pytest
import torch
from conftest import long
from support import batching
from support.soak import Soak

from sparse_attn import DecodeGraph, Model, Sampling, generate, workspace
from sparse_attn.framework.target import target_of
from sparse_attn.generation.blocks import BlockPool, BlockTables, Span
from sparse_attn.generation.steps import Decode, decode_step, prefill_step
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import Bounds, cache_layouts, workspace_size
from sparse_attn.spec import CompressedSpec, preset

MAX_CONTEXT, LONGEST_PROMPT = 384, 200
SCHEDULED = int(os.environ.get("SPARSE_ATTN_SOAK", 20_000))  # steps of a scheduler


def model_of(name, device, cache="fp8", layers=None):
    spec = preset(name)
    if isinstance(spec, CompressedSpec):
        spec = replace(spec, full_ratio=32, index=replace(spec.index, top_k=16))
        if layers:
            kinds = ("window", "indexed", "full")[:layers]
            spec = replace(spec, num_layers=layers, layer_kinds=kinds, hash_layers=spec.hash_layers[:layers])
    elif layers:
        spec = replace(
            spec, num_layers=layers, moe_layers=spec.moe_layers[:layers], index_layers=spec.index_layers[:layers]
        )
    return Model(spec, random_params(spec, seed=0, device=device), cache_layouts(spec, cache))


class Server:
    """Up to ``rows`` requests of a model. Who sits in a row, how long it is and what it drew are the host's
    knowledge."""

    def __init__(self, model, rows, seed):
        self.model, self.rows, self.random = model, rows, random.Random(seed)
        self.block_size = 32 if model.has_rings else 16
        per_row = MAX_CONTEXT // self.block_size
        self.tables = BlockTables(BlockPool(rows * per_row), rows, per_row, self.block_size)
        self.caches = model.allocate_caches(rows * per_row, self.block_size, requests=rows, step_rows=LONGEST_PROMPT)
        self.lengths = [0] * rows  # tokens including the one to be fed, 0: nobody
        device = model.device
        self.state = Decode(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            self.tables.table.to(device),
            torch.arange(rows + 1, dtype=torch.int32, device=device),
            torch.zeros(0, dtype=torch.int64, device=device),
            torch.randperm(rows).int().unsqueeze(1).to(device) if model.has_rings else None,
        )
        self.prompts: list[list[int]] = [[]] * rows
        self.drawn: list[list[int]] = [[]] * rows
        self.finished: list[tuple[list[int], list[int]]] = []

    def come_and_go(self, sampling):
        """Some leave, some arrive; at least one stays."""
        for row, length in enumerate(self.lengths):
            if length and (length >= MAX_CONTEXT or self.random.random() < 0.25):
                self.finished.append((self.prompts[row], self.drawn[row]))
                self.tables.release(row)
                self.lengths[row] = 0
        free = [row for row, length in enumerate(self.lengths) if not length]
        arriving = [row for row in free if self.random.random() < 0.5]
        if len(free) == self.rows and not arriving:
            arriving = free[:1]
        spans = []
        for row in arriving:
            count = self.random.choice((1, 2, self.random.randint(3, LONGEST_PROMPT)))
            self.prompts[row] = [self.random.randrange(256) for _ in range(count)]
            self.tables.reserve(row, MAX_CONTEXT)
            self.lengths[row] = count + 1
            spans.append(Span(row, 0, count))
        if spans:
            prefill_step(self.model, self.prompts, spans, self.tables, self.caches, self.state, sampling, MAX_CONTEXT)
        self.state.seq_lens.copy_(torch.tensor(self.lengths, dtype=torch.int32))
        self.state.block_table.copy_(self.tables.table)
        first = self.state.tokens.tolist()
        for row in arriving:
            self.drawn[row] = [first[row]]

    def stretch(self, most):
        """Steps until somebody is full, at most ``most``."""
        return min([most, *(MAX_CONTEXT - length for length in self.lengths if length and length < MAX_CONTEXT)] or [0])

    def took(self, tokens):
        """tokens [steps, rows] were drawn."""
        for row, length in enumerate(self.lengths):
            if length:
                self.drawn[row] = self.drawn[row] + tokens[:, row].tolist()
                self.lengths[row] = length + tokens.shape[0]


def twin(server):
    """Copies of what a stretch of decoding reads and writes."""
    state = Decode(*(None if value is None else value.clone() for value in server.state))
    caches = type(server.caches)(*(
        tuple(None if cache is None else cache.clone(memory_format=torch.preserve_format) for cache in layers)
        for layers in server.caches
    ))  # fmt: skip
    return state, caches


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_short_soak_on_the_cpu(name):
    """Whoever leaves has drawn what it draws alone; fp32 caches, because matrix products round by batch size."""
    model, sampling = model_of(name, "cpu", "fp32", layers=3), Sampling()
    server = Server(model, 3, seed=1)
    steps = 0
    while steps < (250 if long() else 100):
        server.come_and_go(sampling)
        drawn = []
        for _ in range(server.stretch(20)):
            decode_step(model, server.caches, server.state, sampling, MAX_CONTEXT)
            drawn.append(server.state.tokens.clone())
        if drawn:
            server.took(torch.stack(drawn))
        steps += len(drawn)
    left = [(prompt, drawn[:60]) for prompt, drawn in server.finished if len(drawn) > 3]
    assert len(left) >= 3
    for prompt, drawn in left[:5]:
        alone = generate(model, [prompt], max_new_tokens=len(drawn), sampling=sampling)
        assert alone.tokens[0] == drawn


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_two_loops_at_a_time(name, record_property):
    """Two servers on two streams, half of the steps each; workspaces locked."""
    model, sampling = model_of(name, "cuda"), Sampling(temperature=0.7, seed=5)
    servers = [Server(model, 8, seed) for seed in (1, 2)]
    bounds = Bounds(
        max_batch=8, max_batched_tokens=0, max_model_len=MAX_CONTEXT, block_size=servers[0].block_size,
        dtype=torch.float32,
    )  # fmt: skip
    size = workspace_size(model.spec, bounds, target_of(model.device), model.layouts)
    graphs = [
        DecodeGraph(
            model, server.caches, max_context=MAX_CONTEXT, max_blocks=server.tables.table.shape[1], buckets=(4, 8),
            sampling=sampling, workspace_size=size,
        )
        for server in servers
    ]  # fmt: skip
    steps, compared, before = 0, 0, None
    while steps < 5_000:
        running = []
        for server, graph in zip(servers, graphs):
            server.come_and_go(sampling)
            count = server.stretch(server.random.randint(1, 120))
            copies = twin(server) if server.random.random() < 0.06 else None
            graph.load(server.state.tokens, server.state.seq_lens, server.state.block_table, server.state.ring_table)
            running.append((server, count, copies, graph.run(count)))
        for server, count, copies, stream in running:
            tokens = stream.wait()
            torch.cuda.synchronize()
            if copies is not None and count:
                compare(model, server, copies, tokens, sampling)
                compared += count
            if count:
                server.state.tokens.copy_(tokens[-1])
                server.took(tokens)
            steps += count
        if before is None and steps > 2000:
            gc.collect()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
    assert compared > 100 and all(graph.workspace.locked for graph in graphs)
    copies = running = stream = tokens = None
    gc.collect()
    after = torch.cuda.memory_allocated()
    assert after <= before
    for key, value in dict(
        steps=steps,
        compared=compared,
        requests=sum(len(server.finished) for server in servers),
        bytes_early=before,
        bytes_late=after,
    ).items():
        record_property(key, value)


def scheduler(model, **options):
    common = dict(
        rows=8, num_blocks=34, max_context=192, prefill_tokens=32, piece=5, snapshots=8, penalties=True, logprobs=True,
        stop_ids=2, batch_invariant=True,
    )  # fmt: skip
    return batching.batching_of(model, **(common | options))


def check_requests_alone(soak, one_by_one, count):
    """Some of the finished requests draw the same with nobody beside them, nothing kept before them."""
    done = [one for one in soak.finished.values() if one.reason != "cancelled"]
    for one in soak.random.sample(done, count):
        one_by_one.submit(**soak.asked[one.request])
        (alone,) = one_by_one.drain()
        assert (one.tokens, one.reason, one.logprobs) == (alone.tokens, alone.reason, alone.logprobs)


def check_nothing_is_lost(soak):
    """Every request ended once, every block is free."""
    scheduled, counts = soak.batching, soak.batching.occupancy()
    assert sorted(soak.finished) == sorted(soak.asked) and not scheduled.loop.live
    assert {one.reason for one in soak.finished.values()} == {"length", "stop", "cancelled"}
    assert counts.preempted and counts.reused
    scheduled.admission.prefixes.clear()
    assert len(scheduled.pool) == scheduled.pool.num_blocks


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_a_scheduler_on_the_cpu(name):
    model = batching.model_of(name, layers=2)
    soak = Soak(scheduler(model, rows=4, num_blocks=26), seed=3, every=50)
    soak.until(500 if long() else 250)
    check_nothing_is_lost(soak)
    assert soak.compared >= soak.steps // 50
    check_requests_alone(soak, scheduler(model, rows=4, num_blocks=26, share=False), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_a_scheduler_replays_twenty_thousand_steps(name, record_property):
    """Nothing waits for the device but comparisons; what is allocated between requests stays what it was."""
    model = batching.model_of(name, "cuda", "fp8")
    soak, memory, steps = Soak(scheduler(model, graph=True), seed=3, every=50), [], SCHEDULED // 10
    for number in range(1, 11):
        soak.until(number * steps)
        torch.cuda.synchronize()
        gc.collect()
        memory.append(torch.cuda.memory_allocated())
    said = soak.summary() | dict(bytes=memory)
    print(name, said)
    for key, value in said.items():
        record_property(key, value)
    check_nothing_is_lost(soak)
    assert soak.batching.loop.replays == soak.steps >= SCHEDULED and soak.compared >= soak.steps // 50
    assert max(memory[3:]) <= max(memory[:3])
    check_requests_alone(soak, scheduler(model, share=False), 3)


def compare(model, server, copies, tokens, sampling):
    state, caches = copies
    live = state.seq_lens > 0
    with workspace.use(workspace.Workspace((0, 0), "cuda")):
        for step in range(tokens.shape[0]):
            decode_step(model, caches, state, sampling, MAX_CONTEXT)
            assert torch.equal(tokens[step][live.cpu()], state.tokens.cpu()[live.cpu()]), step
    for mine, theirs in zip((c for layers in server.caches for c in layers), (c for layers in caches for c in layers)):
        assert mine is None or torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
