"""The GPU implementation: a launch a step. None of them takes scratch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_attn.device import histogram, pdl
from sparse_attn.device.rows import is_aligned
from sparse_attn.framework.target import Target, interpreting, target_of
from sparse_attn.ops.topk.ranks import fake
from sparse_attn.ops.topk.ranks.fake import BITS, LEVELS, SHIFTS
from sparse_attn.ops.topk.ranks.portable import digits, one_gather

CTAS_AN_SM = 2  # that rows are split for, of count_ties and take_winners
WHOLE = 32768  # columns up to which a row's digits have one CTA: several add to counts that a launch of its own zeroes
SAME_SMEM = True
REGISTERS = 96  # of a thread of take_winners, of which rows of several chunks take 113 where left alone
CHUNK = 256  # blocks whose ties a CTA of take_winners counts together


class Tile(NamedTuple):
    """columns: that a CTA looks at together."""

    columns: int
    num_warps: int


DIGITS, WHOLE_DIGITS = Tile(8192, 16), Tile(16384, 16)  # the latter where it holds all that a CTA loads early
FEW, MANY = Tile(1024, 4), Tile(4096, 8)  # of count_ties and take_winners: where CTAs have a tile each, and where not
LEAST_EACH = 512  # candidates of a rank, padded: a thread has one at least
PACK_WARPS = 4
MERGED_BLOCKS, PORTABLE_MERGED_BLOCKS = 128, 4  # of each rank, that a CTA of merge_candidates looks at together
PORTABLE_DIGITS = Tile(2048, 8)  # counted by tl.histogram


class Merging(NamedTuple):
    """ranks, candidates: powers of two."""

    ranks: int
    candidates: int
    num_warps: int


class Plan(NamedTuple):
    """splits: CTAs of a row. threads: of a CTA that counts digits in shared memory, else 0."""

    columns: int
    num_warps: int
    splits: int
    threads: int = 0


def plan_digits(rows: int, width: int, level: int, target: Target) -> Plan:
    """Of count_digits: long rows are split while there are SMs for them."""
    splits = _power_below(min(-(-width // WHOLE), CTAS_AN_SM * target.num_sms // max(rows, 1)))
    if target.vendor == "nvidia" or target.interpreted:
        early = level > 0 and DIGITS.columns * splits < width <= WHOLE_DIGITS.columns * splits
        tile = WHOLE_DIGITS if early else DIGITS
        return Plan(*tile, splits, 32 * tile.num_warps)
    return Plan(*PORTABLE_DIGITS, splits)


def plan_blocks(rows: int, width: int, target: Target) -> Plan:
    """Of count_ties and take_winners: rows are split until CTAs fill the machine, but none has less than a tile."""
    most = CTAS_AN_SM * target.num_sms // max(rows, 1)
    tile = FEW if -(-width // FEW.columns) <= most else MANY
    return Plan(*tile, _power_below(min(-(-width // tile.columns), most)))


def plan_merging(ranks: int, k: int, target: Target) -> Merging:
    """Of merge_candidates. A warp of AMD has 64 threads."""
    padded = max(power_of_two(k), LEAST_EACH)
    all_of_them = power_of_two(ranks) * padded
    return Merging(power_of_two(ranks), padded, 16 if all_of_them > 4096 and target.vendor != "amd" else 8)


def registers(target: Target) -> dict[str, int]:
    """The launch argument that limits them."""
    return {"maxnreg": REGISTERS} if target.vendor == "nvidia" else {}


def same_smem(target: Target) -> bool:
    """Whether count_ties and take_winners claim as much shared memory as count_digits: an SM that divides its memory
    anew between two passes runs neither for a while."""
    return SAME_SMEM and target.vendor == "nvidia"


def blocks_together(tile: Plan, block_size: int) -> tuple[int, int]:
    """(blocks that a CTA looks at together, columns of each as a power of two)."""
    padded = power_of_two(block_size)
    return max(tile.columns // padded, 1), padded


def power_of_two(value: int) -> int:
    """``value`` rounded up to one."""
    return 1 << (value - 1).bit_length()


def _power_below(value: int) -> int:
    """``value`` rounded down to a power of two, at least 1."""
    return 1 << (max(value, 1).bit_length() - 1)


def count_digits(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    sums: torch.Tensor | None,
    state: torch.Tensor | None,
    k: int,
    level: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = logits.shape
    counts, new_state = fake.allocate_counts(logits, level), fake.allocate_state(logits)
    if rows:
        target = target_of(logits.device)
        plan, aligned = plan_digits(rows, width, level, target), _aligned(logits, row_starts)
        ctas, smem = rows * plan.splits, None
        if plan.splits > 1:
            counts.zero_()
        if plan.threads and interpreting():
            smem = logits.new_zeros((ctas, histogram.WORDS.value), dtype=torch.int32)
        digits.count_digits[(ctas,)](
            *(logits, row_starts, row_ends, sums, state, counts, new_state, smem),
            width,
            k,
            plan.splits,
            *_row_strides(logits, row_starts, row_ends, aligned),
            *(_stride(sums), _stride(state), _stride(state, 1)),
            SHIFT=SHIFTS[level],
            DIGITS=1 << BITS[level],
            UPPER=1 << BITS[max(level - 1, 0)],
            COLUMNS=plan.columns,
            ATOMIC=plan.splits > 1,
            ALIGNED=aligned,
            ONE=plan.threads > 0 and plan.splits * plan.columns >= width,
            THREADS=plan.threads,
            num_warps=plan.num_warps,
            **pdl.launched(target),
        )
    return counts, new_state


def count_ties(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    sums: torch.Tensor,
    state: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width = logits.shape
    ties, above = (fake.allocate_ties(logits, block_size) for _ in range(2))
    new_state = fake.allocate_state(logits)
    if rows:
        target = target_of(logits.device)
        plan, aligned = plan_blocks(rows, width, target), _aligned(logits, row_starts)
        together, padded = blocks_together(plan, block_size)
        digits.count_ties[(rows * plan.splits,)](
            *(logits, row_starts, row_ends, sums, state, ties, above, new_state),
            width,
            ties.shape[1],
            plan.splits,
            *_row_strides(logits, row_starts, row_ends, aligned),
            *(_stride(sums), _stride(state), _stride(state, 1)),
            BLOCK_SIZE=block_size,
            UPPER=1 << BITS[LEVELS - 1],
            TOGETHER=together,
            PADDED=padded,
            ALIGNED=aligned,
            ONE=plan.splits * together >= ties.shape[1],
            SAME_SMEM=same_smem(target),
            num_warps=plan.num_warps,
            **pdl.launched(target),
        )
    return ties, above, new_state


def take_winners(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    ties: torch.Tensor,
    above: torch.Tensor,
    state: torch.Tensor,
    k: int,
    block_size: int,
    rank: int,
) -> torch.Tensor:
    rows, width = logits.shape
    out = fake.allocate_winners(logits, k)
    if rows == 0 or width == 0:
        return out.fill_(-1)
    target = target_of(logits.device)
    plan, aligned = plan_blocks(rows, width, target), _aligned(logits, row_starts)
    share = -(-ties.shape[2] // plan.splits) * block_size  # columns of a CTA
    digits.take_winners[(rows * plan.splits,)](
        *(logits, row_starts, row_ends, ties, above.contiguous(), state, out),
        *(width, k, ties.shape[2], rank, plan.splits),
        *_row_strides(logits, row_starts, row_ends, aligned),
        *(*ties.stride(), _stride(state), _stride(state, 1)),
        RANKS=ties.shape[0],
        BLOCK_SIZE=block_size,
        COLUMNS=plan.columns,
        CHUNK=CHUNK,
        CHUNKS=ties.shape[2] > CHUNK,
        SPLIT=plan.splits > 1,
        ALIGNED=aligned,
        ONE=share <= plan.columns,
        SAME_SMEM=same_smem(target),
        PTX=target.vendor == "nvidia",
        num_warps=plan.num_warps,
        **registers(target),
        **pdl.launched(target),
    )
    return out


def pack_candidates(
    logits: torch.Tensor, columns: torch.Tensor, row_starts: torch.Tensor | None, block_size: int
) -> torch.Tensor:
    (rows, width), k = logits.shape, columns.shape[1]
    out = fake.allocate_candidates(logits, k, block_size)
    if rows:
        target = target_of(logits.device)
        one_gather.pack_candidates[(rows,)](
            *(logits, columns, row_starts, out, out.view(fake.ties_dtype(block_size))),
            *(width, k, out.shape[1], logits.stride(0), columns.stride(0), _stride(row_starts)),
            BLOCK_SIZE=block_size,
            CANDIDATES=power_of_two(k),
            BLOCKS=CHUNK,
            num_warps=PACK_WARPS,
            **pdl.launched(target),
        )
    return out


def merge_candidates(candidates: torch.Tensor, columns: torch.Tensor, block_size: int, rank: int) -> torch.Tensor:
    (ranks, rows, words), k = candidates.shape, columns.shape[1]
    out = fake.allocate_winners(columns, k)
    if rows:
        target = target_of(columns.device)
        plan, counts = plan_merging(ranks, k, target), candidates.view(fake.ties_dtype(block_size))
        threads = 32 * plan.num_warps if target.vendor == "nvidia" or target.interpreted else 0
        smem = None
        if threads and interpreting():
            smem = columns.new_zeros((rows, histogram.WORDS.value))
        each = counts.shape[2] // words
        one_gather.merge_candidates[(rows,)](
            *(candidates, counts, columns, out, smem),
            *(k, rank, ranks, each, (words - k) * counts.shape[2] // words),
            *(candidates.stride(0), candidates.stride(1), columns.stride(0)),
            RANKS=plan.ranks,
            CANDIDATES=plan.candidates,
            BLOCKS=MERGED_BLOCKS if threads else PORTABLE_MERGED_BLOCKS,
            THREADS=threads,
            num_warps=plan.num_warps,
            **pdl.launched(target),
        )
    return out


def _aligned(logits: torch.Tensor, row_starts: torch.Tensor | None) -> bool:
    """Whether four columns can be one load, where all rows start at column 0."""
    return row_starts is None and is_aligned(logits)


def _row_strides(
    logits: torch.Tensor, row_starts: torch.Tensor | None, row_ends: torch.Tensor | None, aligned: bool
) -> tuple[int, int, int]:
    """Of logits (in fours where ``aligned``), of row_starts and of row_ends."""
    return logits.stride(0) // 4 if aligned else logits.stride(0), _stride(row_starts), _stride(row_ends)


def _stride(tensor: torch.Tensor | None, dim: int = 0) -> int:
    return 0 if tensor is None else tensor.stride(dim)
