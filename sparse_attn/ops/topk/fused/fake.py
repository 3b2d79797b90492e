"""Fake implementations."""

from sparse_attn.ops.topk.fused.shapes import allocate_decode, allocate_prefill, allocate_slots


def index_topk_prefill(q, weights, k, k_scale, kv_start, kv_end, top_k, flavour, logits_bytes):
    return allocate_prefill(q, top_k)


def index_topk_decode(q, weights, cache, context_lens, block_table, top_k, max_context_len, layout, logits_bytes):
    return allocate_decode(q, top_k)


def index_topk_decode_slots(q, weights, cache, context_lens, block_table, top_k, max_context_len, layout, logits_bytes):
    return allocate_slots(q, top_k)
