"""A rank's share of a model on one GPU: what a captured decode step takes by part, beside each part's floor."""

from __future__ import annotations

import functools
import gc
import importlib
import pkgutil
import re
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

from benchmarks.checkpoints import SHARES, captured_step, fitting_share, step_bounds, step_us, weights_read
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn import Model, ops
from sparse_attn.checkpoints.memory import weight_bytes
from sparse_attn.checkpoints.random_packed import random_packed_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.roofline import Work
from sparse_attn.spec import CompressedSpec, preset

PARTS = {  # by how names of modules begin; the first that fits
    "experts": (
        "layers.products.hopper.experts",
        "layers.products.portable.routed_rows",
        "layers.products.swap_ab.experts",
        "layers.products.swap_ab.sorted",
    ),
    "linears": ("layers.products.",),
    "rest": ("layers.hyper_connection.", "layers.router.", "ragged.step_plans."),
}
TORCH_PRODUCTS = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|splitk", re.IGNORECASE)
STEPS = 20
HELD = 12  # requests that have blocks; their index keys of one layer are more than the L2 holds


@functools.cache
def _modules() -> dict[str, set[str]]:
    """Triton function -> modules of operators that have one of that name."""
    from triton import JITFunction

    found: dict[str, set[str]] = defaultdict(set)
    for module in pkgutil.walk_packages(ops.__path__, ops.__name__ + "."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, JITFunction) and value.__module__.startswith(ops.__name__):
                found[name].add(value.__module__.removeprefix(ops.__name__ + "."))
    return found


def part_of(kernel: str) -> str:
    """The part of a step that a kernel belongs to, by its name. What places rows for a product is among linears; NCCL's
    kernels, and RCCL's, are collectives."""
    if "nccl" in kernel.lower():
        return "collectives"
    if kernel == "place_rows" or TORCH_PRODUCTS.search(kernel):
        return "linears"
    modules = _modules().get(kernel, set())
    parts = {next((part for part, of in PARTS.items() if name.startswith(of)), "attention") for name in modules}
    return parts.pop() if len(parts) == 1 else "rest"


def by_part(work: Callable[[], object]) -> dict[str, float]:
    """Microseconds of kernels by part. Kernels that overlap count whole, so parts may be more than the step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    sums = dict.fromkeys(("attention", "experts", "linears", "rest"), 0.0)
    for event in profile.key_averages():
        if event.self_device_time_total:
            part = part_of(event.key)
            sums[part] = sums.get(part, 0.0) + event.self_device_time_total
    return sums


def cached_bytes(model: Model, length: int) -> int:
    """Of the cached rows and index keys that a row of ``length`` tokens reads in a step."""
    spec, kv, index = model.spec, model.layouts.kv, model.layouts.index
    if not isinstance(spec, CompressedSpec):
        selected = min(spec.index.top_k, length) * kv.row
        return spec.num_layers * selected + sum(spec.index_layers) * length * index.row
    total = spec.num_layers * min(spec.window, length) * kv.row
    indexed, full = (spec.layer_kinds.count(kind) for kind in ("indexed", "full"))
    entries = length // spec.indexed_ratio
    total += indexed * (min(spec.index.top_k, entries) * kv.row + entries * index.row)
    return total + full * (length // spec.full_ratio) * kv.row


@suite("step_share")
def step_share(run: Run) -> Iterator[Record]:
    "A captured decode step of a rank's share (V3.2 1/8, V4-Flash 1/2; less if it must) at 32768 tokens, by part."
    context, batches = run.pick(32768, 64), run.pick((1, 8, 64), (2,))
    for name, ranks in run.pick(SHARES, (("tiny_glm5", 2), ("tiny_v4", 2))):
        spec, held = fitting_share(run, name, ranks, step_bounds(preset(name), min(batches[-1], HELD), context))
        model = Model(spec, random_packed_params(spec, 0, run.device), cache_layouts(spec, "fp8"))
        for batch in batches:
            yield from _parts(run, model, f"{name} 1/{held}, requests {batch}", batch, context)
        del model
        gc.collect()  # a model's forward refers to the model
        if not run.dry:
            torch.cuda.empty_cache()  # which the next share's size is chosen by


def _parts(run: Run, model: Model, case: str, batch: int, context: int) -> Iterator[Record]:
    length = context - run.pick(8 * STEPS, 8)
    graph = captured_step(run, model, batch, context, length, min(batch, HELD))
    weights = weight_bytes(model.spec, torch.bfloat16, "published")
    moe = model.spec.moe
    experts = weights["expert"] * (1 - (1 - moe.experts_per_token / moe.num_experts) ** batch)
    cached = batch * cached_bytes(model, length)
    floors = {"attention": cached, "experts": experts, "linears": weights_read(model, weights, batch) - experts}
    us, parts = 0.0, dict.fromkeys((*floors, "rest"), 0.0)
    if graph is not None:
        us, parts = step_us(graph, STEPS), by_part(lambda: graph.run(1))
    yield Record(f"{case}, step", us, floor_us=run.floor(Work(sum(floors.values()))))
    for part, took in parts.items():
        floor = run.floor(Work(floors[part])) if part in floors else None
        yield Record(f"{case}, {part}", took, floor_us=floor)
