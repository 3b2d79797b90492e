"""The compressor: a program per token pools the entry that the token completes; another keeps the token's row.

Floors, bytes: an entry reads 8 * SPAN * DIM bytes and writes its row; a token that is kept is read once and written
once. Most programs of ``pool`` end after three loads.

From equal pooled values ``pool`` stores the reference's bits when launched with enable_fp_fusion=False. The pooling
itself sums in another order.
"""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.cast import round_to_bf16, stored
from sparse_attn.device.mxfp4 import quantise_mxfp4
from sparse_attn.device.record import store_quantised
from sparse_attn.device.rope import hadamard, pair_of, rotate, swap_neighbours


@triton.jit
def _state_rows(table_row, position, max_blocks, num_blocks, block_size, stride_block, ROW: tl.constexpr, mask):
    """(offset int64, known) of positions in a request's ring."""
    # Blocks of a ring come round: the table's column is taken modulo its length.
    column = position // block_size
    block = tl.load(table_row + column % max_blocks, mask=mask, other=-1)
    known = mask & (block >= 0) & (block < num_blocks)
    return block.to(tl.int64) * stride_block + (position - column * block_size).to(tl.int64) * ROW, known


@triton.jit
def _store_entry(
    entry, base, within, block_size, DIM: tl.constexpr, PADDED: tl.constexpr, FP8: tl.constexpr, MXFP4: tl.constexpr,
    CODES: tl.constexpr, GROUP: tl.constexpr, RECORD: tl.constexpr, SCALE_BYTES: tl.constexpr, EXPONENT: tl.constexpr,
    FNUZ: tl.constexpr, POW2: tl.constexpr, FP8_MAX: tl.constexpr, AMAX_FLOOR: tl.constexpr,
):  # fmt: skip
    """Write fp32 [PADDED], zero beyond DIM, as the record ``within`` the block at ``base``: CODES of it as fp8 in
    groups of GROUP, the rest as bf16; all of it as MXFP4; or unquantised."""
    column = tl.arange(0, PADDED)
    # As the reference: rounded to bf16 before it is quantised.
    if FP8:
        rounded = round_to_bf16(entry)
        value = tl.reshape(rounded.to(tl.float32), [PADDED // GROUP, GROUP])
        place = tl.reshape(column, [PADDED // GROUP, GROUP])
        GROUPS: tl.constexpr = (CODES + GROUP - 1) // GROUP
        store_quantised(
            value, place, place < CODES, base, within, block_size, GROUPS, RECORD, 0, SCALE_BYTES, True, EXPONENT, FNUZ,
            POW2, FP8_MAX, AMAX_FLOOR,
        )  # fmt: skip
        # The last values stay bf16, behind the codes.
        if CODES < DIM:
            rest = (base + within * RECORD + CODES).to(tl.pointer_type(tl.bfloat16)) + column - CODES
            tl.store(rest, stored(rounded, tl.bfloat16), mask=(column >= CODES) & (column < DIM))
    elif MXFP4:
        PAD_GROUPS: tl.constexpr = PADDED // 32
        rounded = tl.reshape(round_to_bf16(entry).to(tl.float32), [1, PADDED])
        code, exponent = quantise_mxfp4(rounded, 1, PAD_GROUPS)
        byte, group = tl.arange(0, PADDED // 2), tl.arange(0, PAD_GROUPS)
        tl.store(base + within * RECORD + byte, tl.reshape(code, [PADDED // 2]), mask=byte < DIM // 2)
        # Scales lie behind all records of the block.
        scales = base + block_size.to(tl.int64) * RECORD + within * SCALE_BYTES
        tl.store(scales + group, tl.reshape(exponent, [PAD_GROUPS]), mask=group < SCALE_BYTES)
    else:
        tl.store(base + within * RECORD + column, stored(entry, base.dtype.element_ty), mask=column < DIM)


@triton.jit(
    do_not_specialize=[
        "requests", "max_blocks", "num_blocks", "block_size", "num_slots", "cache_block_size", "table_rows",
    ]
)  # fmt: skip
def pool(
    kv,  # fp32 [tokens, parts * DIM]
    gate,  # fp32 [tokens, parts * DIM]
    position_bias,  # fp32 [RATIO, parts * DIM]
    positions,  # int32 [tokens]
    request_ids,  # int32 [tokens]
    state,  # fp32 [num_blocks, block_size, 2 * parts * DIM]
    state_table,  # int32 [requests, max_blocks]
    norm_weight,  # [DIM]
    cos_sin,  # fp32 [table_rows, ROPE_WIDTH]
    cache,  # blocks of entries
    slot_mapping,  # int64 [tokens]
    requests,
    max_blocks,
    num_blocks,
    block_size,
    num_slots,
    cache_block_size,
    table_rows,
    eps,
    stride_kv_token,
    stride_gate_token,
    stride_bias_row,
    stride_positions_token,
    stride_requests_token,
    stride_state_block,
    stride_table_request,
    stride_slot_token,
    stride_cache_block,
    stride_rope_row,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    RATIO: tl.constexpr,
    SPAN: tl.constexpr,
    OVERLAP: tl.constexpr,
    ROPE_START: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    HADAMARD: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    MXFP4: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    RECORD: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    EXPONENT: tl.constexpr,
    FNUZ: tl.constexpr,
    POW2: tl.constexpr,
    FP8_MAX: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    WIDTH: tl.constexpr = 2 * DIM if OVERLAP else DIM
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token * stride_positions_token)
    request = tl.load(request_ids + token * stride_requests_token)
    slot = tl.load(slot_mapping + token * stride_slot_token)
    valid = (position >= 0) & (request >= 0) & (request < requests) & (slot >= 0) & (slot < num_slots)
    # Only a token that completes an entry goes on.
    if valid & ((position + 1) % RATIO == 0):
        column = tl.arange(0, PADDED)
        real = column < DIM
        table_row = state_table + request.to(tl.int64) * stride_table_request
        # Online softmax over the SPAN rows of the entry, column by column.
        m = tl.full([PADDED], float("-inf"), tl.float32)
        l = tl.zeros([PADDED], tl.float32)
        total = tl.zeros([PADDED], tl.float32)
        for start in range(0, SPAN, ROWS):
            # A row of this call, if its request and position say so; else one that the state keeps.
            place = start + tl.arange(0, ROWS)
            p = position - (SPAN - 1) + place
            row = token - (SPAN - 1) + place
            there = (place < SPAN) & (p >= 0)
            near = there & (row >= 0)
            same = tl.load(request_ids + row * stride_requests_token, mask=near, other=-1) == request
            here = near & same & (tl.load(positions + row * stride_positions_token, mask=near, other=-1) == p)
            # Where the kept row lies in the request's ring.
            offset, known = _state_rows(
                table_row, tl.maximum(p, 0), max_blocks, num_blocks, block_size, stride_state_block, 2 * WIDTH,
                there & ~here,
            )  # fmt: skip
            # Overlapping entries: the first RATIO rows give their first part, the others the second.
            part = tl.where(place < RATIO, 0, DIM) if OVERLAP else tl.zeros([ROWS], tl.int32)
            source = part[:, None] + column[None, :]
            fresh, kept = here[:, None] & real[None, :], known[:, None] & real[None, :]
            # Two loads of each: Triton for AMD cannot compile a choice between pointers into two tensors.
            state_at = (state + offset)[:, None] + source
            value = tl.load((kv + row * stride_kv_token)[:, None] + source, mask=fresh, other=0.0)
            value = tl.where(fresh, value, tl.load(state_at, mask=kept, other=0.0))
            weight = tl.load((gate + row * stride_gate_token)[:, None] + source, mask=fresh, other=float("-inf"))
            weight = tl.where(fresh, weight, tl.load(state_at + WIDTH, mask=kept, other=float("-inf")))
            # Kept gates have their bias already.
            bias_at = position_bias + (tl.maximum(p, 0) % RATIO)[:, None] * stride_bias_row + source
            weight += tl.load(bias_at, mask=fresh, other=0.0)
            # Move the sums to the new maximum; a column without rows stays empty.
            top = tl.maximum(m, tl.max(weight, 0))
            shift = tl.where(top == float("-inf"), 0.0, top)
            e = tl.exp(weight - shift[None, :])
            rescale = tl.exp(m - shift)
            l = l * rescale + tl.sum(e, 0)
            total = total * rescale + tl.sum(e * value, 0)
            m = top
        # The pooled entry, then its RMS norm, by correctly rounded steps.
        entry = tl.where(real, tl.div_rn(total, tl.where(l == 0.0, 1.0, l)), 0.0)
        square = tl.broadcast_to(tl.sum(entry * entry, 0), [PADDED])
        root = tl.sqrt_rn(tl.div_rn(square, tl.full([PADDED], DIM, tl.float32)) + eps)
        entry = entry * tl.div_rn(tl.full([PADDED], 1.0, tl.float32), root)
        entry *= tl.load(norm_weight + column, mask=real, other=0.0).to(tl.float32)

        # The entry is rotated by the position of its first token.
        first = position + 1 - RATIO
        rotated, _, frequency, is_first = pair_of(column, ROPE_START, ROPE_WIDTH, True)
        turns = rotated & (first < table_rows)
        angle = cos_sin + first.to(tl.int64) * stride_rope_row + frequency
        cos = tl.load(angle, mask=turns, other=0.0)
        sin = tl.load(angle + ROPE_WIDTH // 2, mask=turns, other=0.0)
        partners = tl.reshape(swap_neighbours(tl.reshape(entry, [1, PADDED]), 1, PADDED), [PADDED])
        entry = rotate(entry, partners, cos, sin, rotated, is_first)
        if HADAMARD:
            entry = tl.reshape(hadamard(tl.reshape(entry, [1, PADDED]), 1, PADDED, STAGES), [PADDED])

        # Into the cache's record for the entry.
        block = slot // cache_block_size
        _store_entry(
            entry, cache + block * stride_cache_block, slot - block * cache_block_size, cache_block_size, DIM, PADDED,
            FP8, MXFP4, CODES, GROUP, RECORD, SCALE_BYTES, EXPONENT, FNUZ, POW2, FP8_MAX, AMAX_FLOOR,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "requests", "max_blocks", "num_blocks", "block_size"])
def keep(
    kv,  # fp32 [tokens, WIDTH]
    gate,  # fp32 [tokens, WIDTH]
    position_bias,  # fp32 [RATIO, WIDTH]
    positions,  # int32 [tokens]
    request_ids,  # int32 [tokens]
    state,  # fp32 [num_blocks, block_size, 2 * WIDTH]
    state_table,  # int32 [requests, max_blocks]
    tokens,
    requests,
    max_blocks,
    num_blocks,
    block_size,
    stride_kv_token,
    stride_gate_token,
    stride_bias_row,
    stride_positions_token,
    stride_requests_token,
    stride_state_block,
    stride_table_request,
    WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token * stride_positions_token)
    request = tl.load(request_ids + token * stride_requests_token)
    valid = (position >= 0) & (request >= 0) & (request < requests)
    # A later token of this call may take the same place of the ring: then that one alone is kept.
    ring = max_blocks * block_size
    later, comes = token + ring, valid & (token + ring < tokens)
    replaced = tl.load(request_ids + later * stride_requests_token, mask=comes, other=-1) == request
    replaced &= tl.load(positions + later * stride_positions_token, mask=comes, other=-1) == position + ring
    table_row = state_table + tl.where(valid, request, 0).to(tl.int64) * stride_table_request
    offset, known = _state_rows(
        table_row, tl.maximum(position, 0), max_blocks, num_blocks, block_size, stride_state_block, 2 * WIDTH,
        valid & ~replaced,
    )  # fmt: skip
    # Value and gate, with its bias, side by side.
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    written = known & (column < WIDTH)
    value = tl.load(kv + token * stride_kv_token + column, mask=written, other=0.0)
    weight = tl.load(gate + token * stride_gate_token + column, mask=written, other=0.0)
    bias_at = position_bias + (tl.maximum(position, 0) % RATIO) * stride_bias_row + column
    weight += tl.load(bias_at, mask=written, other=0.0)
    tl.store(state + offset + column, value, mask=written)
    tl.store(state + offset + WIDTH + column, weight, mask=written)
