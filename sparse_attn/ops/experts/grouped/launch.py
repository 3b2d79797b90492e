"""Launch of rows sorted by expert: PyTorch's sort, two grouped products, and two kernels between and behind them."""

from __future__ import annotations

import functools

import torch

from sparse_attn.device import pdl
from sparse_attn.ops.experts.grouped import kernels
from sparse_attn.ops.experts.launch import Call
from sparse_attn.ops.experts.plan import Plan
from sparse_attn.ops.experts.shapes import sorted_by_expert
from sparse_attn.ops.grouped_linear.launch import grouped_linear, grouped_linear_fp8
from sparse_attn.target import target_of

BLOCK = 1024


def multiply(call: Call, plan: Plan) -> None:
    (tokens, hidden), k, device = call.x.shape, call.problem.k, call.x.device
    experts, intermediate = call.problem.gate_up.groups, call.problem.down.columns
    launched = pdl.launched(target_of(device))
    order, place, ends = sorted_by_expert(call.ids, experts)
    product = grouped_linear if call.problem.activations == "exact" else grouped_linear_fp8
    product = functools.partial(product, batch_invariant=call.problem.batch_invariant)
    both = product(call.x[order // k], ends, *call.gate_up)
    inner = torch.empty(tokens * k, intermediate, dtype=call.x.dtype, device=device)
    kernels.gate_rows[(tokens * k, -(-intermediate // BLOCK))](
        both, inner, intermediate, 0.0 if call.clamp is None else call.clamp, CLAMPED=call.clamp is not None,
        BLOCK=BLOCK, num_warps=4, **launched,
    )  # fmt: skip
    del both
    terms = product(inner, ends, *call.down)
    kernels.add_rows[(tokens, -(-hidden // BLOCK))](
        terms, place, call.weights.contiguous(), call.ids.contiguous(), call.out, k, experts, hidden, BLOCK=BLOCK,
        num_warps=4, **launched,
    )  # fmt: skip
