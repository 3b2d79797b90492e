"""What ranks that hold a part each find together: the highest scores of all, and attention over all keys.

Positions are sharded by blocks: block n of a request belongs to rank n % size, where it is block n // size. Everything
here is a pure function with functional collectives in it, which torch.compile traces. All ranks of a group call it with
tensors of the same shapes and get to the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from sparse_attn.framework import checks
from sparse_attn.framework.torch_private import all_gather, all_reduce, all_to_all
from sparse_attn.mesh import Ranks
from sparse_attn.ops.attention.sparse import merge_attn_states
from sparse_attn.ops.topk.ranks import count_digits, count_ties, merge_candidates, pack_candidates, take_winners
from sparse_attn.ops.topk.ranks.fake import (
    BITS,
    LEVELS,
    MOST_CANDIDATES,
    count_words,
    num_blocks,
    padded_candidates,
    ties_dtype,
)
from sparse_attn.ops.topk.select import top_k_per_row
from sparse_attn.roofline import LINK
from sparse_attn.types import AttentionOutput

SCORE_BYTES = 4  # of a candidate, and of a word of counts


def sum_over_ranks(local: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum of all ranks' tensors, of the same bits on each; ``local`` itself where there is one."""
    return local if ranks.group is None else all_reduce(local, ranks.group)


