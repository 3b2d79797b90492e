"""What is set of a row of a decode loop before its prompt is computed: its random stream, its rings, its sampling.

The tensors that a step reads hold a value a row each. What is set of rows between two steps is noted on the host, then
goes into the tensors: a copy each of a few, else in one copy and from there in one launch.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import NamedTuple

import torch

from sparse_attn.framework.torch_private import copy_all, current_stream
from sparse_attn.generation.inputs import checked_sampling
from sparse_attn.generation.sampling import DTYPES, Draws, Sampling
from sparse_attn.generation.steps import sent
from sparse_attn.ops.layers.sampling import row_seeds

CODES = {torch.float64: "d", torch.int64: "q", torch.float32: "f", torch.int32: "i"}
NUMBERS = [name for name in Sampling._fields if name in DTYPES]
OFF = Sampling()
MAX_FORMS = 16  # of what is written at once, whose memory is kept
MAX_BUFFERS = 8  # of a form on the host, for what is written before the device has read what was written before
MAX_COPIES = 8  # tensors written to by a copy each; one launch for all took the host 58 us behind a prefill


class StagingBuffer(NamedTuple):
    """Memory on the host, and its parts, that tensors are copied from: pinned for a GPU, so that copies are not waited
    for. data: the same as bytes. copied: an event behind the last copies; None on a CPU, where none is under way."""

    words: torch.Tensor
    parts: Sequence[torch.Tensor]
    data: memoryview
    copied: torch.cuda.Event | None


class Form(NamedTuple):
    """Memory for what is written at once, in parts of so many words. on_device, parts: what more parts than are copied
    one by one pass through. buffers: on the host, the one that was used first in front."""

    words: tuple[int, ...]
    on_device: torch.Tensor | None
    parts: Sequence[torch.Tensor]
    buffers: deque[StagingBuffer]


class RowEdits(dict[tuple[str, int], tuple[Sequence[torch.Tensor], Sequence[int], bytes]]):
    """What is still to be written into rows of tensors on ``device``, which live as long as this: by (what it is, row)
    the tensors, as int32 of one dimension; how many of the words each takes; and the words, little-endian. A row that
    is set twice holds what was set last. allocating: where memory for it is allocated."""

    def __init__(self, device: torch.device, allocating: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self._device, self._allocating, self._on_gpu = device, allocating, device.type == "cuda"
        self._forms: dict[tuple[int, ...], Form] = {}  # by how many words each part has

    def write(self) -> None:
        """Write what was noted, in the order of the current stream. The host does not wait."""
        targets: list[torch.Tensor] = []
        words: list[int] = []
        data = b""
        for where, counts, part in self.values():
            targets += where
            words += counts
            data += part
        self.clear()
        if len(data) == 4:
            targets[0].fill_(int.from_bytes(data, "little", signed=True))
            return
        form = self._form(tuple(words))
        buffer = self._free_buffer(form)
        buffer.data[:] = data
        if form.on_device is None:
            copy_all(targets, buffer.parts)
        else:
            form.on_device.copy_(buffer.words, non_blocking=True)
            copy_all(targets, form.parts)
        if buffer.copied is not None:
            buffer.copied.record(current_stream(self._device))
        if len(form.buffers) < MAX_BUFFERS:
            form.buffers.append(buffer)

    def _form(self, words: tuple[int, ...]) -> Form:
        """The memory of parts of so many words; that of one row's settings stays."""
        if (found := self._forms.get(words)) is None:
            on_device, parts = None, ()
            if self._on_gpu and len(words) > MAX_COPIES:
                with self._allocating():
                    on_device = torch.empty(sum(words), dtype=torch.int32, device=self._device)
                parts = on_device.split(words)
            found = Form(words, on_device, parts, deque())
            if len(self._forms) < MAX_FORMS:
                self._forms[words] = found
        return found

    def _free_buffer(self, form: Form) -> StagingBuffer:
        """One that no copy still reads, the caller's until it is put back. Pinned memory takes long to get, so it is
        new only where the device has yet to read the one that was used first."""
        if form.buffers and ((copied := form.buffers[0].copied) is None or copied.query()):
            return form.buffers.popleft()
        words = torch.empty(sum(form.words), dtype=torch.int32, device="cpu", pin_memory=self._on_gpu)
        data = memoryview((ctypes.c_char * words.nbytes).from_address(words.data_ptr())).cast("B")
        return StagingBuffer(words, words.split(form.words), data, torch.cuda.Event() if self._on_gpu else None)


