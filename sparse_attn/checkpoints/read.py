"""How a weight of the forward is read from a checkpoint: which rows of which tensors, and what they are held in."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from sparse_attn.checkpoints.folder import Checkpoint
from sparse_attn.checkpoints.names import Spelling, kind_of
from sparse_attn.checkpoints.sharding import PADDED, Kept, kept_of
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models.params import INTEGER_NAMES, stays_packed
from sparse_attn.weight_layout import WeightLayout


class Piece(NamedTuple):
    """Rows of a source that go to one place. entry: of a source of three dimensions, which of its matrices; else None.
    rows: of it. at: the first row they go to, counted over all entries of the target."""

    source: str
    entry: int | None
    rows: range
    at: int


class Reading(NamedTuple):
    """How a weight of the forward is read. shape: of the whole weight. sources: names in the checkpoint, one after the
    other along its rows, each of shape ``each``. layout: that of the sources where it is held packed, None where it is
    held in plain values. mesh: whose part of the weight is held."""

    name: str
    shape: tuple[int, ...]
    sources: list[str]
    each: tuple[int, ...]
    layout: WeightLayout | None
    mesh: Mesh = ONE_RANK

    @property
    def integers(self) -> bool:
        return self.name.endswith(INTEGER_NAMES)

    @property
    def kept(self) -> Kept:
        return kept_of(self.name, self.shape, self.mesh)

    @property
    def pieces(self) -> list[Piece]:
        """What is read, in the order of the target's rows; a source's pieces follow each other."""
        fused = len(self.each) == 3
        return [
            Piece(self.sources[0 if fused else number], number if fused else None, rows, at)
            for number, rows, at in _cuts(self.shape, self.each, self.kept)
        ]

    @property
    def held(self) -> WeightLayout | None:
        """The layout that the weight is held in: blocks as large as lie in one block of a source each, wherever the
        pieces were cut."""
        if self.layout is None:
            return None
        block = _uncut(self.layout.block, self.shape, self.each, self.kept)
        return WeightLayout(self.layout.codes, block, self.layout.scale)

    def nbytes(self, checkpoint: Checkpoint) -> dict[str, int]:
        """Bytes that are read of each source, scales among them; a block that is cut counts in part."""
        kept = self.kept
        if len(self.sources) == 1:
            part = (
                math.prod(kept.shape)
                if kind_of(self.name) not in PADDED
                else sum(map(len, kept.rows)) * len(kept.columns)
            )
            return {self.sources[0]: checkpoint.nbytes(self.sources[0]) * part // max(math.prod(self.shape), 1)}
        rows: dict[str, int] = {}
        for piece in self.pieces:
            rows[piece.source] = rows.get(piece.source, 0) + len(piece.rows)
        columns, each = (len(kept.columns) if len(self.shape) > 1 else 1), max(math.prod(self.each), 1)
        return {source: checkpoint.nbytes(source) * count * columns // each for source, count in rows.items()}


def reading_of(
    name: str, shape: tuple[int, ...], spelling: Spelling, checkpoint: Checkpoint, expand: bool, *,
    mesh: Mesh = ONE_RANK,
) -> Reading:  # fmt: skip
    """How the part that the mesh gives this process of the weight called ``name`` is read; all its sources have to be
    there. ValueError by what headers show."""
    sources = spelling.sources(name, checkpoint)
    each = spelling.source_shape(name, shape, sources)
    integers = name.endswith(INTEGER_NAMES)
    layouts = [checkpoint.layout(source, each, integers=integers) for source in sources]
    if expand or not stays_packed(name):
        return Reading(name, shape, sources, each, None, mesh)
    for source, layout in zip(sources, layouts):
        if layout != layouts[0]:
            raise ValueError(
                f"weight {source}: got {_said(layout)}, allowed: {_said(layouts[0])}, that of {sources[0]}, with which "
                f"it is held packed, or expanded weights; in {checkpoint.file(source)}"
            )
    return Reading(name, shape, sources, each, layouts[0], mesh)


def _said(layout: WeightLayout | None) -> str:
    return "plain values" if layout is None else layout.name


@functools.lru_cache(maxsize=1024)  # layers are alike
def _cuts(shape: tuple[int, ...], each: tuple[int, ...], kept: Kept) -> tuple[tuple[int, range, int], ...]:
    """(number of a source, or of its matrix; its rows; where they go) of what is kept of a weight of ``shape``."""
    one = len(shape) == 1
    whole, own = (shape[0], kept.shape[0]) if one else (shape[-2], kept.shape[-2])
    rows = whole if len(each) == 3 else each[0]  # of a source, or of one of its matrices
    found = []
    for place, entry in enumerate(kept.entries):
        at = place * own
        for run in kept.rows:
            start, stop = entry * whole + run.start, entry * whole + run.stop
            while start < stop:
                number, first = divmod(start, rows)
                count = min(stop - start, rows - first)
                found.append((number, range(first, first + count), at))
                start, at = start + count, at + count
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _uncut(block: tuple[int, int], shape: tuple[int, ...], each: tuple[int, ...], kept: Kept) -> tuple[int, int]:
    """The largest block that divides ``block`` and that no cut goes through."""
    high, wide = block
    starts = [start for _, rows, at in _cuts(shape, each, kept) for start in (rows.start, at % kept.shape[-2])]
    ends = kept.columns.stop if kept.columns.stop < shape[-1] else 0
    return math.gcd(high, *starts), math.gcd(wide, kept.columns.start, ends)
