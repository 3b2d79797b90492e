"""Schemas of the hyper-connections."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.layers.hyper_connection import debug, fake, reference


def launchers():
    from sparse_attn.ops.layers.hyper_connection import launch

    return launch


hyper_mix = define_op(
    "hyper_mix",
    "(Tensor streams, Tensor raw, Tensor base, Tensor scale, int iterations, float eps, float norm_eps, str impl)"
    " -> (Tensor collapsed, Tensor post, Tensor comb)",
    fake=fake.hyper_mix,
    reference=reference.hyper_mix,
    rules=debug.hyper_mix,
    launch=lambda: launchers().hyper_mix,
)
hyper_merge = define_op(
    "hyper_merge",
    "(Tensor out, Tensor streams, Tensor post, Tensor comb, str impl) -> Tensor",
    fake=fake.hyper_merge,
    reference=reference.hyper_merge,
    rules=debug.hyper_merge,
    launch=lambda: launchers().hyper_merge,
)
