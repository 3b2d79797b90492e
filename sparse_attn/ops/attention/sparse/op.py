"""Schemas of sparse attention."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.attention.sparse import dispatch, fake

sparse_attn_prefill = define_op(
    __package__,
    "sparse_attn_prefill",
    "(Tensor q, Tensor kv, Tensor indices, Tensor indptr, float scale, int d_v, Tensor? sink, bool batch_invariant,"
    " str impl) -> (Tensor out, Tensor lse)",
    fake.sparse_attn_prefill,
    dispatch.KERNELS,
)
sparse_attn_decode = define_op(
    __package__,
    "sparse_attn_decode",
    "(Tensor q, Tensor cache, Tensor indices, Tensor indptr, float scale, str layout, Tensor? extra_cache,"
    " Tensor? extra_indices, Tensor? extra_indptr, str extra_layout, Tensor? sink, bool batch_invariant, str impl)"
    " -> (Tensor out, Tensor lse)",
    fake.sparse_attn_decode,
    dispatch.KERNELS,
)
sparse_attn_into = define_op(
    __package__,
    "sparse_attn_into",
    "(Tensor q, Tensor cache, Tensor indices, Tensor indptr, Tensor? lengths, float scale, str layout,"
    " Tensor? extra_cache, Tensor? extra_indices, Tensor? extra_indptr, Tensor? extra_lengths, str extra_layout,"
    " Tensor? sink, bool batch_invariant, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? max_logits, bool inf_lse,"
    " str impl) -> ()",
    fake.sparse_attn_into,
)
merge_attn_states = define_op(
    __package__,
    "merge_attn_states",
    "(Tensor outs, Tensor lses, Tensor? sink, str impl) -> (Tensor out, Tensor lse)",
    fake.merge_attn_states,
)
