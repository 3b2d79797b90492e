"""Copies of tensors in files to a GPU by way of pinned memory: while one piece travels, the next one is read.

What lies in a mapped file is read from the file: to touch its pages in the mapping takes as long again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch

PIECE = 32 << 20  # bytes of each of two buffers
READERS = 4  # threads: one copies out of the page cache more slowly than a GPU takes what it copied
LEAST = 1 << 20  # bytes of a piece worth a thread
_WIDEST = 8  # bytes of a value

Place = Callable[[torch.Tensor], tuple[Path, int] | None]  # the file and the first byte there of what lies in one


class Staging:
    """Two pinned buffers of at most ``nbytes`` each, for copies to ``device``, ordered on the current stream."""

    def __init__(self, device: torch.device | str, nbytes: int, place: Place = lambda source: None):
        self.device, self._place = torch.device(device), place
        self._gpu = self.device.type == "cuda"
        size = max(_WIDEST, min(PIECE, nbytes) // _WIDEST * _WIDEST)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._gpu) for _ in range(2)]
        arrays: list[Any] = [buffer.numpy() for buffer in self._buffers]
        self._views = [memoryview(array) for array in arrays]
        self._sent: list[Any] = [None, None]  # events of the GPU
        self._turn = 0
        self._files: dict[Path, BinaryIO] = {}
        self._readers = ThreadPoolExecutor(READERS, "staging")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """``source``, on the CPU, into ``target`` of the same shape on the device, which is contiguous. Where their
        dtypes differ, values are rounded there."""
        place, size, dtype = self._place(source), self._buffers[0].numel(), source.dtype
        to, raw = target.view(-1), None if place else source.contiguous().view(-1).view(torch.uint8)
        for start in range(0, source.nbytes, size):
            count = min(size, source.nbytes - start)
            if (sent := self._sent[self._turn]) is not None:
                sent.synchronize()
            if raw is not None:
                self._buffers[self._turn][:count].copy_(raw[start : start + count])
            elif place is not None:
                self._read(place[0], place[1] + start, count)
            staged = self._buffers[self._turn][:count].view(dtype)
            first, last = start // dtype.itemsize, (start + count) // dtype.itemsize
            to[first:last].copy_(
                staged if target.dtype == dtype else staged.to(self.device, non_blocking=True), non_blocking=True
            )
            if self._gpu:
                self._sent[self._turn] = torch.cuda.current_stream(self.device).record_event()
            self._turn = 1 - self._turn

    def _read(self, path: Path, first: int, count: int) -> None:
        """``count`` bytes of a file from ``first`` on, into the buffer whose turn it is."""
        if path not in self._files:
            self._files[path] = open(path, "rb", buffering=0)
        file, into = self._files[path].fileno(), self._views[self._turn]
        step = max(LEAST, -(-count // READERS))
        starts = range(0, count, step)
        if len(starts) == 1:
            _fill(into[:count], file, first, path)
            return
        parts = (into[start : min(start + step, count)] for start in starts)
        for done in [self._readers.submit(_fill, part, file, first + at, path) for part, at in zip(parts, starts)]:
            done.result()


def _fill(into: memoryview, file: int, first: int, path: Path) -> None:
    done, count = 0, len(into)
    while done < count:
        found = os.preadv(file, [into[done:]], first + done)
        if not found:
            raise ValueError(f"{path}: got {first + done} bytes, allowed: as many as it had when it was opened")
        done += found
