"""Schema of the selection."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.topk.select import dispatch, fake

top_k_per_row = define_op(
    __package__,
    "top_k_per_row",
    "(Tensor logits, Tensor? row_starts, Tensor? row_ends, int k, str impl) -> Tensor",
    fake.top_k_per_row,
    dispatch.KERNELS,
)
