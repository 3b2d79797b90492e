"""Schema of the indexer query op."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.indexer.queries import fake

indexer_q_rope_quant = define_op(
    __package__,
    "indexer_q_rope_quant",
    "(Tensor q, Tensor weights, Tensor positions, Tensor cos_sin, int start, bool interleaved, bool hadamard, "
    "float weight_scale, str layout, str impl) -> (Tensor, Tensor)",
    fake.indexer_q_rope_quant,
)
