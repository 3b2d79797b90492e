"""A decode step of one GPU as rank 0 of 8: first layers of real models at their dims, packed random weights, captured.
Collectives are copies of the right size within the GPU, so the wire is left out; ``sent`` says what it would carry."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from benchmarks.checkpoints import captured_step, step_us
from benchmarks.ranks import copies
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn import Model
from sparse_attn.checkpoints.formats import first_layers
from sparse_attn.checkpoints.random_packed import random_packed_params
from sparse_attn.mesh import Mesh, planned_mesh
from sparse_attn.models.exchange import step_bytes
from sparse_attn.pipeline import cache_layouts, default_block_size
from sparse_attn.spec import preset

GRIDS = {
    "T8 E8": dict(tensor=8, expert=8),  # shares the indexer's rows where there are many keys; vLLM scores all on each
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
    with copies(mesh):
        graph = captured_step(run, model, batch, context, context - STEPS * 8)
        us = 0.0 if graph is None else step_us(graph, STEPS)
    del graph
    gc.collect()
    if not run.dry:
        torch.cuda.empty_cache()
    sizes = dict(max_context=context, block_size=default_block_size(model.spec))
    return us, sum(step_bytes(model.spec, mesh, batch, torch.bfloat16, **sizes).values())
