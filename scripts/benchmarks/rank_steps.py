"""A decode step of one GPU as rank 0 of 8: first layers of real models at their dims, packed random weights, captured.
Collectives are copies of the right size within the GPU, so the wire is left out; ``sent`` says what it would carry."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from benchmarks.checkpoints import fill
from benchmarks.ranks import copies
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn.mesh import Mesh, planned_mesh
from sparse_attn.models.exchange import step_bytes
from sparse_attn.models.forms import first_layers
from sparse_attn.models.random_packed import random_packed_params
from sparse_attn.pipeline import Bounds, cache_layouts, default_block_size
from sparse_attn.runtime.batch import scratch_size
from sparse_attn.runtime.graph import DecodeGraph
from sparse_attn.runtime.model import Model
from sparse_attn.runtime.steps import Decode, Sampling, decode_step
from sparse_attn.spec import preset

GRIDS = {
    "T8 E8": dict(tensor=8, expert=8),  # with the indexer on every rank, as vLLM has it
    "C8 E8": dict(context=8, expert=8),
}
LAYERS = {"deepseek_v32": (3, 5), "deepseek_v4_flash": (2, 6)}  # fewer, more: the difference is of layers with experts
STEPS = 30


@suite("rank_step")
def rank_step(run: Run) -> Iterator[Record]:
    "A step of rank 0 of 8 and of its last layers, V3.2 and V4-Flash; copies for collectives."
    cases = [(context, batch) for context in run.pick((32768, 131072), (512,)) for batch in run.pick((1, 8, 64), (2,))]
    for name, (fewer, more) in run.pick(LAYERS, {"tiny_v32": (1, 2), "tiny_v4": (2, 3)}).items():
        for grid, sizes in run.pick(GRIDS, {"T2 C2 E2": dict(tensor=2, context=2, expert=2)}).items():
            mesh = planned_mesh(**sizes)
            short, long = (_steps(run, name, layers, mesh, cases) for layers in (fewer, more))
            for (context, batch), (less, _), (us, sent) in zip(cases, short, long):
                layer = (us - less) / (more - fewer)
                about = f"{more} layers; {layer:.1f} us a layer, sent {sent}"
                yield Record(f"{name} {grid}, requests {batch}, context {context} ({about})", us)


def _steps(run: Run, name: str, layers: int, mesh: Mesh, cases: list[tuple[int, int]]) -> list[tuple[float, int]]:
    """(microseconds of a step, bytes that it sends) of each (context, batch)."""
    spec = first_layers(preset(name), layers)
    model = Model(spec, random_packed_params(spec, 0, run.device, mesh=mesh), cache_layouts(spec, "fp8"), mesh=mesh)
    found = [_step(run, model, mesh, *case) for case in cases]
    del model
    gc.collect()  # a model's forward refers to the model
    return found


def _step(run: Run, model: Model, mesh: Mesh, context: int, batch: int) -> tuple[float, int]:
    bounds = Bounds(
        max_batch=batch, max_batched_tokens=0, max_model_len=context, block_size=default_block_size(model.spec),
        kv_rows=0, logits_bytes=2**31, mesh=mesh,
    )  # fmt: skip
    model.logits_bytes = bounds.logits_bytes
    width = bounds.num_blocks // batch
    caches = model.allocate_caches(bounds.num_blocks, bounds.block_size, requests=batch, step_rows=1)
    fill(caches, model)
    sent = step_bytes(
        model.spec, mesh, batch, torch.bfloat16, max_context=context, block_size=bounds.block_size
    )  # fmt: skip
    device = run.device
    state = Decode(
        torch.arange(batch, device=device),
        torch.full((batch,), context - STEPS * 8, dtype=torch.int32, device=device),
        torch.arange(batch * width, dtype=torch.int32, device=device).view(batch, width),
        torch.arange(batch + 1, dtype=torch.int32, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
        torch.arange(batch, dtype=torch.int32, device=device).unsqueeze(1) if model.has_rings else None,
    )
    with copies(mesh):
        us = _dry(model, caches, state, context) if run.dry else _timed(model, caches, state, bounds, width)
    del caches, state
    gc.collect()
    if not run.dry:
        torch.cuda.empty_cache()
    return us, sum(sent.values())


def _dry(model: Model, caches, state: Decode, context: int) -> float:
    assert decode_step(model, caches, state, Sampling(), context).isfinite().all()
    return 0.0


def _timed(model: Model, caches, state: Decode, bounds: Bounds, width: int) -> float:
    batch = bounds.max_batch
    graph = DecodeGraph(
        model, caches, max_context=bounds.max_model_len, max_blocks=width, buckets=(batch,), keep_logits=True,
        workspace_size=scratch_size(model, bounds),
    )  # fmt: skip
    graph.load(state.tokens, state.seq_lens, state.block_table, state.ring_table)
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.stream.wait_stream(torch.cuda.current_stream(model.device))
        begin.record(graph.stream)
        graph.run(STEPS)
        end.record(graph.stream)
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / STEPS)
    assert graph.logits is not None and bool(graph.logits.isfinite().all()), "logits that are no numbers"
    return min(times)
