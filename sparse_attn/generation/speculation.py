"""Speculative decoding: a step feeds a row's token and n drafts behind it, and keeps the drafts that the model draws.

Row j of a request is fed draft j and draws the token after it, with the noise of its own position. Draft j + 1 is
accepted where it equals that draw and draft j was accepted. So a step draws between 1 and n + 1 tokens, and the tokens
are those of steps without drafts, whatever drafts say.

Nothing is undone: keys, ring slots and compressor state belong to a position, no row sees a key behind its own
position, and the next step begins where the first rejected draft stood, so it writes over what rejected drafts left.
Rings hold n tokens more for it (Model.allocate_caches, next_n). Everything stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sparse_attn.framework import checks
from sparse_attn.framework.torch_private import exported_as
from sparse_attn.generation.blocks import slots_of
from sparse_attn.generation.sampling import Sampling, count_drawn, draw
from sparse_attn.generation.steps import Decode, seeds_of, stops, with_rings
from sparse_attn.ops.ragged.step_plans import build_step_plan
from sparse_attn.types import StepPlan

Drafter = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A caller's own drafts. (known int64 [B, columns], seq_lens int32 [B]) -> int64 [B, n] on the same device. known: each
row's ids, of which the first seq_lens are set, that of the next input included; 0: the row is out. Draft j is to be the
token at position seq_lens + j; -1, or another id that the vocabulary lacks: none. In a captured loop it is captured
with the step: it must read the device alone and wait for nothing."""


@exported_as("sparse_attn.runtime.speculation")
class Speculation(NamedTuple):
    """What speculative steps read and advance beside Decode, a row per request.

    drafts: int64 [B, n], to be fed behind the row's token, -1 for none. drawn: int64 [B, n + 1], what the last step
    drew, -1 behind. ends: int32 [B], tokens a row may hold. known: int64 [B, columns], the ids of each row, for a
    drafter that reads them.
    """

    drafts: torch.Tensor
    drawn: torch.Tensor
    ends: torch.Tensor
    known: torch.Tensor | None = None

    def rows(self, count: int) -> Speculation:
        """The first ``count`` rows, as views."""
        known = None if self.known is None else self.known[:count]
        return Speculation(self.drafts[:count], self.drawn[:count], self.ends[:count], known)


def allocate_speculation(
    rows: int, drafts: int, max_context: int, device: torch.device, *, known: bool
) -> Speculation:  # fmt: skip
    """Of rows without drafts, which may hold ``max_context`` tokens. known: keep the ids of each row."""
    ids: dict[str, Any] = dict(dtype=torch.int64, device=device)
    return Speculation(
        torch.full((rows, drafts), -1, **ids),
        torch.full((rows, drafts + 1), -1, **ids),
        torch.full((rows,), max_context, dtype=torch.int32, device=device),
        torch.zeros(rows, max_context + 1, **ids) if known else None,
    )


def propose(speculation: Speculation, state: Decode, drafter: Drafter) -> None:
    """Take drafts of a caller's own function for the step to come."""
    assert speculation.known is not None
    drafts = drafter(speculation.known, state.seq_lens)
    checks.check_dtype("drafter: drafts", drafts, (torch.int64,))
    checks.check_shape("drafter: drafts", drafts, tuple(speculation.drafts.shape), "[rows, speculate]")
    checks.check_same_device(**{"known": speculation.known, "drafter: drafts": drafts})
    speculation.drafts.copy_(drafts)


def speculative_tokens(state: Decode, speculation: Speculation, vocab_size: int | None = None) -> torch.Tensor:
    """What a step feeds, int64 [B * (n + 1)]. An id that is none is fed as 0, and never accepted."""
    drafts = speculation.drafts
    none = drafts < 0 if vocab_size is None else (drafts < 0) | (drafts >= vocab_size)
    return torch.cat([state.tokens.unsqueeze(1), drafts.masked_fill(none, 0)], dim=1).flatten()


def speculative_plan(
    state: Decode, speculation: Speculation, block_size: int, max_context: int, impl: str = "auto"
) -> StepPlan:
    """The plan of the step that feeds ``speculative_tokens``, n + 1 rows a request. Rows behind what a request may hold
    are padding. block_size: as decode_plan takes it."""
    rows, drafts = speculation.drafts.shape
    device, live = state.tokens.device, state.seq_lens > 0
    positions = (state.seq_lens - 1).unsqueeze(1) + torch.arange(drafts + 1, dtype=torch.int32, device=device)
    inside = live.unsqueeze(1) & (positions < speculation.ends.clamp_max(max_context).unsqueeze(1))
    requests = torch.arange(rows, device=device).repeat_interleave(drafts + 1)
    written = state.block_table if state.ring_table is None else state.ring_table
    plan = build_step_plan(
        state.query_start_loc * (drafts + 1),
        torch.where(live, state.seq_lens + drafts, 0),
        state.block_table,
        slots_of(written, requests, torch.where(inside, positions, -1).flatten(), block_size),
        num_decodes=rows,
        next_n=drafts + 1,
        max_context=max_context,
        impl=impl,
    )
    return plan if state.ring_table is None else with_rings(plan, state.ring_table)


