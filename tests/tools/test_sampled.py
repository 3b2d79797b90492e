"""Without --long, heavy tests run a part of their cases: which part, and that it leaves out no kind."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import long, sample, sampled

GRID = list(itertools.product("abcdef", range(5)))


@pytest.fixture
def short(monkeypatch):
    monkeypatch.delenv("SPARSE_ATTN_LONG", raising=False)


def test_a_sample_is_the_same_every_time_and_in_order(short):
    drawn = sampled(GRID, 9)
    assert drawn == sampled(iter(GRID), 9) == sorted(drawn) and len({*drawn}) == 9
    assert drawn != sampled(GRID, 9, seed="other") and sampled(GRID, 99) == GRID


@pytest.mark.parametrize("seed", range(20))
def test_a_sample_holds_one_of_every_kind(short, seed):
    drawn = sampled(GRID, 6, seed, kinds=enumerate)
    assert {letter for letter, _ in drawn} == {*"abcdef"} and {number for _, number in drawn} == {*range(5)}
    assert len(drawn) == 6 == len(sampled(GRID, 2, seed, kinds=enumerate))


@pytest.mark.parametrize("value, everything", [("1", True), ("0", False), ("", False)])
def test_long_runs_every_case(monkeypatch, value, everything):
    monkeypatch.setenv("SPARSE_ATTN_LONG", value)
    assert long() == everything == (sampled(GRID, 6) == GRID)


class Item:
    """As pytest collects it."""

    path, originalname = "file", "test"

    def __init__(self, *params, **markers):
        self.callspec = SimpleNamespace(params=dict(zip("ab", params)))
        self.get_closest_marker = {name: getattr(pytest.mark, name)(count).mark for name, count in markers.items()}.get


@pytest.mark.parametrize(
    "value, gpu, counts", [("0", False, (3, 1, 2)), ("0", True, (3, 9, 9)), ("1", False, (9, 9, 9))]
)
def test_tests_run_what_their_markers_say(monkeypatch, value, gpu, counts):
    """Marked sampled(2), which keeps one of each value, and few(1); and unmarked, through the interpreter."""
    monkeypatch.setenv("SPARSE_ATTN_LONG", value)
    monkeypatch.setattr("conftest.interpreting", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    for markers, count in zip((dict(sampled=2), dict(few=1), {}), counts):
        items = [Item(a, b, **markers) for a, b in itertools.product("xyz", range(3))]
        kept = [item for item in items if item not in sample(items)]
        assert len(kept) == count
        assert {item.callspec.params["a"] for item in kept} == {*"xyz"} or not markers.get("sampled")


@pytest.mark.parametrize("interpreted, how", [("0", "TRITON_INTERPRET=1 "), ("1", "without TRITON_INTERPRET)")])
def test_a_run_on_a_cpu_says_once_what_it_leaves_out(interpreted, how):
    environment = os.environ | {"TRITON_INTERPRET": interpreted, "SPARSE_ATTN_LONG": "0", "CUDA_VISIBLE_DEVICES": ""}
    files = [Path(__file__).parents[1] / name for name in ("ops/test_index_query.py", "cli/test_quality.py")]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST")}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    (said,) = re.findall(r"^left out: .*", found, re.MULTILINE)
    assert f"({how}" in said and "(SPARSE_ATTN_LONG=1)" in said
    counts = re.findall(r"(\d+) (?:tests of|cases beyond) ", said)
    assert f"({sum(map(int, counts))} deselected)" in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_reason_to_skip_takes_a_line():
    """And none a test."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        Path(__file__).parents[1] / "cli" / "test_cli.py",
        "-k",
        "captured_tokens",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    found = subprocess.run(command, env=environment | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True).stdout
    assert re.findall(r"^.*needs a GPU.*", found, re.MULTILINE) == ["skipped: 3 tests: needs a GPU"]
