"""Launch of the product of expanded codes, some outputs at a time."""

from __future__ import annotations

from sparse_attn.device import pdl
from sparse_attn.framework.target import target_of
from sparse_attn.ops.layers.linears.expanded import kernels
from sparse_attn.ops.layers.linears.plan import ExpandedPlan, Product, scale_format

BLOCK = 1024  # codes that a CTA expands


def multiply(product: Product, plan: ExpandedPlan) -> None:
    rows, ends, codes, scales, out, problem, first_row, (expanded,), _ = product
    assert scales is not None
    launched = pdl.launched(target_of(rows.device))
    format = scale_format(problem)
    for start in range(0, problem.outputs, plan.outputs_at_once):
        outputs = min(plan.outputs_at_once, problem.outputs - start)
        skipped, cut = divmod(first_row + start, problem.block[0])
        part = scales[:, skipped:]
        kernels.expand[(outputs, -(-problem.columns // BLOCK), problem.groups)](
            codes[:, start:], part, expanded, outputs, problem.columns, cut, *codes.stride()[:2], *part.stride(),
            CODES=problem.codes, BLOCK=BLOCK, num_warps=4, **format, **launched,
        )  # fmt: skip
        kernels.multiply[(plan.tiles, -(-(cut + outputs) // plan.block_n))](  # with those of the block that was cut
            rows, ends, expanded, part, out[:, start:], problem.rows, problem.groups, outputs, problem.columns, cut,
            rows.stride(0), 0 if ends is None else ends.stride(0), *part.stride(), problem.outputs,
            GROUPS_PADDED=1 << problem.groups.bit_length(), BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
            BLOCK_K=plan.block_k, num_warps=plan.num_warps, num_stages=plan.num_stages, **format, **launched,
        )  # fmt: skip
