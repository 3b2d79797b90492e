"""Launch of rows sorted by expert: what lies between the products is PyTorch's."""

from __future__ import annotations

from sparse_attn.ops.experts.launch import Call
from sparse_attn.ops.experts.plan import Plan
from sparse_attn.ops.experts.shapes import by_expert
from sparse_attn.ops.grouped_linear.launch import grouped_linear


def multiply(call: Call, plan: Plan) -> None:
    sums = by_expert(call.x, call.weights, call.ids, call.gate_up, call.down, call.clamp, grouped_linear)
    call.out.copy_(sums)
