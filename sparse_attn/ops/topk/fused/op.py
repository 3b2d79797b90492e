"""Schemas of the fused score and select."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.topk.fused import fake
from sparse_attn.ops.topk.select.dispatch import KERNELS

index_topk_prefill = define_op(
    __package__,
    "index_topk_prefill",
    "(Tensor q, Tensor weights, Tensor k, Tensor? k_scale, Tensor kv_start, Tensor kv_end, int top_k, str flavour, "
    "int logits_bytes, str impl) -> Tensor",
    fake.index_topk_prefill,
    KERNELS,
)
index_topk_decode = define_op(
    __package__,
    "index_topk_decode",
    "(Tensor q, Tensor weights, Tensor cache, Tensor context_lens, Tensor block_table, int top_k, "
    "SymInt max_context_len, str layout, int logits_bytes, str impl) -> Tensor",
    fake.index_topk_decode,
    KERNELS,
)
index_topk_decode_slots = define_op(
    __package__,
    "index_topk_decode_slots",
    "(Tensor q, Tensor weights, Tensor cache, Tensor context_lens, Tensor block_table, int top_k, "
    "SymInt max_context_len, str layout, int logits_bytes, str impl) -> (Tensor, Tensor)",
    fake.index_topk_decode_slots,
    KERNELS,
)
