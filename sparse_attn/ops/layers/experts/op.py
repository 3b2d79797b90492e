"""Schema of the experts. Codes are bytes, e4m3 too."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.layers.experts import dispatch, fake

packed_experts = define_op(
    __package__,
    "packed_experts",
    "(Tensor x, Tensor weights, Tensor ids, Tensor gate_up, Tensor gate_up_scales, str gate_up_layout, Tensor down, "
    "Tensor down_scales, str down_layout, float? clamp, int num_experts, str activations, bool batch_invariant, "
    "str impl) -> Tensor",
    fake.packed_experts,
    dispatch.KERNELS,
)
