"""Schemas of step plans."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.ragged.step_plans import debug, fake, reference


def launchers():
    from sparse_attn.ops.ragged.step_plans import launch

    return launch


step_plan = define_op(
    "step_plan",
    "(Tensor query_start_loc, Tensor seq_lens, Tensor slot_mapping, SymInt num_decodes, SymInt next_n, str impl)"
    " -> (Tensor request_ids, Tensor positions, Tensor limits, Tensor slots, Tensor kv_indptr, Tensor kv_start, "
    "Tensor kv_end)",
    fake=fake.step_plan,
    reference=reference.step_plan,
    rules=debug.step_plan,
    launch=lambda: launchers().step_plan,
)
compressed_plan = define_op(
    "compressed_plan",
    "(Tensor request_ids, Tensor positions, Tensor block_table, Tensor kv_indptr, SymInt decode_rows, int ratio,"
    " SymInt block_size, str impl) -> (Tensor limits, Tensor slots, Tensor kv_indptr, Tensor kv_start, Tensor kv_end)",
    fake=fake.compressed_plan,
    reference=reference.compressed_plan,
    rules=debug.compressed_plan,
    launch=lambda: launchers().compressed_plan,
)
