"""How the shares of split rows are merged on Hopper, and whether that launch may start before attention ends.

Programs that start early go where there is room: those of a merge on the multiprocessors that attention leaves, of
which each may then have many times its part of the work. Where they are few that costs less than a launch's start does;
where they are far more than fit there, most of them go where attention ends. The limits are fits to steps that were
timed either way.
"""

from __future__ import annotations

from typing import NamedTuple

from sparse_attn.target import Target

TURNS = 4  # in which the states of a few rows are merged, among many of fewer
ALONE, TWO = 6, 16  # states that one lane takes, or two share
PROGRAMS = (
    16  # of a head, on each multiprocessor: behind more of them, of few states, a program is better begun for two heads
)
FEW = 10  # pairs of warps on each multiprocessor that attention leaves do not crowd,
CROWD, MANY = 40, 12  # and so many more there do not matter, if there are so many for each of all multiprocessors


class Merge(NamedTuple):
    """at_once: states under way together, which so many lanes, ``sharers``, share; heads: of a program; pairs: of
    warps, of all rows and heads, if each has its own; grid: of programs."""

    at_once: int
    sharers: int
    heads: int
    pairs: int
    grid: tuple[int, int]


def merge_of(target: Target, tokens: int, heads: int, states: int, more_states: int = 0) -> Merge:
    """For ``tokens`` rows of so many ``states`` each, but for a few of them that have ``more_states``."""
    states = max(states, -(-more_states // TURNS))
    at_once = min(32, max(2, 1 << (states - 1).bit_length()))
    sharers = 1 if states <= ALONE else 2 if states <= TWO else 4
    several = at_once == 2 or at_once == 4 and tokens * heads > PROGRAMS * target.num_sms
    together = 2 if several and heads % 2 == 0 else 1
    return Merge(at_once, sharers, together, tokens * heads * sharers, (heads // together, tokens))


def leaves_room(target: Target, programs: int, merge: Merge) -> bool:
    """Whether ``merge`` may start while attention's ``programs`` run, of which a multiprocessor holds one."""
    left = max(0, target.num_sms - programs)
    return merge.pairs <= FEW * left or merge.pairs >= max(CROWD * left, MANY * target.num_sms)
