"""Schemas of the index scores."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.indexer.scores import debug, dispatch, fake, reference


def launchers():
    from sparse_attn.ops.indexer.scores import launch

    return launch


mqa_logits = define_op(
    "mqa_logits",
    "(Tensor q, Tensor k, Tensor? k_scale, Tensor weights, Tensor kv_start, Tensor kv_end, str flavour, str impl)"
    " -> Tensor",
    fake=fake.mqa_logits,
    reference=reference.mqa_logits,
    rules=debug.mqa_logits,
    launch=lambda: launchers().mqa_logits,
    kernels=dispatch.PREFILL_KERNELS,
)
paged_mqa_logits = define_op(
    "paged_mqa_logits",
    "(Tensor q, Tensor cache, Tensor weights, Tensor context_lens, Tensor block_table, SymInt max_context_len, "
    "str layout, str impl) -> Tensor",
    fake=fake.paged_mqa_logits,
    reference=reference.paged_mqa_logits,
    rules=debug.paged_mqa_logits,
    launch=lambda: launchers().paged_mqa_logits,
    kernels=dispatch.PAGED_KERNELS,
)
