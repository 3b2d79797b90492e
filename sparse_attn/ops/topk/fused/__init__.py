"""Score and select in one op: the lightning indexer without a full matrix of logits.

Rows are taken a few at a time, so that the logits held at once stay within a byte budget. The result is exactly
``top_k_per_row`` of the full logits. A row's selection depends neither on the other rows nor on the budget.
"""

from __future__ import annotations

import torch

from sparse_attn.cache import check_cache, check_heads_together, check_mxfp4_keys
from sparse_attn.fp8 import FP8_DTYPE
from sparse_attn.framework import checks
from sparse_attn.framework.registration import define_op
from sparse_attn.layout import IndexFp8Layout, IndexLayout, IndexMxfp4Layout, PlainLayout, query_row
from sparse_attn.mxfp4 import MXFP4
from sparse_attn.ops.topk.fused import fake, reference
from sparse_attn.ops.topk.fused.config import Decode, Prefill
from sparse_attn.ops.topk.select.dispatch import KERNELS
from sparse_attn.types import Ragged

LOGITS_BYTES = 512 << 20
# 64 rows of 131072 keys. Models give a budget of their own: they reserve scratch for prefill, which takes more.
DECODE_LOGITS_BYTES = 32 << 20
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEADS = 128
_PREFILL_GUARD = checks.Guard()
_POSITIONS, _SLOTS = checks.Guard(), checks.Guard()


def _launchers():
    from sparse_attn.ops.topk.fused import launch

    return launch


_index_topk_prefill = define_op(
    "index_topk_prefill",
    "(Tensor q, Tensor weights, Tensor k, Tensor? k_scale, Tensor kv_start, Tensor kv_end, int top_k, str flavour, "
    "int logits_bytes, str impl) -> Tensor",
    fake=fake.index_topk_prefill,
    reference=reference.index_topk_prefill,
    rules=reference.rules_of_index_topk_prefill,
    launch=lambda: _launchers().index_topk_prefill,
    kernels=KERNELS,
)
_index_topk_decode = define_op(
    "index_topk_decode",
    "(Tensor q, Tensor weights, Tensor cache, Tensor context_lens, Tensor block_table, int top_k, "
    "SymInt max_context_len, str layout, int logits_bytes, str impl) -> Tensor",
    fake=fake.index_topk_decode,
    reference=reference.index_topk_decode,
    rules=reference.rules_of_index_topk_decode,
    launch=lambda: _launchers().index_topk_decode,
    kernels=KERNELS,
)
_index_topk_decode_slots = define_op(
    "index_topk_decode_slots",
    "(Tensor q, Tensor weights, Tensor cache, Tensor context_lens, Tensor block_table, int top_k, "
    "SymInt max_context_len, str layout, int logits_bytes, str impl) -> (Tensor, Tensor)",
    fake=fake.index_topk_decode_slots,
    reference=reference.index_topk_decode_slots,
    rules=reference.rules_of_index_topk_decode,
    launch=lambda: _launchers().index_topk_decode_slots,
    kernels=KERNELS,
)


