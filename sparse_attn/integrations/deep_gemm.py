"""DeepGEMM's index scores: fp8_mqa_logits, fp8_paged_mqa_logits, their fp8_fp4 names, and their metadata.

Signatures: those of DeepGEMM 54e2261 (vLLM 0.25) and of 2.8 (vLLM 0.33). By position they differ behind the first five
arguments of fp8_fp4_mqa_logits, and behind the seventh of fp8_fp4_paged_mqa_logits; a flag there is clean_logits, as
the older has it, and a number or a tensor is what the newer has.

Scores outside of a row's range are -inf, whether clean_logits is set or not. FP4 queries, which sm_90 does not take
there, are a ValueError.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from sparse_attn.framework import checks
from sparse_attn.integrations.rows import row_lengths
from sparse_attn.layout import IndexFp8Layout
from sparse_attn.ops.indexer import scores

LOGITS_DTYPES = (torch.float32, torch.bfloat16)
Query = tuple[torch.Tensor, torch.Tensor | None]


def get_num_sms() -> int:
    """SMs of the current GPU; 1 without a GPU."""
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 1


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """int32 [num_sms + 1, 2] of zeros, to be kept and copied as theirs. Our operators do not look at it.

    Args:
        context_lens: tells the device.
        block_kv: not looked at.
        num_sms: of the GPU.
        indices: not looked at.

    Returns:
        int32 [num_sms + 1, 2].

    Raises:
        TypeError: num_sms that is no integer.
        ValueError: num_sms below 0.
    """
    checks.check_at_least("num_sms", num_sms, 0)
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool | int = True,
    max_seqlen_k: int | torch.Tensor | None = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Scores of contiguous fp8 keys: sum over heads of weights * relu(q . k), times the key's scale.

    Args:
        q: float8_e4m3fn [rows, heads, dim], 1 to 128 heads.
        kv: (float8_e4m3fn [keys, dim], fp32 [keys] or [keys, 1]).
        weights: fp32 [rows, heads].
        cu_seq_len_k_start: int32 [rows]; row m scores the keys [cu_seq_len_k_start[m], cu_seq_len_k_end[m]).
        cu_seq_len_k_end: int32 [rows].
        clean_logits: not looked at, unless it is a number, which is the newer signature's max_seqlen_k.
        max_seqlen_k: above 0: row m starts at its first key and is so wide.
        logits_dtype: fp32 or bf16.

    Returns:
        logits_dtype [rows, keys], or [rows, max_seqlen_k].

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if not isinstance(clean_logits, bool):
        clean_logits, max_seqlen_k = True, clean_logits
    checks.check_choice("logits_dtype", logits_dtype, LOGITS_DTYPES)
    width: Any = 0 if max_seqlen_k is None else max_seqlen_k
    checks.check_at_least("max_seqlen_k", width, 0)
    k, k_scale = kv
    checks.check_dtype("q", q, (torch.float8_e4m3fn,))
    checks.check_dtype("kv", k, (torch.float8_e4m3fn,))
    if isinstance(k_scale, torch.Tensor) and k_scale.dim() == 2 and k_scale.shape[1] == 1:
        k_scale = k_scale.squeeze(1)
    logits = scores.fp8_mqa_logits(q, k, k_scale, weights, cu_seq_len_k_start, cu_seq_len_k_end)
    if width:
        logits = _from_first_key(logits, cu_seq_len_k_start, cu_seq_len_k_end, width)
    return logits.to(logits_dtype)


def fp8_fp4_mqa_logits(
    q: Query,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool | int = True,
    max_seqlen_k: int | torch.Tensor | None = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp8_mqa_logits of q = (values, None).

    Args:
        q: (values, None), values as fp8_mqa_logits takes them.
        kv: see fp8_mqa_logits, as all that follows.
        weights: see fp8_mqa_logits.
        cu_seq_len_k_start: see fp8_mqa_logits.
        cu_seq_len_k_end: see fp8_mqa_logits.
        clean_logits: see fp8_mqa_logits.
        max_seqlen_k: see fp8_mqa_logits.
        logits_dtype: see fp8_mqa_logits.
        schedule_meta: not looked at.

    Returns:
        See fp8_mqa_logits.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    values = _fp8_query(q)
    return fp8_mqa_logits(
        values, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, logits_dtype
    )


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool | torch.Tensor | None = False,
    indices: torch.Tensor | None = None,
    *,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Scores of a paged fp8 index cache.

    Args:
        q: float8_e4m3fn [batch, next_n, heads, dim], 1 to 128 heads.
        kv_cache: uint8 [num_blocks, block_size, 1, dim + 4], a block's codes and behind them its fp32 scales.
        weights: fp32 [batch * next_n, heads].
        context_lens: int32 [batch, next_n], how many keys each row scores; or [batch], of a request's last row, one
            fewer for each row before.
        block_table: int32 [batch, max_blocks].
        schedule_meta: not looked at.
        max_context_len: the host's bound on every length.
        clean_logits: not looked at.
        indices: None. What maps rows to requests is a ValueError.
        logits_dtype: fp32 or bf16.

    Returns:
        logits_dtype [batch * next_n, max_context_len].

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if indices is not None or not isinstance(clean_logits, (bool, type(None))):
        raise ValueError("indices: got a tensor, allowed: None, row b of context_lens and block_table is request b's")
    checks.check_choice("logits_dtype", logits_dtype, LOGITS_DTYPES)
    checks.check_rank("q", q, 4)
    checks.check_dtype("q", q, (torch.float8_e4m3fn,))
    batch, next_n, _, dim = q.shape
    checks.check_shape("kv_cache", kv_cache, (None, None, 1, dim + 4), "[num_blocks, block_size, 1, dim of q + 4]")
    checks.check_dtype("context_lens", context_lens, (torch.int32,))
    if context_lens.dim() == 1:
        context_lens = row_lengths(context_lens, next_n)
    logits = scores.fp8_paged_mqa_logits(
        q, kv_cache.squeeze(2), weights, context_lens, block_table, max_context_len, IndexFp8Layout(dim)
    )
    return logits.to(logits_dtype)


def fp8_fp4_paged_mqa_logits(
    q: Query,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool | torch.Tensor | None = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp8_paged_mqa_logits of q = (values, None).

    Args:
        q: (values, None), values as fp8_paged_mqa_logits takes them.
        kv_cache: see fp8_paged_mqa_logits, as all that follows.
        weights: see fp8_paged_mqa_logits.
        context_lens: see fp8_paged_mqa_logits.
        block_table: see fp8_paged_mqa_logits.
        schedule_meta: not looked at.
        max_context_len: see fp8_paged_mqa_logits.
        clean_logits: not looked at.
        logits_dtype: see fp8_paged_mqa_logits.
        indices: see fp8_paged_mqa_logits.

    Returns:
        See fp8_paged_mqa_logits.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    return fp8_paged_mqa_logits(
        _fp8_query(q), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits,
        indices, logits_dtype=logits_dtype,
    )  # fmt: skip


def _fp8_query(q: Query) -> torch.Tensor:
    values, scales = q
    if scales is not None:
        raise ValueError("q: got scales beside the values (FP4, or MXFP8), allowed: (float8_e4m3fn values, None)")
    return values


def _from_first_key(logits: torch.Tensor, start: torch.Tensor, end: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, width]: each row's scores from its first key on, -inf behind the last."""
    keys = logits.shape[1]
    column = start.clamp(0, keys).unsqueeze(1) + torch.arange(width, dtype=torch.int32, device=start.device)
    inside = column < end.clamp_max(keys).unsqueeze(1)
    if keys == 0:
        return torch.full(inside.shape, -math.inf, dtype=logits.dtype, device=logits.device)
    return torch.where(inside, logits.gather(1, torch.where(inside, column, 0).long()), -math.inf)
