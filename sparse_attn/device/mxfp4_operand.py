"""e2m1 codes as an operand of the matrix unit on Hopper, decoded in registers, in Gluon.

A lane's codes are one group's, 16 bytes. So of 128 columns those of fp8 and of bf16 have orders of their own:

- fp8: value 32 t + 8 j + 4 h + i of a row, word j of group t, stands at 32 j + 16 h + 4 t + i. Every step of 32 takes a
  word of each group.
- bf16: value 32 t + 4 s + 2 h + j of a row stands at 16 s + 8 h + 2 t + j. Every step of 16 takes half a word of each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _decode(behind: bool) -> str:
    """PTX. $0, $1: bytes of the first and the last four codes of word $2. $3, $4: bytes for codes 0 to 3 and 4 to 7.
    behind: all of it waits for $5, which is 0. The dependence takes no instruction of its own."""
    masked, even = (
        ("lop3.b32 low, $2, 0x77777777, $5, 0x6A;", "mad.lo.s32 even, $2, 16, $5;")
        if behind
        else ("and.b32 low, $2, 0x77777777;", "shl.b32 even, $2, 4;")
    )
    return f"""{{
.reg .b32 low, high, even, first, last, s, t;
{masked}
shr.u32 high, low, 16;
{even}
prmt.b32 first, $3, $4, low;
prmt.b32 last, $3, $4, high;
prmt.b32 s, even, $2, 0x5140;
prmt.b32 t, even, $2, 0x7362;
lop3.b32 $0, s, 0x80808080, first, 0xEA;
lop3.b32 $1, t, 0x80808080, last, 0xEA;
}}"""


DECODE, DECODE_BEHIND = gl.constexpr(_decode(False)), gl.constexpr(_decode(True))


@gluon.jit
def decode(words, low, high, zero=None):
    """int32 words of an operand [ROWS, 32], in the order of the product's steps, from packed [ROWS, 4 groups, 4
    words] and tables [ROWS, 4]. zero: int32, 0, as keep_order returns it: decoding waits for it; or None."""
    low, high = gl.expand_dims(low, 2), gl.expand_dims(high, 2)
    if zero is None:
        first, last = gl.inline_asm_elementwise(
            DECODE, "=r,=r,r,r,r", [words, low, high], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    else:
        first, last = gl.inline_asm_elementwise(
            DECODE_BEHIND, "=r,=r,r,r,r,r", [words, low, high, zero], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    return gl.reshape(gl.permute(gl.join(first, last), (0, 2, 3, 1)), [words.shape[0], 32])


@gluon.jit
def operand(decoded, RESULT: gl.constexpr):
    """uint8 [ROWS, 128] of a product whose result has layout RESULT, from what decode returns."""
    twice = gl.join(decoded, decoded)
    four = gl.reshape(gl.join(twice, twice), [decoded.shape[0], 128])  # a word for each of its bytes: no instruction
    four = gl.convert_layout(four, gl.DotOperandLayout(0, RESULT, 4))
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [four], dtype=gl.uint8, is_pure=True, pack=4)


def _exact(behind: bool) -> str:
    """PTX. $0 to $3: pairs of codes 0 and 1 to 6 and 7 of word $4, as bf16. behind: as _decode's, $5."""
    text = "{ .reg .b32 a, c, s, z; mov.b32 z, 0x80008000; mov.b32 s, 0x7E807E80;\n"
    text += "mad.lo.s32 c, $4, 16, $5;\n" if behind else "shl.b32 c, $4, 4;\n"
    for byte in range(4):  # each half: the byte twice, its sign above; its bits are 2^-126 of its value as bf16's
        select = byte | (8 | byte) << 4 | (4 + byte) << 8 | (12 + byte) << 12
        text += f"prmt.b32 a, c, $4, {select:#x}; shl.b32 a, a, 2; and.b32 a, a, 0x81c081c0;\n"
        text += f"fma.rn.bf16x2 ${byte}, a, s, z;\n"
    return text + "}"


BEGIN_EXACT, BEGIN_EXACT_BEHIND = gl.constexpr(_exact(False)), gl.constexpr(_exact(True))
SCALE = gl.constexpr("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }")


@gluon.jit
def begin_exact(words, zero=None):
    """int32 pairs of bf16 [ROWS, 4 groups, 4 words, 2, 2], without their scales, of packed [ROWS, 4 groups, 4 words];
    for exact_operand. zero: as decode's."""
    if zero is None:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            BEGIN_EXACT, "=&r,=&r,=&r,=&r,r", [words], dtype=(gl.int32,) * 4, is_pure=True, pack=1
        )
    else:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            BEGIN_EXACT_BEHIND, "=&r,=&r,=&r,=&r,r,r", [words, zero], dtype=(gl.int32,) * 4, is_pure=True, pack=1
        )
    return gl.join(gl.join(p0, p1), gl.join(p2, p3))  # last dimensions: pair % 2, pair / 2


@gluon.jit
def exact_operand(pairs, scales, RESULT: gl.constexpr):
    """bf16 [ROWS, 128] of a product whose result has layout RESULT, from what begin_exact returns and ue8m0 scales
    int32 [ROWS, 4 groups]: exact, and NaN of 255."""
    ROWS: gl.constexpr = pairs.shape[0]
    lanes = gl.where(scales == 255, 0x7FC0, gl.maximum(scales << 7, 0x40)) * 0x10001  # 2^-127 is subnormal
    WORDS: gl.constexpr = lanes.type.layout.parent
    lanes = gl.expand_dims(lanes, 2) + gl.zeros([ROWS, 4, 4], gl.int32, WORDS)
    lanes = gl.join(lanes, lanes)
    lanes = gl.join(lanes, lanes)
    pairs = gl.inline_asm_elementwise(SCALE, "=r,r,r", [pairs, lanes], dtype=gl.int32, is_pure=True, pack=1)
    # Half a word s of group t: its pairs h go to columns 16 s + 8 h + 2 t.
    pairs = gl.reshape(gl.permute(pairs, (0, 2, 4, 3, 1)), [ROWS, 64])
    twice = gl.reshape(gl.join(pairs, pairs), [ROWS, 128])  # a pair for each value: no instruction
    twice = gl.convert_layout(twice, gl.DotOperandLayout(0, RESULT, 2), assert_trivial=True)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], dtype=gl.bfloat16, is_pure=True, pack=2)
