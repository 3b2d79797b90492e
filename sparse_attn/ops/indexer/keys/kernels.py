"""Insert and gather of index keys. Bytes: every key once in, once out; nothing else."""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.cast import stored
from sparse_attn.device.fp8 import ceil_pow2, encode_fp8, finite_or_nan
from sparse_attn.device.mxfp4 import quantise_mxfp4
from sparse_attn.device.paging import find_slot


@triton.jit(do_not_specialize=["tokens", "num_slots", "block_size"])
def insert_keys(
    k,  # [tokens or more, D]
    cache,  # [num_blocks, block_size, row]
    slot_mapping,  # int64 or int32 [tokens]
    tokens,
    num_slots,
    block_size,
    stride_k_token,
    stride_slot_token,
    stride_cache_block,
    D: tl.constexpr,
    RECORD: tl.constexpr,  # from one key of a block to the next
    PAD_D: tl.constexpr,
    FP8: tl.constexpr,
    MXFP4: tl.constexpr,
    FNUZ: tl.constexpr,
    POW2: tl.constexpr,
    FP8_MAX: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    # A slot outside the cache, as -1 of padding, is written nowhere.
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_mapping + token * stride_slot_token, mask=token < tokens, other=-1).to(tl.int64)
    written = (slot >= 0) & (slot < num_slots)
    column = tl.arange(0, PAD_D)
    inside = written[:, None] & (column < D)[None, :]
    value = tl.load(k + token[:, None] * stride_k_token + column[None, :], mask=inside, other=0.0)
    # Records of a block lie in front, their scales behind them.
    block = slot // block_size
    within = slot - block * block_size
    base = cache + block * stride_cache_block
    at = base[:, None] + within[:, None] * RECORD + column[None, :]
    if FP8:
        # One scale a key: amax / FP8_MAX, rounded up to a power of two where that is wanted.
        value, magnitude = finite_or_nan(value.to(tl.float32))
        amax = tl.maximum(tl.max(magnitude, 1), AMAX_FLOOR)
        scale = tl.div_rn(amax, tl.full([TOKENS], FP8_MAX, tl.float32))
        if POW2:
            scale = ceil_pow2(scale)
        code = encode_fp8(tl.div_rn(value, tl.broadcast_to(scale[:, None], [TOKENS, PAD_D])), FNUZ)
        tl.store(at, code, mask=inside)
        scale_at = (base + block_size.to(tl.int64) * D).to(tl.pointer_type(tl.float32)) + within
        tl.store(scale_at, scale, mask=written)
    elif MXFP4:  # of 32 values, with a ue8m0 byte each
        GROUPS: tl.constexpr = PAD_D // 32
        code, exponent = quantise_mxfp4(value.to(tl.float32), TOKENS, GROUPS)
        byte = tl.arange(0, PAD_D // 2)
        code_at = base[:, None] + within[:, None] * RECORD + byte[None, :]
        tl.store(code_at, code, mask=written[:, None] & (byte < D // 2)[None, :])
        group = tl.arange(0, GROUPS)
        exponent_at = (base + block_size.to(tl.int64) * RECORD + within * (D // 32))[:, None] + group[None, :]
        tl.store(exponent_at, exponent, mask=written[:, None] & (group < D // 32)[None, :])
    else:
        tl.store(at, stored(value, cache.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["capacity", "requests", "max_blocks", "num_blocks", "block_size", "stride_table_request"]
)
def gather_keys(
    cache,  # [num_blocks, block_size, row]
    block_table,  # int32 [requests, max_blocks]
    kv_indptr,  # int32 [requests + 1]
    keys,  # [capacity, D]
    scales,  # fp32 [capacity], or uint8 [capacity, SCALES]
    capacity,
    requests,
    max_blocks,
    num_blocks,
    block_size,
    stride_cache_block,
    stride_table_request,
    D: tl.constexpr,
    RECORD: tl.constexpr,  # from one key of a block to the next
    PAD_D: tl.constexpr,
    FP8: tl.constexpr,
    SCALES: tl.constexpr,  # scale bytes of a key behind a block's codes; 0: none, or one fp32 scale
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    # Rows of the batch in a row's order: find the request and its block.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block, within, known = find_slot(
        row, kv_indptr, None, block_table, requests, max_blocks, num_blocks, block_size, stride_table_request
    )
    within = within.to(tl.int64)
    base = cache + block * stride_cache_block
    column = tl.arange(0, PAD_D)
    real = (row < capacity)[:, None] & (column < D)[None, :]
    value = tl.load(base[:, None] + within[:, None] * RECORD + column[None, :], mask=known[:, None] & real, other=0.0)
    # A row that no slot is known for gets zeros.
    tl.store(keys + row.to(tl.int64)[:, None] * D + column[None, :], value, mask=real)
    if FP8:
        scale_at = (base + block_size.to(tl.int64) * D).to(tl.pointer_type(tl.float32)) + within
        tl.store(scales + row, tl.load(scale_at, mask=known, other=0.0), mask=row < capacity)
    if SCALES:
        # Scales of MXFP4 keys: all bytes of a key, from behind the block's codes.
        group = tl.arange(0, triton.next_power_of_2(SCALES))
        there = (row < capacity)[:, None] & (group < SCALES)[None, :]
        byte_at = (base + block_size.to(tl.int64) * RECORD + within * SCALES)[:, None] + group[None, :]
        byte = tl.load(byte_at, mask=known[:, None] & there, other=0)
        tl.store(scales + row.to(tl.int64)[:, None] * SCALES + group[None, :], byte, mask=there)
