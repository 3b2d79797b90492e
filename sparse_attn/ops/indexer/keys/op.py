"""Schemas of the index cache."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.indexer.keys import debug, fake, reference


def launchers():
    from sparse_attn.ops.indexer.keys import launch

    return launch


indexer_k_quant_and_cache = define_op(
    "indexer_k_quant_and_cache",
    "(Tensor k, Tensor(a!) cache, Tensor slot_mapping, str layout, str impl) -> ()",
    fake=fake.indexer_k_quant_and_cache,
    reference=reference.indexer_k_quant_and_cache,
    rules=debug.indexer_k_quant_and_cache,
    launch=lambda: launchers().indexer_k_quant_and_cache,
)
gather_indexer_k = define_op(
    "gather_indexer_k",
    "(Tensor cache, Tensor block_table, Tensor kv_indptr, SymInt capacity, str layout, str impl)"
    " -> (Tensor keys, Tensor scales)",
    fake=fake.gather_indexer_k,
    reference=reference.gather_indexer_k,
    rules=debug.gather_indexer_k,
    launch=lambda: launchers().gather_indexer_k,
)
