"""Index scores: how much each query row's index heads want each key.

logit[m, n] = k_scale[n] * sum_h weights[m, h] * relu(q[m, h] . k[n]), fp32; -inf outside the row's range, everywhere.
The query's own quantisation scale is folded into ``weights`` (see ops.indexer.queries); those of MXFP4 queries and keys
stand beside their codes, and k_scale is 1. Formula: DeepSeek-V3.2's lightning indexer, as DeepGEMM's mqa_logits and
paged_mqa_logits compute it. One row's logit of one key has the same bits whatever else is in the call.
"""

from __future__ import annotations

from typing import Any

import torch

from sparse_attn.cache import check_cache, check_heads_together, check_mxfp4_keys
from sparse_attn.fp8 import FP8_DTYPE
from sparse_attn.framework import checks
from sparse_attn.framework.registration import define_op
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, PlainLayout, query_row
from sparse_attn.mxfp4 import MXFP4
from sparse_attn.ops.indexer.scores import dispatch, fake, reference

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEADS = 128
_ROWS, _PAGED = checks.Guard(), checks.Guard()


def _launchers():
    from sparse_attn.ops.indexer.scores import launch

    return launch


_mqa_logits = define_op(
    "mqa_logits",
    "(Tensor q, Tensor k, Tensor? k_scale, Tensor weights, Tensor kv_start, Tensor kv_end, str flavour, str impl)"
    " -> Tensor",
    fake=fake.mqa_logits,
    reference=reference.mqa_logits,
    rules=reference.rules_of_mqa_logits,
    launch=lambda: _launchers().mqa_logits,
    kernels=dispatch.PREFILL_KERNELS,
)
_paged_mqa_logits = define_op(
    "paged_mqa_logits",
    "(Tensor q, Tensor cache, Tensor weights, Tensor context_lens, Tensor block_table, SymInt max_context_len, "
    "str layout, str impl) -> Tensor",
    fake=fake.paged_mqa_logits,
    reference=reference.paged_mqa_logits,
    rules=reference.rules_of_paged_mqa_logits,
    launch=lambda: _launchers().paged_mqa_logits,
    kernels=dispatch.PAGED_KERNELS,
)


def fp8_mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    kv_start: torch.Tensor,
    kv_end: torch.Tensor,
    *,
    flavour: str = "e4m3fn",
    impl: str = "auto",
) -> torch.Tensor:
    """Scores over contiguous fp8 keys.

    Args:
        q: [rows, heads, dim], fp8 codes of ``flavour`` (that float8 dtype, or uint8), 1 to 128 heads.
        k: [keys, dim], fp8 codes of ``flavour``.
        k_scale: fp32 [keys].
        weights: fp32 [rows, heads].
        kv_start: int32 [rows]; row m scores keys [kv_start[m], kv_end[m]) clamped to [0, keys].
        kv_end: int32 [rows].
        flavour: "e4m3fn" or "e4m3fnuz".
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        fp32 [rows, keys].

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    checks.check_choice("flavour", flavour, tuple(FP8_DTYPE))
    return _score_rows(q, k, k_scale, weights, kv_start, kv_end, flavour, impl)


def bf16_mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    kv_start: torch.Tensor,
    kv_end: torch.Tensor,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """As fp8_mqa_logits over unquantised keys: q and k of one dtype, bf16, fp16 or fp32, and no k_scale.

    Args:
        q: bf16, fp16 or fp32 [rows, heads, dim], 1 to 128 heads.
        k: [keys, dim], dtype of q.
        weights: see fp8_mqa_logits.
        kv_start: see fp8_mqa_logits.
        kv_end: see fp8_mqa_logits.
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        fp32 [rows, keys].

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    return _score_rows(q, k, None, weights, kv_start, kv_end, "none", impl)


