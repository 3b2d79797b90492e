"""Launch configuration of the grouped product; it needs no scratch."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.target import Target
from sparse_attn.workspace import Scratch

PLAIN_COLUMNS = 64  # read at once of a weight without scale blocks
MOST_COLUMNS = 128


@dataclass(frozen=True)
class ProductConfig:
    """block_m: rows of a tile. block_n: outputs of a tile. block_k: columns read at once, within a scale block."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def tiles(self, rows: int, groups: int) -> int:
        """Tiles of rows at most: each group may end inside of one, and so may what lies behind the last group."""
        return -(-rows // self.block_m) + groups


def config(rows: int, groups: int, block_columns: int | None, itemsize: int, target: Target) -> ProductConfig:
    """Few rows a group: tiles of 16 rows, narrow ones, so that many CTAs read the weight. Else larger ones.

    block_columns: of a scale block; None where there are none. itemsize: of a value of the rows.
    """
    block_k = PLAIN_COLUMNS if block_columns is None else min(block_columns & -block_columns, MOST_COLUMNS)
    if target.interpreted:
        return ProductConfig(16, 32, block_k, 4, 1)
    each = rows / groups
    if each <= 16:
        return ProductConfig(16, 32, block_k, 4, 3)
    if itemsize == 4:
        return ProductConfig(32, 32, min(block_k, 32), 4, 2)
    if each <= 48:
        return ProductConfig(32, 64, block_k, 4, 2)
    return ProductConfig(64, 128, min(block_k, 64), 8, 3)


def scratch(rows: int, target: Target) -> Scratch:
    return Scratch()
