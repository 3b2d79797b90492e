"""Launch parameters of a rank's steps. None of them takes scratch."""

from __future__ import annotations

from typing import NamedTuple

from sparse_attn.framework.target import Target

CTAS_AN_SM = 2  # that rows are split for, of count_ties and take_winners
WHOLE = 32768  # columns up to which a row's digits have one CTA: several add to counts that a launch of its own zeroes
SAME_SMEM = True
REGISTERS = 96  # of a thread of take_winners, of which rows of several chunks take 113 where left alone
CHUNK = 256  # blocks whose ties a CTA of take_winners counts together


class Tile(NamedTuple):
    """columns: that a CTA looks at together."""

    columns: int
    num_warps: int


DIGITS, WHOLE_DIGITS = Tile(8192, 16), Tile(16384, 16)  # the latter where it holds all that a CTA loads early
FEW, MANY = Tile(1024, 4), Tile(4096, 8)  # of count_ties and take_winners: where CTAs have a tile each, and where not
LEAST_EACH = 512  # candidates of a rank, padded: a thread has one at least
PACK_WARPS = 4
MERGED_BLOCKS, PORTABLE_MERGED_BLOCKS = 128, 4  # of each rank, that a CTA of merge_candidates looks at together
PORTABLE_DIGITS = Tile(2048, 8)  # counted by tl.histogram


class Merging(NamedTuple):
    """ranks, candidates: powers of two."""

    ranks: int
    candidates: int
    num_warps: int


class Plan(NamedTuple):
    """splits: CTAs of a row. threads: of a CTA that counts digits in shared memory, else 0."""

    columns: int
    num_warps: int
    splits: int
    threads: int = 0


def digits(rows: int, width: int, level: int, target: Target) -> Plan:
    """Of count_digits: long rows are split while there are SMs for them."""
    splits = _power_below(min(-(-width // WHOLE), CTAS_AN_SM * target.num_sms // max(rows, 1)))
    if target.vendor == "nvidia" or target.interpreted:
        early = level > 0 and DIGITS.columns * splits < width <= WHOLE_DIGITS.columns * splits
        tile = WHOLE_DIGITS if early else DIGITS
        return Plan(*tile, splits, 32 * tile.num_warps)
    return Plan(*PORTABLE_DIGITS, splits)


def blocks(rows: int, width: int, target: Target) -> Plan:
    """Of count_ties and take_winners: rows are split until CTAs fill the machine, but none has less than a tile."""
    most = CTAS_AN_SM * target.num_sms // max(rows, 1)
    tile = FEW if -(-width // FEW.columns) <= most else MANY
    return Plan(*tile, _power_below(min(-(-width // tile.columns), most)))


def merging(ranks: int, k: int, target: Target) -> Merging:
    """Of merge_candidates. A warp of AMD has 64 threads."""
    padded = max(power_of_two(k), LEAST_EACH)
    all_of_them = power_of_two(ranks) * padded
    return Merging(power_of_two(ranks), padded, 16 if all_of_them > 4096 and target.vendor != "amd" else 8)


def registers(target: Target) -> dict[str, int]:
    """The launch argument that limits them."""
    return {"maxnreg": REGISTERS} if target.vendor == "nvidia" else {}


def same_smem(target: Target) -> bool:
    """Whether count_ties and take_winners claim as much shared memory as count_digits: an SM that divides its memory
    anew between two passes runs neither for a while."""
    return SAME_SMEM and target.vendor == "nvidia"


def together(tile: Plan, block_size: int) -> tuple[int, int]:
    """(blocks that a CTA looks at together, columns of each as a power of two)."""
    padded = power_of_two(block_size)
    return max(tile.columns // padded, 1), padded


def power_of_two(value: int) -> int:
    """``value`` rounded up to one."""
    return 1 << (value - 1).bit_length()


def _power_below(value: int) -> int:
    """``value`` rounded down to a power of two, at least 1."""
    return 1 << (max(value, 1).bit_length() - 1)
