"""Schemas of the ragged builders."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.ragged.lists import fake

build_ragged_indices_from_dense = define_op(
    __package__,
    "build_ragged_indices_from_dense",
    "(Tensor indices, Tensor? lengths, Tensor? row_offsets, SymInt num_rows, str impl) -> (Tensor, Tensor)",
    fake.build_ragged_indices_from_dense,
)
compute_global_topk_ragged_indices_and_indptr = define_op(
    __package__,
    "compute_global_topk_ragged_indices_and_indptr",
    "(Tensor topk, Tensor request_ids, Tensor block_table, SymInt block_size, str impl) -> (Tensor, Tensor)",
    fake.compute_global_topk_ragged_indices_and_indptr,
)
window_indices = define_op(
    __package__,
    "window_indices",
    "(Tensor positions, Tensor request_ids, Tensor block_table, SymInt block_size, int window, str impl)"
    " -> (Tensor, Tensor)",
    fake.window_indices,
)
entry_indices = define_op(
    __package__,
    "entry_indices",
    "(Tensor limits, Tensor request_ids, Tensor block_table, SymInt block_size, SymInt max_entries, str impl)"
    " -> (Tensor, Tensor)",
    fake.entry_indices,
)
combine_topk_swa_indices_ragged = define_op(
    __package__,
    "combine_topk_swa_indices_ragged",
    "(Tensor? topk, Tensor limits, Tensor positions, Tensor entry_offsets, Tensor window_offsets, int window,"
    " SymInt max_entries, SymInt num_rows, str impl) -> (Tensor, Tensor)",
    fake.combine_topk_swa_indices_ragged,
)
