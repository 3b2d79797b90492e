"""Schemas of a rank's steps of a selection."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.topk.ranks import debug, fake, reference


def launchers():
    from sparse_attn.ops.topk.ranks import launch

    return launch


count_digits = define_op(
    "count_digits",
    "(Tensor logits, Tensor? row_starts, Tensor? row_ends, Tensor? sums, Tensor? state, int k, int level, str impl)"
    " -> (Tensor, Tensor)",
    fake=fake.count_digits,
    reference=reference.count_digits,
    rules=debug.count_digits,
    launch=lambda: launchers().count_digits,
)
count_ties = define_op(
    "count_ties",
    "(Tensor logits, Tensor? row_starts, Tensor? row_ends, Tensor sums, Tensor state, int block_size, str impl)"
    " -> (Tensor, Tensor, Tensor)",
    fake=fake.count_ties,
    reference=reference.count_ties,
    rules=debug.count_ties,
    launch=lambda: launchers().count_ties,
)
take_winners = define_op(
    "take_winners",
    "(Tensor logits, Tensor? row_starts, Tensor? row_ends, Tensor ties, Tensor above, Tensor state, int k,"
    " int block_size, int rank, str impl) -> Tensor",
    fake=fake.take_winners,
    reference=reference.take_winners,
    rules=debug.take_winners,
    launch=lambda: launchers().take_winners,
)
pack_candidates = define_op(
    "pack_candidates",
    "(Tensor logits, Tensor columns, Tensor? row_starts, int block_size, str impl) -> Tensor",
    fake=fake.pack_candidates,
    reference=reference.pack_candidates,
    rules=debug.pack_candidates,
    launch=lambda: launchers().pack_candidates,
)
merge_candidates = define_op(
    "merge_candidates",
    "(Tensor candidates, Tensor columns, int block_size, int rank, str impl) -> Tensor",
    fake=fake.merge_candidates,
    reference=reference.merge_candidates,
    rules=debug.merge_candidates,
    launch=lambda: launchers().merge_candidates,
)
