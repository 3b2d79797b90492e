"""What products in Triton support whose rows take the matrix unit's M dimension, their tiles and their scratch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparse_attn.device import grid
from sparse_attn.framework.dispatch import YES, Support, no, not_on, slower
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.products.problem import PLAIN, ExpandedPlan, Plan, Problem, Tile
from sparse_attn.workspace import Buffer, Scratch

# Tiles, of as many columns at most, by the rows of a group above which they are taken.
# Up to 16 rows the weight's bytes bound a product: many CTAs read it, some tiles ahead.
TILES = {
    256: Tile(128, 64, 64, 8, 2),
    64: Tile(64, 128, 64, 8, 2),
    16: Tile(32, 64, 128, 4, 2),
    0: Tile(16, 32, 128, 4, 3),
}
# fp32 is multiplied without a matrix unit: few products in a thread, for its operands are many.
FP32_TILES = {16: Tile(32, 32, 32, 4, 2), 0: Tile(16, 32, 32, 4, 2)}
INVARIANT_ROWS = 32  # of the tile that is taken, however many rows there are
INTERPRETED_TILES = {0: Tile(16, 64, 128, 4, 1)}


def supports(problem: Problem, target: Target) -> Support:
    tiles = -(-problem.outputs // plan(problem, target).block_n)
    if tiles > grid.MOST:
        most = grid.MOST * plan(problem, target).block_n
        return no(f"outputs: got {problem.outputs}, allowed: at most {most}, for which a launch has room")
    return YES


def plan(problem: Problem, target: Target) -> Plan:
    """The largest tile that the groups' rows fill, or a smaller one that gives every multiprocessor work."""
    tiles = FP32_TILES if problem.dtype == torch.float32 else TILES
    for above, tile in (INTERPRETED_TILES if target.interpreted else tiles).items():
        count = problem.tiles(tile.rows)
        if problem.batch_invariant and tile.rows == INVARIANT_ROWS:
            break
        if (
            not problem.batch_invariant
            and problem.rows_each > above
            and count * -(-problem.outputs // tile.outputs) >= target.num_sms
        ):
            break
    block_k, scaled_values = _columns(problem, tile.columns)
    return Plan(count, tile.rows, tile.outputs, block_k, scaled_values, tile.num_warps, tile.num_stages)


def _columns(problem: Problem, most: int) -> tuple[int, bool]:
    """(columns of a product, whether its values are scaled first). Codes times powers of two are exact in bf16 and in
    fp32, not in fp16, whose exponents are few."""
    if problem.codes == PLAIN:
        return most, False
    width = problem.block[1]
    within = min(width & -width, most)
    exact = problem.scale == "e8m0" and problem.dtype != torch.float16
    return (most, True) if exact and within < most and most % width == 0 else (within, False)


# --- codes that are expanded to bf16 first

DECODED_ROWS = 128  # of a group in the mean, for which codes are decoded in registers
EXPANDED_BYTES = 64 << 20  # of expanded values at a time
ALIGNED = 8  # values: 16 bytes
STEP = 128  # columns, within one scale block or values that are scaled already
EXPANDED_TILE = Tile(
    128, 128, STEP, 8, 3
)  # with scales of fp32, sums of a step and of all take half of the registers each
EXPANDED_FEW_TILES = Tile(64, 64, STEP, 4, 3)  # where those would leave half of the multiprocessors without work
EXPANDED_INTERPRETED = Tile(16, 64, STEP // 2, 4, 1)


def supports_expanded(problem: Problem, target: Target) -> Support:
    if not (target.is_hopper or target.interpreted):
        return not_on(target, "sm_90")
    if problem.dtype != torch.bfloat16:
        return no(f"rows: got {str(problem.dtype).removeprefix('torch.')}, allowed: bfloat16")
    if problem.codes == PLAIN:
        return no("weight: got a plain one, allowed: packed")
    if problem.batch_invariant:
        return no("batch_invariant: got True, allowed: False, for few rows have other kernels")
    if not problem.aligned or not problem.rows_aligned:
        allowed = "contiguous columns, rows at multiples of 16 bytes"
        return no(f"rows, codes: got any address and strides, allowed: {allowed}")
    if problem.columns % ALIGNED or not problem.columns:
        return no(f"columns: got {problem.columns}, allowed: multiples of {ALIGNED}")
    if problem.block[1] % STEP and problem.scale != "e8m0":
        return no(f"scale blocks: got {problem.block[1]} columns of fp32, allowed: multiples of {STEP}")
    if not _most_outputs(problem):
        got = f"{problem.groups} groups of {problem.columns} columns"
        return no(
            f"weight: got {got}, allowed: {EXPANDED_TILE.outputs} outputs of each in {EXPANDED_BYTES} bytes of bf16"
        )
    if problem.rows_each <= DECODED_ROWS:
        return slower(f"rows: got {problem.rows_each:.0f} a group, faster from {DECODED_ROWS + 1}")
    return YES


def plan_expanded(problem: Problem, target: Target) -> ExpandedPlan:
    """Scratch has room for as many outputs however many rows there are, so that a step of fewer rows wants no more."""
    most = min(problem.outputs, _most_outputs(problem))
    outputs, tile = _outputs_at_once(problem, most, target.num_sms), EXPANDED_TILE
    if target.interpreted:
        tile = EXPANDED_INTERPRETED
    elif 2 * problem.tiles(tile.rows) * -(-outputs // tile.outputs) <= target.num_sms:
        tile = EXPANDED_FEW_TILES
    expanded = Buffer("expanded", (problem.groups, most, problem.columns), torch.bfloat16)
    return ExpandedPlan(
        tiles=problem.tiles(tile.rows),
        block_m=tile.rows,
        block_n=tile.outputs,
        block_k=tile.columns,
        scaled_values=problem.scale == "e8m0",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        scratch=Scratch((expanded,)),
        outputs_at_once=outputs,
    )


def _most_outputs(problem: Problem) -> int:
    return EXPANDED_BYTES // (2 * problem.columns * problem.groups) // EXPANDED_TILE.outputs * EXPANDED_TILE.outputs


def _outputs_at_once(problem: Problem, most: int, num_sms: int) -> int:
    """In whole tiles: those with which products take the fewest waves, and of those the most."""
    rows = problem.tiles(EXPANDED_TILE.rows)

    def waves(outputs: int) -> int:
        whole, rest = divmod(problem.outputs, outputs)
        parts = (-(-rows * -(-part // EXPANDED_TILE.outputs) // num_sms) for part in (outputs, rest))
        return sum(times * each for times, each in zip((whole, 1), parts, strict=True))

    return min(
        (most, *range(most // EXPANDED_TILE.outputs * EXPANDED_TILE.outputs, most // 2, -EXPANDED_TILE.outputs)),
        key=waves,
    )


# --- rows that are quantised to fp8

GROUP = 128  # columns under one scale of a row
FP8_BLOCK = 32  # of whose multiples scale blocks have columns
FP8_TILES = (Tile(128, 64, GROUP, 8, 3), Tile(64, 64, GROUP, 4, 3), Tile(16, 64, GROUP, 4, 3))
# Where the matrix unit reads fp8 out of shared memory, instead of the first, and of the others with tiles for all
# multiprocessors: sums of all steps and of one take half of the registers each.
FP8_WIDE = Tile(128, 128, GROUP, 8, 4)
FP8_WIDE_FEW = Tile(64, 128, GROUP, 4, 4)
FP8_INVARIANT_TILE = FP8_TILES[1]  # however many rows there are
TORCH_ROWS, TORCH_COLUMNS = 16, 512  # torch's product has multiples of these, so that scales lie as it wants them


def supports_torch(problem: Problem, target: Target) -> Support:
    """torch.nn.functional.scaled_mm with blocks of 1 x 128 and 128 x 128."""
    if not target.is_hopper or not hasattr(F, "scaled_mm"):
        return not_on(target, "sm_90, with a torch that has scaled_mm")
    if problem.batch_invariant:
        return no("batch_invariant: got True, allowed: False, for it chooses by rows")
    if problem.ends:
        return no("ends: got some, allowed: none")
    if (problem.codes, problem.block) != ("e4m3", (GROUP, GROUP)):
        return no(f"weight: got {problem.codes} of {problem.block}, allowed: e4m3 of {(GROUP, GROUP)}")
    if not problem.whole:
        return no("weight: got a scale block that was cut, allowed: whole ones")
    if problem.dtype != torch.bfloat16:
        return no(f"rows: got {str(problem.dtype).removeprefix('torch.')}, allowed: bfloat16")
    if not problem.aligned:
        return no("codes: got any address and strides, allowed: contiguous columns, rows at multiples of 16 bytes")
    if problem.columns % TORCH_COLUMNS or problem.outputs % GROUP:
        return no(
            f"outputs, columns: got {problem.outputs} and {problem.columns}, allowed: multiples of {GROUP} and "
            f"{TORCH_COLUMNS}"
        )
    return YES


def plan_torch(problem: Problem, target: Target) -> Plan:
    """torch tiles as it likes. Rows that fill up the last TORCH_ROWS hold anything. It takes no bytes for scales of the
    weight, so those are widened."""
    rows, groups = -(-problem.rows // TORCH_ROWS) * TORCH_ROWS, problem.columns // GROUP
    buffers = Buffer("rows", (rows, problem.columns), torch.uint8), Buffer("row_scales", (groups, rows), torch.float32)
    widened = Buffer("scales", (problem.outputs // GROUP, groups), torch.float32)
    scratch = Scratch(buffers if problem.scale == "fp32" else (*buffers, widened))
    return Plan(0, 0, 1, 0, False, 0, 0, scratch=scratch)


def plan_fp8(problem: Problem, target: Target) -> Plan:
    """The largest tile that the groups' rows fill in the mean; a larger one where that is faster."""
    tile = next((tile for tile in FP8_TILES if problem.rows_each >= tile.rows), FP8_TILES[-1])
    if target.fp8_dot and target.reads_shared_operands:
        tile = _wide_tile(tile, problem, target)
    if problem.batch_invariant:
        tile = FP8_INVARIANT_TILE
    if target.interpreted:
        tile = FP8_TILES[-1]._replace(num_stages=1)
    grid.check("outputs", problem.outputs, tile.outputs)
    block_k = GROUP if problem.block[1] % GROUP == 0 else FP8_BLOCK
    row_groups = -(-problem.columns // GROUP)
    scratch = Scratch(
        (
            Buffer("rows", (problem.rows, row_groups * GROUP), torch.uint8),
            Buffer("row_scales", (problem.rows, row_groups), torch.float32),
        )
    )
    return Plan(
        tiles=problem.tiles(tile.rows),
        block_m=tile.rows,
        block_n=tile.outputs,
        block_k=block_k,
        scaled_values=False,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        scratch=scratch,
    )


def _wide_tile(tile: Tile, problem: Problem, target: Target) -> Tile:
    """What is taken instead of ``tile``, one of FP8_TILES. Groups of fewer rows than the last tile has keep it."""
    if tile is FP8_TILES[0]:
        return FP8_WIDE
    ctas = problem.tiles(FP8_WIDE_FEW.rows) * -(-problem.outputs // FP8_WIDE_FEW.outputs)
    fits = problem.codes == "e4m3" and problem.block[1] % GROUP == 0 and problem.rows_each >= tile.rows
    return FP8_WIDE_FEW if fits and ctas >= target.num_sms else tile
