"""The facts of a product and of the experts, what their launchers are given, and how kernels are launched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sparse_attn.weight_layout import PackedWeight, Weight, parse_weight_layout
from sparse_attn.workspace import Scratch

PLAIN = "plain"  # the layout of a weight without scales, in the dtype of the rows
ALIGNMENT = 16  # bytes


class Tile(NamedTuple):
    """rows, outputs, columns: multiplied at a time. registers: of a thread at most."""

    rows: int
    outputs: int
    columns: int
    num_warps: int
    num_stages: int
    registers: int | None = None


class Problem(NamedTuple):
    """What the choice of a kernel depends on.

    rows: of all groups. ends: whether rows may be of no group. codes: "e4m3", "e2m1", or "plain" of a weight in
    ``dtype``, that of the rows. scale: "fp32", "e8m0", or "none". block: (rows, columns) under one scale. aligned:
    whether columns of codes and scales are contiguous, and rows of codes begin at multiples of ALIGNMENT bytes.
    rows_aligned: likewise of the rows that are multiplied, none of which lie in each other.
    scales_aligned: whether rows of scales begin at multiples of 8 bytes. whole: whether the weight's first scale block
    was not cut.
    batch_invariant: neither the kernel nor what its sums depend on may follow from the number of rows. share: how much
    of the rows belongs to these groups in the mean; the others come behind the last end.
    """

    rows: int
    groups: int
    outputs: int
    columns: int
    dtype: torch.dtype
    ends: bool
    codes: str
    scale: str
    block: tuple[int, int]
    aligned: bool = True
    batch_invariant: bool = False
    rows_aligned: bool = True
    scales_aligned: bool = True
    whole: bool = True
    share: float = 1.0

    @property
    def tiled_groups(self) -> int:
        """Groups that can have rows at most, those behind the last end among them."""
        return min(self.rows, self.groups + self.ends)

    def tiles(self, rows: int) -> int:
        """Tiles of so many rows at most: each group takes one for its first row, and then one for every so many."""
        return self.tiled_groups + (self.rows - self.tiled_groups) // rows

    @property
    def rows_each(self) -> float:
        return self.rows * self.share / max(1, min(self.rows, self.groups))

    @property
    def format(self) -> dict[str, Any]:
        """The weight's, as a kernel's constants."""
        return dict(CODES=self.codes, **self.scale_format)

    @property
    def scale_format(self) -> dict[str, Any]:
        """That of its scales, likewise."""
        return dict(E8M0=self.scale == "e8m0", BLOCK_ROWS=self.block[0], BLOCK_COLUMNS=self.block[1])


class Product(NamedTuple):
    """What a launcher multiplies, into ``out`` [rows, outputs], contiguous, but for torch's product, which allocates
    its own. There is a row and an output at least.

    first_row: of the layout, see weight_layout.WeightLayout. views, counters: what the plan's scratch asks for.
    """

    rows: torch.Tensor
    ends: torch.Tensor | None
    codes: torch.Tensor
    scales: torch.Tensor | None
    out: torch.Tensor
    problem: Problem
    first_row: int
    views: list[torch.Tensor]
    counters: torch.Tensor

    @classmethod
    def of(
        cls,
        rows: torch.Tensor,
        ends: torch.Tensor | None,
        weight: Weight,
        out: torch.Tensor,
        problem: Problem,
        views: list[torch.Tensor],
        counters: torch.Tensor,
    ) -> Product:
        if not isinstance(weight, PackedWeight):
            return cls(rows, ends, weight, None, out, problem, 0, views, counters)
        codes, scales, layout = weight
        first_row = parse_weight_layout(layout).first_row
        return cls(rows, ends, codes, scales, out, problem, first_row, views, counters)

    def parts(self, most: int) -> Iterator[Product]:
        """Parts of ``most`` rows, of all of them where there are ends; they share the scratch."""
        for first in range(0, self.problem.rows, most):
            rows, out = (rows[first : first + most] for rows in (self.rows, self.out))
            yield self._replace(rows=rows, out=out, problem=self.problem._replace(rows=rows.shape[0]))


def as_weight(codes: torch.Tensor, scales: torch.Tensor | None, layout: str) -> Weight:
    """What an operator's arguments are: codes of bytes, e4m3 too, or the values of a plain weight."""
    return codes if scales is None else PackedWeight(codes, scales, layout)


