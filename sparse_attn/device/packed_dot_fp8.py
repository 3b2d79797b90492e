"""Rows that were quantised to fp8 times an MXFP4 weight, weight first (swap-AB), on fp8 units.

Codes of e2m1 are values of e4m3, and stay such when a power of two from 2^-5 to 2^6 is multiplied into them. So the
four scales of 128 columns come into the codes, relative to the largest of them, and one scale a row of the weight is
left for 128 columns. Columns whose scale is below 2^-11 of the largest of their 128 count as 0.

Codes come as words of eight. A table of eight bytes, with the scale in it, makes magnitudes of four codes with one
PRMT. Four words are transposed, so that code j of sixteen words makes sixteen columns of an operand and no value
changes its lane. ``placed_codes`` brings the rows' values into that order.
"""

import triton
import triton.language as tl

from sparse_attn.device import cast
from sparse_attn.device.fp8 import decode_exponent, decode_fp8_bf16
from sparse_attn.device.packed_dot import E8M0_NAN, PLAIN, four_nibbles

COLUMNS = tl.constexpr(128)  # of a step
UP, DOWN = tl.constexpr(6), tl.constexpr(-5)  # exponents that codes of e2m1 take and stay exact
U8X8 = tl.constexpr((tl.uint8,) * 8)


def _decode() -> str:
    """PTX. $0 to $7: code j of four words $8 to $11; tables of magnitudes 0 to 3: $12 to $15, 4 to 7: $16 to $19."""
    text = "{ .reg .b32 m, n, s, t, u, v; .reg .b32 l<4>, h<4>;\n"
    for n in range(4):
        word, low, high = f"${8 + n}", f"${12 + n}", f"${16 + n}"
        text += f"and.b32 m, {word}, 0x77777777; shr.u32 n, m, 16; shl.b32 s, {word}, 4;\n"
        text += f"prmt.b32 l{n}, {low}, {high}, m; prmt.b32 h{n}, {low}, {high}, n;\n"
        text += f"prmt.b32 t, {word}, s, 0x1504; lop3.b32 l{n}, l{n}, t, 0x80808080, 0xF8;\n"
        text += f"prmt.b32 t, {word}, s, 0x3726; lop3.b32 h{n}, h{n}, t, 0x80808080, 0xF8;\n"
    for part, to in (("l", 0), ("h", 4)):
        text += f"prmt.b32 s, {part}0, {part}1, 0x5140; prmt.b32 t, {part}2, {part}3, 0x5140;\n"
        text += f"prmt.b32 u, {part}0, {part}1, 0x7362; prmt.b32 v, {part}2, {part}3, 0x7362;\n"
        text += f"prmt.b32 ${to}, s, t, 0x5410; prmt.b32 ${to + 1}, s, t, 0x7632;\n"
        text += f"prmt.b32 ${to + 2}, u, v, 0x5410; prmt.b32 ${to + 3}, u, v, 0x7632;\n"
    return text + "}"


DECODE = tl.constexpr(_decode())
CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 12))


