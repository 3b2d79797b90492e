"""Lazy rescaling (FlashAttention-4): a row's maximum lags behind, and sums are rescaled only where they have to be.

P may be relative to any number near its row's largest score: up to 2^RESCALE_THRESHOLD it is as exact as up to 1, since
bf16 and fp32 round relatively, and sums in fp32 have the room. So the lagged maximum moves only to a score that exceeds
it by more than the threshold. After the first keys of a row that is rare. A warp none of whose rows has moved branches
around its products: 128 a thread, between QK and the PV that waits for them. The threshold is FlashAttention-4's, too.

A warp decides for its own rows, and a factor of one changes nothing: a row's bits are the same beside any others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

RESCALE_THRESHOLD = gl.constexpr(8.0)  # in base 2
FAR = gl.constexpr(2.0**30)  # of such a number the last place is 64
MAX_P = gl.constexpr(2.0**RESCALE_THRESHOLD.value)  # the largest that P may be
ACC_VALUES = gl.constexpr(128)  # of the accumulator, fp32, in a thread
P_WORDS = gl.constexpr(16)  # of P, two bf16 values each, in a thread


def _unless_one(registers: int, values: int, product: str) -> str:
    """PTX that copies ``registers``, and multiplies them where any thread of the warp has a factor that is not one.

    ``product`` formats one multiplication: (to, from, factor). Operands are the outputs, the inputs, then the fp32
    factors, so many ``values`` of a register each. A thread's values are of two rows, by turns two of each."""
    first = 2 * registers
    copies = "\n".join(f"mov.b32 ${at}, ${registers + at};" for at in range(registers))
    products = "\n".join(
        product.format(f"${at}", f"${registers + at}", f"${first + values * at}") for at in range(registers)
    )
    return f"""{{
.reg .pred one, other, any;
.reg .b16 low, high;
.reg .f32 x, y;
setp.neu.f32 one, ${first}, 0f3F800000;
setp.neu.or.f32 other, ${first + 2}, 0f3F800000, one;
vote.sync.any.pred any, other, 0xffffffff;
{copies}
@!any bra.uni done;
{products}
done:
}}"""


def _constraints(registers: int, kind: str, values: int) -> str:
    return ",".join([f"={kind}"] * registers + [kind] * registers + ["f"] * (values * registers))


RESCALE_ACC = gl.constexpr(_unless_one(ACC_VALUES.value, 1, "mul.f32 {0}, {0}, {2};"))
RESCALE_ACC_OPERANDS = gl.constexpr(_constraints(ACC_VALUES.value, "f", 1))
RESCALE_P = gl.constexpr(
    _unless_one(
        P_WORDS.value,
        2,
        """mov.b32 {{low, high}}, {1};
cvt.f32.bf16 x, low;
cvt.f32.bf16 y, high;
mul.f32 x, x, {2};
mul.f32 y, y, {2};
cvt.rn.bf16x2.f32 {0}, y, x;""",
    )
)
RESCALE_P_OPERANDS = gl.constexpr(_constraints(P_WORDS.value, "r", 2))


@gluon.jit
def initial_max(scale_log2):
    """The maximum of a row before its first key: finite, and so low that a score below it is -inf."""
    return -3.4028234663852886e38 / gl.maximum(scale_log2, 1.0)


@gluon.jit
def in_log2(m, scale_log2):
    """The base-2 score of product ``m`` (of QK, unscaled), rounded: never part of a fused operation."""
    scale = gl.full(m.shape, scale_log2, gl.float32, m.type.layout)
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [m, scale], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _power_below(scale_log2):
    return (scale_log2.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def origin(m, scale_log2):
    """(scale, origin) of a row whose P, relative to product ``m``, is 2^(product * scale - origin).

    That is one fused operation, which does not round the product, while the origin is rounded: the largest P is 1 but
    for half a unit of the origin's last place. Where that is much, the row is far: its products differ by so much that
    P is 1 or 0, and a power of two below the scale, by which no product is rounded, serves as well.
    """
    # The rounded score is the origin, so that P of the largest product is 1 up to that rounding.
    score = in_log2(m, scale_log2)
    far = gl.abs(score) >= FAR
    return gl.where(far, _power_below(scale_log2), scale_log2), gl.where(far, m * _power_below(scale_log2), score)


@gluon.jit
def far_max(base, scale_log2):
    """The product ``m`` from which ``origin`` made ``base``, of a far row."""
    # 1 / 2^n by its exponent bits.
    return base * (0x7F000000 - _power_below(scale_log2).to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def lagged_max(m, tile_max, scale_log2):
    """The product that a row's P is relative to after a tile whose largest product is ``tile_max``; ``m`` before it."""
    return gl.where((tile_max - m) * scale_log2 > RESCALE_THRESHOLD, tile_max, m)


@gluon.jit
def rescale_factor(m, m_new, scale_log2):
    """What turns sums relative to product ``m`` into sums relative to ``m_new``: 1 where they are equal, and 0 where
    either is far and they are not."""
    return gl.exp2(origin(m, scale_log2)[1] - origin(m_new, scale_log2)[1])


@gluon.jit
def denominator(m_log2, l):
    """The row sum ``l`` of a row whose P is relative to base-2 score ``m_log2``: NaN where that is infinite."""
    return gl.where(m_log2 == float("inf"), float("nan"), l)


@gluon.jit
def _by_row(factor, like):
    factors, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, like.type.layout)), 1), like)
    return factors


@gluon.jit
def rescale_acc(acc, factor):
    """A warpgroup's fp32 accumulator [64, 256], times ``factor`` [64]."""
    # pack: all values of a thread in one piece of PTX, whose warp votes once.
    operands = [acc, _by_row(factor, acc)]
    return gl.inline_asm_elementwise(
        RESCALE_ACC, RESCALE_ACC_OPERANDS, operands, dtype=gl.float32, is_pure=False, pack=ACC_VALUES
    )


@gluon.jit
def rescale_p(p, factor):
    """bf16 P [64, 64] as a matrix operand of a warpgroup, times ``factor`` [64]: then rounded twice."""
    # Two factors a word: P's values are packed in pairs.
    factors = _by_row(factor, p.to(gl.float32))
    return gl.inline_asm_elementwise(
        RESCALE_P, RESCALE_P_OPERANDS, [p, factors], dtype=gl.bfloat16, is_pure=False, pack=2 * P_WORDS
    )
