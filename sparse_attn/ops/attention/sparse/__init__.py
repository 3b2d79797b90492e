"""Sparse multi-query attention over ragged indices.

For every row t and head h, with S = the valid indices of row t (duplicates count as often as they stand there; where
two caches are given, the indices into both):
z_i = scale * (q . k_i), out = sum_i softmax(z)_i v_i, v_i = the first d_v values of k_i. With a sink (fp32 [heads],
natural log units, not scaled) the denominator gains exp(sink). lse = log sum_i exp(z_i) leaves the sink out. A row
without a valid index gives out 0 and lse -inf; sink -inf changes nothing, sink +inf gives out 0.

A score of -inf weighs nothing, and a row of them alone is as one without a valid index; every finite score counts,
however low. A score that is NaN or +inf makes out and lse of its row and head NaN. Scores are taken in base 2: one
beyond fp32 there (2.3e38 in size) is infinite.

An index is valid inside [0, rows); others are skipped, and NaN in a row that no valid index names never reaches an
output.
"""

from __future__ import annotations

import math

import torch

from sparse_attn.cache import check_cache
from sparse_attn.framework import checks
from sparse_attn.framework.registration import define_op
from sparse_attn.layout import KvLayout, LatentFp8Layout, Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.sparse import dispatch, fake, gradients, reference
from sparse_attn.ops.attention.sparse.two_lists import join_lists
from sparse_attn.types import AttentionOutput, Ragged

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEADS = 128
_PREFILL, _DECODE, _INTO, _MERGE = checks.Guard(), checks.Guard(), checks.Guard(), checks.Guard()


def _launchers():
    from sparse_attn.ops.attention.sparse import launch

    return launch


_sparse_attn_prefill = define_op(
    "sparse_attn_prefill",
    "(Tensor q, Tensor kv, Tensor indices, Tensor indptr, float scale, int d_v, Tensor? sink, bool batch_invariant,"
    " str impl) -> (Tensor out, Tensor lse)",
    fake=fake.sparse_attn_prefill,
    reference=reference.sparse_attn_prefill,
    rules=reference.rules_of_sparse_attn_prefill,
    launch=lambda: _launchers().sparse_attn_prefill,
    kernels=dispatch.KERNELS,
    gradient=(gradients.keep, gradients.gradient),
)
_sparse_attn_prefill_backward = define_op(
    "sparse_attn_prefill_backward",
    "(Tensor q, Tensor kv, Tensor indices, Tensor indptr, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse,"
    " Tensor? sink, float scale, int d_v, bool wants_q, bool wants_kv, bool wants_sink, str impl)"
    " -> (Tensor dq, Tensor dkv, Tensor dsink)",
    fake=fake.sparse_attn_prefill_backward,
    reference=reference.sparse_attn_prefill_backward,
    rules=reference.rules_of_sparse_attn_prefill_backward,
    launch=lambda: _launchers().sparse_attn_prefill_backward,
)
_sparse_attn_decode = define_op(
    "sparse_attn_decode",
    "(Tensor q, Tensor cache, Tensor indices, Tensor indptr, float scale, str layout, Tensor? extra_cache,"
    " Tensor? extra_indices, Tensor? extra_indptr, str extra_layout, Tensor? sink, bool batch_invariant, str impl)"
    " -> (Tensor out, Tensor lse)",
    fake=fake.sparse_attn_decode,
    reference=reference.sparse_attn_decode,
    rules=reference.rules_of_sparse_attn_decode,
    launch=lambda: _launchers().sparse_attn_decode,
    kernels=dispatch.KERNELS,
)
_sparse_attn_into = define_op(
    "sparse_attn_into",
    "(Tensor q, Tensor cache, Tensor indices, Tensor indptr, Tensor? lengths, float scale, str layout,"
    " Tensor? extra_cache, Tensor? extra_indices, Tensor? extra_indptr, Tensor? extra_lengths, str extra_layout,"
    " Tensor? sink, bool batch_invariant, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? max_logits, bool inf_lse,"
    " str impl) -> ()",
    fake=fake.sparse_attn_into,
    reference=reference.sparse_attn_into,
    rules=reference.rules_of_sparse_attn_into,
    launch=lambda: _launchers().sparse_attn_into,
)
_merge_attn_states = define_op(
    "merge_attn_states",
    "(Tensor outs, Tensor lses, Tensor? sink, str impl) -> (Tensor out, Tensor lse)",
    fake=fake.merge_attn_states,
    reference=reference.merge_attn_states,
    rules=reference.rules_of_merge_attn_states,
    launch=lambda: _launchers().merge_attn_states,
    gradient=(gradients.keep_states, gradients.gradient_of_states),
)


