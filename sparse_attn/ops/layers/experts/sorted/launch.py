"""Launch of the experts of many tokens."""

from __future__ import annotations

from typing import Any

import torch

from sparse_attn.device import packed_dot, pdl
from sparse_attn.framework.target import target_of
from sparse_attn.ops.layers.experts.grouped.config import COUNTED
from sparse_attn.ops.layers.experts.grouped.kernels import order_rows
from sparse_attn.ops.layers.experts.plan import Call, Plan
from sparse_attn.ops.layers.experts.sorted import kernels
from sparse_attn.ops.layers.experts.swap_ab.launch import add_terms
from sparse_attn.ops.layers.linears.plan import product_format
from sparse_attn.ops.layers.linears.swap_ab.launch import place
from sparse_attn.weight_layout import parse_weight_layout


def multiply(call: Call, plan: Plan) -> None:
    gate_up, gate_up_scales, gate_up_layout = call.gate_up
    down, down_scales, down_layout = call.down
    problem, target = call.problem, target_of(call.x.device)
    first, second = problem.gate_up, problem.down
    experts, hidden, intermediate = first.groups, first.columns, second.columns
    ids, weights = call.ids.contiguous(), call.weights.contiguous()
    placed, order, spans, inner, terms = call.views
    launched: dict[str, Any] = pdl.launched(target)
    common = dict(
        BLOCK_M=plan.block_m, WAY="fast" if target.vendor == "nvidia" else "plain", num_stages=plan.num_stages,
        **launched, **({} if plan.registers is None else {"maxnreg": plan.registers}),
    )  # fmt: skip
    place(call.x, placed, first.codes, target)
    order_rows[(experts,)](
        ids, order, spans, None, None, problem.rows, experts, spans.shape[0], BLOCK=COUNTED, BLOCK_M=plan.block_m,
        num_warps=8, **launched,
    )  # fmt: skip
    words = gate_up.view(torch.int32)
    kernels.gate_up[(-(-2 * intermediate // plan.gate_up_block_n), spans.shape[0])](
        placed,
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
        **product_format(first),
        BLOCK_K=plan.gate_up_block_k,
        BLOCK_N=plan.gate_up_block_n,
        OUT_EACH=packed_dot.CODES_PER_WORD[second.codes],
        CLAMPED=call.clamp is not None,
        num_warps=plan.gate_up_warps,
        **common,
    )
    words = down.view(torch.int32)
    kernels.down[(-(-hidden // plan.down_block_n), spans.shape[0])](
        inner,
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
        **product_format(second),
        BLOCK_K=plan.down_block_k,
        BLOCK_N=plan.down_block_n,
        num_warps=plan.down_warps,
        **common,
    )
    add_terms(terms, ids, call.out, experts)
