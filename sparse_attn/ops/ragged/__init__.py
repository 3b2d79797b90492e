"""Ragged (CSR) index lists at static capacity, built in one launch and without a host sync.

Row t of the result is ``indices[indptr[t]:indptr[t + 1]]``; the tail of ``indices`` beyond ``indptr[-1]`` is -1. Rows are
compacted by mask: an interior -1, or an index that points nowhere, takes no place and loses nothing behind it.
"""

from __future__ import annotations

import torch

from sparse_attn import checks
from sparse_attn.ops.ragged import op
from sparse_attn.types import Ragged

INDEX_DTYPES = (torch.int32,)
MAX_CAPACITY = 2**31 - 1


def build_ragged_indices_from_dense(
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    num_rows: int | None = None,
    row_offsets: torch.Tensor | None = None,
    impl: str = "auto",
) -> Ragged:
    """Pack the valid entries of dense index rows.

    indices: int32 [tokens, width], -1 (or any negative value) for none. lengths: int32 [tokens], only the first
    ``lengths[t]`` entries of row t are looked at, clamped to [0, width]; None looks at all. row_offsets: int32 [tokens],
    added to every valid entry of a row. num_rows: entries outside [0, num_rows) after the offset are dropped; None keeps
    every non-negative one.

    Returns Ragged(indices int32 [tokens * width], indptr int32 [tokens + 1]).
    """
    checks.check_dtype("indices", indices, INDEX_DTYPES)
    checks.check_rank("indices", indices, 2)
    tokens = indices.shape[0]
    for name, value in (("lengths", lengths), ("row_offsets", row_offsets)):
        if value is not None:
            checks.check_dtype(name, value, INDEX_DTYPES)
            checks.check_shape(name, value, (tokens,), "[tokens]")
    if num_rows is not None:
        checks.check_at_least("num_rows", num_rows, 0)
    checks.check_same_device(indices=indices, lengths=lengths, row_offsets=row_offsets)
    _check_capacity("indices", indices)
    limit = MAX_CAPACITY if num_rows is None else num_rows
    return Ragged(*op.build_ragged_indices_from_dense(indices, lengths, row_offsets, limit, impl))


def compute_global_topk_ragged_indices_and_indptr(
    topk: torch.Tensor,
    request_ids: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    *,
    impl: str = "auto",
) -> Ragged:
    """Map request-local top-k positions through the block table to cache slots, and pack them.

    topk: int32 [tokens, k], -1 for none. request_ids: int32 [tokens]; a row whose request is outside
    [0, requests) comes out empty. block_table: int32 [requests, max_blocks]. Slot = block_table[request, i // block_size]
    * block_size + i % block_size; entries whose block lies beyond the table, or is negative, are dropped.

    Returns Ragged(slots int32 [tokens * k], indptr int32 [tokens + 1]). Formula: vLLM's
    compute_global_topk_ragged_indices_and_indptr, compacted by mask.
    """
    checks.check_dtype("topk", topk, INDEX_DTYPES)
    checks.check_rank("topk", topk, 2)
    checks.check_dtype("request_ids", request_ids, INDEX_DTYPES)
    checks.check_shape("request_ids", request_ids, (topk.shape[0],), "[tokens]")
    checks.check_dtype("block_table", block_table, INDEX_DTYPES)
    checks.check_rank("block_table", block_table, 2)
    checks.check_unit_stride("block_table", block_table)
    checks.check_at_least("block_size", block_size, 1)
    checks.check_same_device(topk=topk, request_ids=request_ids, block_table=block_table)
    _check_capacity("topk", topk)
    return Ragged(
        *op.compute_global_topk_ragged_indices_and_indptr(topk, request_ids, block_table, block_size, impl)
    )


def _check_capacity(name: str, dense: torch.Tensor) -> None:
    if dense.shape[0] * dense.shape[1] > MAX_CAPACITY:
        raise ValueError(f"{name}: got {list(dense.shape)}, allowed: fewer than 2**31 elements")
