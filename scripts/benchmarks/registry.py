"""How a suite is found.

A suite is a function of a module of this package that yields Records, decorated with ``@suite``:

    @suite("prefill_v32")
    def prefill_v32(run: Run) -> Iterator[Record]:
        "What it measures, in a line."
        for case in run.pick(CASES, TINY_CASES):
            ...  # make inputs on run.device, check the result, then
            work = roofline.attention(q.shape, ...)
            yield run.compare(name, [ours], "FlashMLA sparse_fwd", run.peers and [theirs], run.floor(work))
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator

from benchmarks.record import Record
from benchmarks.run import Run

# Suites of host times, which vary by a third from run to run.
HOST_TIMED = frozenset({"arrivals", "decode_loop", "host_calls", "load", "loop_invariant", "plan_cache", "speculation"})
Suite = Callable[[Run], Iterator[Record]]
_suites: dict[str, Suite] = {}


def suite(name: str) -> Callable[[Suite], Suite]:
    """Register a function that yields Records under ``name``."""

    def register(function: Suite) -> Suite:
        if name in _suites:
            raise ValueError(f"suite {name!r}: registered twice")
        _suites[name] = function
        return function

    return register


def all_suites() -> dict[str, Suite]:
    """Every suite of this package, by name."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    return dict(sorted(_suites.items()))
