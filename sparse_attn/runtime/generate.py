"""The generation loop: prefill in chunks, then decode one token per request and step, over paged caches.

A decode step reads and writes tensors of fixed shape on the device and takes nothing from the host, so that it can be
compiled and captured as it stands; ``generate`` merely calls it, and looks at tokens only to learn that all rows stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sparse_attn import workspace
from sparse_attn.models.deepseek_v32 import allocate_caches, forward
from sparse_attn.ops.sampling import sample
from sparse_attn.ops.step_plan import build_step_plan
from sparse_attn.pipeline import LOGITS_BYTES, Bounds, CacheLayouts, workspace_size
from sparse_attn.runtime.paging import BlockPool, BlockTables, Span, blocks_for, prefill_chunks, slots_of
from sparse_attn.spec import Spec
from sparse_attn.target import resolve_impl, target_of
from sparse_attn.types import Caches, StepPlan


@dataclass(frozen=True)
class Model:
    """A forward's fixed arguments. params: what models.loading or models.params give, all on one device."""

    spec: Spec
    params: dict[str, torch.Tensor]
    layouts: CacheLayouts
    impl: str = "auto"
    logits_bytes: int = LOGITS_BYTES

    @property
    def device(self) -> torch.device:
        return self.params["embed"].device

    def __call__(self, tokens: torch.Tensor, caches: Caches, plan: StepPlan) -> torch.Tensor:
        """fp32 logits [T, vocab]; see models.deepseek_v32.forward."""
        return forward(
            self.params, self.spec, tokens, caches, plan,
            layouts=self.layouts, impl=self.impl, logits_bytes=self.logits_bytes,
        )  # fmt: skip


class Sampling(NamedTuple):
    """temperature 0 is greedy, the lowest id on ties. stop_ids end a row; they belong to its output."""

    temperature: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()


class Decode(NamedTuple):
    """What a decode step reads and advances, a row per request.

    tokens: int64 [B], to be fed. seq_lens: int32 [B], tokens of the request including that one, 0 once it has stopped.
    block_table: int32 [B, max_blocks]. query_start_loc: int32 [B + 1] = 0, 1, 2, ... stop_ids: int64 [S].
    """

    tokens: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    stop_ids: torch.Tensor


class Generation(NamedTuple):
    """tokens: generated ids per prompt. logits: fp32 [prompt + generated - 1, vocab] per prompt on the CPU, where asked for.
    prefill_s ends with every prompt's first token, decode_s covers the rest."""

    tokens: list[list[int]]
    logits: list[torch.Tensor] | None
    prefill_s: float
    decode_s: float


class Quiet:
    """Progress that nobody watches; the shape of tqdm."""

    def update(self, count: int = 1) -> None:
        pass

    def close(self) -> None:
        pass


Progress = Callable[[str, int], Quiet]  # (what is counted, how many) -> something to update and close


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    block_size: int = 64,
    prefill_tokens: int = 2048,
    keep_logits: bool = False,
    progress: Progress = lambda what, total: Quiet(),
) -> Generation:
    """Continue each prompt by up to ``max_new_tokens`` tokens, all prompts as one batch.

    prefill_tokens: tokens a prefill step takes at most, counted over requests. ValueError for empty prompts, ids outside
    the vocabulary, and prompts that with their continuation exceed the model's positions.
    """
    _check(model.spec, prompts, max_new_tokens)
    device, batch = model.device, len(prompts)
    lengths = [len(prompt) for prompt in prompts]
    reach = [length + max_new_tokens - 1 for length in lengths]  # the last token is never fed
    max_context = max(reach)
    pool = BlockPool(sum(blocks_for(tokens, block_size) for tokens in reach))
    tables = BlockTables(pool, batch, blocks_for(max_context, block_size), block_size)
    for request, tokens in enumerate(reach):
        tables.reserve(request, tokens)
    caches = allocate_caches(model.spec, model.layouts, pool.num_blocks, block_size, device)
    state = Decode(
        tokens=torch.zeros(batch, dtype=torch.int64, device=device),
        seq_lens=torch.tensor([length + 1 for length in lengths], dtype=torch.int32, device=device),
        block_table=tables.table.to(device),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device),
        stop_ids=torch.tensor(sampling.stop_ids, dtype=torch.int64, device=device),
    )
    chunks = list(prefill_chunks(lengths, prefill_tokens))
    kept: list[list[torch.Tensor]] = [[] for _ in prompts]

    with workspace.use(_workspace(model, chunks, batch, block_size, max_context)):
        begin = _clock(device)
        bar = progress("prefill", len(chunks))
        for spans in chunks:
            logits = prefill_step(model, prompts, spans, tables, caches, state, sampling, max_context)
            if keep_logits:
                parts = logits.cpu().split([span.stop - span.start for span in spans])
                for span, part in zip(spans, parts):
                    kept[span.request].append(part)
            bar.update()
        _stop(state)
        generated = [state.tokens.clone()]
        middle = _clock(device)
        bar.close()

        bar = progress("decode", max_new_tokens)
        bar.update()
        alive = _alive(generated[0], [True] * batch, sampling.stop_ids)
        while len(generated) < max_new_tokens and any(alive):
            logits = decode_step(model, caches, state, sampling, block_size, max_context)
            if keep_logits:
                for request, row in enumerate(logits.cpu()):
                    if alive[request]:
                        kept[request].append(row.unsqueeze(0))
            generated.append(state.tokens.clone())
            alive = _alive(generated[-1], alive, sampling.stop_ids)
            bar.update()
        end = _clock(device)
        bar.close()

    rows = torch.stack(generated, dim=1).tolist()
    return Generation(
        [_until_stop(row, sampling.stop_ids) for row in rows],
        [torch.cat(parts) for parts in kept] if keep_logits else None,
        middle - begin,
        end - middle,
    )


