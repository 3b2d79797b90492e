"""The GPU implementation: a launch a step."""

from __future__ import annotations

import torch

from sparse_attn.device import histogram, pdl
from sparse_attn.device.rows import is_aligned
from sparse_attn.framework.target import interpreting, target_of
from sparse_attn.ops.topk.ranks import config, kernels, shapes
from sparse_attn.ops.topk.ranks.candidates import kernels as candidate_kernels
from sparse_attn.ops.topk.ranks.shapes import BITS, LEVELS, SHIFTS


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
    counts, new_state = shapes.allocate_counts(logits, level), shapes.allocate_state(logits)
    if rows:
        target = target_of(logits.device)
        plan, aligned = config.digits(rows, width, level, target), _aligned(logits, row_starts)
        ctas, smem = rows * plan.splits, None
        if plan.splits > 1:
            counts.zero_()
        if plan.threads and interpreting():
            smem = logits.new_zeros((ctas, histogram.WORDS.value), dtype=torch.int32)
        kernels.count_digits[(ctas,)](
            logits, row_starts, row_ends, sums, state, counts, new_state, smem, width, k, plan.splits,
            _row_stride(logits, aligned), _stride(row_starts), _stride(row_ends), _stride(sums), _stride(state),
            _stride(state, 1), SHIFT=SHIFTS[level], DIGITS=1 << BITS[level], UPPER=1 << BITS[max(level - 1, 0)],
            COLUMNS=plan.columns, ATOMIC=plan.splits > 1, ALIGNED=aligned,
            ONE=plan.threads > 0 and plan.splits * plan.columns >= width, THREADS=plan.threads,
            num_warps=plan.num_warps, **pdl.launched(target),
        )  # fmt: skip
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
    ties, above = (shapes.allocate_ties(logits, block_size) for _ in range(2))
    new_state = shapes.allocate_state(logits)
    if rows:
        target = target_of(logits.device)
        plan, aligned = config.blocks(rows, width, target), _aligned(logits, row_starts)
        together, padded = config.together(plan, block_size)
        kernels.count_ties[(rows * plan.splits,)](
            logits, row_starts, row_ends, sums, state, ties, above, new_state, width, ties.shape[1], plan.splits,
            _row_stride(logits, aligned), _stride(row_starts), _stride(row_ends), _stride(sums), _stride(state),
            _stride(state, 1), BLOCK_SIZE=block_size, UPPER=1 << BITS[LEVELS - 1], TOGETHER=together, PADDED=padded,
            ALIGNED=aligned, ONE=plan.splits * together >= ties.shape[1], SAME_SMEM=config.same_smem(target),
            num_warps=plan.num_warps, **pdl.launched(target),
        )  # fmt: skip
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
    out = shapes.allocate_winners(logits, k)
    if rows == 0 or width == 0:
        return out.fill_(-1)
    target = target_of(logits.device)
    plan, aligned = config.blocks(rows, width, target), _aligned(logits, row_starts)
    share = -(-ties.shape[2] // plan.splits) * block_size  # columns of a CTA
    kernels.take_winners[(rows * plan.splits,)](
        logits, row_starts, row_ends, ties, above.contiguous(), state, out, width, k, ties.shape[2], rank, plan.splits,
        _row_stride(logits, aligned), _stride(row_starts), _stride(row_ends), *ties.stride(), _stride(state),
        _stride(state, 1), RANKS=ties.shape[0], BLOCK_SIZE=block_size, COLUMNS=plan.columns, CHUNK=config.CHUNK,
        CHUNKS=ties.shape[2] > config.CHUNK, SPLIT=plan.splits > 1, ALIGNED=aligned, ONE=share <= plan.columns,
        SAME_SMEM=config.same_smem(target), PTX=target.vendor == "nvidia", num_warps=plan.num_warps,
        **config.registers(target), **pdl.launched(target),
    )  # fmt: skip
    return out


def pack_candidates(
    logits: torch.Tensor, columns: torch.Tensor, row_starts: torch.Tensor | None, block_size: int
) -> torch.Tensor:
    (rows, width), k = logits.shape, columns.shape[1]
    out = shapes.allocate_candidates(logits, k, block_size)
    if rows:
        target = target_of(logits.device)
        candidate_kernels.pack_candidates[(rows,)](
            logits, columns, row_starts, out, out.view(shapes.ties_dtype(block_size)), width, k, out.shape[1],
            logits.stride(0), columns.stride(0), _stride(row_starts), BLOCK_SIZE=block_size,
            CANDIDATES=config.power_of_two(k), BLOCKS=config.CHUNK, num_warps=config.PACK_WARPS, **pdl.launched(target),
        )  # fmt: skip
    return out


def merge_candidates(candidates: torch.Tensor, columns: torch.Tensor, block_size: int, rank: int) -> torch.Tensor:
    (ranks, rows, words), k = candidates.shape, columns.shape[1]
    out = shapes.allocate_winners(columns, k)
    if rows:
        target = target_of(columns.device)
        plan, counts = config.merging(ranks, k, target), candidates.view(shapes.ties_dtype(block_size))
        threads = 32 * plan.num_warps if target.vendor == "nvidia" or target.interpreted else 0
        smem = None
        if threads and interpreting():
            smem = columns.new_zeros((rows, histogram.WORDS.value))
        candidate_kernels.merge_candidates[(rows,)](
            candidates, counts, columns, out, smem, k, rank, ranks, counts.shape[2] // words,
            (words - k) * counts.shape[2] // words, candidates.stride(0), candidates.stride(1), columns.stride(0),
            RANKS=plan.ranks, CANDIDATES=plan.candidates,
            BLOCKS=config.MERGED_BLOCKS if threads else config.PORTABLE_MERGED_BLOCKS, THREADS=threads,
            num_warps=plan.num_warps, **pdl.launched(target),
        )  # fmt: skip
    return out


def _aligned(logits: torch.Tensor, row_starts: torch.Tensor | None) -> bool:
    """Whether four columns can be one load, where all rows start at column 0."""
    return row_starts is None and is_aligned(logits)


def _row_stride(logits: torch.Tensor, aligned: bool) -> int:
    """In fours where ``aligned``."""
    return logits.stride(0) // 4 if aligned else logits.stride(0)


def _stride(tensor: torch.Tensor | None, dim: int = 0) -> int:
    return 0 if tensor is None else tensor.stride(dim)
