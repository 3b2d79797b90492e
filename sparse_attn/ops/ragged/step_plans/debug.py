"""Rules of debug mode for each argument."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug


def step_plan(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, slot_mapping: torch.Tensor, num_decodes: int, next_n: int
) -> None:
    debug.at_least("slot_mapping", slot_mapping, -1, "-1 is none")
    if seq_lens.shape[0] == num_decodes:
        return
    decode_rows = num_decodes * next_n
    debug.indptr("query_start_loc", query_start_loc, slot_mapping.shape[0], "rows of the step", first=num_decodes)
    starts = query_start_loc[:-1].long()
    rows = query_start_loc[1:] - starts
    prefill = torch.arange(seq_lens.shape[0], device=seq_lens.device) >= num_decodes
    debug.refuse(
        "query_start_loc", query_start_loc[:-1], prefill & (rows > 0) & (starts < decode_rows),
        f"at least {decode_rows} (behind the decode rows)",
    )  # fmt: skip
    debug.refuse(
        "seq_lens", seq_lens, prefill & (seq_lens > 0) & (seq_lens < rows),
        "at least {} (the rows of this step count among them)", limit=rows,
    )  # fmt: skip


def build_step_plan(
    seq_lens: torch.Tensor, request_ids: torch.Tensor, limits: torch.Tensor, kv_indptr: torch.Tensor, max_context: int,
    kv_capacity: int,
) -> None:  # fmt: skip
    """Of the host, by what step_plan gives. A request may be longer than its last row that is no padding."""
    if bool((far := limits > max_context).any()):
        request = int(request_ids[far][0])
        got = f"seq_lens[{request}]: got {int(seq_lens[request])}"
        raise ValueError(f"{got}, allowed: at most {max_context} (max_context)")
    if (keys := int(kv_indptr[-1])) > kv_capacity:
        raise ValueError(f"kv_capacity: got {kv_capacity}, allowed: at least {keys} (seq_lens of prefill requests)")


def compressed_plan(
    request_ids: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    kv_indptr: torch.Tensor,
    decode_rows: int,
    ratio: int,
    block_size: int,
) -> None:
    requests, columns = block_table.shape
    room = columns * block_size * ratio
    debug.places("request_ids", request_ids, requests, "requests")
    debug.places("positions", positions, room, "tokens whose entries block_table has room for")
    debug.indptr("kv_indptr", kv_indptr, debug.INT32_MAX, "int32")
    complete = (positions >= 0) & ((positions + 1) % ratio == 0)
    column = torch.where(complete, positions.long() // ratio // block_size, -1)
    debug.blocks(block_table, debug.used_by(block_table, request_ids, column), None)


def window_plan(request_ids: torch.Tensor, positions: torch.Tensor, kv_indptr: torch.Tensor, num_decodes: int) -> None:
    """Of prefill rows."""
    debug.indptr("kv_indptr", kv_indptr, debug.INT32_MAX, "int32")
    debug.at_least("positions", positions, -1, "-1 is none")
    prefills = kv_indptr.shape[0] - 1
    place = request_ids.long() - num_decodes
    debug.refuse(
        "request_ids", request_ids, (request_ids != -1) & ((place < 0) | (place >= prefills)),
        f"-1, or {num_decodes} to {num_decodes + prefills - 1} (prefill requests)",
    )  # fmt: skip
