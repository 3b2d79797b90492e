"""Launchers of the Hopper kernels, and the TMA descriptors of what they copy."""

from __future__ import annotations

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparse_attn.device import pdl
from sparse_attn.framework.target import target_of
from sparse_attn.mxfp4 import GROUP
from sparse_attn.ops.indexer.scores.hopper import decode_mxfp4, paged_mxfp4, prefill_decoded, prefill_mxfp4
from sparse_attn.ops.indexer.scores.hopper import paged as paged_kernels
from sparse_attn.ops.indexer.scores.hopper import prefill as prefill_kernels
from sparse_attn.ops.indexer.scores.hopper.constants import BLOCK_KV, DIM
from sparse_attn.ops.indexer.scores.plan import HopperDecodedPlan, HopperPlan, Paged, Prefill
from sparse_attn.ops.indexer.scores.portable.launch import clear_outside

FP8 = torch.float8_e4m3fn
SHORT = 64  # tiles a CTA, up to which a launch is short: the next one may start while it runs


def prefill(call: Prefill, plan: HopperPlan) -> None:
    """A kernel that writes nothing outside the ranges, and where that is to be cleared, another launch."""
    q, k, weights, kv_start, kv_end, out = call.q, call.k, call.weights, call.kv_start, call.kv_end, call.out
    rows, heads, dim = q.shape
    keys = k.shape[0]
    codes, values = _codes(dim, 2), _values()
    prefill_kernels.mqa_logits[(plan.ctas,)](
        TensorDescriptor.from_tensor(q.view(FP8).flatten(0, 1), [plan.block_q * heads, dim], codes),
        TensorDescriptor.from_tensor(k.view(FP8), [BLOCK_KV, dim], codes),
        TensorDescriptor(call.k_scale, [1, keys], [triton.cdiv(keys, 4) * 4, 1], [1, BLOCK_KV], values),
        TensorDescriptor.from_tensor(weights, [plan.block_q, heads], values),
        kv_start, kv_end, out, rows, keys, kv_start.stride(0), kv_end.stride(0), out.stride(0),
        STAGES=plan.stages, CONSUMER_REGISTERS=plan.consumer_registers, PRODUCER_REGISTERS=plan.producer_registers,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    if call.clear:
        clear_outside(call)


def score_prefill_mxfp4(call: Prefill, plan: HopperPlan) -> None:
    """As prefill."""
    if isinstance(plan, HopperDecodedPlan):
        _decode_and_score(call, plan)
        far, stages = call.scratch[2], plan.far_stages
    else:
        far, stages = None, plan.stages
    _score_packed(call, plan, stages, far)
    if call.clear:
        clear_outside(call)


def _decode_and_score(call: Prefill, plan: HopperDecodedPlan) -> None:
    """Decode keys to scratch and score those, whatever the powers of two of their groups."""
    operands, factors, far = call.scratch
    assert call.k_scale is not None, "MXFP4 keys have scales"
    codes, scales = call.k.view(torch.int32), call.k_scale.view(torch.int32)
    queries, heads = _packed(call.q)
    kv_start, kv_end, out = call.kv_start, call.kv_end, call.out
    rows, keys = out.shape
    decode_mxfp4.decode_keys[(plan.tiles,)](
        codes, scales, operands.view(torch.int32), factors, far, keys, codes.stride(0), BLOCK_KV=BLOCK_KV,
        num_warps=4, maxnreg=32, **pdl.launched(target_of(out.device)),
    )  # fmt: skip
    prefill_decoded.mqa_logits[(plan.ctas,)](
        queries,
        TensorDescriptor.from_tensor(operands.view(torch.float8_e5m2), [BLOCK_KV, DIM], _codes(DIM, 2)),
        TensorDescriptor(factors, [1, keys], [triton.cdiv(keys, 4) * 4, 1], [1, BLOCK_KV], _values()),
        call.weights, kv_start, kv_end, out, far[plan.tiles :], 1.0, rows, keys, queries.stride(0),
        *call.weights.stride(), kv_start.stride(0), kv_end.stride(0), out.stride(0),
        HEADS=heads, BLOCK_Q=plan.block_q, STAGES=plan.stages, CONSUMER_REGISTERS=plan.consumer_registers,
        PRODUCER_REGISTERS=plan.producer_registers, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def _packed(q: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(rows of MXFP4 queries in words, heads)."""
    rows, heads, row = q.shape
    return torch.as_strided(q, (rows, heads * row), (q.stride(0), 1)).view(torch.int32), heads


def _score_packed(call: Prefill, plan: HopperPlan, stages: int, far: torch.Tensor | None) -> None:
    """far: see the kernel."""
    q, k, k_scale, weights, kv_start, kv_end, out = (
        call.q, call.k, call.k_scale, call.weights, call.kv_start, call.kv_end, call.out
    )  # fmt: skip
    assert k_scale is not None, "MXFP4 keys have scales"
    queries, heads = _packed(q)
    rows, keys = out.shape
    codes, scales = k.view(torch.int32), k_scale.view(torch.int32).view(1, keys)
    prefill_mxfp4.mqa_logits[(plan.ctas,)](
        queries,
        TensorDescriptor.from_tensor(codes, [BLOCK_KV, codes.shape[1]], _values()),
        TensorDescriptor(scales, [1, keys], [triton.cdiv(keys, 4) * 4, 1], [1, BLOCK_KV], _values()),
        weights, kv_start, kv_end, out, rows, keys, queries.stride(0), *weights.stride(), kv_start.stride(0),
        kv_end.stride(0), out.stride(0), far, None if far is None else far.shape[0],
        HEADS=heads, BLOCK_Q=plan.block_q, STAGES=stages, CONSUMER_REGISTERS=plan.consumer_registers,
        PRODUCER_REGISTERS=plan.producer_registers, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def paged(call: Paged, plan: HopperPlan) -> None:
    q, cache, weights, context_lens, out, maxima = (
        call.q, call.cache, call.weights, call.context_lens, call.out, call.maxima
    )  # fmt: skip
    block_table, early = call.block_table, call.early_dependents
    requests, next_n, heads, dim = q.shape
    num_blocks, block_size, row = cache.shape
    stride = cache.stride(0)
    keys = torch.as_strided(cache, (num_blocks, block_size, dim), (stride, dim, 1)).view(FP8)
    at = cache.storage_offset() + block_size * dim
    scales = torch.as_strided(cache, (num_blocks, block_size * (row - dim)), (stride, 1), at).view(torch.float32)
    paged_kernels.paged_mqa_logits[(plan.ctas,)](
        TensorDescriptor.from_tensor(q.view(FP8).flatten(0, 2), [plan.block_q * heads, dim], _codes(dim, 2)),
        TensorDescriptor.from_tensor(keys, [1, block_size, dim], _codes(dim, 3)),
        TensorDescriptor.from_tensor(scales, [1, block_size], _values()),
        weights, context_lens, block_table, out, out if maxima is None else maxima,
        requests * triton.cdiv(next_n, plan.block_q), num_blocks, call.max_context_len, block_table.shape[1],
        SHORT * plan.ctas if early is None else (2**31 - 1 if early else -1),
        *weights.stride(), *context_lens.stride(), block_table.stride(0), out.stride(0),
        0 if maxima is None else maxima.stride(0),
        HEADS=heads, BLOCK_Q=plan.block_q, NEXT_N=next_n, CLEAR=call.clear, GROUP=call.group, STAGES=plan.stages,
        CONSUMER_REGISTERS=plan.consumer_registers, PRODUCER_REGISTERS=plan.producer_registers,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip


def score_paged_mxfp4(call: Paged, plan: HopperPlan) -> None:
    """A block's codes come as four rows of a KiB, as wide as boxes may be."""
    q, cache, weights, context_lens, out, maxima = (
        call.q, call.cache, call.weights, call.context_lens, call.out, call.maxima
    )  # fmt: skip
    block_table, early = call.block_table, call.early_dependents
    requests, next_n, heads, row = q.shape
    num_blocks, block_size, _ = cache.shape
    scale_bytes = block_size * (row // (GROUP // 2 + 1))
    code_bytes = block_size * row - scale_bytes
    codes = torch.as_strided(cache, (num_blocks, code_bytes), (cache.stride(0), 1)).view(torch.int32)
    at = cache.storage_offset() + code_bytes
    scales = torch.as_strided(cache, (num_blocks, scale_bytes), (cache.stride(0), 1), at).view(torch.int32)
    queries = torch.as_strided(q, (requests, next_n, heads * row), (*q.stride()[:2], 1)).view(torch.int32)
    paged_mxfp4.paged_mqa_logits[(plan.ctas,)](
        queries,
        TensorDescriptor.from_tensor(codes.unflatten(1, (-1, 256)), [1, code_bytes // 1024, 256], _values(3)),
        TensorDescriptor.from_tensor(scales, [1, scale_bytes // 4], _values()),
        weights, context_lens, block_table, out, out if maxima is None else maxima,
        requests * triton.cdiv(next_n, plan.block_q), num_blocks, call.max_context_len, block_table.shape[1],
        SHORT * plan.ctas if early is None else (2**31 - 1 if early else -1),
        *queries.stride()[:2], *weights.stride(), *context_lens.stride(), block_table.stride(0), out.stride(0),
        0 if maxima is None else maxima.stride(0),
        HEADS=heads, BLOCK_Q=plan.block_q, NEXT_N=next_n, CLEAR=call.clear, GROUP=call.group, STAGES=plan.stages,
        CONSUMER_REGISTERS=plan.consumer_registers, PRODUCER_REGISTERS=plan.producer_registers,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip


def _codes(dim: int, rank: int) -> gl.NVMMASharedLayout:
    """Rows of ``dim`` bytes, as the matrix unit reads them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=dim, element_bitwidth=8, rank=rank)


def _values(rank: int = 2) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)