def sparse_attn_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    ragged: Ragged,
    *,
    scale: float,
    d_v: int,
    extra_kv: torch.Tensor | None = None,
    extra_ragged: Ragged | None = None,
    sink: torch.Tensor | None = None,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> AttentionOutput:
    """Attend to rows of a dense key-value matrix, or to rows of two under one softmax.

    On a GPU 16 rows have to fit into shared memory beside as many queries, with d_v and the rest of d_qk rounded up to
    powers of two; otherwise it is a ValueError. 2-byte rows of 512 + 64 values fit on every GPU, of 1024 + 64 on those
    with 160 KiB or more.

    out and lse have first derivatives by q, kv and sink where the reference runs: on a CPU, or with impl="reference".
    A key's gradient is the sum over all rows that name it, in fp32 and in their order, so that its bits are the same in
    every run. Where lse is NaN, gradients are NaN.

    Args:
        q: [tokens, heads, d_qk] bf16, fp16 or fp32, 1 to 128 heads; float64 for the reference.
        kv: [rows, d_qk] or [rows, 1, d_qk], dtype of q.
        ragged: row ids per token.
        scale: what scores are multiplied by before the softmax.
        d_v: leading values of a row that are its value, at most d_qk.
        extra_kv: more rows, as ``kv``, which are copied behind it. They and their ids: both or none.
        extra_ragged: ids of rows of extra_kv per token.
        sink: fp32 (float64 beside queries of it) [>= heads] or None.
        batch_invariant: a row's bits do not depend on how many rows there are. No row is split over CTAs, as none is
            where rows are many.
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        AttentionOutput(out [tokens, heads, d_v] dtype of q, lse fp32 (or float64) [tokens, heads]).

    Raises:
        NotImplementedError: in a backward, where a kernel ran, or where a gradient is derived again.
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if extra_kv is not None or extra_ragged is not None:
        if extra_kv is None or extra_ragged is None:
            missing = "extra_kv" if extra_kv is None else "extra_ragged"
            raise ValueError(f"{missing}: got None, allowed: both of extra_kv, extra_ragged, or none")
        _check_rows("kv", kv, q)
        _check_rows("extra_kv", extra_kv, q)
        _check_ragged("ragged", ragged, q)
        _check_ragged("extra_ragged", extra_ragged, q)
        kv, extra_kv = (one.flatten(0, -2) for one in (kv, extra_kv))
        ragged = join_lists(ragged, extra_ragged, kv.shape[0], extra_kv.shape[0])
        kv = torch.cat([kv, extra_kv])
    if new := _PREFILL.new(q, kv, ragged, scale, d_v, sink, batch_invariant):
        _check_queries(q, ragged, sink, (*FLOATS, torch.float64))
        _check_rows("kv", kv, q)
        checks.check_integer("d_v", d_v)
        if not 1 <= d_v <= q.shape[2]:
            raise ValueError(f"d_v: got {d_v}, allowed: 1 to d_qk = {q.shape[2]}")
        _PREFILL.passed(new)
    if kv.dim() == 3:
        kv = kv.squeeze(1)
    return AttentionOutput(*_sparse_attn_prefill(q, kv, *ragged, scale, d_v, sink, batch_invariant, impl))


def sparse_attn_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    ragged: Ragged,
    *,
    scale: float,
    layout: KvLayout,
    extra_cache: torch.Tensor | None = None,
    extra_ragged: Ragged | None = None,
    extra_layout: KvLayout | None = None,
    sink: torch.Tensor | None = None,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> AttentionOutput:
    """Attend to slots of a paged cache, or to slots of two caches under one softmax.

    A key that both caches hold counts twice. FlashMLA's sparse decode takes two caches in this way.

    Args:
        q: [tokens, heads, layout.dim] bf16, fp16 or fp32, 1 to 128 heads.
        cache: blocks of ``layout`` (plain, latent fp8 or planar fp8) [num_blocks, block_size, row], block stride free;
            keys are converted to q's dtype.
        ragged: slots (block * block_size + offset) per token.
        scale: what scores are multiplied by before the softmax.
        layout: of ``cache``.
        extra_cache: the second cache. It, its slots and its layout: all three or none.
        extra_ragged: the slots in it per token.
        extra_layout: its layout, which agrees with ``layout`` in dim and value_dim; kind, fp8 flavour, block size and
            block stride are its own.
        sink: fp32 [>= heads] or None.
        batch_invariant: a row's bits do not depend on how many rows there are, as long as each has the same room for
            indices. Every step is split over CTAs as a step of 32 rows is, which takes more scratch: see
            ``Bounds.batch_invariant``.
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        AttentionOutput(out [tokens, heads, layout.value_dim] dtype of q, lse fp32 [tokens, heads]).

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    extra = extra_cache, extra_ragged, extra_layout
    if new := _DECODE.new(q, cache, ragged, scale, layout, extra, sink, batch_invariant):
        _check_queries(q, ragged, sink)
        _check_keys(q, cache, layout, "")
        checks.check_shape("q", q, (None, None, layout.dim), "[tokens, heads, layout.dim]")
        _check_extra(q, layout, *extra)
        _DECODE.passed(new)
    extra = _unpacked(*extra)
    arguments = (q, cache, *ragged, scale, layout.name, *extra, sink, batch_invariant, impl)
    return AttentionOutput(*_sparse_attn_decode(*arguments))


