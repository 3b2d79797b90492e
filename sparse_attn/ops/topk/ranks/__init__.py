"""Exact top-k of scores that several ranks hold, a part each: the steps that a rank computes alone.

A rank's row holds the scores of its own keys. Positions are dealt by blocks: local block n of rank r is block n * ranks
+ r of the row. Between these steps ranks add up what count_digits returns, and gather what count_ties returns
(pipeline.parallel.ranks.top_k_over_ranks). The sum after three digits is the k-th highest score of all; the ties say
how many of it each block holds. A block has one owner, so no rank needs another's candidates.

Or each rank selects its own k highest (ops.topk), ranks gather what pack_candidates returns, and merge_candidates finds
which of its own win. None else can.

All steps of a selection are given the same scores and row ranges, unchanged since the first one was launched. The later
ones read them while what is launched in front of them still runs.
"""

from __future__ import annotations

import torch

from sparse_attn.framework import checks
from sparse_attn.framework.registration import define_op
from sparse_attn.ops.topk.ranks import fake, reference
from sparse_attn.ops.topk.ranks.fake import BITS, LEVELS, MOST_CANDIDATES, num_blocks, padded_candidates, ties_dtype


def _launchers():
    from sparse_attn.ops.topk.ranks import launch

    return launch


_count_digits = define_op(
    "count_digits",
    "(Tensor logits, Tensor? row_starts, Tensor? row_ends, Tensor? sums, Tensor? state, int k, int level, str impl)"
    " -> (Tensor, Tensor)",
    fake=fake.count_digits,
    reference=reference.count_digits,
    rules=reference.rules_of_count_digits,
    launch=lambda: _launchers().count_digits,
)
_count_ties = define_op(
    "count_ties",
    "(Tensor logits, Tensor? row_starts, Tensor? row_ends, Tensor sums, Tensor state, int block_size, str impl)"
    " -> (Tensor, Tensor, Tensor)",
    fake=fake.count_ties,
    reference=reference.count_ties,
    rules=reference.rules_of_count_digits,
    launch=lambda: _launchers().count_ties,
)
_take_winners = define_op(
    "take_winners",
    "(Tensor logits, Tensor? row_starts, Tensor? row_ends, Tensor ties, Tensor above, Tensor state, int k,"
    " int block_size, int rank, str impl) -> Tensor",
    fake=fake.take_winners,
    reference=reference.take_winners,
    rules=reference.rules_of_take_winners,
    launch=lambda: _launchers().take_winners,
)
_pack_candidates = define_op(
    "pack_candidates",
    "(Tensor logits, Tensor columns, Tensor? row_starts, int block_size, str impl) -> Tensor",
    fake=fake.pack_candidates,
    reference=reference.pack_candidates,
    rules=reference.rules_of_pack_candidates,
    launch=lambda: _launchers().pack_candidates,
)
_merge_candidates = define_op(
    "merge_candidates",
    "(Tensor candidates, Tensor columns, int block_size, int rank, str impl) -> Tensor",
    fake=fake.merge_candidates,
    reference=reference.merge_candidates,
    rules=reference.rules_of_merge_candidates,
    launch=lambda: _launchers().merge_candidates,
)


