"""Launch configuration and scratch of the selection."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sparse_attn.ops.topk.shapes import GROUP
from sparse_attn.target import Target
from sparse_attn.workspace import Buffer, Scratch

MOST_PROGRAMS = 64  # that share a row

# Search by thresholds.
SHORT = 8192  # widest row that one program holds in registers
NARROW, WIDE = 2048, 8192  # columns of a chunk

# Search by digits.
HELD = 32768  # widest row that one program holds in registers
WINDOW = 13  # bits behind a digit of which 2048 span two octaves
CANDIDATES = 8192  # most that are searched of a wider one
SHARE = 8192  # columns below which no program's part of a row should fall
SPAN = 65536  # columns whose bits fill the table
LEAST_DEALT = 4  # programs to share a row
DEALT = 16384  # most that each of the programs that share a row holds of it
BITS = 262144  # columns whose bits lie behind a table
WORD = 32  # of them in a word
ROOM_FOR_TIES = 1024  # slots beside those of k groups
STAGED = 2  # rows a multiprocessor beyond which each stage of long ones is a launch
MOST_STAGED = 8192  # rows whose bounds are found at a time
ROOM = 65 << 20  # bytes for the candidates of 1024 of them, or more
PART, MOST_PARTS = 8192, 16  # columns of which a program collects the candidates, at least; parts of a row, at most
SAMPLES = 4096  # of a row of at most WIDE_ROW columns, twice as many of a wider one
WIDE_ROW = 1 << 18
LEAST_EVEN, MOST_EVEN = 2048, 3  # slots and programs of a multiprocessor for which programs claim registers to spread evenly
WARPS_EVEN = 8  # of these
REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class TopkConfig:
    """How rows are selected.

    slots: scores a program holds at once: a whole short row, or the candidates of a long one. sampled: whether long
    rows are cut down to candidates first; without it (k near or above ``slots``) they are searched where they lie.
    programs: programs that share one row, a power of two; groups: rows in flight, each group takes every groups-th row
    (staged: one after the other).
    chunk: columns a program reads at once; span: columns it collects the candidates of at once, without digits a chunk.
    keep: candidates aimed at. samples, run: scores that estimate the bound, and how many of them lie side by side.
    """

    short: bool
    slots: int
    num_warps: int
    sampled: bool = False
    programs: int = 1
    groups: int = 1
    chunk: int = 0
    span: int = 0
    keep: int = 0
    samples: int = 0
    run: int = 1
    digits: bool = False  # search by digits counted in shared memory
    held: int = 0  # scores that each of the programs sharing a row holds of it, dealt out in sectors; 0: they collect candidates
    lines: bool = False  # what is selected is stored by words of bits, then by whole lines: fewer instructions, more barriers
    halves: int = 0  # columns that a program reads at once of a short row, or of groups, to hold the upper halves of its scores
    window: int = 0  # bits behind the digits that begin with the highest score held; 0: the leading digit comes first
    max_registers: int | None = None
    spread: bool = False  # no more programs fit a multiprocessor than must: they spread over all whenever they start
    tops: int = 0  # rows come with the highest scores of groups, of which a program holds so many, then the groups chosen
    staged: bool = False  # a launch for the bounds of ``reserve`` rows, then for ``groups`` one that collects, one that selects
    collect_registers: int | None = None  # as max_registers, of the one that collects
    reserve: int = 0  # programs, of stages rows, to have scratch for: what no call with fewer rows or columns exceeds

    @property
    def listed(self) -> int:
        """Words behind a table of counters: for a list of the scores held that share a digit, or a bit for every column; for the
        marks of halves and a list of a word a thread."""
        if self.halves:
            return _power_of_two(self.slots) // 4 + 32 * self.num_warps
        if not (self.window or self.lines or self.staged):
            return 0
        return max(self.slots // 4, self.held * self.programs // WORD)

    @property
    def claimed_registers(self) -> int:
        """Of each thread, needed or not, by which programs spread; 0 where they do without."""
        return self.max_registers or 0 if self.spread else 0

    @property
    def early(self) -> bool | None:
        """Whether programs should start before what they select from is there; None: where that is soon."""
        return False if self.tops else self.spread or None

    @property
    def arrivals(self) -> int:
        """Counters it takes, one for each row in flight that several programs may share; stages leave them alone."""
        return 0 if self.short or not self.sampled else self.groups

    def capacity(self, width: int) -> int:
        """Candidates one program may hold: all of its share of a row, but never more than ``slots``."""
        chunks = -(-(width + 31) // self.chunk)
        return min(-(-chunks // self.programs) * self.chunk, self.slots)

    def packs(self, rows: int, target: Target) -> bool:
        """Whether rows can be stored one behind the other: programs that hold them certainly run all at once."""
        return (self.short or self.held > 0 or self.tops > 0) and rows * self.programs <= target.num_sms

    def fewer(self, rows: int) -> TopkConfig:
        """The same launch for no more rows than it was made for."""
        return self if self.short else replace(self, groups=min(self.groups, rows))


def config(rows: int, width: int, k: int, target: Target, room: int | None = None) -> TopkConfig:
    """Short rows: one program each. Long rows: as many programs a row as fill the machine, one when rows are many.

    room: bytes for the candidates of two long rows or more, the same whatever their columns; None: what they need, at most ROOM.
    """
    if target.vendor == "nvidia":
        return _by_digits(rows, width, k, target, room)
    return _by_thresholds(rows, width, k, target)


def _by_digits(rows: int, width: int, k: int, target: Target, room: int | None = None) -> TopkConfig:
    if width <= HELD:
        slots = max(256, _power_of_two(width))
        if slots <= 4096:
            return _evenly(TopkConfig(True, slots, max(2, slots // 512), digits=True), rows, target)
        few = rows <= target.num_sms
        if _is_hopper(target) and (slots > 8192 or not few or 8 * k <= slots):
            return _by_halves(slots, rows, few, target)
        if slots == 8192:  # four programs on a multiprocessor, where there are as many
            return TopkConfig(True, slots, 8, digits=True, lines=not few, spread=few)
        return TopkConfig(True, slots, 16, digits=True, window=WINDOW, spread=True)
    if 5 * k > 4 * CANDIDATES:
        groups = min(rows, 2 * target.num_sms)
        registers = _at_most(64, target)  # two programs of 16 warps on a multiprocessor
        return TopkConfig(False, CANDIDATES, 16, groups=groups, chunk=4096, digits=True, max_registers=registers)
    slots = _slots(width, k, CANDIDATES)
    share = _power_of_two(target.num_sms // max(rows, 1) + 1) // 2
    programs = max(1, min(share, MOST_PROGRAMS, _power_of_two(-(-width // SHARE))))
    alone = rows * programs <= target.num_sms  # on a multiprocessor
    each = max(_power_of_two(-(-width // programs)), SHARE)
    reserve = min(rows * MOST_PROGRAMS, 2 * target.num_sms)
    if room is not None:
        for most in (CANDIDATES, slots):  # whole programs': the most columns take the most
            room -= room % (4 * (most + 1))
        if rows > 1:
            reserve = max(reserve, room // (4 * (slots + 1)))
    groups = rows if alone else min(rows, 2 * target.num_sms)
    common = TopkConfig(False, slots, 16, sampled=True, programs=programs, groups=groups, digits=True, reserve=reserve)
    if alone and programs >= LEAST_DEALT and each <= DEALT and each * programs <= BITS and 2 * k <= slots:
        return replace(common, chunk=4096, keep=slots // programs * 3 // 4, held=each, window=WINDOW, spread=True)
    if rows > STAGED * target.num_sms:
        parts = min(_power_of_two(-(-width // PART)), MOST_PARTS)
        bounded = min(rows, MOST_STAGED)
        groups = ((ROOM if room is None else room) - 8 * bounded) // (8 * slots + 8 * parts) // 16 * 16
        return TopkConfig(
            False, slots, 8, sampled=True, digits=True, staged=True, programs=parts, groups=min(bounded, groups),
            chunk=2048, span=max(_power_of_two(-(-width // parts)), PART), keep=_between(k, slots),
            samples=SAMPLES if width <= WIDE_ROW else 2 * SAMPLES, run=4, reserve=bounded,
            max_registers=_at_most(64 if slots < CANDIDATES else 80, target), collect_registers=_at_most(32, target),
        )  # fmt: skip
    return replace(
        common,
        chunk=min(each, 16384 if alone else 8192),
        span=min(each, SPAN),
        keep=_between(k, slots),
        samples=SAMPLES,
        run=_run(width),
        max_registers=None if alone else _at_most(64, target),
    )


def _by_halves(slots: int, rows: int, few: bool, target: Target) -> TopkConfig:
    """Of few rows one program a multiprocessor; of many as many as hold its registers in 16 to 32 warps, of 8192 columns in
    small programs where those come in three turns or more."""
    one = TopkConfig(True, slots, 8, digits=True, halves=4096, max_registers=136, spread=True)
    if few:
        return one if slots < HELD else replace(one, num_warps=16, halves=8192, max_registers=128)
    several = replace(one, lines=slots < HELD, spread=False)
    if slots > 8192:
        return replace(several, num_warps=slots // 4096, max_registers=128)
    turns = rows // (8 * target.num_sms)
    return replace(several, num_warps=4 if turns >= 3 else 8, halves=2048, max_registers=64)


def grouped(rows: int, width: int, k: int, target: Target) -> TopkConfig | None:
    """Of rows that come with the highest scores of groups; None: where a program holds all of a row, or not as much of it."""
    maxima, chosen = -(-width // GROUP), GROUP * k
    if not _is_hopper(target) or width <= HELD or max(maxima, chosen) > HELD:
        return None
    warps = 8 if max(maxima, chosen) <= 8192 else 16
    held = min(-(-(chosen + ROOM_FOR_TIES) // 4096) * 4096, HELD)
    return TopkConfig(
        False, max(held, 1024 * warps), warps, tops=max(_power_of_two(maxima), 1024 * warps), groups=rows, digits=True,
        halves=4096, max_registers=128,
    )  # fmt: skip


def _evenly(launch: TopkConfig, rows: int, target: Target) -> TopkConfig:
    """``launch``, of few rows with so many registers a thread that no multiprocessor holds more programs than all must: they
    crowd where the launch before leaves room first. Of many rows with fewer instructions."""
    each = -(-rows // target.num_sms)
    if launch.slots < LEAST_EVEN:
        return launch
    if each > MOST_EVEN:
        return replace(launch, lines=True)
    if not _is_hopper(target):
        return launch
    registers = 8 * (REGISTERS // (32 * WARPS_EVEN * (each + 1)) // 8 + 1)
    return replace(launch, num_warps=WARPS_EVEN, max_registers=registers, spread=True)


def _by_thresholds(rows: int, width: int, k: int, target: Target) -> TopkConfig:
    if width <= SHORT:
        slots = max(256, _power_of_two(width))
        return TopkConfig(True, slots, max(2, slots // 1024))
    resident = 2 * target.num_sms
    if 5 * k > 4 * SHORT:
        return TopkConfig(False, SHORT, 16, groups=min(rows, resident), chunk=4096)
    slots = _slots(width, k, SHORT)
    share = _power_of_two(resident // max(rows, 1) + 1) // 2
    most = MOST_PROGRAMS if rows == 1 else MOST_PROGRAMS // 4
    programs = max(1, min(share, most, _power_of_two(-(-width // NARROW))))
    chunk = min(max(_power_of_two(-(-width // programs)), NARROW), WIDE)
    return TopkConfig(
        False,
        slots,
        8,
        sampled=True,
        programs=programs,
        groups=rows if programs > 1 else min(rows, resident),
        chunk=chunk,
        span=chunk,
        keep=_between(k, slots),
        samples=4096,
        run=_run(width),
        reserve=min(rows * MOST_PROGRAMS, resident),
    )


def _at_most(registers: int, target: Target) -> int | None:
    """Registers of a thread where more programs at once were measured to outweigh the spills."""
    return registers if _is_hopper(target) else None


def _is_hopper(target: Target) -> bool:
    return (target.vendor, target.arch) == ("nvidia", 90)


def scratch(rows: int, width: int, k: int, target: Target) -> Scratch:
    return scratch_of(config(rows, width, k, target), width)


def scratch_of(launch: TopkConfig, width: int) -> Scratch:
    """Candidate columns and counts of every program, and a counter of arrivals per row that several programs share.

    It never shrinks as rows or columns are added, so that a reservation for the most serves all.
    """
    if launch.tops:
        maxima = -(-width // (4 * GROUP)) * 4  # rows start at multiples of 16 bytes
        return Scratch((Buffer("maxima", (launch.groups, maxima), torch.float32),))
    if launch.short or not launch.sampled:
        return Scratch()
    if launch.staged:
        rows, parts = launch.groups, launch.programs
        return Scratch(
            (
                Buffer("bounds", (launch.reserve,), torch.float32),
                Buffer("taken", (launch.reserve,), torch.int32),
                Buffer("begins", (rows, parts), torch.int32),
                Buffer("counts", (rows, parts), torch.int32),
                Buffer("columns", (rows, launch.slots), torch.int32),
                Buffer("scores", (rows, launch.slots), torch.float32),
            ),
            launch.arrivals,
        )
    programs = max(launch.groups * launch.programs, launch.reserve)
    whole = launch.reserve or launch.held
    return Scratch(
        (
            Buffer("candidates", (programs, launch.slots if whole else launch.capacity(width)), torch.int32),
            Buffer("counts", (programs,), torch.int32),
        ),
        launch.arrivals,
    )


def _slots(width: int, k: int, most: int) -> int:
    """Half of ``most``, where a bound from the sample is sharp enough to aim between k and that."""
    return most // 2 if 8 * k <= most or (4 * k <= most and width <= 1 << 16) else most


def _run(width: int) -> int:
    return 4 if width <= WIDE_ROW else 1


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _between(low: int, high: int) -> int:
    """The geometric mean: a bound on the candidates' number may err by the same factor on either side."""
    return max(64, int((low * high) ** 0.5))
