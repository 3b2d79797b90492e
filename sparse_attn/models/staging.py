"""Copies of tensors in mapped files to a GPU by way of pinned memory: while one piece travels, the next one is read."""

from __future__ import annotations

from typing import Any

import torch

PIECE = 32 << 20  # bytes of each of two buffers
_WIDEST = 8  # bytes of a value


class Staging:
    """Two pinned buffers of at most ``nbytes`` each, for copies to ``device``, ordered on the current stream."""

    def __init__(self, device: torch.device | str, nbytes: int):
        self.device = torch.device(device)
        self._gpu = self.device.type == "cuda"
        size = max(_WIDEST, min(PIECE, nbytes) // _WIDEST * _WIDEST)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._gpu) for _ in range(2)]
        self._sent: list[Any] = [None, None]  # events of the GPU
        self._turn = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """``source``, on the CPU, into ``target`` of the same shape on the device, which is contiguous. Where their
        dtypes differ, values are rounded there."""
        to, raw = target.view(-1), source.contiguous().view(-1).view(torch.uint8)
        size, done = self._buffers[0].numel(), 0
        for start in range(0, raw.numel(), size):
            piece = raw[start : start + size]
            staged = self._read(piece).view(source.dtype)
            sent = staged if target.dtype == source.dtype else staged.to(self.device, non_blocking=True)
            to[done : done + staged.numel()].copy_(sent, non_blocking=True)
            done += staged.numel()
            if self._gpu:
                self._sent[self._turn] = torch.cuda.current_stream(self.device).record_event()
            self._turn = 1 - self._turn

    def _read(self, piece: torch.Tensor) -> torch.Tensor:
        """``piece`` in the buffer whose turn it is, once that has been sent."""
        if (sent := self._sent[self._turn]) is not None:
            sent.synchronize()
        return self._buffers[self._turn][: piece.numel()].copy_(piece)
