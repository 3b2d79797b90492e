"""What the Hopper kernels of attention share: sizes, ranges of rows, gathers, and how a row's softmax ends."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_attn.device.hopper import async_load
from sparse_attn.device.triton_private import aggregate
from sparse_attn.ops.attention.sparse.hopper import constants

D_V = gl.constexpr(constants.D_V)
D_ROPE = gl.constexpr(constants.D_ROPE)
BLOCK_M = gl.constexpr(constants.BLOCK_M)
BLOCK_N = gl.constexpr(constants.BLOCK_N)
LOAD_BYTES = gl.constexpr(constants.LOAD_BYTES)
WORD_BYTES = gl.constexpr(constants.WORD_BYTES)

Scalar = gl.tensor | gl.constexpr  # a field of an aggregate: an argument of the kernel, constexpr where it is 1 or None


@aggregate
class RowBounds:
    """Where the indices of a row lie: into the first cache, and into the second."""

    indptr: gl.tensor
    extra_indptr: gl.tensor
    capacity: Scalar
    extra_capacity: Scalar
    head_blocks: Scalar  # CTAs of a row; 1 for swap-AB
    lengths: Scalar  # as row_range takes them
    extra_lengths: Scalar


@aggregate
class KvCache:
    """A cache and the indices into it."""

    cache: gl.tensor
    indices: gl.tensor
    num_slots: Scalar
    block_size: Scalar
    stride_block: Scalar  # in LOAD_BYTES; of a plain row, which is a block


@aggregate
class Record:
    """The format of a cache's records: codes, codes of a scale, then bytes."""

    LATENT: gl.constexpr
    GROUP: gl.constexpr
    TOKEN: gl.constexpr  # from record to record
    SCALES: gl.constexpr  # planar: a token's scales, behind a block's records; else 0
    ROPE_OFFSET: gl.constexpr  # of the bf16 values in a record
    PLANAR: gl.constexpr
    PADDED_BLOCKS: gl.constexpr  # slots do not follow each other through the whole cache


@gluon.jit
def row_range(indptr, lengths, token, capacity):
    # An indptr that lies outside is clipped: no kernel reads indices that are not there.
    """(begin, count) of a row's indices, inside [0, capacity]; only the first lengths[token], unless that is None."""
    begin = gl.maximum(gl.load(indptr + token), 0)
    count = gl.maximum(gl.minimum(gl.load(indptr + token + 1), capacity) - begin, 0)
    # A row may use fewer indices than it has room for.
    if lengths is not None:
        count = gl.minimum(count, gl.maximum(gl.load(lengths + token), 0))
    return begin, count


@gluon.jit
def gather(into, rows, valid, first: gl.constexpr, width: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns [first, first + width) of a tile's rows, zero where a row is not valid; not awaited."""
    column = gl.arange(0, width, layout=gl.SliceLayout(0, LAYOUT)) + first
    pointers = gl.expand_dims(rows, 1) + gl.expand_dims(column, 0)
    async_load(into, pointers, mask=gl.expand_dims(valid, 1))


@gluon.jit
def normalise(m, l, sink, HAS_SINK: gl.constexpr, split, INF_LSE: gl.constexpr):
    """(what to multiply the accumulator by, lse) of rows with maximum ``m`` (base 2) and denominator ``l``. A ``sink``
    adds to the denominator, not to lse. split: of split-KV partials lse is in base 2, and no sink counts yet. INF_LSE:
    lse of an empty row that is no partial is inf, not -inf."""
    # An empty row has output 0 and lse -inf: no logarithm or quotient of 0.
    empty = l == 0.0
    lse2 = m + gl.log2(gl.where(empty, 1.0, l))
    factor = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, l))
    if HAS_SINK:
        # A sink is one more key, of natural-log score ``sink``, without a value.
        with_sink = factor / (1.0 + gl.exp2(sink * 1.4426950408889634 - gl.where(empty, 0.0, lse2)))
        with_sink = gl.where(empty, 0.0, with_sink)  # whatever the sink is
        factor = gl.where(split, factor, with_sink)
    # Partials keep base 2, which combine reads; ln 2 makes the row's lse natural.
    if INF_LSE:
        lse = gl.where(
            empty, gl.where(split, -float("inf"), float("inf")), lse2 * gl.where(split, 1.0, 0.6931471805599453)
        )
    else:
        lse = gl.where(empty, -float("inf"), lse2 * gl.where(split, 1.0, 0.6931471805599453))
    return factor, lse
