"""The steps of a generation: prefill of some spans of the prompts, decode of one token per request.

A decode step reads and writes tensors of fixed shape on the device and takes nothing from the host, so that it can be
compiled and captured as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sparse_attn.framework.autocast import no_autocast
from sparse_attn.framework.torch_private import exported_as, mark_sizes
from sparse_attn.generation.blocks import BlockTables, Span, slots_of
from sparse_attn.generation.model import AnyCaches, Model
from sparse_attn.generation.sampling import Draws, Sampling, check_counted, count_drawn, draw
from sparse_attn.mesh import Mesh
from sparse_attn.ops.layers.sampling import row_seeds
from sparse_attn.ops.ragged.step_plans import build_step_plan
from sparse_attn.spec import CompressedSpec
from sparse_attn.types import StepPlan, WindowCaches

Step = Callable[
    [torch.Tensor, AnyCaches, StepPlan], torch.Tensor
]  # (tokens int64 [T], caches, plan) -> logits [T, vocab]

Predict = Callable[
    [torch.Tensor, Any, AnyCaches, StepPlan], torch.Tensor
]  # (each row's next token int64 [T], hidden states, caches, plan) -> hidden states; see models.mtp.predict


@exported_as("sparse_attn.runtime.steps")
class Decode(NamedTuple):
    """What a decode step reads and advances, a row per request.

    tokens: int64 [B], to be fed. seq_lens: int32 [B], tokens of the request including that one, 0 once it has stopped.
    block_table: int32 [B, max_blocks]. query_start_loc: int32 [B + 1] = 0, 1, 2, ... stop_ids: int64 [S]. ring_table:
    int32 [B, ring blocks], for models with rings. seeds: int64 [B], of the rows' random streams; None: the streams
    (seed of the sampling, row). draws: sampling of each row, in place of one for all; its stop ids add to those for
    all.
    """

    tokens: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    stop_ids: torch.Tensor
    ring_table: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    draws: Draws | None = None


class PrefillSize(NamedTuple):
    """Rows of a prefill step, its requests, and the keys it has room for; padding among them."""

    tokens: int
    requests: int
    kv_capacity: int


def sent(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on ``device``, without waiting for the copy."""
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)


@no_autocast
@torch.no_grad()
def prefill_step(
    model: Model,
    prompts: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
    spans: Sequence[Span],
    tables: BlockTables,
    caches: AnyCaches,
    state: Decode,
    sampling: Sampling,
    max_context: int,
    *,
    rings: torch.Tensor | None = None,
    pad_to: PrefillSize | None = None,
    predict: Predict | None = None,
) -> torch.Tensor:
    """Run ``spans``; requests whose prompt ends here get their first token in ``state``. Returns fp32 logits [T,
    vocab].

    prompts: by the request of a span. rings: ``state.ring_table`` on the host; None: copied from there, for which the
    host waits. pad_to: the size of every step, whatever is in it, be it no span; None: what the spans need. predict:
    the layer of multi-token prediction, whose keys are written, too.
    """
    check_counted(sampling, state.draws)
    device, pad = model.device, torch.nn.functional.pad
    on_host: dict[str, Any] = dict(dtype=torch.int64, device="cpu")
    counts = torch.tensor([span.stop - span.start for span in spans], **on_host)
    requests = torch.tensor([span.request for span in spans], **on_host)
    ids = [token for span in spans for token in prompts[span.request][span.start : span.stop]]
    own = (torch.arange(span.start, span.stop, **on_host) for span in spans)
    positions = torch.cat([torch.arange(0, **on_host), *own])
    if rings is None and state.ring_table is not None:
        rings = state.ring_table.cpu()
    written = tables.table if rings is None else rings
    slots = slots_of(written, requests.repeat_interleave(counts), positions, slot_block(caches, model.mesh))
    # Dynamo takes a size of 1 for a constant: a lone row, and a lone request of several, get one of padding beside it.
    rows, idle = len(ids), int(len(spans) == 1 < state.tokens.shape[0])
    more, capacity = max(2 - rows, 0), max(sum(span.stop for span in spans), least_capacity(model, tables.block_size))
    if pad_to is not None:
        more, idle, capacity = pad_to.tokens - rows, pad_to.requests - len(spans), pad_to.kv_capacity
    plan = build_step_plan(
        sent(pad(pad(counts, (0, idle)).cumsum(0), (1, 0)).int(), device),
        sent(torch.tensor([span.stop for span in spans] + [0] * idle, dtype=torch.int32, device="cpu"), device),
        sent(pad(tables.table[requests], (0, 0, 0, idle), value=-1), device),
        sent(pad(slots, (0, more), value=-1), device),
        kv_capacity=capacity,
        max_context=max_context,
        impl=model.impl,
    )
    if rings is not None:
        plan = with_rings(plan, sent(pad(rings[requests], (0, 0, 0, idle), value=-1), device))
    fed, hidden = sent(torch.tensor(ids + [0] * more, **on_host), device), None
    if predict is None:
        logits = model(fed, caches, plan)
    else:
        logits, hidden = model(fed, caches, plan, keep_hidden=True)
    logits = logits[:rows]
    ends = counts.cumsum(0) - 1
    last = [n for n, span in enumerate(spans) if span.stop == len(prompts[span.request])]
    drawn, whose = sent(ends[last], device), sent(requests[last], device)
    draws = None if state.draws is None else state.draws.rows(whose)
    tokens = draw(logits[drawn], plan.positions[drawn], sampling, seeds_of(state, sampling)[whose], draws)
    state.tokens[whose] = tokens
    count_drawn(state.draws, tokens, torch.ones_like(tokens, dtype=torch.bool), whose)
    if predict is not None:
        known = (prompts[span.request][span.start + 1 : span.stop + 1] for span in spans)
        ids = [token for span, own in zip(spans, known) for token in [*own, 0][: span.stop - span.start]]
        following = sent(torch.tensor(ids + [0] * more, **on_host), device)
        following[drawn] = tokens
        predict(following, hidden, caches, plan)
    return logits


