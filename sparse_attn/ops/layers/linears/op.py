"""Schemas of the grouped products. Codes are bytes, e4m3 too; of the layout "plain" they are values."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.layers.linears import debug, dispatch, fake, reference


def launchers():
    from sparse_attn.ops.layers.linears import launch

    return launch


grouped_linear_fp8 = define_op(
    "grouped_linear_fp8",
    "(Tensor rows, Tensor? ends, Tensor codes, Tensor scales, str layout, bool batch_invariant, str impl) -> Tensor",
    fake=fake.grouped_linear,
    reference=reference.grouped_linear_fp8,
    rules=debug.grouped_linear_fp8,
    launch=lambda: launchers().grouped_linear_fp8,
    kernels=dispatch.FP8_KERNELS,
)
grouped_linear = define_op(
    "grouped_linear",
    "(Tensor rows, Tensor? ends, Tensor codes, Tensor? scales, str layout, bool batch_invariant, str impl) -> Tensor",
    fake=fake.grouped_linear,
    reference=reference.grouped_linear,
    rules=debug.grouped_linear,
    launch=lambda: launchers().grouped_linear,
    kernels=dispatch.KERNELS,
)
