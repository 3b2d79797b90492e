"""Launch of the swap-AB product."""

from __future__ import annotations

import dataclasses

import torch

from sparse_attn.device import packed_dot, pdl
from sparse_attn.framework.target import Target, target_of
from sparse_attn.ops.layers.linears.plan import Plan, Product, product_format
from sparse_attn.ops.layers.linears.swap_ab import kernels
from sparse_attn.ops.layers.linears.swap_ab.config import rows_at_once

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
        **product_format(problem),
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
        rows, placed, columns, *rows.stride(), EACH=packed_dot.CODES_PER_WORD[codes], BLOCK=PLACED, num_warps=4,
        **pdl.launched(target),
    )  # fmt: skip
