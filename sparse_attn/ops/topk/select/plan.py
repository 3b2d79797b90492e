"""The facts of a selection, what a launcher is given, and each algorithm's plan: what its CTAs hold, share and read at
once, and its scratch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sparse_attn.device.rows import is_aligned
from sparse_attn.framework.target import Target
from sparse_attn.ops.topk.select.fake import GROUP, WORD
from sparse_attn.workspace import Buffer, Scratch

WINDOW_SHIFT = 13  # bits behind a radix digit of which 2048 span two octaves
RADIX, THRESHOLDS = "radix", "thresholds"  # searches: by digits counted in shared memory, by scores compared


class Problem(NamedTuple):
    """What the choice of a kernel depends on.

    group_maxima: whether the rows come with the maximum of every GROUP neighbours. scratch_bytes: for the candidates of
    two or more long rows, the same for any number of columns; None: what they need, at most CANDIDATE_BYTES.
    """

    rows: int
    width: int
    k: int
    group_maxima: bool = False
    scratch_bytes: int | None = None


class Slots(NamedTuple):
    """Where the selected keys lie: what turns a selection into cache slots, packed row by row.

    indptr: int32 [rows + 1], written. states: int64 [rows], zero before and after. block_table: int32 [requests,
    max_blocks], last dimension contiguous. block_size: a multiple of WORD. next_n: rows of a request.
    """

    indptr: torch.Tensor
    states: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    next_n: int


class Selection(NamedTuple):
    """What a launcher selects. Columns go into out [rows, k]. With ``slots``, cache slots go into out [rows * k], and
    there are no row_starts.

    views, counters: what the plan's scratch asks for. slots: only with a plan that packs the rows.
    """

    logits: torch.Tensor
    row_starts: torch.Tensor | None
    row_ends: torch.Tensor | None
    out: torch.Tensor
    views: list[torch.Tensor]
    counters: torch.Tensor
    slots: Slots | None = None

    @property
    def k(self) -> int:
        return self.out.numel() // self.logits.shape[0]

    @property
    def aligned(self) -> bool:
        return is_aligned(self.logits)

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        return self[:4]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(rows, width, k)"""
        rows, width = self.logits.shape
        return rows, width, self.k

    @property
    def strides(self) -> tuple[int, int, int]:
        """Strides of logits (in fours where ``aligned``), of row_starts and of row_ends."""
        stride = self.logits.stride(0)
        starts = 0 if self.row_starts is None else self.row_starts.stride(0)
        ends = 0 if self.row_ends is None else self.row_ends.stride(0)
        return stride // 4 if self.aligned else stride, starts, ends

    @property
    def output_map(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """(indptr, states, block_table), or Nones where columns go to a matrix."""
        return (None, None, None) if self.slots is None else self.slots[:3]

    @property
    def paging(self) -> tuple[int, int, int]:
        """(next_n, max_blocks, stride of the block table)"""
        if self.slots is None:
            return 1, 0, 0
        table = self.slots.block_table
        return self.slots.next_n, table.shape[1], table.stride(0)

    @property
    def block_size(self) -> int:
        return 1 if self.slots is None else self.slots.block_size


class Bound(NamedTuple):
    """A score that about ``candidates`` scores of a row exceed, estimated from ``samples`` of them, in runs of ``run``
    neighbours."""

    candidates: int
    samples: int
    run: int = 1


class Plan:
    """What a launcher or a fused operator asks of every plan.

    search: by digits counted in shared memory, or by thresholds. smem_words: shared memory behind the histogram.
    reads_group_maxima: whether the kernel that computes scores also stores group maxima, in the plan's scratch.
    starts_early: whether CTAs should start before their scores are there (programmatic dependent launch); None: only
    where the scores will be there soon.
    """

    num_warps: int
    search: str = RADIX
    scratch = Scratch()
    smem_words = 0
    reads_group_maxima = False
    starts_early: bool | None = None

    def ctas(self, rows: int) -> int:
        """Launched at once to select ``rows``."""
        return rows

    def packs(self, rows: int, target: Target) -> bool:
        """Whether ``rows`` can be stored one behind the other: CTAs that hold them certainly run all at once."""
        return False


class Holding(Plan):
    """CTAs hold the rows that they select from."""

    def packs(self, rows: int, target: Target) -> bool:
        return self.ctas(rows) <= target.num_sms


@dataclass(frozen=True)
class SingleCta(Holding):
    """A CTA holds a row's scores in registers.

    slots: scores it holds, a power of two. coalesced: whether columns are staged in shared memory and stored by whole
    lines, which takes fewer instructions and more barriers. window_shift: digits count from the row's highest score and
    are its bits from this one on; 0: the leading digit comes first. spread: whether no SM takes more CTAs than it must,
    so that they spread over all SMs whenever they start. Then waits matter, and instructions do not.
    """

    slots: int
    num_warps: int
    search: str = RADIX
    coalesced: bool = False
    window_shift: int = 0
    spread: bool = False
    max_registers: int | None = None

    @property
    def smem_words(self) -> int:
        """A list of the scores that share a digit, or a bit for every column."""
        return self.slots // 4 if self.window_shift or self.coalesced else 0

    @property
    def starts_early(self) -> bool | None:
        return self.spread or None


@dataclass(frozen=True)
class SingleCtaBf16(Holding):
    """A CTA holds a row's scores in registers as bf16, two to a register. chunk: columns read at once. The rest is
    SingleCta's."""

    slots: int
    num_warps: int
    chunk: int
    coalesced: bool = False
    spread: bool = False
    max_registers: int | None = None

    @property
    def smem_words(self) -> int:
        return _bitmask_and_list(self.slots, self.num_warps)

    @property
    def starts_early(self) -> bool | None:
        return self.spread or None


@dataclass(frozen=True)
class Cluster(Holding):
    """The CTAs of a cluster share a row, each with ``slots`` neighbouring columns in registers. Digits are bits from
    window_shift on."""

    slots: int
    num_warps: int
    ctas_per_row: int
    window_shift: int

    starts_early = True

    def ctas(self, rows: int) -> int:
        return rows * self.ctas_per_row


@dataclass(frozen=True)
class GroupMaxima(Holding):
    """A CTA selects k groups by their maxima, then k scores of these groups.

    slots: scores of groups it holds, as bf16, at least GROUP * k. maxima: stored for a row, in whole fours. tile:
    maxima it holds, a power of two. chunk: slots read at once.
    """

    slots: int
    num_warps: int
    rows: int
    maxima: int
    tile: int
    chunk: int
    max_registers: int | None = None

    @property
    def scratch(self) -> Scratch:
        """The maxima, which whoever scores fills."""
        return Scratch((Buffer("maxima", (self.rows, self.maxima), torch.float32),))

    @property
    def smem_words(self) -> int:
        return _bitmask_and_list(self.slots, self.num_warps)

    reads_group_maxima = True
    starts_early = False


@dataclass(frozen=True)
class MultiCta(Holding):
    """CTAs that share a row hold it together, interleaved. The last one to arrive selects among all offers.

    slots: scores offered at most. resident: scores a CTA holds. candidates: scores a CTA offers at least. chunk:
    columns read at once where the row has to be streamed. reserved_ctas: CTAs with scratch; no smaller call needs more.
    """

    slots: int
    num_warps: int
    ctas_per_row: int
    rows: int
    resident: int
    candidates: int
    chunk: int
    reserved_ctas: int = 0

    @property
    def scratch(self) -> Scratch:
        return _candidate_scratch(max(self.rows * self.ctas_per_row, self.reserved_ctas), self.slots, self.rows)

    def ctas(self, rows: int) -> int:
        return rows * self.ctas_per_row

    @property
    def smem_words(self) -> int:
        return max(self.slots // 4, self.resident * self.ctas_per_row // WORD)

    starts_early = True


@dataclass(frozen=True)
class Sampled(Plan):
    """A sample gives the row's bound. CTAs that share the row collect the scores above it. The last one to arrive
    selects among these.

    slots: candidates that are searched at most. ctas_per_row: a power of two. rows_in_flight: each CTA takes every
    rows_in_flight-th row. chunk: columns read at once. span: columns whose bits are put in order at once.
    """

    slots: int
    num_warps: int
    ctas_per_row: int
    rows_in_flight: int
    chunk: int
    span: int
    bound: Bound
    reserved_ctas: int = 0
    search: str = RADIX
    max_registers: int | None = None

    def ctas(self, rows: int) -> int:
        return min(rows, self.rows_in_flight) * self.ctas_per_row

    def capacity(self, width: int) -> int:
        """Candidates one CTA may hold: all of its share of a row, but no more than ``slots``."""
        chunks = -(-(width + WORD - 1) // self.chunk)
        return min(-(-chunks // self.ctas_per_row) * self.chunk, self.slots)

    @property
    def scratch(self) -> Scratch:
        ctas = max(self.rows_in_flight * self.ctas_per_row, self.reserved_ctas)
        return _candidate_scratch(ctas, self.slots, self.rows_in_flight)


@dataclass(frozen=True)
class Appended(Plan):
    """Sampled, whose CTAs collect candidates in any order. All rows are in flight.

    slots: candidates that are searched at most, and that a CTA may hold. width: of the rows. tile: columns read at
    once. chunk: columns read at once where the row has to be streamed.
    """

    slots: int
    num_warps: int
    ctas_per_row: int
    rows: int
    width: int
    tile: int
    chunk: int
    bound: Bound
    reserved_ctas: int = 0

    def ctas(self, rows: int) -> int:
        return rows * self.ctas_per_row

    @property
    def words(self) -> int:
        """Of a bitmask of a row."""
        return power_of_two(-(-self.width // WORD))

    @property
    def smem_words(self) -> int:
        return max(self.slots // 4, self.words)

    @property
    def scratch(self) -> Scratch:
        """A candidate takes twice as much as Sampled's."""
        return _candidate_scratch(max(2 * self.ctas(self.rows), self.reserved_ctas), self.slots, self.rows)


@dataclass(frozen=True)
class MultiPass(Plan):
    """Sampled for many rows, as launches one after the other. One bounds ``bounded_rows``. Then, for ``rows_in_flight``
    rows at a time, one collects with ``ctas_per_row`` CTAs a row, and one selects.

    slots: candidates of a row. chunk, span: as Sampled's; a CTA collects one span. collect_registers: of a thread that
    collects.
    """

    slots: int
    num_warps: int
    ctas_per_row: int
    rows_in_flight: int
    bounded_rows: int
    chunk: int
    span: int
    bound: Bound
    max_registers: int | None = None
    collect_registers: int | None = None

    @property
    def scratch(self) -> Scratch:
        parts, slots = (self.rows_in_flight, self.ctas_per_row), (self.rows_in_flight, self.slots)
        return Scratch(
            (
                Buffer("bounds", (self.bounded_rows,), torch.float32),
                Buffer("taken", (self.bounded_rows,), torch.int32),
                Buffer("begins", parts, torch.int32),
                Buffer("counts", parts, torch.int32),
                Buffer("columns", slots, torch.int32),
                Buffer("scores", slots, torch.float32),
            ),
            self.rows_in_flight,  # as Sampled's, so that more rows never need fewer
        )

    def ctas(self, rows: int) -> int:
        return min(rows, self.rows_in_flight) * self.ctas_per_row

    @property
    def smem_words(self) -> int:
        return self.slots // 4


@dataclass(frozen=True)
class Streaming(Plan):
    """A CTA reads a row from memory once for every digit. slots: a row of no more scores is held in
    registers instead."""

    slots: int
    num_warps: int
    rows_in_flight: int
    chunk: int
    search: str = RADIX
    max_registers: int | None = None

    def ctas(self, rows: int) -> int:
        return min(rows, self.rows_in_flight)


def _candidate_scratch(ctas: int, slots: int, rows: int) -> Scratch:
    """Candidates and their count for every CTA, and a counter of arrivals for every row."""
    return Scratch((Buffer("candidates", (ctas, slots), torch.int32), Buffer("counts", (ctas,), torch.int32)), rows)


def _bitmask_and_list(slots: int, num_warps: int) -> int:
    """Words for two bits a slot, and for a list of one word a thread. There are a power of two slots."""
    return power_of_two(slots) // 4 + 32 * num_warps


def power_of_two(value: int) -> int:
    """The least power of two that is not below ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def group_maxima_of(width: int) -> int:
    """Maxima stored for a row. Rows of them start at multiples of 16 bytes."""
    return -(-width // (4 * GROUP)) * 4
