"""Fake implementation."""

from sparse_attn.ops.indexer.queries.shapes import allocate_query


def indexer_q_rope_quant(
    q, weights, positions, cos_sin, start, interleaved, hadamard, weight_scale, layout
):  # fmt: skip
    return allocate_query(q, layout)
