"""What the Hopper kernels of paged index scores share: how long rows are, a CTA's run of tiles, and where scores go.

README.md has the schedule.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_attn.device.hopper import launch_dependents
from sparse_attn.device.triton_private import aggregate
from sparse_attn.ops.indexer.scores.hopper.common import (
    BLOCK_KV,
    Run,
    Scalar,
    maxima_layout,
    scores_layout,
    search,
    share,
)

CHUNK = gl.constexpr(128)  # query blocks whose tiles are counted at a time
L2_BYTES = gl.constexpr(8 << 20)  # of scores, up to which the L2 holds them beside the keys that stream through it
ENTRIES = gl.constexpr(32)  # of a block table that the producer holds, one to a lane


@aggregate
class Lengths:
    """Positions that each row sees: ``lens`` [requests, NEXT_N], at most ``max_context``; BLOCK_Q rows of a request are
    a query block."""

    lens: gl.tensor
    query_blocks: Scalar
    max_context: Scalar
    stride_request: Scalar
    stride_row: Scalar
    BLOCK_Q: gl.constexpr
    NEXT_N: gl.constexpr


@aggregate
class Output:
    """weights: of the heads, and where scores and the highest of each GROUP neighbours go."""

    weights: gl.tensor
    out: gl.tensor
    maxima: gl.tensor
    stride_weights_row: Scalar
    stride_weights_head: Scalar
    stride_out: Scalar
    stride_maxima: Scalar
    CLEAR: gl.constexpr
    GROUP: gl.constexpr


@gluon.constexpr_function
def blocks_of(next_n, block_q):
    """Query blocks of a request."""
    return -(-next_n // block_q)


@gluon.jit
def lengths_of(lengths, query_block):
    """Positions that each row of a query block sees, as they are given, the last again for rows that do not exist: a
    tuple."""
    BLOCKS: gl.constexpr = blocks_of(lengths.NEXT_N, lengths.BLOCK_Q)
    first = query_block % BLOCKS * lengths.BLOCK_Q
    at = lengths.lens + (query_block // BLOCKS).to(gl.int64) * lengths.stride_request
    found = ()
    # The last row again where a request has fewer: its length changes no maximum.
    for n in gl.static_range(lengths.BLOCK_Q):
        found = found + (gl.load(at + gl.minimum(first + n, lengths.NEXT_N - 1) * lengths.stride_row),)
    return found


@gluon.jit
def _tiles_of_rows(rows, max_context):
    """Tiles of a query block, from the lengths of its rows."""
    longest = gl.maximum(rows[0], 0)
    for n in gl.static_range(1, len(rows)):
        longest = gl.maximum(longest, rows[n])
    return (gl.minimum(longest, max_context) + BLOCK_KV - 1) // BLOCK_KV


@gluon.jit
def tiles_of(lengths, query_block):
    """Tiles of a query block."""
    return _tiles_of_rows(lengths_of(lengths, query_block), lengths.max_context)


@gluon.jit
def _chunk_lengths(lengths, begin):
    """Lengths of CHUNK query blocks, each by one thread; of the last one behind it, for ptxas branches about every
    mbarrier.init behind a masked load."""
    # A chunk has as many query blocks as a warpgroup has threads.
    query_block = begin + gl.arange(0, CHUNK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return lengths_of(lengths, gl.minimum(query_block, lengths.query_blocks - 1))


@gluon.jit
def _chunk_tiles(rows, lengths, begin):
    """Tiles of CHUNK query blocks, in every warp. The lengths are waited for here: ptxas hoists arithmetic, but no
    shared memory."""
    # Each warp has all of a chunk: sums over it stay in a warp.
    EVERYWHERE: gl.constexpr = gl.BlockedLayout([CHUNK // 32], [32], [4], [0])
    copies = ()
    for n in gl.static_range(len(rows)):
        copies = copies + (gl.convert_layout(rows[n], EVERYWHERE),)
    exists = begin + gl.arange(0, CHUNK, layout=EVERYWHERE) < lengths.query_blocks
    return gl.where(exists, _tiles_of_rows(copies, lengths.max_context), 0)


@gluon.jit
def entries_of(table, column, max_blocks):
    """Of a block table, as they are; -1 behind its last."""
    return gl.load(table + column, mask=column < max_blocks, other=-1)


@gluon.jit
def find_run(lengths, pdl_tiles):
    """(the CTA's run, whether scores are to stay in the L2); dependent launches may start where there are at most
    ``pdl_tiles`` tiles. Every warp looks by itself."""
    # First pass: tiles of all query blocks, CHUNK at a time.
    rows = _chunk_lengths(lengths, 0)
    tiles = _chunk_tiles(rows, lengths, 0)
    counted = gl.sum(tiles, 0)
    total = counted
    for chunk in range(CHUNK, lengths.query_blocks, CHUNK):
        total += gl.sum(_chunk_tiles(_chunk_lengths(lengths, chunk), lengths, chunk), 0)
    if total <= pdl_tiles:
        launch_dependents()
    # Second pass: which query blocks the CTA's tiles begin and end in. The first chunk is still in registers.
    begin, end = share(total)
    first, skipped, last = search(tiles, 0, begin, end, 0, 0, 0)
    for chunk in range(CHUNK, lengths.query_blocks, CHUNK):
        tiles = _chunk_tiles(_chunk_lengths(lengths, chunk), lengths, chunk)
        first, skipped, last = search(tiles, counted, begin, end, first, skipped, last)
        counted += gl.sum(tiles, 0)
    last = gl.minimum(last + 1, lengths.query_blocks)
    count = end - begin
    keep_in_l2 = total <= L2_BYTES // (BLOCK_KV * lengths.BLOCK_Q * 4)
    return Run(first, begin - skipped, last, count), keep_in_l2


@gluon.jit
def clear(lengths, output):
    """-inf behind the last tile of every query block; CTAs share one where there are fewer of them."""
    NEXT_N: gl.constexpr = lengths.NEXT_N
    BLOCK_Q: gl.constexpr = lengths.BLOCK_Q
    BLOCKS: gl.constexpr = blocks_of(NEXT_N, BLOCK_Q)
    WIDTH: gl.constexpr = 512
    # Four warps store 2 KB of a row at a time.
    column = gl.arange(0, WIDTH, layout=gl.BlockedLayout([1], [32], [4], [0]))
    nothing = gl.full([WIDTH], -float("inf"), gl.float32, gl.BlockedLayout([1], [32], [4], [0]))
    ctas, query_blocks = gl.num_programs(0), lengths.query_blocks
    # CTAs with the same remainder share a query block, each a part of it.
    part = gl.program_id(0) // query_blocks
    for query_block in range(gl.program_id(0) % query_blocks, query_blocks, ctas):
        parts = gl.maximum((ctas - query_block + query_blocks - 1) // query_blocks, 1)
        # Positions up to the last tile's end are the consumers'.
        begin = tiles_of(lengths, query_block) * BLOCK_KV
        first_row = query_block % BLOCKS * BLOCK_Q
        to = output.out + ((query_block // BLOCKS).to(gl.int64) * NEXT_N + first_row) * output.stride_out + column
        for position in range(begin + part * WIDTH, lengths.max_context, parts * WIDTH):
            for n in gl.static_range(BLOCK_Q):
                inside = (position + column < lengths.max_context) & (first_row + n < NEXT_N)
                gl.store(to + n * output.stride_out + position, nothing, mask=inside)


@gluon.jit
def _store(to, values, mask, keep_in_l2):
    """``keep_in_l2``: while it has anything else to evict. A write between reads costs DRAM more than its bytes."""
    if keep_in_l2:
        gl.store(to, values, mask=mask, eviction_policy="evict_last")
    else:
        gl.store(to, values, mask=mask)


@gluon.jit
def own_rows(FIRST_ROW: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """(``ROWS`` rows of a query block from FIRST_ROW on as scores have them, groups of a tile, the rows as the highest
    of groups have them); of no use where there are no groups. To be computed once, before any query block."""
    SCORES: gl.constexpr = scores_layout(ROWS)
    # Maxima have fewer elements in the same threads, so they need rows and groups of their own.
    own_row = FIRST_ROW + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORES))
    if GROUP > 1:
        MAXIMA: gl.constexpr = maxima_layout(ROWS, GROUP)
        group = gl.arange(0, BLOCK_KV // GROUP, layout=gl.SliceLayout(1, MAXIMA))
        maxima_row = FIRST_ROW + gl.arange(0, ROWS, layout=gl.SliceLayout(0, MAXIMA))
        return own_row, group, maxima_row
    else:
        return own_row, own_row, own_row


@gluon.jit
def places(lengths, output, query_block, own_row, maxima_row):
    """(where the scores of ``own_rows`` of a query block go, how many of each it sees, how many are written, where the
    highest of groups go, how many groups): of a row of positions, [1, rows] each."""
    NEXT_N: gl.constexpr = lengths.NEXT_N
    GROUP: gl.constexpr = output.GROUP
    BLOCKS: gl.constexpr = blocks_of(NEXT_N, lengths.BLOCK_Q)
    gl.static_assert(GROUP == 1 or not output.CLEAR)  # what is written ends with a group
    # Rows of this query block that exist.
    request = (query_block // BLOCKS).to(gl.int64)
    first_row = query_block % BLOCKS * lengths.BLOCK_Q
    present = NEXT_N - first_row
    to = gl.expand_dims(output.out + (request * NEXT_N + first_row + own_row) * output.stride_out, 0)
    lens = lengths.lens + request * lengths.stride_request
    # A row that does not exist sees nothing.
    limit = gl.load(lens + (first_row + own_row) * lengths.stride_row, mask=own_row < present, other=0)
    limit = gl.expand_dims(gl.minimum(limit, lengths.max_context), 0)
    # Scores are written as far as a row sees, or to the end of its last group, or everywhere.
    written = limit
    if output.CLEAR:
        written = gl.expand_dims(gl.where(own_row < present, lengths.max_context, 0), 0)
    to_maxima, groups = to, limit
    if GROUP > 1:
        maxima = output.maxima + (request * NEXT_N + first_row + maxima_row) * output.stride_maxima
        to_maxima = gl.expand_dims(maxima, 0)
        groups = gl.where(maxima_row < present, (lengths.max_context + GROUP - 1) // GROUP, 0)
        groups = gl.expand_dims(groups, 0)
        written = (limit + GROUP - 1) // GROUP * GROUP
    return to, limit, written, to_maxima, groups


@gluon.jit
def write(scores, tile, end, place, output, keep_in_l2, key, group):
    """A tile's scores [BLOCK_KV, rows] to ``places``, -inf from where a row or the tile's keys end. key: of the tile;
    group: of own_rows."""
    to, limit, written, to_maxima, groups = place
    GROUP: gl.constexpr = output.GROUP
    ROWS: gl.constexpr = scores.shape[1]
    position = gl.expand_dims(tile * BLOCK_KV + key, 1)
    # -inf behind a row's own end, or where the tile is no block.
    scores = gl.where(position < gl.minimum(limit, end), scores, -float("inf"))
    _store(to + position, scores, position < written, keep_in_l2)
    if GROUP > 1:
        # A group's keys are a thread's, or neighbours in a warp.
        highest = gl.max(gl.reshape(scores, [BLOCK_KV // GROUP, GROUP, ROWS]), 1)
        highest = gl.convert_layout(highest, maxima_layout(ROWS, GROUP), assert_trivial=True)
        at = gl.expand_dims(tile * (BLOCK_KV // GROUP) + group, 1)
        _store(to_maxima + at, highest, at < groups, keep_in_l2)
