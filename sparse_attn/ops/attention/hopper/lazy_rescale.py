"""Softmax sums that stay relative to a maximum of some keys ago, and are rescaled only where they have to be.

Weights may be relative to any number near their row's largest score: up to 2^SLACK they are as exact as up to 1, since
bf16 and fp32 round relatively, and sums in fp32 have the room. So a row's reference moves only to a score that exceeds
it by more than SLACK, which after the first keys of a row is rare; and a warp none of whose rows has moved branches
around its products, 128 a thread between scores and the product that waits for them. FlashAttention-4 rescales as
seldom, with this slack.

A warp decides for its own rows, and a factor of one changes nothing: a row's bits are the same beside any others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SLACK = gl.constexpr(8.0)  # in base 2
FAR = gl.constexpr(2.0**30)  # of such a number the last place is 64
MOST = gl.constexpr(2.0**SLACK.value)  # what a weight may be
SUMS = gl.constexpr(128)  # fp32 values of a thread
WORDS = gl.constexpr(16)  # pairs of bf16 values of a thread


def _unless_one(registers: int, values: int, product: str) -> str:
    """PTX: registers from the ones behind them; where any thread of the warp has a factor that is not one, then
    ``product`` (to, from, factor) for each. A register holds so many ``values``, with fp32 factors behind all
    registers. A thread's values are of two rows, by turns two of each."""
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


TIMES = gl.constexpr(_unless_one(SUMS.value, 1, "mul.f32 {0}, {0}, {2};"))
TIMES_OPERANDS = gl.constexpr(_constraints(SUMS.value, "f", 1))
TIMES_PAIR = gl.constexpr(
    _unless_one(
        WORDS.value,
        2,
        """mov.b32 {{low, high}}, {1};
cvt.f32.bf16 x, low;
cvt.f32.bf16 y, high;
mul.f32 x, x, {2};
mul.f32 y, y, {2};
cvt.rn.bf16x2.f32 {0}, y, x;""",
    )
)
TIMES_PAIR_OPERANDS = gl.constexpr(_constraints(WORDS.value, "r", 2))


@gluon.jit
def lowest(scale_log2):
    """The product that weights are relative to before there are any: finite, and so low that the score of one below is
    -inf."""
    return -3.4028234663852886e38 / gl.maximum(scale_log2, 1.0)


@gluon.jit
def in_log2(m, scale_log2):
    """The score of product ``m`` in base 2, rounded: never part of a fused operation."""
    scale = gl.full(m.shape, scale_log2, gl.float32, m.type.layout)
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [m, scale], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _power_below(scale_log2):
    return (scale_log2.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def origin(m, scale_log2):
    """(scale, origin) of a row whose weights, relative to product ``m``, are 2^(product * scale - origin).

    That is one fused operation, which does not round the product, while the origin is rounded: the largest weight is 1
    but for half a unit of the origin's last place. Where that is much, the row is far: its products differ by so much
    that all weights are 1 or 0, and a power of two below the scale, by which no product is rounded, serves as well.
    """
    score = in_log2(m, scale_log2)
    far = gl.abs(score) >= FAR
    return gl.where(far, _power_below(scale_log2), scale_log2), gl.where(far, m * _power_below(scale_log2), score)


@gluon.jit
def product_of(base, scale_log2):
    """What ``origin`` made ``base`` of, of a far row."""
    return base * (0x7F000000 - _power_below(scale_log2).to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def reference(m, seen, scale_log2):
    """The product that a row's weights are relative to, once its largest one is ``seen``; ``m`` before."""
    return gl.where((seen - m) * scale_log2 > SLACK, seen, m)


@gluon.jit
def rescaling(m, top, scale_log2):
    """What weights relative to ``m`` are to be multiplied by to be relative to ``top``."""
    score = in_log2(top, scale_log2)
    factor = gl.exp2(in_log2(m, scale_log2) - score)
    return gl.where(gl.abs(score) >= FAR, gl.where(m == top, 1.0, 0.0), factor)


@gluon.jit
def settle(top, l):
    """The denominator of a row whose weights are relative to score ``top`` in base 2: NaN where that is infinite."""
    return gl.where(top == float("inf"), float("nan"), l)


@gluon.jit
def _by_row(factor, like):
    factors, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, like.type.layout)), 1), like)
    return factors


@gluon.jit
def rescale_sums(sums, factor):
    """fp32 sums of a matrix product [64, 256] by a warpgroup, times ``factor`` [64]."""
    return gl.inline_asm_elementwise(
        TIMES, TIMES_OPERANDS, [sums, _by_row(factor, sums)], dtype=gl.float32, is_pure=False, pack=SUMS
    )


@gluon.jit
def rescale_weights(weights, factor):
    """bf16 weights [64, 64] as a matrix operand of a warpgroup, times ``factor`` [64]: then rounded twice."""
    factors = _by_row(factor, weights.to(gl.float32))
    return gl.inline_asm_elementwise(
        TIMES_PAIR, TIMES_PAIR_OPERANDS, [weights, factors], dtype=gl.bfloat16, is_pure=False, pack=2 * WORDS
    )
