"""vLLM's operators of the indexer: top_k_per_row_prefill, top_k_per_row_decode, indexer_k_quant_and_cache,
cp_gather_indexer_k_quant_cache.

Signatures: torch.ops._C and torch.ops._C_cache_ops of vLLM 0.33. Each writes the tensors it is given and returns None.
"""

from __future__ import annotations

import torch

from sparse_attn.framework import checks
from sparse_attn.integrations.rows import row_lengths
from sparse_attn.layout import IndexFp8Layout
from sparse_attn.ops.indexer import keys as index_cache
from sparse_attn.ops.topk.select import top_k_per_row

SCALE_RULES = {"ue8m0": "pow2", "auto": "raw", "fp8": "raw", "fp8_e4m3": "raw"}


def top_k_per_row_prefill(
    logits: torch.Tensor,
    rowStarts: torch.Tensor,
    rowEnds: torch.Tensor,
    indices: torch.Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    topK: int,
) -> None:
    """Write the topK largest columns of each row's [rowStarts, rowEnds), relative to rowStarts, -1 behind.

    NaN and -inf are never selected, where vLLM selects them when a row has too few other scores. Columns are ascending
    and ties go to the lowest, where vLLM's order and ties are any.

    Args:
        logits: fp32 [at least numRows, width] whose strides are stride0 and stride1 = 1.
        rowStarts: int32 [at least numRows].
        rowEnds: int32 [at least numRows].
        indices: int32 [at least numRows, at least topK], written in place up to there.
        numRows: rows that are written.
        stride0: of logits.
        stride1: of logits.
        topK: columns of a row.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    _check_rows(logits, indices, numRows, stride0, stride1, topK)
    chosen = top_k_per_row(logits[:numRows], topK, rowStarts[:numRows], rowEnds[:numRows])
    indices[:numRows, :topK].copy_(chosen)


def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    indices: torch.Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    topK: int,
) -> None:
    """As top_k_per_row_prefill over [0, limit) of each row.

    Args:
        logits: see top_k_per_row_prefill.
        next_n: rows of a request.
        seq_lens: int32 [requests], row i of request i // next_n has limit seq_lens - next_n + i % next_n + 1, at least
            0; or int32 [requests, next_n], each row's own limit.
        indices: see top_k_per_row_prefill.
        numRows: see top_k_per_row_prefill.
        stride0: see top_k_per_row_prefill.
        stride1: see top_k_per_row_prefill.
        topK: see top_k_per_row_prefill.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    _check_rows(logits, indices, numRows, stride0, stride1, topK)
    checks.check_at_least("next_n", next_n, 1)
    checks.check_dtype("seq_lens", seq_lens, (torch.int32,))
    checks.check_rank("seq_lens", seq_lens, 1, 2)
    if seq_lens.dim() == 1:
        seq_lens = row_lengths(seq_lens, next_n)
    chosen = top_k_per_row(logits[:numRows], topK, None, seq_lens.reshape(-1)[:numRows])
    indices[:numRows, :topK].copy_(chosen)


def indexer_k_quant_and_cache(
    k: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, quant_block_size: int, kv_cache_dtype: str
) -> None:
    """Quantise index keys and write them into a paged cache.

    NaN and infinities become fp8's NaN and leave the key's scale to its other values; such a key is never selected.

    Args:
        k: [tokens, dim] bf16, fp16 or fp32.
        kv_cache: uint8 [num_blocks, block_size, dim + 4], written in place.
        slot_mapping: int64 or int32 [at most tokens]; a negative slot writes nothing, and neither does one beyond the
            cache.
        quant_block_size: dim, one scale a key.
        kv_cache_dtype: "ue8m0" rounds scales up to powers of two; "auto", "fp8" and "fp8_e4m3" keep them.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    checks.check_choice("kv_cache_dtype", kv_cache_dtype, SCALE_RULES)
    checks.check_rank("k", k, 2)
    if quant_block_size != k.shape[1]:
        raise ValueError(f"quant_block_size: got {quant_block_size}, allowed: {k.shape[1]}, one scale a key")
    layout = IndexFp8Layout(k.shape[1], scale_rule=SCALE_RULES[kv_cache_dtype])
    index_cache.indexer_k_quant_and_cache(k, kv_cache, slot_mapping, layout)


def cp_gather_indexer_k_quant_cache(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
) -> None:
    """Collect the index keys of some requests into one matrix.

    Rows beyond cu_seq_lens[-1], which vLLM leaves as they were, and keys outside of table or cache become 0.

    Args:
        kv_cache: uint8 [num_blocks, block_size, dim + 4].
        dst_k: uint8 or float8_e4m3fn [rows, dim], written.
        dst_scale: uint8 [rows, 4] or fp32 [rows, 1], written.
        block_table: int32 [requests, max_blocks].
        cu_seq_lens: int32 [requests + 1].

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    checks.check_dtype("dst_k", dst_k, (torch.uint8, torch.float8_e4m3fn))
    checks.check_rank("dst_k", dst_k, 2)
    checks.check_dtype("dst_scale", dst_scale, (torch.uint8, torch.float32))
    rows, dim = dst_k.shape
    last = 4 // dst_scale.element_size()
    checks.check_shape("dst_scale", dst_scale, (rows, last), "[rows of dst_k, 4 bytes]")
    checks.check_same_device(kv_cache=kv_cache, dst_k=dst_k, dst_scale=dst_scale)
    keys, scales = index_cache.gather_indexer_k(kv_cache, block_table, cu_seq_lens, rows, IndexFp8Layout(dim))
    assert scales is not None, "an fp8 layout has scales"
    dst_k.view(torch.uint8).copy_(keys)
    dst_scale.copy_(scales.unsqueeze(1).view(dst_scale.dtype))


def _check_rows(logits: torch.Tensor, indices: torch.Tensor, rows: int, stride0: int, stride1: int, top_k: int) -> None:
    checks.check_rank("logits", logits, 2)
    checks.check_at_least("numRows", rows, 0)
    checks.check_at_least("topK", top_k, 1)
    given = zip((stride0, stride1), logits.stride())
    if any(got != want and checks.leads(logits[:rows], dim) for dim, (got, want) in enumerate(given)):
        raise ValueError(f"stride0, stride1: got {stride0}, {stride1}, allowed: those of logits, {logits.stride()}")
    if rows > logits.shape[0]:
        raise ValueError(f"numRows: got {rows}, allowed: at most the {logits.shape[0]} rows of logits")
    checks.check_dtype("indices", indices, (torch.int32,))
    checks.check_rank("indices", indices, 2)
    if indices.shape[0] < rows or indices.shape[1] < top_k:
        raise ValueError(f"indices: got shape {list(indices.shape)}, allowed: at least {[rows, top_k]}")
    checks.check_same_device(logits=logits, indices=indices)
