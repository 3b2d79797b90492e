"""Fake implementations."""

from sparse_attn.ops.indexer.keys.shapes import allocate_keys


def indexer_k_quant_and_cache(k, cache, slot_mapping, layout):
    return None


def gather_indexer_k(cache, block_table, kv_indptr, capacity, layout):
    return allocate_keys(cache, capacity, layout)