def join_over_ranks(local: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """All ranks' [rows, columns] one beside the other, [rows, size * columns]; ``local`` itself where there is one."""
    if ranks.group is None:
        return local
    return stack_over_ranks(local, ranks).transpose(0, 1).flatten(1)


def stack_over_ranks(local: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """All ranks' tensors, of one shape, one behind the other: [size, *shape]."""
    if ranks.group is None:
        return local.unsqueeze(0)
    return torch.unflatten(all_gather(local, ranks.size, ranks.group), 0, (ranks.size, local.shape[0]))


def swap_over_ranks(parts: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Of parts [size, ...], the n-th goes to rank n; of the result, the n-th came from there."""
    return parts if ranks.group is None else all_to_all(parts, ranks.size, ranks.group)


def shard_rows(rows: int, ranks: Ranks) -> int:
    """How many of ``rows`` > 1 a rank has where they are sharded in order."""
    return rows_each(rows, ranks.size)


def rows_each(rows: int, count: int) -> int:
    """Rows of each of ``count`` parts of ``rows`` > 1: two at least, since Dynamo takes a size of 1 for a constant."""
    most: Any = torch.sym_max(2, (rows + count - 1) // count)
    return most


def first_row(rows: int, ranks: Ranks, rank: int | None = None) -> int:
    """The first of a rank's shard_rows; ``rank`` None: of this one's. Those of the last ranks may overlap, so that
    none is padded."""
    each = shard_rows(rows, ranks)
    first: Any = torch.sym_min((ranks.rank if rank is None else rank) * each, rows - each)
    return first


def own_rows(whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's shard_rows of ``whole`` [rows, ...]."""
    return whole.narrow(0, first_row(whole.shape[0], ranks), shard_rows(whole.shape[0], ranks))


def whole_rows(share: torch.Tensor, rows: int, ranks: Ranks) -> torch.Tensor:
    """All ranks' shares [shard_rows, ...] as [rows, ...], the same on each; of rows that overlap, those of the first
    rank. One collective."""
    each, found = share.shape[0], stack_over_ranks(share, ranks).flatten(0, 1)
    places = torch.arange(rows, device=share.device)
    return found[places + (places // each * each - (rows - each)).clamp_min(0)]


def local_limits(limits: torch.Tensor, ranks: Ranks, *, block_size: int) -> torch.Tensor:
    """How many of a row's first ``limits`` positions this rank holds: int32, the shape of ``limits``. A limit below 0
    counts as 0."""
    checks.check_dtype("limits", limits, (torch.int32, torch.int64))
    checks.check_at_least("block_size", block_size, 1)
    if ranks.size == 1:
        return limits.clamp_min(0).to(torch.int32)
    limits, sharded = limits.long().clamp_min(0), block_size * ranks.size
    rest = (limits % sharded - ranks.rank * block_size).clamp(0, block_size)
    return (limits // sharded * block_size + rest).to(torch.int32)


def global_positions(columns: torch.Tensor, ranks: Ranks, *, block_size: int) -> torch.Tensor:
    """The positions of this rank's ``columns``, of its own dtype and shape; -1 stays -1."""
    checks.check_dtype("columns", columns, (torch.int32, torch.int64))
    checks.check_at_least("block_size", block_size, 1)
    block = columns // block_size * ranks.size + ranks.rank
    return torch.where(columns >= 0, block * block_size + columns % block_size, -1)


class RowScores(NamedTuple):
    """Scores of a step's decode or prefill rows: a rank's own keys alone, the same shape on all ranks. logits: fp32
    [rows, width]. starts, ends: int32 [rows], the row's local columns, clamped to [0, width]; None: 0 and width."""

    logits: torch.Tensor
    starts: torch.Tensor | None = None
    ends: torch.Tensor | None = None


def top_k_over_ranks(
    parts: Sequence[RowScores], k: int, ranks: Ranks, *, block_size: int, impl: str = "auto"
) -> list[torch.Tensor]:
    """This rank's own among the k largest scores of each row, of which every rank holds its own keys', exactly.

    parts: rows that are selected together. Their ends are local_limits of the rows' limits. block_size: positions of a
    sharded block, the first of which is at the row's start.

    Returns int32 [rows, k] for each part: local columns relative to the row's start, ascending, packed to the front, -1
    behind. The union over ranks is to the bit what top_k_per_row selects from the whole rows: ties go to the lowest
    position.

    One collective where sends_candidates, however many parts: each rank selects its own k highest, and gathers all
    ranks' scores with the number of columns in each block, which says where ties lie. Else four: three sums of counts
    by 11, 11 and 10 bits of the score, and one gather of the ties that each block holds, a radix selection whose
    histograms add up over ranks. exchanged_bytes counts either.
    """
    if ranks.size == 1 or ranks.group is None:
        return [top_k_per_row(part.logits, k, part.starts, part.ends, impl=impl) for part in parts]
    if not parts:
        return []
    few = sends_candidates(sum(part.logits.shape[0] for part in parts), k, ranks.size)
    return (top_k_by_candidates if few else top_k_by_digits)(parts, k, ranks, block_size=block_size, impl=impl)


def top_k_by_candidates(
    parts: Sequence[RowScores], k: int, ranks: Ranks, *, block_size: int, impl: str = "auto"
) -> list[torch.Tensor]:
    """top_k_over_ranks of more than one rank, by one gather of each rank's own k highest."""
    assert ranks.group is not None
    own = [top_k_per_row(part.logits, k, part.starts, part.ends, impl=impl) for part in parts]
    packed = [
        pack_candidates(part.logits, columns, part.starts, block_size=block_size, impl=impl)
        for part, columns in zip(parts, own)
    ]
    gathered = all_gather(_joined([one.flatten() for one in packed]), ranks.size, ranks.group)
    gathered, first, chosen = torch.unflatten(gathered, 0, (ranks.size, -1)), 0, []
    for columns, one in zip(own, packed):
        rows, words = one.shape
        whole = gathered[:, first : first + rows * words].contiguous()
        candidates = torch.unflatten(whole, 1, (rows, words))
        chosen.append(merge_candidates(candidates, columns, block_size=block_size, rank=ranks.rank, impl=impl))
        first += rows * words
    return chosen


def top_k_by_digits(
    parts: Sequence[RowScores], k: int, ranks: Ranks, *, block_size: int, impl: str = "auto"
) -> list[torch.Tensor]:
    """top_k_over_ranks of more than one rank, by sums of digits' counts."""
    assert ranks.group is not None
    states: list[torch.Tensor | None] = [None] * len(parts)
    sums: list[torch.Tensor | None] = [None] * len(parts)
    for level in range(LEVELS):
        found = [
            count_digits(part.logits, k, level, own_sums, state, part.starts, part.ends, impl=impl)
            for part, own_sums, state in zip(parts, sums, states)
        ]
        states = [state for _, state in found]
        sums = _apart(all_reduce(_joined([counts for counts, _ in found]), ranks.group), [c for c, _ in found])
    tied = [
        count_ties(part.logits, own_sums, state, part.starts, part.ends, block_size=block_size, impl=impl)
        for part, own_sums, state in zip(parts, sums, states)
        if own_sums is not None and state is not None
    ]
    gathered = all_gather(_joined([ties.flatten() for ties, _, _ in tied]), ranks.size, ranks.group)
    gathered, first, chosen = torch.unflatten(gathered, 0, (ranks.size, -1)), 0, []
    for part, (own, above, state) in zip(parts, tied):
        rows, blocks = own.shape
        ties = torch.unflatten(gathered[:, first : first + rows * blocks], 1, (rows, blocks))
        chosen.append(
            take_winners(
                part.logits, k, ties, above, state, part.starts, part.ends,
                block_size=block_size, rank=ranks.rank, impl=impl,
            )
        )  # fmt: skip
        first += rows * blocks
    return chosen


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _apart(whole: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """``whole`` as ``parts`` were joined."""
    return [whole] if len(parts) == 1 else list(whole.split([part.shape[0] for part in parts]))


def all_positions(columns: torch.Tensor, ranks: Ranks, *, block_size: int) -> torch.Tensor:
    """What all ranks selected, as one rank selects it: positions int32 [rows, k], ascending, -1 behind. columns: what
    top_k_over_ranks gave this rank. One collective; every rank gets the same."""
    if ranks.size == 1 or ranks.group is None:
        return columns
    rows, k = columns.shape
    own = global_positions(columns, ranks, block_size=block_size)
    whole = torch.unflatten(all_gather(own, ranks.size, ranks.group), 0, (ranks.size, rows))
    most = torch.iinfo(torch.int32).max
    ascending = torch.where(whole >= 0, whole, most).transpose(0, 1).flatten(1).sort(1).values[:, :k]
    return torch.where(ascending < most, ascending, -1)


def merge_over_ranks(
    local: AttentionOutput, ranks: Ranks, *, sink: torch.Tensor | None = None, impl: str = "auto"
) -> AttentionOutput:
    """Attention over the keys of all ranks, from attention over each rank's own.

    local: out [tokens, heads, d_v] and lse fp32 [tokens, heads], natural log, -inf for a row without keys on this rank;
    attended without a sink. sink: fp32 [>= heads], counted once, or None. Every rank gets the same bits.

    Where the ranks divide the heads, each merges its own heads' outputs, which are exchanged, and the merged ones are
    gathered: three collectives, and less to send than all outputs of all ranks. Those are gathered for a lone token,
    and where heads cannot be sharded: two collectives. merged_bytes counts them.

    Of one rank ``local`` is returned as it is where there is no sink.
    """
    merge = partial(merge_attn_states, impl=impl)
    if ranks.size == 1 or ranks.group is None:
        if sink is None:
            return local
        return merge(local.out.unsqueeze(0), local.lse.unsqueeze(0), sink=sink)
    (tokens, heads), size, group = local.lse.shape, ranks.size, ranks.group
    lses = torch.unflatten(all_gather(local.lse.contiguous(), size, group), 0, (size, tokens))
    if not _by_heads(tokens, heads, size):
        outs = torch.unflatten(all_gather(local.out.contiguous(), size, group), 0, (size, tokens))
        return merge(outs, lses, sink=sink)
    own = heads // size
    first = ranks.rank * own
    outs = all_to_all(torch.unflatten(local.out, 1, (size, own)).transpose(0, 1), size, group)
    own_sink = None if sink is None else sink[first : first + own]
    merged = merge(outs, lses[..., first : first + own], sink=own_sink)
    whole = torch.unflatten(all_gather(merged.out, size, group), 0, (size, tokens))
    lse = merge(lses.unsqueeze(-1), lses).lse
    return AttentionOutput(whole.transpose(0, 1).flatten(1, 2), lse)


def merge_own_rows(
    local: AttentionOutput, ranks: Ranks, *, sink: torch.Tensor | None = None, impl: str = "auto"
) -> AttentionOutput:
    """As merge_over_ranks, of this rank's own_rows alone: out [shard_rows, heads, d_v], lse [shard_rows, heads]. Two
    collectives, which exchange outputs by rows; no merged one is gathered."""
    rows = local.lse.shape[0]
    each, firsts = shard_rows(rows, ranks), [first_row(rows, ranks, rank) for rank in range(ranks.size)]
    outs, lses = (
        swap_over_ranks(torch.stack([value.narrow(0, first, each) for first in firsts]), ranks) for value in local
    )
    return merge_attn_states(outs, lses, sink=sink, impl=impl)


def merged_calls(rows: int, heads: int, size: int) -> int:
    """Collectives of merge_over_ranks."""
    return 3 if _by_heads(rows, heads, size) else 2


def _by_heads(rows: int, heads: int, size: int) -> bool:
    """Whether each rank merges its own heads."""
    return rows != 1 and heads % size == 0


def merged_bytes(rows: int, heads: int, width: int, itemsize: int, size: int) -> int:
    """Bytes that each of ``size`` ranks sends in merge_over_ranks, counted as exchanged_bytes counts. width, itemsize:
    of a head's output."""
    own, lses = rows * heads * width * itemsize, (size - 1) * rows * heads * 4
    if not _by_heads(rows, heads, size):
        return (size - 1) * own + lses
    return 2 * (size - 1) * own // size + lses


def sends_candidates(rows: int, k: int, size: int) -> bool:
    """Whether top_k_over_ranks gathers candidates of so many rows in all: where they are no more bytes than sums of
    digits, or the calls that they save take longer than what is more of them (roofline.LINK). The number of rows
    matters only where ``k`` * ``size`` is above 10240."""
    if padded_candidates(size, k) > MOST_CANDIDATES:
        return False
    more = (size - 1) * k * SCORE_BYTES - _summed_bytes(1, size)
    return more <= 0 or rows <= int(LEVELS * LINK.call_us * LINK.rate / 1e6) // more


def selection_calls(rows: int, k: int, size: int) -> int:
    """Collectives of top_k_over_ranks."""
    return 1 if sends_candidates(rows, k, size) else LEVELS + 1


def exchanged_bytes(rows: int, width: int, size: int, *, k: int, block_size: int) -> int:
    """Bytes that each of ``size`` ranks sends in top_k_over_ranks, for rows of ``width`` local columns. Collectives are
    taken for rings: 2 (size - 1) / size of what is summed, and size - 1 times what is gathered."""
    if sends_candidates(rows, k, size):
        return (size - 1) * rows * (k + count_words(width, block_size)) * SCORE_BYTES
    gathered = rows * num_blocks(width, block_size) * ties_dtype(block_size).itemsize
    return _summed_bytes(rows, size) + (size - 1) * gathered


def _summed_bytes(rows: int, size: int) -> int:
    return 2 * (size - 1) * rows * sum(1 << bits for bits in BITS) * 4 // size
