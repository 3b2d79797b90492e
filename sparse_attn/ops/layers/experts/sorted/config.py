"""What the experts of many tokens support, and their tiles."""

from __future__ import annotations

import torch

from sparse_attn.device import grid
from sparse_attn.framework.dispatch import YES, Support, no, slower
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.experts.plan import Plan, Problem
from sparse_attn.ops.layers.experts.swap_ab.config import PRODUCT
from sparse_attn.ops.layers.linears.plan import Problem as Product
from sparse_attn.ops.layers.linears.plan import Tile
from sparse_attn.workspace import Buffer, Scratch

ROWS = (16, 32, 64, 128)  # of a tile
PORTABLE_ROWS = 64  # at most, where the matrix unit takes all operands out of registers, and beside scaled products


def supports(problem: Problem, target: Target) -> Support:
    if problem.activations != "exact":
        return no(f"activations: got {problem.activations}, allowed: exact")
    if problem.batch_invariant:
        return no("batch_invariant: got true, allowed: false, for tiles follow from the number of rows")
    for name, one in (("gate_up", problem.gate_up), ("down", problem.down)):
        alone = PRODUCT.supports(one._replace(rows=1), target)
        if not alone.able:
            return alone._replace(reason=f"{name}: {alone.reason}")
        if not alone.ok:
            return alone
    most = problem.gate_up.groups + problem.rows // ROWS[0]
    if most > grid.MOST:
        return slower(f"ids: got {problem.rows}, allowed: tiles for which a launch has room")
    return YES


def plan(problem: Problem, target: Target) -> Plan:
    """The smallest tile of rows that holds an expert's in the mean, and a quarter more."""
    scaled = "e4m3" in (problem.gate_up.codes, problem.down.codes)
    most = PORTABLE_ROWS if scaled or not target.reads_shared_operands else ROWS[-1]
    most = ROWS[0] if target.interpreted else most
    rows = min(most, next((rows for rows in ROWS if problem.each * 1.25 <= rows), most))
    return planned(problem, *(_tile(rows, one, target) for one in (problem.gate_up, problem.down)))


def _tile(rows: int, product: Product, target: Target) -> Tile:
    if target.interpreted:
        return Tile(rows, 64, 128, 4, 1)
    if not target.reads_shared_operands and rows > ROWS[0]:  # 256 columns would be spilled
        return Tile(rows, 64, 128, 4, 3)
    if product.codes == "e4m3":  # a scale block at a time
        return Tile(rows, 64, 128, 4, 3) if rows >= 64 else Tile(rows, 64, 128, 4, 4)
    if rows >= 64:
        return Tile(rows, 128, 128, 8, 3, 128 if rows == 64 and target.is_hopper else None)
    return Tile(rows, 64, 256, 4, 3, (128 if rows == ROWS[0] else 168) if target.is_hopper else None)


def planned(problem: Problem, gate_up: Tile, down: Tile) -> Plan:
    """With these tiles, of as many rows."""
    assert gate_up.rows == down.rows
    hidden, intermediate, dtype = problem.gate_up.columns, problem.down.columns, problem.gate_up.dtype
    tiles = problem.gate_up.groups + problem.rows // gate_up.rows
    scratch = Scratch((
        Buffer("placed", (problem.tokens, hidden), dtype), Buffer("order", (problem.rows,), torch.int32),
        Buffer("spans", (tiles, 3), torch.int32), Buffer("inner", (problem.rows, intermediate), dtype),
        Buffer("terms", (problem.rows, hidden), dtype),
    ))  # fmt: skip
    return Plan(
        gate_up.rows, gate_up.outputs, gate_up.num_warps, gate_up.columns, down.outputs, down.num_warps, down.columns,
        gate_up.num_stages, gate_up.registers, scratch,
    )  # fmt: skip
