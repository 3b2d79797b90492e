"""Ragged (CSR) index lists at static capacity, built in one launch and without a host sync.

Row t of the result is ``indices[indptr[t]:indptr[t + 1]]``; the tail of ``indices`` beyond ``indptr[-1]`` is -1. Rows
are compacted by mask: an interior -1, or an index that points nowhere, takes no place and loses nothing behind it.
"""

from __future__ import annotations

import torch

from sparse_attn.framework import checks
from sparse_attn.framework.registration import define_op
from sparse_attn.ops.ragged.lists import fake, reference
from sparse_attn.ops.ragged.lists.reference import MOST_ROWS
from sparse_attn.types import Ragged

INDEX_DTYPES = (torch.int32,)
_DENSE, _GLOBAL, _WINDOW, _ENTRIES, _COMBINED = (
    checks.Guard(),
    checks.Guard(),
    checks.Guard(),
    checks.Guard(),
    checks.Guard(),
)


def _launchers():
    from sparse_attn.ops.ragged.lists import launch

    return launch


_build_ragged_indices_from_dense = define_op(
    "build_ragged_indices_from_dense",
    "(Tensor indices, Tensor? lengths, Tensor? row_offsets, SymInt num_rows, str impl) -> (Tensor, Tensor)",
    fake=fake.build_ragged_indices_from_dense,
    reference=reference.build_ragged_indices_from_dense,
    rules=reference.rules_of_build_ragged_indices_from_dense,
    launch=lambda: _launchers().build_ragged_indices_from_dense,
)
_compute_global_topk_ragged_indices_and_indptr = define_op(
    "compute_global_topk_ragged_indices_and_indptr",
    "(Tensor topk, Tensor request_ids, Tensor block_table, SymInt block_size, str impl) -> (Tensor, Tensor)",
    fake=fake.compute_global_topk_ragged_indices_and_indptr,
    reference=reference.compute_global_topk_ragged_indices_and_indptr,
    rules=reference.rules_of_compute_global_topk_ragged_indices_and_indptr,
    launch=lambda: _launchers().compute_global_topk_ragged_indices_and_indptr,
)
_window_indices = define_op(
    "window_indices",
    "(Tensor positions, Tensor request_ids, Tensor block_table, SymInt block_size, int window, str impl)"
    " -> (Tensor, Tensor)",
    fake=fake.window_indices,
    reference=reference.window_indices,
    rules=reference.rules_of_window_indices,
    launch=lambda: _launchers().window_indices,
)
_entry_indices = define_op(
    "entry_indices",
    "(Tensor limits, Tensor request_ids, Tensor block_table, SymInt block_size, SymInt max_entries, str impl)"
    " -> (Tensor, Tensor)",
    fake=fake.entry_indices,
    reference=reference.entry_indices,
    rules=reference.rules_of_entry_indices,
    launch=lambda: _launchers().entry_indices,
)
_combine_topk_swa_indices_ragged = define_op(
    "combine_topk_swa_indices_ragged",
    "(Tensor? topk, Tensor limits, Tensor positions, Tensor entry_offsets, Tensor window_offsets, int window,"
    " SymInt max_entries, SymInt num_rows, str impl) -> (Tensor, Tensor)",
    fake=fake.combine_topk_swa_indices_ragged,
    reference=reference.combine_topk_swa_indices_ragged,
    rules=reference.rules_of_combine_topk_swa_indices_ragged,
    launch=lambda: _launchers().combine_topk_swa_indices_ragged,
)


