"""Launch of the experts of few tokens."""

from __future__ import annotations

import torch

from sparse_attn.device import packed_dot, pdl
from sparse_attn.framework.target import target_of
from sparse_attn.ops.layers.experts.plan import Call, Plan
from sparse_attn.ops.layers.experts.swap_ab import kernels
from sparse_attn.ops.layers.experts.swap_ab.config import tokens_at_once
from sparse_attn.ops.layers.linears.plan import product_format
from sparse_attn.ops.layers.linears.swap_ab.launch import place
from sparse_attn.weight_layout import parse_weight_layout

ADDED = 1024  # values that a CTA of add_terms adds up


def multiply(call: Call, plan: Plan) -> None:
    n, problem, most = call.problem.tokens, call.problem, tokens_at_once(call.problem)
    for first in range(0, n, most):
        some = slice(first, min(first + most, n))
        part = problem._replace(tokens=some.stop - some.start)
        _multiply(
            call._replace(
                x=call.x[some], weights=call.weights[some], ids=call.ids[some], out=call.out[some], problem=part
            ),
            plan,
        )  # fmt: skip


def _multiply(call: Call, plan: Plan) -> None:
    (
        x,
        weights,
        ids,
        (gate_up, gate_up_scales, gate_up_layout),
        (down, down_scales, down_layout),
        clamp,
        out,
        problem,
    ) = call[:8]
    first, second = problem.gate_up, problem.down
    experts, hidden, intermediate = first.groups, first.columns, second.columns
    target = target_of(x.device)
    launched = pdl.launched(target)
    ids, weights = ids.contiguous(), weights.contiguous()
    placed, inner, terms = call.views
    common = dict(
        ROWS_PADDED=max(16, 1 << (problem.rows - 1).bit_length()), BLOCK_M=plan.block_m,
        WAY="fast" if target.vendor == "nvidia" else "plain", num_stages=plan.num_stages, **launched,
    )  # fmt: skip
    place(x, placed, first.codes, target)
    words = gate_up.view(torch.int32)
    kernels.gate_up[(-(-2 * intermediate // plan.gate_up_block_n), problem.rows)](
        placed,
        ids,
        words,
        gate_up_scales,
        inner,
        problem.rows,
        problem.k,
        experts,
        hidden,
        intermediate,
        parse_weight_layout(gate_up_layout).first_row,
        0.0 if clamp is None else clamp,
        *words.stride()[:2],
        *gate_up_scales.stride()[:2],
        **product_format(first),
        BLOCK_K=plan.gate_up_block_k,
        BLOCK_N=plan.gate_up_block_n,
        OUT_EACH=packed_dot.CODES_PER_WORD[second.codes],
        CLAMPED=clamp is not None,
        num_warps=plan.gate_up_warps,
        **common,
    )
    words = down.view(torch.int32)
    kernels.down[(-(-hidden // plan.down_block_n), problem.rows)](
        inner,
        weights,
        ids,
        words,
        down_scales,
        terms,
        problem.rows,
        experts,
        hidden,
        intermediate,
        parse_weight_layout(down_layout).first_row,
        *words.stride()[:2],
        *down_scales.stride()[:2],
        **product_format(second),
        BLOCK_K=plan.down_block_k,
        BLOCK_N=plan.down_block_n,
        num_warps=plan.down_warps,
        **common,
    )
    add_terms(terms, ids, out, experts)


def add_terms(terms: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, experts: int) -> None:
    """Add up what a token's ``ids`` [tokens, k], contiguous, contributed to ``out`` [tokens, hidden]."""
    tokens, hidden = out.shape
    kernels.add_terms[(tokens, -(-hidden // ADDED))](
        terms, ids, out, ids.shape[1], experts, hidden, BLOCK=ADDED, num_warps=4, **pdl.launched(target_of(out.device))
    )
