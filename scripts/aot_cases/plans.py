"""Ragged indices and step plans."""

from __future__ import annotations

from collections.abc import Iterator

from aot_cases.form import I64, Case, integers, tensor
from sparse_attn.ops.ragged.lists import launch as ragged
from sparse_attn.ops.ragged.step_plans import launch as step_plan

TOKENS = 128


def cases() -> Iterator[Case]:
    row, table = integers(TOKENS), integers(64, 1024)
    for width, more in ((2048, False), (512, True), (64, True)):
        dense = integers(TOKENS, width)
        yield Case(
            "build_ragged_indices_from_dense", f"{width} wide", ragged.build_ragged_indices_from_dense,
            (dense, row, row, 65536), more,
        )  # fmt: skip
        yield Case(
            "compute_global_topk_ragged_indices_and_indptr", f"{width} wide",
            ragged.compute_global_topk_ragged_indices_and_indptr, (dense, row, table, 64), more,
        )  # fmt: skip
        yield Case("entry_indices", f"{width} wide", ragged.entry_indices, (row, row, table, 64, width), True)
        combined = dense, row, row, row, row, 128, 0, 65536
        yield Case(
            "combine_topk_swa_indices_ragged", f"{width} chosen", ragged.combine_topk_swa_indices_ragged, combined, more
        )
    yield Case("window_indices", "128 wide", ragged.window_indices, (row, row, table, 64, 128))
    everything = None, row, row, row, row, 128, 1024, 65536
    yield Case(
        "combine_topk_swa_indices_ragged", "all entries", ragged.combine_topk_swa_indices_ragged, everything, True
    )
    slots = tensor(TOKENS, dtype=I64)
    yield Case("step_plan", "mixed", step_plan.step_plan, (integers(65), integers(64), slots, 32, 1))
    yield Case("step_plan", "2 tokens", step_plan.step_plan, (integers(65), integers(64), slots, 64, 2), True)
    for ratio, more in ((4, False), (128, True), (1, True)):
        compressed = row, row, table, integers(65), 32, ratio, 64
        yield Case("compressed_plan", f"ratio {ratio}", step_plan.compressed_plan, compressed, more)
