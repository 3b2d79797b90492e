"""What the Hopper kernels support: linears of few rows, how their steps are dealt, and experts of many tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_attn.framework.dispatch import YES, Support, no, not_on, slower
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.products.hopper.constants import (
    BLOCK_K,
    BOX,
    CONSUMERS,
    CTAS,
    LAUNCH_REGISTERS,
    OUTPUTS,
    STEP,
)
from sparse_attn.ops.layers.products.problem import ExpertsPlan, ExpertsProblem, Problem, StreamPlan
from sparse_attn.workspace import Buffer, Scratch

LEAST_STEPS = 4  # of a CTA
EVEN = 0.7  # least share of the CTAs that fit, for runs to end with tiles: fewer would not saturate memory


class Form(NamedTuple):
    """CTAs that share an SM, stages, registers of a thread at launch and of a consumer's, partials read together."""

    ctas: int
    stages: int
    registers: int
    consumer_registers: int
    together: int


# By rows of a tile.
FORMS = {8: Form(2, 3, 80, 104, 8), 16: Form(2, 3, 80, 104, 8)}  # of stream_k
WIDE = {32: Form(1, 8, 168, 216, 4), 64: Form(1, 6, 168, 216, 4), 128: Form(1, 4, 168, 216, 2)}  # of stream_k_wide
MOST_ROWS = 1024  # of stream_k_wide, some at a time; with more, codes are worth being expanded first
CODES_A_ROW = 1 << 15  # of a weight at least, beyond one launch: each takes 15 us, however few codes there are
PRODUCER_REGISTERS = 24
MOST_OUTPUTS = 1 << 23  # far above any model's, so that steps and outputs of all tiles are int32


def supports_stream_k(problem: Problem, target: Target) -> Support:
    machine = _supports(problem, target)
    if machine.able and problem.rows > max(FORMS):
        return no(f"rows: got {problem.rows}, allowed: at most {max(FORMS)}")
    return machine


