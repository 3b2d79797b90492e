"""Tiles of keys as attention multiplies them: fetched from a cache and dequantised.

``base`` [rows] points at the records of a tile, ``valid`` [rows] says which of them may be read; the others give zeros.
"""

import triton
import triton.language as tl

from sparse_attn.device.cast import cast, convert
from sparse_attn.device.fp8 import decode_exponent, decode_fp8


@triton.jit
def load_columns(base, columns, WIDTH: tl.constexpr, PADDED: tl.constexpr, row_mask):
    """Load base[row] + columns, zero where the row is masked or the column lies beyond WIDTH."""
    pointers = base[:, None] + columns[None, :]
    if WIDTH == PADDED:
        return tl.load(pointers, mask=row_mask[:, None], other=0)
    else:
        return tl.load(pointers, mask=row_mask[:, None] & (columns < WIDTH)[None, :], other=0)


@triton.jit
def interleaved_values(
    base, columns, valid, D_V: tl.constexpr, PAD_V: tl.constexpr, GROUP: tl.constexpr, SCALE_OFFSET: tl.constexpr,
    FNUZ: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Dequantised fp32 [BLOCK_N, PAD_V] of records of D_V codes, with fp32 group scales from byte SCALE_OFFSET on."""
    # Codes of all columns, then one scale to GROUP of them.
    codes = decode_fp8(load_columns(base, columns, D_V, PAD_V, valid), FNUZ)
    scale_base = (base + SCALE_OFFSET).to(tl.pointer_type(tl.float32))
    GROUPS: tl.constexpr = D_V // GROUP
    # Powers of two: load a scale once a group.
    if GROUPS * GROUP == PAD_V and (GROUPS & (GROUPS - 1)) == 0:
        scales = tl.load(scale_base[:, None] + tl.arange(0, GROUPS)[None, :], mask=valid[:, None], other=0.0)
        grouped = tl.reshape(codes, [BLOCK_N, GROUPS, GROUP]) * scales[:, :, None]
        return tl.reshape(grouped, [BLOCK_N, PAD_V])
    else:
        known = valid[:, None] & (columns < D_V)[None, :]
        return codes * tl.load(scale_base[:, None] + (columns // GROUP)[None, :], mask=known, other=0.0)


@triton.jit
def planar_values(
    base, scale_base, columns, valid, D_V: tl.constexpr, PAD_V: tl.constexpr, GROUP: tl.constexpr, CODES: tl.constexpr,
    FNUZ: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[rows, PAD_V] of records of CODES codes and then bf16 values; ue8m0 group scales at ``scale_base`` [rows]."""
    # Whole groups of powers of two are loaded group by group; else a scale is loaded for each value.
    GROUPS: tl.constexpr = D_V // GROUP
    if D_V == PAD_V and GROUPS * GROUP == D_V and GROUP >= 16 and (GROUP & (GROUP - 1)) == 0:
        return _planar_groups(base, scale_base, valid, 0, GROUPS, CODES // GROUP, GROUP, FNUZ, DTYPE)
    else:
        rows = valid[:, None]
        is_code = columns < CODES
        codes = decode_fp8(load_columns(base, columns, CODES, PAD_V, valid), FNUZ)
        exponents = tl.load(scale_base[:, None] + (columns // GROUP)[None, :], mask=rows & is_code[None, :], other=0)
        rope_base = (base + CODES).to(tl.pointer_type(tl.bfloat16))
        is_rope = (columns >= CODES) & (columns < D_V)
        rope = tl.load(rope_base[:, None] + (columns - CODES)[None, :], mask=rows & is_rope[None, :], other=0)
        values = tl.where(is_code[None, :], codes * decode_exponent(exponents), rope.to(tl.float32))
        return cast(values, DTYPE)


@triton.jit
def _planar_groups(
    base, scale_base, valid, FIRST: tl.constexpr, COUNT: tl.constexpr, CODED: tl.constexpr, GROUP: tl.constexpr,
    FNUZ: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Groups FIRST to FIRST + COUNT - 1 side by side, CODED of all being fp8.

    Each group is a tile of its own, so that all of them, the bf16 ones too, come to lie alike in registers and joining
    them moves nothing.
    """
    if COUNT > 1:
        HALF: tl.constexpr = COUNT // 2
        left = _planar_groups(base, scale_base, valid, FIRST, HALF, CODED, GROUP, FNUZ, DTYPE)
        right = _planar_groups(base, scale_base, valid, FIRST + HALF, HALF, CODED, GROUP, FNUZ, DTYPE)
        return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [base.shape[0], COUNT * GROUP])
    elif FIRST < CODED:
        codes = load_columns(base + FIRST * GROUP, tl.arange(0, GROUP), GROUP, GROUP, valid)
        # Four scales are a word.
        words = (scale_base + FIRST // 4 * 4).to(tl.pointer_type(tl.int32))
        exponents = tl.load(words, mask=valid, other=0) >> (FIRST % 4 * 8)
        return cast(decode_fp8(codes, FNUZ) * decode_exponent(exponents & 0xFF)[:, None], DTYPE)
    else:
        rope = (base + CODED * GROUP).to(tl.pointer_type(tl.bfloat16)) + (FIRST - CODED) * GROUP
        return convert(load_columns(rope, tl.arange(0, GROUP), GROUP, GROUP, valid), DTYPE)