def problem_of(rows: torch.Tensor, ends: torch.Tensor | None, weight: Weight, batch_invariant: bool = False) -> Problem:
    """Of real tensors or meta ones."""
    n, columns = rows.shape
    if isinstance(weight, PackedWeight):
        codes, scales, layout = weight
        packed = parse_weight_layout(layout)
        kind, scale, block, whole = packed.codes, packed.scale, packed.block, packed.first_row == 0
    else:
        codes, scales, kind, scale, block, whole = weight, None, PLAIN, "none", (1, 1), True
    groups, outputs = codes.shape[:2]
    aligned = _aligned(codes) and (scales is None or scales.stride(-1) == 1)
    rows_aligned = _aligned(rows.squeeze(0)) and (n < 2 or rows.stride(0) >= columns)  # a lone row's stride is any
    return Problem(
        rows=n,
        groups=groups,
        outputs=outputs,
        columns=columns,
        dtype=rows.dtype,
        ends=ends is not None,
        codes=kind,
        scale=scale,
        block=block,
        aligned=aligned,
        batch_invariant=batch_invariant,
        rows_aligned=rows_aligned,
        scales_aligned=scales is None or _aligned(scales, 8),
        whole=whole,
    )


def _aligned(tensor: torch.Tensor, multiple: int = ALIGNMENT) -> bool:
    """A tensor without memory lies as well as its offset and strides allow."""
    first = tensor.storage_offset() * tensor.itemsize if tensor.is_meta else tensor.data_ptr()
    *leading, last = tensor.stride()
    return last == 1 and not any(at % multiple for at in (first, *(step * tensor.itemsize for step in leading)))


@dataclass(frozen=True)
class Plan:
    """A CTA multiplies ``block_m`` rows of one group by ``block_n`` outputs, ``block_k`` columns at a time.

    tiles: of rows, launched; what no group needs ends at once. scaled_values: whether scales, powers of two, are
    multiplied into the values before a product; otherwise each product has one scale an output and is multiplied by it.
    splits: CTAs that share the columns of a tile, of which the last adds up their partials. prefetch: bytes of an
    output's codes that a CTA asks for before the rows are there. registers: of a thread at most; None: what it takes.
    """

    tiles: int
    block_m: int
    block_n: int
    block_k: int
    scaled_values: bool
    num_warps: int
    num_stages: int
    splits: int = 1
    prefetch: int = 0
    registers: int | None = None
    scratch: Scratch = Scratch()

    def ctas(self, outputs: int) -> int:
        return self.tiles * -(-outputs // self.block_n) * self.splits


@dataclass(frozen=True)
class StreamPlan(Plan):
    """grid: CTAs, which share the steps of all tiles: block_n outputs and block_k columns each. consumer_registers: of
    a thread that multiplies; registers: at launch. together: CTAs whose partials are read at once."""

    grid: int = 0
    consumer_registers: int = 0
    together: int = 1

    def ctas(self, outputs: int) -> int:
        return self.grid


@dataclass(frozen=True)
class ExpandedPlan(Plan):
    """outputs_at_once: of a group, expanded and multiplied by launches of their own."""

    outputs_at_once: int = 0


# --- experts


class ExpertsProblem(NamedTuple):
    """gate_up, down: the two products, of a row for each expert of a token. num_experts: of how many experts these rows
    are, others than those given among them."""

    tokens: int
    k: int
    gate_up: Problem
    down: Problem
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


class Experts(NamedTuple):
    """What a launcher computes, into ``out`` [tokens, hidden], contiguous. There is a token and an expert of it. Codes
    of gate_up and down are bytes. views, counters: see Product."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    gate_up: PackedWeight
    down: PackedWeight
    clamp: float | None
    out: torch.Tensor
    problem: ExpertsProblem
    views: list[torch.Tensor]
    counters: torch.Tensor


def experts_problem(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    num_experts: int,
    activations: str,
    batch_invariant: bool,
) -> ExpertsProblem:
    """Of real tensors or meta ones."""
    tokens, k = ids.shape
    inner = x.new_empty(0, gate_up.codes.shape[1] // 2)
    products = problem_of(x, ids, gate_up), problem_of(inner, ids, down)
    first, second = (one._replace(rows=tokens * k) for one in products)
    return ExpertsProblem(tokens, k, first, second, num_experts, activations, batch_invariant)


@dataclass(frozen=True)
class ExpertsPlan:
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
