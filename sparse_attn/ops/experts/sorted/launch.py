"""Launch of the experts of many tokens."""

from __future__ import annotations

from typing import Any

import torch

from sparse_attn.device import packed_dot, pdl
from sparse_attn.ops.experts.grouped.config import COUNTED
from sparse_attn.ops.experts.grouped.kernels import order_rows
from sparse_attn.ops.experts.launch import Call
from sparse_attn.ops.experts.plan import Plan
from sparse_attn.ops.experts.sorted import kernels
from sparse_attn.ops.experts.swap_ab.launch import add_terms
from sparse_attn.ops.grouped_linear.fp8.launch import quantise
from sparse_attn.ops.grouped_linear.plan import product_format
from sparse_attn.ops.grouped_linear.swap_ab.launch import place
from sparse_attn.target import target_of
from sparse_attn.weight_layout import parse_weight_layout

SORTED = 64  # rows whose scales a CTA sorts


def multiply(call: Call, plan: Plan) -> None:
    gate_up, gate_up_scales, gate_up_layout = call.gate_up
    down, down_scales, down_layout = call.down
    problem, target = call.problem, target_of(call.x.device)
    first, second = problem.gate_up, problem.down
    experts, hidden, intermediate = first.groups, first.columns, second.columns
    ids, weights = call.ids.contiguous(), call.weights.contiguous()
    placed, order, spans, inner, terms, *quantised = call.views
    scales, x_scales, inner_codes, inner_scales = quantised or (None, None, inner, None)
    launched: dict[str, Any] = pdl.launched(target)
    common = dict(
        BLOCK_M=plan.block_m, WAY="fast" if target.vendor == "nvidia" else "plain", num_stages=plan.num_stages,
        **launched, **({} if plan.registers is None else {"maxnreg": plan.registers}),
    )  # fmt: skip
    if scales is not None:
        quantise(call.x, placed, scales, target, placed="codes")
    else:
        place(call.x, placed, first.codes, target)
    order_rows[(experts,)](
        ids, order, spans, None, None, problem.rows, experts, spans.shape[0], BLOCK=COUNTED, BLOCK_M=plan.block_m,
        num_warps=8, **launched,
    )  # fmt: skip
    if scales is not None and x_scales is not None:
        groups = scales.shape[1]
        kernels.sort_scales[(-(-problem.rows // SORTED),)](
            scales, order, x_scales, problem.rows, problem.k, problem.tokens, groups, x_scales.stride(0), BLOCK=SORTED,
            GROUPS=1 << (groups - 1).bit_length(), num_warps=4, **launched,
        )  # fmt: skip
    words = gate_up.view(torch.int32)
    kernels.gate_up[(-(-2 * intermediate // plan.gate_up_block_n), spans.shape[0])](
        placed,
        x_scales,
        order,
        spans,
        words,
        gate_up_scales,
        inner,
        problem.k,
        hidden,
        intermediate,
        parse_weight_layout(gate_up_layout).first_row,
        0.0 if call.clamp is None else call.clamp,
        *words.stride()[:2],
        *gate_up_scales.stride()[:2],
        0 if x_scales is None else x_scales.stride(0),
        **product_format(first),
        BLOCK_K=plan.gate_up_block_k,
        BLOCK_N=plan.gate_up_block_n,
        OUT_EACH=packed_dot.CODES_PER_WORD[second.codes],
        CLAMPED=call.clamp is not None,
        num_warps=plan.gate_up_warps,
        **common,
    )
    if inner_scales is not None:
        quantise(inner, inner_codes, inner_scales[:, : problem.rows].t(), target, placed="codes")
    words = down.view(torch.int32)
    kernels.down[(-(-hidden // plan.down_block_n), spans.shape[0])](
        inner_codes,
        inner_scales,
        weights,
        order,
        spans,
        words,
        down_scales,
        terms,
        hidden,
        intermediate,
        parse_weight_layout(down_layout).first_row,
        *words.stride()[:2],
        *down_scales.stride()[:2],
        0 if inner_scales is None else inner_scales.stride(0),
        **product_format(second),
        BLOCK_K=plan.down_block_k,
        BLOCK_N=plan.down_block_n,
        num_warps=plan.down_warps,
        **common,
    )
    add_terms(terms, ids, call.out, experts)
