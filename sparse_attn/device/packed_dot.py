"""Rows times a packed weight, weight first (swap-AB): the weight's codes are decoded in registers, as the matrix unit
takes them, and read once.

Codes come as words of 32 bits: eight of e2m1 or four of e4m3, neighbours in a row of the weight. Code j of every word
of eight words makes eight columns of an operand, so no value changes its lane. The rows' values lie in that order
already (``placed``): of every eight words first those of codes 0, then those of codes 1, and so on. Products are added
up in fp32. A step of BLOCK_K columns is one product where the matrix unit runs by itself (wgmma), whose operands of
e2m1 are decoded while it multiplies those before; with fewer than WIDE rows it is one for each code of a word, whose
operand needs no shared memory then.

Ways to decode:

- FAST: NVIDIA's packed bf16 instructions, four a pair of values. Bits of a code are moved into a bf16 value's exponent
  and mantissa, and one multiplication makes up for the bias. Exact, but for NaN of e4m3, which makes its output NaN at
  the end, and for e8m0 scales of e2m1 that are NaN or above 2: ``packed_dot`` says whether there were any.
- EXACT: of e2m1, with a few instructions more, right for all scales.
- PLAIN: arithmetic in fp32, for other GPUs and the interpreter. Right for all, too.
"""

import triton
import triton.language as tl

from sparse_attn.device import cast, pdl
from sparse_attn.device.fp8 import decode_exponent, decode_fp8

FAST, EXACT, PLAIN = tl.constexpr("fast"), tl.constexpr("exact"), tl.constexpr("plain")
CODES_PER_WORD = {"e2m1": 8, "e4m3": 4}
E8M0_NAN = tl.constexpr(255)
WIDE = tl.constexpr(16)
MOST_HALVINGS = tl.constexpr(3)  # of 64 words to 8
NAN_FLAGS = tl.constexpr(-0x7F7F7F80)  # 0x80808080 as int32
OPAQUE_ZERO = tl.constexpr("mov.b32 $0, 0;")  # the compiler cannot fold what is added to it
MOST_FAST_SCALE = tl.constexpr(128)  # the byte of 2
BF16X4 = tl.constexpr((tl.bfloat16,) * 4)
BF16X8 = tl.constexpr((tl.bfloat16,) * 8)


def _lanes(word: str, other: str, byte: int, shift: int, mask: str) -> str:
    """PTX: a byte of two words into the upper bits of a's bf16 lanes, its sign into bit 15."""
    select = byte | (8 | byte) << 4 | (4 + byte) << 8 | (12 + byte) << 12
    return f"prmt.b32 a, {word}, {other}, {select:#x}; shl.b32 a, a, {shift}; and.b32 a, a, {mask};"


