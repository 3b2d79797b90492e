"""When few rows are scored and selected in one launch, and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_attn.dispatch import YES, Support, no, not_on, slower
from sparse_attn.ops.index_logits.plan import PagedProblem
from sparse_attn.ops.index_topk.shapes import padded
from sparse_attn.ops.topk.plan import WORD, Plan, power_of_two
from sparse_attn.target import Target
from sparse_attn.workspace import Buffer, Scratch

NAME = "one_launch"
RESIDENT = 256  # keys of a part
LEAST_DIM = 64  # half of which are multiplied at once, 32 at least
LEAST_PARTS, MOST_PARTS = 16, 512  # of a row
WARPS = 16
LEAST_SLOTS, MOST_SLOTS = 4 * 32 * WARPS, 8192  # offers that the last CTA's search takes
DEVIATIONS = 5  # of the number of selected scores that a part has, by which its offer exceeds their mean


@dataclass(frozen=True)
class OneLaunchPlan(Plan):
    """parts: of a row, a power of two, dealt out to ctas_per_row CTAs. resident: keys of a part. most: scores that it
    offers; as many as keys: none is offered, rows are selected where they lie."""

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


def supports(problem: PagedProblem, top_k: int, target: Target) -> Support:
    """Of index_topk_decode. Not chosen by itself until it is measured."""
    if not (target.is_hopper or target.interpreted):
        return not_on(target, "sm_90")
    if problem.flavour != "e4m3fn":
        return no(f"layout: got {problem.flavour}, allowed: e4m3fn")
    least = LEAST_DIM if target.is_hopper else LEAST_DIM // 2
    if problem.dim < least or problem.dim != power_of_two(problem.dim):
        return no(f"dim: got {problem.dim}, allowed: a power of two from {least} on")
    return supports_rows(problem.requests * problem.next_n, problem.max_context_len, top_k, target)


def supports_rows(rows: int, width: int, top_k: int, target: Target) -> Support:
    """Of so many rows, on a GPU that it is made for."""
    if rows * LEAST_PARTS > target.num_sms and not target.interpreted:
        return no(f"rows: got {rows}, allowed: at most {target.num_sms // LEAST_PARTS}")
    if width > RESIDENT * MOST_PARTS:
        return no(f"max_context_len: got {width}, allowed: at most {RESIDENT * MOST_PARTS}")
    parts = _parts(width)
    if _most(top_k, parts) * parts > MOST_SLOTS:
        return no(f"top_k: got {top_k}, allowed: what {MOST_SLOTS} offers of {parts} parts hold")
    return slower("not measured yet") if target.is_hopper else YES


def plan(problem: PagedProblem, top_k: int, target: Target) -> OneLaunchPlan:
    rows, parts = problem.requests * problem.next_n, _parts(problem.max_context_len)
    ctas = min(parts, power_of_two(max(target.num_sms // rows, 1) + 1) // 2)
    heads, most = max(16, power_of_two(problem.heads)), _most(top_k, parts)
    return OneLaunchPlan(rows, problem.max_context_len, parts, ctas, RESIDENT, most, WARPS, heads)


def _parts(width: int) -> int:
    return max(LEAST_PARTS, power_of_two(-(-width // RESIDENT)))


def _most(top_k: int, parts: int) -> int:
    """Scores that a part offers."""
    share = top_k / parts
    wanted = power_of_two(int(share + DEVIATIONS * share**0.5) + 1)
    return min(max(wanted, LEAST_SLOTS // parts), RESIDENT)
