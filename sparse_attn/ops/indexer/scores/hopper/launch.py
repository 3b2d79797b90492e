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
    heads, dim = call.q.shape[1:]
    operands = (
        TensorDescriptor.from_tensor(call.q.view(FP8).flatten(0, 1), [plan.block_q * heads, dim], _codes(dim, 2)),
        TensorDescriptor.from_tensor(call.k.view(FP8), [BLOCK_KV, dim], _codes(dim, 2)),
        _by_tiles(call.k_scale, call),
        TensorDescriptor.from_tensor(call.weights, [plan.block_q, heads], _values()),
    )
    ranges, strides = (call.kv_start, call.kv_end, call.out), call.strides[2:]
    prefill_kernels.mqa_logits[(plan.ctas,)](
        *operands, *ranges, *call.out.shape, *strides, **_persistent(plan, plan.stages)
    )
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
    codes, scales = _key_words(call)
    decoded = codes, scales, operands.view(torch.int32), factors, far, call.k.shape[0], codes.stride(0)
    options = dict(num_warps=4, maxnreg=32, **pdl.launched(target_of(call.out.device)))
    decode_mxfp4.decode_keys[(plan.tiles,)](*decoded, BLOCK_KV=BLOCK_KV, **options)
    keys = TensorDescriptor.from_tensor(operands.view(torch.float8_e5m2), [BLOCK_KV, DIM], _codes(DIM, 2))
    tensors = keys, _by_tiles(factors, call), call.weights, call.kv_start, call.kv_end, call.out, far[plan.tiles :]
    queries, constants = _packed(call.q, plan)
    prefill_decoded.mqa_logits[(plan.ctas,)](
        queries,
        *tensors,
        1.0,
        *call.out.shape,
        queries.stride(0),
        *call.strides,
        **constants,
        **_persistent(plan, plan.stages),
    )


def _score_packed(call: Prefill, plan: HopperPlan, stages: int, far: torch.Tensor | None) -> None:
    """far: see the kernel."""
    codes, scales = _key_words(call)
    keys = TensorDescriptor.from_tensor(codes, [BLOCK_KV, codes.shape[1]], _values())
    tensors = keys, _by_tiles(scales, call), call.weights, call.kv_start, call.kv_end, call.out
    queries, constants = _packed(call.q, plan)
    prefill_mxfp4.mqa_logits[(plan.ctas,)](
        queries,
        *tensors,
        *call.out.shape,
        queries.stride(0),
        *call.strides,
        far,
        None if far is None else far.shape[0],
        **constants,
        **_persistent(plan, stages),
    )


def _packed(q: torch.Tensor, plan: HopperPlan) -> tuple[torch.Tensor, dict[str, int]]:
    """MXFP4 queries as rows of words, and what no descriptor says of them."""
    rows, heads, row = q.shape
    words = torch.as_strided(q, (rows, heads * row), (q.stride(0), 1)).view(torch.int32)
    return words, dict(HEADS=heads, BLOCK_Q=plan.block_q)


def _key_words(call: Prefill) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of MXFP4 keys in words."""
    assert call.k_scale is not None, "MXFP4 keys have scales"
    return call.k.view(torch.int32), call.k_scale.view(torch.int32)


def _by_tiles(values: torch.Tensor | None, call: Prefill) -> TensorDescriptor:
    """A word for each key, in boxes of a tile's."""
    keys = call.k.shape[0]
    return TensorDescriptor(values, [1, keys], [triton.cdiv(keys, 4) * 4, 1], [1, BLOCK_KV], _values())


def paged(call: Paged, plan: HopperPlan) -> None:
    q, cache = call.q, call.cache
    heads, dim = q.shape[2:]
    block_size = cache.shape[1]
    codes, scales = _parts(call, block_size * dim, torch.float32)
    operands = (
        TensorDescriptor.from_tensor(q.view(FP8).flatten(0, 2), [plan.block_q * heads, dim], _codes(dim, 2)),
        TensorDescriptor.from_tensor(codes.view(FP8).unflatten(1, (-1, dim)), [1, block_size, dim], _codes(dim, 3)),
        TensorDescriptor.from_tensor(scales, [1, block_size], _values()),
    )
    others, constants = _paged(call, plan)
    paged_kernels.paged_mqa_logits[(plan.ctas,)](*operands, *others, **constants)


def score_paged_mxfp4(call: Paged, plan: HopperPlan) -> None:
    """A block's codes come as four rows of a KiB, as wide as boxes may be."""
    requests, next_n, heads, row = call.q.shape
    code_bytes = call.cache.shape[1] * (row - row // (GROUP // 2 + 1))
    codes, scales = _parts(call, code_bytes, torch.int32)
    queries = torch.as_strided(call.q, (requests, next_n, heads * row), (*call.q.stride()[:2], 1)).view(torch.int32)
    operands = (
        queries,
        TensorDescriptor.from_tensor(
            codes.view(torch.int32).unflatten(1, (-1, 256)), [1, code_bytes // 1024, 256], _values(3)
        ),
        TensorDescriptor.from_tensor(scales, [1, scales.shape[1]], _values()),
    )
    others, constants = _paged(call, plan, queries.stride()[:2])
    paged_mxfp4.paged_mqa_logits[(plan.ctas,)](*operands, *others, **constants)


def _parts(call: Paged, code_bytes: int, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a cache: the codes of its blocks, and the words of their scales."""
    cache = call.cache
    num_blocks, block_size, row = cache.shape
    step = cache.stride(0), 1
    codes = torch.as_strided(cache, (num_blocks, code_bytes), step)
    scales = (num_blocks, block_size * row - code_bytes)
    return codes, torch.as_strided(cache, scales, step, cache.storage_offset() + code_bytes).view(scale_dtype)


def _paged(
    call: Paged, plan: HopperPlan, q_strides: tuple[int, ...] = ()
) -> tuple[tuple[object, ...], dict[str, int | bool]]:
    """What the kernels take behind queries, codes and scales, in order and by name. q_strides: of queries that no TMA
    copies."""
    requests, next_n, heads, _ = call.q.shape
    early, maxima = call.early_dependents, call.out if call.maxima is None else call.maxima
    tensors = call.weights, call.context_lens, call.block_table, call.out, maxima
    blocks = requests * triton.cdiv(next_n, plan.block_q)
    pdl_tiles = SHORT * plan.ctas if early is None else (2**31 - 1 if early else -1)
    sizes = blocks, call.cache.shape[0], call.max_context_len, call.block_table.shape[1], pdl_tiles
    constants = dict(HEADS=heads, BLOCK_Q=plan.block_q, NEXT_N=next_n, CLEAR=call.clear, GROUP=call.group)
    return (*tensors, *sizes, *q_strides, *call.strides), constants | _persistent(plan, plan.stages)


def _persistent(plan: HopperPlan, stages: int) -> dict[str, int | bool]:
    """How every kernel is launched. stages: tiles in flight."""
    return dict(
        STAGES=stages,
        CONSUMER_REGISTERS=plan.consumer_registers,
        PRODUCER_REGISTERS=plan.producer_registers,
        num_warps=4,
        launch_pdl=True,
    )


def _codes(dim: int, rank: int) -> gl.NVMMASharedLayout:
    """Rows of ``dim`` bytes, as the matrix unit reads them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=dim, element_bitwidth=8, rank=rank)


def _values(rank: int = 2) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)
