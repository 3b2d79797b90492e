"""What the experts of many tokens on Hopper support, and their tiles."""

from __future__ import annotations

import torch

from sparse_attn.framework.dispatch import YES, Support, no, not_on, slower
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.experts.hopper.constants import BOX, CONSUMERS, CTAS, LAUNCH_REGISTERS, STEP
from sparse_attn.ops.layers.experts.plan import Plan, Problem
from sparse_attn.workspace import Buffer, Scratch

FP8 = {32: 4, 64: 6, 128: 4}  # stages of the ring by rows of a tile
EXACT = {32: 3, 64: 4, 128: 2}
FEW_EACH = 12  # ids of an expert in the mean, below which exact rows are faster in `sorted`


def supports(problem: Problem, target: Target) -> Support:
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


def plan(problem: Problem, target: Target) -> Plan:
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
    scratch = Scratch((
        Buffer("order", (problem.rows,), torch.int32), Buffer("place", (problem.rows,), torch.int32),
        Buffer("with_empty", (spans, 3), torch.int32), Buffer("spans", (spans, 3), torch.int32),
        Buffer("count", (1,), torch.int32), Buffer("inner", (problem.rows, intermediate), dtype),
        Buffer("terms", (problem.rows, hidden), dtype), *(quantised if fp8 else ()),
    ))  # fmt: skip
    registers = LAUNCH_REGISTERS[CTAS[rows]]
    return Plan(
        block_m=rows, gate_up_block_n=outputs, down_block_n=outputs, num_stages=stages[rows], registers=registers,
        scratch=scratch,
    )  # fmt: skip
