"""Schema of the router."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.layers.router import debug, fake, reference


def launchers():
    from sparse_attn.ops.layers.router import launch

    return launch


biased_grouped_topk = define_op(
    "biased_grouped_topk",
    "(Tensor logits, Tensor bias, int top_k, int num_groups, int top_groups, bool renormalise, float routed_scale, "
    "str score, str impl) -> (Tensor, Tensor)",
    fake=fake.biased_grouped_topk,
    reference=reference.biased_grouped_topk,
    rules=debug.biased_grouped_topk,
    launch=lambda: launchers().biased_grouped_topk,
)
