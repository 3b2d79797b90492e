"""Schemas of sparse attention."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.attention.sparse import debug, dispatch, fake, reference


def launchers():
    from sparse_attn.ops.attention.sparse import launch

    return launch


sparse_attn_prefill = define_op(
    "sparse_attn_prefill",
    "(Tensor q, Tensor kv, Tensor indices, Tensor indptr, float scale, int d_v, Tensor? sink, bool batch_invariant,"
    " str impl) -> (Tensor out, Tensor lse)",
    fake=fake.sparse_attn_prefill,
    reference=reference.sparse_attn_prefill,
    rules=debug.sparse_attn_prefill,
    launch=lambda: launchers().sparse_attn_prefill,
    kernels=dispatch.KERNELS,
)
sparse_attn_decode = define_op(
    "sparse_attn_decode",
    "(Tensor q, Tensor cache, Tensor indices, Tensor indptr, float scale, str layout, Tensor? extra_cache,"
    " Tensor? extra_indices, Tensor? extra_indptr, str extra_layout, Tensor? sink, bool batch_invariant, str impl)"
    " -> (Tensor out, Tensor lse)",
    fake=fake.sparse_attn_decode,
    reference=reference.sparse_attn_decode,
    rules=debug.sparse_attn_decode,
    launch=lambda: launchers().sparse_attn_decode,
    kernels=dispatch.KERNELS,
)
sparse_attn_into = define_op(
    "sparse_attn_into",
    "(Tensor q, Tensor cache, Tensor indices, Tensor indptr, Tensor? lengths, float scale, str layout,"
    " Tensor? extra_cache, Tensor? extra_indices, Tensor? extra_indptr, Tensor? extra_lengths, str extra_layout,"
    " Tensor? sink, bool batch_invariant, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? max_logits, bool inf_lse,"
    " str impl) -> ()",
    fake=fake.sparse_attn_into,
    reference=reference.sparse_attn_into,
    rules=debug.sparse_attn_into,
    launch=lambda: launchers().sparse_attn_into,
)
merge_attn_states = define_op(
    "merge_attn_states",
    "(Tensor outs, Tensor lses, Tensor? sink, str impl) -> (Tensor out, Tensor lse)",
    fake=fake.merge_attn_states,
    reference=reference.merge_attn_states,
    rules=debug.merge_attn_states,
    launch=lambda: launchers().merge_attn_states,
)
