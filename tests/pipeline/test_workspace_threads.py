"""Workspaces of threads that share a stream, and what an error leaves behind. On a CPU all threads share one stream."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sparse_attn import workspace
from sparse_attn.framework import registration
from sparse_attn.workspace import Buffer, Scratch, Workspace

CPU = torch.device("cpu")
SCRATCH = Scratch((Buffer("a", (64,), torch.int32),), counters=4)
WAIT = 20  # seconds until a thread that never comes counts as hung


@pytest.fixture(autouse=True)
def nothing_reserved():
    workspace.release("cpu")
    yield
    workspace.release("cpu")
    assert workspace.current("cpu") is None


@pytest.fixture
def op_of(monkeypatch):
    """launcher -> what define_op makes of it, without the dispatcher."""

    def make(launch, name="probe"):
        monkeypatch.setattr(registration, "resolve_impl", lambda *_: "triton")
        given = dict(reference=None, rules=None, launch=lambda: launch)
        op = registration._implementation(name, ["x", "impl"], [0], **given)
        return lambda: op(torch.zeros(1), "triton")

    return make


def in_threads(*works):
    """Results of ``works``, each run in a thread of its own."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(WAIT) for future in [pool.submit(work) for work in works]]


def test_use_serves_the_thread_that_entered_it_alone():
    barrier = threading.Barrier(2, timeout=WAIT)

    def request(leaves_first):
        mine = Workspace((256, 0), "cpu")
        with workspace.use(mine):
            barrier.wait()
            inside = workspace.current("cpu") is mine
            barrier.wait()
            if not leaves_first:  # the other one ends its block inside of this one's
                barrier.wait()
                inside = inside and workspace.current("cpu") is mine
        if leaves_first:
            barrier.wait()
        return inside and workspace.current("cpu") is None

    assert in_threads(lambda: request(True), lambda: request(False)) == [True, True]
    assert workspace.current("cpu") is None


def test_a_reservation_serves_every_thread_and_use_goes_before_it():
    shared, mine = workspace.reserve((256, 0), "cpu"), Workspace((256, 0), "cpu")
    with workspace.use(mine):
        assert in_threads(lambda: workspace.current("cpu")) == [shared]
        assert workspace.reserve((512, 0), "cpu") is shared and shared.size.nbytes == 512 and mine.size.nbytes == 256
        assert workspace.current("cpu") is mine
    assert workspace.current("cpu") is shared


def test_threads_that_reserve_at_once_get_one_workspace():
    barrier = threading.Barrier(8, timeout=WAIT)

    def reserve():
        barrier.wait()
        return workspace.reserve((256, 0), "cpu")

    assert len(set(in_threads(*[reserve] * 8))) == 1


def generator(owner):
    with workspace.use(owner):
        while True:
            yield workspace.current("cpu")


def test_blocks_may_end_in_any_order():
    a, b = Workspace((0, 0), "cpu"), Workspace((0, 0), "cpu")
    first, second = generator(a), generator(b)
    assert next(first) is a and next(second) is b
    first.close()
    assert workspace.current("cpu") is b
    second.close()
    assert workspace.current("cpu") is None


def test_a_block_may_end_in_another_thread():
    suspended = generator(Workspace((0, 0), "cpu"))
    next(suspended)
    in_threads(suspended.close)
    assert workspace.current("cpu") is None


def test_tasks_of_one_thread_keep_theirs():
    async def request(turns):
        mine = Workspace((0, 0), "cpu")
        with workspace.use(mine):
            for _ in range(turns):
                await asyncio.sleep(0)
                assert workspace.current("cpu") is mine
        assert workspace.current("cpu") is None

    async def both():
        await asyncio.gather(request(2), request(5))

    asyncio.run(both())


@pytest.mark.parametrize("lend", ["reserve", "use"])
def test_launches_of_ops_that_share_a_workspace_do_not_interleave(lend, op_of):
    owner = workspace.reserve((256, 4), "cpu") if lend == "reserve" else Workspace((256, 4), "cpu")
    pause = threading.Event()

    def launch(x):
        me = threading.get_ident() % (1 << 30)
        (a,), counters = workspace.take("probe", SCRATCH, x.device)
        assert not counters.any()
        a.fill_(me)
        counters.add_(1)
        pause.wait(0.001)  # every other thread has its turn
        assert (a == me).all() and (counters == 1).all()
        counters.zero_()

    op = op_of(launch)

    def request():
        with workspace.use(owner):
            for _ in range(10):
                op()

    in_threads(*[request] * 4)
    assert not owner._counters.any()


def test_ops_of_threads_with_workspaces_of_their_own_run_at_once(op_of):
    barrier = threading.Barrier(2, timeout=WAIT)

    def launch(x):
        workspace.take("probe", SCRATCH, x.device)
        barrier.wait()  # passes where both are in the middle of an op

    op = op_of(launch)

    def request():
        with workspace.use(Workspace((256, 4), "cpu")):
            op()

    in_threads(request, request)


def test_a_workspace_does_not_grow_under_an_op(op_of):
    owner, inside = workspace.reserve((256, 4), "cpu"), threading.Event()

    def launch(x):
        (a,), _ = workspace.take("probe", SCRATCH, x.device)
        inside.set()
        grower.join(0.1)
        assert grower.is_alive() and a.data_ptr() == owner._scratch.data_ptr()

    def grow():
        inside.wait(WAIT)
        workspace.reserve((1 << 20, 0), "cpu")

    grower = threading.Thread(target=grow)
    grower.start()
    op_of(launch)()
    grower.join(WAIT)
    assert owner.size.nbytes == 1 << 20


