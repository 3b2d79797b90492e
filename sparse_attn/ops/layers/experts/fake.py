"""Fake implementation."""

from sparse_attn.ops.layers.experts.shapes import allocate_sums


def packed_experts(
    x,
    weights,
    ids,
    gate_up,
    gate_up_scales,
    gate_up_layout,
    down,
    down_scales,
    down_layout,
    clamp,
    num_experts,
    activations,
    batch_invariant,
):
    return allocate_sums(x)
