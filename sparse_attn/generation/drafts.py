"""The speculation of a decode loop: its state on the device, and where the drafts of a step come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparse_attn.framework import checks
from sparse_attn.framework.torch_private import uncompiled
from sparse_attn.generation.model import DRAFTERS, AnyCaches, Model
from sparse_attn.generation.sampling import Sampling, draw
from sparse_attn.generation.speculation import (
    Drafter,
    Speculation,
    allocate_speculation,
    propose,
    speculative_plan,
    speculative_tokens,
    verify,
)
from sparse_attn.generation.steps import Decode, Predict, Step, decode_plan, seeds_of
from sparse_attn.types import StepPlan


def check_speculate(speculate: int, drafter: Drafter | None) -> None:
    """TypeError or ValueError for a number of drafts, or a drafter, that cannot be."""
    checks.check_at_least("speculate", speculate, 0)
    if drafter is not None and not callable(drafter):
        raise TypeError(f"drafter: got {type(drafter).__name__}, allowed: a function, or None")
    if drafter is not None and not speculate:
        raise ValueError("speculate: got 0, allowed: at least 1 with a drafter")


class Speculator:
    """Drafts of ``step`` in a loop of ``rows`` rows.

    drafter: a function; see speculation.Drafter. None: the layer of multi-token prediction of ``step``, a Model that
    has one, whose keys prefill_step wrote with ``predict``. It drafts at the end of a step, for the next one: the first
    step of a row has none. Of several such layers the first drafts every token. predict: that layer, compiled; None: as
    it is.
    """

    def __init__(
        self,
        step: Step,
        drafts: int,
        drafter: Drafter | None,
        predict: Predict | None = None,
        *,
        rows: int,
        max_context: int,
        impl: str,
        device: torch.device,
    ):
        self._predictor = None
        self.most = drafts  # for the step to come, where whoever runs the steps knows how many it has use for
        if drafter is None:
            model = uncompiled(step)
            if not isinstance(model, Model):
                raise ValueError(f"drafter: got None and a {type(model).__name__}, {DRAFTERS}")
            self._predictor = model.predictor()
        self._predict: Any = self._predictor if predict is None else predict
        run: Any = step
        self._step, self._drafter, self._max_context, self._impl = run, drafter, max_context, impl
        self._vocab_size: int | None = getattr(getattr(step, "spec", None), "vocab_size", None)
        self._held = allocate_speculation(rows, drafts, max_context, device, known=drafter is not None)

    @property
    def known(self) -> torch.Tensor | None:
        """The ids of all rows, where a drafter reads them."""
        return self._held.known

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

    def feed(self, caches: AnyCaches, state: Decode, block_size: int) -> tuple[torch.Tensor, Any, StepPlan]:
        """Run the step: logits [rows * (drafts + 1), vocab], hidden states where a layer predicts from them, and the
        plan. block_size: as decode_plan takes it."""
        held = self._held.rows(state.tokens.shape[0])
        if self._drafter is not None:
            propose(held, state, self._drafter)
        plan = speculative_plan(state, held, block_size, self._max_context, self._impl)
        tokens = speculative_tokens(state, held, self._vocab_size)
        if self._predictor is None:
            return self._step(tokens, caches, plan), None, plan
        return *self._step(tokens, caches, plan, keep_hidden=True), plan

    def advance(self, state: Decode, logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
        """Accept what the logits draw, and advance ``state``: the tokens drawn, int64 [rows, drafts + 1], -1 behind,
        and how many, int32 [rows]."""
        held: Speculation = self._held.rows(state.tokens.shape[0])
        return held.drawn, verify(state, held, logits, sampling, self._max_context)

    def predict(
        self, hidden: Any, count: torch.Tensor, caches: AnyCaches, plan: StepPlan, state: Decode, sampling: Sampling,
        block_size: int,
    ) -> None:  # fmt: skip
        """Draft for the next step by the layer of multi-token prediction.

        Its rows of this step, of which those of rejected drafts mean nothing, get the tokens that were drawn behind
        them. The last accepted one's hidden state gives the first draft, and takes the model's place for the others."""
        if self._predictor is None:
            return
        held = self._held.rows(state.tokens.shape[0])
        rows, width = held.drawn.shape
        seeds, ends = seeds_of(state, sampling), held.ends.clamp_max(self._max_context)
        wanted = min(width - 1, max(self.most, 0))
        if wanted < width - 1:
            held.drafts[:, wanted:].fill_(-1)
        if not wanted:
            return
        hidden = self._predict(held.drawn.clamp_min(0).flatten(), hidden, caches, plan)
        last = torch.arange(rows, device=count.device) * width + (count - 1).clamp_min(0)
        hidden = hidden[last]
        for place in range(wanted):
            position = state.seq_lens - 1 + place  # of the token that is known, or drafted, last
            draft = draw(self._predictor.logits(hidden), position, sampling, seeds, state.draws)
            held.drafts[:, place] = draft
            if place + 1 < wanted:
                inside = (state.seq_lens > 0) & (position < ends)
                lengths = torch.where(inside, position + 1, 0)
                one = decode_plan(state._replace(seq_lens=lengths), block_size, self._max_context, self._impl)
                hidden = self._predict(draft, hidden, caches, one)
