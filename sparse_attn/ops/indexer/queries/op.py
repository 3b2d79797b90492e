"""Schema of the indexer query op."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.indexer.queries import debug, fake, reference


def launchers():
    from sparse_attn.ops.indexer.queries import launch

    return launch


indexer_q_rope_quant = define_op(
    "indexer_q_rope_quant",
    "(Tensor q, Tensor weights, Tensor positions, Tensor cos_sin, int start, bool interleaved, bool hadamard, "
    "float weight_scale, str layout, str impl) -> (Tensor, Tensor)",
    fake=fake.indexer_q_rope_quant,
    reference=reference.indexer_q_rope_quant,
    rules=debug.indexer_q_rope_quant,
    launch=lambda: launchers().indexer_q_rope_quant,
)
