"""FlashMLA's sparse attention: flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata.

Signatures: flash_mla_interface.py of FlashMLA 9241ae3 as vLLM 0.25 ships it, and ``enable_batch_invariant`` of the one
in vLLM 0.33. Results follow FlashMLA: out is 0 and lse is +inf where a row names no key, lse is a natural logarithm and
leaves the sink out.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from sparse_attn.framework import checks, gradients
from sparse_attn.integrations.rows import ragged_rows
from sparse_attn.layout import PLAIN_NAME, KvLayout, LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.sparse import sparse_attn_into
from sparse_attn.types import Ragged

D_V = 512
BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
LAYOUTS = {(576, 656): LatentFp8Layout(512, 64), (512, 584): PlanarFp8Layout(448, 64)}
REFUSED = {
    528: "V4.1 fp8 records of 528 bytes",
    352: "NVFP4 records of 352 bytes",
    288: "V4.1 FP4 records of 288 bytes",
}
NAME = "sparse_attn::sparse_attn_into"


@dataclass
class FlashMLASchedMeta:
    """What get_mla_metadata returns. Our operators plan inside of the call, so that it stays as it is made."""

    have_initialized: bool = False
    config: object = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """(a FlashMLASchedMeta, None), whatever is given. It may be used for any shapes and lengths, and again.

    Args:
        *args: not looked at.
        **kwargs: not looked at.

    Returns:
        (a FlashMLASchedMeta, None).
    """
    return FlashMLASchedMeta(), None


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    return_max_logits: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Attend to rows of a dense matrix.

    Args:
        q: [s_q, heads, d_qk] bf16, fp16 or fp32, 1 to 128 heads.
        kv: [s_kv, 1, d_qk].
        indices: int32 [s_q, 1, topk]; an index outside [0, s_kv) names no key.
        sm_scale: what scores are multiplied by before the softmax.
        d_v: 1 to d_qk.
        attn_sink: fp32 [heads].
        topk_length: int32 [s_q], only the first so many indices of a row count.
        out: [s_q, heads, d_v] of q's dtype, any strides, written and returned.
        return_max_logits: ours: FlashMLA always returns a row's largest scaled score. False leaves it out.

    Returns:
        (out [s_q, heads, d_v], max_logits fp32 [s_q, heads] or None, lse fp32 [s_q, heads]).

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    checks.check_rank("q", q, 3)
    checks.check_shape("kv", kv, (None, 1, q.shape[2]), "[s_kv, 1, d_qk of q]")
    checks.check_shape("indices", indices, (q.shape[0], 1, None), "[s_q, 1, topk]")
    _check_out(out, q, (q.shape[0], q.shape[1], d_v), "[s_q, heads, d_v]")
    _check_lengths("topk_length", topk_length, q.shape[0], "[s_q]")
    if not 1 <= d_v <= q.shape[2]:
        raise ValueError(f"d_v: got {d_v}, allowed: 1 to d_qk = {q.shape[2]}")
    checks.check_dtype("q", q, tuple(PLAIN_NAME))
    checks.check_dtype("kv", kv, (q.dtype,))
    layout = PlainLayout(PLAIN_NAME[q.dtype], d_v, q.shape[2] - d_v)
    ragged = ragged_rows("indices", indices.squeeze(1))
    return _attend(
        q, kv.squeeze(1), ragged, out, return_max_logits,
        scale=sm_scale, layout=layout, sink=attn_sink, lengths=topk_length,
    )  # fmt: skip


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object = None,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to slots of one paged cache, or of two under one softmax.

    Dense attention (indices None), causal and records of 528, 352 or 288 bytes are a ValueError.

    Args:
        q: [batch, s_q, heads, 576 or 512] bf16, fp16 or fp32, 1 to 128 heads.
        k_cache: [num_blocks, block_size, 1, bytes], records of 656 bytes for 576 values or of 584 for 512 (uint8, int8
            or float8_e4m3fn: bytes in any case); or, without is_fp8_kvcache, [num_blocks, block_size, 1, d] of q's
            dtype.
        block_table: not looked at.
        cache_seqlens: not looked at.
        head_dim_v: 512.
        tile_scheduler_metadata: not looked at.
        num_splits: None.
        softmax_scale: None is d_qk**-0.5.
        causal: False.
        is_fp8_kvcache: whether k_cache holds records.
        indices: int32 [batch, s_q, topk], slots (block * block_size + offset); a slot outside of the cache names no
            key.
        attn_sink: fp32 [heads].
        extra_k_cache: the second cache; it and its indices: both or none.
        extra_indices_in_kvcache: slots in it.
        topk_length: int32 [batch], only the first so many indices of a request's rows count.
        extra_topk_length: as topk_length, of the second cache.
        out: [batch, s_q, heads, 512], any strides, written and returned.
        enable_batch_invariant: a row's bits do not depend on how many rows there are.

    Returns:
        (out [batch, s_q, heads, 512], lse fp32 [batch, heads, s_q], a transposed view).

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if indices is None:
        raise ValueError("indices: got None (dense attention), allowed: int32 [batch, s_q, topk], sparse attention")
    if causal or num_splits is not None:
        name, got = ("causal", causal) if causal else ("num_splits", type(num_splits).__name__)
        raise ValueError(f"{name}: got {got}, allowed beside indices: {False if causal else None}")
    checks.check_rank("q", q, 4)
    batch, s_q, heads, dim = q.shape
    cache, layout = _cache_of("k_cache", k_cache, q, head_dim_v, is_fp8_kvcache)
    _check_out(out, q, (batch, s_q, heads, head_dim_v), "[batch, s_q, heads, head_dim_v]")
    ragged, lengths = _slots("indices", indices, "topk_length", topk_length, batch, s_q)
    extra_cache = extra_ragged = extra_layout = extra_lengths = None
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        extra_cache, extra_layout = _cache_of("extra_k_cache", extra_k_cache, q, head_dim_v, is_fp8_kvcache)
        extra_ragged, extra_lengths = _slots(
            "extra_indices_in_kvcache", extra_indices_in_kvcache, "extra_topk_length", extra_topk_length, batch, s_q
        )
    elif not (extra_k_cache is None and extra_indices_in_kvcache is None and extra_topk_length is None):
        raise ValueError(
            "extra_k_cache: got one of extra_k_cache, extra_indices_in_kvcache, extra_topk_length without the others, "
            "allowed: both of the first two, or none"
        )
    result, _, lse = _attend(
        q.flatten(0, 1), cache, ragged, out, False,
        scale=dim**-0.5 if softmax_scale is None else softmax_scale, layout=layout, lengths=lengths,
        extra_cache=extra_cache, extra_ragged=extra_ragged, extra_layout=extra_layout, extra_lengths=extra_lengths,
        sink=attn_sink, batch_invariant=enable_batch_invariant,
    )  # fmt: skip
    result = result.view(batch, s_q, heads, head_dim_v) if out is None else result
    return result, lse.view(batch, s_q, heads).transpose(1, 2)


def _attend(
    q: torch.Tensor, cache: torch.Tensor, ragged: Ragged, out: torch.Tensor | None, with_max: bool, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(out, max_logits, lse) of FlashMLA's conventions, which the kernels write; one copy where ``out`` is given and is
    not contiguous."""
    tokens, heads, _ = q.shape
    shape = tokens, heads, options["layout"].value_dim
    direct = out is not None and out.is_contiguous()
    to = out.view(shape) if out is not None and direct else q.new_empty(shape)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    max_logits = torch.empty_like(lse) if with_max else None
    followed = [value for value in (q, cache, options.get("extra_cache")) if value is not None and value.requires_grad]
    with torch.no_grad() if followed else contextlib.nullcontext():
        sparse_attn_into(q, cache, ragged, to, lse, max_logits=max_logits, inf_lse=True, **options)
        result = to if out is None else out if direct else out.copy_(to.view(out.shape))
    if followed:
        result, lse = (gradients.end(one, NAME, *followed) for one in (result, lse))
        max_logits = None if max_logits is None else gradients.end(max_logits, NAME, *followed)
    return result, max_logits, lse