def verify(
    state: Decode, speculation: Speculation, logits: torch.Tensor, sampling: Sampling, max_context: int
) -> torch.Tensor:
    """Draw from every row's logits [B * (n + 1), vocab], accept drafts, and advance both states in place. A row that
    drew a stop id, or that would hold more than it may, is padding from now on. Returns the tokens drawn, int64 [B]."""
    limits = speculation.ends.clamp_max(max_context)
    if state.draws is not None and state.draws.counts is not None:
        tokens, going = _drawn_in_turn(state, speculation, logits, sampling, limits)
    else:
        tokens = _drawn_at_once(state, speculation, logits, sampling)
        going = _accepted(state, speculation, tokens, limits)
    if speculation.known is not None:
        for place, (token, on) in enumerate(zip(tokens.unbind(1), going.unbind(1))):
            _learn(speculation.known, state.seq_lens + place, token, on)
    speculation.drawn.copy_(torch.where(going, tokens, -1))
    count = going.sum(1, dtype=torch.int32)
    last = tokens.gather(1, (count - 1).clamp_min(0).long().unsqueeze(1)).squeeze(1)
    state.tokens.copy_(torch.where(count > 0, last, state.tokens))
    lengths = state.seq_lens + count
    stopped = (going & stops(state, tokens)).any(1)
    state.seq_lens.copy_(lengths.masked_fill(stopped | (lengths > limits), 0))
    return count


def _drawn_at_once(
    state: Decode, speculation: Speculation, logits: torch.Tensor, sampling: Sampling
) -> torch.Tensor:  # fmt: skip
    """int64 [B, n + 1], drawn from every row's logits."""
    width = speculation.drawn.shape[1]
    draws = state.draws and state.draws.map(lambda value: value.repeat_interleave(width, 0))
    places = torch.arange(-1, width - 1, dtype=torch.int32, device=logits.device)
    positions = (state.seq_lens.unsqueeze(1) + places).flatten()
    return draw(logits, positions, sampling, seeds_of(state, sampling).repeat_interleave(width), draws).view(-1, width)


def _accepted(
    state: Decode, speculation: Speculation, tokens: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """Which of the tokens [B, n + 1] stand: bool. The first, and each behind a draft that equals the token before it,
    where that one stands and does not end the row."""
    before, drafts = tokens[:, :-1], speculation.drafts
    held = state.seq_lens.unsqueeze(1) + torch.arange(drafts.shape[1], dtype=torch.int32, device=tokens.device)
    right = (drafts == before) & (held < limits.unsqueeze(1)) & ~stops(state, before)
    live = (state.seq_lens > 0).unsqueeze(1)
    return torch.cat([live, live & right.to(torch.int32).cumprod(1).bool()], dim=1)


def _drawn_in_turn(
    state: Decode, speculation: Speculation, logits: torch.Tensor, sampling: Sampling, limits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens, and which of them stand, where penalties count what was drawn before."""
    drafts, width, seeds = speculation.drafts, speculation.drawn.shape[1], seeds_of(state, sampling)
    by_row, on, tokens, going = torch.unflatten(logits, 0, (-1, width)), state.seq_lens > 0, [], []
    for place in range(width):
        token = draw(by_row[:, place], state.seq_lens - 1 + place, sampling, seeds, state.draws)
        count_drawn(state.draws, token, on)
        tokens.append(token)
        going.append(on)
        if place + 1 < width:
            on = on & ~stops(state, token) & (drafts[:, place] == token) & (state.seq_lens + place < limits)
    return torch.stack(tokens, dim=1), torch.stack(going, dim=1)


def _learn(known: torch.Tensor, at: torch.Tensor, tokens: torch.Tensor, going: torch.Tensor) -> None:
    """Set column ``at`` of the rows that go on to their token."""
    at = at.long().clamp(0, known.shape[1] - 1).unsqueeze(1)
    known.scatter_(1, at, torch.where(going.unsqueeze(1), tokens.unsqueeze(1), known.gather(1, at)))
