"""Write and gather of keys, seen as [groups, group] values with one scale per group, and a rope part.

A plain layout is one group without a scale. Bytes: every row once in, once out; nothing else.
"""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.cast import cast, convert, round_to_bf16, stored
from sparse_attn.device.fp8 import decode_exponent, decode_fp8
from sparse_attn.device.paging import find_slot
from sparse_attn.device.record import store_quantised


@triton.jit(do_not_specialize=["num_slots", "block_size"])
def write_rows(
    latent,  # [tokens, GROUPS * GROUP]
    rope,  # [tokens, ROPE]
    cache,  # blocks of records
    slot_mapping,  # int64 or int32 [tokens]
    num_slots,
    block_size,
    stride_latent_token,
    stride_rope_token,
    stride_slot_token,
    stride_cache_block,
    RECORD: tl.constexpr,
    GROUPS: tl.constexpr,
    PAD_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    ROPE: tl.constexpr,
    PAD_ROPE: tl.constexpr,
    SCALE_AT: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ROPE_AT: tl.constexpr,
    FP8: tl.constexpr,
    PLANAR: tl.constexpr,
    FNUZ: tl.constexpr,
    POW2: tl.constexpr,
    FP8_MAX: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token * stride_slot_token).to(tl.int64)
    # A slot outside the cache, as -1 of padding, is written nowhere.
    if (slot >= 0) & (slot < num_slots):
        group = tl.arange(0, PAD_GROUPS)
        column = tl.arange(0, PAD_GROUP)
        place = group[:, None] * GROUP + column[None, :]
        real = (group < GROUPS)[:, None] & (column < GROUP)[None, :]
        value = tl.load(latent + token * stride_latent_token + place, mask=real, other=0.0)
        rope_column = tl.arange(0, PAD_ROPE)
        rope_value = tl.load(rope + token * stride_rope_token + rope_column, mask=rope_column < ROPE, other=0.0)
        # Records of a block follow each other.
        block = slot // block_size
        within = slot - block * block_size
        block_at = cache + block * stride_cache_block
        base = block_at + within * RECORD
        # Planar: rounded to bf16 first, as the reference does.
        if FP8:
            value = value.to(tl.float32)
            if PLANAR:
                value = round_to_bf16(value).to(tl.float32)
            store_quantised(
                value, place, real, block_at, within, block_size, GROUPS, RECORD, SCALE_AT, SCALE_BYTES, PLANAR, PLANAR,
                FNUZ, POW2, FP8_MAX, AMAX_FLOOR,
            )  # fmt: skip
            # The RoPE part stays bf16.
            rope_at = (base + ROPE_AT).to(tl.pointer_type(tl.bfloat16)) + rope_column
            tl.store(rope_at, stored(rope_value, tl.bfloat16), mask=rope_column < ROPE)
        else:
            tl.store(base + place, stored(value, cache.dtype.element_ty), mask=real)
            rope_at = base + ROPE_AT + rope_column
            tl.store(rope_at, stored(rope_value, cache.dtype.element_ty), mask=rope_column < ROPE)


@triton.jit(
    do_not_specialize=["capacity", "requests", "max_blocks", "num_blocks", "block_size", "stride_table_request"]
)
def gather_rows(
    cache,  # blocks of records
    block_table,  # int32 [requests, max_blocks]
    kv_indptr,  # int32 [requests + 1]
    starts,  # int32 [requests] or None
    out,  # [capacity, GROUPS * GROUP + ROPE]
    capacity,
    requests,
    max_blocks,
    num_blocks,
    block_size,
    stride_cache_block,
    stride_table_request,
    RECORD: tl.constexpr,
    GROUPS: tl.constexpr,
    PAD_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    ROPE: tl.constexpr,
    PAD_ROPE: tl.constexpr,
    SCALE_AT: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ROPE_AT: tl.constexpr,
    FP8: tl.constexpr,
    PLANAR: tl.constexpr,
    FNUZ: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    WIDTH: tl.constexpr = GROUPS * GROUP + ROPE
    # Rows of the batch in a row's order: find the request and its block.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block, within, known = find_slot(
        row, kv_indptr, starts, block_table, requests, max_blocks, num_blocks, block_size, stride_table_request
    )
    within = within.to(tl.int64)
    written = row < capacity
    block_at = cache + block * stride_cache_block
    base = block_at + within * RECORD
    out_at = out + row.to(tl.int64) * WIDTH
    group = tl.arange(0, PAD_GROUPS)
    column = tl.arange(0, PAD_GROUP)
    place = group[:, None] * GROUP + column[None, :]
    real = written[:, None, None] & ((group < GROUPS)[:, None] & (column < GROUP)[None, :])[None, :, :]
    # A row that no slot is known for gets zeros.
    value = tl.load(base[:, None, None] + place[None, :, :], mask=real & known[:, None, None], other=0.0)
    rope_column = tl.arange(0, PAD_ROPE)
    rope_real = written[:, None] & (rope_column < ROPE)[None, :]
    if FP8:
        # Scales behind the block's records, or inside the record.
        scaled = known[:, None] & (group < GROUPS)[None, :]
        if PLANAR:
            plane = block_at + block_size.to(tl.int64) * RECORD + within * SCALE_BYTES
            scale = decode_exponent(tl.load(plane[:, None] + group[None, :], mask=scaled, other=0))
        else:
            scale_at = (base + SCALE_AT).to(tl.pointer_type(tl.float32))[:, None] + group[None, :]
            scale = tl.load(scale_at, mask=scaled, other=0.0)
        # Dequantised in fp32, rounded once.
        value = cast(decode_fp8(value, FNUZ) * scale[:, :, None], out.dtype.element_ty)
        rope_at = (base + ROPE_AT).to(tl.pointer_type(tl.bfloat16))[:, None] + rope_column[None, :]
    else:
        value = convert(value, out.dtype.element_ty)
        rope_at = (base + ROPE_AT)[:, None] + rope_column[None, :]
    tl.store(out_at[:, None, None] + place[None, :, :], value, mask=real)
    rope_value = convert(tl.load(rope_at, mask=rope_real & known[:, None], other=0.0), out.dtype.element_ty)
    tl.store(out_at[:, None] + GROUPS * GROUP + rope_column[None, :], rope_value, mask=rope_real)
