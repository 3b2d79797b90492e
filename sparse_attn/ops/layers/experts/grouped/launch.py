"""Launch of rows sorted by expert: sort and gather, two grouped products, and two kernels between and behind them."""

from __future__ import annotations

import torch

from sparse_attn.device import pdl
from sparse_attn.framework.dispatch import Choice
from sparse_attn.framework.target import target_of
from sparse_attn.ops.layers.experts.grouped import kernels
from sparse_attn.ops.layers.experts.grouped.config import COUNTED, products
from sparse_attn.ops.layers.experts.plan import Call, Plan
from sparse_attn.ops.layers.linears.plan import Problem, Product
from sparse_attn.weight_layout import parse_weight_layout

BLOCK = 1024


def multiply(call: Call, plan: Plan) -> None:
    problem, target = call.problem, target_of(call.x.device)
    experts, hidden, intermediate = problem.gate_up.groups, problem.gate_up.columns, problem.down.columns
    order, place, ends, rows, both, inner, terms, *views = call.views
    launched = pdl.launched(target)
    ids = call.ids.contiguous()
    kernels.order_rows[(experts,)](
        ids, order, None, place, ends, problem.rows, experts, 0, BLOCK=COUNTED, BLOCK_M=1, num_warps=8, **launched
    )
    kernels.gather_tokens[(problem.rows, -(-hidden // BLOCK))](
        call.x, order, ends, rows, problem.k, experts, hidden, *call.x.stride(), BLOCK=BLOCK, num_warps=4, **launched
    )
    first, second = products(problem, target)
    own, counted = len(first.plan.scratch.buffers), first.plan.scratch.counters
    _multiply(first, problem.gate_up, rows, ends, call.gate_up, both, views[:own], call.counters[:counted])
    kernels.gate_rows[(problem.rows, -(-intermediate // BLOCK))](
        both, inner, intermediate, 0.0 if call.clamp is None else call.clamp, CLAMPED=call.clamp is not None,
        BLOCK=BLOCK, num_warps=4, **launched,
    )  # fmt: skip
    _multiply(second, problem.down, inner, ends, call.down, terms, views[own:], call.counters[counted:])
    kernels.add_rows[(problem.tokens, -(-hidden // BLOCK))](
        terms, place, call.weights.contiguous(), ids, call.out, problem.k, experts, hidden, BLOCK=BLOCK, num_warps=4,
        **launched,
    )  # fmt: skip


def _multiply(
    choice: Choice,
    problem: Problem,
    rows: torch.Tensor,
    ends: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor, str],
    out: torch.Tensor,
    views: list[torch.Tensor],
    counters: torch.Tensor,
) -> None:
    codes, scales, layout = weight
    first_row = parse_weight_layout(layout).first_row
    choice.kernel.launcher(Product(rows, ends, codes, scales, out, problem, first_row, views, counters), choice.plan)
