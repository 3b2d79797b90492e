"""What the Hopper kernels of few rows support, and how their steps are dealt."""

from __future__ import annotations

import torch

from sparse_attn.dispatch import YES, Support, no, not_on, slower
from sparse_attn.ops.grouped_linear.hopper.constants import BLOCK_K, OUTPUTS
from sparse_attn.ops.grouped_linear.plan import Problem, StreamPlan
from sparse_attn.target import Target
from sparse_attn.workspace import Buffer, Scratch

ROWS = (8, 16)  # of a tile
CONSUMERS = 2  # of a CTA; with four, partials of a tile are more and larger
STAGES = 3
CTAS = 2  # that share an SM
LEAST_STEPS = 4  # of a CTA
REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 80, 104, 24  # at launch, for CTAS an SM, and then
WIDE = {32: 8, 64: 6, 128: 4}  # stream_k_wide: rows of a tile -> stages; one CTA an SM
WIDE_REGISTERS, WIDE_CONSUMER_REGISTERS = 168, 216
MOST_OUTPUTS = 1 << 23  # far above any model's, so that steps and outputs of all tiles are int32


def supports(problem: Problem, target: Target) -> Support:
    """stream_k."""
    machine = _supports(problem, target)
    if machine.able and not problem.rows_aligned:
        return no("rows: got any address and strides, allowed: contiguous columns, rows at multiples of 16 bytes")
    if machine.able and problem.rows > ROWS[-1]:
        return no(f"rows: got {problem.rows}, allowed: at most {ROWS[-1]}")
    return machine


def supports_wide(problem: Problem, target: Target) -> Support:
    """stream_k_wide."""
    machine = _supports(problem, target)
    if machine.able and problem.rows > max(WIDE):
        return no(f"rows: got {problem.rows}, allowed: at most {max(WIDE)}")
    if machine.able and problem.rows <= ROWS[-1]:
        return slower(f"rows: got {problem.rows}, faster from {ROWS[-1] + 1}")
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
    if not problem.aligned:
        return no("codes: got any address and strides, allowed: contiguous columns, rows at multiples of 16 bytes")
    if problem.outputs > MOST_OUTPUTS:
        return no(f"outputs: got {problem.outputs}, allowed: at most {MOST_OUTPUTS}")
    return YES


def plan(problem: Problem, target: Target) -> StreamPlan:
    block_m = next(rows for rows in ROWS if problem.rows <= rows)
    return _plan(problem, CTAS * target.num_sms, block_m, STAGES, REGISTERS, CONSUMER_REGISTERS, ())


def plan_wide(problem: Problem, target: Target) -> StreamPlan:
    block_m = next(rows for rows in WIDE if problem.rows <= rows)
    placed = Buffer("placed", (problem.rows, problem.columns), torch.bfloat16)
    registers = WIDE_REGISTERS, WIDE_CONSUMER_REGISTERS
    return _plan(problem, target.num_sms, block_m, WIDE[block_m], *registers, (placed,))


def _plan(
    problem: Problem, most_ctas: int, block_m: int, stages: int, registers: int, more: int, buffers: tuple[Buffer, ...]
) -> StreamPlan:  # fmt: skip
    block_n = OUTPUTS * CONSUMERS
    tiles = -(-problem.outputs // block_n)
    steps = tiles * (problem.columns // BLOCK_K)
    grid = max(1, min(most_ctas, steps // LEAST_STEPS))
    partials = Buffer("partials", (grid, 2, block_m, block_n), torch.float32)
    return StreamPlan(
        1, block_m, block_n, BLOCK_K, False, 4 * CONSUMERS, stages, registers=registers,
        scratch=Scratch((*buffers, partials), tiles * CONSUMERS), grid=grid, consumer_registers=more,
    )  # fmt: skip
