"""One GPU as rank 0 of 8 context ranks. Collectives are copies of the right size within the GPU, so the wire is left
out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from benchmarks.checks import check_selection
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn.mesh import Mesh, Ranks
from sparse_attn.ops.attention.sparse import merge_attn_states
from sparse_attn.ops.topk.ranks import count_digits, count_ties, take_winners
from sparse_attn.ops.topk.select import top_k_per_row
from sparse_attn.pipeline.parallel import ranks
from sparse_attn.pipeline.parallel.ranks import RowScores, merge_over_ranks, top_k_over_ranks
from sparse_attn.roofline import Work
from sparse_attn.types import AttentionOutput

SIZE, BLOCK = 8, 64
RANKS = Ranks(SIZE, 0, "copies")
PLATEAU = 0.9  # share of scores that are zero in the case of ties


@contextmanager
def copies(mesh: Mesh | None = None) -> Iterator[None]:
    """Collectives of ranks as copies: every rank has what this one has. mesh: whose ranks; None: SIZE context
    ranks. What models sum stays, so that it does not grow; counts are added up."""
    size = SIZE if mesh is None else mesh.context.size

    def all_reduce(value: torch.Tensor, group: str) -> torch.Tensor:
        return value.clone() if value.is_floating_point() else value * size

    def all_gather(value: torch.Tensor, size: int, group: str) -> torch.Tensor:
        return value.repeat(size, *[1] * (value.dim() - 1))

    def all_to_all(value: torch.Tensor, size: int, group: str) -> torch.Tensor:
        return value[:1].repeat(size, *[1] * (value.dim() - 1))

    with ExitStack() as stack:
        for collective in (all_reduce, all_gather, all_to_all):
            stack.enter_context(mock.patch.object(ranks, collective.__name__, collective))
        yield


@suite("rank_share")
def rank_share(run: Run) -> Iterator[Record]:
    """Rank 0 of 8: passes of the threshold and the merge, alone and with copies for collectives.

    What a rank merges are the heads that it gets in the exchange: of 64 requests and 128 heads 16, 9.5 MB of bf16,
    a floor of 2.8 us. Merging all 128 heads reads and writes 76 MB, 23 us: no kernel does that in the 20 us that are
    asked of the passes and the merge together ("passes and merge").
    """
    width, top_k = run.pick((131072 // SIZE, 2048), (192, 20))
    for rows in run.pick((64, 8, 1), (3,)):
        for kind in ("normal", "zeros"):
            yield from _threshold(run, f"{kind}, requests {rows}", _scores(run, rows, width, kind), top_k)
    for rows, heads, width in run.pick(((64, 128, 512), (64, 16, 512), (8, 128, 512), (1, 128, 512)), ((3, 4, 16),)):
        yield from _merge(run, rows, heads, width)


def _scores(run: Run, rows: int, width: int, kind: str) -> torch.Tensor:
    scores = torch.randn(rows, width, dtype=torch.float32, device=run.device)
    return torch.where(torch.rand_like(scores) < PLATEAU, 0, scores.abs()) if kind == "zeros" else scores


def _threshold(run: Run, case: str, logits: torch.Tensor, top_k: int) -> Iterator[Record]:
    """Each pass, all of them, and all with copies for collectives. Scores lie in the L2 but where a floor says more."""
    ends = torch.full((logits.shape[0],), logits.shape[1], dtype=torch.int32, device=run.device)
    work = Work(logits.numel() * 4)
    digits = [count_digits(logits, top_k, 0, None, None, None, ends)]
    for level in (1, 2):
        counts, state = digits[-1]
        digits.append(count_digits(logits, top_k, level, counts * SIZE, state, None, ends))
    counts, state = digits[-1]
    sums, before = counts * SIZE, [None, *(found for found in digits[:-1])]
    ties, higher, threshold = count_ties(logits, sums, state, None, ends, block_size=BLOCK)
    gathered = ties.expand(SIZE, -1, -1).contiguous()

    def digit(level: int) -> Callable[[], object]:
        above = before[level]
        given = (None, None) if above is None else (above[0] * SIZE, above[1])
        return lambda: count_digits(logits, top_k, level, *given, None, ends)

    passes: dict[str, Callable[[], object]] = {f"digit {level}": digit(level) for level in range(3)}
    passes["ties"] = lambda: count_ties(logits, sums, state, None, ends, block_size=BLOCK)
    passes["winners"] = lambda: take_winners(
        logits, top_k, gathered, higher, threshold, None, ends, block_size=BLOCK, rank=0
    )

    def together() -> object:
        return [call() for call in passes.values()]

    def over_copies() -> torch.Tensor:
        with copies():
            return top_k_over_ranks([RowScores(logits, None, ends)], top_k, RANKS, block_size=BLOCK)[0]

    _check(over_copies(), logits, top_k)
    for name, call in passes.items():
        yield Record(f"{case}, {name}", run.time([call]), floor_us=run.floor(work))
    yield Record(f"{case}, passes", run.time([together]))
    states = _states(run, logits.shape[0], *run.pick((128 // SIZE, 512), (4, 16)))
    yield Record(
        f"{case}, passes and merge", run.time([lambda one=one: (together(), merge_attn_states(*one)) for one in states])
    )
    yield Record(f"{case}, selection", run.time([over_copies]))


def _check(chosen: torch.Tensor, logits: torch.Tensor, top_k: int) -> None:
    """All ranks have the same scores, so a column wins on every rank, or on the first ones."""
    rows, width = logits.shape
    blocks = logits.unflatten(1, (-1, BLOCK)).unsqueeze(2).expand(-1, -1, SIZE, -1)
    whole = top_k_per_row(blocks.reshape(rows, -1), top_k)
    block = whole // BLOCK
    own = torch.where((whole >= 0) & (block % SIZE == 0), block // SIZE * BLOCK + whole % BLOCK, width)
    own = own.sort(1).values.to(torch.int32)
    check_selection(chosen, torch.where(own < width, own, -1), "selection over ranks")


def _states(run: Run, rows: int, heads: int, width: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(outs, lses) of all ranks, as many sets as keep the L2 cold."""
    outs = torch.randn(SIZE, rows, heads, width, device=run.device, dtype=torch.bfloat16)
    lses = torch.randn(SIZE, rows, heads, dtype=torch.float32, device=run.device)
    return [(outs.clone(), lses.clone()) for _ in range(run.sets(outs.nbytes))]