def supports_stream_k_wide(problem: Problem, target: Target) -> Support:
    machine = _supports(problem, target)
    most = max(max(WIDE), min(MOST_ROWS, problem.outputs * problem.columns // CODES_A_ROW))
    if machine.able and not max(FORMS) < problem.rows <= most:
        return slower(f"rows: got {problem.rows}, faster with {max(FORMS) + 1} to {most}")
    return machine


def _supports(problem: Problem, target: Target) -> Support:
    if not target.is_hopper:
        return not_on(target, "sm_90")
    if problem.dtype != torch.bfloat16:
        return no(f"rows: got {str(problem.dtype).removeprefix('torch.')}, allowed: bfloat16")
    if problem.codes != "e4m3" or problem.block[1] % BLOCK_K:
        allowed = f"e4m3, a multiple of {BLOCK_K} columns a scale"
        return no(f"codes: got {problem.codes}, {problem.block[1]} columns a scale, allowed: {allowed}")
    if problem.columns % BLOCK_K or not problem.columns:
        return no(f"columns: got {problem.columns}, allowed: multiples of {BLOCK_K}")
    if problem.ends:
        return no("ends: got a tensor, allowed: none")
    if problem.batch_invariant:
        return no("batch_invariant: got True, allowed: False")
    if not problem.rows_aligned:
        return no("rows: got any address and strides, allowed: contiguous columns, rows at multiples of 16 bytes")
    if not problem.aligned:
        return no("codes: got any address and strides, allowed: contiguous columns, rows at multiples of 16 bytes")
    if problem.outputs > MOST_OUTPUTS:
        return no(f"outputs: got {problem.outputs}, allowed: at most {MOST_OUTPUTS}")
    return YES


def plan_stream_k(problem: Problem, target: Target) -> StreamPlan:
    return _plan(problem, target, FORMS)


def plan_stream_k_wide(problem: Problem, target: Target) -> StreamPlan:
    return _plan(problem, target, WIDE)


def rows_at_once(rows: int) -> int:
    """Of a launch of stream_k_wide: as few launches as its largest tile allows, each of about as many rows."""
    return -(-rows // -(-rows // max(WIDE)))


def _ctas(tiles: int, steps: int, each: int, target: Target) -> int:
    """The grid for ``tiles`` of ``steps`` steps, at most ``each`` CTAs an SM. Preferably all CTAs have whole tiles, or
    all tiles have equally many CTAs."""
    most = max(1, min(each * target.num_sms, tiles * steps // LEAST_STEPS))
    even = [n for n in range(1, most + 1) if tiles % n == 0 or (n % tiles == 0 and steps % (n // tiles) == 0)]
    return even[-1] if even[-1] >= EVEN * most else most


def _plan(problem: Problem, target: Target, forms: dict[int, Form]) -> StreamPlan:
    most = rows_at_once(problem.rows)
    block_m = next(rows for rows in forms if most <= rows)
    form = forms[block_m]
    block_n = OUTPUTS * CONSUMERS
    tiles = -(-problem.outputs // block_n)
    grid = _ctas(tiles, problem.columns // BLOCK_K, form.ctas, target)
    partials = Buffer("partials", (grid, 2, block_m, block_n), torch.float32)
    return StreamPlan(
        tiles=1,
        block_m=block_m,
        block_n=block_n,
        block_k=BLOCK_K,
        scaled_values=False,
        num_warps=4 * CONSUMERS,
        num_stages=form.stages,
        registers=form.registers,
        scratch=Scratch((partials,), tiles * CONSUMERS),
        grid=grid,
        consumer_registers=form.consumer_registers,
        together=form.together,
    )


# --- experts

FP8 = {32: 4, 64: 6, 128: 4}  # stages of the ring by rows of a tile
EXACT = {32: 3, 64: 4, 128: 2}
FEW_EACH = 12  # ids of an expert in the mean, below which exact rows are faster in `sorted`


def supports_experts(problem: ExpertsProblem, target: Target) -> Support:
    if not target.is_hopper:
        return not_on(target, "sm_90")
    if problem.batch_invariant:
        return no("batch_invariant: got true, allowed: false, for tiles follow from the number of rows")
    for name, one in (("gate_up", problem.gate_up), ("down", problem.down)):
        if one.dtype != torch.bfloat16:
            return no(f"x: got {str(one.dtype).removeprefix('torch.')}, allowed: bfloat16")
        if one.codes != "e2m1" or one.block != (1, 32) or one.scale != "e8m0":
            got = f"{one.codes}, {one.block[0]}x{one.block[1]} of {one.scale}"
            return no(f"{name}: got {got}, allowed: e2m1, 1x32 of e8m0")
        if one.columns % STEP or not one.columns:
            return no(f"{name}: columns: got {one.columns}, allowed: multiples of {STEP}")
        if not one.aligned:
            allowed = "contiguous columns, rows at multiples of 16 bytes"
            return no(f"{name}: codes: got any address and strides, allowed: {allowed}")
        if not one.scales_aligned:
            return no(f"{name}: scales: got any address and strides, allowed: rows at multiples of 8 bytes")
    if problem.activations == "exact" and problem.each < FEW_EACH:
        return slower(f"ids: got {problem.rows}, faster from {FEW_EACH} an expert")
    return YES


def plan_experts(problem: ExpertsProblem, target: Target) -> ExpertsPlan:
    fp8 = problem.activations == "fp8"
    stages, outputs = FP8 if fp8 else EXACT, 2 * CONSUMERS * BOX
    rows = next((rows for rows in stages if problem.each * 1.25 <= rows), max(stages))
    hidden, intermediate, dtype = problem.gate_up.columns, problem.down.columns, problem.gate_up.dtype
    spans = problem.gate_up.groups + problem.rows // rows
    quantised = (
        Buffer("scales", (problem.rows,), torch.float32),
        Buffer("inner_codes", (problem.rows, intermediate), torch.uint8),
        Buffer("inner_scales", (problem.rows,), torch.float32),
    )
    scratch = Scratch(
        (
            Buffer("order", (problem.rows,), torch.int32),
            Buffer("place", (problem.rows,), torch.int32),
            Buffer("with_empty", (spans, 3), torch.int32),
            Buffer("spans", (spans, 3), torch.int32),
            Buffer("count", (1,), torch.int32),
            Buffer("inner", (problem.rows, intermediate), dtype),
            Buffer("terms", (problem.rows, hidden), dtype),
            *(quantised if fp8 else ()),
        )
    )
    registers = LAUNCH_REGISTERS[CTAS[rows]]
    return ExpertsPlan(
        block_m=rows,
        gate_up_block_n=outputs,
        down_block_n=outputs,
        num_stages=stages[rows],
        registers=registers,
        scratch=scratch,
    )
