"""Schema of the router."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.layers.router import fake

biased_grouped_topk = define_op(
    __package__,
    "biased_grouped_topk",
    "(Tensor logits, Tensor bias, int top_k, int num_groups, int top_groups, bool renormalise, float routed_scale, "
    "str score, str impl) -> (Tensor, Tensor)",
    fake.biased_grouped_topk,
)
