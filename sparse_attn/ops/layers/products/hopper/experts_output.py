"""Where sums of the experts' product on Hopper go: scaled, gated or weighted, brought in order and stored."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_attn.device import cast
from sparse_attn.device.triton_private import aggregate
from sparse_attn.ops.layers.products.hopper import constants
from sparse_attn.ops.layers.products.portable.routed_rows import gated

BOX = gl.constexpr(constants.BOX)
CONSUMERS = gl.constexpr(constants.CONSUMERS)


@aggregate
class Output:
    """out: [rows, 128 * blocks], contiguous: GATED rows as they are sorted, others where ``order`` says, times their
    weights. row_scales: fp32 [rows as they are sorted], what products of fp8 rows are multiplied by. clamp: of gates
    and ups. SCALED: whether there are row_scales. PLACED: in the order of an operand of bf16."""

    out: gl.tensor
    order: gl.tensor
    row_scales: gl.tensor
    weights: gl.tensor
    blocks: gl.tensor
    clamp: gl.tensor
    GATED: gl.constexpr
    CLAMPED: gl.constexpr
    SCALED: gl.constexpr
    PLACED: gl.constexpr


@gluon.jit
def _parts(sums):
    """(first, second) [BOX, BLOCK_M] of a product's sums, outputs in their order."""
    # Outputs 0, 4, 1, 5, ... back in order, and both boxes apart.
    sums = gl.permute(gl.reshape(sums, [BOX // 8, 2, 2, 2, 2, sums.shape[1]]), (0, 4, 2, 3, 5, 1))
    first, second = gl.split(sums)
    return gl.reshape(first, [BOX, sums.shape[4]]), gl.reshape(second, [BOX, sums.shape[4]])


@gluon.jit
def halves(sums):
    """The sums of the first and of the last half of the rows."""
    M: gl.constexpr = sums.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(sums, [sums.shape[0], 2, M]), (0, 2, 1)))


@gluon.constexpr_function
def rows_layout(placed):
    """Of a tile's values as they are stored [BLOCK_M, BOX]: a thread has neighbours of a row."""
    each = 2 if placed else 8
    return gl.BlockedLayout([1, each], [each, 32 // each], [4, 1], [1, 0])


@gluon.jit
def _rows(row, end, output, BLOCK_M: gl.constexpr):
    """(rows of ``out``, what their values are multiplied by, whether they are the expert's) of sorted rows from ``row``
    on, of which those before ``end`` are the expert's."""
    ROWS: gl.constexpr = gl.SliceLayout(1, rows_layout(output.PLACED))
    at = row + gl.arange(0, BLOCK_M, ROWS)
    inside = at < end
    # Gated rows stay in sorted order; others go to the row itself, times the token's weight.
    if output.GATED:
        to, factor = at, gl.zeros([BLOCK_M], gl.float32, ROWS)
    else:
        to = gl.load(output.order + at, mask=inside, other=0)
        factor = gl.load(output.weights + to, mask=inside, other=0.0)
        if output.SCALED:
            factor *= gl.load(output.row_scales + at, mask=inside, other=0.0)
    return to, factor, inside


@gluon.jit
def _store(values, rows, output, column):
    """values: [BOX, BLOCK_M] of outputs from ``column`` on. rows: what _rows returns."""
    TO: gl.constexpr = rows_layout(output.PLACED)
    to, factor, inside = rows
    values = gl.convert_layout(gl.permute(values, (1, 0)), TO)
    if not output.GATED:
        values *= gl.expand_dims(factor, 1)
    column = column + gl.arange(0, BOX, gl.SliceLayout(0, TO))
    if output.PLACED:  # as device/mxfp4_operand has bf16
        column = column // 128 * 128 + column % 32 // 4 * 16 + column // 2 % 2 * 8 + column // 32 % 4 * 2 + column % 2
        column = gl.max_contiguous(gl.multiple_of(column, 2), 2)
    place = gl.expand_dims(to.to(gl.int64) * (output.blocks * 128), 1) + gl.expand_dims(column, 0)
    gl.store(output.out + place, cast.cast(values, output.out.dtype.element_ty), mask=gl.expand_dims(inside, 1))


@gluon.jit
def finish(sums, row, end, output, column):
    """Store a consumer's sums of sorted rows from ``row`` to ``end`` and of outputs from ``column`` on."""
    BLOCK_M: gl.constexpr = sums.shape[1]
    rows = _rows(row, end, output, BLOCK_M)
    if output.GATED:
        # The row's scale has to come before silu, which is not linear.
        if output.SCALED:
            at = row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, sums.type.layout))
            sums *= gl.expand_dims(gl.load(output.row_scales + at, mask=at < end, other=0.0), 0)
        first, second = _parts(sums)
        _store(gated(first, second, output.clamp, output.CLAMPED), rows, output, column)
    else:
        first, second = _parts(sums)
        _store(first, rows, output, column)
        _store(second, rows, output, column + CONSUMERS * BOX)
