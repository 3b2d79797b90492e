"""Schema of the indexer query op."""

from sparse_attn.ops.index_query import fake
from sparse_attn.registration import define_op

indexer_q_rope_quant = define_op(
    __package__,
    "indexer_q_rope_quant",
    "(Tensor q, Tensor weights, Tensor positions, Tensor cos_sin, int start, bool interleaved, bool hadamard, "
    "float weight_scale, str layout, str impl) -> (Tensor, Tensor)",
    fake.indexer_q_rope_quant,
)