def _check_out(out: torch.Tensor | None, q: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if out is not None:
        checks.check_dtype("out", out, (q.dtype,))
        checks.check_shape("out", out, shape, meaning)
        checks.check_same_device(q=q, out=out)


def _check_lengths(name: str, lengths: torch.Tensor | None, rows: int, meaning: str) -> None:
    if lengths is not None:
        checks.check_dtype(name, lengths, (torch.int32,))
        checks.check_shape(name, lengths, (rows,), meaning)


def _slots(
    name: str, indices: torch.Tensor, length_name: str, lengths: torch.Tensor | None, batch: int, s_q: int
) -> tuple[Ragged, torch.Tensor | None]:
    checks.check_shape(name, indices, (batch, s_q, None), "[batch, s_q, topk]")
    _check_lengths(length_name, lengths, batch, "[batch]")
    if lengths is not None and s_q != 1:
        lengths = lengths.unsqueeze(1).expand(batch, s_q).reshape(-1)
    return ragged_rows(name, indices.flatten(0, 1)), lengths


def _cache_of(name: str, cache: torch.Tensor, q: torch.Tensor, d_v: int, is_fp8: bool) -> tuple[torch.Tensor, KvLayout]:
    """([num_blocks, block_size, row], what its bytes mean)"""
    checks.check_shape(name, cache, (None, None, 1, None), "[num_blocks, block_size, 1, row]")
    dim, row = q.shape[3], cache.shape[3]
    if not is_fp8:
        checks.check_dtype(name, cache, (q.dtype,))
        checks.check_shape(name, cache, (None, None, 1, dim), "[num_blocks, block_size, 1, d_qk of q]")
        if not 1 <= d_v <= dim:
            raise ValueError(f"head_dim_v: got {d_v}, allowed: 1 to d_qk = {dim}")
        return cache.squeeze(2), PlainLayout(PLAIN_NAME[q.dtype], d_v, dim - d_v)
    checks.check_dtype(name, cache, BYTE_DTYPES)
    if row in REFUSED:
        raise ValueError(f"{name}: got {REFUSED[row]}, allowed: 656 bytes for 576 values, 584 bytes for 512 values")
    if (dim, row) not in LAYOUTS:
        raise ValueError(f"{name}: got {row} bytes a token for {dim} values, allowed: 656 for 576, 584 for 512")
    if d_v != D_V:
        raise ValueError(f"head_dim_v: got {d_v}, allowed: {D_V}")
    return cache.squeeze(2).view(torch.uint8), LAYOUTS[dim, row]
