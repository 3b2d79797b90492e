"""Fake implementations."""

from sparse_attn.ops.indexer.scores.shapes import allocate_logits


def mqa_logits(q, k, k_scale, weights, kv_start, kv_end, flavour):
    return allocate_logits(q.shape[0], k.shape[0], q)


def paged_mqa_logits(q, cache, weights, context_lens, block_table, max_context_len, layout):
    return allocate_logits(q.shape[0] * q.shape[1], max_context_len, q)
