"""Fake implementations."""

from sparse_attn.ops.attention.kv_cache.shapes import allocate_rows


def write_kv_cache(latent, rope, cache, slot_mapping, layout):
    return None


def gather_kv_cache(cache, block_table, kv_indptr, starts, capacity, layout, dtype):
    return allocate_rows(cache, capacity, layout, dtype)
