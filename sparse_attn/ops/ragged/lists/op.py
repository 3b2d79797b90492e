"""Schemas of the ragged builders."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.ragged.lists import debug, fake, reference


def launchers():
    from sparse_attn.ops.ragged.lists import launch

    return launch


build_ragged_indices_from_dense = define_op(
    "build_ragged_indices_from_dense",
    "(Tensor indices, Tensor? lengths, Tensor? row_offsets, SymInt num_rows, str impl) -> (Tensor, Tensor)",
    fake=fake.build_ragged_indices_from_dense,
    reference=reference.build_ragged_indices_from_dense,
    rules=debug.build_ragged_indices_from_dense,
    launch=lambda: launchers().build_ragged_indices_from_dense,
)
compute_global_topk_ragged_indices_and_indptr = define_op(
    "compute_global_topk_ragged_indices_and_indptr",
    "(Tensor topk, Tensor request_ids, Tensor block_table, SymInt block_size, str impl) -> (Tensor, Tensor)",
    fake=fake.compute_global_topk_ragged_indices_and_indptr,
    reference=reference.compute_global_topk_ragged_indices_and_indptr,
    rules=debug.compute_global_topk_ragged_indices_and_indptr,
    launch=lambda: launchers().compute_global_topk_ragged_indices_and_indptr,
)
window_indices = define_op(
    "window_indices",
    "(Tensor positions, Tensor request_ids, Tensor block_table, SymInt block_size, int window, str impl)"
    " -> (Tensor, Tensor)",
    fake=fake.window_indices,
    reference=reference.window_indices,
    rules=debug.window_indices,
    launch=lambda: launchers().window_indices,
)
entry_indices = define_op(
    "entry_indices",
    "(Tensor limits, Tensor request_ids, Tensor block_table, SymInt block_size, SymInt max_entries, str impl)"
    " -> (Tensor, Tensor)",
    fake=fake.entry_indices,
    reference=reference.entry_indices,
    rules=debug.entry_indices,
    launch=lambda: launchers().entry_indices,
)
combine_topk_swa_indices_ragged = define_op(
    "combine_topk_swa_indices_ragged",
    "(Tensor? topk, Tensor limits, Tensor positions, Tensor entry_offsets, Tensor window_offsets, int window,"
    " SymInt max_entries, SymInt num_rows, str impl) -> (Tensor, Tensor)",
    fake=fake.combine_topk_swa_indices_ragged,
    reference=reference.combine_topk_swa_indices_ragged,
    rules=debug.combine_topk_swa_indices_ragged,
    launch=lambda: launchers().combine_topk_swa_indices_ragged,
)