def counting(error=None, then=lambda: None):
    """A launcher whose kernels have counted when ``error`` strikes."""

    def launch(x):
        _, counters = workspace.take("probe", SCRATCH, x.device)
        assert not counters.any()
        counters.fill_(3)
        then()
        if error:
            raise error
        counters.zero_()

    return launch


@pytest.mark.parametrize("error", [RuntimeError("out of resources"), KeyboardInterrupt()])
def test_an_error_in_the_middle_of_an_op_leaves_counters_zero_and_the_workspace_free(error, op_of):
    owner = workspace.reserve((256, 4), "cpu")
    with pytest.raises(type(error)):
        op_of(counting(error))()
    assert not owner._counters.any()
    in_threads(op_of(counting()))  # does not wait for the op that failed, and finds its counters zero


def test_an_error_of_an_op_within_an_op_is_the_inner_ones_to_mend(op_of):
    owner = workspace.reserve((256, 4), "cpu")
    inner = op_of(counting(RuntimeError("inner")), "inner")

    def launch(x):
        with pytest.raises(RuntimeError, match="inner"):
            inner()
        _, counters = workspace.take("outer", SCRATCH, x.device)
        assert not counters.any()
        started.set()
        waiting.join(0.1)
        assert waiting.is_alive()  # still this op's, though the inner one gave its share back

    started = threading.Event()
    waiting = threading.Thread(target=lambda: (started.wait(WAIT), op_of(counting())()))
    waiting.start()
    op_of(launch, "outer")()
    waiting.join(WAIT)
    assert not waiting.is_alive() and not owner._counters.any()


def test_where_the_device_takes_no_more_work_the_first_error_is_the_one_told(op_of, monkeypatch):
    owner = workspace.reserve((256, 4), "cpu")

    class Dead:
        def __getitem__(self, _):
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(owner, "take", lambda *_: ([], setattr(owner, "_counters", Dead())))

    def launch(x):
        workspace.take("probe", SCRATCH, x.device)
        raise RuntimeError("first")

    with pytest.raises(RuntimeError, match="^first$"):
        op_of(launch)()
    assert in_threads(lambda: owner.turn.acquire(timeout=1) and (owner.turn.release() or True)) == [True]


@pytest.mark.kernel
def test_a_launcher_that_fails_half_way_leaves_no_count(dirty_workspace, device, monkeypatch):
    """The selection has counted its rows when the launch that packs them fails; the next call is right."""
    from sparse_attn import build_ragged_indices_from_dense
    from sparse_attn.ops.ragged.lists import launch

    dense = torch.tensor([[3, -1, 5], [-1, -1, 2]], dtype=torch.int32, device=device)
    want = build_ragged_indices_from_dense(dense, impl="triton")
    pack_rows = launch.pack_rows

    def fails(indices, indptr, counters, *rest, **options):
        pack_rows(indices, indptr, counters, *rest, **options)
        counters.fill_(9)
        raise RuntimeError("out of resources")

    monkeypatch.setattr(launch, "pack_rows", fails)
    with pytest.raises(RuntimeError, match="out of resources"):
        build_ragged_indices_from_dense(dense, impl="triton")
    monkeypatch.setattr(launch, "pack_rows", pack_rows)
    assert not dirty_workspace._counters.any()
    got = build_ragged_indices_from_dense(dense, impl="triton")
    assert torch.equal(got.indptr, want.indptr) and torch.equal(got.indices[:3], want.indices[:3])


@pytest.mark.gpu
@pytest.mark.parametrize("own_stream", [False, True])
def test_threads_that_generate_at_once_draw_what_they_would_alone(own_stream):
    from sparse_attn import Model, generate
    from sparse_attn.models.params import random_params
    from sparse_attn.pipeline import cache_layouts
    from sparse_attn.spec import preset

    spec = preset("tiny_v32")
    model = Model(spec, random_params(spec, seed=0, device="cuda"), cache_layouts(spec, "fp8"))
    prompts = [[list(range(1, 2 + 40 * n))] * (n + 1) for n in range(4)]
    want = [generate(model, some, max_new_tokens=30).tokens for some in prompts]

    def request(some):
        def run():
            with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
                return generate(model, some, max_new_tokens=30).tokens

        return run

    assert in_threads(*map(request, prompts)) == want
    assert workspace.current("cuda") is None


@pytest.mark.gpu
def test_threads_on_one_stream_select_what_they_would_alone():
    """Rows long enough to be selected in stages over one scratch: another thread's launch in between shows."""
    from sparse_attn import top_k_per_row

    torch.manual_seed(0)
    inputs = [torch.randn(rows, 200_000, device="cuda") for rows in (1, 2, 3, 5)]
    want = [top_k_per_row(scores, 2048) for scores in inputs]
    shared = workspace.reserve((0, 0), "cuda")
    for scores in inputs:
        top_k_per_row(scores, 2048)
    shared.lock()

    def request(scores, expected):
        def run():
            for _ in range(200):
                assert torch.equal(top_k_per_row(scores, 2048), expected)

        return run

    torch.cuda.synchronize()
    in_threads(*[request(*pair) for pair in zip(inputs, want)])
    workspace.release("cuda")
    assert not shared._counters.any()