@triton.jit
def placed_codes(codes, ROWS: tl.constexpr):
    """Codes [ROWS, COLUMNS] in the order in which packed_dot_fp8 reads them: column c at c % 8 * 16 + c // 8."""
    codes = tl.permute(tl.reshape(codes, [ROWS, COLUMNS // 8, 8]), [0, 2, 1])
    return tl.reshape(codes, [ROWS, COLUMNS])


@triton.jit
def grouped_codes(codes, ROWS: tl.constexpr):
    """Codes [ROWS, COLUMNS] in the order of device/mxfp4_operand.py."""
    codes = tl.permute(tl.reshape(codes, [ROWS, 4, 4, 2, 4]), [0, 2, 3, 1, 4])
    return tl.reshape(codes, [ROWS, COLUMNS])


@triton.jit
def _spread(values, BLOCK_N: tl.constexpr):
    """[BLOCK_N, 4] -> [BLOCK_N, 16], each four times."""
    return tl.reshape(tl.broadcast_to(values[:, :, None], [BLOCK_N, 4, 4]), [BLOCK_N, 16])


@triton.jit
def _values(words, up, BLOCK_N: tl.constexpr, WAY: tl.constexpr):
    """words [BLOCK_N, 16], exponents int32 [BLOCK_N, 4] -> [BLOCK_N, COLUMNS], in the order of ``placed_codes``."""
    there = up >= DOWN
    if WAY == PLAIN:
        power = _spread(tl.where(there, decode_exponent(tl.maximum(up, DOWN) + 127), 0.0), BLOCK_N)
        w0, w1, w2, w3 = four_nibbles(words, 0, power)
        w4, w5, w6, w7 = four_nibbles(words, 4, power)
    else:
        low = _spread(tl.where(there, 0x3C383000 + up * 0x08080800, 0), BLOCK_N)
        high = _spread(tl.where(there, 0x4C484440 + up * 0x08080808, 0), BLOCK_N)
        w0, w1, w2, w3, w4, w5, w6, w7 = tl.inline_asm_elementwise(
            DECODE, CONSTRAINTS, [words, low, high], dtype=U8X8, is_pure=True, pack=4
        )
    even = tl.join(tl.join(w0, w4), tl.join(w2, w6))  # [BLOCK_N, 16, code / 4, code / 2 % 2]
    odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
    values = tl.permute(tl.reshape(tl.join(even, odd), [BLOCK_N, 16, 8]), [0, 2, 1])
    return tl.reshape(values, [BLOCK_N, COLUMNS])


@triton.jit
def packed_dot_fp8(
    x,  # uint8, rows of e4m3 whose values are placed
    x_row,  # [BLOCK_M]: offsets of the rows
    x_scales,  # pointers [BLOCK_M]: the rows' first scales; there may be no such rows, and is memory
    stride_scales,  # from a scale to that of the next COLUMNS
    x_inside,  # [BLOCK_M]: which there are
    words,  # pointers to int32 [BLOCK_N]: the weight's rows
    scales,  # pointers to uint8 [BLOCK_N]: the scales of those rows, which are contiguous
    steps,  # of COLUMNS
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WAY: tl.constexpr,
):
    """Sums fp32 [BLOCK_N, BLOCK_M]. Scales are read a step ahead. A load of fewer values than threads would be made by
    every thread for itself, up to 32 of the rows' scales a step: they are read in copies, one for some outputs each."""
    COPIES: tl.constexpr = 2 * BLOCK_N // BLOCK_M
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    at_word, at_scale, column = tl.arange(0, 16), tl.arange(0, 4), tl.arange(0, COLUMNS)
    if WAY != PLAIN:  # of that type from the start, or tiles go through registers on their way to the matrix unit
        x = x.to(tl.pointer_type(tl.float8e4nv))
    x_rows = x + x_row[:, None]
    x_scales = x_scales[None, None, :] + tl.zeros([COPIES, 1, 1], tl.int32)
    next_scale, next_row_scale = tl.load(scales[:, None] + at_scale[None, :]), tl.load(x_scales)
    for step in range(steps):
        word = tl.load(words[:, None] + (step * 16 + at_word)[None, :])
        mine = tl.load(x_rows + (column + step * COLUMNS)[None, :], mask=x_inside[:, None], other=0.0)
        scale = next_scale.to(tl.int32)
        ahead = tl.minimum(step + 1, steps - 1)
        next_scale = tl.load(scales[:, None] + (ahead * 4 + at_scale)[None, :])
        top = tl.max(scale, 1)
        values = _values(word, scale - top[:, None] + UP, BLOCK_N, WAY)
        if WAY == PLAIN:
            product = cast.dot(values, tl.trans(decode_fp8_bf16(mine, False)), tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
        else:
            product = tl.dot(values.to(tl.float8e4nv, bitcast=True), tl.trans(mine), out_dtype=tl.float32)
        row_scale = tl.broadcast_to(next_row_scale, [COPIES, BLOCK_N // COPIES, BLOCK_M])
        next_row_scale = tl.load(x_scales + ahead * stride_scales)
        left = tl.where(top == E8M0_NAN, float("nan"), decode_exponent(top) * 2.0**-6)
        sums += product * left[:, None] * tl.reshape(row_scale, [BLOCK_N, BLOCK_M])
    return sums