def _workspace(
    model: Model, chunks: Sequence[Sequence[Span]], batch: int, block_size: int, max_context: int
) -> workspace.Workspace:
    """Scratch for every step of this generation, computed and locked: a step that wanted more would be an error."""
    size = workspace.WorkspaceSize(0, 0)
    if resolve_impl(model.impl, model.device) != "reference":
        bounds = Bounds(
            max_batch=batch,
            max_batched_tokens=max(sum(span.stop - span.start for span in spans) for spans in chunks),
            max_model_len=max_context,
            block_size=block_size,
            kv_rows=max(sum(span.stop for span in spans) for spans in chunks),
            logits_bytes=model.logits_bytes,
            dtype=model.params["embed"].dtype,
        )
        size = workspace_size(model.spec, bounds, target_of(model.device), model.layouts)
    owner = workspace.Workspace(size, model.device)
    owner.lock()
    return owner


def prefill_step(
    model: Model,
    prompts: Sequence[Sequence[int]],
    spans: Sequence[Span],
    tables: BlockTables,
    caches: Caches,
    state: Decode,
    sampling: Sampling,
    max_context: int,
) -> torch.Tensor:
    """Run ``spans``; requests whose prompt ends here get their first token in ``state``. Returns fp32 logits [T, vocab]."""
    device = model.device
    counts = torch.tensor([span.stop - span.start for span in spans])
    requests = torch.tensor([span.request for span in spans])
    ids = [token for span in spans for token in prompts[span.request][span.start : span.stop]]
    positions = torch.cat([torch.arange(span.start, span.stop) for span in spans])
    plan = build_step_plan(
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(device, torch.int32),
        torch.tensor([span.stop for span in spans], dtype=torch.int32, device=device),
        tables.table[requests].to(device),
        slots_of(tables.table, requests.repeat_interleave(counts), positions, tables.block_size).to(device),
        kv_capacity=sum(span.stop for span in spans),
        max_context=max_context,
        impl=model.impl,
    )
    logits = model(torch.tensor(ids, device=device), caches, plan)
    ends = counts.cumsum(0) - 1
    last = [n for n, span in enumerate(spans) if span.stop == len(prompts[span.request])]
    rows = ends[last].to(device)
    state.tokens[requests[last].to(device)] = _draw(logits[rows], plan.positions[rows], sampling)
    return logits


def decode_step(
    model: Model, caches: Caches, state: Decode, sampling: Sampling, block_size: int, max_context: int
) -> torch.Tensor:
    """Feed every live row's token, draw the next one and advance ``state`` in place. Returns fp32 logits [B, vocab]."""
    logits = model(state.tokens, caches, decode_plan(state, block_size, max_context, model.impl))
    advance(state, logits, sampling, max_context)
    return logits


def decode_plan(state: Decode, block_size: int, max_context: int, impl: str = "auto") -> StepPlan:
    """The plan of the step that feeds ``state``'s tokens."""
    slots = slots_of(state.block_table, state.query_start_loc[:-1], state.seq_lens - 1, block_size)
    return build_step_plan(
        state.query_start_loc,
        state.seq_lens,
        state.block_table,
        slots,
        num_decodes=state.tokens.shape[0],
        max_context=max_context,
        impl=impl,
    )


def advance(state: Decode, logits: torch.Tensor, sampling: Sampling, max_context: int) -> None:
    """Draw every row's next token from the logits of the one it fed. A row that drew a stop id, or that would hold more
    than ``max_context`` tokens, is padding from now on."""
    state.tokens.copy_(_draw(logits, state.seq_lens - 1, sampling))
    state.seq_lens.add_((state.seq_lens > 0).to(torch.int32))
    state.seq_lens.masked_fill_(state.seq_lens > max_context, 0)
    _stop(state)


def _draw(logits: torch.Tensor, positions: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    return sample(logits, positions, temperature=sampling.temperature, seed=sampling.seed)


def _stop(state: Decode) -> None:
    """Make padding of the rows whose token is a stop id."""
    stopped = (state.tokens.unsqueeze(1) == state.stop_ids).any(1)
    state.seq_lens.masked_fill_(stopped, 0)


def _alive(tokens: torch.Tensor, alive: list[bool], stop_ids: tuple[int, ...]) -> list[bool]:
    """Which rows go on; reads the device only where something can stop a row."""
    if not stop_ids:
        return alive
    return [was and token not in stop_ids for was, token in zip(alive, tokens.tolist())]


def _until_stop(row: list[int], stop_ids: tuple[int, ...]) -> list[int]:
    for place, token in enumerate(row):
        if token in stop_ids:
            return row[: place + 1]
    return row


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _check(spec: Spec, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, allowed: at least 1")
    if not prompts:
        raise ValueError("prompts: got none, allowed: at least one")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompts[{number}]: got no token, allowed: at least one")
        outside = [token for token in prompt if not 0 <= token < spec.vocab_size]
        if outside:
            raise ValueError(f"prompts[{number}]: got id {outside[0]}, allowed: 0 to {spec.vocab_size - 1}")
        if len(prompt) + max_new_tokens - 1 > spec.max_positions:
            raise ValueError(
                f"prompts[{number}]: got {len(prompt)} tokens to be followed by {max_new_tokens}, allowed: "
                f"{spec.max_positions + 1} in all, the model knows {spec.max_positions} positions"
            )
