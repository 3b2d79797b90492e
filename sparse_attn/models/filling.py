"""Copies of a checkpoint's weights, straight to their places on a device: packed as the files have them, or expanded.

A tensor at a time is copied out of mapped memory. What is expanded goes to the device first and is expanded there, a
band of rows at a time, so the host never holds a copy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from sparse_attn.models.checkpoint import Checkpoint
from sparse_attn.models.params import INTEGER_NAMES, param_dtype, stays_packed
from sparse_attn.models.spelling import Spelling
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.weight_layout import (
    CODE_DTYPE,
    CODES_PER_BYTE,
    E8M0_NAN,
    GREATEST_CODE,
    SCALE_DTYPE,
    PackedWeight,
    Weight,
    WeightLayout,
    dequantise,
    parse_weight_layout,
    weight_entry,
    weight_rows,
)

BAND = {"cpu": 1 << 18, "cuda": 1 << 24}  # values that are expanded at a time
_FINITE = sys.float_info.max
_FP32_MAX = torch.finfo(torch.float32).max
# Where an infinite value means something: no sink, and an expert that is never chosen.
_MAY_BE_INFINITE = (".sink", "moe.bias")

Copy = Callable[[torch.Tensor, torch.Tensor], object]  # (target, source)
Told = Callable[[int], object]  # is told the bytes of each tensor once they are read


class Reading(NamedTuple):
    """How a weight of the forward is read. sources: names in the checkpoint, one after the other along its rows, each
    of shape ``each``. layout: that of the sources where it is held packed, None where it is held in plain values."""

    name: str
    shape: tuple[int, ...]
    sources: list[str]
    each: tuple[int, ...]
    layout: WeightLayout | None

    @property
    def integers(self) -> bool:
        return self.name.endswith(INTEGER_NAMES)

    @property
    def held(self) -> WeightLayout | None:
        """The layout that the weight is held in: rows of its blocks divide those of its parts."""
        if self.layout is None or self.each[-2] == self.shape[-2]:
            return self.layout
        rows, columns = self.layout.block
        return WeightLayout(
            self.layout.codes, (math.gcd(rows, self.each[-2], self.shape[-2]), columns), self.layout.scale
        )


def reading_of(name: str, shape: tuple[int, ...], spelling: Spelling, checkpoint: Checkpoint, expand: bool) -> Reading:
    """How the weight called ``name`` is read; all its sources have to be there. ValueError by what headers show."""
    sources = spelling.sources(name, checkpoint)
    each = spelling.source_shape(name, shape, sources)
    integers = name.endswith(INTEGER_NAMES)
    layouts = [checkpoint.layout(source, each, integers=integers) for source in sources]
    if expand or not stays_packed(name):
        return Reading(name, shape, sources, each, None)
    for source, layout in zip(sources, layouts):
        if layout != layouts[0]:
            raise ValueError(
                f"weight {source}: got {_said(layout)}, allowed: {_said(layouts[0])}, that of {sources[0]}, with which "
                f"it is held packed, or expanded weights; in {checkpoint.file(source)}"
            )
    return Reading(name, shape, sources, each, layouts[0])


def fill(
    readings: list[Reading], checkpoint: Checkpoint, spec: Spec | CompressedSpec, *,
    device: torch.device | str, dtype: torch.dtype, told: Told, copy: Copy = torch.Tensor.copy_,
) -> list[Weight]:  # fmt: skip
    """The weights of ``readings``, which have their sources in common, on ``device``; ValueError for values that no
    weight may have. copy: from the CPU to there."""
    if len(readings) == 1 and readings[0].layout is not None:
        return [_packed(readings[0], checkpoint, device, told, copy)]
    targets = [
        torch.empty(one.shape, dtype=param_dtype(one.name, dtype, checkpoint.dtype(one.sources[0])), device=device)
        for one in readings
    ]
    if len(readings) == 2:
        assert isinstance(spec, Spec)
        _fill_kv_b(targets[0], targets[1], readings[0], checkpoint, spec)
        told(checkpoint.nbytes(readings[0].sources[0]))
    else:
        _fill_plain(targets[0], readings[0], checkpoint, told, copy)
    for one, target in zip(readings, targets):
        _check_values(target, one, checkpoint, spec)
    return list(targets)


def expand(weight: PackedWeight, target: torch.Tensor) -> None:
    """The values of ``weight`` into ``target`` of its shape, on the device of ``target``, a band of rows at a time."""
    if target.dim() > 2:
        for at, part in enumerate(target):
            expand(_entry(weight, at), part)
        return
    for start, stop in _bands(target.shape, target.device):
        target[start:stop].copy_(dequantise(_on(weight_rows(weight, start, stop), target.device)))


def is_finite(weight: PackedWeight) -> bool:
    """Whether every value of ``weight`` is a finite fp32 number. Codes are compared as bytes, without a copy."""
    layout = parse_weight_layout(weight.layout)
    if not weight.codes.numel():
        return True
    if layout.codes == "e4m3":  # whose NaN are 0x7f and 0xff
        codes = weight.codes.view(torch.uint8)
        if codes.amax().item() == 255 or codes.view(torch.int8).amax().item() == 127:
            return False
    if layout.scale == "e8m0":
        byte = weight.scales.amax().item()
        if byte == E8M0_NAN:
            return False
        greatest = 2.0 ** (byte - 127)
    else:
        least, most = (bound.item() for bound in torch.aminmax(weight.scales))
        greatest = max(-least, most)
        if not math.isfinite(least) or not math.isfinite(most):
            return False
    if greatest * GREATEST_CODE[layout.codes] <= _FP32_MAX:
        return True
    return all(bool(values.isfinite().all()) for values in _expanded_bands(weight))


def _packed(
    reading: Reading, checkpoint: Checkpoint, device: torch.device | str, told: Told, copy: Copy
) -> PackedWeight:
    layout, held = reading.layout, reading.held
    assert layout is not None and held is not None
    *leading, rows, columns = reading.shape
    stored, count = columns // CODES_PER_BYTE[held.codes], len(reading.sources)
    codes = torch.empty((*leading, rows, stored), dtype=CODE_DTYPE[held.codes], device=device)
    scales = torch.empty((*leading, *held.grid(rows, columns)), dtype=SCALE_DTYPE[held.scale], device=device)
    grid = held.grid(*reading.each[-2:])
    code_parts = codes.view(count, *reading.each[:-1], stored)
    scale_parts = scales.view(count, *reading.each[:-2], *grid)
    for source, code_part, scale_part in zip(reading.sources, code_parts, scale_parts):
        found = checkpoint.packed(source, layout)
        copy(code_part, found.codes)
        copy(scale_part, _finer(found.scales, layout.block[0], held.block[0], grid[0]))
        told(checkpoint.nbytes(source))
    weight = PackedWeight(codes, scales, held.name)
    if not is_finite(weight):
        for source, code_part, scale_part in zip(reading.sources, code_parts, scale_parts):
            if not is_finite(PackedWeight(code_part, scale_part, held.name)):
                _refuse(source, "values that are NaN or infinite", "finite values", checkpoint.file(source))
    return weight


def _finer(scales: torch.Tensor, block: int, step: int, rows: int) -> torch.Tensor:
    """``scales`` of blocks of ``block`` rows as those of ``rows`` blocks of ``step`` rows."""
    if step == block:
        return scales
    return scales.index_select(-2, torch.arange(rows, device=scales.device) * step // block)


def _fill_plain(target: torch.Tensor, reading: Reading, checkpoint: Checkpoint, told: Told, copy: Copy) -> None:
    for source, part in zip(reading.sources, target.view(len(reading.sources), *reading.each)):
        layout = checkpoint.layout(source, reading.each, integers=reading.integers)
        if layout is None:
            copy(part, checkpoint.values(source))
        else:
            expand(checkpoint.packed(source, layout), part)
        told(checkpoint.nbytes(source))


def _fill_kv_b(w_uk: torch.Tensor, w_uv: torch.Tensor, reading: Reading, checkpoint: Checkpoint, spec: Spec) -> None:
    """Both parts of kv_b, whose rows are those of a head's keys, then of its values, a head after the other."""
    (source,), both = reading.sources, spec.nope_dim + spec.v_dim
    layout = checkpoint.layout(source, reading.each)
    kv_b = checkpoint.values(source) if layout is None else checkpoint.packed(source, layout)
    for head, (keys, values) in enumerate(zip(w_uk, w_uv)):
        rows = _on(weight_rows(kv_b, head * both, (head + 1) * both), w_uk.device)
        rows = dequantise(rows) if isinstance(rows, PackedWeight) else rows
        keys.copy_(rows[: spec.nope_dim])
        values.copy_(rows[spec.nope_dim :].t())