class RowSettings:
    """What is set of each of ``rows`` rows, beside ``rings``, a tensor of a loop that lives as long as this. sampling:
    of rows that bring none. draws: the fields that the loop reads, of any number of rows.

    seeds, draws: the tensors that a step reads. Those that are set are columns of one tensor, so that a row is written
    at once.
    """

    def __init__(
        self, edits: RowEdits, sampling: Sampling, rows: int, device: torch.device, rings: torch.Tensor | None,
        draws: Draws | None,
    ) -> None:  # fmt: skip
        self._edits, self._sampling = edits, sampling
        seeds = row_seeds(sampling.seed, rows, "cpu")
        held = {} if draws is None else {name: value for name, value in draws._asdict().items() if value is not None}
        kinds = {"seed": seeds, **{name: held[name] for name in ("stop_ids", *NUMBERS) if name in held}}
        record, columns, form = _columns(kinds, rows, device)
        self.seeds, self._seeds = columns.pop("seed").copy_(seeds), seeds.tolist()
        for name in held.keys() - columns.keys():  # counts and what they go with
            columns[name] = torch.zeros(rows, *held[name].shape[1:], dtype=held[name].dtype, device=device)
        self.draws = None if draws is None else Draws(**columns)
        self._stop_ids, self._rings = (
            0 if value is None else value.shape[1] for value in (self.draws and self.draws.stop_ids, rings)
        )
        self._packed = struct.Struct(f"{form}{self._rings}i")
        self._unused = [-1] * self._stop_ids
        self._counts = "counts" in columns
        self._read = [name in NUMBERS and name in kinds for name in Sampling._fields]
        self._unread = [name for name in (*NUMBERS, "stop_ids") if name not in kinds]
        self._rows = list(zip(*(rows_of(value) for value in (record, rings) if value is not None)))
        self._words = [row.shape[0] for row in self._rows[0]]
        self.stopping: set[int] = set()  # the rows set with stop ids
        self.penalised: dict[int, Sequence[int]] = {}  # the prompts of rows set with penalties, to be counted

    def set(
        self, row: int, seed: int | None, rings: Sequence[int], sampling: Sampling | None, prompt: Sequence[int]
    ) -> None:
        """Note what a row is to hold, which was checked."""
        own, stop_ids = (self._sampling, ()) if sampling is None else (sampling, sampling.stop_ids)  # beside the loop's
        data = self._packed.pack(
            self._seeds[row] if seed is None else seed, *stop_ids, *self._unused[len(stop_ids) :],
            *compress(own, self._read), *rings,
        )  # fmt: skip
        self._edits["settings", row] = self._rows[row], self._words, data
        self.stopping.discard(row)
        if stop_ids:
            self.stopping.add(row)
        if self._counts:
            self.penalised.pop(row, None)
            if own.penalises:
                self.penalised[row] = prompt

    def write_counts(self) -> None:
        """Start the counts of the rows that were set and have penalties. Of other rows nobody reads them."""
        for row, prompt in self.penalised.items():
            assert self.draws is not None and self.draws.counts is not None
            self.draws.counts[row].zero_()
            if self.draws.prompted is None:
                continue
            self.draws.prompted[row].zero_()
            if prompt:
                ids = torch.frombuffer(array("q", prompt), dtype=torch.int64)
                self.draws.prompted[row].index_fill_(0, sent(ids, self.draws.counts.device), True)
        self.penalised.clear()

    def checked(self, rings: Sequence[int] | None, sampling: Sampling | None) -> Sampling | None:
        """``sampling`` in plain numbers. ValueError or TypeError for what the tensors have no place for."""
        if len(rings or ()) != self._rings:
            raise ValueError(f"rings: got {len(rings or ())}, allowed: {self._rings}, those of a row")
        if sampling is None:
            return None
        sampling = checked_sampling(sampling)
        if self.draws is None:
            raise ValueError("sampling: got one of a row, allowed: None, the loop has no draws")
        for name in self._unread:
            if getattr(sampling, name) != getattr(OFF, name):
                raise ValueError(f"sampling: got {name}, allowed: what the loop has draws for")
        if len(sampling.stop_ids) > self._stop_ids:
            raise ValueError(f"sampling: got {len(sampling.stop_ids)} stop ids, allowed: at most {self._stop_ids}")
        return sampling


def _columns(
    kinds: dict[str, torch.Tensor], rows: int, device: torch.device
) -> tuple[torch.Tensor, dict[str, torch.Tensor], str]:
    """A tensor int32 [rows, words] of zeros, that holds for each row what ``kinds`` hold for one; its columns, with the
    dtype and the width of each kind; and how ``struct`` packs a row."""
    widths = {name: value.shape[1] if value.dim() > 1 else 1 for name, value in kinds.items()}
    form, places = "", {}
    for name, value in kinds.items():
        code = CODES[value.dtype]
        places[name] = struct.calcsize(f"{form}0{code}") // value.element_size()  # behind what aligns it
        form += f"{widths[name]}{code}"
    form += "0q"  # where the next row begins
    record, columns = torch.zeros(rows, struct.calcsize(form) // 4, dtype=torch.int32, device=device), {}
    for name, value in kinds.items():
        column = record.view(value.dtype)[:, places[name] : places[name] + widths[name]]
        columns[name] = column if value.dim() > 1 else column.squeeze(1)
    return record, columns, form


def rows_of(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The rows of a tensor of whole words, as int32 of one dimension."""
    return value.view(value.shape[0], -1).view(torch.int32).unbind(0)
