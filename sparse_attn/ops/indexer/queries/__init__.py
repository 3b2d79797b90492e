"""Indexer queries: rotate, optionally Hadamard-transform, quantise, and fold the scale into the head weights."""

from __future__ import annotations

import torch

from sparse_attn.framework import checks
from sparse_attn.framework.registration import define_op
from sparse_attn.layout import IndexFp8Layout, IndexLayout, IndexMxfp4Layout, PlainLayout
from sparse_attn.ops.indexer.queries import fake, reference
from sparse_attn.ops.indexer.queries.reference import hadamard_transform
from sparse_attn.ops.layers.rope.reference import check_rope
from sparse_attn.types import QuantisedQuery

__all__ = ["hadamard_transform", "indexer_q_rope_quant"]

VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_GUARD = checks.Guard()


def _launchers():
    from sparse_attn.ops.indexer.queries import launch

    return launch


_indexer_q_rope_quant = define_op(
    "indexer_q_rope_quant",
    "(Tensor q, Tensor weights, Tensor positions, Tensor cos_sin, int start, bool interleaved, bool hadamard, "
    "float weight_scale, str layout, str impl) -> (Tensor, Tensor)",
    fake=fake.indexer_q_rope_quant,
    reference=reference.indexer_q_rope_quant,
    rules=reference.rules_of_indexer_q_rope_quant,
    launch=lambda: _launchers().indexer_q_rope_quant,
)


def indexer_q_rope_quant(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    start: int,
    interleaved: bool,
    hadamard: bool = False,
    weight_scale: float,
    layout: IndexLayout,
    impl: str = "auto",
) -> QuantisedQuery:
    """Make the queries that the index logits take, in the form of the key cache's ``layout``.

    The rotated vector is rounded to q's dtype, and so is the transformed one. Under an IndexFp8Layout each vector has
    one scale, from its largest magnitude, as keys have. Under a PlainLayout the values are rounded to its dtype and the
    scale is 1. weights_out = (float(weights) * weight_scale) * scale. Under an IndexMxfp4Layout a head has a scale for
    every 32 values. They stand beside the codes, not in the weights: a token's query is a block of the layout, heads in
    place of tokens. Every implementation gives the same bits; NaN and infinities become NaN as in the keys' cache.

    Source: vLLM 0.25's fused indexer query op and DeepSeek's rotate_activation.

    Args:
        q: bf16, fp16 or fp32 [tokens, index_heads, dim], any strides.
        weights: bf16, fp16 or fp32 [tokens, index_heads], any strides.
        positions: int32 or int64 [tokens]; a row whose position lies outside the table is padding: query 0, weights 0.
        cos_sin: fp32 [positions, R].
        start: the slice [start, start + R) is rotated.
        interleaved: in pairs (2i, 2i + 1), else (i, i + R / 2).
        hadamard: transform the whole vector afterwards (dim a power of two); the keys must be treated alike.
        weight_scale: what weights are multiplied by.
        layout: of the key cache.
        impl: "auto", "reference" or "triton".

    Returns:
        QuantisedQuery(query [tokens, index_heads, dim] uint8 codes or layout.dtype, weights fp32 [tokens,
        index_heads]); under MXFP4 query uint8 [tokens, index_heads, layout.row], whose last dimension is a size, not a
        record.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or devices, a slice that does not fit, or a layout of another dim.
    """
    if new := _GUARD.new(q, weights, positions, cos_sin, start, hadamard, layout):
        checks.check_dtype("q", q, VALUE_DTYPES)
        checks.check_rank("q", q, 3)
        tokens, heads, dim = q.shape
        checks.check_dtype("weights", weights, VALUE_DTYPES)
        checks.check_shape("weights", weights, (tokens, heads), "[tokens, index_heads]")
        checks.check_same_device(q=q, weights=weights)
        check_rope("q", q, positions, cos_sin, start)
        if not isinstance(layout, (IndexFp8Layout, IndexMxfp4Layout, PlainLayout)):
            raise TypeError(
                f"layout: got {type(layout).__name__}, allowed: IndexFp8Layout, IndexMxfp4Layout, PlainLayout"
            )
        if layout.dim != dim:
            raise ValueError(f"layout: got dim {layout.dim} ({layout.name}), allowed: {dim}, that of q")
        if hadamard and dim & (dim - 1):
            raise ValueError(f"hadamard: got True with dim {dim}, allowed: powers of two")
        _GUARD.passed(new)
    return QuantisedQuery(
        *_indexer_q_rope_quant(
            q, weights, positions, cos_sin, start, interleaved, hadamard, weight_scale, layout.name, impl
        )
    )
