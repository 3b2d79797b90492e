"""Schemas of the fused score and select."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.topk.fused import debug, fake, reference
from sparse_attn.ops.topk.select.dispatch import KERNELS


def launchers():
    from sparse_attn.ops.topk.fused import launch

    return launch


index_topk_prefill = define_op(
    "index_topk_prefill",
    "(Tensor q, Tensor weights, Tensor k, Tensor? k_scale, Tensor kv_start, Tensor kv_end, int top_k, str flavour, "
    "int logits_bytes, str impl) -> Tensor",
    fake=fake.index_topk_prefill,
    reference=reference.index_topk_prefill,
    rules=debug.index_topk_prefill,
    launch=lambda: launchers().index_topk_prefill,
    kernels=KERNELS,
)
index_topk_decode = define_op(
    "index_topk_decode",
    "(Tensor q, Tensor weights, Tensor cache, Tensor context_lens, Tensor block_table, int top_k, "
    "SymInt max_context_len, str layout, int logits_bytes, str impl) -> Tensor",
    fake=fake.index_topk_decode,
    reference=reference.index_topk_decode,
    rules=debug.index_topk_decode,
    launch=lambda: launchers().index_topk_decode,
    kernels=KERNELS,
)
index_topk_decode_slots = define_op(
    "index_topk_decode_slots",
    "(Tensor q, Tensor weights, Tensor cache, Tensor context_lens, Tensor block_table, int top_k, "
    "SymInt max_context_len, str layout, int logits_bytes, str impl) -> (Tensor, Tensor)",
    fake=fake.index_topk_decode_slots,
    reference=reference.index_topk_decode_slots,
    rules=debug.index_topk_decode_slots,
    launch=lambda: launchers().index_topk_decode_slots,
    kernels=KERNELS,
)