def _e2m1(exact: bool) -> str:
    """$0 to $7: code j of two words $8, $9; $10: the scale of both. A code's bits are 2^-126 of its value as bf16's.
    fast: the scale is an e8m0 byte, and multiplies by 2^(126 + byte - 127); exact: it is two bf16 lanes."""
    text = "{ .reg .b32 a, c, d, s, z; mov.b32 z, 0x80008000; shl.b32 c, $8, 4; shl.b32 d, $9, 4;\n"
    text += "mov.b32 s, 0x7E807E80;\n" if exact else "mad.lo.u32 s, $10, 0x00800080, 0x3F003F00;\n"
    for j in range(8):
        pair = ("$8", "$9") if j % 2 else ("c", "d")
        text += _lanes(*pair, j // 2, 2, "0x81c081c0")
        if exact:
            text += "fma.rn.bf16x2 a, a, s, z;"
        text += f"fma.rn.bf16x2 ${j}, a, {'$10' if exact else 's'}, z;\n"
    return text + "}"


def _e4m3() -> str:
    """$0 to $3: code j of two words $4, $5; 2^120 makes up for the bias. 0x7F becomes 480."""
    text = "{ .reg .b32 a, s, z; mov.b32 z, 0x80008000; mov.b32 s, 0x7B807B80;\n"
    for j in range(4):
        text += _lanes("$4", "$5", j, 4, "0x87f087f0") + f"fma.rn.bf16x2 ${j}, a, s, z;\n"
    return text + "}"


FAST_E2M1, EXACT_E2M1 = tl.constexpr(_e2m1(False)), tl.constexpr(_e2m1(True))
FAST_E4M3 = tl.constexpr(_e4m3())


@triton.jit
def e2m1(nibbles):
    """e2m1 codes, the lower four bits -> fp32."""
    magnitude = nibbles & 7
    # 0 and 1 are 0 and 0.5; others have e2m1's exponent and mantissa at the places of fp32's.
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, (magnitude + 252) << 22)
    return (bits | ((nibbles & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def decode_scale(codes, E8M0: tl.constexpr):
    """Scales as stored -> fp32."""
    if E8M0:
        return tl.where(codes == E8M0_NAN, float("nan"), decode_exponent(codes))
    else:
        return codes


@triton.jit
def _nibble(words, J: tl.constexpr, scale):
    return cast.round_to_bf16(e2m1((words >> (4 * J)) & 15) * scale)


@triton.jit
def four_nibbles(words, J: tl.constexpr, scale):
    low = _nibble(words, J, scale), _nibble(words, J + 1, scale)
    return low[0], low[1], _nibble(words, J + 2, scale), _nibble(words, J + 3, scale)


@triton.jit
def _byte(words, J: tl.constexpr):
    return cast.round_to_bf16(decode_fp8((words >> (8 * J)) & 0xFF, False))


@triton.jit
def placed(column, EACH: tl.constexpr):
    """Where the value of a column lies in a row that packed_dot multiplies. EACH: codes of a word.

    Of every 16 columns that the matrix unit takes at once lane t gives 2t, 2t + 1, 2t + 8 and 2t + 9. Here these are
    two codes of words 2t and 2t + 1 of eight, so codes stay in their lanes, and in pairs as they are decoded."""
    code, word = column % EACH, column // EACH
    return word // 8 * (8 * EACH) + code * 8 + word % 8


@triton.jit
def _dot(values, x, x_inside, J: tl.constexpr, EACH: tl.constexpr, WORDS: tl.constexpr, sums):
    """sums + values [BLOCK_N, WORDS], codes J, times the transpose of those of the rows at x [BLOCK_M, 1].

    A batch of 16 outputs a warp: products of three axes are mma.sync in every triton. Of two axes and 8 rows they are
    wgmma in triton 3.8, which waits for each and takes all operands but the first through shared memory."""
    word = tl.arange(0, WORDS)
    at = word // 8 * (8 * EACH) + J * 8 + word % 8
    mine = tl.load(x + at[None, :], mask=x_inside[:, None], other=0.0)
    BLOCK_N: tl.constexpr = values.shape[0]
    BLOCK_M: tl.constexpr = mine.shape[0]
    apart = tl.reshape(values, [BLOCK_N // 16, 16, WORDS])
    mine = tl.broadcast_to(tl.trans(mine)[None, :, :], [BLOCK_N // 16, WORDS, BLOCK_M])
    return cast.dot(apart, mine, sums)


@triton.jit
def _dot_e2m1(
    sums, words, scales, x, x_inside, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WAY: tl.constexpr,
):  # fmt: skip
    """sums [BLOCK_N, BLOCK_M] + the product of words [BLOCK_N, BLOCK_K / 8], scales int32 [BLOCK_N, BLOCK_K / 32], and
    rows at x [BLOCK_M, 1]."""
    WORDS: tl.constexpr = BLOCK_K // 8
    if WAY == PLAIN:
        scales = decode_scale(scales, True)
    elif WAY == EXACT:  # two bf16 lanes; 2^-127 is subnormal
        scales = tl.where(scales == E8M0_NAN, 0x7FC0, tl.maximum(scales << 7, 0x40)) * 0x10001
    # A scale covers four words.
    scale = tl.reshape(tl.broadcast_to(scales[:, :, None], [BLOCK_N, WORDS // 4, 4]), [BLOCK_N, WORDS])
    if WAY == PLAIN:
        w0, w1, w2, w3 = four_nibbles(words, 0, scale)
        w4, w5, w6, w7 = four_nibbles(words, 4, scale)
    else:
        TEXT: tl.constexpr = FAST_E2M1 if WAY == FAST else EXACT_E2M1
        w0, w1, w2, w3, w4, w5, w6, w7 = tl.inline_asm_elementwise(
            TEXT, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [words, scale], dtype=BF16X8, is_pure=True, pack=2
        )
    # Few rows: a product for each code of a word.
    if BLOCK_M < WIDE:
        sums = _dot(w1, x, x_inside, 1, 8, WORDS, _dot(w0, x, x_inside, 0, 8, WORDS, sums))
        sums = _dot(w3, x, x_inside, 3, 8, WORDS, _dot(w2, x, x_inside, 2, 8, WORDS, sums))
        sums = _dot(w5, x, x_inside, 5, 8, WORDS, _dot(w4, x, x_inside, 4, 8, WORDS, sums))
        return _dot(w7, x, x_inside, 7, 8, WORDS, _dot(w6, x, x_inside, 6, 8, WORDS, sums))
    else:
        # Codes of a word behind each other: one product of all columns.
        even = tl.join(tl.join(w0, w4), tl.join(w2, w6))  # [BLOCK_N, WORDS, code / 4, code / 2 % 2]
        odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
        return _dot_at_once(tl.join(even, odd), x, x_inside, BLOCK_N, BLOCK_K, 8, sums)


@triton.jit
def _dot_e4m3(
    sums, words, x, x_inside, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WAY: tl.constexpr
):  # fmt: skip
    """As _dot_e2m1, of words [BLOCK_N, BLOCK_K / 4] and without scales."""
    WORDS: tl.constexpr = BLOCK_K // 4
    if WAY == PLAIN:
        w0, w1, w2, w3 = _byte(words, 0), _byte(words, 1), _byte(words, 2), _byte(words, 3)
    else:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            FAST_E4M3, "=&r,=&r,=&r,=&r,r,r", [words], dtype=BF16X4, is_pure=True, pack=2
        )
    if BLOCK_M < WIDE:
        sums = _dot(w1, x, x_inside, 1, 4, WORDS, _dot(w0, x, x_inside, 0, 4, WORDS, sums))
        return _dot(w3, x, x_inside, 3, 4, WORDS, _dot(w2, x, x_inside, 2, 4, WORDS, sums))
    else:
        return _dot_at_once(tl.join(tl.join(w0, w2), tl.join(w1, w3)), x, x_inside, BLOCK_N, BLOCK_K, 4, sums)


@triton.jit
def _dot_at_once(values, x, x_inside, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EACH: tl.constexpr, sums):
    """sums + values [BLOCK_N, BLOCK_K / EACH, ...], the codes of a word behind each other, times the transpose of the
    rows at x [BLOCK_M, 1]."""
    mine = tl.load(x + tl.arange(0, BLOCK_K)[None, :], mask=x_inside[:, None], other=0.0)
    values = tl.permute(tl.reshape(values, [BLOCK_N, BLOCK_K // EACH // 8, 8, EACH]), [0, 1, 3, 2])
    return cast.dot(tl.reshape(values, [BLOCK_N, BLOCK_K]), tl.trans(mine), sums)


@triton.jit
def _gathered(flags, BLOCK_N: tl.constexpr, WORDS: tl.constexpr):
    """int32 [BLOCK_N, 4]: the bits of flags [BLOCK_N, WORDS], of word w in w % 8 // 2.

    One lane has all of these words (see placed), and keeps a register for them, not one for each."""
    # Any word's bit is enough: halve until one register has them.
    one, other = tl.split(tl.reshape(flags, [BLOCK_N, WORDS // 8, 4, 2]))
    flags = tl.permute(one | other, [0, 2, 1])
    for halving in tl.static_range(1, MOST_HALVINGS + 1):
        if WORDS // 8 >> halving > 0:
            one, other = tl.split(tl.reshape(flags, [BLOCK_N, 4, WORDS // 8 >> halving, 2]))
            flags = one | other
    return tl.reshape(flags, [BLOCK_N, 4])


@triton.jit
def _interleaved(rows, BLOCK_N: tl.constexpr, WORDS: tl.constexpr):
    """Pointers [BLOCK_N * WORDS / 8] to chunks of eight words of rows, pointers [BLOCK_N], in the order in which the
    chunks lie in shared memory: the first chunks of eight rows, then their second ones. A warp reads eight rows at
    once, and so meets no bank conflicts."""
    CHUNKS: tl.constexpr = WORDS // 8
    at = tl.broadcast_to(tl.reshape(rows, [BLOCK_N // 8, 1, 8]), [BLOCK_N // 8, CHUNKS, 8])
    return tl.reshape(at, [BLOCK_N * CHUNKS]) + tl.arange(0, BLOCK_N * CHUNKS) // 8 % CHUNKS * 8


@triton.jit
def _words(chunks, first, BLOCK_N: tl.constexpr, WORDS: tl.constexpr):
    """int32 [BLOCK_N, WORDS] from word ``first`` on of rows whose chunks are _interleaved."""
    at = tl.multiple_of(chunks[:, None] + (first + tl.arange(0, 8))[None, :], (1, 16))  # 16 bytes at a time
    words = tl.reshape(tl.load(at), [BLOCK_N // 8, WORDS // 8, 8, 8])
    return tl.reshape(tl.permute(words, (0, 2, 1, 3)), [BLOCK_N, WORDS])


@triton.jit
def packed_dot(
    x,  # bf16, rows whose values are placed
    x_row,  # [BLOCK_M]: offsets of the rows
    x_inside,  # [BLOCK_M]: which there are
    words,  # pointers to int32 [BLOCK_N]: the weight's rows
    scales,  # pointers to uint8 or fp32 [BLOCK_N]: the scales of those rows, which are contiguous
    begin,  # columns multiplied, from ... to, in steps of BLOCK_K
    end,
    CODES: tl.constexpr,  # "e2m1", of 1x32 e8m0 scales; "e4m3"
    E8M0: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,  # of a scale block; e4m3: a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAY: tl.constexpr,
):
    """(sums fp32 [BLOCK_N, BLOCK_M]; whether they are wrong, for a scale that FAST cannot take)."""
    if CODES == "e2m1" and BLOCK_M < WIDE:
        sums = tl.zeros([BLOCK_N // 16, 16, BLOCK_M], tl.float32)
    else:
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if CODES == "e2m1":
        at_word, at_scale = tl.arange(0, BLOCK_K // 8), tl.arange(0, BLOCK_K // 32)
        x_rows = x + x_row[:, None]
        worst = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.int32)
        for step in range(begin, end):
            k = step * BLOCK_K
            word = tl.load(words[:, None] + (k // 8 + at_word)[None, :])
            scale = tl.load(scales[:, None] + (k // 32 + at_scale)[None, :]).to(tl.int32)
            # FAST goes on, and says at the end whether a scale was beyond it.
            if WAY == FAST:
                worst = tl.maximum(worst, scale)
            sums = _dot_e2m1(sums, word, scale, x_rows + k, x_inside, BLOCK_M, BLOCK_N, BLOCK_K, WAY)
        wrong = tl.max(worst) > MOST_FAST_SCALE
        sums = tl.reshape(sums, [BLOCK_N, BLOCK_M])
    else:
        chunks = _interleaved(words, BLOCK_N, BLOCK_K // 4)
        x_rows = x + x_row[:, None]
        flags = tl.zeros([BLOCK_N, 4], tl.int32)
        # The next step's scale is on its way.
        ahead = tl.load(scales + begin * BLOCK_K // BLOCK_COLUMNS)
        for step in range(begin, end):
            k = step * BLOCK_K
            word = _words(chunks, k // 4, BLOCK_N, BLOCK_K // 4)
            scale = decode_scale(ahead, E8M0)
            ahead = tl.load(scales + tl.minimum(step + 1, end - 1) * BLOCK_K // BLOCK_COLUMNS)
            # FAST makes 480 of NaN: remember which outputs have one.
            if WAY == FAST:
                each = (word & 0x7F7F7F7F) + 0x01010101  # bit 7 of a byte: NaN
                flags |= _gathered(each, BLOCK_N, BLOCK_K // 4)
            if BLOCK_M < WIDE:
                product = tl.zeros([BLOCK_N // 16, 16, BLOCK_M], tl.float32)
            else:
                product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            product = _dot_e4m3(product, word, x_rows + k, x_inside, BLOCK_M, BLOCK_N, BLOCK_K, WAY)
            sums += tl.reshape(product, [BLOCK_N, BLOCK_M]) * scale[:, None]
        if WAY == FAST:  # whatever it is multiplied by, a NaN makes its output NaN
            with_nan = tl.max(tl.where((flags & NAN_FLAGS) != 0, 1, 0), 1) > 0
            sums = tl.where(with_nan[:, None], float("nan"), sums)
        wrong = False
    return sums, wrong


@triton.jit
def exact_packed_dot(
    x, x_row, x_inside, words, scales, begin, end,
    CODES: tl.constexpr, E8M0: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """packed_dot's sums; a tile that FAST cannot take is multiplied again by EXACT.

    APART: addresses of the second product are computed anew. Else the first one keeps them in registers: 158 instead of
    120 a thread of 8 rows. Tiles of more rows spill more with it."""
    sums, wrong = packed_dot(
        x, x_row, x_inside, words, scales, begin, end, CODES, E8M0, BLOCK_COLUMNS, BLOCK_M, BLOCK_N, BLOCK_K, WAY
    )
    if WAY == FAST and CODES == "e2m1":
        # Rare: the whole tile once more.
        if wrong:
            APART: tl.constexpr = BLOCK_M < WIDE
            if APART:
                zero = tl.inline_asm_elementwise(OPAQUE_ZERO, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
            else:
                zero = 0
            sums, _ = packed_dot(
                x + zero, x_row, x_inside, words + zero, scales + zero, begin + zero, end + zero, CODES, E8M0,
                BLOCK_COLUMNS, BLOCK_M, BLOCK_N, BLOCK_K, EXACT,
            )  # fmt: skip
    return sums


@triton.jit
def place_rows(
    x,  # bf16 [rows, columns]
    out,  # bf16 [rows, columns], contiguous
    columns,  # a multiple of 8 * EACH
    stride_row,
    stride_column,
    EACH: tl.constexpr,  # codes of a word
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Values of every row in the order in which packed_dot reads them: a CTA's, BLOCK columns of a row. A thread reads
    and writes neighbours."""
    pdl.wait_last(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * stride_row + column.to(tl.int64) * stride_column, mask=column < columns, other=0.0)
    # Of eight words codes j lie side by side.
    values = tl.permute(tl.reshape(values, [BLOCK // (8 * EACH), 8, EACH]), [0, 2, 1])
    tl.store(out + row * columns + column, tl.reshape(values, [BLOCK]), mask=column < columns)
