"""Weight layouts: what the bytes of a packed weight mean, and what they are worth, in plain torch.

A weight is a plain tensor of floating point, or a ``PackedWeight``: codes, scales, and the name of a layout. Rows are
outputs, columns are inputs; leading dimensions, such as experts, come before. Byte positions are those of published
checkpoints:

- e4m3: a code of one byte for each value, and a scale for every block of rows and columns.
- e2m1: two codes in a byte, the even column in the low nibble, and a scale for every 32 columns of a row (MXFP4).

A scale is an fp32 number, or the ue8m0 byte of a power of two, uint8. The layout says which, the dtype has to agree,
and no function reads one as the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sparse_attn.fp8 import ceil_pow2, exponent_of, fp8_decode, fp8_encode, power_of
from sparse_attn.framework import checks
from sparse_attn.framework.torch_private import exported

CODE_DTYPE = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8}
SCALE_DTYPE = {"fp32": torch.float32, "e8m0": torch.uint8}
CODES_PER_BYTE = {"e4m3": 1, "e2m1": 2}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
GREATEST_CODE = {"e4m3": 448.0, "e2m1": 6.0}
E8M0_NAN = 255


@dataclass(frozen=True)
class WeightLayout:
    """What the codes and scales of a packed weight are.

    block: (rows, columns) under one scale. first_row: rows of the first block that lie before the weight, where it is a
    part of a larger one that was cut inside of a block.
    """

    codes: str
    block: tuple[int, int]
    scale: str
    first_row: int = 0
    name: str = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        checks.check_choice("codes", self.codes, CODE_DTYPE)
        checks.check_choice("scale", self.scale, SCALE_DTYPE)
        for size in self.block:
            checks.check_at_least("block", size, 1)
        if self.block[1] % CODES_PER_BYTE[self.codes]:
            raise ValueError(f"block: got {self.block[1]} columns of {self.codes}, allowed: whole bytes")
        if not 0 <= self.first_row < self.block[0]:
            raise ValueError(f"first_row: got {self.first_row}, allowed: 0 to {self.block[0] - 1}")
        rows, columns = self.block
        cut = f"/{self.first_row}" if self.first_row else ""
        object.__setattr__(self, "name", f"{self.codes}/{rows}x{columns}/{self.scale}{cut}")

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Scales of a weight of ``rows`` and ``columns``, those of blocks in part inside of it among them."""
        return -(-(self.first_row + rows) // self.block[0]) if rows else 0, -(-columns // self.block[1])


@exported
class PackedWeight(NamedTuple):
    """codes: float8_e4m3fn [..., rows, columns], or uint8 [..., rows, columns / 2]. scales: fp32 or uint8 [..., grid
    rows, grid columns]. layout: the name of a WeightLayout."""

    codes: torch.Tensor
    scales: torch.Tensor
    layout: str


Weight = torch.Tensor | PackedWeight


def parse_weight_layout(name: str) -> WeightLayout:
    """The layout a name stands for; ValueError where it stands for none."""
    if not isinstance(name, str):
        raise TypeError(f"layout: got {type(name).__name__}, allowed: a name")
    return _parse(name) if torch.compiler.is_compiling() else _parsed(name)


def _parse(name: str) -> WeightLayout:
    try:
        codes, block, scale, *cut = name.split("/")
        rows, columns = map(int, block.split("x"))
        return WeightLayout(codes, (rows, columns), scale, *map(int, cut))
    except (TypeError, ValueError) as error:
        raise ValueError(f"layout: got {name!r}: {error}") from None


_parsed = functools.lru_cache(maxsize=256)(_parse)  # which Dynamo would not trace


def packed_weight(codes: torch.Tensor, scales: torch.Tensor, layout: WeightLayout) -> PackedWeight:
    """A packed weight of these tensors, whose dtypes and shapes are checked against the layout."""
    for what, tensor, dtype in (
        ("codes", codes, CODE_DTYPE[layout.codes]),
        ("scales", scales, SCALE_DTYPE[layout.scale]),
    ):
        if tensor.dtype != dtype:
            raise TypeError(f"{what}: got {tensor.dtype}, allowed: {dtype} (that of {layout.name})")
        if tensor.dim() < 2:
            raise ValueError(f"{what}: got {tensor.dim()} dimensions, allowed: at least 2")
    weight = PackedWeight(codes, scales, layout.name)
    *leading, rows, columns = weight_shape(weight)
    wanted = (*leading, *layout.grid(rows, columns))
    if tuple(scales.shape) != wanted:
        raise ValueError(f"scales: got shape {list(scales.shape)}, allowed: {list(wanted)}")
    return weight


def weight_shape(weight: Weight) -> tuple[int, ...]:
    """Shape of the values: [..., rows, columns]."""
    if not isinstance(weight, PackedWeight):
        return tuple(weight.shape)
    *leading, stored = weight.codes.shape
    return (*leading, stored * CODES_PER_BYTE[parse_weight_layout(weight.layout).codes])


def weight_bytes(weight: Weight) -> int:
    """Bytes of the tensors that a weight is made of."""
    tensors = (weight.codes, weight.scales) if isinstance(weight, PackedWeight) else (weight,)
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def packed_bytes(shape: tuple[int, ...], layout: WeightLayout) -> int:
    """Bytes of codes and scales of a packed weight of ``shape``."""
    *leading, rows, columns = shape
    down, across = layout.grid(rows, columns)
    codes, scales = rows * columns // CODES_PER_BYTE[layout.codes], down * across * SCALE_DTYPE[layout.scale].itemsize
    return math.prod(leading) * (codes + scales)


def weight_rows(weight: Weight, start: int, stop: int) -> Weight:
    """Rows [start, stop) as a view. A block of scales that is cut in two keeps its scale on both sides."""
    rows = weight_shape(weight)[-2]
    if not 0 <= start <= stop <= rows:
        raise ValueError(f"rows: got {start} to {stop}, allowed: a range within 0 to {rows}")
    if not isinstance(weight, PackedWeight):
        return weight[..., start:stop, :]
    layout = parse_weight_layout(weight.layout)
    step, first = layout.block[0], layout.first_row + start
    top, bottom = first // step, -(-(layout.first_row + stop) // step) if stop > start else first // step
    part = WeightLayout(layout.codes, layout.block, layout.scale, first % step)
    return PackedWeight(weight.codes[..., start:stop, :], weight.scales[..., top:bottom, :], part.name)


def weight_columns(weight: Weight, start: int, stop: int) -> Weight:
    """Columns [start, stop) as a view; those of a packed weight start and stop with its blocks."""
    columns = weight_shape(weight)[-1]
    if not 0 <= start <= stop <= columns:
        raise ValueError(f"columns: got {start} to {stop}, allowed: a range within 0 to {columns}")
    if not isinstance(weight, PackedWeight):
        return weight[..., start:stop]
    layout = parse_weight_layout(weight.layout)
    step, each = layout.block[1], CODES_PER_BYTE[layout.codes]
    if start % step or (stop % step and stop != columns):
        raise ValueError(f"columns: got {start} to {stop}, allowed: multiples of the scale block's {step}")
    return PackedWeight(
        weight.codes[..., start // each : -(-stop // each)], weight.scales[..., start // step : -(-stop // step)],
        weight.layout,
    )  # fmt: skip


def weight_part(
    weight: Weight, rows: Sequence[range], columns: range, *, block: tuple[int, int] | None = None
) -> Weight:
    """Runs of rows one behind the other, and a run of columns; codes are a view where there is one run of rows.

    Where a run of a packed weight begins inside of a scale block, blocks become finer, so that each lies in one of the
    old ones: as large as that allows, or of the size ``block``, which has to allow it, too. ValueError where its
    columns begin or end inside of a byte.
    """
    if not isinstance(weight, PackedWeight):
        return _runs(weight[..., columns.start : columns.stop], rows)
    layout = parse_weight_layout(weight.layout)
    each, shape = CODES_PER_BYTE[layout.codes], weight_shape(weight)
    whole = len(rows) == 1 and rows[0] == range(shape[-2]) and columns == range(shape[-1])
    if whole and not layout.first_row and block in (None, layout.block):
        return weight
    if columns.start % each or columns.stop % each:
        raise ValueError(f"columns: got {columns.start} to {columns.stop}, allowed: whole bytes of {each} codes")
    starts = [run.start + layout.first_row for run in rows]
    inside = columns.stop if columns.stop < shape[-1] else 0
    high, wide = block or (
        math.gcd(layout.block[0], *starts, *map(len, rows[:-1])), math.gcd(layout.block[1], columns.start, inside)
    )  # fmt: skip
    part = WeightLayout(layout.codes, (high, wide), layout.scale)
    down = [range(start, start + len(run)) for start, run in zip(starts, rows)]
    scales = _blocks(_blocks(weight.scales, -2, down, layout.block[0], high), -1, [columns], layout.block[1], wide)
    codes = _runs(weight.codes[..., columns.start // each : columns.stop // each], rows)
    return PackedWeight(codes, scales, part.name)


def _runs(values: torch.Tensor, rows: Sequence[range]) -> torch.Tensor:
    parts = [values[..., run.start : run.stop, :] for run in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _blocks(scales: torch.Tensor, dim: int, runs: Sequence[range], block: int, step: int) -> torch.Tensor:
    """The scales of ``runs`` in blocks of ``step``, each within one of ``block``; a view where none is cut."""
    if len(runs) == 1 and step == block and runs[0].start % block == 0:
        first = runs[0].start // block
        return scales.narrow(dim, first, -(-runs[0].stop // block) - first)
    at = [place // block for run in runs for place in range(run.start, run.stop, step)]
    return scales.index_select(dim, torch.tensor(at, dtype=torch.int64, device=scales.device))


def weight_entry(weight: Weight, at: int) -> Weight:
    """The weight at ``at`` of the first leading dimension, such as an expert's, as a view."""
    if not isinstance(weight, PackedWeight):
        return weight[at]
    return PackedWeight(weight.codes[at], weight.scales[at], weight.layout)


def dequantise(weight: Weight) -> torch.Tensor:
    """fp32 values [..., rows, columns]: every code times its scale, rounded once. A NaN scale gives NaN."""
    if not isinstance(weight, PackedWeight):
        return weight.float()
    layout = parse_weight_layout(weight.layout)
    *_, rows, columns = weight_shape(weight)
    values, scales = _code_values(weight.codes, layout), _scale_values(weight.scales, layout)
    device = values.device
    at_row = (torch.arange(rows, device=device) + layout.first_row) // layout.block[0]
    at_column = torch.arange(columns, device=device) // layout.block[1]
    return values * scales[..., at_row, :][..., at_column]


def quantise(values: torch.Tensor, layout: WeightLayout, *, powers: bool = False) -> PackedWeight:
    """fp32 values [..., rows, columns] as codes and scales, rounded to the nearest, ties to even codes.

    A block's scale is its largest magnitude over that of the codes; rounded up to a power of two where the layout holds
    e8m0 bytes or ``powers`` asks for it, at least 2^-126. A block of zeros has scale 1. ValueError for values that are
    not finite.
    """
    values = values.float()
    if not bool(values.isfinite().all()):
        raise ValueError("values: got NaN or infinite ones, allowed: finite numbers")
    if layout.first_row:
        raise ValueError(f"layout: got {layout.name}, which begins inside of a block, allowed: whole blocks")
    (*leading, rows, columns), (high, wide) = values.shape, layout.block
    down, across = layout.grid(rows, columns)
    padded = torch.nn.functional.pad(values, (0, across * wide - columns, 0, down * high - rows))
    blocks = padded.view(*leading, down, high, across, wide)
    amax = blocks.abs().amax((-3, -1))
    scales = (amax / torch.full_like(amax, GREATEST_CODE[layout.codes])).clamp_min(2.0**-126)
    scales = torch.where(amax == 0, 1.0, ceil_pow2(scales) if powers or layout.scale == "e8m0" else scales)
    scaled = (blocks / scales.unsqueeze(-1).unsqueeze(-3)).view(padded.shape)[..., :rows, :columns]
    if layout.codes == "e4m3":
        codes = fp8_encode(scaled, "e4m3fn").view(torch.float8_e4m3fn)
    else:
        codes = _e2m1_codes(scaled)
    return packed_weight(codes, exponent_of(scales) if layout.scale == "e8m0" else scales, layout)


def _e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """uint8 [..., columns / 2] of fp32 values: the nearest of E2M1_VALUES; of two as near, that of the even code."""
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float32, device=values.device)
    even = torch.tensor([0, 1, 0, 1, 0, 1, 0], dtype=torch.bool, device=values.device)
    bounds = torch.where(even, torch.nextafter(between, torch.zeros_like(between)), between)
    codes = torch.bucketize(values.abs().contiguous(), bounds).to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def _code_values(codes: torch.Tensor, layout: WeightLayout) -> torch.Tensor:
    if layout.codes == "e4m3":
        return fp8_decode(codes, "e4m3fn")
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], dim=-1).flatten(-2)


def _scale_values(scales: torch.Tensor, layout: WeightLayout) -> torch.Tensor:
    if layout.scale == "fp32":
        return scales
    return torch.where(scales == E8M0_NAN, torch.nan, power_of(scales))
