"""Where work on a tensor goes: its device's stream, whichever device is the process's current one."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import torch


def is_current(device: torch.device) -> bool:
    """Whether what is launched now goes to ``device``; a CPU always is."""
    index = device.index
    return index is None or device.type != "cuda" or index == torch.cuda.current_device()


def entered(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes ``device`` the current one inside the block."""
    return contextlib.nullcontext() if is_current(device) else torch.cuda.device(device)


def capturing(device: torch.device) -> bool:
    """Whether the current stream of ``device`` is being captured into a graph."""
    if device.type != "cuda":
        return False
    with entered(device):
        return torch.cuda.is_current_stream_capturing()


class _Kept:
    """How many blocks keep garbage now, and whether it was collected before the first one."""

    def __init__(self):
        self.changing = threading.Lock()
        self.blocks = 0
        self.collected = False


_kept = _Kept()


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """The block around a capture, in which Python collects no garbage by itself: a graph or a tensor that is freed
    during a capture ends it. Blocks of several threads may overlap; the last one to end puts back what was."""
    with _kept.changing:
        if _kept.blocks == 0:
            _kept.collected = gc.isenabled()
            gc.disable()
        _kept.blocks += 1
    try:
        yield
    finally:
        with _kept.changing:
            _kept.blocks -= 1
            if _kept.blocks == 0 and _kept.collected:
                gc.enable()