def index_topk_prefill(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    kv_start: torch.Tensor,
    kv_end: torch.Tensor,
    top_k: int,
    *,
    flavour: str = "e4m3fn",
    logits_bytes: int = LOGITS_BYTES,
    impl: str = "auto",
) -> torch.Tensor:
    """The ``top_k`` best keys of every query row among gathered keys.

    Args:
        q: [rows, heads, dim], fp8 codes (float8 or uint8) of ``flavour`` with k_scale, or bf16/fp16/fp32 with k_scale
            None, or with ``flavour`` "mxfp4" what mxfp4_mqa_logits takes.
        weights: fp32 [rows, heads], scales folded in.
        k: [keys, dim], in the form of q.
        k_scale: fp32 [keys], or None (``flavour`` is then ignored).
        kv_start: int32 [rows], row r competes with keys [kv_start[r], kv_end[r]), clamped to [0, keys].
        kv_end: int32 [rows].
        top_k: keys of a row, at least 1.
        flavour: "e4m3fn", "e4m3fnuz" or "mxfp4".
        logits_bytes: bytes of logits that may be held at once; one row always may.
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        int32 [rows, top_k] as ``top_k_per_row`` does: key minus kv_start, ascending, -1 behind.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    call = Prefill(q, weights, k, k_scale, kv_start, kv_end, top_k, flavour, logits_bytes)
    if new := _PREFILL_GUARD.new(call):
        _check_prefill(call)
        _PREFILL_GUARD.passed(new)
    if k_scale is None:
        call = call._replace(flavour="none")
    elif flavour != MXFP4:
        call = call._replace(q=q.view(torch.uint8), k=k.view(torch.uint8))
    return _index_topk_prefill(*call, impl)


def index_topk_decode(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    top_k: int,
    max_context_len: int,
    layout: IndexLayout,
    *,
    logits_bytes: int = DECODE_LOGITS_BYTES,
    impl: str = "auto",
) -> torch.Tensor:
    """The ``top_k`` best positions of every decode row among its request's cached keys.

    Args:
        q: [requests, next_n, heads, dim], fp8 codes for an IndexFp8Layout cache, the layout's dtype for a PlainLayout,
            and for an IndexMxfp4Layout uint8 [..., layout.row] as mxfp4_paged_mqa_logits takes them.
        weights: fp32 [requests * next_n, heads].
        cache: blocks of ``layout``.
        context_lens: int32 [requests, next_n], row (b, j) competes with positions [0, context_lens[b, j]), clamped to
            [0, max_context_len].
        block_table: int32 [requests, max_blocks]; positions beyond it or of a block outside the cache are not
            candidates.
        top_k: positions of a row, at least 1.
        max_context_len: the host's bound on every length.
        layout: of ``cache``.
        logits_bytes: bytes of logits that may be held at once; one request always may. The selection's scratch comes
            beside them: at most 16 MiB, or an eighth of the logits. Rows count as max_context_len long. Rows that do
            not fit take further launches.
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        int32 [requests * next_n, top_k] as ``top_k_per_row`` does.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    name = _name_of(layout)
    call = Decode(q, weights, cache, context_lens, block_table, top_k, max_context_len, name, logits_bytes)
    return _index_topk_decode(*_checked(call, layout, slots=False), impl)


