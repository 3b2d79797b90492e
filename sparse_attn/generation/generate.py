"""The generation loop: prefill in chunks, then decode one token per request and step, over paged caches.

``generate`` looks at tokens only to learn that all rows stopped; what it runs is in generation.steps and
generation.graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from sparse_attn import workspace
from sparse_attn.framework.autocast import no_autocast
from sparse_attn.framework.compilation import Compilation
from sparse_attn.generation.batch import compiled, locked_workspace, prepare, scratch_size
from sparse_attn.generation.drafts import check_speculate
from sparse_attn.generation.graph import DecodeGraph, check_capturable
from sparse_attn.generation.inputs import checked_best, checked_prompts, checked_samplings, checked_seeds
from sparse_attn.generation.logprobs import TokenLogprobs
from sparse_attn.generation.loop import DecodeRows, EagerDecode, LoopSettings
from sparse_attn.generation.model import AnyCaches, Model
from sparse_attn.generation.processes import check_same, check_same_weights
from sparse_attn.generation.sampling import Sampling, draws_of
from sparse_attn.generation.speculation import Drafter
from sparse_attn.generation.steps import Decode, decode_plan, decode_step, prefill_step, slot_block, stop
from sparse_attn.mesh import ONE_RANK
from sparse_attn.models.exchange import drafting_bytes, step_bytes
from sparse_attn.pipeline import Bounds
from sparse_attn.types import Logprobs

PIECE = 64  # steps replayed before the host looks whether all rows stopped


class Generation(NamedTuple):
    """What ``generate`` gives.

    Attributes:
        tokens: generated ids per prompt.
        logits: fp32 [prompt + generated - 1, vocab] per prompt on the CPU, where asked for.
        prefill_s: until every prompt has its first token.
        setup_s: compiling, whenever it happened, and capturing the decode step.
        decode_s: the rest.
        graph_captures: how many graphs were captured.
        graph_replays: how many decode steps were replayed.
        logprobs: of the generated tokens per prompt, on the CPU, where asked for.
        accepted_per_step: with speculation, tokens a decode step gave a row that was not over, the model's own
            included.
        cache_bytes: of this process's caches.
        step_bytes: that it sends in a decode step (models.exchange).
        drafter: with speculation, who drafted, "mtp" or "function".
    """

    tokens: list[list[int]]
    logits: list[torch.Tensor] | None
    prefill_s: float
    setup_s: float
    decode_s: float
    graph_captures: int = 0
    graph_replays: int = 0
    logprobs: list[Logprobs] | None = None
    accepted_per_step: float | None = None
    cache_bytes: int = 0
    step_bytes: int = 0
    drafter: str | None = None


class Bar(Protocol):
    """What counts, of the shape of tqdm."""

    def update(self, n: int = 1, /) -> object: ...

    def close(self) -> object: ...


class Quiet:
    """Progress that nobody watches."""

    def update(self, n: int = 1, /) -> None:
        pass

    def close(self) -> None:
        pass


Progress = Callable[[str, int], Bar]  # (what is counted, how many) -> something to update and close


@no_autocast
@torch.no_grad()
def generate(
    model: Model,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    *,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] = Sampling(),
    seeds: Sequence[int | None] | None = None,
    block_size: int | None = None,
    prefill_tokens: int = 2048,
    keep_logits: bool = False,
    logprobs: int | None = None,
    on_token: Callable[[int, int], object] | None = None,
    compile: bool = False,
    graph: bool = False,
    batch_invariant: bool = False,
    speculate: int = 0,
    drafter: Drafter | None = None,
    progress: Progress = lambda what, total: Quiet(),
) -> Generation:
    """Continue each prompt by up to ``max_new_tokens`` tokens, all prompts as one batch.

    Args:
        model: a Model.
        prompts: ids, in sequences or one-dimensional integer tensors.
        max_new_tokens: of each prompt.
        sampling: one for all prompts, or one a prompt.
        seeds: one a prompt. A prompt with a seed draws the same tokens alone and in any batch. None, for all prompts or
            for one: the random stream (sampling.seed, place among the prompts); the first place draws what a prompt
            with the seed sampling.seed draws.
        block_size: tokens a block of the paged caches covers on a context rank; None: what suits the model.
        prefill_tokens: tokens a prefill step takes at most, counted over requests; context ranks take as many as their
            scores fit the model's logits_bytes.
        keep_logits: give the logits.
        logprobs: how many of the most likely tokens to give the log-probabilities of, beside that of the token drawn;
            None: none at all. They are the model's own, at temperature 1 without penalties and filters.
        on_token: called with (place of the prompt, id) for each token, in order, as soon as the host has it; ends the
            prompt where it returns True.
        compile: run the forward under torch.compile, as one graph of symbolic sizes.
        graph: decode by replaying a captured step; with keep_logits or logprobs the host reads each step's before it
            replays the next one.
        batch_invariant: as Model takes it; a prompt's tokens and log-probabilities do not depend on the other prompts.
        speculate: drafts that a decode step verifies; the tokens are those without.
        drafter: the function that drafts, see generation.speculation.Drafter; None: the model's layer of multi-token
            prediction.
        progress: makes a bar, such as tqdm's, of (what, total).

    Returns:
        A Generation.

    Raises:
        TypeError: numbers of the wrong kind.
        ValueError: empty prompts, ids outside the vocabulary, prompts that with their continuation exceed the model's
            positions, a block size that does not suit the model, and a graph where none can be captured.
    """
    model = model.invariant() if batch_invariant else model
    if model.mesh.expert_replicas > 1:
        got = f"experts that {model.mesh.expert_replicas} data ranks share"
        raise ValueError(f"model: got {got}, allowed: Batching, whose data ranks step together")
    check_speculate(speculate, drafter)
    prompts, max_new_tokens = checked_prompts(prompts, model.spec, max_new_tokens), int(max_new_tokens)
    if speculate and drafter is None:  # the first step gives a token, the second at most all that are left
        speculate = min(speculate, max(1, max_new_tokens - 3))
    vocab_size, device, batch = model.spec.vocab_size, model.device, len(prompts)
    samplings = checked_samplings(sampling, batch, vocab_size)
    streams, draws, sampling = checked_seeds(seeds, samplings), None, samplings[0]
    if any(own != sampling for own in samplings) or sampling.penalises:
        draws, sampling = draws_of(samplings, vocab_size, prompts=prompts, device=device), Sampling()
    stop_ids = [own.stop_ids for own in samplings]
    scored = None if logprobs is None else TokenLogprobs(prompts, checked_best(logprobs, vocab_size))
    if graph:
        check_capturable(
            model.device, model.impl, model.spec, model.embed.dtype, mesh=model.mesh, packed=model.packs_experts
        )
    lengths = [len(prompt) for prompt in prompts]
    tables, caches, state, chunks, max_context, bounds = prepare(
        model, lengths, [length + max_new_tokens - 1 for length in lengths],  # the last token is never fed
        block_size=block_size, prefill_tokens=prefill_tokens, stop_ids=sampling.stop_ids,
        seeds=streams, draws=draws, next_n=speculate + 1,
    )  # fmt: skip
    check_same(
        model.mesh, device, spec=model.spec, layouts=model.layouts, prompts=prompts, max_new_tokens=max_new_tokens,
        sampling=samplings, seeds=seeds, steps=chunks, compile=compile, graph=graph, speculate=speculate,
        bounds=replace(bounds, mesh=ONE_RANK),
    )  # fmt: skip
    check_same_weights(model.mesh, device, model.params)
    run = compiled(model, caches) if compile else model
    predict: Any = None
    if speculate and drafter is None:
        predict = compiled(model.predictor(), caches) if compile else model.predictor()
    captured = None
    kept: list[list[torch.Tensor]] = [[] for _ in prompts]

    compilation = Compilation(dynamo=compile, triton=device.type == "cuda")
    with workspace.use(locked_workspace(model, bounds)), compilation:
        begin = _clock(device)
        bar = progress("prefill", len(chunks))
        for spans in chunks:
            logits = prefill_step(run, prompts, spans, tables, caches, state, sampling, max_context, predict=predict)
            if keep_logits:
                parts = logits.cpu().split([span.stop - span.start for span in spans])
                for span, part in zip(spans, parts):
                    kept[span.request].append(part)
            if scored is not None:
                scored.prefilled(logits, spans, state.tokens)
            bar.update()
        stop(state)
        looped = graph or speculate  # its tokens arrive on the host
        generated = [state.tokens.to("cpu" if looped else device, copy=True)]
        middle, compiled_before = _clock(device), compilation.seconds
        bar.close()

        lived = [[True] * batch]  # which rows drew a token of theirs, by step
        alive = _alive(generated[0], lived[0], stop_ids, on_token)
        count = max_new_tokens - 1 if any(alive) else 0
        loop: DecodeRows | None = None
        if count and looped:
            settings = LoopSettings(
                max_context, state.block_table.shape[1], (batch,), sampling=sampling, impl=model.impl,
                keep_logits=keep_logits or scored is not None, draws=draws, speculate=speculate, drafter=drafter,
                predict=predict,
            )  # fmt: skip
            if graph:
                size = scratch_size(model, replace(bounds, max_batched_tokens=0, kv_rows=0))
                loop = captured = DecodeGraph(run, caches, workspace_size=size, **settings._asdict())
            else:
                loop = EagerDecode(run, caches, settings)
                if compile:
                    loop.warm_up()
            own: dict[str, Any] = {}
            if speculate:
                own = dict(ends=torch.tensor(lengths, dtype=torch.int32, device="cpu") + max_new_tokens - 1)
                if drafter is not None:
                    own["known"] = _padded(prompts)
            loop.load(state.tokens, state.seq_lens, state.block_table, state.ring_table, state.seeds, draws, **own)
            steps = _run(loop, count)
        else:
            if compile and count:  # a step of padding
                idle = state._replace(seq_lens=torch.zeros_like(state.seq_lens))
                run(idle.tokens, caches, decode_plan(idle, slot_block(caches, model.mesh), max_context, model.impl))
            steps = _stepped(run, caches, state, sampling, max_context, count)
        ready, compiled_until = _clock(device), compilation.seconds

        bar = progress("decode", max_new_tokens)
        bar.update()
        fed, left = 0, [max_new_tokens - 1] * batch
        for found, logits in steps:
            fed += sum(alive)
            for tokens, scores in _columns(found, logits):
                drew = alive
                if speculate:
                    drew = [was and token >= 0 for was, token in zip(alive, tokens.tolist())]
                if keep_logits and scores is not None:
                    for request, row in enumerate(scores.to("cpu", copy=True)):  # a loop writes over them
                        if drew[request]:
                            kept[request].append(row.unsqueeze(0))
                if scored is not None and scores is not None:
                    scored.stepped(scores, tokens.clamp_min(0), drew)
                generated.append(tokens)
                lived.append(drew)
                left = [some - was for some, was in zip(left, drew)]
                goes_on = _alive(tokens, drew, stop_ids, on_token)
                alive = [w and (on or not d) for w, d, on in zip(alive, drew, goes_on)]
            if speculate:
                alive = [was and some > 0 for was, some in zip(alive, left)]
            bar.update()
            if not any(alive):
                break
        end, compiled_later = _clock(device), compilation.seconds - compiled_until
        bar.close()

    rows = torch.stack(generated, dim=1).tolist()
    return Generation(
        [[token for token, drew in zip(row, own) if drew] for row, own in zip(rows, zip(*lived))],
        [torch.cat(parts) for parts in kept] if keep_logits else None,
        middle - begin - compiled_before,
        ready - middle + compiled_before + compiled_later,
        end - ready - compiled_later,
        captured.captures if captured else 0,
        captured.replays if captured else 0,
        None if scored is None else scored.result(),
        (batch * (max_new_tokens - 1) - sum(left)) / fed if speculate and fed else None,
        sum(cache.untyped_storage().nbytes() for layers in caches for cache in layers if cache is not None),
        _sent(model, bounds, speculate, predict is not None),
        None if not speculate else "mtp" if drafter is None else "function",
    )


def _sent(model: Model, bounds: Bounds, drafts: int, predicts: bool) -> int:
    """Bytes that a decode step sends."""
    sizes: dict[str, Any] = dict(max_context=bounds.max_model_len, block_size=bounds.block_size)
    common, dtype = (model.spec, model.mesh), model.embed.dtype
    found = [step_bytes(*common, bounds.max_batch * (drafts + 1), dtype, **sizes)]
    if predicts:
        found.append(drafting_bytes(*common, bounds.max_batch, drafts, dtype, **sizes))
    return sum(sum(one.values()) for one in found)


def _stepped(
    model: Model, caches: AnyCaches, state: Decode, sampling: Sampling, max_context: int, count: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens [B], logits [B, vocab]) of ``count`` decode steps, both on the device."""
    for _ in range(count):
        logits = decode_step(model, caches, state, sampling, max_context)
        yield state.tokens.clone(), logits


