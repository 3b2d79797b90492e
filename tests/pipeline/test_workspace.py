"""Scratch: where it comes from, what it refuses, and that fakes never see it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from expecttest import assert_expected_inline

from sparse_attn import workspace
from sparse_attn.framework import streams
from sparse_attn.framework.torch_private import fake_mode, occupy
from sparse_attn.ops.topk.select import top_k_per_row
from sparse_attn.workspace import Buffer, Scratch, Workspace, WorkspaceSize, largest, size_of

SCRATCH = Scratch((Buffer("a", (3, 5), torch.float32), Buffer("b", (7,), torch.int16)), counters=4)


@pytest.fixture
def no_owner():
    workspace.release("cpu")
    yield
    workspace.release("cpu")


def test_sizes_round_each_buffer_and_take_the_largest():
    assert size_of(SCRATCH) == WorkspaceSize(512, 4)
    assert size_of(Scratch()) == WorkspaceSize(0, 0)
    assert largest([WorkspaceSize(5, 1), WorkspaceSize(2, 9)]) == WorkspaceSize(5, 9)
    assert largest([]) == WorkspaceSize(0, 0)
    assert WorkspaceSize(512, 4).total == 544


def test_without_a_reservation_calls_allocate(no_owner):
    (a, b), counters = workspace.take("op", SCRATCH, torch.device("cpu"))
    assert a.shape == (3, 5) and a.dtype == torch.float32 and b.shape == (7,) and b.dtype == torch.int16
    assert counters.tolist() == [0] * 4
    assert workspace.current("cpu") is None


def test_views_are_packed_from_the_start_and_do_not_overlap(no_owner):
    owner = workspace.reserve((512, 4), "cpu")
    (a, b), counters = workspace.take("op", SCRATCH, torch.device("cpu"))
    again, _ = workspace.take("op", SCRATCH, torch.device("cpu"))
    assert a.data_ptr() == again[0].data_ptr() and b.data_ptr() - a.data_ptr() == 256
    assert owner.high_water == WorkspaceSize(512, 4)


def test_growth_until_lock(no_owner):
    owner = workspace.reserve((0, 0), "cpu")
    workspace.take("op", SCRATCH, torch.device("cpu"))
    assert owner.size == WorkspaceSize(512, 4)
    owner.lock()
    workspace.take("op", SCRATCH, torch.device("cpu"))
    with pytest.raises(RuntimeError) as error:
        workspace.take("top_k_per_row", Scratch((Buffer("c", (1000,), torch.float32),)), torch.device("cpu"))
    assert_expected_inline(
        str(error.value),
        """workspace: top_k_per_row needs 4096 bytes and 0 counters, reserved are 512 bytes and 4 counters, and the workspace is locked; reserve workspace_size(spec, bounds, target) with bounds that cover this call (max_batch, max_batched_tokens, max_model_len, next_n, logits_bytes, prefill_in_place, prefill_activations)""",
    )
    owner.unlock()
    workspace.reserve((8192, 8), "cpu")
    assert owner.size == WorkspaceSize(8192, 8)


def test_growth_of_one_keeps_the_other(no_owner):
    owner = workspace.reserve((512, 4), "cpu")
    workspace.reserve((1024, 0), "cpu")
    assert owner.size == WorkspaceSize(1024, 4)
    workspace.reserve((0, 8), "cpu")
    assert owner.size == WorkspaceSize(1024, 8)


def test_use_lends_a_workspace_and_gives_the_old_one_back(no_owner):
    mine, theirs = workspace.reserve((256, 0), "cpu"), Workspace((256, 0), "cpu")
    with workspace.use(theirs):
        assert workspace.current("cpu") is theirs
        with pytest.raises(ZeroDivisionError), workspace.use(mine):
            raise ZeroDivisionError
        assert workspace.current("cpu") is theirs
    assert workspace.current("cpu") is mine
    workspace.release("cpu")
    with workspace.use(theirs):
        pass
    assert workspace.current("cpu") is None


@pytest.fixture
def capturing(no_owner, monkeypatch):
    """Says that the stream is being captured, or no longer."""

    def say(now: bool) -> None:
        monkeypatch.setattr(streams, "capturing", lambda device: now)

    return say


def test_what_a_graph_reads_is_neither_replaced_nor_freed(capturing):
    owner = workspace.reserve((512, 4), "cpu")
    capturing(True)
    (a, _), _ = workspace.take("op", SCRATCH, torch.device("cpu"))
    capturing(False)
    owner.lock()
    owner.unlock()
    larger = Scratch((Buffer("c", (1000,), torch.float32),))
    for ask, who in (
        (lambda: workspace.take("top_k_per_row", larger, torch.device("cpu")), "top_k_per_row"),
        (lambda: workspace.reserve((4096, 0), "cpu"), "reserve"),
    ):
        with pytest.raises(RuntimeError) as error:
            ask()
        assert str(error.value).startswith(
            f"workspace: {who} needs 4096 bytes and 0 counters, reserved are 512 bytes and 4 counters, and the "
            "workspace is read by a captured graph; reserve workspace_size(spec, bounds, target)"
        )
    (again, _), _ = workspace.take("op", SCRATCH, torch.device("cpu"))
    assert again.data_ptr() == a.data_ptr() and owner.size == WorkspaceSize(512, 4)


def test_an_op_without_scratch_leaves_a_workspace_to_grow(capturing):
    owner = workspace.reserve((0, 0), "cpu")
    capturing(True)
    workspace.take("op", Scratch(), torch.device("cpu"))
    capturing(False)
    workspace.take("op", SCRATCH, torch.device("cpu"))
    assert owner.size == WorkspaceSize(512, 4)


def test_no_workspace_is_made_during_a_capture(capturing):
    capturing(True)
    message = "workspace: got a new one of 512 bytes and 4 counters while the stream of cpu is capturing, allowed: one"
    for make in (lambda: workspace.reserve((512, 4), "cpu"), lambda: Workspace((512, 4), "cpu")):
        with pytest.raises(RuntimeError, match=message):
            make()
    assert workspace.current("cpu") is None
    capturing(False)
    owner = workspace.reserve((512, 4), "cpu")
    capturing(True)
    assert workspace.reserve((256, 4), "cpu") is owner
    with pytest.raises(RuntimeError, match="reserve needs 1024 bytes.*cannot grow while its stream is capturing"):
        workspace.reserve((1024, 4), "cpu")


def test_fakes_take_no_scratch(no_owner):
    import sparse_attn

    owner = workspace.reserve((0, 0), "cpu")
    owner.lock()
    with fake_mode():
        sparse_attn.build_ragged_indices_from_dense(torch.zeros(64, 64, dtype=torch.int32))
        sparse_attn.top_k_per_row(torch.zeros(4, 100000), 2048)
    assert owner.high_water == WorkspaceSize(0, 0)


@pytest.mark.gpu
def test_streams_have_owners_of_their_own():
    side = torch.cuda.Stream()
    one = workspace.reserve((256, 0), "cuda")
    with torch.cuda.stream(side):
        assert workspace.current("cuda") is None
        two = workspace.reserve((256, 0), "cuda")
    assert workspace.current("cuda") is one and one is not two
    with torch.cuda.stream(side):
        workspace.release("cuda")
    workspace.release("cuda")


@pytest.mark.gpu
def test_growth_while_capturing_is_an_error():
    owner = Workspace((0, 0), "cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream), workspace.use(owner):
        with pytest.raises(
            RuntimeError, match="op needs 512 bytes and 4 counters.*cannot grow while its stream is capturing"
        ):
            workspace.take("op", SCRATCH, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("lend", ("reserve", "use"))
def test_a_larger_eager_call_leaves_a_graph_its_workspace(lend):
    """The larger call is refused, one that fits is not, and the graph selects what it did."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    few, many = torch.randn(2, 1 << 18, device="cuda"), torch.randn(64, 1 << 20, device="cuda")
    want, want_many = top_k_per_row(few, 2048), top_k_per_row(many, 2048)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), contextlib.ExitStack() as lent:
        if lend == "reserve":
            owner = workspace.reserve((0, 0), "cuda")
            lent.callback(workspace.release, "cuda")
        else:
            owner = lent.enter_context(workspace.use(Workspace((0, 0), "cuda")))
        top_k_per_row(few, 2048)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            got = top_k_per_row(few, 2048)
        before, size = owner._scratch.data_ptr(), owner.size
        assert size.nbytes > 0
        with pytest.raises(RuntimeError, match="top_k_per_row needs .*the workspace is read by a captured graph"):
            top_k_per_row(many, 2048)
        assert torch.equal(top_k_per_row(few, 2048), want)
        assert (owner._scratch.data_ptr(), owner.size) == (before, size)
        for _ in range(3):
            got.fill_(-7)
            graph.replay()
            stream.synchronize()
            assert torch.equal(got, want) and not owner._counters.any()
    assert torch.equal(top_k_per_row(many, 2048), want_many)  # on a stream without a workspace