def index_topk_decode_slots(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    top_k: int,
    max_context_len: int,
    layout: IndexLayout,
    *,
    logits_bytes: int = DECODE_LOGITS_BYTES,
    impl: str = "auto",
) -> Ragged:
    """Where in a paged cache the ``top_k`` best positions of every decode row lie.

    Where CTAs hold all rows at once, and blocks are a multiple of 32 long, it takes no further launch than
    ``index_topk_decode``, whose arguments it takes.

    Args:
        q: see index_topk_decode.
        weights: see index_topk_decode.
        cache: see index_topk_decode.
        context_lens: see index_topk_decode.
        block_table: also that of the cache to be read, whose blocks are as long as those of ``cache``.
        top_k: see index_topk_decode.
        max_context_len: see index_topk_decode.
        layout: see index_topk_decode.
        logits_bytes: see index_topk_decode.
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        What ``compute_global_topk_ragged_indices_and_indptr`` makes of that function's result, at capacity requests *
        next_n * top_k.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    name = _name_of(layout)
    call = Decode(q, weights, cache, context_lens, block_table, top_k, max_context_len, name, logits_bytes)
    return Ragged(*_index_topk_decode_slots(*_checked(call, layout, slots=True), impl))


def _check_prefill(call: Prefill) -> None:
    q, weights, k, k_scale, kv_start, kv_end, top_k, flavour, logits_bytes = call
    checks.check_rank("q", q, 3)
    rows, heads, dim = q.shape
    packed = 0
    if k_scale is None:
        checks.check_dtype("q", q, FLOATS)
        checks.check_dtype("k", k, (q.dtype,))
    elif flavour == MXFP4:
        check_mxfp4_keys(q, k, k_scale)
        packed = k.shape[1] + k_scale.shape[1]
    else:
        checks.check_choice("flavour", flavour, (*FP8_DTYPE, MXFP4))
        for name, value in (("q", q), ("k", k)):
            checks.check_dtype(name, value, (torch.uint8, FP8_DTYPE[flavour]))
        checks.check_dtype("k_scale", k_scale, (torch.float32,))
        checks.check_rank("k", k, 2)
        checks.check_shape("k_scale", k_scale, (k.shape[0],), "[keys]")
    _check_heads(heads)
    if packed:
        checks.check_shape("q", q, (None, None, packed), "[rows, heads, dim / 2 + dim / 32]")
    else:
        checks.check_shape("k", k, (None, dim), "[keys, dim]")
    checks.check_unit_stride("q", q)
    checks.check_unit_stride("k", k)
    checks.check_dtype("weights", weights, (torch.float32,))
    checks.check_shape("weights", weights, (rows, heads), "[rows, heads]")
    for name, value in (("kv_start", kv_start), ("kv_end", kv_end)):
        checks.check_dtype(name, value, (torch.int32,))
        checks.check_shape(name, value, (rows,), "[rows]")
    checks.check_at_least("top_k", top_k, 1)
    checks.check_at_least("logits_bytes", logits_bytes, 0)
    checks.check_same_device(q=q, weights=weights, k=k, k_scale=k_scale, kv_start=kv_start, kv_end=kv_end)


def _name_of(layout: IndexLayout) -> str:
    if not isinstance(layout, (IndexFp8Layout, IndexMxfp4Layout, PlainLayout)):
        raise ValueError(f"layout: got {layout!r}, allowed: an IndexFp8Layout, an IndexMxfp4Layout or a PlainLayout")
    return layout.name


def _checked(call: Decode, layout: IndexLayout, *, slots: bool) -> Decode:
    """The operator's arguments. slots: whether it returns them."""
    guard = _SLOTS if slots else _POSITIONS
    if new := guard.new(call):
        _check_decode(call, layout)
        if slots:
            checks.check_room("top_k", call.q.shape[0] * call.q.shape[1], call.top_k)
        guard.passed(new)
    return call._replace(q=call.q.view(torch.uint8)) if isinstance(layout, IndexFp8Layout) else call


def _check_decode(call: Decode, layout: IndexLayout) -> None:
    q, weights, cache, context_lens, block_table, top_k, max_context_len, _, logits_bytes = call
    codes = isinstance(layout, IndexFp8Layout)
    checks.check_dtype("q", q, (torch.uint8, FP8_DTYPE[layout.flavour]) if codes else (layout.dtype,))
    checks.check_shape("q", q, (None, None, None, query_row(layout)), "[requests, next_n, heads, a query's row]")
    requests, next_n, heads, _ = q.shape
    _check_heads(heads)
    check_cache("cache", cache, layout)
    checks.check_unit_stride("q", q)
    if isinstance(layout, IndexMxfp4Layout):
        check_heads_together(q)
    checks.check_dtype("weights", weights, (torch.float32,))
    checks.check_shape("weights", weights, (requests * next_n, heads), "[requests * next_n, heads]")
    checks.check_dtype("context_lens", context_lens, (torch.int32,))
    checks.check_shape("context_lens", context_lens, (requests, next_n), "[requests, next_n]")
    checks.check_dtype("block_table", block_table, (torch.int32,))
    checks.check_shape("block_table", block_table, (requests, None), "[requests, max_blocks]")
    checks.check_unit_stride("block_table", block_table)
    checks.check_at_least("top_k", top_k, 1)
    checks.check_at_least("max_context_len", max_context_len, 0)
    checks.check_at_least("logits_bytes", logits_bytes, 0)
    checks.check_same_device(q=q, weights=weights, cache=cache, context_lens=context_lens, block_table=block_table)


def _check_heads(heads: int) -> None:
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"q: got {heads} heads, allowed: 1 to {MAX_HEADS}")
