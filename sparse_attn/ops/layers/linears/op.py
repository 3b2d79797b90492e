"""Schemas of the grouped products. Codes are bytes, e4m3 too; of the layout "plain" they are values."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.layers.linears import dispatch, fake

grouped_linear_fp8 = define_op(
    __package__,
    "grouped_linear_fp8",
    "(Tensor rows, Tensor? ends, Tensor codes, Tensor scales, str layout, bool batch_invariant, str impl) -> Tensor",
    fake.grouped_linear,
    dispatch.FP8_KERNELS,
)
grouped_linear = define_op(
    __package__,
    "grouped_linear",
    "(Tensor rows, Tensor? ends, Tensor codes, Tensor? scales, str layout, bool batch_invariant, str impl) -> Tensor",
    fake.grouped_linear,
    dispatch.KERNELS,
)
