"""What swap-AB kernels support, their tiles, and splits of a linear: weights take the matrix unit's M dimension."""

from __future__ import annotations

import torch

from sparse_attn.device import grid
from sparse_attn.framework.dispatch import YES, Support, no, slower
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.products.problem import ExpertsPlan, ExpertsProblem, Plan, Problem, Tile
from sparse_attn.workspace import Buffer, Scratch

CODES = {"e2m1": ("e8m0", (1, 32)), "e4m3": ("", (0, 128))}  # scale, and block: columns are a multiple of the latter
BLOCK_N = 64  # what a warpgroup multiplies at once
ROWS = (16, 32, 64)  # of a tile; a row's bits are the same in each of them and in a wide one
FEW_ROWS = 8  # of a tile of e2m1: its matrix instruction is another, for which fewer registers are copied
WIDE_ROWS, WIDE_STEPS = 128, 32  # a tile of more rows, where a CTA has steps enough
MOST_ROWS = 128  # in the mean of a group
CTAS, CTAS_FEW = 2, 3  # that an SM holds; of few rows, whose splits may follow from the number of rows
SHARED_FEW = 128 << 10  # bytes of shared memory for CTAS_FEW
REGISTERS = {16: 128, 64: 168}  # by rows of a tile: with which it holds one more
SPLIT_STEPS, SPLIT_STEPS_MANY = 8, 12  # of a split at least; with 64 rows and more
INVARIANT_MOST = 512  # rows whose batch-invariant partials are there at once
PREFETCH = 512  # bytes of an output, of fewer than 64 rows: of all CTAs, what the memory gives in a few microseconds


def supports(problem: Problem, target: Target) -> Support:
    if problem.dtype != torch.bfloat16:
        return no(f"rows: got {str(problem.dtype).removeprefix('torch.')}, allowed: bfloat16")
    if problem.codes not in CODES:
        return no(f"codes: got {problem.codes}, allowed: {', '.join(CODES)}")
    scale, block = CODES[problem.codes]
    wrong = problem.block != block if scale else problem.block[1] % block[1]
    if wrong or scale not in ("", problem.scale):
        allowed = "1x32 of e8m0" if scale else f"a multiple of {block[1]} columns"
        return no(f"scale blocks: got {problem.block[0]}x{problem.block[1]} of {problem.scale}, allowed: {allowed}")
    block_k = plan(problem, target).block_k
    if problem.columns % block_k or not problem.columns:
        return no(f"columns: got {problem.columns}, allowed: multiples of {block_k}")
    if not problem.aligned:
        return no("codes: got any address and strides, allowed: contiguous columns, rows at multiples of 16 bytes")
    if problem.outputs > grid.MOST * BLOCK_N:
        most = grid.MOST * BLOCK_N
        return no(f"outputs: got {problem.outputs}, allowed: at most {most}, for which a launch has room")
    if problem.rows_each > MOST_ROWS and not problem.batch_invariant:
        return slower(f"rows: got {problem.rows_each:.0f} a group, allowed: at most {MOST_ROWS}")
    if target.vendor == "amd":
        return slower(f"target: got {target.name}, allowed: where it was measured")
    return YES


