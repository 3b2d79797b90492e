"""Scratch of a step's products with packed weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from sparse_attn.framework.dispatch import Choice
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.products import dispatch
from sparse_attn.ops.layers.products.problem import ExpertsProblem, Problem
from sparse_attn.pipeline.options import Options
from sparse_attn.weight_layout import PackedWeight, Weight, parse_weight_layout, weight_shape
from sparse_attn.workspace import Scratch

GATE_UP, DOWN = "moe.gate_up", "moe.down"  # how names of routed experts end
FEW = 256  # rows up to which each number of them may have tiles and splits of its own


class _Shape(NamedTuple):
    """grouped: of rank 3, whose product takes ends, be it of one group."""

    groups: int
    outputs: int
    columns: int
    layout: str
    grouped: bool

    def problem(self, rows: int, dtype: torch.dtype, options: Options) -> Problem:
        packed = parse_weight_layout(self.layout)
        return Problem(
            rows, self.groups, self.outputs, self.columns, dtype, self.grouped, packed.codes, packed.scale,
            packed.block, batch_invariant=options.batch_invariant, whole=packed.first_row == 0,
        )  # fmt: skip


def product_scratches(
    weights: Mapping[str, Weight],
    experts_per_token: int,
    num_experts: int,
    most: int,
    target: Target,
    *,
    dtype: torch.dtype,
    options: Options,
) -> Iterator[Scratch]:
    """What products of a step of ``most`` rows or fewer ask for, at every number of rows that may take the most. More
    rows take more, except where another kernel runs.

    num_experts: of the model. weights: a rank's, by the names of models.params; of a packed weight of rank 3 each group
    takes every token.
    """
    packed = {name: value for name, value in weights.items() if isinstance(value, PackedWeight)}
    routed = {(_shape(value), _shape(packed[name[: -len(GATE_UP)] + DOWN])) for name, value in packed.items()
              if name.endswith(GATE_UP)}  # fmt: skip
    alone = {_shape(value) for name, value in packed.items() if not name.endswith((GATE_UP, DOWN))}

    @functools.cache
    def chosen(tokens: int) -> list[Choice]:
        found: list[Choice] = []
        for shape in alone:
            found.append(
                dispatch.CHOOSE[options.activations](shape.problem(tokens * shape.groups, dtype, options), target)
            )
        for pair in routed:
            first, second = (shape.problem(tokens * experts_per_token, dtype, options) for shape in pair)
            how = options.activations, options.batch_invariant
            routes = ExpertsProblem(tokens, experts_per_token, first, second, num_experts, *how)
            found.append(dispatch.choose_experts(routes, target))
        return found

    for tokens in _counts(most, lambda tokens: [choice.kernel.name for choice in chosen(tokens)]):
        for choice in chosen(tokens):
            yield choice.plan.scratch


def _counts(most: int, kernels: Callable[[int], list[str]]) -> Iterator[int]:
    """Each number of rows up to FEW; beyond it the last before each change of kernels, and ``most``."""
    yield from range(1, min(most, FEW) + 1)
    spans = [(FEW, most)] if most > FEW else []
    while spans:
        first, last = spans.pop()
        middle = (first + last) // 2
        if kernels(first) == kernels(last) or middle == first:
            yield last
        else:
            spans += [(first, middle), (middle, last)]


def _shape(weight: PackedWeight) -> _Shape:
    *groups, outputs, columns = weight_shape(weight)
    return _Shape(groups[0] if groups else 1, outputs, columns, weight.layout, bool(groups))
