"""Launch of the experts of many tokens on Hopper."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparse_attn.device import pdl
from sparse_attn.framework.target import Target, target_of
from sparse_attn.ops.layers.experts.grouped.config import COUNTED
from sparse_attn.ops.layers.experts.grouped.kernels import order_rows
from sparse_attn.ops.layers.experts.hopper import kernels, rows
from sparse_attn.ops.layers.experts.hopper.constants import BLOCK_K, BOX, CONSUMERS, CTAS, ROWS, STEP
from sparse_attn.ops.layers.experts.plan import Call, Plan, Problem
from sparse_attn.ops.layers.experts.swap_ab.launch import add_terms

PER_WARP = 1024  # columns of a row, 16 bytes of each group of 128 a lane
WARPS = 4  # of a CTA that sorts or quantises, at most
SPANS = 1024  # that keep_spans looks at together


def multiply(call: Call, plan: Plan) -> None:
    problem, target = call.problem, target_of(call.x.device)
    experts = problem.gate_up.groups
    ids, weights = call.ids.contiguous(), call.weights.contiguous()
    order, place, with_empty, spans, count, inner, terms, *quantised = call.views
    order_rows[(experts,)](
        ids, order, with_empty, place, None, problem.rows, experts, len(with_empty), BLOCK=COUNTED,
        BLOCK_M=plan.block_m, num_warps=8, **pdl.launched(target),
    )  # fmt: skip
    rows.keep_spans[(1,)](with_empty, spans, count, len(with_empty), BLOCK=SPANS, num_warps=4, **pdl.launched(target))
    dealt = spans, count
    scales, inner_codes, inner_scales = quantised or (None, inner, None)
    sorted_rows = terms  # gate and up are done with them when down begins to write terms
    if scales is None:
        columns, warps = call.x.shape[1], _warps(call.x)
        rows.sort_rows[(len(call.x), -(-columns // (warps * PER_WARP)))](
            call.x, ids, place, sorted_rows, problem.k, experts, columns, *call.x.stride(), BLOCK=warps * PER_WARP,
            num_warps=warps, **pdl.launched(target),
        )  # fmt: skip
    else:
        sorted_rows = terms.view(torch.uint8).flatten()[: terms.numel()].view(terms.shape)
        _quantise(call.x, ids, place, sorted_rows, scales, problem, target)
    _multiply(sorted_rows, scales, call.gate_up, dealt, order, weights, inner, plan, target, call.clamp, gated=True)
    if inner_scales is not None:
        _quantise(inner, None, None, inner_codes, inner_scales, problem, target)
    _multiply(inner_codes, inner_scales, call.down, dealt, order, weights, terms, plan, target, None, gated=False)
    add_terms(terms, ids, call.out, experts)


def _warps(x: torch.Tensor) -> int:
    """How many warps share a row, a power of two."""
    return min(WARPS, 1 << (max(1, x.shape[1] // PER_WARP) - 1).bit_length())


def _quantise(
    x: torch.Tensor,
    ids: torch.Tensor | None,
    place: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    problem: Problem,
    target: Target,
) -> None:
    warps = _warps(x)
    rows.quantise_rows[(len(x),)](
        x, ids, place, codes, scales, problem.k, problem.gate_up.groups, x.shape[1], *x.stride(),
        BLOCK=warps * PER_WARP, FP8_CAST=True, num_warps=warps, **pdl.launched(target),
    )  # fmt: skip


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
    packed, scales, _ = weight
    spans, count = dealt
    words, scales = packed.view(torch.int32), scales.view(torch.int64)
    tiles = out.shape[1] * 2 // plan.gate_up_block_n if gated else out.shape[1] // plan.down_block_n
    ctas = CTAS[plan.block_m]
    kernels.multiply[(min(ctas * target.num_sms, spans.shape[0] * tiles),)](
        _boxes(x if x_scales is None else x.view(torch.float8_e4m3fn), [ROWS, BLOCK_K]),
        x_scales, _boxes(words, [1, CONSUMERS * BOX, STEP // 8]), scales, spans, count, order, weights, out, tiles,
        out.shape[1] if gated else CONSUMERS * BOX, words.shape[2] // 4, out.shape[1] // 128,
        0.0 if clamp is None else clamp, *scales.stride()[:2], GATED=gated, CLAMPED=clamp is not None,
        BLOCK_M=plan.block_m, CTAS=ctas, STAGES=plan.num_stages, num_warps=4, maxnreg=plan.registers, launch_pdl=True,
    )  # fmt: skip


def _boxes(tensor: torch.Tensor, shape: list[int]) -> TensorDescriptor:
    """Whose rows have a multiple of 128 bytes."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * tensor.itemsize, rank=tensor.dim())
    return TensorDescriptor.from_tensor(tensor, shape, layout)
