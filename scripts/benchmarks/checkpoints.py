"""Checkpoints of published form: how fast they load, and a rank's share of a whole model on one GPU."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.inputs import normal
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn import DecodeGraph, Model, Sampling
from sparse_attn.checkpoints.formats import first_layers
from sparse_attn.checkpoints.load import load, open_checkpoint, readings_of
from sparse_attn.checkpoints.memory import weight_bytes
from sparse_attn.checkpoints.published import write_published
from sparse_attn.checkpoints.random_packed import random_packed_params
from sparse_attn.checkpoints.share import share_of
from sparse_attn.cli.plan import plan
from sparse_attn.framework.target import target_of
from sparse_attn.generation.batch import scratch_size
from sparse_attn.generation.model import AnyCaches
from sparse_attn.generation.steps import Decode, decode_step
from sparse_attn.layout import Layout
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models.params import ROPE_NAMES, model_rope_tables
from sparse_attn.pipeline import Bounds, cache_layouts, cache_uses, default_block_size
from sparse_attn.roofline import Work
from sparse_attn.spec import CompressedSpec, Spec, preset
from sparse_attn.weight_layout import weight_bytes as bytes_of

REPEATS = 3
FREE = 0.94  # of a card's bytes, for what is counted here
SHARES = (("deepseek_v32", 8), ("deepseek_v4_flash", 2))


class HostPeak:
    """The most anonymous memory that the process holds beside what it held at first; files that are mapped do not
    count. most: bytes."""

    def __enter__(self):
        self._end, self._before, self.most = threading.Event(), _anonymous(), 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()

    def _watch(self):
        while not self._end.wait(0.001):
            self.most = max(self.most, _anonymous() - self._before)


def _anonymous() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


@suite("load")
def loading(run: Run) -> Iterator[Record]:
    "A published checkpoint onto the GPU, beside the same files read into pinned memory; both from the page cache."
    for name, form, layers in run.pick(
        [("deepseek_v4_flash", "published", 1), ("deepseek_v4_flash", "fused", 1)], [("tiny_v4", "published", 1)]
    ):
        spec = first_layers(preset(name), layers)
        with tempfile.TemporaryDirectory() as home:
            folder = Path(home) / "checkpoint"
            write_published(folder, spec, form)
            yield _loaded(run, folder, f"{name}, {form}, layers {layers}")


def _loaded(run: Run, folder: Path, case: str) -> Record:
    opened = open_checkpoint(folder, mtp=False)
    sources = {source for one in readings_of(opened, False).values() for source in one.sources}
    total = sum(map(opened.checkpoint.nbytes, sources))
    files = sorted({opened.checkpoint.file(source) for source in sources})
    largest = max(map(opened.checkpoint.nbytes, sources))
    pinned = torch.empty(
        max(file.stat().st_size for file in files), dtype=torch.uint8, device="cpu", pin_memory=not run.dry
    )
    theirs = min(_read_all(files, pinned) for _ in range(REPEATS)) * total / sum(file.stat().st_size for file in files)
    with mock.patch("sparse_attn.checkpoints.load.model_rope_tables", lambda *_: {}):
        ours = min(_seconds(run, lambda: load(folder, device=run.device)) for _ in range(REPEATS))
    tables = min(_seconds(run, lambda: model_rope_tables(opened.spec, run.device)) for _ in range(REPEATS))
    with HostPeak() as host:  # which takes turns with what it watches
        params = load(folder, device=run.device)[1]
    ratio = sum(bytes_of(weight) for name, weight in params.items() if name not in ROPE_NAMES) / total
    if run.dry:
        return Record(case, 0.0)
    assert ratio <= 1.03
    case += (
        f" ({total / 1e9:.2f} GB, host {host.most / largest:.1f} largest tensors, device {ratio:.3f} of the files; "
        f"without rope tables, {tables:.2f} s alone)"
    )
    return Record(case, 1e6 * ours, "read into pinned memory", 1e6 * theirs)


def _seconds(run: Run, work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    if not run.dry:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _read_all(files: list[Path], pinned: torch.Tensor) -> float:
    """Seconds to read ``files``."""
    place: Any = pinned.numpy()
    begin = time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            size, done = path.stat().st_size, 0
            while done < size:
                done += file.readinto(place[done:size]) or 0
    return time.perf_counter() - begin


@suite("real_share")
def real_share(run: Run) -> Iterator[Record]:
    "A rank's share of all layers of V3.2 (1/8) and V4-Flash (1/2), packed, by a captured step; less if it must."
    context, batches = run.pick(8192, 64), run.pick((1, 8, 64), (2,))
    others = 0 if run.dry else torch.cuda.memory_allocated()
    for name, ranks in run.pick(SHARES, (("tiny_glm5", 2), ("tiny_v4", 2))):
        spec, ranks = fitting_share(run, name, ranks, step_bounds(preset(name), batches[-1], context))
        params = random_packed_params(spec, 0, run.device)
        model = Model(spec, params, cache_layouts(spec, "fp8"))
        for batch in batches:
            yield _decoded(run, model, f"{name} 1/{ranks}, requests {batch}", batch, context, others)
        del params, model
        gc.collect()  # a model's forward refers to the model
        if not run.dry:
            torch.cuda.empty_cache()


def step_bounds(spec: Spec | CompressedSpec, batch: int, context: int, mesh: Mesh = ONE_RANK) -> Bounds:
    return Bounds(
        max_batch=batch, max_batched_tokens=0, max_model_len=context, block_size=default_block_size(spec), kv_rows=0,
        mesh=mesh,
    )  # fmt: skip


def fitting_share(run: Run, name: str, ranks: int, bounds: Bounds) -> tuple[Spec | CompressedSpec, int]:
    """The largest share, from 1 / ``ranks`` on, that the card holds with what its steps take."""
    while not run.dry:
        share = share_of(preset(name), ranks)
        needed = plan(share, bounds, target_of(torch.device(run.device)), "fp8", form="published")["bytes"]
        assert isinstance(needed, int)
        if needed <= FREE * torch.cuda.mem_get_info()[0]:
            break
        ranks *= 2
    return share_of(preset(name), ranks), ranks


def captured_step(
    run: Run, model: Model, batch: int, context: int, length: int, held: int | None = None
) -> DecodeGraph | None:
    """The captured step of ``batch`` requests of ``length`` cached tokens; dry: a step has run, and there is none.

    held: of how many requests there are blocks, which the others share; they write over each other's newest token.
    """
    bounds = step_bounds(model.spec, batch, context, model.mesh)
    width = bounds.num_blocks // batch
    blocks = width * (held or batch)
    caches = model.allocate_caches(blocks, bounds.block_size, requests=batch, step_rows=1)
    fill(caches, model)
    device = run.device
    state = Decode(
        torch.arange(batch, device=device),
        torch.full((batch,), length, dtype=torch.int32, device=device),
        torch.arange(batch * width, dtype=torch.int32, device=device).remainder(blocks).view(batch, width),
        torch.arange(batch + 1, dtype=torch.int32, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
        torch.arange(batch, dtype=torch.int32, device=device).unsqueeze(1) if model.has_rings else None,
    )
    if run.dry:
        assert decode_step(model, caches, state, Sampling(), context).isfinite().all()
        return None
    graph = DecodeGraph(
        model, caches, max_context=context, max_blocks=width, buckets=(batch,), keep_logits=True,
        workspace_size=scratch_size(model, bounds),
    )  # fmt: skip
    graph.load(state.tokens, state.seq_lens, state.block_table, state.ring_table)
    return graph


def step_us(graph: DecodeGraph, steps: int, rounds: int = 3) -> float:
    """Microseconds of a step, of the fastest of ``rounds``."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        graph.run(steps)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6 / steps)
    assert graph.logits is not None and bool(graph.logits.isfinite().all()), "logits that are no numbers"
    return min(times)


