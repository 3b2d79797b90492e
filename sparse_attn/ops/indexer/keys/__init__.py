"""The paged cache of index keys: quantise and insert, gather.

Layouts: IndexFp8Layout (block-planar fp8 codes and fp32 scales, 132 bytes a token at dim 128), IndexMxfp4Layout
(block-planar e2m1 codes and ue8m0 scales, 68 bytes) and PlainLayout. Byte positions are in sparse_attn.layout.
"""

from __future__ import annotations

import torch

from sparse_attn.cache import check_cache, check_gathering, check_slot_mapping
from sparse_attn.framework import checks
from sparse_attn.framework.registration import define_op
from sparse_attn.layout import IndexFp8Layout, IndexLayout, IndexMxfp4Layout, PlainLayout
from sparse_attn.ops.indexer.keys import fake, reference
from sparse_attn.types import IndexKeys

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_WRITE, _GATHER = checks.Guard(), checks.Guard()


def _launchers():
    from sparse_attn.ops.indexer.keys import launch

    return launch


_indexer_k_quant_and_cache = define_op(
    "indexer_k_quant_and_cache",
    "(Tensor k, Tensor(a!) cache, Tensor slot_mapping, str layout, str impl) -> ()",
    fake=fake.indexer_k_quant_and_cache,
    reference=reference.indexer_k_quant_and_cache,
    rules=reference.rules_of_indexer_k_quant_and_cache,
    launch=lambda: _launchers().indexer_k_quant_and_cache,
)
_gather_indexer_k = define_op(
    "gather_indexer_k",
    "(Tensor cache, Tensor block_table, Tensor kv_indptr, SymInt capacity, str layout, str impl)"
    " -> (Tensor keys, Tensor scales)",
    fake=fake.gather_indexer_k,
    reference=reference.gather_indexer_k,
    rules=reference.rules_of_gather_indexer_k,
    launch=lambda: _launchers().gather_indexer_k,
)


def indexer_k_quant_and_cache(
    k: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: IndexLayout,
    *,
    impl: str = "auto",
) -> None:
    """Write index keys into ``cache``, quantised as ``layout`` says.

    fp8: scale = max(amax, 1e-4) / FP8_MAX over the token's dim values, rounded up to a power of two under "pow2". NaN
    and infinities become the flavour's NaN and change no other value. Such a key is never selected. MXFP4: scale =
    2^ceil(log2(max(amax, 6 * 2^-126) / 6)) over 32 values, which NaN or an infinity among them makes NaN in full.

    Args:
        k: bf16, fp16 or fp32 [tokens, dim], rotated.
        cache: blocks of ``layout``, written in place; block stride free, and a PlainLayout's row stride.
        slot_mapping: int64 or int32 [at most tokens], block * block_size + offset of each token; a negative slot, or
            one beyond the cache, writes nothing. Tokens beyond slot_mapping are ignored. Where two tokens have one
            slot, it is undefined which one is written.
        layout: of ``cache``.
        impl: "auto", "reference" or "triton".

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _WRITE.new(k, cache, slot_mapping, layout):
        checks.check_dtype("k", k, FLOATS)
        _check_layout(layout)
        checks.check_shape("k", k, (None, layout.dim), "[tokens, layout.dim]")
        checks.check_unit_stride("k", k)
        check_cache("cache", cache, layout, padded_rows=True)
        check_slot_mapping(slot_mapping, "k", k)
        checks.check_same_device(k=k, cache=cache, slot_mapping=slot_mapping)
        _WRITE.passed(new)
    _indexer_k_quant_and_cache(k, cache, slot_mapping, layout.name, impl)


def gather_indexer_k(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_indptr: torch.Tensor,
    capacity: int,
    layout: IndexLayout,
    *,
    impl: str = "auto",
) -> IndexKeys:
    """Collect the index keys of some requests into one matrix.

    Args:
        cache: blocks of ``layout``.
        block_table: int32 [requests, max_blocks].
        kv_indptr: int32 [requests + 1], rows [kv_indptr[b], kv_indptr[b + 1]) are the first tokens of request b.
        capacity: rows of the result, the host's bound on kv_indptr[-1].
        layout: of ``cache``.
        impl: "auto", "reference" or "triton".

    Returns:
        IndexKeys(keys [capacity, dim] uint8 codes or the layout's dtype, scales fp32 [capacity], None for a
        PlainLayout); under MXFP4 keys uint8 [capacity, dim / 2], scales ue8m0 bytes [capacity, dim / 32]. Rows beyond
        kv_indptr[-1], and tokens whose block is outside the table or the cache, come out zero.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _GATHER.new(cache, block_table, kv_indptr, capacity, layout):
        _check_layout(layout)
        check_gathering(cache, block_table, kv_indptr, capacity, layout)
        checks.check_same_device(cache=cache, block_table=block_table, kv_indptr=kv_indptr)
        _GATHER.passed(new)
    keys, scales = _gather_indexer_k(cache, block_table, kv_indptr, capacity, layout.name, impl)
    return IndexKeys(keys, None if isinstance(layout, PlainLayout) else scales)


def _check_layout(layout: object) -> None:
    if not isinstance(layout, (IndexFp8Layout, IndexMxfp4Layout, PlainLayout)):
        raise ValueError(f"layout: got {layout!r}, allowed: IndexFp8Layout, IndexMxfp4Layout, PlainLayout")