def _merge(run: Run, rows: int, heads: int, width: int) -> Iterator[Record]:
    """Of all ranks' outputs of so many heads, exchanged before; and with copies for collectives, each rank merging its
    part of the heads."""
    inputs = _states(run, rows, heads, width)
    outs, lses = inputs[0]
    with copies():
        merged = merge_over_ranks(AttentionOutput(outs[0], lses[0]), RANKS)
    some = slice(heads // SIZE if heads % SIZE == 0 and rows > 1 else heads)  # others are copies of this rank's
    if not torch.allclose(merged.out[:, some].float(), outs[0, :, some].float(), rtol=1e-2, atol=1e-2):
        raise AssertionError("merged outputs of equal ranks differ from one rank's")
    floor = run.floor(Work(outs.nbytes + outs.nbytes // SIZE + lses.nbytes))
    calls = [lambda one=one: merge_attn_states(*one) for one in inputs]
    yield Record(f"merge, requests {rows}, heads {heads}", run.time(calls), floor_us=floor)

    def over_copies(one: tuple[torch.Tensor, torch.Tensor]) -> AttentionOutput:
        with copies():
            return merge_over_ranks(AttentionOutput(one[0][0], one[1][0]), RANKS)

    yield Record(
        f"merge over ranks, requests {rows}, heads {heads}",
        run.time([lambda one=one: over_copies(one) for one in inputs]),
    )
