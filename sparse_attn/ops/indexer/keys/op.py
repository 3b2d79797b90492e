"""Schemas of the index cache."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.indexer.keys import fake

indexer_k_quant_and_cache = define_op(
    __package__,
    "indexer_k_quant_and_cache",
    "(Tensor k, Tensor(a!) cache, Tensor slot_mapping, str layout, str impl) -> ()",
    fake.indexer_k_quant_and_cache,
)
gather_indexer_k = define_op(
    __package__,
    "gather_indexer_k",
    "(Tensor cache, Tensor block_table, Tensor kv_indptr, SymInt capacity, str layout, str impl)"
    " -> (Tensor keys, Tensor scales)",
    fake.gather_indexer_k,
)
