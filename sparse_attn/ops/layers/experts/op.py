"""Schema of the experts. Codes are bytes, e4m3 too."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.layers.experts import debug, dispatch, fake, reference


def launchers():
    from sparse_attn.ops.layers.experts import launch

    return launch


packed_experts = define_op(
    "packed_experts",
    "(Tensor x, Tensor weights, Tensor ids, Tensor gate_up, Tensor gate_up_scales, str gate_up_layout, Tensor down, "
    "Tensor down_scales, str down_layout, float? clamp, int num_experts, str activations, bool batch_invariant, "
    "str impl) -> Tensor",
    fake=fake.packed_experts,
    reference=reference.packed_experts,
    rules=debug.packed_experts,
    launch=lambda: launchers().packed_experts,
    kernels=dispatch.KERNELS,
)
