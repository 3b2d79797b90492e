"""When few rows are scored and selected in one launch, and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_attn.dispatch import YES, Support, no, not_on, slower
from sparse_attn.ops.index_logits.plan import PagedProblem
from sparse_attn.ops.index_topk.shapes import padded
from sparse_attn.ops.topk.plan import WORD, power_of_two
from sparse_attn.target import Target
from sparse_attn.workspace import Buffer, Scratch

NAME = "one_launch"
RESIDENT = 256  # keys of a part
LEAST_DIM = 64  # half of which are multiplied at once, 32 at least
LEAST_PARTS, MOST_PARTS = 16, 512  # of a row
WARPS = 16
DEVIATIONS = 5  # of the number of selected scores that a part has, by which its offer exceeds their mean


@dataclass(frozen=True)
class OneLaunchPlan:
    """parts: of a row, a power of two, dealt out to ctas_per_row CTAs. resident: keys of a part. most: scores that it
    offers."""

    rows: int
    width: int
    parts: int
    ctas_per_row: int
    resident: int
    most: int
    num_warps: int
    padded_heads: int

    @property
    def slots(self) -> int:
        return self.most * self.parts

    @property
    def smem_words(self) -> int:
        """A list of the offers that share a digit, or a bit for every column."""
        return max(self.slots // 4, self.resident * self.parts // WORD)

    @property
    def scratch(self) -> Scratch:
        """Scores, offers, and a counter of arrivals for every row."""
        return Scratch(
            (
                Buffer("logits", (self.rows, padded(self.width)), torch.float32),
                Buffer("offered", (self.rows * self.parts, 2 * self.most + 1), torch.int32),
            ),
            self.rows,
        )


def supports(problem: PagedProblem, target: Target) -> Support:
    """Of index_topk_decode. Not chosen by itself until it is measured."""
    if not (target.is_hopper or target.interpreted):
        return not_on(target, "sm_90")
    if problem.flavour != "e4m3fn":
        return no(f"layout: got {problem.flavour}, allowed: e4m3fn")
    least = LEAST_DIM if target.is_hopper else LEAST_DIM // 2
    if problem.dim < least or problem.dim != power_of_two(problem.dim):
        return no(f"dim: got {problem.dim}, allowed: a power of two from {least} on")
    rows = problem.requests * problem.next_n
    if not (able(rows, problem.max_context_len, target) or target.interpreted):
        return no(
            f"max_context_len: got {problem.max_context_len} for {rows} rows, allowed: what {target.num_sms} SMs hold"
        )
    return slower("not measured yet") if target.is_hopper else YES


def able(rows: int, width: int, target: Target) -> bool:
    """Whether all CTAs of ``rows`` of ``width`` keys run at once, on a GPU that it is made for."""
    return target.is_hopper and rows * LEAST_PARTS <= target.num_sms and _parts(width) <= MOST_PARTS


def plan(problem: PagedProblem, top_k: int, target: Target) -> OneLaunchPlan:
    rows, parts = problem.requests * problem.next_n, _parts(problem.max_context_len)
    share = top_k / parts
    wanted = share + DEVIATIONS * share**0.5
    # Of no more offers a thread than its search takes, and of one that is left out.
    most = min(max(power_of_two(int(wanted) + 1), 4 * 32 * WARPS // parts), RESIDENT // 2)
    ctas = min(parts, power_of_two(max(target.num_sms // rows, 1) + 1) // 2)
    heads = max(16, power_of_two(problem.heads))
    return OneLaunchPlan(rows, problem.max_context_len, parts, ctas, RESIDENT, most, WARPS, heads)


def _parts(width: int) -> int:
    return max(LEAST_PARTS, power_of_two(-(-width // RESIDENT)))
