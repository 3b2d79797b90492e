"""Schemas of the KV cache."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.attention.kv_cache import fake

write_kv_cache = define_op(
    __package__,
    "write_kv_cache",
    "(Tensor latent, Tensor rope, Tensor(a!) cache, Tensor slot_mapping, str layout, str impl) -> ()",
    fake.write_kv_cache,
)
gather_kv_cache = define_op(
    __package__,
    "gather_kv_cache",
    "(Tensor cache, Tensor block_table, Tensor kv_indptr, Tensor? starts, SymInt capacity, str layout,"
    " ScalarType dtype, str impl) -> Tensor",
    fake.gather_kv_cache,
)
