"""How a step's rows are split over CTAs, in one launch or two, and how the partials of split rows are combined.

An SM runs one CTA at a time. Rows that fill all SMs, whole for some waves or split for one, are launched together; the
rows left over, the tail wave, are launched behind them, each split over more CTAs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from sparse_attn.target import Target

MOST_WAVES = 4  # behind more whole ones, the tail is not worth a launch of its own
WORTH = 0.98  # two launches cost less than this much of what one does
PAIRS_SPARED = 2  # at least, of a row's longest split, by splitting it
TILE_WAVES = 2  # of split rows, at most, counted in tiles


class Waves(NamedTuple):
    """Rows of a step that are launched together, whole waves or a tail: the first of them, how many, and the CTAs that
    share the keys of each."""

    first: int
    rows: int
    splits: int


class CostModel(NamedTuple):
    """Of a kernel whose CTAs walk units of keys. What costs as much as how many units: a CTA's prologue and epilogue,
    more of it where all SMs start one, and a combine. splits_of: (CTAs, units, SMs) -> splits of one launch."""

    start: float
    full_wave: float
    combine: float
    splits_of: Callable[[int, int, int], int]

    def cost(self, waves: tuple[Waves, ...], blocks: int, units: int, num_sms: int) -> float:
        """Of ``waves`` launched one after the other, ``blocks`` CTAs a row and split, in units of one CTA; one combine
        serves all of them."""
        cost = self.combine if any(some.splits > 1 for some in waves) else 0
        for some in waves:
            full, left = divmod(some.rows * blocks * some.splits, num_sms)
            longest = -(-units // some.splits) + self.start
            cost += full * (longest + self.full_wave) + (longest + self.full_wave * left / num_sms if left else 0)
        return cost


def _pair_splits(ctas: int, pairs: int, num_sms: int) -> int:
    """What runs at once, and no more than make the longest split shorter."""
    most = max(1, min(pairs, num_sms // ctas))
    longest = -(-pairs // most)
    return -(-pairs // longest) if pairs - longest >= PAIRS_SPARED else 1


def _tile_splits(ctas: int, tiles: int, num_sms: int) -> int:
    """As many as run in one wave or TILE_WAVES, or one, whichever costs least."""
    if 2 * ctas > TILE_WAVES * num_sms:
        return 1
    at_once = (min(tiles, max(1, waves * num_sms // ctas)) for waves in (1, TILE_WAVES))
    even = (-(-tiles // -(-tiles // splits)) for splits in at_once)  # none gets nothing
    return min((1, *even), key=lambda splits: TILES.cost((Waves(0, ctas, splits),), 1, tiles, num_sms))


PAIRS = CostModel(1.2, 0.85, 0.8, _pair_splits)  # of tiles: decode_fp8
TILES = CostModel(3, 2, 2, _tile_splits)  # swap_ab


@functools.lru_cache(maxsize=1 << 14)
def waves_of(
    model: CostModel, rows: int, blocks: int, units: int, num_sms: int, split_as: int | None = None
) -> tuple[Waves, ...]:
    """Of ``rows`` of ``units`` each, which ``blocks`` CTAs serve. split_as: all of them in one launch, split as so many
    rows are."""
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
    """(rows, splits) that fill the SMs: for whole waves, or for one, each row split more than all rows at once can be.
    No rows where none do."""
    ctas = rows * blocks
    waves = ctas // num_sms
    if waves:
        return (waves * num_sms // blocks if waves <= MOST_WAVES else 0), 1
    longest = (units - 1) // (num_sms // ctas)
    if longest < 1:
        return 0, 1
    splits = -(-units // longest)
    return num_sms // (splits * blocks), splits


def most_split_rows(target: Target) -> int:
    """Rows of a step beyond which no kernel splits one, and so none takes scratch for partials."""
    return (MOST_WAVES + 1) * target.num_sms


# --- the combine

SPLITS_WAVES = 4  # in which the splits of a few rows are combined, among many of fewer
ALONE, TWO = 6, 16  # splits that one lane takes, or two share
# CTAs of a head, on each SM: behind more of them, of few splits, a CTA is better begun for two heads.
CTAS_OF_A_HEAD = 16
# When a combine may start before attention ends. CTAs that start early go where there is room: on the SMs that
# attention leaves, of which each may then have many times its part of the work. Where they are few that costs less than
# a launch's start does; where they are far more than fit there, most of them go where attention ends. The limits are
# fits to steps that were timed either way.
FEW = 10  # pairs of warps on each SM that attention leaves do not crowd,
CROWD, MANY = 40, 12  # and so many more there do not matter, if there are so many for each of all SMs


class Combine(NamedTuple):
    """How partials are combined. block_s: splits under way together, shared by so many ``lanes``. block_m: heads of a
    CTA. pairs: of warps, of all rows and heads, if each has its own. grid: of CTAs."""

    block_s: int
    lanes: int
    block_m: int
    pairs: int
    grid: tuple[int, int]


def combine_of(target: Target, rows: int, heads: int, splits: int, tail_splits: int = 0) -> Combine:
    """For ``rows`` of so many ``splits`` each, but for a few of them that have ``tail_splits``."""
    splits = max(splits, -(-tail_splits // SPLITS_WAVES))
    block_s = min(32, max(2, 1 << (splits - 1).bit_length()))
    lanes = 1 if splits <= ALONE else 2 if splits <= TWO else 4
    several = block_s == 2 or block_s == 4 and rows * heads > CTAS_OF_A_HEAD * target.num_sms
    block_m = 2 if several and heads % 2 == 0 else 1
    return Combine(block_s, lanes, block_m, rows * heads * lanes, (heads // block_m, rows))


def may_start_early(target: Target, ctas: int, combine: Combine) -> bool:
    """Whether ``combine`` may start while attention's ``ctas`` run, of which an SM holds one."""
    left = max(0, target.num_sms - ctas)
    return combine.pairs <= FEW * left or combine.pairs >= max(CROWD * left, MANY * target.num_sms)
