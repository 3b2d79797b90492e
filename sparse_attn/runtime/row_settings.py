"""What is set of a row of a decode loop before its prompt is computed: its random stream, its rings, its sampling.

The tensors that a step reads hold a value a row each. What is set of rows between two steps is noted on the host, then
goes to the device in one copy, and from there into the tensors in one launch.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from sparse_attn.ops.sampling import row_seeds
from sparse_attn.runtime.draws import DTYPES, Draws, Sampling
from sparse_attn.runtime.inputs import checked_sampling
from sparse_attn.torch_private import copy_all

CODES = {torch.float64: "d", torch.int64: "q", torch.float32: "f", torch.int32: "i"}


class RowEdits:
    """What is still to be written into rows of tensors on ``device``, which live as long as this. A row that is set
    twice holds what was set last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted: dict[tuple[str, int], tuple[torch.Tensor, bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._noted)

    def note(self, name: str, row: int, target: torch.Tensor, data: bytes) -> None:
        """``target``: the row ``row`` of the tensor ``name``, as int32 of one dimension. data: what it is to hold."""
        self._noted[name, row] = target, data

    def write(self) -> None:
        """Write what was noted, in the order of the current stream. The host does not wait."""
        targets, data = zip(*self._noted.values())
        self._noted.clear()
        if len(data) == 1 and len(data[0]) == 4:
            targets[0].fill_(int.from_bytes(data[0], "little", signed=True))
            return
        staged = sent_bytes(b"".join(data), self._device)
        copy_all(targets, staged.split([len(part) // 4 for part in data]))


def sent_bytes(data: bytes, device: torch.device) -> torch.Tensor:
    """``data``, whole words, as int32 on ``device``, without waiting for the copy."""
    if device.type != "cuda":
        return torch.frombuffer(bytearray(data), dtype=torch.int32).to(device)
    pinned = torch.empty(len(data) // 4, dtype=torch.int32, device="cpu", pin_memory=True)
    ctypes.memmove(pinned.data_ptr(), data, len(data))
    return pinned.to(device, non_blocking=True)


class RowSettings:
    """Of the rows whose ``seeds``, ``rings`` and ``draws`` are given, tensors of a loop that live as long as this.
    sampling: of rows that bring none."""

    def __init__(
        self, edits: RowEdits, sampling: Sampling, seeds: torch.Tensor, rings: torch.Tensor | None, draws: Draws | None
    ) -> None:
        self._edits, self._sampling, self._draws = edits, sampling, draws
        self._seeds: list[int] = row_seeds(sampling.seed, seeds.shape[0], "cpu").tolist()
        held: dict[str, torch.Tensor | None] = {"seed": seeds, "rings": rings}
        if draws is not None:
            held |= {name: getattr(draws, name) for name in (*DTYPES, "stop_ids")}
        self._tensors = {name: value for name, value in held.items() if value is not None}
        self._codes = {name: CODES[value.dtype] for name, value in self._tensors.items()}
        self._widths = {name: value.shape[1] for name, value in self._tensors.items() if value.dim() > 1}
        self._rows = {name: list(rows_of(value)) for name, value in self._tensors.items()}
        self.stopping: set[int] = set()  # the rows set with stop ids
        self._penalised: dict[int, Sequence[int]] = {}

    def set(
        self, row: int, seed: int | None, rings: Sequence[int] | None, sampling: Sampling | None, prompt: Sequence[int]
    ) -> None:
        """Note what a row is to hold. ValueError or TypeError, before anything is, for what the tensors have no place
        for."""
        own = self._checked(sampling)
        if "rings" in self._tensors and len(rings or ()) != (wanted := self._widths["rings"]):
            raise ValueError(f"rings: got {len(rings or ())}, allowed: {wanted}, those of a row")
        given: dict[str, Any] = {"seed": (self._seeds[row] if seed is None else seed,), "rings": rings}
        for name, rows in self._rows.items():
            values = given[name] if name in given else self._values(own, name)
            self._edits.note(name, row, rows[row], array(self._codes[name], values).tobytes())
        self.stopping.discard(row)
        if own.stop_ids and "stop_ids" in self._tensors:
            self.stopping.add(row)
        self._penalised.pop(row, None)
        if own.penalises and self._draws is not None and self._draws.counts is not None:
            self._penalised[row] = prompt

    def write_counts(self) -> None:
        """Start the counts of the rows that were set and have penalties. Of other rows nobody reads them."""
        for row, prompt in self._penalised.items():
            assert self._draws is not None and self._draws.counts is not None
            self._draws.counts[row].zero_()
            if self._draws.prompted is None:
                continue
            self._draws.prompted[row].zero_()
            if prompt:
                ids = sent_bytes(array("q", prompt).tobytes(), self._draws.counts.device).view(torch.int64)
                self._draws.prompted[row].index_fill_(0, ids, True)
        self._penalised.clear()

    def _values(self, sampling: Sampling, name: str) -> Sequence[Any]:
        if name != "stop_ids":
            return (getattr(sampling, name),)
        return [*sampling.stop_ids] + [-1] * (self._widths[name] - len(sampling.stop_ids))

    def _checked(self, sampling: Sampling | None) -> Sampling:
        if sampling is None:
            return self._sampling
        sampling, off = checked_sampling(sampling), Sampling()
        if self._draws is None:
            raise ValueError("sampling: got one of a row, allowed: None, the loop has no draws")
        for name in (*DTYPES, "stop_ids"):
            if name not in self._tensors and getattr(sampling, name) != getattr(off, name):
                raise ValueError(f"sampling: got {name}, allowed: what the loop has draws for")
        most = self._widths.get("stop_ids", 0)
        if len(sampling.stop_ids) > most:
            raise ValueError(f"sampling: got {len(sampling.stop_ids)} stop ids, allowed: at most {most}")
        return sampling


def rows_of(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The rows of a tensor of whole words, as int32 of one dimension."""
    return value.view(value.shape[0], -1).view(torch.int32).unbind(0)
