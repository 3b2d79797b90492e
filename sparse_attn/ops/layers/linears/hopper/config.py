"""What the Hopper kernels of few rows support, and how their steps are dealt."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_attn.framework.dispatch import YES, Support, no, not_on, slower
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.linears.hopper.constants import BLOCK_K, OUTPUTS
from sparse_attn.ops.layers.linears.plan import Problem, StreamPlan
from sparse_attn.workspace import Buffer, Scratch

CONSUMERS = 2  # of a CTA; with four, partials of a tile are more and larger
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


def supports(problem: Problem, target: Target) -> Support:
    """stream_k."""
    machine = _supports(problem, target)
    if machine.able and problem.rows > max(FORMS):
        return no(f"rows: got {problem.rows}, allowed: at most {max(FORMS)}")
    return machine


def supports_wide(problem: Problem, target: Target) -> Support:
    """stream_k_wide."""
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


def plan(problem: Problem, target: Target) -> StreamPlan:
    return _plan(problem, target, FORMS)


def plan_wide(problem: Problem, target: Target) -> StreamPlan:
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
        1, block_m, block_n, BLOCK_K, False, 4 * CONSUMERS, form.stages, registers=form.registers,
        scratch=Scratch((partials,), tiles * CONSUMERS), grid=grid,
        consumer_registers=form.consumer_registers, together=form.together,
    )  # fmt: skip
