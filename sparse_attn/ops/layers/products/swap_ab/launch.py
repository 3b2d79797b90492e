"""Launches of swap-AB kernels."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from sparse_attn.device import packed_dot, pdl
from sparse_attn.framework.target import Target, target_of
from sparse_attn.ops.layers.products.portable.launch import order_rows
from sparse_attn.ops.layers.products.problem import Experts, ExpertsPlan, Plan, Product
from sparse_attn.ops.layers.products.swap_ab import experts as few
from sparse_attn.ops.layers.products.swap_ab import kernels
from sparse_attn.ops.layers.products.swap_ab import sorted as many
from sparse_attn.ops.layers.products.swap_ab.config import rows_at_once, tokens_at_once
from sparse_attn.weight_layout import parse_weight_layout

ADDED = 1024  # values that a CTA of add_terms adds up
PLACED = 1024  # values of a row that a CTA places


def multiply(product: Product, plan: Plan) -> None:
    """Batch-invariant splits do not get fewer with more rows: some rows at a time, so that partials stay few."""
    for part in product.parts(rows_at_once(product.problem, plan.splits)):
        _multiply(part, dataclasses.replace(plan, tiles=part.problem.tiles(plan.block_m)))


def _multiply(product: Product, plan: Plan) -> None:
    rows, ends, codes, scales, out, problem, first_row, (placed, *partials), arrivals = product
    assert scales is not None
    target, words = target_of(rows.device), codes.view(torch.int32)
    place(rows, placed, problem.codes, target)
    steps = problem.columns // plan.block_k
    kernels.swap_ab[(plan.tiles, -(-problem.outputs // plan.block_n), plan.splits)](
        placed,
        ends,
        words,
        scales,
        out,
        *(partials or [out]),
        arrivals,
        problem.rows,
        problem.groups,
        problem.outputs,
        problem.columns,
        first_row,
        -(-steps // plan.splits),
        plan.splits,
        0 if ends is None else ends.stride(0),
        *words.stride()[:2],
        *scales.stride()[:2],
        GROUPS_PADDED=1 << problem.groups.bit_length(),
        **problem.format,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        WAY="fast" if target.vendor == "nvidia" else "plain",
        SPLIT=plan.splits > 1,
        PREFETCH=plan.prefetch,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **pdl.launched(target) | ({} if plan.registers is None else {"maxnreg": plan.registers}),
    )


def place(rows: torch.Tensor, placed: torch.Tensor, codes: str, target: Target) -> None:
    """Write rows in the order in which products with ``codes`` read them."""
    count, columns = rows.shape
    packed_dot.place_rows[(count, -(-columns // PLACED))](
        rows,
        placed,
        columns,
        *rows.stride(),
        EACH=packed_dot.CODES_PER_WORD[codes],
        BLOCK=PLACED,
        num_warps=4,
        **pdl.launched(target),
    )


# --- experts


def multiply_experts(call: Experts, plan: ExpertsPlan) -> None:
    """Of few tokens; where it has to be batch-invariant, of some at a time."""
    problem, most = call.problem, tokens_at_once(call.problem)
    for first in range(0, problem.tokens, most):
        x, weights, ids, out = (part[first : first + most] for part in (call.x, call.weights, call.ids, call.out))
        part = problem._replace(tokens=len(x))
        _multiply_few(call._replace(x=x, weights=weights, ids=ids, out=out, problem=part), plan)


def _multiply_few(call: Experts, plan: ExpertsPlan) -> None:
    problem, ids = call.problem, call.ids.contiguous()
    placed, inner, terms = call.views
    place(call.x, placed, problem.gate_up.codes, target_of(call.x.device))
    rows, groups, padded = problem.rows, problem.gate_up.groups, max(16, 1 << (problem.rows - 1).bit_length())
    ctas, weight, sizes, constants = _gate_up(call, plan, rows)
    counts = rows, problem.k, groups
    few.gate_up[ctas](placed, ids, *weight, inner, *counts, *sizes, ROWS_PADDED=padded, **constants)
    ctas, weight, sizes, constants = _down(call, plan, rows)
    weights = call.weights.contiguous()
    few.down[ctas](inner, weights, ids, *weight, terms, rows, groups, *sizes, ROWS_PADDED=padded, **constants)
    add_terms(terms, ids, call.out, groups)


def multiply_sorted(call: Experts, plan: ExpertsPlan) -> None:
    """Of many tokens, whose rows are sorted by expert."""
    problem, ids = call.problem, call.ids.contiguous()
    placed, order, spans, inner, terms = call.views
    place(call.x, placed, problem.gate_up.codes, target_of(call.x.device))
    order_rows(ids, order, spans, None, None, problem.gate_up.groups, plan.block_m)
    ctas, weight, sizes, constants = _gate_up(call, plan, len(spans))
    many.gate_up[ctas](placed, order, spans, *weight, inner, problem.k, *sizes, **constants)
    ctas, weight, sizes, constants = _down(call, plan, len(spans))
    many.down[ctas](inner, call.weights.contiguous(), order, spans, *weight, terms, *sizes, **constants)
    add_terms(terms, ids, call.out, problem.gate_up.groups)


class _Launch(NamedTuple):
    """ctas: the grid. weight: its words and scales. sizes: what stands behind a kernel's own counts. constants: what
    kernels take by name, but for their own."""

    ctas: tuple[int, int]
    weight: tuple[torch.Tensor, torch.Tensor | None]
    sizes: tuple[float, ...]
    constants: dict[str, Any]


def _gate_up(call: Experts, plan: ExpertsPlan, tiles: int) -> _Launch:
    """tiles: of rows."""
    problem, clamp, (codes, scales, layout) = call.problem, call.clamp, call.gate_up
    words, intermediate = codes.view(torch.int32), problem.down.columns
    sizes = problem.gate_up.columns, intermediate, parse_weight_layout(layout).first_row, clamp or 0.0
    constants = dict(
        BLOCK_K=plan.gate_up_block_k,
        BLOCK_N=plan.gate_up_block_n,
        OUT_EACH=packed_dot.CODES_PER_WORD[problem.down.codes],
        CLAMPED=clamp is not None,
        num_warps=plan.gate_up_warps,
    )
    return _Launch(
        (-(-2 * intermediate // plan.gate_up_block_n), tiles),
        (words, scales),
        (*sizes, *words.stride()[:2], *scales.stride()[:2]),
        problem.gate_up.format | constants | _options(call, plan),
    )


def _down(call: Experts, plan: ExpertsPlan, tiles: int) -> _Launch:
    """As ``_gate_up``."""
    problem, (codes, scales, layout) = call.problem, call.down
    words, hidden = codes.view(torch.int32), problem.gate_up.columns
    sizes = hidden, problem.down.columns, parse_weight_layout(layout).first_row
    constants = dict(BLOCK_K=plan.down_block_k, BLOCK_N=plan.down_block_n, num_warps=plan.down_warps)
    return _Launch(
        (-(-hidden // plan.down_block_n), tiles),
        (words, scales),
        (*sizes, *words.stride()[:2], *scales.stride()[:2]),
        problem.down.format | constants | _options(call, plan),
    )


def _options(call: Experts, plan: ExpertsPlan) -> dict[str, Any]:
    """What both products are launched with."""
    target = target_of(call.x.device)
    return dict(
        BLOCK_M=plan.block_m,
        WAY="fast" if target.vendor == "nvidia" else "plain",
        num_stages=plan.num_stages,
        **pdl.launched(target),
        **({} if plan.registers is None else {"maxnreg": plan.registers}),
    )


def add_terms(terms: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, experts: int) -> None:
    """Add up what a token's ``ids`` [tokens, k], contiguous, contributed to ``out`` [tokens, hidden]."""
    tokens, hidden = out.shape
    few.add_terms[(tokens, -(-hidden // ADDED))](
        terms, ids, out, ids.shape[1], experts, hidden, BLOCK=ADDED, num_warps=4, **pdl.launched(target_of(out.device))
    )
