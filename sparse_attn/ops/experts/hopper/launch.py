"""Launch of the experts of fp8 rows on Hopper."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparse_attn.device import pdl
from sparse_attn.ops.experts.grouped.config import COUNTED
from sparse_attn.ops.experts.grouped.kernels import order_rows
from sparse_attn.ops.experts.hopper import kernels, rows
from sparse_attn.ops.experts.hopper.config import PRODUCER_REGISTERS
from sparse_attn.ops.experts.hopper.constants import ALIGN, BLOCK_K, BOX
from sparse_attn.ops.experts.launch import Call
from sparse_attn.ops.experts.plan import Plan
from sparse_attn.ops.experts.swap_ab.launch import add_terms
from sparse_attn.ops.grouped_linear.fp8.launch import quantise
from sparse_attn.target import Target, target_of
from sparse_attn.weight_layout import parse_weight_layout

SORTED = 1024  # values of a row that a CTA sorts
SPANS = 1024  # that keep_spans looks at together


def multiply(call: Call, plan: Plan) -> None:
    problem, target = call.problem, target_of(call.x.device)
    experts = problem.gate_up.groups
    ids, weights = call.ids.contiguous(), call.weights.contiguous()
    order, with_empty, spans, count, inner, terms, *quantised = call.views
    order_rows[(experts,)](
        ids, order, with_empty, None, None, problem.rows, experts, len(with_empty), BLOCK=COUNTED, BLOCK_M=plan.block_m,
        ALIGN=ALIGN, num_warps=8, **pdl.launched(target),
    )  # fmt: skip
    rows.keep_spans[(1,)](with_empty, spans, count, len(with_empty), BLOCK=SPANS, num_warps=4, **pdl.launched(target))
    dealt = spans, count
    scales, inner_codes, inner_scales = quantised or (None, inner, None)
    sorted_rows = terms  # gate and up are done with them when down begins to write terms
    if scales is None:
        rows.sort_rows[(problem.rows, -(-call.x.shape[1] // SORTED))](
            call.x, order, sorted_rows, problem.k, problem.tokens, call.x.shape[1], *call.x.stride(), BLOCK=SORTED,
            num_warps=4, **pdl.launched(target),
        )  # fmt: skip
    else:
        sorted_rows = terms.view(torch.uint8).flatten()[: terms.numel()].view(terms.shape)
        of_rows = scales[:, : problem.rows].t()
        quantise(call.x, sorted_rows, of_rows, target, placed=True, order=order, k=problem.k)
    _multiply(sorted_rows, scales, call.gate_up, dealt, order, weights, inner, plan, target, call.clamp, gated=True)
    if inner_scales is not None:
        quantise(inner, inner_codes, inner_scales[:, : problem.rows].t(), target, placed=True)
    _multiply(inner_codes, inner_scales, call.down, dealt, order, weights, terms, plan, target, None, gated=False)
    add_terms(terms, ids, call.out, experts)


def _multiply(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: tuple[torch.Tensor, torch.Tensor, str],
    dealt: tuple[torch.Tensor, torch.Tensor],
    order: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    plan: Plan,
    target: Target,
    clamp: float | None,
    *,
    gated: bool,
) -> None:
    packed, scales, layout = weight
    spans, count = dealt
    words, scales = packed.view(torch.int32), scales[:, parse_weight_layout(layout).first_row :]
    tiles = -(-out.shape[1] // (BOX if gated else 2 * BOX))
    kernels.multiply[(min(target.num_sms, spans.shape[0] * tiles),)](
        _boxes(x if x_scales is None else x.view(torch.float8_e4m3fn), [plan.block_m, BLOCK_K], 128),
        None if x_scales is None else _boxes(x_scales, [1, plan.block_m], 0),
        _boxes(words, [1, BOX, BLOCK_K // 8], 64), scales, spans, count, order, weights, out, tiles,
        out.shape[1] if gated else BOX, words.shape[2] * 8 // BLOCK_K, words.shape[1] - 1, out.shape[1],
        0.0 if clamp is None else clamp, *scales.stride()[:2], GATED=gated, CLAMPED=clamp is not None,
        STAGES=plan.num_stages, CONSUMER_REGISTERS=plan.consumer_registers, PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4, maxnreg=plan.registers, launch_pdl=True,
    )  # fmt: skip


def _boxes(tensor: torch.Tensor, shape: list[int], swizzle: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=8 * tensor.itemsize, rank=tensor.dim()
    )  # fmt: skip
    return TensorDescriptor.from_tensor(tensor, shape, layout)
