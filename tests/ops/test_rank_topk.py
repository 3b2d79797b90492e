"""The highest scores of all ranks and merged attention: every step alone, and 2, 3 and 4 processes with gloo."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from conftest import big, long
from support.processes import run_processes
from support.ranks import CASES, Case, by_candidates, combined, over_ranks, run_rank, shard_rows, whole_rows

from sparse_attn import top_k_per_row
from sparse_attn.device import pdl
from sparse_attn.framework.target import target_of
from sparse_attn.mesh import ALONE, Ranks
from sparse_attn.ops.topk.ranks import count_digits, count_ties, launch, merge_candidates, pack_candidates, take_winners
from sparse_attn.pipeline.parallel.ranks import (
    RowScores,
    exchanged_bytes,
    global_positions,
    local_limits,
    selection_calls,
    sends_candidates,
    top_k_over_ranks,
)
from sparse_attn.testing.ops import opcheck


@pytest.mark.kernel
@pytest.mark.parametrize("form", ("whole rows", "split rows", "rows in fours", "split rows in fours", "many tiles"))
def test_winners_of_all_ranks_are_those_of_one(form, device, monkeypatch):
    """Kernels of all ranks' steps in one process, summed and stacked by hand."""
    if "split" in form:
        small = launch.Tile(8, 1)
        for name, value in dict(
            CTAS_AN_SM=64, WHOLE=8, CHUNK=32, DIGITS=launch.Tile(256, 8), FEW=small, MANY=small
        ).items():
            monkeypatch.setattr(launch, name, value)
    if form == "many tiles":
        few, more, small = launch.Tile(256, 8), launch.Tile(512, 8), launch.Tile(64, 1)
        for name, value in dict(CTAS_AN_SM=1, CHUNK=8, DIGITS=few, WHOLE_DIGITS=more, FEW=small, MANY=small).items():
            monkeypatch.setattr(launch, name, value)
    for case in CASES if big(device) else CASES[:1]:
        logits, limits = whole_rows(case)
        want = top_k_per_row(logits, case.k, None, limits, impl="reference")
        found = over_ranks(case, logits, limits, device, "triton", in_fours="fours" in form)
        assert torch.equal(combined(found, case), want), case


