"""Rows of scores sharded to ranks, and what a process of several does with its own."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from support.topk import scores

from sparse_attn import merge_attn_states, top_k_per_row
from sparse_attn.framework.torch_private import TorchDispatchMode, dynamo_counts
from sparse_attn.mesh import Ranks
from sparse_attn.ops.topk.ranks import count_digits, count_ties, merge_candidates, pack_candidates, take_winners
from sparse_attn.pipeline.parallel.ranks import (
    RowScores,
    global_positions,
    local_limits,
    merge_over_ranks,
    selection_calls,
    top_k_by_digits,
    top_k_over_ranks,
)
from sparse_attn.types import AttentionOutput

NAN = math.nan


class Case(NamedTuple):
    size: int
    block: int
    k: int
    kind: str
    width: int

    def __str__(self):
        return f"{self.kind} {self.width} by {self.size}"


CASES = [
    Case(2, 4, 7, "relu", 37), Case(3, 4, 16, "zeros", 96), Case(4, 8, 33, "special", 130), Case(3, 1, 5, "grid", 50),
    Case(4, 64, 64, "equal", 200), Case(2, 300, 400, "relu", 1000), Case(4, 16, 2048, "ascending", 1500),
    Case(3, 16, 100, "relu", 1025), Case(4, 64, 9, "special", 3), Case(2, 64, 512, "descending", 4096),
]  # fmt: skip


def whole_rows(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of a whole row, and limits: none, below none, one rank's alone, all."""
    limits = [case.width, 0, -3, min(case.block, case.width), case.width // 2, case.width - 1]
    return scores(case.kind, len(limits), case.width), torch.tensor(limits, dtype=torch.int32)


def shard_rows(case: Case, logits: torch.Tensor, rank: int) -> torch.Tensor:
    """The scores of one rank's blocks, a view; NaN and inf where the row has none."""
    rows, width = logits.shape
    blocks = -(-width // case.block)
    blocks = -(-blocks // case.size)
    padded = torch.full((rows, blocks * case.size * case.block + 1), math.inf)
    padded[:, 1::2] = NAN
    padded[:, :width] = logits
    sharded = padded[:, :-1].unflatten(1, (blocks, case.size, case.block))[:, :, rank].flatten(1)
    return torch.cat([sharded, torch.full((rows, 3), math.inf)], 1)[:, :-3]  # rows with a gap between


def by_candidates(case: Case, logits: torch.Tensor, limits: torch.Tensor, device, impl: str = "auto", start: int = 0):
    """What each rank selects from all ranks' candidates. start: columns in front of every row."""
    packed, columns = [], []
    for rank in range(case.size):
        local = torch.nn.functional.pad(shard_rows(case, logits, rank), (start, 0), value=math.inf).to(device)
        ends = (local_limits(limits, Ranks(case.size, rank, "g"), block_size=case.block) + start).to(device)
        starts = torch.full_like(ends, start) if start else None
        columns.append(top_k_per_row(local, case.k, starts, ends, impl="reference"))
        packed.append(pack_candidates(local, columns[-1], starts, block_size=case.block, impl=impl))
    candidates = torch.stack(packed)
    return [
        merge_candidates(candidates, columns[rank], block_size=case.block, rank=rank, impl=impl)
        for rank in range(case.size)
    ]


def over_ranks(
    case: Case, logits: torch.Tensor, limits: torch.Tensor, device, impl: str = "auto", in_fours: bool = False
) -> list[torch.Tensor]:
    """What each rank selects, by its steps alone. in_fours: rows can be read four columns at a time."""
    ranks = range(case.size)
    local = [shard_rows(case, logits, rank).to(device) for rank in ranks]
    if in_fours:
        width = local[0].shape[1]
        local = [torch.nn.functional.pad(own, (0, 4 + -width % 4), value=math.inf)[:, :width] for own in local]
    ends = [local_limits(limits, Ranks(case.size, r, "g"), block_size=case.block).to(device) for r in ranks]
    sums = state = None
    for level in range(3):
        found = [count_digits(local[r], case.k, level, sums, state, None, ends[r], impl=impl) for r in ranks]
        sums, state = torch.stack([counts for counts, _ in found]).sum(0, dtype=torch.int32), found[0][1]
        assert all(torch.equal(other, state) for _, other in found)
    found = [count_ties(local[r], sums, state, None, ends[r], block_size=case.block, impl=impl) for r in ranks]
    ties, state = torch.stack([own for own, _, _ in found]), found[0][2]
    return [
        take_winners(
            local[r], case.k, ties, found[r][1], state, None, ends[r], block_size=case.block, rank=r, impl=impl
        )
        for r in ranks
    ]


def combined(winners: list[torch.Tensor], case: Case) -> torch.Tensor:
    """The positions that all ranks selected, as top_k_per_row gives them."""
    size, k = len(winners), winners[0].shape[1]
    positions = torch.cat(
        [global_positions(own.cpu(), Ranks(size, r, "g" if size > 1 else None), block_size=case.block)
         for r, own in enumerate(winners)], 1,
    )  # fmt: skip
    for own in winners:
        live = own.cpu() >= 0
        assert torch.equal(live, live.cummin(1).values)  # packed to the front
        assert (own.cpu().diff(dim=1) > 0)[live[:, 1:]].all()  # ascending
    most = torch.iinfo(torch.int32).max
    ascending = torch.where(positions >= 0, positions, most).sort(1).values
    assert (ascending[:, k:] == most).all(), "more winners than k"
    return torch.where(ascending < most, ascending, -1)[:, :k]


def run_rank(rank: int, size: int, compiled: bool) -> None:
    """All cases in groups of 2 to ``size`` processes; an assertion that fails ends the process."""
    import torch.distributed as dist

    for members in range(2, size + 1):
        group = dist.new_group(list(range(members)))
        if rank < members:
            run_group(Ranks(members, rank, group.group_name), group, compiled)


def run_group(ranks: Ranks, group, compiled: bool) -> None:
    import torch.distributed as dist

    for case in CASES:
        case = case._replace(size=ranks.size)
        logits, limits = whole_rows(case)
        own, ends = shard_rows(case, logits, ranks.rank), local_limits(limits, ranks, block_size=case.block)
        given = [RowScores(own, None, ends)], case.k, ranks
        with Collectives() as seen:
            chosen = top_k_over_ranks(*given, block_size=case.block)[0]
        assert seen.count == selection_calls(own.shape[0], case.k, ranks.size) == 1, seen.count
        with Collectives() as seen:
            by_digits = top_k_by_digits(*given, block_size=case.block)[0]
        assert seen.count == 4 and torch.equal(chosen, by_digits), (seen.count, case)
        parts = [RowScores(own[:2], None, ends[:2]), RowScores(own[2:], None, ends[2:])]
        for select in (top_k_over_ranks, top_k_by_digits):
            assert torch.equal(torch.cat(select(parts, *given[1:], block_size=case.block)), chosen), (select, case)
        all_of_them = [torch.empty_like(chosen) for _ in range(ranks.size)]
        dist.all_gather(all_of_them, chosen, group=group)
        assert torch.equal(combined(all_of_them, case), top_k_per_row(logits, case.k, None, limits)), case
    check_merge(ranks)
    if compiled and ranks.size == 2:
        check_compiled(ranks)


class Collectives(TorchDispatchMode):
    """Counts collectives."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in func.name():
            self.count += 1
        return func(*args, **(kwargs or {}))


def check_merge(ranks: Ranks) -> None:
    """States of all ranks by their seeds: the last rank has no keys at all, token 0 none on any rank."""
    outs, lses = [], []
    for rank in range(ranks.size):
        generator = torch.Generator().manual_seed(rank)
        outs.append(torch.randn(5, 4, 8, generator=generator))
        lses.append(torch.randn(5, 4, generator=generator) * 5)
        lses[-1][0] = -math.inf
        outs[-1][0] = NAN
    lses[-1].fill_(-math.inf)
    outs[-1].fill_(NAN)
    for sink in (None, torch.tensor([0.0, math.inf, -math.inf, 2.0])):
        got = merge_over_ranks(AttentionOutput(outs[ranks.rank], lses[ranks.rank]), ranks, sink=sink)
        want = merge_attn_states(torch.stack(outs), torch.stack(lses), sink=sink)
        assert all(torch.equal(a, b) for a, b in zip(got, want))
        weights = torch.stack(lses[:-1])[:, 1:].double().softmax(0).unsqueeze(-1)
        plain = (weights * torch.stack(outs[:-1])[:, 1:].double()).sum(0)
        total = torch.stack(lses[:-1])[:, 1:].double().logsumexp(0)
        if sink is not None:
            plain = plain * torch.sigmoid(total - sink.double()).unsqueeze(-1)
        torch.testing.assert_close(got.out[1:].double(), plain, rtol=1e-5, atol=1e-6)
        assert (got.out[0] == 0).all() and got.lse[0].isneginf().all()


def check_compiled(ranks: Ranks) -> None:
    """One graph for any number of rows and columns, with the same bits."""
    before, _ = dynamo_counts()

    def select(logits, ends):
        return top_k_over_ranks([RowScores(logits, None, ends)], 9, ranks, block_size=4)[0]

    compiled = torch.compile(select, backend="eager", fullgraph=True, dynamic=True)
    for rows, width in ((3, 40), (5, 64), (2, 100)):
        logits = scores("relu", rows, width, seed=ranks.rank)
        ends = torch.full((rows,), width, dtype=torch.int32)
        assert torch.equal(compiled(logits, ends), select(logits, ends))
    assert dynamo_counts()[0] == before + 1
