"""Schemas of a rank's steps of a selection."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.topk.ranks import fake

count_digits = define_op(
    __package__,
    "count_digits",
    "(Tensor logits, Tensor? row_starts, Tensor? row_ends, Tensor? sums, Tensor? state, int k, int level, str impl)"
    " -> (Tensor, Tensor)",
    fake.count_digits,
)
count_ties = define_op(
    __package__,
    "count_ties",
    "(Tensor logits, Tensor? row_starts, Tensor? row_ends, Tensor sums, Tensor state, int block_size, str impl)"
    " -> (Tensor, Tensor, Tensor)",
    fake.count_ties,
)
take_winners = define_op(
    __package__,
    "take_winners",
    "(Tensor logits, Tensor? row_starts, Tensor? row_ends, Tensor ties, Tensor above, Tensor state, int k,"
    " int block_size, int rank, str impl) -> Tensor",
    fake.take_winners,
)
pack_candidates = define_op(
    __package__,
    "pack_candidates",
    "(Tensor logits, Tensor columns, Tensor? row_starts, int block_size, str impl) -> Tensor",
    fake.pack_candidates,
)
merge_candidates = define_op(
    __package__,
    "merge_candidates",
    "(Tensor candidates, Tensor columns, int block_size, int rank, str impl) -> Tensor",
    fake.merge_candidates,
)
