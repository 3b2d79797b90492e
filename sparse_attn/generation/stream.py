"""Tokens on their way from a decode loop to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sparse_attn.framework import torch_private
from sparse_attn.generation.processes import wait_for


class TokenStream:
    """Tokens of some steps on their way to the host. Iterating yields int64 [rows] per step, as they arrive; of
    speculative steps int64 [rows, drafts + 1], -1 behind what the row drew. timeout_s: the longest wait for a step
    with other ranks in it; None: forever."""

    def __init__(
        self,
        tokens: torch.Tensor,
        arrived: Sequence[torch.cuda.Event | None],
        logprobs: torch.Tensor | None = None,
        timeout_s: float | None = None,
    ):
        self._tokens, self._arrived, self._logprobs = tokens, list(arrived), logprobs
        self._timeout_s = timeout_s
        self._seen = 0

    def __len__(self) -> int:
        return len(self._arrived)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row, event in zip(self._tokens, self._arrived):
            if event is not None:
                wait_for(event, self._timeout_s)
            yield row

    def arrived(self) -> int:
        """Steps that arrived, without waiting for any."""
        events = self._arrived
        if self._seen < len(events) and ((last := events[-1]) is None or last.query()):
            self._seen = len(events)
        while self._seen < len(events) and ((event := events[self._seen]) is None or event.query()):
            self._seen += 1
        return self._seen

    def step(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens int64 [rows, ...] of a step that arrived, and the log-probabilities of those, fp32, where kept."""
        if number >= self._seen:
            raise ValueError(f"number: got {number}, allowed: below {self._seen}, the steps seen to have arrived")
        return self._tokens[number], None if self._logprobs is None else self._logprobs[number]

    def lists(self, start: int) -> tuple[list[Any], list[Any] | None]:
        """What ``step`` gives of the steps from ``start`` to the last one seen to have arrived, as lists of the host:
        all at once, because a scheduler looks at each of them."""
        tokens, logprobs = self._tokens, self._logprobs
        if start or self._seen < len(self._arrived):
            tokens, logprobs = tokens[start : self._seen], None if logprobs is None else logprobs[start : self._seen]
        return tokens.tolist(), None if logprobs is None else logprobs.tolist()

    def bring(self, values: Sequence[torch.Tensor]) -> None:
        """Bring what ``on_the_way`` took, instead of values of the same sizes that have been read."""
        for held, value in zip((self._tokens, self._logprobs), values):
            assert held is not None
            held.copy_(value, non_blocking=True)
        if (event := self._arrived[0]) is not None:
            event.record(torch_private.current_stream(values[0].device))
        self._seen = 0

    def wait(self) -> torch.Tensor:
        """All tokens, int64 [steps, rows, ...]; blocks until the last one arrived."""
        if self._arrived and (last := self._arrived[-1]) is not None:
            wait_for(last, self._timeout_s)
        return self._tokens


def on_host_like(value: torch.Tensor) -> dict[str, Any]:
    return dict(device="cpu", pin_memory=value.is_cuda)


def on_the_way(values: Sequence[torch.Tensor], again: TokenStream | None = None) -> TokenStream:
    """A stream of one step: tokens int64 [rows], and behind them their log-probabilities fp32 [rows] or nothing. again:
    one of so many rows, all of which was read, to be used once more; its memory on the host takes long to get."""
    if (stream := again) is None:
        tokens, *scores = [torch.empty(1, *one.shape, dtype=one.dtype, **on_host_like(one)) for one in values]
        event = torch.cuda.Event() if values[0].is_cuda else None
        stream = TokenStream(tokens, [event], scores[0] if scores else None)
    stream.bring(values)
    return stream


def passed(device: torch.device) -> torch.cuda.Event | None:
    """An event of what was launched on the current stream of ``device``; None on a CPU, where it is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch_private.current_stream(device))
    return event