def build_ragged_indices_from_dense(
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    num_rows: int | None = None,
    row_offsets: torch.Tensor | None = None,
    impl: str = "auto",
) -> Ragged:
    """Pack the valid entries of dense index rows.

    Args:
        indices: int32 [tokens, width], -1 (or any negative value) for none.
        lengths: int32 [tokens], only the first ``lengths[t]`` entries of row t are looked at, clamped to [0, width];
            None looks at all.
        num_rows: entries outside [0, num_rows) after the offset are dropped; None keeps every non-negative one.
        row_offsets: int32 [tokens], added to every valid entry of a row.
        impl: "auto", "reference" or "triton".

    Returns:
        Ragged(indices int32 [tokens * width], indptr int32 [tokens + 1]).

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _DENSE.new(indices, lengths, num_rows, row_offsets):
        checks.check_dtype("indices", indices, INDEX_DTYPES)
        checks.check_rank("indices", indices, 2)
        tokens = indices.shape[0]
        for name, value in (("lengths", lengths), ("row_offsets", row_offsets)):
            if value is not None:
                checks.check_dtype(name, value, INDEX_DTYPES)
                checks.check_shape(name, value, (tokens,), "[tokens]")
        if num_rows is not None:
            _check_num_rows(num_rows)
        checks.check_same_device(indices=indices, lengths=lengths, row_offsets=row_offsets)
        _check_capacity("indices", indices)
        _DENSE.passed(new)
    limit = MOST_ROWS if num_rows is None else num_rows
    return Ragged(*_build_ragged_indices_from_dense(indices, lengths, row_offsets, limit, impl))


def compute_global_topk_ragged_indices_and_indptr(
    topk: torch.Tensor,
    request_ids: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    *,
    impl: str = "auto",
) -> Ragged:
    """Map request-local top-k positions through the block table to cache slots, and pack them.

    Slot = block_table[request, i // block_size] * block_size + i % block_size. Entries whose block lies beyond the
    table, or is negative, are dropped, and so are slots beyond int32. Formula: vLLM's
    compute_global_topk_ragged_indices_and_indptr, compacted by mask.

    Args:
        topk: int32 [tokens, k], -1 for none.
        request_ids: int32 [tokens]; a row whose request is outside [0, requests) comes out empty.
        block_table: int32 [requests, max_blocks].
        block_size: slots of a block.
        impl: "auto", "reference" or "triton".

    Returns:
        Ragged(slots int32 [tokens * k], indptr int32 [tokens + 1]).

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _GLOBAL.new(topk, request_ids, block_table, block_size):
        checks.check_dtype("topk", topk, INDEX_DTYPES)
        checks.check_rank("topk", topk, 2)
        checks.check_dtype("request_ids", request_ids, INDEX_DTYPES)
        checks.check_shape("request_ids", request_ids, (topk.shape[0],), "[tokens]")
        _check_table(block_table, block_size)
        checks.check_same_device(topk=topk, request_ids=request_ids, block_table=block_table)
        _check_capacity("topk", topk)
        _GLOBAL.passed(new)
    return Ragged(*_compute_global_topk_ragged_indices_and_indptr(topk, request_ids, block_table, block_size, impl))


def window_indices(
    positions: torch.Tensor,
    request_ids: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    window: int,
    *,
    impl: str = "auto",
) -> Ragged:
    """Slots of the last ``window`` keys up to each row's own position, ascending, in a ring or an ordinary paged cache.

    Keys in a negative block, or in a slot beyond int32, are dropped.

    Args:
        positions: int32 [tokens]; a row with a negative position or a request outside [0, requests) comes out empty.
        request_ids: int32 [tokens].
        block_table: int32 [requests, max_blocks]; position p lies in column (p // block_size) % max_blocks, so that a
            table as wide as the request is the ordinary rule and a narrower one a ring.
        block_size: slots of a block.
        window: keys that a row sees, at least 1.
        impl: "auto", "reference" or "triton".

    Returns:
        Ragged(slots int32 [tokens * window], indptr int32 [tokens + 1]).

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _WINDOW.new(positions, request_ids, block_table, block_size, window):
        _check_rows(positions=positions, request_ids=request_ids)
        _check_table(block_table, block_size)
        checks.check_at_least("window", window, 1)
        checks.check_same_device(positions=positions, request_ids=request_ids, block_table=block_table)
        checks.check_room("window", positions.shape[0], window)
        _WINDOW.passed(new)
    return Ragged(*_window_indices(positions, request_ids, block_table, block_size, window, impl))


def entry_indices(
    limits: torch.Tensor,
    request_ids: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    max_entries: int,
    *,
    impl: str = "auto",
) -> Ragged:
    """Slots of the first entries of each row's request: as many as ``limits`` says, at most ``max_entries``.

    Args:
        limits: int32 [tokens]; a limit <= 0 or a request outside [0, requests) gives an empty row.
        request_ids: int32 [tokens].
        block_table: int32 [requests, max_blocks], of blocks of ``block_size`` entries; entries beyond it, in a negative
            block, or in a slot beyond int32 are dropped.
        block_size: entries of a block.
        max_entries: the host's bound on a row's entries.
        impl: "auto", "reference" or "triton".

    Returns:
        Ragged(slots int32 [tokens * max_entries], indptr int32 [tokens + 1]).

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _ENTRIES.new(limits, request_ids, block_table, block_size, max_entries):
        _check_rows(limits=limits, request_ids=request_ids)
        _check_table(block_table, block_size)
        checks.check_at_least("max_entries", max_entries, 0)
        checks.check_same_device(limits=limits, request_ids=request_ids, block_table=block_table)
        checks.check_room("max_entries", limits.shape[0], max_entries)
        _ENTRIES.passed(new)
    return Ragged(*_entry_indices(limits, request_ids, block_table, block_size, max_entries, impl))


def combine_topk_swa_indices_ragged(
    topk: torch.Tensor | None,
    limits: torch.Tensor,
    positions: torch.Tensor,
    entry_offsets: torch.Tensor,
    window_offsets: torch.Tensor,
    *,
    window: int,
    max_entries: int,
    num_rows: int,
    impl: str = "auto",
) -> Ragged:
    """Rows of a gathered matrix that each token sees: chosen entries first, then its window of raw keys.

    Rows outside [0, num_rows) are dropped; what is negative before the shift is never shifted. So a window offset of
    -2**31 leaves a token its entries alone. Formula: vLLM 0.25's combine_topk_swa with entry_offsets = M * b and
    window_offsets = M * b + N - gather_start, compacted by mask.

    Args:
        topk: int32 [tokens, k], entries within the request, -1 for none; None: entries 0 to max_entries - 1.
        limits: int32 [tokens], entries at or beyond are dropped.
        positions: int32 [tokens]; negative: an empty row.
        entry_offsets: int32 [tokens]. Entry e stands in row e + entry_offsets[t].
        window_offsets: int32 [tokens]. Position p stands in row p + window_offsets[t] (which may be negative), for the
            last ``window`` positions up to the token's own.
        window: keys that a row sees.
        max_entries: the host's bound on a row's entries where topk is None.
        num_rows: rows of the gathered matrix.
        impl: "auto", "reference" or "triton".

    Returns:
        Ragged(rows int32 [tokens * (k or max_entries, + window)], indptr int32 [tokens + 1]).

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _COMBINED.new(topk, limits, positions, entry_offsets, window_offsets, window, max_entries, num_rows):
        _check_rows(positions=positions, limits=limits, entry_offsets=entry_offsets, window_offsets=window_offsets)
        if topk is not None:
            checks.check_dtype("topk", topk, INDEX_DTYPES)
            checks.check_shape("topk", topk, (positions.shape[0], None), "[tokens, k]")
        checks.check_at_least("window", window, 1)
        checks.check_at_least("max_entries", max_entries, 0)
        _check_num_rows(num_rows)
        checks.check_same_device(
            positions=positions, topk=topk, limits=limits, entry_offsets=entry_offsets, window_offsets=window_offsets
        )
        width = max_entries if topk is None else topk.shape[1]
        checks.check_room("window", positions.shape[0], width + window)
        _COMBINED.passed(new)
    return Ragged(
        *_combine_topk_swa_indices_ragged(
            topk, limits, positions, entry_offsets, window_offsets, window, max_entries, num_rows, impl
        )
    )


def _check_rows(**values: torch.Tensor) -> None:
    """int32 [tokens] each; the first one sets tokens."""
    tokens = None
    for name, value in values.items():
        checks.check_dtype(name, value, INDEX_DTYPES)
        checks.check_shape(name, value, (tokens,), "[tokens]")
        tokens = value.shape[0]


def _check_table(block_table: torch.Tensor, block_size: int) -> None:
    checks.check_dtype("block_table", block_table, INDEX_DTYPES)
    checks.check_rank("block_table", block_table, 2)
    checks.check_unit_stride("block_table", block_table)
    checks.check_at_least("block_size", block_size, 1)


def _check_num_rows(num_rows: int) -> None:
    checks.check_integer("num_rows", num_rows)
    if not 0 <= num_rows <= MOST_ROWS:
        raise ValueError(f"num_rows: got {num_rows}, allowed: 0 to 2**31")


def _check_capacity(name: str, dense: torch.Tensor) -> None:
    if dense.shape[0] * dense.shape[1] > checks.MAX_CAPACITY:
        raise ValueError(f"{name}: got {list(dense.shape)}, allowed: fewer than 2**31 elements")
