"""Plans built on the host: the device op's whatever came before, reused only where all they depend on is the same."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.extremes import INT_MIN

from sparse_attn import Model, Sampling, build_step_plan
from sparse_attn.framework import debug
from sparse_attn.framework.torch_private import occupy
from sparse_attn.generation.batch import prepare
from sparse_attn.generation.plan_cache import HostPlanner
from sparse_attn.generation.steps import advance, decode_plan, prefill_step
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import preset

BLOCKS = 3
TENSORS = """
    request_ids positions limits slot_mapping block_table context_lens kv_indptr kv_start kv_end""".split()


def planner(device="cpu", **sizes):
    defaults = dict(max_requests=6, max_tokens=24, max_blocks=BLOCKS, max_context=1 << 20, kv_capacity=1 << 20)
    return HostPlanner(**(defaults | sizes), device=device)


def step(queries, lengths, num_decodes=0, next_n=1, slots=None, tables=7):
    """Arguments of a step. slots: given, or that many rows, all with a slot; default: as many as there are queries."""
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    if slots is None or isinstance(slots, int):
        slots = range(100, 100 + (sum(queries) if slots is None else slots))
    table = torch.full((len(queries), BLOCKS), tables, dtype=torch.int32)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return starts, lengths, table, torch.tensor(list(slots), dtype=torch.int64), num_decodes, next_n


def run(cache, arguments, on_host=True):
    starts, lengths, table, slots, num_decodes, next_n = arguments
    table, slots = table.to(cache._slots.device), slots.to(cache._slots.device)
    lens = dict(seq_lens_cpu=lengths) if on_host else dict(seq_lens_cpu=None, seq_lens=lengths.to(slots.device))
    return cache.plan(starts, block_table=table, slot_mapping=slots, num_decodes=num_decodes, next_n=next_n, **lens)


def padded(cache, arguments, impl="auto"):
    """What the device op says of the step at the planner's capacity, of values that cannot be right as well."""
    starts, lengths, table, slots, num_decodes, next_n = arguments

    def grow(x, size, value):
        return torch.cat([x, x.new_full((size - x.shape[0], *x.shape[1:]), value)]).to(cache._slots.device)

    with mock.patch.object(debug, "on_host", lambda *_: False):
        return build_step_plan(
            grow(starts, cache.max_requests + 1, int(starts[-1])),
            grow(lengths, cache.max_requests, 0),
            grow(table, cache.max_requests, -1),
            grow(slots, cache.max_tokens, -1),
            num_decodes=num_decodes,
            next_n=next_n,
            kv_capacity=cache.kv_capacity,
            max_context=cache.max_context,
            impl=impl,
        )


def assert_same(plan, want):
    for name in TENSORS:
        mine, other = getattr(plan, name), getattr(want, name)
        assert mine.dtype == other.dtype, name
        assert torch.equal(mine, other), f"{name}: {mine.tolist()} is not {other.tolist()}"
    assert (plan.kv_capacity, plan.max_context) == (want.kv_capacity, want.max_context)


def check(cache, arguments, on_host=True):
    plan = run(cache, arguments, on_host)
    assert_same(plan, padded(cache, arguments))
    return plan


def counts(cache):
    return cache.hits, cache.misses, cache.uncached


def prompts(*lengths):
    return [min(i + 1, 2048) for length in lengths for i in range(length)]


