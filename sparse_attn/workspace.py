"""Scratch memory for real implementations: one buffer per (device, stream), reserved once, never seen outside an op.

A launcher asks once for everything it needs at the same time; the views start at offset 0 on every call and hold
whatever the last user left. Beside the scratch lies a small region of int64 counters that is zero whenever no op runs:
an op that uses counters leaves them zero. Without a reservation, eager calls allocate.

Threads. ``reserve`` serves a stream, whichever thread launches on it; the default stream is one for all threads.
``use`` serves the thread (or asyncio task) that entered it, and no other. An op holds its workspace from the moment it
takes scratch to its last launch, so the launches of two ops that share one never interleave on their stream. A
workspace that serves two streams at a time is a race all the same. A replay does not hold the workspace that its graph
was captured with: use that workspace on the graph's stream and thread only.

Graphs. A graph reads the buffer that its ops took at the capture, so from then on that workspace never grows. Nor does
a graph keep it alive: hold the workspace for as long as the graph. Where nothing is reserved on the stream of a
capture, ops allocate in the graph's own pool. No workspace is made there: its memory would be the graph's.

Errors. An op may raise after its kernels have counted. Its counters are then zeroed on the stream before the error
leaves the op. After a GPU error that stays (an illegal address) nothing works on that device, counters included: the
process has to end.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import threading
from collections.abc import Iterable
from typing import NamedTuple

import torch

from sparse_attn.framework import streams, torch_private

ALIGNMENT = 256


class Buffer(NamedTuple):
    """One scratch tensor that a launcher needs, as a plan's scratch lists them."""

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
    """How much scratch.

    Attributes:
        nbytes: scratch bytes.
        counters: int64 counters beside them.
    """

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
    """One owner's buffer. It grows on demand until ``lock``, or until an op takes from it while its stream is
    capturing.

    Args:
        size: bytes and counters, what workspace_size returns.
        device: where it lies.

    Raises:
        RuntimeError: during a capture.
    """

    def __init__(self, size: WorkspaceSize | tuple[int, int], device: torch.device | str):
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.locked = False
        self.captured = False  # whether a graph reads the buffer
        self.turn = threading.RLock()  # held by the op whose launches use the buffer
        self.high_water = WorkspaceSize(0, 0)
        size = WorkspaceSize(*size)
        if streams.capturing(self.device):
            raise RuntimeError(
                f"workspace: got a new one of {size.nbytes} bytes and {size.counters} counters while the stream of "
                f"{self.device} is capturing, allowed: one that is made before the capture"
            )
        self._allocate(size)

    def _allocate(self, size: WorkspaceSize) -> None:
        self.size = size
        self._scratch = torch.empty(size.nbytes, dtype=torch.uint8, device=self.device)
        self._counters = torch.zeros(size.counters, dtype=torch.int64, device=self.device)

    def lock(self) -> None:
        """From now on a request that would grow the buffer is an error."""
        self.locked = True

    def unlock(self) -> None:
        """Undo ``lock``. What a graph reads does not grow all the same."""
        self.locked = False

    def grow(self, size: WorkspaceSize, who: str) -> None:
        """Make room for ``size``.

        Args:
            size: bytes and counters.
            who: asks, for the error.

        Raises:
            RuntimeError: locked, captured or capturing; it names who asked, for how much, what to raise.
        """
        with self.turn:
            self._grow(size, who)

    def _grow(self, size: WorkspaceSize, who: str) -> None:
        if size.nbytes <= self.size.nbytes and size.counters <= self.size.counters:
            return
        if reason := self._fixed():
            raise RuntimeError(
                f"workspace: {who} needs {size.nbytes} bytes and {size.counters} counters, reserved are "
                f"{self.size.nbytes} bytes and {self.size.counters} counters, and the workspace {reason}; reserve "
                f"workspace_size(spec, bounds, target) with bounds that cover this call (max_batch, "
                f"max_batched_tokens, max_model_len, next_n, logits_bytes, prefill_in_place, prefill_activations)"
            )
        if self.device.type == "cuda":  # what this stream still reads may have been allocated on another one
            for old in (self._scratch, self._counters):
                old.record_stream(torch.cuda.current_stream(self.device))
        self._allocate(largest((self.size, size)))

    def _fixed(self) -> str | None:
        """Why it cannot grow; None where it can."""
        if self.locked:
            return "is locked"
        if self.captured:
            return "is read by a captured graph"
        return "cannot grow while its stream is capturing" if streams.capturing(self.device) else None

    def take(self, who: str, scratch: Scratch) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Views for every buffer of ``scratch``, in order, and its counters."""
        size = size_of(scratch)
        self.grow(size, who)
        self.high_water = largest((self.high_water, size))
        if not self.captured and size.total and streams.capturing(self.device):
            self.captured = True
        views, offset = [], 0
        for buffer in scratch.buffers:
            piece = self._scratch[offset : offset + buffer.nbytes]
            views.append(piece.view(buffer.dtype).view(buffer.shape))
            offset += _round_up(buffer.nbytes)
        return views, self._counters[: scratch.counters]

    def clear_counters(self, count: int) -> None:
        """Zero the first ``count`` counters, after an error; where the device takes no more work, nothing helps."""
        with contextlib.suppress(RuntimeError):
            self._counters[:count].zero_()


Key = tuple[torch.device, int]


class _Running(threading.local):
    """The ops that this thread is in the middle of, innermost last."""

    def __init__(self):
        self.ops: list[launching] = []


_reserved: dict[Key, Workspace] = {}
_reserving = threading.Lock()
_used: contextvars.ContextVar[tuple[use, ...]] = contextvars.ContextVar("sparse_attn_workspaces", default=())
_running = _Running()


def _key(device: torch.device) -> Key:
    if device.type != "cuda":
        return device, 0
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device, torch_private.stream_handle(device)


def _owner(device: torch.device) -> Workspace | None:
    uses = _used.get()
    if not uses and not _reserved:
        return None
    key = _key(device)
    for one in reversed(uses):
        if one.key == key and (workspace := one.workspace) is not None:
            return workspace
    return _reserved.get(key)


def reserve(size: WorkspaceSize | tuple[int, int], device: torch.device | str) -> Workspace:
    """Give the current stream of ``device`` a workspace of at least ``size``, and return it. It serves every thread.

    Args:
        size: bytes and counters, what workspace_size returns.
        device: whose current stream.

    Returns:
        The Workspace, the same at every call.

    Raises:
        RuntimeError: it would grow though it is locked, captured or capturing; or a new one is made during a capture.
    """
    key = _key(torch.device(device))
    with _reserving:
        owner = _reserved.get(key)
        if owner is None:
            owner = _reserved[key] = Workspace(size, key[0])
    owner.grow(WorkspaceSize(*size), "reserve")
    return owner


def release(device: torch.device | str) -> None:
    """Forget what was reserved for the current stream of ``device``; eager calls allocate again.

    A graph that reads it needs the workspace that ``reserve`` returned.

    Args:
        device: whose current stream.
    """
    _reserved.pop(_key(torch.device(device)), None)


def current(device: torch.device | str) -> Workspace | None:
    """The workspace that ops of this thread on the current stream of ``device`` take scratch from.

    Args:
        device: whose current stream.

    Returns:
        The Workspace, or None where ops allocate.
    """
    return _owner(torch.device(device))


class use:
    """The block in which ``workspace`` serves this thread on the current stream of its device; a captured graph keeps
    its own this way.

    Blocks may end in any order (in generators), and in another thread than they began in. One that ends drops its
    workspace, whoever still refers to it.

    Args:
        workspace: what ``reserve`` returned, or one of your own.
    """

    __slots__ = ("key", "workspace")
    key: Key

    def __init__(self, workspace: Workspace):
        self.workspace: Workspace | None = workspace

    def __enter__(self) -> Workspace:
        workspace = self.workspace
        assert workspace is not None
        self.key = _key(workspace.device)
        _used.set((*_used.get(), self))
        return workspace

    def __exit__(self, *_: object) -> None:
        self.workspace = None
        if (uses := _used.get()) != (self,):
            _used.set(tuple(one for one in uses if one.workspace is not None))
        else:
            _used.set(())


class launching:
    """The block in which one op launches: whatever workspace it takes from is its own until the block ends, and an
    error leaves no counter behind."""

    __slots__ = ("taken",)

    def __enter__(self) -> None:
        self.taken: list[tuple[Workspace, int]] = []
        _running.ops.append(self)

    def __exit__(self, error, *_) -> None:
        _running.ops.pop()
        for owner, counters in reversed(self.taken):
            try:
                if error is not None and counters:
                    owner.clear_counters(counters)
            finally:
                owner.turn.release()


def take(who: str, scratch: Scratch, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Scratch for one op call: of the thread's or the stream's workspace where there is one, else freshly allocated."""
    owner = _owner(device)
    if owner is not None:
        if _running.ops:
            owner.turn.acquire()
            _running.ops[-1].taken.append((owner, scratch.counters))
        return owner.take(who, scratch)
    views = [torch.empty(buffer.shape, dtype=buffer.dtype, device=device) for buffer in scratch.buffers]
    return views, torch.zeros(scratch.counters, dtype=torch.int64, device=device)
