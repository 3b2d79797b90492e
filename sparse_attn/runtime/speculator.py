"""The speculation of a decode loop: its state on the device, and where the drafts of a step come from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_attn import checks
from sparse_attn.runtime.draws import Sampling
from sparse_attn.runtime.speculation import (
    Drafter,
    Speculation,
    allocate_speculation,
    propose,
    speculative_plan,
    speculative_tokens,
    verify,
)
from sparse_attn.runtime.steps import AnyCaches, Decode, Step


def check_speculate(speculate: int, drafter: Drafter | None) -> None:
    """TypeError or ValueError for a number of drafts, or a drafter, that cannot be."""
    checks.check_at_least("speculate", speculate, 0)
    if drafter is not None and not callable(drafter):
        raise TypeError(f"drafter: got {type(drafter).__name__}, allowed: a function, or None")
    if drafter is not None and not speculate:
        raise ValueError("speculate: got 0, allowed: at least 1 with a drafter")


class Speculator:
    """Drafts of ``step`` in a loop of ``rows`` rows. drafter: a function; see speculation.Drafter."""

    def __init__(
        self,
        step: Step,
        drafts: int,
        drafter: Drafter | None,
        *,
        rows: int,
        max_context: int,
        impl: str,
        device: torch.device,
    ):
        if drafter is None:
            raise ValueError("drafter: got None, allowed: a function")
        self._step, self._drafter, self._max_context, self._impl = step, drafter, max_context, impl
        self._vocab_size: int | None = getattr(getattr(step, "spec", None), "vocab_size", None)
        self._held = allocate_speculation(rows, drafts, max_context, device, known=drafter is not None)

    def check(self, rows: int, ends: torch.Tensor | None, known: torch.Tensor | None) -> None:
        """ValueError or TypeError for what ``begin`` cannot take for ``rows`` rows."""
        if ends is not None:
            checks.check_dtype("ends", ends, (torch.int32,))
            checks.check_shape("ends", ends, (rows,), "[rows]")
        if (known is None) != (self._held.known is None):
            got, allowed = ("None", "a tensor, a drafter reads it") if known is None else ("a tensor", "None")
            raise ValueError(f"known: got {got}, allowed: {allowed}")
        if known is not None:
            checks.check_dtype("known", known, (torch.int64,))
            checks.check_shape("known", known, (rows, None), "[rows, at most max_context]")
            if known.shape[1] > self._max_context:
                raise ValueError(f"known: got {known.shape[1]} columns, allowed: at most {self._max_context}")

    def begin(self, rows: Sequence[int], state: Decode, ends: torch.Tensor | None, known: torch.Tensor | None) -> None:
        """Set what ``rows``, whose tokens and lengths are set in ``state``, speculate by."""
        held = self._held
        for number, row in enumerate(rows):
            held.drafts[row].fill_(-1)
            if ends is None:
                held.ends[row : row + 1].fill_(self._max_context)
            else:
                held.ends[row : row + 1].copy_(ends[number : number + 1], non_blocking=True)
            if held.known is not None and known is not None:
                held.known[row, : known.shape[1]].copy_(known[number], non_blocking=True)
                at = (state.seq_lens[row : row + 1] - 1).clamp_min(0).long()
                held.known[row].scatter_(0, at, state.tokens[row : row + 1])

    def feed(self, caches: AnyCaches, state: Decode, block_size: int) -> torch.Tensor:
        """Draft, and run the step: logits [rows * (drafts + 1), vocab]. block_size: as decode_plan takes it."""
        held = self._held.rows(state.tokens.shape[0])
        propose(held, state, self._drafter)
        plan = speculative_plan(state, held, block_size, self._max_context, self._impl)
        return self._step(speculative_tokens(state, held, self._vocab_size), caches, plan)

    def advance(self, state: Decode, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """Accept what the logits draw, and advance ``state``: the tokens drawn, int64 [rows, drafts + 1], -1 behind."""
        held: Speculation = self._held.rows(state.tokens.shape[0])
        verify(state, held, logits, sampling, self._max_context)
        return held.drawn