@triton.jit
def _write_late(source, limits, logits, ends, size, rows, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Scores and row ends, written after the next launch may start."""
    pdl.wait(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(logits + at, tl.load(source + at, at < size), at < size)
    tl.store(ends + at, tl.load(limits + at, at < rows), at < rows)


@pytest.mark.kernel
def test_scores_written_while_the_first_step_starts(device):
    """One chain after the other on a stream, all in the same memory."""
    rows, width, k = (64, 16384, 2048) if big(device) else (3, 100, 9)
    generator = torch.Generator(device).manual_seed(0)
    sources = torch.randn(4, rows, width, device=device, generator=generator)
    limits = torch.randint(width + 1, (4, rows), device=device, generator=generator, dtype=torch.int32)
    want = [top_k_per_row(*given, impl="reference") for given in zip(sources, [k] * 4, [None] * 4, limits)]
    logits, ends, launched = torch.empty_like(sources[0]), torch.empty_like(limits[0]), pdl.launched(target_of(device))
    found = []
    for n in range(40 if big(device) else 2):
        grid = (triton.cdiv(logits.numel(), 4096),)
        _write_late[grid](sources[n % 4], limits[n % 4], logits, ends, logits.numel(), rows, BLOCK=4096, **launched)
        sums = state = None
        for level in range(3):
            sums, state = count_digits(logits, k, level, sums, state, None, ends, impl="triton")
        ties, above, state = count_ties(logits, sums, state, None, ends, block_size=64, impl="triton")
        options = dict(block_size=64, rank=0, impl="triton")
        found.append(take_winners(logits, k, ties.unsqueeze(0), above, state, None, ends, **options))
    assert all(torch.equal(own, want[n % 4]) for n, own in enumerate(found))


@pytest.mark.kernel
def test_digits_of_sums_of_many_scores(device):
    """Sums of all sizes, and as many still to be taken as 32 bits hold."""
    generator = torch.Generator().manual_seed(0)
    for digits, level in ((2048, 1), (2048, 2), (1024, 3)):
        few = torch.randint(-3, 9, (8, digits), dtype=torch.int32, generator=generator)
        sums = torch.where(few > 7, torch.randint(2**31 - 1, few.shape, dtype=torch.int32, generator=generator), few)
        sums[4:6] = few[4:6]
        need = torch.tensor([1, 2**19 - 1, 2**29, 2**31 - 1, 700, 1 << 30, 0, 2**19], dtype=torch.int32)
        state = torch.stack([torch.zeros_like(need), need], 1)
        rows = torch.randn(8, 20, generator=generator)
        call = count_ties if level == 3 else count_digits
        options = dict(block_size=4) if level == 3 else dict(k=5, level=level)
        given = dict(sums=sums.to(device), state=state.to(device))
        got = call(rows.to(device), **options, **given, impl="triton")
        want = call(rows, **options, sums=sums, state=state, impl="reference")
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want)), level


@pytest.mark.kernel
def test_a_whole_block_of_equal_scores_is_counted(device):
    """Blocks at and around what two counts in the halves of a word hold. A row ties as a whole, or but for one score."""
    for block_size in (16384, 32767, 32768, 32769, 65536):
        logits = torch.ones(2, block_size + 7)
        logits[1, block_size // 2] = 2
        sums = state = None
        for level in range(3):
            sums, state = count_digits(logits, 9, level, sums, state)
        given, options = (logits, sums, state), dict(block_size=block_size)
        want = count_ties(*given, **options)
        assert want[0].tolist() == [[block_size, 7], [block_size - 1, 7]]
        got = count_ties(*(value.to(device) for value in given), **options, impl="triton")
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want)), block_size
        ties, above, state = got
        found = take_winners(logits.to(device), 9, ties.unsqueeze(0), above, state, **options, rank=0, impl="triton")
        assert torch.equal(found.cpu(), top_k_per_row(logits, 9, impl="reference")), block_size


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_of_all_ranks_selects_what_one_selects(case):
    logits, limits = whole_rows(case)
    want = top_k_per_row(logits, case.k, None, limits)
    assert torch.equal(combined(over_ranks(case, logits, limits, "cpu"), case), want)


# Ties over ranks in many blocks, several chunks of blocks, ranks without a key, one candidate, plateaus of zeros.
MERGED = [
    *CASES, Case(2, 1, 40, "zeros", 700), Case(3, 2, 33, "equal", 900), Case(5, 4, 1, "zeros", 50),
    Case(8, 64, 200, "zeros", 130), Case(2, 256, 300, "equal", 2000), Case(4, 3, 600, "special", 1601),
]  # fmt: skip


@pytest.mark.parametrize("start", (0, 5))
@pytest.mark.parametrize("case", MERGED, ids=str)
def test_the_reference_merges_candidates_to_the_bit(case, start):
    logits, limits = whole_rows(case)
    found = by_candidates(case, logits, limits, "cpu", start=start)
    assert all(torch.equal(a, b) for a, b in zip(found, over_ranks(case, logits, limits, "cpu"))), case
    assert torch.equal(combined(found, case), top_k_per_row(logits, case.k, None, limits))


@pytest.mark.kernel
@pytest.mark.parametrize("form", ("whole chunks", "small chunks"))
def test_kernels_merge_candidates_to_the_bit(form, device, monkeypatch):
    if form == "small chunks":
        monkeypatch.setattr(launch, "MERGED_BLOCKS", 8)
        monkeypatch.setattr(launch, "CHUNK", 8)
    for case in MERGED:
        logits, limits = whole_rows(case)
        for start in (0, 5) if form == "whole chunks" else (0,):
            found = by_candidates(case, logits, limits, device, "triton", start)
            want = over_ranks(case, logits, limits, "cpu")
            assert all(torch.equal(a.cpu(), b) for a, b in zip(found, want)), (case, start)


def test_the_way_follows_bytes_and_calls():
    assert [sends_candidates(1 << 20, k, size) for k, size in ((2048, 4), (2048, 5), (2048, 6), (1024, 8))] == [
        True, True, False, True
    ]  # fmt: skip
    assert selection_calls(192, 2048, 8) == 1 and selection_calls(193, 2048, 8) == 4
    assert selection_calls(1, 2048, 32) == 4  # more candidates than a CTA holds
    assert exchanged_bytes(64, 8192, 4, k=2048, block_size=64) == 3 * 64 * (2048 * 4 + 128)
    assert exchanged_bytes(1000, 8192, 8, k=2048, block_size=64) == 1000 * (35840 + 7 * 128)


def test_limits_are_dealt_and_positions_found_again():
    limits = torch.tensor([-5, 0, 1, 3, 4, 11, 12, 13, 24, 1000], dtype=torch.int32)
    held = [local_limits(limits, Ranks(3, rank, "group"), block_size=4) for rank in range(3)]
    assert torch.equal(sum(held), limits.clamp_min(0))
    for row, limit in enumerate(limits.tolist()):
        positions = [
            position
            for rank in range(3)
            for position in global_positions(
                torch.arange(int(held[rank][row])), Ranks(3, rank, "group"), block_size=4
            ).tolist()
        ]
        assert sorted(positions) == list(range(max(limit, 0)))
    assert global_positions(torch.tensor([-1, 5]), Ranks(3, 1, "group"), block_size=4).tolist() == [-1, 17]


def test_one_rank_selects_as_before_and_calls_no_collective():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    got = top_k_over_ranks([RowScores(logits)], 7, ALONE, block_size=4)[0]
    assert torch.equal(got, top_k_per_row(logits, 7))


def test_what_ranks_refuse():
    for arguments, message in (
        ((0,), "size: got 0"), ((2, 2, "g"), "rank: got 2"), ((2, 0), "group: got None for 2 ranks"),
        ((1, 0, "g"), "group: got 'g' for 1 ranks"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Ranks(*arguments)
    logits, state = torch.zeros(2, 8), torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="sums: got None for level 1"):
        count_digits(logits, 2, 1, None, state)
    with pytest.raises(ValueError, match="level: got 3"):
        count_digits(logits, 2, 3)
    with pytest.raises(ValueError, match="sums: got shape"):
        count_ties(logits, torch.zeros(2, 2048, dtype=torch.int32), state, block_size=4)
    ties = torch.zeros(2, 2, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="rank: got 2, allowed: 0 to 1"):
        take_winners(logits, 2, ties, ties[0], state, block_size=4, rank=2)
    candidates, columns = torch.zeros(2, 2, 4, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    for arguments, rank, message in (
        ((candidates, columns), 2, "rank: got 2, allowed: 0 to 1"),
        ((candidates[..., :2].contiguous(), columns), 0, "candidates: got 2 words a row, allowed: at least 3"),
        ((candidates.transpose(0, 1), columns), 0, "candidates: got strides"),
        ((torch.zeros(2, 2, 16385, dtype=torch.int32), torch.zeros(2, 16385, dtype=torch.int32)), 0, "candidates: got"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_candidates(*arguments, block_size=4, rank=rank)
    with pytest.raises(TypeError, match="columns: got dtype int64"):
        pack_candidates(logits, columns.long(), block_size=4)
    with pytest.raises(TypeError, match="ties: got dtype uint8, allowed: int32"):
        take_winners(logits, 2, ties, ties[0], state, block_size=256, rank=0)


def test_opcheck():
    case = CASES[0]
    logits, limits = whole_rows(case)
    local, ends = shard_rows(case, logits, 0), local_limits(limits, Ranks(case.size, 0, "g"), block_size=case.block)
    sums, state = count_digits(local, case.k, 0, None, None, None, ends)
    opcheck("count_digits", local, None, ends, sums, state, case.k, 1, "auto")
    sums = torch.ones(local.shape[0], 1024, dtype=torch.int32)
    opcheck("count_ties", local, None, ends, sums, state, case.block, "auto")
    ties, above, state = count_ties(local, sums, state, None, ends, block_size=case.block)
    opcheck(
        "take_winners", local, None, ends, ties.expand(case.size, -1, -1), above, state, case.k, case.block, 0, "auto"
    )


def test_opcheck_of_candidates():
    case = CASES[0]
    logits, limits = whole_rows(case)
    local, ends = shard_rows(case, logits, 0), local_limits(limits, Ranks(case.size, 0, "g"), block_size=case.block)
    columns = top_k_per_row(local, case.k, None, ends)
    opcheck("pack_candidates", local, columns, None, case.block, "auto")
    packed = pack_candidates(local, columns, block_size=case.block)
    opcheck("merge_candidates", torch.stack([packed] * case.size), columns, case.block, 1, "auto")


def test_processes_with_gloo(tmp_path):
    """Selection to the bit, merged attention with a sink counted once, four collectives, in groups of 2 and 3 processes.
    SPARSE_ATTN_LONG: of 4, too, and compiled as eager. They are spawned: a forked child of threads may hang."""
    size = 4 if long() else 3
    run_processes(size, run_rank, tmp_path, size, long())
