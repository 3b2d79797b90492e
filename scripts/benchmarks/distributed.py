"""Models over the GPUs of one host, for scripts/distributed.py: every process runs a suite, the first one records it.

Requests beyond HELD share blocks, so that few of a card's bytes are caches; what a step reads is as if they did not.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.checkpoints import FREE, captured_step, step_bounds, step_us, weights_read
from benchmarks.record import Record
from benchmarks.run import Run
from benchmarks.steps import HELD, by_part, cached_bytes
from sparse_attn import Model, generate
from sparse_attn.checkpoints.formats import first_layers
from sparse_attn.checkpoints.load import load, open_checkpoint
from sparse_attn.checkpoints.memory import weight_bytes
from sparse_attn.checkpoints.random_packed import random_packed_params
from sparse_attn.checkpoints.sharding import check_mesh
from sparse_attn.cli.plan import plan
from sparse_attn.cli.shipped import shipped_models
from sparse_attn.framework import streams
from sparse_attn.framework.target import target_of
from sparse_attn.generation.processes import make_mesh
from sparse_attn.mesh import ONE_RANK, Mesh, Ranks, planned_mesh
from sparse_attn.models.exchange import step_bytes
from sparse_attn.ops.topk.ranks.fake import BITS
from sparse_attn.ops.topk.select import top_k_per_row
from sparse_attn.pipeline import cache_layouts, default_block_size
from sparse_attn.pipeline import select as choose
from sparse_attn.pipeline.parallel.ranks import (
    RowScores,
    join_over_ranks,
    merge_over_ranks,
    sum_over_ranks,
    top_k_over_ranks,
)
from sparse_attn.roofline import Work
from sparse_attn.spec import CompressedSpec, Spec, preset
from sparse_attn.types import AttentionOutput
from sparse_attn.weight_layout import weight_bytes as bytes_of

Suite = Callable[[Run], Iterator[Record]]
MODELS = ("deepseek_v4_flash", "deepseek_v32")
SIZES = {  # of decode steps: contexts, requests
    "deepseek_v4_flash": ((4096, 32768, 131072), (1, 8, 64, 128)),
    "deepseek_v32": ((32768, 131072), (1, 8, 64)),
}
STEPS, CALLS = 30, 20
PER_RANK = "per-rank k, which is not exact"


def grids(spec: Spec | CompressedSpec) -> dict[str, dict[str, int]]:
    """What the ranks of all processes share, by name: the ways that are measured, of those that the model allows."""
    size = dist.get_world_size()
    sizes = {f"T{size} E{size}": dict(tensor=size, expert=size)}
    if size >= 4:
        sizes[f"T{size // 2} C2 E{size}"] = dict(tensor=size // 2, context=2, expert=size)
    sizes[f"C{size} E{size}"] = dict(context=size, expert=size)
    return {name: one for name, one in sizes.items() if deals(spec, one)}


def deals(spec: Spec | CompressedSpec, sizes: dict[str, int]) -> bool:
    """Whether the model can be sharded so: tensor ranks divide heads and their groups."""
    try:
        check_mesh(spec, planned_mesh(**sizes))
    except ValueError:
        return False
    return True


def fitting(run: Run, name: str, mesh: Mesh, batch: int, context: int, rows: int = 0) -> Spec | CompressedSpec:
    """The most of a model's first layers that every rank holds with the caches of ``batch`` requests, of which one
    prefills ``rows`` tokens at a time. What other processes hold counts as taken."""
    whole = preset(name)
    if run.dry:
        return whole
    room, target = FREE * least(torch.cuda.mem_get_info()[0]), target_of(torch.device(run.device))
    for layers in range(whole.num_layers, 0, -1):
        spec = whole if layers == whole.num_layers else first_layers(whole, layers)
        bounds = replace(step_bounds(spec, batch, context, mesh), max_batched_tokens=rows, kv_rows=context * (rows > 0))
        needed = plan(spec, bounds, target, "fp8", form="published")["bytes"]
        assert isinstance(needed, int)
        if needed <= room:
            return spec
    raise ValueError(f"{name}: no layer of it fits {room / 1e9:.1f} GB")


def slowest(us: float) -> float:
    """The most microseconds of any process."""
    return _of_all(us, dist.ReduceOp.MAX)


def least(nbytes: int) -> int:
    """The fewest bytes of any process."""
    return int(_of_all(nbytes, dist.ReduceOp.MIN))


def _of_all(value: float, reduction: dist.ReduceOp.RedOpType) -> float:
    found = torch.tensor([value], dtype=torch.float64, device="cpu")
    dist.all_reduce(found, reduction)
    return float(found)


def made(run: Run, spec: Spec | CompressedSpec, mesh: Mesh) -> Model:
    return Model(spec, random_packed_params(spec, 0, run.device, mesh=mesh), cache_layouts(spec, "fp8"), mesh=mesh)


def freed(run: Run) -> None:
    gc.collect()  # a model's forward refers to the model
    if not run.dry:
        torch.cuda.empty_cache()


def distributed_step(run: Run) -> Iterator[Record]:
    "A captured decode step by part, beside its floor: real layers, as many as fit, packed random weights."
    for name in run.pick(MODELS, ("tiny_v4", "tiny_v32")):
        contexts, batches = run.pick(SIZES.get(name, ()), ((64,), (2,)))
        for grid, sizes in grids(preset(name)).items():
            mesh = make_mesh(**sizes, device=run.device)
            spec = fitting(run, name, mesh, min(HELD, batches[-1]), contexts[-1])
            model = made(run, spec, mesh)
            held = sum(map(bytes_of, model.params.values())) / 1e9
            for context in contexts:
                for batch in batches:
                    about = f"{name}, {spec.num_layers} layers of {held:.1f} GB, {grid}"
                    yield from _step(run, model, f"{about}, requests {batch}, context {context}", batch, context)
            del model
            freed(run)


def _step(run: Run, model: Model, case: str, batch: int, context: int) -> Iterator[Record]:
    length = context - run.pick(8 * STEPS, 8)
    dist.barrier()
    graph = captured_step(run, model, batch, context, length, min(batch, HELD))
    us, parts = 0.0, {}
    if graph is not None:
        dist.barrier()
        us, parts = slowest(step_us(graph, STEPS)), by_part(functools.partial(graph.run, 1))
    block = default_block_size(model.spec)
    sent = step_bytes(model.spec, model.mesh, batch, torch.bfloat16, max_context=context, block_size=block)
    said = ", ".join(f"{part} {took:.0f}" for part, took in parts.items())
    weights = weight_bytes(model.spec, torch.bfloat16, "published", mesh=model.mesh)
    read = weights_read(model, weights, batch) + batch * cached_bytes(model, length) / model.mesh.context.size
    del graph
    freed(run)
    yield Record(f"{case} (us: {said}; sent {sum(sent.values())} bytes)", us, floor_us=run.floor(Work(read)))


def distributed_exact(run: Run) -> Iterator[Record]:
    "A captured step over context ranks with the exact selection, beside a share of k for each rank."
    context, batches = run.pick(131072, 64), run.pick((1, 8, 64), (2,))
    length = context - run.pick(8 * STEPS, 8)
    size = dist.get_world_size()
    mesh = make_mesh(context=size, expert=size, device=run.device)
    for name in run.pick(MODELS, ("tiny_v4", "tiny_v32")):
        model = made(run, fitting(run, name, mesh, HELD, context), mesh)
        for batch in batches:
            took = []
            for select in (top_k_over_ranks, shared_k):
                dist.barrier()
                with mock.patch.object(choose, "top_k_over_ranks", select):
                    graph = captured_step(run, model, batch, context, length, min(batch, HELD))
                dist.barrier()
                took.append(0.0 if graph is None else slowest(step_us(graph, STEPS)))
                del graph
                freed(run)
            case = f"{name}, C{size} E{size}, requests {batch}, context {context}"
            yield Record(case, took[0], PER_RANK, None if run.dry else took[1])
        del model
        freed(run)


def distributed_experts(run: Run) -> Iterator[Record]:
    "A captured step whose experts get rows by a gather and all_to_all_single (data ranks), beside replicated tokens."
    context, batches, size = run.pick(32768, 64), run.pick((8, 64, 512), (4,)), dist.get_world_size()
    length = context - run.pick(8 * STEPS, 8)
    for name in run.pick(MODELS, ("tiny_v4", "tiny_v32")):
        grid, alike = next(iter(grids(preset(name)).items()))
        ways = alike, dict(data=size, expert=size)
        took: dict[int, list[float]] = {batch: [] for batch in batches}
        spec = fitting(run, name, planned_mesh(**ways[1]), HELD, context)  # data ranks hold more of each layer
        for sizes in ways:
            mesh = make_mesh(**sizes, device=run.device)
            model = made(run, spec, mesh)
            for batch in batches:
                own = -(-batch // mesh.data.size)
                dist.barrier()
                graph = captured_step(run, model, own, context, length, min(own, HELD))
                dist.barrier()
                took[batch].append(0.0 if graph is None else slowest(step_us(graph, STEPS)))
                del graph
                freed(run)
            del model
            freed(run)
        for batch, (replicated, sent) in took.items():
            case = f"{name}, {spec.num_layers} layers, D{size} E{size}, requests {batch} in all, context {context}"
            yield Record(case, sent, grid, None if run.dry else replicated)


def shared_k(
    parts: list[RowScores], k: int, ranks: Ranks, *, block_size: int, impl: str = "auto"
) -> list[torch.Tensor]:
    """As top_k_over_ranks, but each rank takes its k / size highest, without a collective."""
    own = -(-k // ranks.size)
    found = [top_k_per_row(part.logits, own, part.starts, part.ends, impl=impl) for part in parts]
    return [torch.nn.functional.pad(one, (0, k - own), value=-1) for one in found]


def distributed_prefill(run: Run) -> Iterator[Record]:
    "A prompt's prefill and first token, eager, by wall clock; one from before weights are drawn, a GPU's most bytes."
    for name in run.pick(MODELS, ("tiny_v4", "tiny_v32")):
        for grid, sizes in grids(preset(name)).items():
            mesh = make_mesh(**sizes, device=run.device)
            prompts, rows = run.pick((8192, 32768), (40,)), run.pick(8192, 16)
            spec = fitting(run, name, mesh, 1, prompts[-1] + 1, rows)
            about = f"{name}, {spec.num_layers} layers, {grid}"
            dist.barrier()
            begin = time.perf_counter()
            model = made(run, spec, mesh)
            _first_token_us(model, prompts[0], rows)
            us = slowest(1e6 * (time.perf_counter() - begin))
            peak = slowest(0 if run.dry else torch.cuda.max_memory_allocated()) / 1e9
            case = f"{about}, no weights at first, {prompts[0]} tokens (at most {peak:.1f} GB a GPU)"
            yield Record(case, 0.0 if run.dry else us)
            for tokens in prompts:
                us = slowest(min(_first_token_us(model, tokens, rows) for _ in range(run.pick(2, 1))))
                yield Record(f"{about}, {tokens} tokens", 0.0 if run.dry else us)
            del model
            freed(run)


def _first_token_us(model: Model, tokens: int, rows: int) -> float:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, model.spec.vocab_size, (tokens,), generator=generator, device="cpu").tolist()
    dist.barrier()
    begin = time.perf_counter()
    generate(model, [prompt], max_new_tokens=1, graph=False, prefill_tokens=rows)
    return 1e6 * (time.perf_counter() - begin)


def distributed_soak(run: Run) -> Iterator[Record]:
    "5,000 captured steps of the readers: the tokens of one GPU, and no more bytes afterwards; us: a step."
    count = run.pick(5000, 4)
    for name, folder in shipped_models().items():
        alone: list[list[int]] | None = None
        for grid, sizes in {"one rank": {}, **grids(open_checkpoint(folder, mtp=False).spec)}.items():
            mesh = make_mesh(**sizes, device=run.device) if sizes else ONE_RANK
            spec, params = load(folder, device=run.device, dtype=torch.float32, expand=True, mesh=mesh)
            model = Model(spec, params, cache_layouts(spec, "fp32"), mesh=mesh)
            held: list[int] = []

            def seen(place: int, token: int, held: list[int] = held) -> None:
                held.append(0 if run.dry else torch.cuda.memory_allocated())

            dist.barrier()
            found = generate(model, [[72, 101, 108], [10]], max_new_tokens=count, graph=not run.dry, on_token=seen)
            alone = alone or found.tokens
            assert found.tokens == alone, f"{name}, {grid}: tokens differ from one rank's"
            assert max(held[count:]) <= max(held[:count]), f"{name}, {grid}: bytes grow, {held[:: count // 4]}"
            us = 1e6 * found.decode_s / count
            yield Record(f"{name}, {grid}, {count} tokens of 2 requests", 0.0 if run.dry else slowest(us))
            del model, params
            freed(run)


def distributed_collectives(run: Run) -> Iterator[Record]:
    "Each collective of a decode step alone, captured, with V3.2's sizes; floor: none."
    size = dist.get_world_size()
    ranks = make_mesh(context=size, device=run.device).context
    hidden, heads, width, vocab = run.pick((7168, 128, 512, 129280), (16, 4, 8, 32))
    for rows in run.pick((1, 8, 64), (2,)):
        drawn: dict[str, Any] = dict(device=run.device, dtype=torch.bfloat16)
        hiddens, logits = torch.randn(rows, hidden, **drawn), torch.randn(rows, vocab // size, **drawn)
        counts = torch.ones(rows, 1 << BITS[0], dtype=torch.int32, device=run.device)
        outs = AttentionOutput(
            torch.randn(rows, heads, width, **drawn), torch.zeros(rows, heads, dtype=torch.float32, device=run.device)
        )
        for name, nbytes, call in (
            ("sum of hidden states", hiddens.nbytes, lambda: sum_over_ranks(hiddens, ranks)),
            ("gather of logits", logits.nbytes, lambda: join_over_ranks(logits, ranks)),
            ("sum of a digit's counts", counts.nbytes, lambda: sum_over_ranks(counts, ranks)),
            ("merge of outputs", outs.out.nbytes, lambda: merge_over_ranks(outs, ranks)),
        ):
            yield Record(f"{name}, {rows} rows, {nbytes} bytes a rank, {size} ranks", slowest(_captured_us(run, call)))


def _captured_us(run: Run, call: Callable[[], object]) -> float:
    """Microseconds of a call, of CALLS in a graph. All processes replay as often, so none waits for another's."""
    call()
    if run.dry:
        return 0.0
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream(torch.cuda.current_device()))
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    with streams.garbage_kept(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(5):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return min(times[1:])


SUITES: dict[str, Suite] = {
    suite.__name__: suite
    for suite in (
        distributed_collectives,
        distributed_soak,
        distributed_step,
        distributed_exact,
        distributed_experts,
        distributed_prefill,
    )
}