def sparse_attn_into(
    q: torch.Tensor,
    cache: torch.Tensor,
    ragged: Ragged,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    layout: KvLayout,
    lengths: torch.Tensor | None = None,
    extra_cache: torch.Tensor | None = None,
    extra_ragged: Ragged | None = None,
    extra_layout: KvLayout | None = None,
    extra_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    inf_lse: bool = False,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> None:
    """sparse_attn_decode into given tensors, as other libraries' call sites want it: no launch is added.

    Indices outside of a cache are no mistake: debug mode does not refuse them. ``explain`` does not know this operator.
    What is written is contiguous.

    Args:
        q: as sparse_attn_decode takes it, as are all that are not named below.
        cache: also rows [rows, layout.dim] of a PlainLayout, as sparse_attn_prefill takes kv.
        ragged: see sparse_attn_decode.
        out: [tokens, heads, layout.value_dim] of q's dtype, written.
        lse: fp32 [tokens, heads], written.
        scale: see sparse_attn_decode.
        layout: see sparse_attn_decode.
        lengths: int32 [tokens] or None, so many indices of a row count, the first ones.
        extra_cache: see sparse_attn_decode.
        extra_ragged: see sparse_attn_decode.
        extra_layout: see sparse_attn_decode.
        extra_lengths: as lengths, of the second cache.
        sink: see sparse_attn_decode.
        max_logits: fp32 [tokens, heads] or None, written: the largest of a row's scores (those that are NaN left out),
            -inf for a row without any.
        inf_lse: lse of a row without a valid index, or with scores of -inf alone, is +inf, not -inf.
        batch_invariant: see sparse_attn_decode.
        impl: "auto", "reference" or "triton"; it names no kernel here.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    extra, written = (extra_cache, extra_ragged, extra_layout), (out, lse, max_logits)
    if new := _INTO.new(q, cache, ragged, written, layout, lengths, extra, extra_lengths, sink):
        _check_queries(q, ragged, sink)
        if isinstance(cache, torch.Tensor) and cache.dim() == 2 and isinstance(layout, PlainLayout):
            checks.check_dtype("cache", cache, (layout.dtype,))
            checks.check_shape("cache", cache, (None, layout.dim), "[rows, layout.dim]")
            checks.check_unit_stride("cache", cache)
            checks.check_same_device(q=q, cache=cache)
        else:
            _check_keys(q, cache, layout, "")
        checks.check_shape("q", q, (None, None, layout.dim), "[tokens, heads, layout.dim]")
        _check_extra(q, layout, *extra)
        if extra_cache is None and extra_lengths is not None:
            raise ValueError("extra_lengths: got a tensor, allowed: None without an extra_cache")
        _check_lengths("lengths", lengths, q)
        _check_lengths("extra_lengths", extra_lengths, q)
        tokens, heads, _ = q.shape
        _check_written("out", out, (tokens, heads, layout.value_dim), q.dtype, q)
        _check_written("lse", lse, (tokens, heads), torch.float32, q)
        if max_logits is not None:
            _check_written("max_logits", max_logits, (tokens, heads), torch.float32, q)
        _INTO.passed(new)
    extra = _unpacked(*extra)
    caches = cache, *ragged, lengths, scale, layout.name, *extra[:3], extra_lengths, extra[3]
    _sparse_attn_into(q, *caches, sink, batch_invariant, out, lse, max_logits, inf_lse, impl)


def merge_attn_states(
    outs: torch.Tensor, lses: torch.Tensor, *, sink: torch.Tensor | None = None, impl: str = "auto"
) -> AttentionOutput:
    """Merge attention over disjoint sets of keys into attention over their union.

    An lse that is NaN or +inf makes out and lse of its token and head NaN. A row's bits do not depend on the others.
    Both outputs have gradients by outs, lses and sink.

    Args:
        outs: [states, tokens, heads, d_v] bf16, fp16 or fp32.
        lses: fp32 [states, tokens, heads], natural log, -inf for a state without keys (whose out is ignored).
        sink: fp32 [>= heads], counted once, or None.
        impl: "auto", "reference" or "triton".

    Returns:
        AttentionOutput(out [tokens, heads, d_v] dtype of outs, lse fp32 [tokens, heads]).

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _MERGE.new(outs, lses, sink):
        checks.check_dtype("outs", outs, FLOATS)
        checks.check_rank("outs", outs, 4)
        checks.check_at_least("outs states", outs.shape[0], 1)
        checks.check_at_least("outs d_v", outs.shape[3], 1)
        checks.check_unit_stride("outs", outs)
        checks.check_dtype("lses", lses, (torch.float32,))
        checks.check_shape("lses", lses, outs.shape[:3], "[states, tokens, heads]")
        _check_sink(sink, outs.shape[2])
        checks.check_same_device(outs=outs, lses=lses, sink=sink)
        _MERGE.passed(new)
    return AttentionOutput(*_merge_attn_states(outs, lses, sink, impl))


def lse_to_base2(lse: torch.Tensor) -> torch.Tensor:
    """Natural-log lse -> base-2 lse.

    Args:
        lse: any float, any shape.

    Returns:
        The same shape and dtype.
    """
    return lse * math.log2(math.e)


def lse_to_flashmla(lse: torch.Tensor) -> torch.Tensor:
    """This library's lse (-inf for an empty row) -> FlashMLA's (+inf for an empty row).

    Args:
        lse: any float, any shape.

    Returns:
        The same shape and dtype.
    """
    return torch.where(lse == -math.inf, math.inf, lse)


def _check_queries(
    q: torch.Tensor, ragged: Ragged, sink: torch.Tensor | None, dtypes: tuple[torch.dtype, ...] = FLOATS
) -> None:
    checks.check_dtype("q", q, dtypes)
    checks.check_rank("q", q, 3)
    if not 1 <= q.shape[1] <= MAX_HEADS:
        raise ValueError(f"q: got {q.shape[1]} heads, allowed: 1 to {MAX_HEADS}")
    checks.check_unit_stride("q", q)
    _check_ragged("ragged", ragged, q)
    _check_sink(sink, q.shape[1], fake.WIDE.get(q.dtype, torch.float32))
    checks.check_same_device(q=q, sink=sink)


def _check_rows(name: str, kv: torch.Tensor, q: torch.Tensor) -> None:
    checks.check_dtype(name, kv, (q.dtype,))
    checks.check_rank(name, kv, 2, 3)
    shape, meaning = ((None,), "[rows, d_qk of q]") if kv.dim() == 2 else ((None, 1), "[rows, 1, d_qk of q]")
    checks.check_shape(name, kv, (*shape, q.shape[2]), meaning)
    checks.check_unit_stride(name, kv)
    checks.check_same_device(**{"q": q, name: kv})


def _check_ragged(name: str, ragged: Ragged, q: torch.Tensor) -> None:
    if not isinstance(ragged, Ragged):
        raise TypeError(f"{name}: got {type(ragged).__name__}, allowed: a Ragged")
    indices, indptr = f"{name}.indices", f"{name}.indptr"
    checks.check_dtype(indices, ragged.indices, (torch.int32,))
    checks.check_rank(indices, ragged.indices, 1)
    checks.check_unit_stride(indices, ragged.indices)
    checks.check_dtype(indptr, ragged.indptr, (torch.int32,))
    checks.check_bounds(indptr, ragged.indptr, q.shape[0], "[tokens + 1]")
    checks.check_unit_stride(indptr, ragged.indptr)
    checks.check_same_device(**{"q": q, indices: ragged.indices, indptr: ragged.indptr})


def _check_lengths(name: str, lengths: torch.Tensor | None, q: torch.Tensor) -> None:
    if lengths is not None:
        checks.check_dtype(name, lengths, (torch.int32,))
        checks.check_shape(name, lengths, (q.shape[0],), "[tokens]")
        checks.check_unit_stride(name, lengths)
        checks.check_same_device(**{"q": q, name: lengths})


def _check_written(name: str, to: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, q: torch.Tensor) -> None:
    checks.check_dtype(name, to, (dtype,))
    checks.check_shape(name, to, shape, f"{list(shape)}")
    checks.check_same_device(**{"q": q, name: to})
    if not to.is_contiguous():
        raise ValueError(f"{name}: got strides {to.stride()}, allowed: contiguous")


def _check_keys(q: torch.Tensor, cache: torch.Tensor, layout: Layout, prefix: str) -> None:
    if not isinstance(layout, (PlainLayout, LatentFp8Layout, PlanarFp8Layout)):
        raise ValueError(f"{prefix}layout: got {layout!r}, allowed: PlainLayout, LatentFp8Layout, PlanarFp8Layout")
    check_cache(f"{prefix}cache", cache, layout)
    checks.check_same_device(**{"q": q, f"{prefix}cache": cache})


def _check_extra(
    q: torch.Tensor,
    layout: KvLayout,
    extra_cache: torch.Tensor | None,
    extra_ragged: Ragged | None,
    extra_layout: KvLayout | None,
) -> None:
    """All three or none."""
    if extra_cache is None and extra_ragged is None and extra_layout is None:
        return
    if extra_cache is None or extra_ragged is None or extra_layout is None:
        given = {"extra_cache": extra_cache, "extra_ragged": extra_ragged, "extra_layout": extra_layout}
        missing = next(name for name, value in given.items() if value is None)
        raise ValueError(f"{missing}: got None, allowed: all of {', '.join(given)}, or none")
    _check_ragged("extra_ragged", extra_ragged, q)
    _check_keys(q, extra_cache, extra_layout, "extra_")
    if (extra_layout.dim, extra_layout.value_dim) != (layout.dim, layout.value_dim):
        got = f"{extra_layout.name} with dim {extra_layout.dim} and value_dim {extra_layout.value_dim}"
        raise ValueError(f"extra_layout: got {got}, allowed: {layout.dim} and {layout.value_dim} as in {layout.name}")


def _unpacked(
    cache: torch.Tensor | None, ragged: Ragged | None, layout: KvLayout | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, str]:
    """(cache, indices, indptr, name of the layout) of a second cache that was checked."""
    if ragged is None or layout is None:
        return None, None, None, ""
    return cache, ragged.indices, ragged.indptr, layout.name


def _check_sink(sink: torch.Tensor | None, heads: int, dtype: torch.dtype = torch.float32) -> None:
    if sink is None:
        return
    checks.check_dtype("sink", sink, (dtype,))
    checks.check_rank("sink", sink, 1)
    checks.check_unit_stride("sink", sink)
    if sink.shape[0] < heads:
        raise ValueError(f"sink: got {sink.shape[0]} values, allowed: at least the {heads} heads")
