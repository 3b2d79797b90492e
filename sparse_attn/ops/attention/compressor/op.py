"""Schema of the compressor."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.attention.compressor import debug, fake, reference


def launchers():
    from sparse_attn.ops.attention.compressor import launch

    return launch


compress_and_cache = define_op(
    "compress_and_cache",
    "(Tensor kv, Tensor gate, Tensor position_bias, Tensor norm_weight, Tensor positions, Tensor request_ids,"
    " Tensor(a!) state, Tensor state_table, Tensor(b!) cache, Tensor slot_mapping, Tensor cos_sin, int ratio,"
    " bool overlap, float eps, int rope_start, bool hadamard, str layout, str impl) -> ()",
    fake=fake.compress_and_cache,
    reference=reference.compress_and_cache,
    rules=debug.compress_and_cache,
    launch=lambda: launchers().compress_and_cache,
)