def mxfp4_mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    kv_start: torch.Tensor,
    kv_end: torch.Tensor,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """As fp8_mqa_logits over MXFP4 keys.

    dim: a multiple of 32. The scores are those of the decoded values.

    Args:
        q: uint8 [rows, heads, dim / 2 + dim / 32], a row's heads side by side: their codes, then their scales, as
            indexer_q_rope_quant gives them.
        k: uint8 [keys, dim / 2], as gather_indexer_k gives them.
        k_scale: ue8m0 bytes [keys, dim / 32].
        weights: see fp8_mqa_logits.
        kv_start: see fp8_mqa_logits.
        kv_end: see fp8_mqa_logits.
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        fp32 [rows, keys].

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    return _score_rows(q, k, k_scale, weights, kv_start, kv_end, MXFP4, impl)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    layout: IndexFp8Layout,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """Scores over a paged fp8 index cache.

    Args:
        q: fp8 codes [requests, next_n, heads, dim] (float8 of the layout's flavour, or uint8), 1 to 128 heads.
        cache: blocks of ``layout``.
        weights: fp32 [requests * next_n, heads].
        context_lens: int32 [requests, next_n], row (b, j) scores positions [0, context_lens[b, j]) clamped to [0,
            max_context_len].
        block_table: int32 [requests, max_blocks]; positions beyond the table or in a block outside the cache come out
            -inf.
        max_context_len: the host's bound on every length.
        layout: of ``cache``.
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        fp32 [requests * next_n, max_context_len].

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if not isinstance(layout, IndexFp8Layout):
        raise ValueError(f"layout: got {layout!r}, allowed: an IndexFp8Layout")
    return _score_paged(q, cache, weights, context_lens, block_table, max_context_len, layout, impl)


def bf16_paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    layout: PlainLayout,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """As fp8_paged_mqa_logits over an unquantised cache: q has the layout's dtype.

    Args:
        q: [requests, next_n, heads, dim] of the layout's dtype, 1 to 128 heads.
        cache: see fp8_paged_mqa_logits.
        weights: see fp8_paged_mqa_logits.
        context_lens: see fp8_paged_mqa_logits.
        block_table: see fp8_paged_mqa_logits.
        max_context_len: see fp8_paged_mqa_logits.
        layout: of ``cache``.
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        fp32 [requests * next_n, max_context_len].

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if not isinstance(layout, PlainLayout):
        raise ValueError(f"layout: got {layout!r}, allowed: a PlainLayout")
    return _score_paged(q, cache, weights, context_lens, block_table, max_context_len, layout, impl)


def mxfp4_paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    layout: IndexMxfp4Layout,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """As fp8_paged_mqa_logits over a paged MXFP4 cache.

    Args:
        q: uint8 [requests, next_n, heads, layout.row], a row's heads side by side, as indexer_q_rope_quant gives it.
        cache: see fp8_paged_mqa_logits.
        weights: see fp8_paged_mqa_logits.
        context_lens: see fp8_paged_mqa_logits.
        block_table: see fp8_paged_mqa_logits.
        max_context_len: see fp8_paged_mqa_logits.
        layout: of ``cache``.
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        fp32 [requests * next_n, max_context_len].

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if not isinstance(layout, IndexMxfp4Layout):
        raise ValueError(f"layout: got {layout!r}, allowed: an IndexMxfp4Layout")
    return _score_paged(q, cache, weights, context_lens, block_table, max_context_len, layout, impl)


def _score_rows(*arguments: Any) -> torch.Tensor:
    """The operator, of arguments that are not checked yet."""
    *inputs, impl = arguments
    if new := _ROWS.new(*inputs):
        _check_rows(*inputs)
        _ROWS.passed(new)
    q, k, *others, flavour = inputs
    if flavour in FP8_DTYPE:
        q, k = q.view(torch.uint8), k.view(torch.uint8)
    return _mqa_logits(q, k, *others, flavour, impl)


def _check_rows(*inputs: Any) -> None:
    q, k, k_scale, weights, kv_start, kv_end, flavour = inputs
    if flavour == MXFP4:
        check_mxfp4_keys(q, k, k_scale)
    elif flavour == "none":
        checks.check_dtype("q", q, FLOATS)
        checks.check_dtype("k", k, (q.dtype,))
    else:
        for name, value in (("q", q), ("k", k)):
            checks.check_dtype(name, value, (torch.uint8, FP8_DTYPE[flavour]))
        checks.check_rank("k", k, 2)
        checks.check_dtype("k_scale", k_scale, (torch.float32,))
        checks.check_shape("k_scale", k_scale, (k.shape[0],), "[keys]")
    checks.check_rank("q", q, 3)
    rows, heads, dim = q.shape
    _check_heads(heads)
    if flavour == MXFP4:
        checks.check_shape("q", q, (None, None, k.shape[1] + k_scale.shape[1]), "[rows, heads, dim / 2 + dim / 32]")
    else:
        checks.check_shape("k", k, (None, dim), "[keys, dim]")
    checks.check_unit_stride("q", q)
    checks.check_unit_stride("k", k)
    checks.check_dtype("weights", weights, (torch.float32,))
    checks.check_shape("weights", weights, (rows, heads), "[rows, heads]")
    for name, value in (("kv_start", kv_start), ("kv_end", kv_end)):
        checks.check_dtype(name, value, (torch.int32,))
        checks.check_shape(name, value, (rows,), "[rows]")
    checks.check_same_device(q=q, k=k, k_scale=k_scale, weights=weights, kv_start=kv_start, kv_end=kv_end)


def _score_paged(*arguments: Any) -> torch.Tensor:
    """As _score_rows; the layout is not its name yet."""
    *inputs, impl = arguments
    if new := _PAGED.new(*inputs):
        _check_paged(*inputs)
        _PAGED.passed(new)
    q, *others, layout = inputs
    if isinstance(layout, IndexFp8Layout):
        q = q.view(torch.uint8)
    return _paged_mqa_logits(q, *others, layout.name, impl)


def _check_paged(*inputs: Any) -> None:
    q, cache, weights, context_lens, block_table, max_context_len, layout = inputs
    fp8 = isinstance(layout, IndexFp8Layout)
    checks.check_dtype("q", q, (torch.uint8, FP8_DTYPE[layout.flavour]) if fp8 else (layout.dtype,))
    checks.check_shape("q", q, (None, None, None, query_row(layout)), "[requests, next_n, heads, dim]")
    requests, next_n, heads, _ = q.shape
    _check_heads(heads)
    checks.check_unit_stride("q", q)
    check_cache("cache", cache, layout)
    checks.check_dtype("weights", weights, (torch.float32,))
    checks.check_shape("weights", weights, (requests * next_n, heads), "[requests * next_n, heads]")
    checks.check_dtype("context_lens", context_lens, (torch.int32,))
    checks.check_shape("context_lens", context_lens, (requests, next_n), "[requests, next_n]")
    checks.check_dtype("block_table", block_table, (torch.int32,))
    checks.check_shape("block_table", block_table, (requests, None), "[requests, max_blocks]")
    checks.check_unit_stride("block_table", block_table)
    checks.check_at_least("max_context_len", max_context_len, 0)
    checks.check_same_device(q=q, cache=cache, weights=weights, context_lens=context_lens, block_table=block_table)
    if isinstance(layout, IndexMxfp4Layout):
        check_heads_together(q)


def _check_heads(heads: int) -> None:
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"q: got {heads} heads, allowed: 1 to {MAX_HEADS}")