def decode_step(model: Model, caches: AnyCaches, state: Decode, sampling: Sampling, max_context: int) -> torch.Tensor:
    """Feed every live row's token, draw the next one and advance ``state`` in place. Returns fp32 logits [B, vocab]."""
    check_counted(sampling, state.draws)
    logits = model(state.tokens, caches, decode_plan(state, slot_block(caches, model.mesh), max_context, model.impl))
    advance(state, logits, sampling, max_context)
    return logits


def slot_block(caches: AnyCaches, mesh: Mesh) -> int:
    """Tokens of a block in which a plan counts slots: of a ring, where there are rings, else of a block of the KV
    caches on all context ranks together."""
    own = caches.kv[0].shape[1]
    return own if isinstance(caches, WindowCaches) else own * mesh.context.size


def decode_plan(state: Decode, block_size: int, max_context: int, impl: str = "auto") -> StepPlan:
    """The plan of the step that feeds ``state``'s tokens. block_size: what slot_block says of the caches."""
    written = state.block_table if state.ring_table is None else state.ring_table
    slots = slots_of(written, state.query_start_loc[: state.seq_lens.shape[0]], state.seq_lens - 1, block_size)
    plan = build_step_plan(
        state.query_start_loc,
        state.seq_lens,
        state.block_table,
        slots,
        num_decodes=state.tokens.shape[0],
        max_context=max_context,
        impl=impl,
    )
    return plan if state.ring_table is None else with_rings(plan, state.ring_table)


def with_rings(plan: StepPlan, ring_table: torch.Tensor) -> StepPlan:
    """``plan`` with the blocks of each request's rings."""
    return plan._replace(ring_table=mark_sizes(ring_table, dynamic=(0, 1)))


def least_capacity(model: Model, block_size: int) -> int:
    """The least number of keys that a step has room for: two of every kind, and of several context ranks two blocks.
    Dynamo takes a size of 0 or 1 for a constant, and would compile once more for other sizes. block_size: tokens of a
    block on all context ranks."""
    ratios = model.spec.ratios if isinstance(model.spec, CompressedSpec) else ()
    return 2 * max(*ratios, 1, block_size if model.mesh.context.size > 1 else 1)


def advance(state: Decode, logits: torch.Tensor, sampling: Sampling, max_context: int) -> None:
    """Draw every row's next token from the logits of the one it fed. A row that drew a stop id, or that would hold more
    than ``max_context`` tokens, is padding from now on."""
    state.tokens.copy_(draw(logits, state.seq_lens - 1, sampling, seeds_of(state, sampling), state.draws))
    count_drawn(state.draws, state.tokens, state.seq_lens > 0)
    state.seq_lens.add_((state.seq_lens > 0).to(torch.int32))
    state.seq_lens.masked_fill_(state.seq_lens > max_context, 0)
    stop(state)


def seeds_of(state: Decode, sampling: Sampling) -> torch.Tensor:
    """int64 [B], of the rows' random streams."""
    if state.seeds is not None:
        return state.seeds
    return row_seeds(sampling.seed, state.tokens.shape[0], state.tokens.device)


def stop(state: Decode) -> None:
    """Turn rows whose token is a stop id into padding."""
    state.seq_lens.masked_fill_(stops(state, state.tokens), 0)


def stops(state: Decode, tokens: torch.Tensor) -> torch.Tensor:
    """Whether each row's token, or each of its tokens, is one of its stop ids: int64 [B, ...] -> bool [B, ...]."""
    stopped = (tokens.unsqueeze(-1) == state.stop_ids).any(-1)
    if state.draws is not None and state.draws.stop_ids is not None:
        own = state.draws.stop_ids
        own = own.view(own.shape[0], *[1] * (tokens.dim() - 1), own.shape[1])
        stopped = stopped | (tokens.unsqueeze(-1) == own).any(-1)
    return stopped
