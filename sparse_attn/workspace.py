"""Scratch memory for real implementations: one buffer per (device, stream), reserved once, never seen outside an op.

A launcher asks once for everything it needs at the same time; the views start at offset 0 on every call and hold
whatever the last user left. Beside the scratch lies a small region of int64 counters that is zero whenever no op runs:
an op that uses counters leaves them zero. Without a reservation, eager calls allocate.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

ALIGNMENT = 256


class Buffer(NamedTuple):
    """One scratch tensor a launcher needs: what ``config.scratch`` lists."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Scratch(NamedTuple):
    """What one op needs at once: buffers, and how many int64 counters (zero before, zero after)."""

    buffers: tuple[Buffer, ...] = ()
    counters: int = 0


class WorkspaceSize(NamedTuple):
    """nbytes: scratch bytes; counters: int64 counters beside them."""

    nbytes: int
    counters: int

    @property
    def total(self) -> int:
        return self.nbytes + 8 * self.counters


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def size_of(scratch: Scratch) -> WorkspaceSize:
    """The exact size one op's scratch takes."""
    return WorkspaceSize(sum(_round_up(buffer.nbytes) for buffer in scratch.buffers), scratch.counters)


def largest(sizes: Iterable[WorkspaceSize]) -> WorkspaceSize:
    """The size that serves each of ``sizes``, one at a time."""
    nbytes = counters = 0
    for size in sizes:
        nbytes, counters = max(nbytes, size.nbytes), max(counters, size.counters)
    return WorkspaceSize(nbytes, counters)


class Workspace:
    """One owner's buffer. It grows on demand until ``lock``; it never grows while its stream is capturing."""

    def __init__(self, size: WorkspaceSize | tuple[int, int], device: torch.device | str):
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.locked = False
        self.high_water = WorkspaceSize(0, 0)
        self._allocate(WorkspaceSize(*size))

    def _allocate(self, size: WorkspaceSize) -> None:
        self.size = size
        self._scratch = torch.empty(size.nbytes, dtype=torch.uint8, device=self.device)
        self._counters = torch.zeros(size.counters, dtype=torch.int64, device=self.device)

    def lock(self) -> None:
        """From now on a request that would grow the buffer is an error."""
        self.locked = True

    def unlock(self) -> None:
        self.locked = False

    def grow(self, size: WorkspaceSize, who: str) -> None:
        """Make room for ``size``; RuntimeError when locked or capturing, naming who asked, for how much, what to raise."""
        if size.nbytes <= self.size.nbytes and size.counters <= self.size.counters:
            return
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.locked or capturing:
            raise RuntimeError(
                f"workspace: {who} needs {size.nbytes} bytes and {size.counters} counters, reserved are "
                f"{self.size.nbytes} bytes and {self.size.counters} counters, and the workspace "
                f"{'is locked' if self.locked else 'cannot grow while its stream is capturing'}; reserve "
                f"workspace_size(spec, bounds, target) with bounds that cover this call (max_batch, max_batched_tokens, "
                f"max_model_len, next_n, logits_bytes, prefill_in_place)"
            )
        if self.device.type == "cuda":  # what this stream still reads may have been allocated on another one
            for old in (self._scratch, self._counters):
                old.record_stream(torch.cuda.current_stream(self.device))
        self._allocate(largest((self.size, size)))

    def take(self, who: str, scratch: Scratch) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Views for every buffer of ``scratch``, in order, and its counters."""
        size = size_of(scratch)
        self.grow(size, who)
        self.high_water = largest((self.high_water, size))
        views, offset = [], 0
        for buffer in scratch.buffers:
            piece = self._scratch[offset : offset + buffer.nbytes]
            views.append(piece.view(buffer.dtype).view(buffer.shape))
            offset += _round_up(buffer.nbytes)
        return views, self._counters[: scratch.counters]


_owners: dict[tuple[torch.device, int], Workspace] = {}


def _key(device: torch.device) -> tuple[torch.device, int]:
    if device.type != "cuda":
        return device, 0
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device, torch.cuda.current_stream(device).cuda_stream


def reserve(size: WorkspaceSize | tuple[int, int], device: torch.device | str) -> Workspace:
    """Give the current stream of ``device`` a workspace of at least ``size``, and return it."""
    key = _key(torch.device(device))
    if key in _owners:
        _owners[key].grow(WorkspaceSize(*size), "reserve")
    else:
        _owners[key] = Workspace(size, key[0])
    return _owners[key]


def release(device: torch.device | str) -> None:
    """Forget the workspace of the current stream of ``device``; eager calls allocate again."""
    _owners.pop(_key(torch.device(device)), None)


def current(device: torch.device | str) -> Workspace | None:
    """The workspace that ops on the current stream of ``device`` take scratch from."""
    return _owners.get(_key(torch.device(device)))


@contextlib.contextmanager
def use(workspace: Workspace) -> Iterator[Workspace]:
    """Let ``workspace`` serve the current stream of its device inside the block; a captured graph keeps its own this way."""
    key = _key(workspace.device)
    before = _owners.get(key)
    _owners[key] = workspace
    try:
        yield workspace
    finally:
        if before is None:
            _owners.pop(key, None)
        else:
            _owners[key] = before


def take(who: str, scratch: Scratch, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Scratch for one op call: from the stream's workspace where there is one, freshly allocated otherwise."""
    owner = _owners.get(_key(device))
    if owner is not None:
        return owner.take(who, scratch)
    views = [torch.empty(buffer.shape, dtype=buffer.dtype, device=device) for buffer in scratch.buffers]
    return views, torch.zeros(scratch.counters, dtype=torch.int64, device=device)