@pytest.mark.gpu
def test_what_is_reserved_during_a_capture_is_refused():
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    scores = torch.randn(2, 1 << 18, device="cuda")
    want = top_k_per_row(scores, 2048)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        top_k_per_row(scores, 2048)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            with pytest.raises(
                RuntimeError, match="got a new one of 512 bytes and 4 counters while the stream of cuda:"
            ):
                workspace.reserve((512, 4), "cuda")
            got = top_k_per_row(scores, 2048)  # from the graph's own pool
        assert workspace.current("cuda") is None
        top_k_per_row(torch.randn(64, 1 << 20, device="cuda"), 2048)
        got.fill_(-7)
        graph.replay()
        stream.synchronize()
    assert torch.equal(got, want)


@pytest.mark.gpu
def test_what_is_outgrown_is_kept_for_the_stream_that_reads_it():
    size = 1 << 22
    owner, side = Workspace((size, 0), "cuda"), torch.cuda.Stream()
    before = owner._scratch.data_ptr()
    with torch.cuda.stream(side):
        torch.empty(
            2 * size, dtype=torch.uint8, device="cuda"
        )  # so that growing asks no memory of the driver, which may wait
        occupy(1_000_000_000)  # an op that reads what owner lent it
        owner.grow(WorkspaceSize(2 * size, 0), "op")
    assert torch.empty(size, dtype=torch.uint8, device="cuda").data_ptr() != before
    torch.cuda.synchronize()