def plan(problem: Problem, target: Target) -> Plan:
    """The smallest tile that holds a group's rows in the mean; columns are split where CTAs stay in one wave. With
    batch_invariant splits do not follow from the number of rows, and every tile gives a row the same bits."""
    fp4, invariant = problem.codes == "e2m1", problem.batch_invariant
    block_m = _block_m(problem, target)
    block_k = 256 if fp4 and block_m < 64 and not invariant else 128
    across = -(-problem.outputs // BLOCK_N)
    least = SPLIT_STEPS if block_m < 64 or invariant else SPLIT_STEPS_MANY
    ctas = (problem.groups if invariant else problem.tiles(block_m)) * across
    held = _held(problem, block_m, target)
    splits = min(problem.columns // 128 // least, held * target.num_sms // max(1, ctas))
    num_stages = 4 if block_m <= ROWS[0] and (fp4 or problem.ends) else 3
    registers = None if problem.ends else _registers(problem.tiles(block_m) * across, held, block_m, target)
    tile = Tile(block_m, BLOCK_N, block_k, 4, 1 if target.interpreted else num_stages, registers)
    return planned(problem, tile, splits)


def _held(problem: Problem, block_m: int, target: Target) -> int:
    """CTAs of an SM. A thread that decodes e2m1 for 16 or 32 rows takes registers (229 to 255) for two of them."""
    most = FEW_ROWS if problem.codes == "e2m1" else ROWS[1]
    few = block_m <= most and not problem.batch_invariant and target.shared_memory >= SHARED_FEW
    return CTAS_FEW if few else CTAS


def _registers(ctas: int, held: int, block_m: int, target: Target) -> int | None:
    """Of a thread, for one CTA more an SM where a linear has more than one wave; None: as many as they take."""
    if not target.is_hopper or ctas <= held * target.num_sms:
        return None
    return REGISTERS.get(block_m)


def _block_m(problem: Problem, target: Target) -> int:
    each, fp4 = problem.rows_each, problem.codes == "e2m1"
    if fp4 and each <= FEW_ROWS and not problem.batch_invariant:
        return FEW_ROWS
    wide = each > ROWS[-1] and problem.columns // 128 >= WIDE_STEPS
    if target.is_hopper and wide and not fp4 and not problem.ends:
        return WIDE_ROWS
    return next((rows for rows in ROWS if each <= rows), ROWS[-1])


def planned(problem: Problem, tile: Tile, splits: int) -> Plan:
    """With ``splits`` at most, so many that none is empty."""
    steps = problem.columns // tile.columns
    splits = -(-steps // -(-steps // max(1, splits))) if steps else 1
    return Plan(
        tiles=problem.tiles(tile.rows),
        block_m=tile.rows,
        block_n=tile.outputs,
        block_k=tile.columns,
        scaled_values=problem.codes == "e2m1",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        splits=splits,
        prefetch=0 if problem.ends or tile.rows >= ROWS[-1] else PREFETCH,
        registers=tile.registers,
        scratch=_scratch(problem, tile, splits),
    )


def rows_at_once(problem: Problem, splits: int) -> int:
    """Rows of a launch. Batch-invariant splits do not get fewer with more rows."""
    parted = problem.batch_invariant and splits > 1 and not problem.ends
    return min(problem.rows, INVARIANT_MOST) if parted else problem.rows


def _scratch(problem: Problem, tile: Tile, splits: int) -> Scratch:
    """Rows in the order of the codes; partials, and how many of a tile there are."""
    rows = rows_at_once(problem, splits)
    placed = Buffer("placed", (rows, problem.columns), problem.dtype)
    if splits == 1:
        return Scratch((placed,))
    partials = Buffer("partials", (splits, rows, problem.outputs), torch.float32)
    tiles = problem._replace(rows=rows).tiles(tile.rows)
    return Scratch((placed, partials), tiles * -(-problem.outputs // tile.outputs))


# --- experts of few tokens

FEW_BLOCK_M = 8
MOST_IDS = 1024  # ids that a CTA looks through
MOST_EACH, MOST_EACH_FP4 = 0.25, 0.5  # ids of an expert in the mean; more are sorted, which costs a launch


def supports_experts(problem: ExpertsProblem, target: Target) -> Support:
    if problem.activations != "exact":
        return no(f"activations: got {problem.activations}, allowed: exact")
    for name, one in (("gate_up", problem.gate_up), ("down", problem.down)):
        alone = supports(one._replace(rows=1), target)
        if not alone.ok:
            return alone._replace(reason=f"{name}: {alone.reason}")
    rows = problem.k if problem.batch_invariant else problem.rows
    if rows > MOST_IDS:
        return no(f"ids: got {rows}, allowed: at most {MOST_IDS}")
    most = MOST_EACH_FP4 if problem.gate_up.codes == "e2m1" else MOST_EACH
    if not problem.batch_invariant and problem.rows > most * problem.gate_up.groups:
        return slower(f"ids: got {problem.rows}, allowed: at most {most} an expert")
    return YES


def plan_experts(problem: ExpertsProblem, target: Target) -> ExpertsPlan:
    first, second = (plan(one._replace(rows=1), target).block_k for one in (problem.gate_up, problem.down))
    tokens, (hidden, intermediate) = tokens_at_once(problem), (problem.gate_up.columns, problem.down.columns)
    scratch = Scratch(
        (
            Buffer("placed", (tokens, hidden), problem.gate_up.dtype),
            Buffer("inner", (tokens * problem.k, intermediate), problem.gate_up.dtype),
            Buffer("terms", (tokens * problem.k, hidden), torch.float32),
        )
    )
    num_stages = 1 if target.interpreted else 3
    return ExpertsPlan(FEW_BLOCK_M, BLOCK_N, 4, first, BLOCK_N, 4, second, num_stages, scratch=scratch)


def tokens_at_once(problem: ExpertsProblem) -> int:
    """As many as a CTA looks through: fewer than all only where it has to be batch-invariant."""
    return min(problem.tokens, max(1, MOST_IDS // problem.k))


# --- experts of many tokens, whose rows are sorted

SORTED_ROWS = (16, 32, 64, 128)  # of a tile
PORTABLE_ROWS = 64  # at most, where the matrix unit takes all operands out of registers, and beside scaled products


def supports_sorted(problem: ExpertsProblem, target: Target) -> Support:
    if problem.activations != "exact":
        return no(f"activations: got {problem.activations}, allowed: exact")
    if problem.batch_invariant:
        return no("batch_invariant: got true, allowed: false, for tiles follow from the number of rows")
    for name, one in (("gate_up", problem.gate_up), ("down", problem.down)):
        alone = supports(one._replace(rows=1), target)
        if not alone.able:
            return alone._replace(reason=f"{name}: {alone.reason}")
        if not alone.ok:
            return alone
    most = problem.gate_up.groups + problem.rows // SORTED_ROWS[0]
    if most > grid.MOST:
        return slower(f"ids: got {problem.rows}, allowed: tiles for which a launch has room")
    return YES


def plan_sorted(problem: ExpertsProblem, target: Target) -> ExpertsPlan:
    """The smallest tile of rows that holds an expert's in the mean, and a quarter more."""
    scaled = "e4m3" in (problem.gate_up.codes, problem.down.codes)
    most = PORTABLE_ROWS if scaled or not target.reads_shared_operands else SORTED_ROWS[-1]
    most = SORTED_ROWS[0] if target.interpreted else most
    rows = min(most, next((rows for rows in SORTED_ROWS if problem.each * 1.25 <= rows), most))
    return planned_sorted(problem, *(_sorted_tile(rows, one, target) for one in (problem.gate_up, problem.down)))


def _sorted_tile(rows: int, product: Problem, target: Target) -> Tile:
    if target.interpreted:
        return Tile(rows, 64, 128, 4, 1)
    if not target.reads_shared_operands and rows > SORTED_ROWS[0]:  # 256 columns would be spilled
        return Tile(rows, 64, 128, 4, 3)
    if product.codes == "e4m3":  # a scale block at a time
        return Tile(rows, 64, 128, 4, 3) if rows >= 64 else Tile(rows, 64, 128, 4, 4)
    if rows >= 64:
        return Tile(rows, 128, 128, 8, 3, 128 if rows == 64 and target.is_hopper else None)
    return Tile(rows, 64, 256, 4, 3, (128 if rows == SORTED_ROWS[0] else 168) if target.is_hopper else None)


def planned_sorted(problem: ExpertsProblem, gate_up: Tile, down: Tile) -> ExpertsPlan:
    """With these tiles, of as many rows."""
    assert gate_up.rows == down.rows
    hidden, intermediate, dtype = problem.gate_up.columns, problem.down.columns, problem.gate_up.dtype
    tiles = problem.gate_up.groups + problem.rows // gate_up.rows
    scratch = Scratch(
        (
            Buffer("placed", (problem.tokens, hidden), dtype),
            Buffer("order", (problem.rows,), torch.int32),
            Buffer("spans", (tiles, 3), torch.int32),
            Buffer("inner", (problem.rows, intermediate), dtype),
            Buffer("terms", (problem.rows, hidden), dtype),
        )
    )
    return ExpertsPlan(
        block_m=gate_up.rows,
        gate_up_block_n=gate_up.outputs,
        gate_up_warps=gate_up.num_warps,
        gate_up_block_k=gate_up.columns,
        down_block_n=down.outputs,
        down_warps=down.num_warps,
        down_block_k=down.columns,
        num_stages=gate_up.num_stages,
        registers=gate_up.registers,
        scratch=scratch,
    )