def _decoded(run: Run, model: Model, case: str, batch: int, context: int, others: int) -> Record:
    """others: bytes that earlier suites left allocated."""
    spec, bounds, steps = model.spec, step_bounds(model.spec, batch, context), run.pick(50, 2)
    if not run.dry:
        torch.cuda.reset_peak_memory_stats()
    graph = captured_step(run, model, batch, context, context // 2)
    if graph is None:
        return Record(case, 0.0)
    us = step_us(graph, steps)
    weights = weight_bytes(spec, torch.bfloat16, "published")
    held = sum(map(bytes_of, model.params.values()))
    assert sum(weights.values()) == held, (weights, held)
    cached = sum(use.nbytes for use in cache_uses(spec, model.layouts, bounds))
    peak = torch.cuda.max_memory_allocated() - others
    kinds = ", ".join(f"{kind} {nbytes / 1e9:.2f}" for kind, nbytes in weights.items() if nbytes)
    case += f" (GB: {kinds}; caches {cached / 1e9:.2f}, steps {(peak - held - cached) / 1e9:.2f}, all {peak / 1e9:.2f})"
    return Record(case, us, floor_us=run.floor(Work(weights_read(model, weights, batch))))


def weights_read(model: Model, weights: dict[str, int], batch: int) -> float:
    """Bytes of weights that a step of ``batch`` rows has to read, experts chosen evenly: none of the embedding but its
    rows, the head whole."""
    moe, head = model.spec.moe, weights["embedding"] * (1 if model.spec.tie_embeddings else 0.5)
    touched = 1 - (1 - moe.experts_per_token / moe.num_experts) ** batch
    others = sum(weights[kind] for kind in ("mlp", "indexer", "attention", "other"))
    tables = sum(bytes_of(value) for name, value in model.params.items() if name in ROPE_NAMES)
    return weights["expert"] * touched + others - tables + head


def fill(caches: AnyCaches, model: Model) -> None:
    """Normal values in every paged cache and ring."""
    layouts = {"kv": model.layouts.kv, "compressed": model.layouts.kv, "index": model.layouts.index}
    for field, layout in layouts.items():
        for cache in getattr(caches, field, ()):
            if cache is not None:
                _fill_one(cache, layout)


def _fill_one(cache: torch.Tensor, layout: Layout) -> None:
    block = cache.shape[1]
    for part in cache.split(max(1, 2**26 // (block * layout.dim))):
        slots = torch.arange(part.shape[0] * block, device=cache.device)
        layout.encode(part, slots, normal(slots.numel(), layout.dim, device=str(cache.device), dtype=torch.float32))
