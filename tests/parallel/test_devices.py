"""Tensors on a GPU that is not the current one, and on several at once."""

from __future__ import annotations

import ast
import gc
import weakref
from pathlib import Path

import pytest
import torch
from support.second_device import SECOND, second_device

import sparse_attn
from sparse_attn import DecodeGraph, Model, generate, workspace
from sparse_attn.framework import debug, registration, streams
from sparse_attn.models.params import random_params
from sparse_attn.ops.layers.router import hash_routed_experts
from sparse_attn.ops.topk import select
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import preset
from sparse_attn.workspace import Scratch

ROOT = Path(sparse_attn.__file__).parent.parent


def op_that(launch):
    """What define_op gives of an op with launcher ``launch``, without the dispatcher."""
    given = dict(reference=launch, rules=launch, launch=lambda: launch)
    return registration._implementation("probe", ["x", "impl"], [0], **given)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_an_op_runs_on_the_device_of_its_tensors(impl, monkeypatch):
    seen = []
    op = op_that(lambda x: seen.append(torch.cuda.current_device()))
    with second_device():
        op(torch.zeros(1), impl)
        assert torch.cuda.current_device() == 0
        with torch.cuda.device(SECOND):
            op(torch.zeros(1), impl)
            assert torch.cuda.current_device() == 1
    assert seen == [1, 1]


def test_an_op_that_fails_gives_the_current_device_back(monkeypatch):
    def launch(x):
        raise ZeroDivisionError

    with second_device():
        with pytest.raises(ZeroDivisionError):
            op_that(launch)(torch.zeros(1), "triton")
        assert torch.cuda.current_device() == 0


def test_an_op_takes_scratch_of_its_device_stream(monkeypatch):
    taken = []

    def launch(x):
        workspace.take("probe", Scratch((), 2), x.device)
        taken.append(workspace.current(x.device))

    op = op_that(launch)
    with second_device():
        reserved = workspace.reserve((0, 4), SECOND)
        op(torch.zeros(1), "triton")
        workspace.release(SECOND)
    assert taken == [reserved]


def test_capturing_is_asked_of_the_device_of_the_tensors():
    with second_device() as cuda:
        assert not streams.capturing(SECOND)
        workspace.Workspace((0, 0), SECOND).grow(workspace.WorkspaceSize(1, 0), "op")
        assert set(cuda.log) == {("capturing", SECOND), ("record_stream", SECOND)}


def test_debug_mode_asks_the_device_it_looks_at(monkeypatch):
    monkeypatch.setattr(debug, "on", lambda: True)
    with second_device() as cuda:
        tokens, table = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
        hash_routed_experts(torch.zeros(1, 4), tokens, table)
        assert set(cuda.log) == {("capturing", SECOND)}


@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_a_graph_lives_on_the_device_of_its_caches(name):
    spec = preset(name)
    with second_device() as cuda:
        model = Model(spec, {"embed": torch.empty(0)}, cache_layouts(spec, "fp8"))
        caches = model.allocate_caches(2, 128, requests=2, step_rows=1)
        graph = DecodeGraph(
            lambda tokens, *_: torch.zeros(tokens.shape[0], 8), caches, max_context=128, max_blocks=1, buckets=(2,),
            impl="reference", keep_logits=True,
        )  # fmt: skip
        table = torch.arange(2, dtype=torch.int32).unsqueeze(1)
        graph.load(torch.zeros(2).long(), torch.ones(2).int(), table, table if model.has_rings else None)
        graph.run(3).wait()
        assert torch.cuda.current_device() == 0
    assert {device for _, device in cuda.log} == {SECOND}
    assert {"capture", "replay", "record_stream", "wait_stream", "wait_event"} <= {what for what, _ in cuda.log}
    assert graph.workspace.device == SECOND


class Cycle:
    def __init__(self):
        self.me = self


def test_garbage_is_gone_before_a_graph_is_captured(monkeypatch):
    """Its memory is room for the graph."""
    spec, seen = preset("tiny_v32"), []
    with second_device():
        capture = torch.cuda.graph
        monkeypatch.setattr(torch.cuda, "graph", lambda *_, **named: seen.append(left()) or capture(*_, **named))
        model = Model(spec, {"embed": torch.empty(0)}, cache_layouts(spec, "fp8"))
        caches = model.allocate_caches(1, 128, requests=1, step_rows=1)
        gc.disable()
        try:
            left = weakref.ref(Cycle())
            DecodeGraph(
                lambda tokens, *_: torch.zeros(tokens.shape[0], 8), caches, max_context=128, max_blocks=1, buckets=(1,),
                impl="reference",
            )  # fmt: skip
        finally:
            gc.enable()
    assert seen == [None]


