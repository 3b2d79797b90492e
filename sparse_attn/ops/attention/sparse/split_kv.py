"""How a step's rows are split over CTAs, in one launch or two, and how the partials of split rows are combined.

An SM runs one CTA at a time. Rows that fill all SMs are launched together: unsplit for several waves, or split for one.
The rows left over, the tail wave, get a launch of their own, in which each is split over more CTAs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from sparse_attn.framework.target import Target

MOST_WAVES = 4  # full ones; behind more of them a tail is not worth a launch of its own
WORTH = 0.98  # two launches are taken where they cost less than this much of what one costs
PAIRS_SPARED = 2  # a row is split where that makes its longest split so many pairs shorter
TILE_WAVES = 2  # most waves of split rows, where a CTA walks tiles


class Waves(NamedTuple):
    """Rows of a step that are launched together: full waves or a tail.

    splits: how many CTAs share the keys of a row.
    """

    first: int
    rows: int
    splits: int


class CostModel(NamedTuple):
    """What a kernel's launches cost, counted in units of keys that its CTAs walk.

    start: a CTA's prologue and epilogue. full_wave: what these cost more where all SMs start one. combine: the launch
    that combines partials. splits_of: (CTAs, units, SMs) -> splits of one launch.
    """

    start: float
    full_wave: float
    combine: float
    splits_of: Callable[[int, int, int], int]

    def cost(self, waves: tuple[Waves, ...], blocks: int, units: int, num_sms: int) -> float:
        """``waves`` are launched one after the other, with ``blocks`` CTAs for each row and split. One combine serves
        all of them."""
        cost = self.combine if any(some.splits > 1 for some in waves) else 0
        for some in waves:
            full, left = divmod(some.rows * blocks * some.splits, num_sms)
            longest = -(-units // some.splits) + self.start
            cost += full * (longest + self.full_wave) + (longest + self.full_wave * left / num_sms if left else 0)
        return cost


def _pair_splits(ctas: int, pairs: int, num_sms: int) -> int:
    """As many as run at once, but no more than make the longest split shorter."""
    most = max(1, min(pairs, num_sms // ctas))
    longest = -(-pairs // most)
    return -(-pairs // longest) if pairs - longest >= PAIRS_SPARED else 1


@functools.lru_cache(maxsize=1 << 16)
def _tile_splits(ctas: int, tiles: int, num_sms: int) -> int:
    """As many as run in one wave, or in TILE_WAVES, or no split: whichever costs least."""
    if 2 * ctas > TILE_WAVES * num_sms:
        return 1
    at_once = (min(tiles, max(1, waves * num_sms // ctas)) for waves in (1, TILE_WAVES))
    even = (-(-tiles // -(-tiles // splits)) for splits in at_once)  # none gets nothing
    return min((1, *even), key=lambda splits: TILES.cost((Waves(0, ctas, splits),), 1, tiles, num_sms))


# Fits to steps that were timed (scripts/results/notes/attention-decode.md), as EARLY_START is.
PAIRS = CostModel(1.2, 0.85, 0.8, _pair_splits)  # of tiles: decode_fp8
TILES = CostModel(3, 2, 2, _tile_splits)  # swap_ab


@functools.lru_cache(maxsize=1 << 14)
def waves_of(
    model: CostModel, rows: int, blocks: int, units: int, num_sms: int, split_as: int | None = None
) -> tuple[Waves, ...]:
    """How ``rows`` of ``units`` each are launched, with ``blocks`` CTAs for each row and split.

    split_as: in one launch, each row split as if there were so many; None: however it costs least.
    """
    if split_as is not None:
        return (Waves(0, rows, model.splits_of(split_as * blocks, units, num_sms)),)
    one = (Waves(0, rows, model.splits_of(rows * blocks, units, num_sms)),)
    first, splits = _filling(rows, blocks, units, num_sms)
    if not 0 < first < rows:
        return one
    tail = rows - first
    two = Waves(0, first, splits), Waves(first, tail, model.splits_of(tail * blocks, units, num_sms))
    cheaper = model.cost(two, blocks, units, num_sms) < WORTH * model.cost(one, blocks, units, num_sms)
    return two if cheaper else one


def _filling(rows: int, blocks: int, units: int, num_sms: int) -> tuple[int, int]:
    """(rows, splits) that fill all SMs: of unsplit rows for several waves, or of split ones for one, where each is
    split more than a launch of all rows could. 0 rows where there are none."""
    ctas = rows * blocks
    waves = ctas // num_sms
    if waves:
        return (waves * num_sms // blocks if waves <= MOST_WAVES else 0), 1
    longest = (units - 1) // (num_sms // ctas)
    if longest < 1:
        return 0, 1
    splits = -(-units // longest)
    return num_sms // (splits * blocks), splits


def rows_of_most_partials(target: Target, step: int = 1) -> int:
    """Rows, a multiple of ``step``, of which more take no more scratch for partials than some up to here do.

    Of more rows than SMs only the tail is split, alike behind any number of full waves. What is worth a launch behind
    several is worth it behind one. A multiple of ``step`` has the same tail ``step`` waves sooner.
    """
    return (min(step, MOST_WAVES) + 1) * target.num_sms


# --- the combine

SPLITS_WAVES = 4  # a few rows of more splits, among many of fewer, take theirs in so many rounds
ALONE, TWO = 6, 16  # most splits that one lane takes, and that two share
CTAS_OF_A_HEAD = 16  # for each SM; where there are more, each with few splits, a CTA takes two heads


class EarlyStart(NamedTuple):
    """When a combine may start before attention ends, by its pairs of warps.

    CTAs that start early go to the SMs that attention leaves free, and each of these may then get many times its part
    of the work. few: pairs for each free SM; fewer do not crowd it. Where the CTAs are far more than fit there, most of
    them go elsewhere when attention ends. crowd, many: pairs for each free SM, and for each of all SMs; where there are
    as many, crowding does not matter.
    """

    few: float
    crowd: float
    many: float


EARLY_START = EarlyStart(10, 40, 12)


class Combine(NamedTuple):
    """How partials are combined.

    block_s: splits that are loaded at once. lanes: how many share them. block_m: heads of a CTA. pairs: of warps in
    all, if each row and head had its own. grid: of CTAs.
    """

    block_s: int
    lanes: int
    block_m: int
    pairs: int
    grid: tuple[int, int]


def combine_of(target: Target, rows: int, heads: int, splits: int, tail_splits: int = 0) -> Combine:
    """For ``rows`` of ``splits`` each, a few of which have ``tail_splits`` instead."""
    splits = max(splits, -(-tail_splits // SPLITS_WAVES))
    block_s = min(32, max(2, 1 << (splits - 1).bit_length()))
    lanes = 1 if splits <= ALONE else 2 if splits <= TWO else 4
    several = block_s == 2 or block_s == 4 and rows * heads > CTAS_OF_A_HEAD * target.num_sms
    block_m = 2 if several and heads % 2 == 0 else 1
    return Combine(block_s, lanes, block_m, rows * heads * lanes, (heads // block_m, rows))


def may_start_early(target: Target, ctas: int, combine: Combine, limits: EarlyStart = EARLY_START) -> bool:
    """Whether ``combine`` may start while attention's ``ctas`` run, one to an SM."""
    left = max(0, target.num_sms - ctas)
    enough = max(limits.crowd * left, limits.many * target.num_sms)
    return combine.pairs <= limits.few * left or combine.pairs >= enough
