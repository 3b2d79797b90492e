"""How the Hopper kernels' steps are launched: in one part, or in two where few rows would need a turn of their own.

A multiprocessor runs one program at a time. Rows that fill all of them, whole for some turns or split for one, are a
part; the rows left over are another, each of them split over more programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

MOST_TURNS = 4  # behind more whole ones, another is not worth a part of its own
WORTH = 0.98  # two parts cost less than this much of what one does
PAIRS_SPARED = 2  # at least, of a row's longest share, by splitting it
TILE_TURNS = 2  # of splits of tiles, at most
# Rows of the step as which every batch-invariant one is launched: as few as leave room to split each over programs, or
# so many that none is split, on any GPU.
SPLIT, WHOLE = 32, 4096


class Part(NamedTuple):
    """Rows of a step that are launched together: the first of them, how many, and programs that share each."""

    first: int
    rows: int
    splits: int


class Kind(NamedTuple):
    """A kernel whose programs walk units of keys. What costs as much as how many units: a program's start and end, more
    of it where all multiprocessors start one, and a merge. splits_of: (programs, units, multiprocessors) -> splits of
    one part."""

    start: float
    crowd: float
    merge: float
    splits_of: Callable[[int, int, int], int]

    def cost(self, parts: tuple[Part, ...], blocks: int, units: int, num_sms: int) -> float:
        """Of ``parts`` launched one after the other, ``blocks`` programs a row and split, in units of one program; one
        merge serves all of them."""
        cost = self.merge if any(part.splits > 1 for part in parts) else 0
        for part in parts:
            turns, left = divmod(part.rows * blocks * part.splits, num_sms)
            longest = -(-units // part.splits) + self.start
            cost += turns * (longest + self.crowd) + (longest + self.crowd * left / num_sms if left else 0)
        return cost


def pair_splits(programs: int, pairs: int, num_sms: int) -> int:
    """What runs at once, and no more than make the longest share shorter."""
    most = max(1, min(pairs, num_sms // programs))
    longest = -(-pairs // most)
    return -(-pairs // longest) if pairs - longest >= PAIRS_SPARED else 1


def tile_splits(programs: int, tiles: int, num_sms: int) -> int:
    """As many as run in one turn or TILE_TURNS, or one, whichever costs least."""
    if 2 * programs > TILE_TURNS * num_sms:
        return 1
    at_once = (min(tiles, max(1, turns * num_sms // programs)) for turns in (1, TILE_TURNS))
    even = (-(-tiles // -(-tiles // splits)) for splits in at_once)  # none gets nothing
    return min((1, *even), key=lambda splits: TILES.cost((Part(0, programs, splits),), 1, tiles, num_sms))


PAIRS = Kind(1.2, 0.85, 0.8, pair_splits)
TILES = Kind(3, 2, 2, tile_splits)


@functools.lru_cache(maxsize=1 << 14)
def parts_of(
    kind: Kind, rows: int, blocks: int, units: int, num_sms: int, invariant: int | None = None
) -> tuple[Part, ...]:
    """Of ``rows`` of ``units`` each, which ``blocks`` programs serve. invariant: as ``Step`` has it."""
    whole = kind.splits_of(rows * blocks, units, num_sms)
    if invariant is not None:
        return (Part(0, invariant, whole),)
    one = (Part(0, rows, whole),)
    first, splits = _filling(rows, blocks, units, num_sms)
    if not 0 < first < rows:
        return one
    others = rows - first
    two = Part(0, first, splits), Part(first, others, kind.splits_of(others * blocks, units, num_sms))
    cheaper = kind.cost(two, blocks, units, num_sms) < WORTH * kind.cost(one, blocks, units, num_sms)
    return two if cheaper else one


def _filling(rows: int, blocks: int, units: int, num_sms: int) -> tuple[int, int]:
    """(rows, splits) of a part that fills the multiprocessors: for whole turns, or for one, each row split more than
    all rows at once can be. No rows where there is no such part."""
    programs = rows * blocks
    turns = programs // num_sms
    if turns:
        return (turns * num_sms // blocks if turns <= MOST_TURNS else 0), 1
    share = (units - 1) // (num_sms // programs)
    if share < 1:
        return 0, 1
    splits = -(-units // share)
    return num_sms // (splits * blocks), splits
