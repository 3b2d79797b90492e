"""Schemas of the hyper-connections."""

from sparse_attn.ops.hyper_connection import fake
from sparse_attn.registration import define_op

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
