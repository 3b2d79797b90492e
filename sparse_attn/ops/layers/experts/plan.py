"""The facts of a call, what a launcher is given, and how the kernels that compute it are launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sparse_attn.ops.layers.linears.plan import Problem as Product
from sparse_attn.ops.layers.linears.plan import problem_of as product_of
from sparse_attn.workspace import Scratch


class Problem(NamedTuple):
    """gate_up, down: the two products, of a row for each expert of a token. num_experts: of how many experts these rows
    are, others than those given among them."""

    tokens: int
    k: int
    gate_up: Product
    down: Product
    num_experts: int
    activations: str = "exact"
    batch_invariant: bool = False

    @property
    def rows(self) -> int:
        return self.tokens * self.k

    @property
    def each(self) -> float:
        """Rows of an expert in the mean."""
        return self.rows / self.num_experts


class Call(NamedTuple):
    """What a launcher computes, into ``out`` [tokens, hidden], contiguous. There is a token and an expert of it."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    gate_up: tuple[torch.Tensor, torch.Tensor, str]
    down: tuple[torch.Tensor, torch.Tensor, str]
    clamp: float | None
    out: torch.Tensor
    problem: Problem
    views: list[torch.Tensor]  # what the plan's scratch asks for, and its counters
    counters: torch.Tensor


def problem_of(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_layout: str,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    down_layout: str,
    num_experts: int,
    activations: str,
    batch_invariant: bool,
) -> Problem:
    """Of packed_experts' arguments, real or meta."""
    tokens, k = ids.shape
    first = product_of(x, ids, gate_up, gate_up_scales, gate_up_layout)
    hidden, intermediate = down.shape[1], gate_up.shape[1] // 2
    inner = x.new_empty(0, intermediate)
    second = product_of(inner, ids, down, down_scales, down_layout)
    assert second.outputs == hidden
    first, second = (one._replace(rows=tokens * k) for one in (first, second))
    return Problem(tokens, k, first, second, num_experts, activations, batch_invariant)


@dataclass(frozen=True)
class Plan:
    """How swap_ab, sorted or hopper is launched; of "grouped", whose products have plans of their own, sizes are 0.

    block_m: rows of an expert that a CTA multiplies. block_n: outputs of it; of gate_up half are gates, half ups.
    block_k: columns at a time. registers: of a thread at most; None: what it takes. Warps and columns of hopper are
    constants of its own, and 0 here.
    """

    block_m: int = 0
    gate_up_block_n: int = 0
    gate_up_warps: int = 0
    gate_up_block_k: int = 0
    down_block_n: int = 0
    down_warps: int = 0
    down_block_k: int = 0
    num_stages: int = 0
    registers: int | None = None
    scratch: Scratch = Scratch()
