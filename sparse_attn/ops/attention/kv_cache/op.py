"""Schemas of the KV cache."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.attention.kv_cache import debug, fake, reference


def launchers():
    from sparse_attn.ops.attention.kv_cache import launch

    return launch


write_kv_cache = define_op(
    "write_kv_cache",
    "(Tensor latent, Tensor rope, Tensor(a!) cache, Tensor slot_mapping, str layout, str impl) -> ()",
    fake=fake.write_kv_cache,
    reference=reference.write_kv_cache,
    rules=debug.write_kv_cache,
    launch=lambda: launchers().write_kv_cache,
)
gather_kv_cache = define_op(
    "gather_kv_cache",
    "(Tensor cache, Tensor block_table, Tensor kv_indptr, Tensor? starts, SymInt capacity, str layout,"
    " ScalarType dtype, str impl) -> Tensor",
    fake=fake.gather_kv_cache,
    reference=reference.gather_kv_cache,
    rules=debug.gather_kv_cache,
    launch=lambda: launchers().gather_kv_cache,
)
