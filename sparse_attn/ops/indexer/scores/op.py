"""Schemas of the index scores."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.indexer.scores import dispatch, fake

mqa_logits = define_op(
    __package__,
    "mqa_logits",
    "(Tensor q, Tensor k, Tensor? k_scale, Tensor weights, Tensor kv_start, Tensor kv_end, str flavour, str impl)"
    " -> Tensor",
    fake.mqa_logits,
    dispatch.PREFILL_KERNELS,
)
paged_mqa_logits = define_op(
    __package__,
    "paged_mqa_logits",
    "(Tensor q, Tensor cache, Tensor weights, Tensor context_lens, Tensor block_table, SymInt max_context_len, "
    "str layout, str impl) -> Tensor",
    fake.paged_mqa_logits,
    dispatch.PAGED_KERNELS,
)
