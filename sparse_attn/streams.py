"""Where work on a tensor goes: its device's stream, whichever device is the process's current one."""

from __future__ import annotations

import contextlib

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
