"""The compressor: tokens are pooled into entries, each standing for ``ratio`` of them, and entries are cached.

Source: DeepSeek-V4 as transformers 5.17 computes it; the state's form is vLLM 0.25's, keyed by position.
"""

from __future__ import annotations

import torch

from sparse_attn.cache import check_cache
from sparse_attn.framework import checks
from sparse_attn.framework.registration import define_op
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.compressor import fake, reference

NORM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32,)
_GUARD = checks.Guard()


def _launchers():
    from sparse_attn.ops.attention.compressor import launch

    return launch


_compress_and_cache = define_op(
    "compress_and_cache",
    "(Tensor kv, Tensor gate, Tensor position_bias, Tensor norm_weight, Tensor positions, Tensor request_ids,"
    " Tensor(a!) state, Tensor state_table, Tensor(b!) cache, Tensor slot_mapping, Tensor cos_sin, int ratio,"
    " bool overlap, float eps, int rope_start, bool hadamard, str layout, str impl) -> ()",
    fake=fake.compress_and_cache,
    reference=reference.compress_and_cache,
    rules=reference.rules_of_compress_and_cache,
    launch=lambda: _launchers().compress_and_cache,
)


def compress_and_cache(
    kv: torch.Tensor,
    gate: torch.Tensor,
    position_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    positions: torch.Tensor,
    request_ids: torch.Tensor,
    state: torch.Tensor,
    state_table: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    ratio: int,
    overlap: bool,
    eps: float,
    rope_start: int,
    hadamard: bool = False,
    layout: PlanarFp8Layout | IndexFp8Layout | IndexMxfp4Layout | PlainLayout,
    impl: str = "auto",
) -> None:
    """Pool the step's tokens into entries, write complete ones into ``cache``, and keep the tokens in ``state``.

    The token at position p completes entry p // ratio where (p + 1) % ratio == 0. The entry pools the ``ratio`` tokens
    up to p. With ``overlap`` it takes the second halves of their values, and also pools the ``ratio`` tokens before
    them, by the first halves. Per channel: y = sum of softmax(gate) * kv over the pooled tokens. Tokens before position
    0 do not count. Then RMSNorm with norm_weight and ``eps``, rotation at position p + 1 - ratio of the neighbouring
    pairs in [rope_start, rope_start + R) by cos_sin, and with ``hadamard`` the orthonormal transform, all in fp32.
    Mutates ``state`` and ``cache``.

    Args:
        kv: fp32 [tokens, parts * dim], parts 2 with ``overlap``, else 1; dim as ``layout`` says.
        gate: fp32 [tokens, parts * dim].
        position_bias: fp32 [ratio, parts * dim], added to the gate at row position % ratio.
        norm_weight: [dim], any float.
        positions: int32 [tokens]. The rows of a request stand together, their positions rising by one; a row with a
            negative position or a request outside the table is padding and touches nothing.
        request_ids: int32 [tokens].
        state: fp32 [num_blocks, block_size, 2 * parts * dim], rows of [kv | gate + bias]. Position p of request b lies
            in block state_table[b, (p // block_size) % max_blocks], row p % block_size. It is a ring, which holds at
            least the tokens that an entry pools. Rows of this step are taken from kv and gate, earlier ones from the
            state. So a position that is fed again (after a rejected token) replaces what was there. A ring that has to
            survive n rejected tokens is n tokens longer. A block outside the state keeps nothing, and tokens that it
            would have kept do not count.
        state_table: int32 [requests, max_blocks].
        cache: blocks of ``layout``. Quantised layouts take the entry rounded to bf16, and NaN as write_kv_cache or
            indexer_k_quant_and_cache do.
        slot_mapping: int64 [tokens], the slot of the entry that a row completes; a slot outside the cache writes
            nothing.
        cos_sin: fp32 [P, R]; a position outside it: zeros.
        ratio: tokens of an entry.
        overlap: pool the ``ratio`` tokens before, too.
        eps: of RMSNorm.
        rope_start: first rotated value of an entry.
        hadamard: transform entries, as their queries are.
        layout: of ``cache``.
        impl: "auto", "reference" or "triton".

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    tensors = dict(
        kv=kv,
        gate=gate,
        position_bias=position_bias,
        norm_weight=norm_weight,
        positions=positions,
        request_ids=request_ids,
        state=state,
        state_table=state_table,
        cache=cache,
        slot_mapping=slot_mapping,
        cos_sin=cos_sin,
    )
    if new := _GUARD.new(*tensors.values(), ratio, overlap, rope_start, hadamard, layout):
        checks.check_dtype("kv", kv, (torch.float32,))
        checks.check_rank("kv", kv, 2)
        (tokens, width), parts = kv.shape, 2 if overlap else 1
        checks.check_at_least("ratio", ratio, 1)
        if not isinstance(layout, (PlanarFp8Layout, IndexFp8Layout, IndexMxfp4Layout, PlainLayout)):
            raise ValueError(
                f"layout: got {layout!r}, allowed: PlanarFp8Layout, IndexFp8Layout, IndexMxfp4Layout, PlainLayout"
            )
        if isinstance(layout, PlanarFp8Layout) and layout.group & (layout.group - 1):
            raise ValueError(f"layout: got scale groups of {layout.group}, allowed: powers of two")
        check_cache("cache", cache, layout)
        if width != parts * layout.dim:
            raise ValueError(f"kv: got width {width}, allowed: {parts} * {layout.dim}, the parts of a row of the cache")
        for name, value, shape, meaning in (
            ("gate", gate, (tokens, width), "[tokens, parts * dim]"),
            ("position_bias", position_bias, (ratio, width), "[ratio, parts * dim]"),
            ("cos_sin", cos_sin, (None, None), "[positions, rotated width]"),
        ):
            checks.check_dtype(name, value, (torch.float32,))
            checks.check_shape(name, value, shape, meaning)
            checks.check_unit_stride(name, value)
        checks.check_unit_stride("kv", kv)
        checks.check_dtype("norm_weight", norm_weight, NORM_DTYPES)
        checks.check_shape("norm_weight", norm_weight, (layout.dim,), "[dim]")
        checks.check_unit_stride("norm_weight", norm_weight)
        for name, value, dtypes in (
            ("positions", positions, INDEX_DTYPES),
            ("request_ids", request_ids, INDEX_DTYPES),
            ("slot_mapping", slot_mapping, (torch.int64,)),
        ):
            checks.check_dtype(name, value, dtypes)
            checks.check_shape(name, value, (tokens,), "[tokens]")
        checks.check_dtype("state", state, (torch.float32,))
        checks.check_shape("state", state, (None, None, 2 * width), "[num_blocks, block_size, 2 * parts * dim]")
        block = state.shape[1] * state.shape[2]
        wrong = state.stride(0) < block, state.stride(1) != state.shape[2], state.stride(2) != 1
        if block < 1 or any(wrong[dim] and checks.leads(state, dim) for dim in range(3)):
            raise ValueError(
                f"state: got shape {list(state.shape)} and strides {state.stride()}, allowed: contiguous blocks of at "
                "least one row, none over another"
            )
        checks.check_dtype("state_table", state_table, INDEX_DTYPES)
        checks.check_rank("state_table", state_table, 2)
        checks.check_unit_stride("state_table", state_table)
        if state_table.shape[1] * state.shape[1] < parts * ratio:
            raise ValueError(
                f"state_table: got rings of {state_table.shape[1]} * {state.shape[1]} rows, allowed: at least the "
                f"{parts * ratio} that an entry pools"
            )
        rotated = cos_sin.shape[1]
        if cos_sin.shape[0] < 1 or rotated < 2:
            raise ValueError(f"cos_sin: got shape {list(cos_sin.shape)}, allowed: [at least 1, at least 2]")
        if rotated % 2 or rope_start < 0 or rope_start % 2 or rope_start + rotated > layout.dim:
            inside = f"both even, inside the {layout.dim} of an entry"
            raise ValueError(f"rope_start: got {rope_start} for {rotated} rotated values, allowed: {inside}")
        if hadamard and layout.dim & (layout.dim - 1):
            raise ValueError(f"hadamard: got an entry of {layout.dim} values, allowed: powers of two")
        checks.check_same_device(**tensors)
        _GUARD.passed(new)
    _compress_and_cache(*tensors.values(), ratio, overlap, eps, rope_start, hadamard, layout.name, impl)