def collects_while(step):
    """Whether garbage is collected in each capture of a DecodeGraph, whose step runs ``step`` before."""
    spec, seen = preset("tiny_v32"), []

    def run(tokens, *_):
        step(seen)
        seen.append(gc.isenabled())
        return torch.zeros(tokens.shape[0], 8)

    model = Model(spec, {"embed": torch.empty(0)}, cache_layouts(spec, "fp8"))
    caches = model.allocate_caches(2, 128, requests=2, step_rows=1)
    DecodeGraph(run, caches, max_context=128, max_blocks=1, buckets=(1, 2), impl="reference")
    return seen


def test_no_garbage_is_collected_during_a_capture():
    """A graph or a tensor that it frees would end the capture. Two warm-ups of each bucket, then two captures."""
    assert gc.isenabled()
    with second_device():
        assert collects_while(lambda seen: None) == [True] * 4 + [False] * 2
        assert gc.isenabled()

        def fail(seen):
            if len(seen) == 5:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            collects_while(fail)
    assert gc.isenabled()


def test_garbage_is_kept_until_the_last_of_several_captures_ends():
    first, second = streams.garbage_kept(), streams.garbage_kept()
    first.__enter__()
    with second:
        first.__exit__(None, None, None)
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with streams.garbage_kept():
            pass
        assert not gc.isenabled()  # as whoever calls left it
    finally:
        gc.enable()


def test_tensors_on_two_devices_are_refused():
    names = ["logits", "row_starts", "row_ends", "k", "impl"]
    given = dict(reference=select.reference.top_k_per_row, rules=select.reference.rules_of_top_k_per_row, launch=None)
    op = registration._implementation("top_k_per_row", names, [0, 1, 2], **given)
    with pytest.raises(ValueError, match=r"^top_k_per_row: row_ends: got device meta, allowed: cpu \(that of logits\)"):
        op(torch.zeros(2, 3), None, torch.zeros(2, dtype=torch.int32, device="meta"), 2, "auto")


SOURCES = [path for folder in ("sparse_attn", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]
# What means the current device's where it is called without one.
BARE = ("current_stream", "default_stream", "is_current_stream_capturing", "set_stream")
IN_THE_PACKAGE = (*BARE, "Stream", "synchronize", "current_device", "set_device")


def calls_without_a_device(path: Path, names: tuple[str, ...]):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and not node.args and not node.keywords and isinstance(node.func, ast.Attribute):
            if node.func.attr in names and ast.unparse(node.func.value) == "torch.cuda":
                yield f"{path.relative_to(ROOT)}: {ast.unparse(node)}"


def test_nobody_asks_for_the_stream_of_whichever_device_is_current():
    """Benchmarks run on the current device, and say so where they ask for its stream."""
    found = []
    for path in SOURCES:
        package = path.is_relative_to(ROOT / "sparse_attn") and "testing" not in path.parts
        found += calls_without_a_device(path, IN_THE_PACKAGE if package else BARE)
    assert sorted(found) == [
        "sparse_attn/cli/arguments.py: torch.cuda.current_device()",  # --device cuda
        "sparse_attn/framework/streams.py: torch.cuda.current_device()",
        "sparse_attn/framework/streams.py: torch.cuda.is_current_stream_capturing()",
        "sparse_attn/framework/target.py: torch.cuda.current_device()",  # a device without an index
        "sparse_attn/workspace.py: torch.cuda.current_device()",
        "sparse_attn/workspace.py: torch.cuda.current_device()",
    ]


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.parametrize("options", (dict(), dict(graph=True), dict(compile=True), dict(compile=True, graph=True)))
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_a_model_on_the_second_gpu_generates_what_it_does_on_the_first(name, options):
    """The first is current throughout; peers may read each other, so a launch on the wrong one would not fail."""
    assert torch.cuda.can_device_access_peer(0, 1)
    torch.empty(1, device="cuda:0").copy_(torch.empty(1, device="cuda:1"))  # turns it on
    found, spec = [], preset(name)
    for index in range(2):
        device = torch.device("cuda", index)
        model = Model(spec, random_params(spec, seed=0, device=device), cache_layouts(spec, "fp8"))
        generate(model, [[1, 2, 3], [4]], max_new_tokens=20, **options)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            found.append(generate(model, [[1, 2, 3], [4]], max_new_tokens=20, keep_logits=True, **options))
            torch.cuda.synchronize(device)
        launched = {event.device_index for event in profile.events() if event.self_device_time_total}
        assert launched == {index}, f"launched on {launched}"
        assert torch.cuda.current_device() == 0
    assert found[0].tokens == found[1].tokens
    assert all(map(torch.equal, *([one.cpu() for one in each.logits] for each in found)))
