"""e2m1 codes as an operand of the matrix unit on Hopper, decoded in registers, in Gluon.

Order of a product's 128 steps: value 32 t + 8 j + 4 h + i of a row, word j of group t, stands at 32 j + 16 h + 4 t + i.
So a lane's codes are one group's, 16 bytes, and every step of 32 takes a word of each group.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# $2: eight codes; $3, $4: bytes for codes 0 to 3 and 4 to 7. $0, $1: those of the first and the last four.
DECODE = gl.constexpr("""{
.reg .b32 low, high, even, first, last, s, t;
and.b32 low, $2, 0x77777777;
shr.u32 high, low, 16;
shl.b32 even, $2, 4;
prmt.b32 first, $3, $4, low;
prmt.b32 last, $3, $4, high;
prmt.b32 s, even, $2, 0x5140;
prmt.b32 t, even, $2, 0x7362;
lop3.b32 $0, s, 0x80808080, first, 0xEA;
lop3.b32 $1, t, 0x80808080, last, 0xEA;
}""")


@gluon.jit
def decode(words, low, high):
    """int32 words of an operand [ROWS, 32], in the order of the product's steps, from packed [ROWS, 4 groups, 4
    words] and tables [ROWS, 4]."""
    first, last = gl.inline_asm_elementwise(
        DECODE, "=r,=r,r,r,r", [words, gl.expand_dims(low, 2), gl.expand_dims(high, 2)],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(gl.permute(gl.join(first, last), (0, 2, 3, 1)), [words.shape[0], 32])


@gluon.jit
def operand(words, low, high, RESULT: gl.constexpr):
    """uint8 [ROWS, 128] of a product whose result has layout RESULT, as decode."""
    decoded = decode(words, low, high)
    twice = gl.join(decoded, decoded)
    four = gl.reshape(gl.join(twice, twice), [words.shape[0], 128])  # a word for each of its bytes: no instruction
    four = gl.convert_layout(four, gl.DotOperandLayout(0, RESULT, 4))
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [four], dtype=gl.uint8, is_pure=True, pack=4)
