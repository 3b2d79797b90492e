"""The paged cache of keys and values: write, and gather for prefill.

Layouts: LatentFp8Layout (fp8 latent, fp32 group scales and bf16 rope side by side; 656 bytes at 512 + 64),
PlanarFp8Layout (fp8 and bf16 values side by side, a block's ue8m0 scales behind them; 584 bytes at 448 + 64) and
PlainLayout. Byte positions are in sparse_attn.layout.
"""

from __future__ import annotations

import torch

from sparse_attn.cache import check_cache, check_gathering, check_slot_mapping
from sparse_attn.framework import checks
from sparse_attn.framework.registration import define_op
from sparse_attn.layout import LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.kv_cache import fake, reference

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_WRITE, _GATHER = checks.Guard(), checks.Guard()


def _launchers():
    from sparse_attn.ops.attention.kv_cache import launch

    return launch


_write_kv_cache = define_op(
    "write_kv_cache",
    "(Tensor latent, Tensor rope, Tensor(a!) cache, Tensor slot_mapping, str layout, str impl) -> ()",
    fake=fake.write_kv_cache,
    reference=reference.write_kv_cache,
    rules=reference.rules_of_write_kv_cache,
    launch=lambda: _launchers().write_kv_cache,
)
_gather_kv_cache = define_op(
    "gather_kv_cache",
    "(Tensor cache, Tensor block_table, Tensor kv_indptr, Tensor? starts, SymInt capacity, str layout,"
    " ScalarType dtype, str impl) -> Tensor",
    fake=fake.gather_kv_cache,
    reference=reference.gather_kv_cache,
    rules=reference.rules_of_gather_kv_cache,
    launch=lambda: _launchers().gather_kv_cache,
)


def write_kv_cache(
    latent: torch.Tensor,
    rope: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: LatentFp8Layout | PlanarFp8Layout | PlainLayout,
    *,
    impl: str = "auto",
) -> None:
    """Write latents and rotated keys into ``cache``, quantised as ``layout`` says.

    fp8: scale = max(amax, floor) / FP8_MAX per group of latent values, as it is ("raw") or rounded up to a power of two
    ("pow2"); the rope part is stored as bf16. A planar layout takes the latent rounded to bf16. floor:
    ``layout.amax_floor``, by which a latent's scale is at least its scale floor; 1e-4 for planar layouts. NaN and
    infinities become the flavour's NaN and change no other value of the group. Elsewhere any NaN is written as the one
    of all bits but the sign.

    Args:
        latent: bf16, fp16 or fp32 [tokens, layout.latent].
        rope: same dtype [tokens, layout.rope], already rotated.
        cache: blocks of ``layout``, written in place; block stride free, and the row stride of a layout that is not
            planar.
        slot_mapping: int64 or int32 [at most tokens]; a negative slot, or one beyond the cache, writes nothing. Tokens
            beyond slot_mapping are ignored. Where two tokens have one slot, it is undefined which one is written.
        layout: of ``cache``.
        impl: "auto", "reference" or "triton".

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _WRITE.new(latent, rope, cache, slot_mapping, layout):
        _check_layout(layout)
        checks.check_dtype("latent", latent, FLOATS)
        checks.check_shape("latent", latent, (None, layout.latent), "[tokens, layout.latent]")
        checks.check_unit_stride("latent", latent)
        checks.check_dtype("rope", rope, (latent.dtype,))
        checks.check_shape("rope", rope, (latent.shape[0], layout.rope), "[tokens, layout.rope]")
        checks.check_unit_stride("rope", rope)
        check_cache("cache", cache, layout, padded_rows=True)
        check_slot_mapping(slot_mapping, "latent", latent)
        checks.check_same_device(latent=latent, rope=rope, cache=cache, slot_mapping=slot_mapping)
        _WRITE.passed(new)
    _write_kv_cache(latent, rope, cache, slot_mapping, layout.name, impl)


def gather_kv_cache(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_indptr: torch.Tensor,
    capacity: int,
    layout: LatentFp8Layout | PlanarFp8Layout | PlainLayout,
    *,
    starts: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    impl: str = "auto",
) -> torch.Tensor:
    """Collect and dequantise the rows of some requests into one matrix.

    Args:
        cache: blocks of ``layout``.
        block_table: int32 [requests, max_blocks].
        kv_indptr: int32 [requests + 1], rows [kv_indptr[b], kv_indptr[b + 1]) are the first tokens of request b.
        capacity: rows of the result, the host's bound on kv_indptr[-1].
        layout: of ``cache``.
        starts: int32 [requests] or None. With starts, the rows are a request's tokens from position starts[b] on, and
            the table is a ring's: position p lies in column (p // block_size) % max_blocks.
        dtype: of the result: bf16, fp16 or fp32.
        impl: "auto", "reference" or "triton".

    Returns:
        [capacity, layout.latent + layout.rope] of ``dtype``. Rows beyond kv_indptr[-1], tokens whose block is outside
        the table or the cache, and positions outside int32 come out zero.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _GATHER.new(cache, block_table, kv_indptr, capacity, layout, starts, dtype):
        _check_layout(layout)
        check_gathering(cache, block_table, kv_indptr, capacity, layout)
        if starts is not None:
            checks.check_dtype("starts", starts, (torch.int32,))
            checks.check_shape("starts", starts, (block_table.shape[0],), "[requests]")
            checks.check_unit_stride("starts", starts)
        checks.check_choice("dtype", dtype, FLOATS)
        checks.check_same_device(cache=cache, block_table=block_table, kv_indptr=kv_indptr, starts=starts)
        _GATHER.passed(new)
    return _gather_kv_cache(cache, block_table, kv_indptr, starts, capacity, layout.name, dtype, impl)


def _check_layout(layout: object) -> None:
    if not isinstance(layout, (LatentFp8Layout, PlanarFp8Layout, PlainLayout)):
        raise ValueError(f"layout: got {layout!r}, allowed: LatentFp8Layout, PlanarFp8Layout, PlainLayout")