def _run(loop: DecodeRows, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """The same from a loop: tokens on the host, as they arrive; int64 [B, n + 1] and logits [B * (n + 1), vocab] where
    it speculates. A captured one may be up to PIECE steps ahead, and no more than the rows need where all is
    accepted."""
    ahead = 1 if loop.keep_logits or not isinstance(loop, DecodeGraph) else PIECE
    left, width = count, loop.speculate + 1  # left: tokens of the row that needs most
    drawn: torch.Tensor | int = 0
    while left > 0:
        if isinstance(loop, EagerDecode):
            loop.limit_drafts(left - 2)  # the step draws one token, and the next one another
        stream = loop.run(min(-(-left // width), ahead))
        for tokens in stream:
            yield tokens, loop.logits
        if loop.speculate:
            taken = stream.wait() >= 0
            drawn = drawn + taken.sum((0, 2))
            left = count - int(drawn[taken[-1].any(1)].min()) if taken[-1].any() else 0
        else:
            left -= len(stream)


def _columns(tokens: torch.Tensor, logits: torch.Tensor | None) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """The tokens [B] and logits [B, vocab] of a step, one after the other where it drew several."""
    if tokens.dim() == 1:
        yield tokens, logits
        return
    width = tokens.shape[1]
    for place, column in enumerate(tokens.unbind(1)):
        yield column, None if logits is None else logits[place::width]


def _padded(prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """int64 [B, the longest], zeros behind."""
    ids = [torch.tensor(prompt, dtype=torch.int64, device="cpu") for prompt in prompts]
    return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)


def _alive(
    tokens: torch.Tensor,
    alive: list[bool],
    stop_ids: Sequence[tuple[int, ...]],
    on_token: Callable[[int, int], object] | None,
) -> list[bool]:
    """Which rows go on; reads the device only where something can stop a row, or watches."""
    if not any(stop_ids) and on_token is None:
        return alive
    goes_on = []
    for row, (was, token, own) in enumerate(zip(alive, tokens.tolist(), stop_ids)):
        ended = was and on_token is not None and on_token(row, token) is True
        goes_on.append(was and not ended and token not in own)
    return goes_on


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