def _entry(weight: PackedWeight, at: int) -> PackedWeight:
    found = weight_entry(weight, at)
    assert isinstance(found, PackedWeight)
    return found


def _on(weight: Weight, device: torch.device) -> Weight:
    if isinstance(weight, PackedWeight):
        return PackedWeight(weight.codes.to(device), weight.scales.to(device), weight.layout)
    return weight.to(device)


def _bands(shape: torch.Size, device: torch.device) -> Iterator[tuple[int, int]]:
    """(start, stop) of the rows of each band."""
    rows, columns = shape
    step = max(1, BAND.get(device.type, BAND["cpu"]) // max(columns, 1))
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _expanded_bands(weight: PackedWeight) -> Iterator[torch.Tensor]:
    if weight.codes.dim() > 2:
        for at in range(weight.codes.shape[0]):
            yield from _expanded_bands(_entry(weight, at))
        return
    for start, stop in _bands(weight.codes.shape, weight.codes.device):
        yield dequantise(weight_rows(weight, start, stop))


def _check_values(target: torch.Tensor, reading: Reading, checkpoint: Checkpoint, spec: Spec | CompressedSpec) -> None:
    least, most = _range(reading, spec)
    if _within(target, least, most):
        return
    parts = [target]
    if len(reading.sources) > 1:
        parts = target.view(len(reading.sources), *reading.each)
    source = next(source for source, part in zip(reading.sources, parts) if not _within(part, least, most))
    if reading.integers:
        _refuse(source, "expert ids out of range", f"{least} to {most}", checkpoint.file(source))
    finite = most == _FINITE
    found, allowed = (" or infinite", "finite values") if finite else ("", "numbers")
    _refuse(source, "values that are NaN" + found, allowed, checkpoint.file(source))


def _range(reading: Reading, spec: Spec | CompressedSpec) -> tuple[float, float]:
    """The least and the greatest value that a weight may hold."""
    if reading.integers:
        return 0, spec.moe.num_experts - 1
    most = math.inf if reading.name.endswith(_MAY_BE_INFINITE) else _FINITE
    return -most, most


def _within(values: torch.Tensor, least: float, most: float) -> bool:
    """Whether all of ``values`` are in the range; NaN is in none."""
    if not values.numel():
        return True
    lowest, highest = (bound.item() for bound in torch.aminmax(values))
    return least <= lowest and highest <= most


def _said(layout: WeightLayout | None) -> str:
    return "plain values" if layout is None else layout.name


def _refuse(source: str, got: str, allowed: str, file: Path) -> NoReturn:
    raise ValueError(f"weight {source}: got {got}, allowed: {allowed}; in {file}")
