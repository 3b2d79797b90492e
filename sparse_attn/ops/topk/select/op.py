"""Schema of the selection."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.topk.select import debug, dispatch, fake, reference


def launchers():
    from sparse_attn.ops.topk.select import launch

    return launch


top_k_per_row = define_op(
    "top_k_per_row",
    "(Tensor logits, Tensor? row_starts, Tensor? row_ends, int k, str impl) -> Tensor",
    fake=fake.top_k_per_row,
    reference=reference.top_k_per_row,
    rules=debug.top_k_per_row,
    launch=lambda: launchers().top_k_per_row,
    kernels=dispatch.KERNELS,
)
