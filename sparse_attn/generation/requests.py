"""What a scheduler knows of a request, and what it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sparse_attn.generation.sampling import Sampling


class Finished(NamedTuple):
    """tokens: all that were delivered, the one that ended the request among them. reason: "length" (max_new_tokens),
    "stop" (a stop id), "ended" (on_token returned True) or "cancelled". logprobs: of the tokens under the model's own
    softmax, where kept."""

    request: int
    tokens: list[int]
    reason: str
    logprobs: list[float] | None


class Occupancy(NamedTuple):
    """Counts of a moment. rows, running: there are, and in use. waiting: requests without a row. blocks, free: there
    are, and nobody holds but kept prefixes. tokens: delivered so far. reused: tokens of prompts that were not computed
    again. preempted: how often."""

    rows: int
    running: int
    waiting: int
    blocks: int
    free: int
    tokens: int
    reused: int
    preempted: int


class Preempted(NamedTuple):
    """What a preempted request had on the device, on the host. length: the host's bound on its tokens. known: its ids,
    where a drafter reads them."""

    length: int

    blocks: list[torch.Tensor]
    rings: list[torch.Tensor]
    token: torch.Tensor
    seq_len: torch.Tensor
    counts: torch.Tensor | None
    known: torch.Tensor | None


@dataclass(eq=False, slots=True)
class Request:
    """number: in order of arrival. computed: tokens of the prompt that steps were launched for. begun: whether the step
    that draws the first token was. in_flight: decode steps launched that have not arrived, each of 1 to drafts + 1
    tokens. border: where its prompt leaves what was kept. keys: of its prompt's blocks, see Prefixes. reason: why it is
    over.
    """

    number: int
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    on_token: Callable[[int, int], object] | None
    keys: list[bytes]
    drafts: int
    row: int | None = None
    computed: int = 0
    begun: bool = False
    in_flight: int = 0
    border: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    preempted: Preempted | None = None
    reason: str | None = None

    @property
    def most(self) -> int:
        """Tokens it writes keys of; the last one drawn is never fed."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def drawn(self) -> int:
        """Tokens that launched steps draw at least; the first is prefill's."""
        return min(self.max_new_tokens, (len(self.tokens) or 1) + self.in_flight) if self.begun else 0

    @property
    def length(self) -> int:
        """Tokens including the next input, at most."""
        drawn = (len(self.tokens) or 1) + (self.drafts + 1) * self.in_flight if self.begun else 0
        return len(self.prompt) + min(self.max_new_tokens, drawn)

    @property
    def decoding(self) -> bool:
        return 0 < self.drawn < self.max_new_tokens

    def cut(self, stop: int, size: int) -> int:
        """Where its part of a prefill step, which could go to ``stop``, ends where rings are kept: at the borders of
        blocks of ``size`` where others may branch off: where its prompt leaves what is known, and its last one."""
        start, length = self.computed, len(self.prompt)
        last = (length - 1) // size * size
        if stop < length and stop // size * size > start:
            stop = stop // size * size
        return min([border for border in (self.border, last) if start < border <= stop] or [stop])
