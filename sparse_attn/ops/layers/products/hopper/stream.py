"""What both kernels of few rows share: CTAs' runs of steps (stream-K), the ring that a producer warp fills, and
partials of tiles that CTAs share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparse_attn.device import cast
from sparse_attn.device.hopper import barrier, next_stage, tma_load, wait
from sparse_attn.device.triton_private import aggregate
from sparse_attn.ops.layers.products.hopper import constants

BLOCK_K = gl.constexpr(constants.BLOCK_K)
OUTPUTS = gl.constexpr(constants.OUTPUTS)
LONG_RUN = gl.constexpr(32)  # steps from which a run prefetches a full ring of codes


@aggregate
class Shared:
    """codes: integer words of two or four codes, [STAGES, BLOCK_N, words of a step]. rows: bf16 [STAGES, BLOCK_M,
    BLOCK_K]. full: both are there, an arrival and their bytes. empty: consumers have read them, an arrival of each."""

    codes: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@aggregate
class Run:
    """Steps [begin, end) of this CTA, and how all are dealt: the first ``more`` CTAs have one above ``each``. steps: of
    a tile."""

    begin: gl.tensor
    end: gl.tensor
    each: gl.tensor
    more: gl.tensor
    steps: gl.tensor


@aggregate
class Output:
    """out: bf16 [rows, outputs]. partials: fp32 [CTAs, 2, BLOCK_M * BLOCK_N]. arrivals: int64 [tiles, CONSUMERS].
    TOGETHER: CTAs whose partials are read at once."""

    out: gl.tensor
    partials: gl.tensor
    arrivals: gl.tensor
    rows: gl.tensor
    outputs: gl.tensor
    TOGETHER: gl.constexpr


@aggregate
class Scales:
    """values: fp32 or uint8 [blocks of rows, blocks of columns], contiguous in a row. first_row: rows of the first
    block that lie before the weight."""

    values: gl.tensor
    first_row: gl.tensor
    stride: gl.tensor
    E8M0: gl.constexpr
    BLOCK_ROWS: gl.constexpr
    BLOCK_COLUMNS: gl.constexpr


@gluon.jit
def begin_of(run, cta):
    return cta * run.each + gl.minimum(cta, run.more)


@gluon.jit
def cta_of(run, step):
    """The CTA that has ``step``."""
    # The first ``more`` CTAs have one step above ``each``.
    longer = run.more * (run.each + 1)
    behind = run.more + (step - longer) // gl.maximum(run.each, 1)
    return gl.where(step < longer, step // (run.each + 1), behind)


@gluon.jit
def _load_codes(shared, codes, run, step, stage):
    BLOCK_N: gl.constexpr = shared.codes.shape[1]
    WIDTH: gl.constexpr = shared.codes.shape[2]  # words of a step
    # Codes and rows of a step complete one barrier.
    full = shared.full.index(stage)
    mbarrier.expect(full, BLOCK_N * BLOCK_K + shared.rows.shape[1] * BLOCK_K * 2)
    tile = step // run.steps
    tma_load(codes, [tile * BLOCK_N, (step - tile * run.steps) * WIDTH], full, shared.codes.index(stage))


@gluon.jit
def _load_rows(shared, rows, run, step, stage):
    tma_load(rows, [0, step % run.steps * BLOCK_K], shared.full.index(stage), shared.rows.index(stage))


@gluon.jit
def producer(shared, codes, rows, run):
    """Prefetch codes of the first steps, wait for the rows, then load both as stages become empty. TMA serves requests
    in order, so the first rows queue behind the prefetched codes. Runs too short to amortise that prefetch half a
    ring."""
    STAGES: gl.constexpr = shared.codes.shape[0]
    early = gl.where(run.end - run.begin >= LONG_RUN, STAGES, (STAGES + 1) // 2)
    first = gl.minimum(run.end, run.begin + early)
    # A weight is no launch's output: its codes may be asked for before the wait.
    for step in range(run.begin, first):
        _load_codes(shared, codes, run, step, step - run.begin)
    wait()
    for step in range(run.begin, first):
        _load_rows(shared, rows, run, step, step - run.begin)
    # The ring is full so far; from here on a stage has to be emptied first.
    stage, phase = early % STAGES, early // STAGES
    for step in range(first, run.end):
        mbarrier.wait(shared.empty.index(stage), phase ^ 1)
        _load_codes(shared, codes, run, step, stage)
        _load_rows(shared, rows, run, step, stage)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def prepare(codes, x, outputs, steps, STAGES: gl.constexpr):
    """(Shared, Run) of this CTA, for boxes of the descriptors ``codes`` and ``x``."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BLOCK_N: gl.constexpr = codes.block_shape[0]
    shared = Shared(
        codes=gl.allocate_shared_memory(codes.dtype, [STAGES] + codes.block_shape, codes.layout),
        rows=gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_shape, x.layout),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.full.index(i), count=1)
        mbarrier.init(shared.empty.index(i), count=BLOCK_N // OUTPUTS)
    fence_async_shared()
    barrier()
    # All steps of all tiles, in runs that differ by one step at most.
    cta, ctas = gl.program_id(0), gl.num_programs(0)
    all_steps = (outputs + BLOCK_N - 1) // BLOCK_N * steps
    each = all_steps // ctas
    more = all_steps - each * ctas
    begin = cta * each + gl.minimum(cta, more)
    return shared, Run(begin, begin + each + (cta < more).to(gl.int32), each, more, steps)


@gluon.jit
def _in_register_order(sums):
    """[n] of a product's result [OUTPUTS, BLOCK_M]: a thread has four neighbours, and a warp 128."""
    parts = gl.reshape(sums, [4, 2, 8, sums.shape[1] // 8, 4, 2])  # warp, register, lane; register, lane, register
    return gl.reshape(gl.permute(parts, (3, 0, 2, 4, 1, 5)), [OUTPUTS * sums.shape[1]])


@gluon.jit
def _from_register_order(values, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """What _in_register_order was given."""
    parts = gl.permute(gl.reshape(values, [BLOCK_M // 8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(parts, [OUTPUTS, BLOCK_M]), LAYOUT, assert_trivial=True)


@gluon.jit
def _add_partials(run, tile, partials, size, first, last, ORDER: gl.constexpr, TOGETHER: gl.constexpr):
    """The sum of what CTAs first to last left of a tile, of some CTAs read together. partials: pointers to a consumer's
    own in the first slot. size: of a slot."""
    sums = gl.zeros(partials.shape, gl.float32, ORDER)
    begin = tile * run.steps
    for cta in range(first, last + 1, TOGETHER):
        # Loads of TOGETHER CTAs are under way together; they are added in the order of the CTAs.
        got = ()
        for n in gl.static_range(TOGETHER):
            second = (begin_of(run, cta + n) < begin).to(gl.int64)  # it began in a tile before
            slot = (cta + n).to(gl.int64) * 2 + gl.where(cta + n == first, second, 0)
            there = cta + n <= last
            got = got + (gl.load(partials + slot * size, mask=there, other=0.0, cache_modifier=".cg"),)
        for n in gl.static_range(TOGETHER):
            sums += got[n]
    return sums


@gluon.jit
def finish(sums, run, output, tile, which: gl.constexpr, BLOCK_N: gl.constexpr, IN_ORDER: gl.constexpr):
    """Store a consumer's sums [OUTPUTS, BLOCK_M] of a tile, or leave them to the CTA of the tile that comes last, which
    adds up all CTAs'. IN_ORDER: the three bits of a product's row among eight, as dimensions 1 to 3 of [OUTPUTS / 8, 2,
    2, 2, BLOCK_M], from the highest bit of its output down."""
    CONSUMERS: gl.constexpr = BLOCK_N // OUTPUTS
    BLOCK_M: gl.constexpr = sums.shape[1]
    RESULT: gl.constexpr = sums.type.layout
    SIZE: gl.constexpr = BLOCK_M * BLOCK_N
    # Whether the run has all steps of the tile.
    whole = (run.begin <= tile * run.steps) & (run.end >= tile * run.steps + run.steps)
    if not whole:
        # As threads hold them, so that a partial is stored and read in 16 bytes a thread.
        values = _in_register_order(sums)
        ORDER: gl.constexpr = values.type.layout
        partials = output.partials + which * OUTPUTS * BLOCK_M + gl.arange(0, OUTPUTS * BLOCK_M, ORDER)
        # A run may end one tile and begin another: two slots a CTA.
        second = (run.begin < tile * run.steps).to(gl.int64)
        gl.store(partials + (gl.program_id(0).to(gl.int64) * 2 + second) * SIZE, values)
        barrier()  # all of the warpgroup's partials are there before it says so
        first, last = cta_of(run, tile * run.steps), cta_of(run, tile * run.steps + run.steps - 1)
        arrival = output.arrivals + tile * CONSUMERS + which
        # The last to arrive adds up all partials, its own too; acq_rel orders the others' stores before its loads.
        if gl.atomic_add(arrival, 1, sem="acq_rel") == last - first:
            gl.store(arrival, 0)
            values = _add_partials(run, tile, partials, SIZE, first, last, ORDER, output.TOGETHER)
            sums = _from_register_order(values, BLOCK_M, RESULT)
            whole = True
    # Bits of an output's number back in order, then rows of the result for stores of neighbours.
    if whole:
        result = gl.reshape(cast.cast(sums, gl.bfloat16), [OUTPUTS // 8, 2, 2, 2, BLOCK_M])
        ordered = gl.permute(result, (0, IN_ORDER[0], IN_ORDER[1], IN_ORDER[2], 4))
        ROWS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])  # a warp stores neighbours of a row
        ordered = gl.convert_layout(gl.permute(gl.reshape(ordered, [OUTPUTS, BLOCK_M]), (1, 0)), ROWS)
        row = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, ROWS)), 1)
        column = tile * BLOCK_N + which * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(0, ROWS))
        column = gl.expand_dims(column, 0)
        there = (row < output.rows) & (column < output.outputs)
        # Computed anew for each tile: no registers hold the offsets of all rows while tiles are multiplied.
        stride = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [output.outputs], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.store(output.out + row * stride + column, ordered, mask=there)
