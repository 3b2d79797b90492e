"""Schemas of the hyper-connections."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.layers.hyper_connection import fake

hyper_mix = define_op(
    __package__,
    "hyper_mix",
    "(Tensor streams, Tensor raw, Tensor base, Tensor scale, int iterations, float eps, float norm_eps, str impl)"
    " -> (Tensor collapsed, Tensor post, Tensor comb)",
    fake.hyper_mix,
)
hyper_merge = define_op(
    __package__,
    "hyper_merge",
    "(Tensor out, Tensor streams, Tensor post, Tensor comb, str impl) -> Tensor",
    fake.hyper_merge,
)
