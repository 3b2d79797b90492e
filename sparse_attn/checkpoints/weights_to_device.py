"""Copies of a checkpoint's weights, straight to their places on a device: packed as the files have them, or expanded.

A tensor at a time is copied out of mapped memory. What is expanded goes to the device first and is expanded there, a
band of rows at a time, so the host never holds a copy.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch

from sparse_attn.checkpoints.folder import Checkpoint
from sparse_attn.checkpoints.read import Reading
from sparse_attn.models.params import param_dtype
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.weight_layout import (
    CODE_DTYPE,
    CODES_PER_BYTE,
    E8M0_NAN,
    GREATEST_CODE,
    SCALE_DTYPE,
    PackedWeight,
    Weight,
    dequantise,
    parse_weight_layout,
    weight_entry,
    weight_part,
    weight_rows,
)

BAND = {"cpu": 1 << 18, "cuda": 1 << 24}  # values that are expanded at a time
_FINITE = sys.float_info.max
_FP32_MAX = torch.finfo(torch.float32).max
# Where an infinite value means something: no sink, and an expert that is never chosen.
_MAY_BE_INFINITE = (".sink", "moe.bias")

Copy = Callable[[torch.Tensor, torch.Tensor], object]  # (target, source)
Told = Callable[[int], object]  # is told the bytes of each tensor once they are read


def fill(
    readings: list[Reading], checkpoint: Checkpoint, spec: Spec | CompressedSpec, *,
    device: torch.device | str, dtype: torch.dtype, told: Told, copy: Copy = torch.Tensor.copy_,
) -> list[Weight]:  # fmt: skip
    """The weights of ``readings``, which have their sources in common, on ``device``; ValueError for values that no
    weight may have. copy: from the CPU to there."""
    if len(readings) == 1 and readings[0].layout is not None:
        return [_packed(readings[0], checkpoint, device, told, copy)]
    targets = [_empty(one, param_dtype(one.name, dtype, checkpoint.dtype(one.sources[0])), device) for one in readings]
    if len(readings) == 2:
        assert isinstance(spec, Spec)
        _fill_kv_b(targets[0], targets[1], readings[0], checkpoint, spec)
        told(sum(readings[0].nbytes(checkpoint).values()))
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


def _empty(reading: Reading, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Room for a weight, zero where rows of zeros fill it up."""
    kept = reading.kept
    padded = len(kept.shape) > 1 and sum(map(len, kept.rows)) < kept.shape[-2]
    return (torch.zeros if padded else torch.empty)(kept.shape, dtype=dtype, device=device)


def _packed(
    reading: Reading, checkpoint: Checkpoint, device: torch.device | str, told: Told, copy: Copy
) -> PackedWeight:
    layout, held, kept, nbytes = reading.layout, reading.held, reading.kept, reading.nbytes(checkpoint)
    assert layout is not None and held is not None
    *leading, rows, columns = kept.shape
    grid = held.grid(rows, columns)
    padded = sum(map(len, kept.rows)) < rows
    made = torch.zeros if padded else torch.empty
    codes = made((*leading, rows, columns // CODES_PER_BYTE[held.codes]), dtype=torch.uint8, device=device)
    codes = codes.view(CODE_DTYPE[held.codes])
    scales = made((*leading, *grid), dtype=SCALE_DTYPE[held.scale], device=device)
    parts = []  # (source, its part of the weight)
    for source, pieces in itertools.groupby(reading.pieces, lambda piece: piece.source):
        whole = checkpoint.packed(source, layout)
        for piece in pieces:
            found = whole if piece.entry is None else _entry(whole, piece.entry)
            found = weight_part(found, [piece.rows], kept.columns, block=held.block)
            assert isinstance(found, PackedWeight)
            entry, first = divmod(piece.at, rows)
            place = (entry,) if leading else ()
            low = first // held.block[0]
            part = PackedWeight(
                codes[(*place, slice(first, first + len(piece.rows)))],
                scales[(*place, slice(low, low + found.scales.shape[-2]))],
                held.name,
            )
            copy(part.codes, found.codes)
            copy(part.scales, found.scales)
            parts.append((source, part))
        told(nbytes[source])
    weight = PackedWeight(codes, scales, held.name)
    if not is_finite(weight):
        for source, part in parts:
            if not is_finite(part):
                _refuse(source, "values that are NaN or infinite", "finite values", checkpoint.file(source))
    return weight


def _flat(target: torch.Tensor) -> torch.Tensor:
    return target if target.dim() < 3 else target.flatten(0, 1)


def _fill_plain(target: torch.Tensor, reading: Reading, checkpoint: Checkpoint, told: Told, copy: Copy) -> None:
    kept, flat, nbytes = reading.kept, _flat(target), reading.nbytes(checkpoint)
    for source, pieces in itertools.groupby(reading.pieces, lambda piece: piece.source):
        layout = checkpoint.layout(source, reading.each, integers=reading.integers)
        whole = checkpoint.values(source) if layout is None else checkpoint.packed(source, layout)
        for piece in pieces:
            part = flat[piece.at : piece.at + len(piece.rows)]
            found = whole if piece.entry is None else weight_entry(whole, piece.entry)
            if target.dim() == 1:
                assert isinstance(found, torch.Tensor)
                copy(part, found[piece.rows.start : piece.rows.stop])
                continue
            found = weight_part(found, [piece.rows], kept.columns)
            if isinstance(found, PackedWeight):
                expand(found, part)
            else:
                copy(part, found)
        told(nbytes[source])


def _fill_kv_b(w_uk: torch.Tensor, w_uv: torch.Tensor, reading: Reading, checkpoint: Checkpoint, spec: Spec) -> None:
    """Both parts of kv_b, whose rows are those of a head's keys, then of its values, a head after the other."""
    (source,), both = reading.sources, spec.nope_dim + spec.v_dim
    layout = checkpoint.layout(source, reading.each)
    kv_b = checkpoint.values(source) if layout is None else checkpoint.packed(source, layout)
    for head, keys, values in zip(reading.kept.entries, w_uk, w_uv):
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
    source = reading.sources[0]
    if len(reading.sources) > 1:
        flat = _flat(target)
        parts = ((piece.source, flat[piece.at : piece.at + len(piece.rows)]) for piece in reading.pieces)
        source = next(source for source, part in parts if not _within(part, least, most))
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


def _refuse(source: str, got: str, allowed: str, file: Path) -> NoReturn:
    raise ValueError(f"weight {source}: got {got}, allowed: {allowed}; in {file}")
