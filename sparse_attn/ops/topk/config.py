"""Launch configuration and scratch of the selection."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sparse_attn.target import Target
from sparse_attn.workspace import Buffer, Scratch

SHORT = 8192  # widest row that one program holds in registers
NARROW, WIDE = 2048, 8192  # columns of a chunk
MOST_PROGRAMS = 64  # that share a row


@dataclass(frozen=True)
class TopkConfig:
    """How rows are selected.

    slots: scores a program holds at once: a whole short row, or the candidates of a long one. sampled: whether long
    rows are cut down to candidates first; without it (k near or above ``slots``) they are searched where they lie.
    programs: programs that share one row, a power of two; groups: rows in flight, each group takes every groups-th row.
    chunk: columns a program reads at once. keep: candidates aimed at. samples, run: scores that estimate the bound, and
    how many of them lie side by side.
    """

    short: bool
    slots: int
    num_warps: int
    sampled: bool = False
    programs: int = 1
    groups: int = 1
    chunk: int = 0
    keep: int = 0
    samples: int = 0
    run: int = 1

    max_registers: int | None = None
    reserve: int = 0  # programs to have scratch for: what no call with fewer rows or columns exceeds

    def capacity(self, width: int) -> int:
        """Candidates one program may hold: all of its share of a row, but never more than ``slots``."""
        chunks = -(-(width + 31) // self.chunk)
        return min(-(-chunks // self.programs) * self.chunk, self.slots)

    def fewer(self, rows: int) -> TopkConfig:
        """The same launch for no more rows than it was made for."""
        return self if self.short else replace(self, groups=min(self.groups, rows))


def config(rows: int, width: int, k: int, target: Target) -> TopkConfig:
    """Short rows: one program each. Long rows: as many programs a row as fill the machine, one when rows are many."""
    if width <= SHORT:
        slots = max(256, _power_of_two(width))
        registers = _at_most(64, target) if slots == SHORT else None  # four programs on a multiprocessor
        return TopkConfig(True, slots, max(2, slots // 1024), max_registers=registers)
    resident = 2 * target.num_sms
    if 5 * k > 4 * SHORT:
        registers = _at_most(64, target)  # two programs of 16 warps on a multiprocessor
        return TopkConfig(False, SHORT, 16, groups=min(rows, resident), chunk=4096, max_registers=registers)
    # Half the slots, where a bound from the sample is sharp enough to aim between k and half of SHORT.
    slots = SHORT // 2 if 8 * k <= SHORT or (4 * k <= SHORT and width <= 1 << 16) else SHORT
    share = _power_of_two(resident // max(rows, 1) + 1) // 2
    most = MOST_PROGRAMS if rows == 1 else MOST_PROGRAMS // 4
    programs = max(1, min(share, most, _power_of_two(-(-width // NARROW))))
    return TopkConfig(
        False,
        slots,
        8,
        sampled=True,
        programs=programs,
        groups=rows if programs > 1 else min(rows, resident),
        chunk=min(max(_power_of_two(-(-width // programs)), NARROW), WIDE),
        keep=_between(k, slots),
        samples=4096,
        run=4 if width <= 1 << 18 else 1,
        max_registers=_at_most(128, target) if programs == 1 else None,
        reserve=min(rows * MOST_PROGRAMS, resident),
    )


def _at_most(registers: int, target: Target) -> int | None:
    """Registers of a thread where more programs at once were measured to outweigh the spills."""
    return registers if (target.vendor, target.arch) == ("nvidia", 90) else None


def scratch(rows: int, width: int, k: int, target: Target) -> Scratch:
    return scratch_of(config(rows, width, k, target), width)


def scratch_of(launch: TopkConfig, width: int) -> Scratch:
    """Candidate columns and counts of every program, and a counter of arrivals per row that several programs share.

    It never shrinks as rows or columns are added, so that a reservation for the most serves all.
    """
    if launch.short or not launch.sampled:
        return Scratch()
    programs = max(launch.groups * launch.programs, launch.reserve)
    return Scratch(
        (
            Buffer("candidates", (programs, launch.slots if launch.reserve else launch.capacity(width)), torch.int32),
            Buffer("counts", (programs,), torch.int32),
        ),
        launch.groups,
    )


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _between(low: int, high: int) -> int:
    """The geometric mean: a bound on the candidates' number may err by the same factor on either side."""
    return max(64, int((low * high) ** 0.5))
