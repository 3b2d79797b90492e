"""Which tests run where: `gpu` needs a GPU, `gpus(2)` two; `kernel` a GPU or Triton's interpreter (TRITON_INTERPRET=1).

SPARSE_ATTN_SMALL=1 keeps `kernel` tests on a GPU to the sizes of the interpreter, for scripts/sanitize.py.
SPARSE_ATTN_OTHER_DEFAULTS=8 runs every eighth (1: each) of the tests that support/other_defaults.py names under defaults of
torch other than torch's own.
SPARSE_ATTN_LONG=1 (scripts/test.sh --long) runs every case; without it, heavy tests run a sample of theirs, always the
same: `@pytest.mark.sampled(COUNT)` on a parametrised test, `sampled(cases, COUNT)` in a loop. `few(COUNT)` samples where
there is no GPU alone, and keeps no case of every value; few(0) leaves the test out there. Through the interpreter a
parametrised test without either is few(CASES).
SPARSE_ATTN_SOAK=2000 sets the steps of the captured soak of a scheduler (tests/generation/test_soak.py), of 20,000.
SPARSE_ATTN_TEST_GPUS=1,2,3 deals these GPUs out to the workers of pytest-xdist.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support.other_defaults import other_defaults, suits

from sparse_attn import workspace
from sparse_attn.framework.target import interpreting

LEFT_OUT = pytest.StashKey[dict[str | None, int]]()
KERNELS = "tests of Triton kernels (TRITON_INTERPRET=1 python -m pytest -m kernel)"
PLAIN = "tests of no kernel (without TRITON_INTERPRET)"
BEYOND = "cases beyond a sample (SPARSE_ATTN_LONG=1)"
OTHER_DEFAULTS = int(os.environ.get("SPARSE_ATTN_OTHER_DEFAULTS", 0))
CASES = 2
torch.set_num_threads(1)
if (gpus := os.environ.get("SPARSE_ATTN_TEST_GPUS")) and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    gpus = gpus.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]


def pytest_collection_modifyitems(config, items):
    def leave_out(which, those):
        those = set(those)
        if those:
            config.hook.pytest_deselected(items=[item for item in items if item in those])
            items[:] = [item for item in items if item not in those]
        config.stash.setdefault(LEFT_OUT, {})[which] = len(those)

    if OTHER_DEFAULTS:
        leave_out(None, [item for item in items if not suits(item, OTHER_DEFAULTS)])
    skip_where_gpus_are_few(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        # Without Triton's interpreter, tests that need a GPU are shown as skipped.
        ours = [bool(item.get_closest_marker("kernel") and not item.get_closest_marker("gpu")) for item in items]
        others = [item for item, kernel in zip(items, ours) if kernel != interpreting()]
        leave_out(PLAIN if interpreting() else KERNELS, others)
    leave_out(BEYOND, sample(items))
    if torch.cuda.is_available():
        items.sort(key=lambda item: item.path.name != "test_soak.py")  # the longest first: workers end together


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter, config):
    """What ran is not all there is: a line for each reason to skip, and one for what was left out. Workers of
    pytest-xdist have no terminal, and say nothing."""
    yield
    reasons = Counter(skip.longrepr[2].removeprefix("Skipped: ") for skip in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped: {count} {'tests' if count > 1 else 'test'}: {reason}")
    if said := [f"{count} {which}" for which, count in config.stash.get(LEFT_OUT, {}).items() if which and count]:
        terminalreporter.write_line(f"left out: {', '.join(said)}; scripts/test.sh --long runs all")


def skip_where_gpus_are_few(items):
    for item in items:
        marker = item.get_closest_marker("gpus")
        if marker is not None and marker.args[0] > torch.cuda.device_count() > 0:
            item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]} GPUs"))


def sample(items) -> list:
    """Of the items, those that the markers `sampled` and `few` leave out."""
    tests: dict[tuple, list] = {}
    for item in items:
        marker = item.get_closest_marker("sampled") or item.get_closest_marker("few")
        every = marker is not None and marker.name == "sampled"
        count = marker.args[0] if marker else CASES if interpreting() and hasattr(item, "callspec") else None
        if count is not None and (every or not torch.cuda.is_available()):
            tests.setdefault((item.path, item.originalname, every, count), []).append(item)
    left_out = []
    for (*_, every, count), cases in tests.items():
        kept = sampled(cases, count, kinds=lambda item: item.callspec.params.items() if every else ())
        left_out += [item for item in cases if item not in kept]
    return left_out


def long() -> bool:
    """Whether every case is asked for."""
    return os.environ.get("SPARSE_ATTN_LONG", "0") not in ("", "0")


def sampled(cases: Iterable, count: int, seed: object = 0, kinds: Callable[[Any], Iterable] = lambda _: ()) -> list:
    """All cases with --long; else ``count`` of them, drawn by ``seed`` and in their order, or more where it takes more
    to have one of every kind."""
    cases = list(cases)
    if long() or count >= len(cases):
        return cases
    drawn = random.Random(str(seed)).sample(range(len(cases)), len(cases))
    has = [{repr(kind) for kind in kinds(case)} for case in cases]
    chosen, missing = [], set().union(*has)
    while missing:
        chosen.append(max(drawn, key=lambda at: len(has[at] & missing)))
        missing -= has[chosen[-1]]
    chosen += [at for at in drawn if at not in chosen][: max(0, count - len(chosen))]
    return [cases[at] for at in sorted(chosen)]


def big(device):
    """Whether a `kernel` test runs its large cases: on a GPU, unless SPARSE_ATTN_SMALL is set and not 0."""
    return device.type == "cuda" and os.environ.get("SPARSE_ATTN_SMALL", "0") in ("", "0")


@pytest.fixture(autouse=bool(OTHER_DEFAULTS))
def _other_defaults(request):
    with other_defaults(request.node.nodeid):
        yield


@pytest.fixture
def device():
    """Where kernels run: the GPU, or the CPU through the interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def dirty_workspace(device):
    """A workspace full of 0xFF bytes (NaN as floats, -1 as integers) whose counters must be zero afterwards."""
    owner = workspace.Workspace((1 << 22, 1 << 14), device)
    owner._scratch.fill_(0xFF)
    with workspace.use(owner):
        yield owner
    assert not owner._counters.any(), "an op left its counters non-zero"