def count_digits(
    logits: torch.Tensor,
    k: int,
    level: int,
    sums: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    *,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of a rank's scores have each digit, of those that share the digits found so far.

    NaN, -inf and columns out of range are not counted; -0.0 counts as +0.0.

    Args:
        logits: fp32 [rows, width], last dimension contiguous.
        k: as top_k_per_row takes it, the same in all calls.
        level: 0, 1 or 2, from the most significant digit on (11, 11 and 10 bits of the score as an ordered integer).
        sums: what this function returned for level - 1, the counts summed over ranks, of which those below 0 count as
            0; None for level 0.
        state: as sums.
        row_starts: int32 [rows], the row's first column, clamped to [0, width]; None means 0.
        row_ends: int32 [rows], the one behind its last; None means width.
        impl: "auto", "reference" or "triton".

    Returns:
        counts int32 [rows, 2048] (1024 for level 2) and state int32 [rows, 2], the digits above and how many scores are
        still to be taken among those that share them.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    _check_scores(logits, row_starts, row_ends)
    checks.check_at_least("k", k, 1)
    checks.check_choice("level", level, range(LEVELS))
    for name, value in (("sums", sums), ("state", state)):
        if (value is None) != (level == 0):
            got = "None" if value is None else "a tensor"
            raise ValueError(f"{name}: got {got} for level {level}, allowed: None for level 0 alone")
    if sums is not None and state is not None:
        _check_state(logits, sums, state, level - 1)
    return _count_digits(logits, row_starts, row_ends, sums, state, k, level, impl)


def count_ties(
    logits: torch.Tensor,
    sums: torch.Tensor,
    state: torch.Tensor,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    *,
    block_size: int,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many scores of each of a rank's blocks equal the k-th highest of all ranks, and how many are higher.

    Args:
        logits: see count_digits.
        sums: what count_digits returned for the last level, the counts summed over ranks.
        state: what count_digits returned for the last level.
        row_starts: see count_digits.
        row_ends: see count_digits.
        block_size: columns of a block, from the row's start on.
        impl: "auto", "reference" or "triton".

    Returns:
        ties and above [rows, ceil(width / block_size)], uint8 for blocks of at most 255 columns, else int32, and state
        int32 [rows, 2], the k-th highest score as a signed ordered integer (the lowest where fewer than k are
        selectable), and how many of those that equal it are to be taken.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    _check_scores(logits, row_starts, row_ends)
    checks.check_at_least("block_size", block_size, 1)
    _check_state(logits, sums, state, LEVELS - 1)
    return _count_ties(logits, row_starts, row_ends, sums, state, block_size, impl)


def take_winners(
    logits: torch.Tensor,
    k: int,
    ties: torch.Tensor,
    above: torch.Tensor,
    state: torch.Tensor,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    *,
    block_size: int,
    rank: int,
    impl: str = "auto",
) -> torch.Tensor:
    """A rank's own among the k highest scores of all ranks.

    Undefined where ties, above and state are not those of ``logits`` and the row ranges.

    Args:
        logits: see count_digits.
        k: see count_digits.
        ties: [ranks, rows, ceil(width / block_size)] of every rank, as count_ties returned them.
        above: what it returned to this rank.
        state: what it returned to this rank.
        row_starts: see count_digits.
        row_ends: see count_digits.
        block_size: see count_ties.
        rank: whose scores ``logits`` are, 0 <= rank < ranks.
        impl: "auto", "reference" or "triton".

    Returns:
        int32 [rows, k]: local columns relative to the row's start, ascending, packed to the front, -1 behind. Over all
        ranks they are what top_k_per_row selects from the whole row; of equal scores those at the lowest position of
        the whole row win.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    _check_scores(logits, row_starts, row_ends)
    checks.check_at_least("k", k, 1)
    checks.check_at_least("block_size", block_size, 1)
    rows, width = logits.shape
    checks.check_dtype("ties", ties, (ties_dtype(block_size),))
    checks.check_shape("ties", ties, (None, rows, num_blocks(width, block_size)), "[ranks, rows, blocks]")
    checks.check_dtype("above", above, (ties_dtype(block_size),))
    checks.check_shape("above", above, (rows, num_blocks(width, block_size)), "[rows, blocks]")
    checks.check_at_least("rank", rank, 0)
    if rank >= ties.shape[0]:
        raise ValueError(f"rank: got {rank}, allowed: 0 to {ties.shape[0] - 1} (the ranks of ties)")
    checks.check_dtype("state", state, (torch.int32,))
    checks.check_shape("state", state, (rows, 2), "[rows, 2]")
    checks.check_same_device(logits=logits, ties=ties, above=above, state=state)
    return _take_winners(logits, row_starts, row_ends, ties, above, state, k, block_size, rank, impl)


def pack_candidates(
    logits: torch.Tensor,
    columns: torch.Tensor,
    row_starts: torch.Tensor | None = None,
    *,
    block_size: int,
    impl: str = "auto",
) -> torch.Tensor:
    """What a rank sends of its own k highest scores.

    Args:
        logits: fp32 [rows, width], last dimension contiguous.
        columns: int32 [rows, k], what top_k_per_row selects from these scores: relative to the row's start, ascending,
            -1 behind.
        row_starts: int32 [rows], clamped to [0, width]; None means 0.
        block_size: columns of a block, from the row's start on.
        impl: "auto", "reference" or "triton".

    Returns:
        int32 [rows, k + words]: the bits of the scores, -inf where a row has fewer; and how many of the columns lie in
        each of ceil(width / block_size) blocks, as uint8 for blocks of at most 255 columns, else int32, zeros behind.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    _check_scores(logits, row_starts, None)
    checks.check_at_least("block_size", block_size, 1)
    _check_columns(columns)
    checks.check_shape("columns", columns, (logits.shape[0], None), "[rows, k]")
    checks.check_same_device(logits=logits, columns=columns)
    return _pack_candidates(logits, columns, row_starts, block_size, impl)


def merge_candidates(
    candidates: torch.Tensor, columns: torch.Tensor, *, block_size: int, rank: int, impl: str = "auto"
) -> torch.Tensor:
    """A rank's own among the k highest scores of all ranks, from each rank's own k highest.

    Args:
        candidates: int32 [ranks, rows, k + words] contiguous, of every rank, as pack_candidates returned them; ranks
            and k, each rounded up to a power of two, multiply to at most 32768.
        columns: int32 [rows, k] of this rank, as it was given there.
        block_size: as it was given there.
        rank: whose columns they are, 0 <= rank < ranks.
        impl: "auto", "reference" or "triton".

    Returns:
        int32 [rows, k], as take_winners does.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    checks.check_dtype("candidates", candidates, (torch.int32,))
    checks.check_at_least("block_size", block_size, 1)
    _check_columns(columns)
    checks.check_shape("candidates", candidates, (None, columns.shape[0], None), "[ranks, rows, k + words]")
    if not candidates.is_contiguous():
        raise ValueError(f"candidates: got strides {tuple(candidates.stride())}, allowed: contiguous")
    ranks, k = candidates.shape[0], columns.shape[1]
    if candidates.shape[2] < k:
        raise ValueError(f"candidates: got {candidates.shape[2]} words a row, allowed: at least {k} (columns of a row)")
    checks.check_at_least("rank", rank, 0)
    if rank >= ranks:
        raise ValueError(f"rank: got {rank}, allowed: 0 to {ranks - 1} (the ranks of candidates)")
    if padded_candidates(ranks, k) > MOST_CANDIDATES:
        raise ValueError(f"candidates: got {k} of {ranks} ranks, allowed: at most {MOST_CANDIDATES} of a row")
    checks.check_same_device(candidates=candidates, columns=columns)
    return _merge_candidates(candidates, columns, block_size, rank, impl)


def _check_columns(columns: torch.Tensor) -> None:
    checks.check_dtype("columns", columns, (torch.int32,))
    checks.check_rank("columns", columns, 2)
    checks.check_unit_stride("columns", columns)
    if columns.shape[1] < 1:
        raise ValueError("columns: got none in a row, allowed: at least 1")


def _check_scores(logits: torch.Tensor, row_starts: torch.Tensor | None, row_ends: torch.Tensor | None) -> None:
    checks.check_dtype("logits", logits, (torch.float32,))
    checks.check_rank("logits", logits, 2)
    checks.check_unit_stride("logits", logits)
    for name, value in (("row_starts", row_starts), ("row_ends", row_ends)):
        if value is not None:
            checks.check_dtype(name, value, (torch.int32,))
            checks.check_shape(name, value, (logits.shape[0],), "[rows]")
    checks.check_same_device(logits=logits, row_starts=row_starts, row_ends=row_ends)


def _check_state(logits: torch.Tensor, sums: torch.Tensor, state: torch.Tensor, level: int) -> None:
    """``sums`` and ``state`` are those of ``level``."""
    checks.check_dtype("sums", sums, (torch.int32,))
    checks.check_shape("sums", sums, (logits.shape[0], 1 << BITS[level]), "[rows, digits]")
    checks.check_unit_stride("sums", sums)
    checks.check_dtype("state", state, (torch.int32,))
    checks.check_shape("state", state, (logits.shape[0], 2), "[rows, 2]")
    checks.check_same_device(logits=logits, sums=sums, state=state)