# Steps that a key of (rows, longest query, lengths clamped to top-k) takes for one another, and their sparse lengths.
COLLISIONS = {
    "queries [2, 1] and [1, 2]": (step([2, 1], [2, 2]), step([1, 2], [2, 2]), [1, 2, 2], [2, 1, 2]),
    "one token beyond top-k": (step([3], [2049]), step([3], [2050]), [2047, 2048, 2048], [2048, 2048, 2048]),
    "prompts swapped": (
        step([3000, 3001], [3000, 3001]), step([3001, 3000], [3001, 3000]), prompts(3000, 3001), prompts(3001, 3000),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COLLISIONS)
def test_key_tells_apart(name):
    first, second, first_sparse, second_sparse = COLLISIONS[name]
    weak = [(len(a[3]), int(a[0].diff().max()), a[1].clamp(max=2048).tolist()) for a in (first, second)]
    assert weak[0] == weak[1]
    cache = planner(max_tokens=6001)
    for arguments, sparse in ((first, first_sparse), (second, second_sparse), (first, first_sparse)):
        plan = check(cache, arguments)
        assert plan.limits[: len(sparse)].clamp(max=2048).tolist() == sparse
    assert counts(cache) == (0, 3, 0)


def test_key_is_complete():
    """Every host value a plan depends on is changed alone, there and back: no hit, and the right plan."""
    base = step([1, 1, 2], [5, 6, 9], 2)
    changes = {
        "num_decodes": step([1, 1, 2], [5, 6, 9], 1),
        "next_n": step([1, 1, 2], [5, 6, 9], 2, 2, slots=4),
        "length": step([1, 1, 2], [5, 6, 10], 2),
        "dead length": step([1, 1, 2], [5, 0, 9], 2),
        "queries": step([1, 1, 1], [5, 6, 9], 2, slots=4),
        "requests": step([1, 1, 2, 0], [5, 6, 9, 0], 2),
        "rows": step([1, 1, 2], [5, 6, 9], 2, slots=3),
    }
    cache = planner()
    for name, changed in changes.items():
        for arguments in (base, changed):
            check(cache, arguments)
        assert cache.hits == 0, name
    check(cache, changed)
    assert counts(cache) == (1, 2 * len(changes), 0)


def test_hit_skips_the_build(monkeypatch):
    cache = planner()
    arguments = step([1, 1, 2], [5, 6, 9], 2)
    first = check(cache, arguments)
    monkeypatch.setattr(cache, "_build", None)
    assert check(cache, arguments) is first
    assert counts(cache) == (1, 1, 0)


def test_key_does_not_follow_the_callers_tensors():
    cache = planner()
    arguments = step([1, 1], [5, 6], 2)
    check(cache, arguments)
    arguments[1].add_(1)
    check(cache, arguments)
    arguments[0][1:] += 1
    check(cache, arguments)
    assert counts(cache) == (0, 3, 0)


def test_device_values_are_never_cached():
    """Slots and blocks are not in the key: on a hit they are today's, with the padding that they imply."""
    cache = planner()
    for slots in (None, [5, -1, 7, -1, 9], [-1] * 5, [-9, 2**40, 0, INT_MIN, 1], range(5)):
        check(cache, step([1, 1, 3], [5, 6, 9], 2, slots=slots, tables=len(str(slots))))
    assert counts(cache) == (4, 1, 0)


def test_without_cpu_lengths_nothing_is_cached():
    cache = planner()
    arguments, other = step([1, 1, 2], [5, 6, 9], 2), step([1, 1, 3], [7, 8, 11], 2)
    check(cache, arguments)
    check(cache, other, on_host=False)
    check(cache, arguments)
    check(cache, arguments, on_host=False)
    check(cache, arguments, on_host=False)
    check(cache, arguments)
    assert counts(cache) == (0, 3, 3)


def test_other_writers_invalidate():
    cache = planner()
    arguments = step([1, 1, 2], [5, 6, 9], 2)
    plan = check(cache, arguments)
    for tensor in (getattr(plan, name) for name in TENSORS):
        tensor.fill_(1234)
    cache.invalidate()
    check(cache, arguments)
    assert counts(cache) == (0, 2, 0)


PADDING = dict(request_ids=-1, positions=-1, limits=0, slot_mapping=-1, kv_start=0, kv_end=0, block_table=-1)


def test_starts_as_padding():
    """What a graph captured before the first step reads beyond the step's rows."""
    cache = planner()
    plan = check(cache, step([], [], 4, slots=0))
    for name, value in PADDING.items():
        assert (getattr(plan, name) == value).all(), name
    assert plan.context_lens.shape == (4, 1)
    assert not plan.kv_indptr.any()


@pytest.mark.parametrize("modes", ((True,), (False,), (True, False), (False, True)))
def test_grow_shrink_grow(modes):
    """The whole of every buffer after every step, by either way and by turns."""
    cache = planner(max_tokens=32)
    sizes = (5, 2, 6, 1, 0, 4, 3, 3)
    steps = [step([2] * n, range(20, 20 + n), n, 2) for n in sizes] + [step([4] * n, range(4, 4 + n)) for n in sizes]
    steps += [step([2] * n + [5], [9] * (n + 1), n, 2) for n in (4, 0, 5, 1)]
    addresses = {}
    for turn, arguments in enumerate(steps):
        plan = check(cache, arguments, on_host=modes[turn % len(modes)])
        for name in TENSORS:
            tensor = getattr(plan, name)
            assert not tensor.numel() or addresses.setdefault(name, tensor.data_ptr()) == tensor.data_ptr(), name


def test_only_the_tail_between_extents_is_cleared():
    cache = planner()
    for queries in ([1] * 6, [1] * 3):
        plan = run(cache, step(queries, [5] * len(queries)))
        beyond = plan.limits[10:].fill_(77)
    assert (beyond == 77).all()
    assert not plan.limits[3:6].any()


def test_captured_shape_beyond_the_step():
    """A graph captured at 4 decode requests of 2 rows reads all 8 rows and 4 tables whatever the batch is."""
    cache = planner(max_requests=4, max_tokens=8)
    for live in (4, 1, 3, 2, 0, 4):
        plan = check(cache, step([2] * live, range(30, 30 + live), 4, 2))
        assert plan.context_lens.shape == (4, 2)
        assert plan.kv_start.numel() == 0
        for name in ("request_ids", "positions", "limits", "slot_mapping"):
            assert (getattr(plan, name)[2 * live :] == PADDING[name]).all()


def ringed(cache, live, on_host=True, tables=3, num_decodes=4):
    """A step of ``live`` decode requests with rings of two blocks, on a planner of four."""
    starts, lengths, table, slots, _, _ = step([1] * live, range(5, 5 + live))
    rings = torch.full((live, 2), tables, dtype=torch.int32, device=cache._slots.device)
    table, slots = table.to(rings.device), slots.to(rings.device)
    lens = dict(seq_lens_cpu=lengths) if on_host else dict(seq_lens_cpu=None, seq_lens=lengths.to(rings.device))
    return cache.plan(starts, block_table=table, slot_mapping=slots, num_decodes=num_decodes, ring_table=rings, **lens)


def check_rings(device):
    """Today's on a hit, -1 beyond the step's requests, at one address throughout."""
    cache = planner(device, max_requests=4, ring_blocks=2)
    addresses = set()
    for turn, live in enumerate((3, 3, 4, 1, 0, 2)):
        ring_table = ringed(cache, live, on_host=turn != 3, tables=turn).ring_table
        assert ring_table.tolist() == [[turn] * 2] * live + [[-1] * 2] * (4 - live)
        addresses.add(ring_table.data_ptr())
    assert len(addresses) == 1 and cache.hits == 1


def test_rings_come_along():
    check_rings("cpu")


@pytest.mark.gpu
def test_rings_come_along_on_the_gpu():
    check_rings("cuda")


def test_rings_are_checked():
    without, with_rings = planner(), planner(max_requests=4, ring_blocks=2)
    assert run(without, step([1], [5], 1)).ring_table is None
    rows = step([1], [5])[:4]
    for cache, rings, error, message in (
        (without, torch.zeros(1, 2).int(), ValueError, "got a tensor, allowed: None, the planner has no ring_blocks"),
        (with_rings, None, ValueError, "got None, allowed: a tensor, the planner has ring_blocks"),
        (with_rings, torch.zeros(1, 1).int(), ValueError, r"got shape \[1, 1\]"),
        (with_rings, torch.zeros(2, 2).int(), ValueError, r"got shape \[2, 2\]"),
        (with_rings, torch.zeros(1, 2), TypeError, "got dtype float32"),
        (with_rings, torch.zeros(1, 2, device="meta").int(), ValueError, "got device meta"),
    ):
        with pytest.raises(error, match=f"^ring_table: {message}"):
            cache.plan(*rows, num_decodes=1, ring_table=rings)


@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_a_model_decodes_by_the_planners_plans(name):
    """As by those built on the device, on caches that hold the same prompts."""
    spec = preset(name)
    model = Model(spec, random_params(spec, seed=0), cache_layouts(spec, "fp32"))
    prompts, logits = [list(range(40)), list(range(7, 30))], {}
    for how in ("device", "host"):
        batch = prepare(model, [40, 23], [50, 33], block_size=256, prefill_tokens=64)
        state, block = batch.state, batch.caches.kv[0].shape[1]
        prefill_step(model, prompts, batch.chunks[0], batch.tables, batch.caches, state, Sampling(), batch.max_context)
        cache = HostPlanner(
            max_requests=2, max_tokens=2, max_blocks=state.block_table.shape[1], max_context=50, device="cpu",
            ring_blocks=1 if model.has_rings else 0,
        )  # fmt: skip
        rows = []
        for _ in range(4):
            plan = decode_plan(state, block, batch.max_context)
            if how == "host":
                plan = cache.plan(
                    state.query_start_loc, state.seq_lens, state.block_table, plan.slot_mapping.clone(), num_decodes=2,
                    ring_table=state.ring_table,
                )  # fmt: skip
            rows.append(model(state.tokens, batch.caches, plan))
            advance(state, rows[-1], Sampling(), batch.max_context)
        logits[how] = torch.stack(rows)
    assert torch.equal(logits["host"], logits["device"])


def random_steps(count):
    generator = torch.Generator().manual_seed(0)

    def draw(low, high, size):
        return torch.randint(low, high, (size,), generator=generator).tolist()

    for _ in range(count):
        (requests,), (next_n,) = draw(0, 7, 1), draw(1, 4, 1)
        (num_decodes,) = draw(0, requests + 1, 1)
        queries = [next_n] * num_decodes + draw(0, 5, requests - num_decodes)
        lengths = [n if n > -8 else INT_MIN for n in draw(-10, 30, requests)]
        (rows,) = draw(0, 25, 1)
        arguments = step(queries, lengths, num_decodes, next_n, draw(-3, 50, rows), *draw(0, 9, 1))
        yield from [arguments] * (1 + draw(0, 2, 1)[0])


def check_random(device, count):
    cache = planner(device)
    for turn, arguments in enumerate(random_steps(count)):
        check(cache, arguments, on_host=turn % 5 != 4)
    assert min(counts(cache)) > 0


def test_equals_the_device_op():
    check_random("cpu", 300)


@pytest.mark.parametrize(
    "arguments,name,kind",
    [
        (step([1] * 7, [1] * 7), "seq_lens_cpu", ValueError),
        (step([25], [25]), "slot_mapping", ValueError),
        (step([1], [1], num_decodes=7), "num_decodes", ValueError),
        (step([1], [1], num_decodes=5, next_n=5), "num_decodes", ValueError),
        (step([1], [1], num_decodes=-1), "num_decodes", ValueError),
        (step([1], [1], next_n=0), "next_n", ValueError),
        (step([1], [101]), "seq_lens_cpu", ValueError),
        (step([1, 1], [60, 60]), "seq_lens_cpu", ValueError),
        (step([2, -1], [3, 3], slots=2), "query_start_loc", ValueError),
        ((step([1], [1])[0].long(), *step([1], [1])[1:]), "query_start_loc", TypeError),
        ((step([1, 1], [1, 1])[0], *step([1], [1])[1:]), "query_start_loc", ValueError),
        ((*step([1], [1])[:1], None, *step([1], [1])[2:]), "seq_lens", TypeError),
        ((*step([1], [1])[:2], torch.zeros(1, 2, dtype=torch.int32), *step([1], [1])[3:]), "block_table", ValueError),
        ((*step([1], [1])[:2], torch.zeros(1, BLOCKS, dtype=torch.int32, device="meta"), *step([1], [1])[3:]),
         "block_table", ValueError),
    ],
)  # fmt: skip
def test_errors_name_the_argument_and_leave_the_plan(arguments, name, kind):
    cache = planner(max_context=100, kv_capacity=110)
    good = step([1, 1, 2], [5, 6, 9], 2)
    check(cache, good)
    starts, lengths, table, slots, num_decodes, next_n = arguments
    with pytest.raises(kind, match=rf"^{name}: got"):
        cache.plan(starts, lengths, table, slots, num_decodes=num_decodes, next_n=next_n)
    check(cache, good)
    assert counts(cache) == (1, 1, 0)


@pytest.mark.gpu
def test_equals_the_device_op_on_the_gpu():
    check_random("cuda", 200)


@pytest.mark.gpu
def test_never_waits_and_staging_is_not_reused_too_early():
    """Steps planned while the device is far behind: each plan holds its own step's values, and no call synchronises."""
    cache = planner("cuda")
    steps = [step([1] * 6, range(10 + i, 16 + i), 6) for i in range(40)]
    table = torch.zeros(6, BLOCKS, device="cuda", dtype=torch.int32)
    slots, lens, seen = torch.zeros(6, device="cuda", dtype=torch.int64), table[:, 0].clone(), []
    cache.plan(steps[0][0], None, table, slots, num_decodes=6, seq_lens=lens)
    cache.plan(*steps[-1][:2], table, slots, num_decodes=6)
    torch.cuda.synchronize()
    occupy(200_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for arguments in steps:
            seen.append(cache.plan(*arguments[:2], table, slots, num_decodes=6).positions.clone())
        cache.plan(steps[0][0], None, table, slots, num_decodes=6, seq_lens=lens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for i, positions in enumerate(seen):
        assert positions[:6].tolist() == list(range(9 + i, 15 + i))


@pytest.mark.gpu
def test_captured_graph_reads_beyond_the_live_extent():
    """A graph captured over the whole capacity before any step was planned, replayed across grow, shrink and grow."""
    cache = planner("cuda", max_requests=8, max_tokens=16)
    plan = run(cache, step([], [], 8, 2, slots=0))
    names = [name for name in TENSORS if getattr(plan, name).numel()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copies = {name: getattr(plan, name).clone() for name in names}
        owner = plan.block_table[plan.request_ids.clamp(min=0).long()]  # would fault on a request that is not there
    for turn, live in enumerate((0, 8, 3, 5, 1, 8, 0, 2)):
        arguments = step([2] * live, range(40, 40 + live), 8, 2, tables=turn)
        for _ in range(2):
            run(cache, arguments, on_host=turn % 3 != 2)
            graph.replay()
            want = padded(cache, arguments)
            for name in names:
                assert torch.equal(copies[name], getattr(want, name)), (turn, name)
            assert (owner[: 2 * live] == turn).all()
