"""Products with packed weights: experts beside vLLM's Marlin, linears beside their bytes and torch's fp8 product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks import marlin
from benchmarks.checks import check_vectors, sampled
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn import roofline
from sparse_attn.ops.layers.products import linear, packed_experts
from sparse_attn.weight_layout import CODE_DTYPE, PackedWeight, WeightLayout, dequantise, packed_weight, weight_bytes

MXFP4 = WeightLayout("e2m1", (1, 32), "e8m0")
FP8 = WeightLayout("e4m3", (128, 128), "fp32")
FP8_E8M0 = WeightLayout("e4m3", (128, 128), "e8m0")
CLAMP = 10.0
EXPERTS = 256, 6, 4096, 2048  # experts, of a token, hidden, intermediate: DeepSeek-V4-Flash
TINY_EXPERTS = 4, 2, 256, 256
LINEARS = {"q_b": (24576, 1536), "o": (7168, 16384), "shared gate_up": (4096, 7168), "shared down": (7168, 2048)}
V4_LINEARS = {"V4-Flash q_b": (32768, 1024), "V4-Flash o_b": (4096, 8192)}
V32_EXPERTS = 256, 8, 7168, 2048
TINY_LINEARS = {"tiny": (96, 256)}
LEVEL = 1e-4  # 1 - cosine: bf16 rounding between the products is 1e-5
REQUANTISED = 1e-3  # where what lies between the products is rounded once to fp8 and may fall on the other side
FP8_LEVEL = 1e-4  # of the same codes: fp8 units add up with fewer bits


def random_weight(layout: WeightLayout, *shape: int, device: str) -> PackedWeight:
    """Every code but NaN; values of about 1 / 64."""
    *leading, rows, columns = shape
    stored = (*leading, rows, columns // 2 if layout.codes == "e2m1" else columns)
    codes = torch.randint(0, 256, stored, dtype=torch.uint8, device=device)
    if layout.codes == "e4m3":
        codes = torch.where(codes & 127 == 127, 0x7E, codes)
    grid = (*leading, *layout.grid(rows, columns))
    if layout.scale == "e8m0":
        scales = torch.randint(118, 122, grid, dtype=torch.uint8, device=device)
    else:
        scales = torch.rand(grid, dtype=torch.float32, device=device) * 2.0**-13 + 2.0**-14
    return packed_weight(codes.view(CODE_DTYPE[layout.codes]), scales, layout)


def routes(sets: int, tokens: int, experts: int, k: int, device: str) -> list[torch.Tensor]:
    """int32 [tokens, k] of each set: distinct experts of a token, each as likely."""
    drawn = [torch.rand(tokens, experts, dtype=torch.float32, device=device).topk(k).indices for _ in range(sets)]
    return [one.to(torch.int32) for one in drawn]


@suite("experts_few")
def experts_few(run: Run) -> Iterator[Record]:
    "packed_experts, 256 of MXFP4 (W4A16), 6 a token, hidden 4096, intermediate 2048, L2-cold; beside vLLM's Marlin."
    yield from _experts(run, run.pick([1, 8, 64], [1, 3]), 8)


@suite("experts_many")
def experts_many(run: Run) -> Iterator[Record]:
    "The same of 512 and 4096 tokens."
    yield from _experts(run, run.pick([512, 4096], [5]), 2)


def _experts(run: Run, counts: list[int], sets: int) -> Iterator[Record]:
    experts, k, hidden, intermediate = run.pick(EXPERTS, TINY_EXPERTS)
    gate_up = random_weight(MXFP4, experts, 2 * intermediate, hidden, device=run.device)
    down = random_weight(MXFP4, experts, hidden, intermediate, device=run.device)
    peer = not run.dry and marlin.load(run.peers and run.peers.root)
    theirs = [marlin.repacked(one.codes, one.scales) for one in (gate_up, down)] if peer else []
    each = (weight_bytes(gate_up) + weight_bytes(down)) // experts
    for tokens in counts:
        drawn = routes(run.pick(sets, 2), tokens, experts, k, run.device)
        x = torch.randn(tokens, hidden, dtype=torch.float32, device=run.device).bfloat16()
        weights = torch.rand(tokens, k, dtype=torch.float32, device=run.device)
        ours = functools.partial(packed_experts, x, weights, gate_up=gate_up, down=down, clamp=CLAMP)
        some = sampled(tokens, 3, run.device)
        want = packed_experts(x[some], weights[some], drawn[0][some], gate_up, down, clamp=CLAMP, impl="reference")
        check_vectors(ours(ids=drawn[0])[some], want, LEVEL, "out")
        calls = None
        if peer:
            check_vectors(ours(ids=drawn[0]), marlin.experts(x, weights, drawn[0], *theirs, CLAMP), LEVEL)
            calls = [functools.partial(marlin.experts, x, weights, ids, *theirs, CLAMP) for ids in drawn]
        touched = sum(ids.unique().numel() for ids in drawn) / len(drawn)
        work = roofline.Work(touched * each + 4 * tokens * hidden, 6 * tokens * k * hidden * intermediate)
        yield run.compare(
            f"tokens {tokens}", [functools.partial(ours, ids=ids) for ids in drawn], "vLLM Marlin MXFP4", calls,
            run.floor(work), target_ms=20,
        )  # fmt: skip


@suite("experts_w4a8")
def experts_w4a8(run: Run) -> Iterator[Record]:
    "The experts of experts_many with fp8 activations (W4A8), 512 and 4096 tokens; beside ours with exact ones (W4A16)."
    yield from _quantised_experts(run, MXFP4, EXPERTS, [512, 4096], 2, CLAMP, "ours, W4A16")


@suite("experts_fp8")
def experts_fp8(run: Run) -> Iterator[Record]:
    "packed_experts, DeepSeek-V3.2's 256 of e4m3, 8 a token (W8A8), 64, 512 and 4096 tokens; beside ours of exact rows."
    yield from _quantised_experts(run, FP8, V32_EXPERTS, [64, 512, 4096], 1, None, "ours, exact rows")


def _quantised_experts(
    run: Run, layout: WeightLayout, sizes: tuple[int, ...], counts: list[int], sets: int, clamp: float | None, peer: str
) -> Iterator[Record]:
    experts, k, hidden, intermediate = run.pick(sizes, TINY_EXPERTS)
    gate_up = random_weight(layout, experts, 2 * intermediate, hidden, device=run.device)
    down = random_weight(layout, experts, hidden, intermediate, device=run.device)
    each = (weight_bytes(gate_up) + weight_bytes(down)) // experts
    for tokens in run.pick(counts, [5]):
        drawn = routes(sets, tokens, experts, k, run.device)
        x = torch.randn(tokens, hidden, dtype=torch.float32, device=run.device).bfloat16()
        weights = torch.rand(tokens, k, dtype=torch.float32, device=run.device)
        some, calls = sampled(tokens, 3, run.device), []
        for activations, level in (("fp8", REQUANTISED), ("exact", LEVEL)):
            options = dict(gate_up=gate_up, down=down, clamp=clamp, activations=activations)
            want = packed_experts(x[some], weights[some], drawn[0][some], impl="reference", **options)
            calls.append([functools.partial(packed_experts, x, weights, ids, **options) for ids in drawn])
            check_vectors(calls[-1][0]()[some], want, level, "out")
        ours, exact = calls
        touched = sum(ids.unique().numel() for ids in drawn) / len(drawn)
        work = roofline.Work(touched * each + 4 * tokens * hidden, 6 * tokens * k * hidden * intermediate, fp8=True)
        theirs = None if run.dry else exact
        yield run.compare(f"tokens {tokens}", ours, peer, theirs, run.floor(work), target_ms=20)


@suite("linears_few")
def linears_few(run: Run) -> Iterator[Record]:
    "linear, fp8 weights of 128x128 blocks (W8A16), of DeepSeek-V3.2, L2-cold; beside nothing but their bytes."
    for name, (outputs, columns) in run.pick(LINEARS, TINY_LINEARS).items():
        sets = run.sets(outputs * columns)
        weights = [random_weight(FP8, outputs, columns, device=run.device) for _ in range(sets)]
        for rows in run.pick([1, 8, 16, 32, 64, 128], [1, 3]):
            x = torch.randn(rows, columns, dtype=torch.float32, device=run.device).bfloat16()
            some = sampled(rows, 3, run.device)
            check_vectors(linear(x, weights[0])[some], linear(x[some], weights[0], impl="reference"), LEVEL, "out")
            work = roofline.product(rows, columns, outputs, weight_bytes(weights[0]))
            yield run.compare(
                f"{name} {outputs} x {columns}, rows {rows}", [functools.partial(linear, x, one) for one in weights],
                "none", None, run.floor(work), target_ms=15,
            )  # fmt: skip


@suite("linears_many")
def linears_many(run: Run) -> Iterator[Record]:
    "linear with fp8 activations (W8A8) and its quantisation, 4096 rows; beside torch's scaled_mm of quantised rows."
    for name, (outputs, columns) in run.pick(LINEARS, TINY_LINEARS).items():
        weight = random_weight(FP8, outputs, columns, device=run.device)
        for rows in run.pick([512, 4096], [5]):
            x = torch.randn(rows, columns, dtype=torch.float32, device=run.device).bfloat16()
            some = sampled(rows, 3, run.device)
            ours = functools.partial(linear, x, weight, activations="fp8")
            want = linear(x[some], weight, activations="fp8", impl="reference")
            check_vectors(ours()[some], want, FP8_LEVEL, "out")
            work = roofline.product(rows, columns, outputs, weight_bytes(weight))._replace(fp8=True)
            theirs = None if run.dry else [_scaled_mm(x, weight)]
            case = f"{name} {outputs} x {columns}, rows {rows}"
            yield run.compare(
                case, [ours], "torch scaled_mm, without quantisation", theirs, run.floor(work), rest_s=0.2
            )


@suite("linears_exact")
def linears_exact(run: Run) -> Iterator[Record]:
    "linear of rows as they are (W8A16), 512 and 4096, V4-Flash's q_b and o_b, too; beside torch's of bf16 weights."
    sizes = [(name, FP8, *size) for name, size in run.pick(LINEARS, TINY_LINEARS).items()]
    sizes += [(name, FP8_E8M0, *size) for name, size in run.pick(V4_LINEARS, {"tiny e8m0": (96, 256)}).items()]
    for name, layout, outputs, columns in sizes:
        weight = random_weight(layout, outputs, columns, device=run.device)
        expanded = dequantise(weight).bfloat16()
        for rows in run.pick([512, 4096], [5]):
            x = torch.randn(rows, columns, dtype=torch.float32, device=run.device).bfloat16()
            some, ours = sampled(rows, 3, run.device), functools.partial(linear, x, weight)
            check_vectors(ours()[some], linear(x[some], weight, impl="reference"), LEVEL, "out")
            work = roofline.product(rows, columns, outputs, weight_bytes(weight))
            theirs = None if run.dry else [functools.partial(F.linear, x, expanded)]
            case = f"{name} {outputs} x {columns}, rows {rows}"
            yield run.compare(case, [ours], "torch linear, bf16 weight", theirs, run.floor(work), rest_s=0.2)


def _scaled_mm(x: torch.Tensor, weight: PackedWeight) -> Callable[[], torch.Tensor]:
    """torch's product of rows scaled by 128 columns and of blocks of 128 x 128; scales of rows lie column by column."""
    codes = x.to(torch.float8_e4m3fn)
    row_scales = torch.ones(x.shape[1] // 128, x.shape[0], dtype=torch.float32, device=x.device).t()
    by_row, by_block = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    return lambda: F.scaled_mm(
        codes, weight.codes.t(), row_scales, by_row, weight.scales.t(), by_block, output_dtype=torch.bfloat16
    )
