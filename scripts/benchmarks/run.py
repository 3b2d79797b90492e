"""How a suite is run: on a GPU at full size, beside the peers that are there; or dry, tiny on a CPU, timing nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from benchmarks.peers import Peers
from benchmarks.record import Record
from sparse_attn import roofline
from sparse_attn.testing import timing

T = TypeVar("T")
Calls = Sequence[Callable[[], object]]


class Run(NamedTuple):
    device: str = "cuda"
    dry: bool = False
    peers: Peers | None = None
    sustained_ms: float | None = None  # how long everything is timed, whatever a suite asks for

    def pick(self, full: T, tiny: T) -> T:
        return tiny if self.dry else full

    def sets(self, footprint: int, most: int = 256) -> int:
        """How many input sets of ``footprint`` bytes keep the L2 cold."""
        return 2 if self.dry else timing.rotations(footprint, most=most)

    def floor(self, work: roofline.Work) -> float | None:
        return None if self.dry else timing.floor_us(work)

    def time(self, calls: Calls, *, target_ms: float = 40.0, rest_s: float = 0.0) -> float:
        """Microseconds per call; dry: 0, after one round of calls."""
        if self.dry:
            for call in calls:
                call()
            return 0.0
        if self.sustained_ms is not None:
            return timing.time_graph(calls, target_ms=self.sustained_ms)
        return timing.time_graph(calls, target_ms=target_ms, rest_s=rest_s)

    def compare(
        self, case: str, ours: Calls, peer: str, theirs: Calls | None, floor_us: float | None, **window: float
    ) -> Record:
        """Time ours, then the peer's over the same window; ``theirs`` is None where there is no peer."""
        us = self.time(ours, **window)
        if theirs is None:
            return Record(case, us, floor_us=floor_us)
        return Record(case, us, peer, self.time(theirs, **window), floor_us)


def total(*floors: float | None) -> float | None:
    """The floor of phases that follow each other."""
    return None if None in floors else sum(floors)
