"""Every program walks all prefill requests in blocks and matches its token rows against them; program 0 writes
kv_indptr."""

import triton
import triton.language as tl

from sparse_attn.device import pdl


@triton.jit(do_not_specialize=["tokens", "requests", "num_decodes", "next_n"])
def plan_rows(
    query_start_loc,  # int32 [requests + 1]
    seq_lens,  # int32 [requests]
    slot_mapping,  # int64 [tokens]
    request_ids,  # int32 [tokens]
    positions,  # int32 [tokens]
    limits,  # int32 [tokens]
    slots,  # int64 [tokens]
    kv_indptr,  # int32 [requests - num_decodes + 1]
    kv_start,  # int32 [tokens - num_decodes * next_n]
    kv_end,  # int32 [tokens - num_decodes * next_n]
    tokens,
    requests,
    num_decodes,
    next_n,
    stride_start,
    stride_len,
    stride_slot,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    # Decode rows come first, next_n to a request.
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = rows < tokens
    decode_rows = num_decodes * next_n
    is_decode = rows < decode_rows

    # A decode row is one of its request's last next_n positions.
    request = tl.where(is_decode, rows // next_n, -1)
    length = tl.load(seq_lens + request * stride_len, mask=live & is_decode, other=0)
    position = tl.maximum(length, 0) - next_n + rows % next_n
    first_key = tl.zeros([BLOCK_T], tl.int32)

    # Prefill rows: walk the requests, BLOCK_R at a time, and find the one that owns each row.
    keys_before = tl.full([], 0, tl.int32)
    for block in range(num_decodes, requests, BLOCK_R):
        candidates = block + tl.arange(0, BLOCK_R)
        real = candidates < requests
        start = tl.load(query_start_loc + candidates * stride_start, mask=real, other=0)
        end = tl.load(query_start_loc + (candidates + 1) * stride_start, mask=real, other=0)
        keys = tl.maximum(tl.load(seq_lens + candidates * stride_len, mask=real, other=0), 0)
        # Keys of requests without rows are not gathered.
        counted = tl.where(end > start, keys, 0)
        keys_up_to = keys_before + tl.cumsum(counted, 0)
        # Bounds are the same in every program: the first stores them.
        if tl.program_id(0) == 0:
            tl.store(kv_indptr + 1 + candidates - num_decodes, keys_up_to, mask=real)
        # A row belongs to the request whose query range holds it; none where that has no keys.
        owns = (rows[:, None] >= start[None, :]) & (rows[:, None] < end[None, :]) & (keys > 0)[None, :] & real[None, :]
        owns = owns & (rows >= decode_rows)[:, None]
        request = tl.maximum(request, tl.max(tl.where(owns, candidates[None, :], -1), 1))
        # A request's rows are its last positions.
        shift = (keys - (end - start) - start)[None, :] + rows[:, None]
        mine = tl.max(owns.to(tl.int32), 1) > 0
        position = tl.where(mine, tl.sum(tl.where(owns, shift, 0), 1), position)
        first_key = tl.where(mine, tl.sum(tl.where(owns, (keys_up_to - counted)[None, :], 0), 1), first_key)
        keys_before += tl.sum(counted, 0)
    if tl.program_id(0) == 0:
        tl.store(kv_indptr, 0)

    # Rows without a slot are padding: nothing of them counts.
    slot = tl.load(slot_mapping + rows.to(tl.int64) * stride_slot, mask=live, other=-1)
    valid = (request >= 0) & (position >= 0) & (slot >= 0)
    request = tl.where(valid, request, -1)
    position = tl.where(valid, position, -1)
    first_key = tl.where(valid, first_key, 0)
    # What a row sees: itself and all before it.
    tl.store(request_ids + rows, request, mask=live)
    tl.store(positions + rows, position, mask=live)
    tl.store(limits + rows, position + 1, mask=live)
    tl.store(slots + rows, tl.where(valid, slot, -1), mask=live)
    # Where a prefill row's keys lie among those gathered.
    is_prefill = live & (rows >= decode_rows)
    tl.store(kv_start + rows - decode_rows, first_key, mask=is_prefill)
    tl.store(kv_end + rows - decode_rows, first_key + position + 1, mask=is_prefill)


@triton.jit(do_not_specialize=["tokens", "decode_rows", "requests", "prefills", "max_blocks"])
def compressed_rows(
    request_ids,  # int32 [tokens]
    positions,  # int32 [tokens]
    block_table,  # int32 [requests, max_blocks]
    kv_indptr,  # int32 [prefills + 1], of tokens
    limits,  # int32 [tokens]
    slots,  # int64 [tokens]
    entry_indptr,  # int32 [prefills + 1]
    kv_start,  # int32 [tokens - decode_rows]
    kv_end,  # int32 [tokens - decode_rows]
    tokens,
    decode_rows,
    requests,
    prefills,
    max_blocks,
    stride_requests_token,
    stride_positions_token,
    stride_table_request,
    stride_indptr,
    RATIO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # entries of a block
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = rows < tokens
    request = tl.load(request_ids + rows * stride_requests_token, mask=live, other=-1)
    position = tl.load(positions + rows * stride_positions_token, mask=live, other=-1)
    valid = (request >= 0) & (request < requests) & (position >= 0)
    # Tokens up to and with this one, and entries that they complete.
    done = tl.where(valid, position, -1) + 1
    limit = done // RATIO
    entry = tl.maximum(limit - 1, 0)
    column = entry // BLOCK_SIZE
    # A token that completes an entry has the slot that the entry goes to.
    complete = valid & (done % RATIO == 0) & (column < max_blocks)
    table_row = tl.where(valid, request, 0).to(tl.int64) * stride_table_request
    block = tl.load(block_table + table_row + column, mask=complete, other=-1)
    slot = block.to(tl.int64) * BLOCK_SIZE + (entry - column * BLOCK_SIZE)
    tl.store(limits + rows, limit, mask=live)
    tl.store(slots + rows, tl.where(complete & (block >= 0), slot, -1), mask=live)

    # Prefill requests follow the decodes; their entries are gathered one request after the other.
    place = request - (requests - prefills)
    start = tl.zeros([BLOCK_T], tl.int32)
    before = tl.full([], 0, tl.int32)
    for first in range(0, prefills, BLOCK_R):
        candidates = first + tl.arange(0, BLOCK_R)
        real = candidates < prefills
        low = tl.load(kv_indptr + candidates * stride_indptr, mask=real, other=0)
        high = tl.load(kv_indptr + (candidates + 1) * stride_indptr, mask=real, other=0)
        # Whole entries of a request.
        entries = (high - low) // RATIO
        up_to = before + tl.cumsum(entries, 0)
        if tl.program_id(0) == 0:
            tl.store(entry_indptr + 1 + candidates, up_to, mask=real)
        owns = (place[:, None] == candidates[None, :]) & real[None, :] & valid[:, None]
        start += tl.sum(tl.where(owns, (up_to - entries)[None, :], 0), 1)
        before += tl.sum(entries, 0)
    if tl.program_id(0) == 0:
        tl.store(entry_indptr, 0)
    # A row sees the entries that its request has completed by then.
    is_prefill = live & (rows >= decode_rows)
    seen = tl.where(valid & (place >= 0), limit, 0)
    tl.store(kv_start + rows - decode_rows, start, mask=is_prefill)
    tl.store(kv_end + rows - decode_rows, start + seen, mask=is_prefill)
