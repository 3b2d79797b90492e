"""Requests that arrive at any time, decoded together: what a server calls between its clients and the device.

A call of ``step`` admits waiting requests, runs one prefill step of newcomers and some decode steps of the others, and
delivers the tokens that have arrived. It never waits for the device. What is where:

- Requests are admitted in the order in which they came, each once its prompt's blocks are free. Nobody overtakes.
- A prompt begins with blocks that earlier ones left (generation.prefixes), with rings where the model has them.
- When blocks run out, kept prefixes are let go of, then the youngest request is preempted: what it wrote is copied to
  the host, its blocks serve the others, and later it goes on as if nothing had been. The oldest request always gets
  what it needs, and no request is taken that could not run alone, so something always finishes.
- Ranks that compute the same tokens are called alike and decide alike: there, a step waits for the tokens on their way,
  because when they arrive must not decide what runs. Each request is compared over ranks as it comes.
- Data ranks that share experts have requests of their own, and call ``step`` equally often. They run as many rows each,
  padding where one has fewer: before a prefill step and before decode steps the host learns the most that any asks for.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from sparse_attn import workspace
from sparse_attn.framework import checks
from sparse_attn.generation.admission import AGE, Admission
from sparse_attn.generation.batch import bounds_of, compiled, locked_workspace, scratch_size
from sparse_attn.generation.blocks import BlockPool, Span, blocks_for
from sparse_attn.generation.drafts import check_speculate
from sparse_attn.generation.graph import DecodeGraph, check_capturable
from sparse_attn.generation.inputs import checked_prompt, checked_sampling
from sparse_attn.generation.loop import DecodeRows, EagerDecode, LoopSettings
from sparse_attn.generation.model import Model
from sparse_attn.generation.processes import check_same, check_same_weights, most_of_all
from sparse_attn.generation.requests import Finished, Occupancy, Request
from sparse_attn.generation.sampling import Draws, Sampling, row_draws
from sparse_attn.generation.speculation import Drafter
from sparse_attn.generation.steps import PrefillSize, least_capacity, prefill_step
from sparse_attn.generation.stream import TokenStream, on_the_way
from sparse_attn.mesh import ALONE
from sparse_attn.ops.layers.sampling import token_logprobs
from sparse_attn.pipeline import check_block_size, default_block_size

IDLE_S = 100e-6  # between two looks of ``drain`` while nothing has arrived


class Batching:
    """A scheduler over the caches it allocates for ``model``.

    Args:
        model: a Model.
        rows: requests that run at a time.
        num_blocks: of the paged caches, shared by all.
        max_context: tokens a request may hold.
        block_size: tokens a block covers on a context rank; None: what suits the model.
        prefill_tokens: tokens a prefill step takes at most.
        piece: decode steps between two prefill steps.
        ahead: pieces that may be on their way; a step that has so many launches none.
        max_waiting: bound on the queue.
        snapshots: borders of prompts whose rings are kept, for a model that has rings; each takes the memory of a
            request's.
        share: whether prompts begin with blocks of earlier ones.
        penalties: whether requests may ask for them; they take a count for each row and token id.
        stop_ids: how many a request may have.
        logprobs: keep those of the tokens.
        compile: as generate takes it.
        graph: as generate takes it.
        batch_invariant: None: as the model is. True: a request's tokens and their log-probabilities are the same to the
            bit alone and among others. Then all steps have one size each, for what torch.compile makes of other sizes:
            decode steps all rows, prefill steps prefill_tokens, rows requests and max_context keys.
        speculate: as generate takes it.
        drafter: as generate takes it.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: names an argument that does not fit.
    """

    def __init__(
        self,
        model: Model,
        *,
        rows: int,
        num_blocks: int,
        max_context: int,
        block_size: int | None = None,
        prefill_tokens: int = 512,
        piece: int = 8,
        ahead: int = 2,
        max_waiting: int = 1024,
        snapshots: int = 0,
        share: bool = True,
        penalties: bool = False,
        stop_ids: int = 8,
        logprobs: bool = False,
        compile: bool = False,
        graph: bool = False,
        batch_invariant: bool | None = None,
        speculate: int = 0,
        drafter: Drafter | None = None,
    ):
        check_speculate(speculate, drafter)
        sizes = dict(rows=rows, num_blocks=num_blocks, max_context=max_context, prefill_tokens=prefill_tokens,
                     piece=piece, ahead=ahead, max_waiting=max_waiting)  # fmt: skip
        for name, value in sizes.items():
            checks.check_at_least(name, value, 1)
        checks.check_at_least("snapshots", snapshots, 0)
        checks.check_at_least("stop_ids", stop_ids, 0)
        block_size = default_block_size(model.spec) if block_size is None else block_size
        check_block_size(model.spec, block_size)
        if max_context > model.spec.max_positions:
            raise ValueError(
                f"max_context: got {max_context}, allowed: at most the model's {model.spec.max_positions} positions"
            )
        if graph:
            check_capturable(
                model.device, model.impl, model.spec, model.embed.dtype, mesh=model.mesh, packed=model.packs_experts
            )
        if batch_invariant and not model.batch_invariant:
            model = model.invariant()
        mesh = model.mesh
        self._sharing = mesh.expert if mesh.expert_replicas > 1 else ALONE
        self._together = mesh.replica_size * self._sharing.size > 1
        self._shares = self._sharing.size > 1
        self._others = self._shares  # whether requests of any rank that shares experts may be unfinished
        check_same(
            mesh, model.device, sharing=True, spec=model.spec, layouts=model.layouts, sizes=sizes, snapshots=snapshots,
            share=share, options=(block_size, penalties, stop_ids, logprobs, compile, graph, speculate),
            batch_invariant=model.batch_invariant, prefill_activations=model.prefill_activations,
        )  # fmt: skip
        check_same_weights(mesh, model.device, model.params, sharing=True)
        self.batch_invariant = model.batch_invariant if batch_invariant is None else batch_invariant
        self.model, self.piece, self.ahead = model, piece, ahead
        self._device = model.device
        self.block_size = int(block_size) * model.mesh.context.size  # of all context ranks
        self.prefill_tokens, self.max_waiting = max(2, prefill_tokens), max_waiting
        self._penalties, self._stop_ids, self._keep_logprobs = penalties, stop_ids, logprobs
        self._max_context = max(max_context, least_capacity(model, self.block_size))
        snapshots = snapshots if model.has_rings else 0
        width = max(2, blocks_for(self._max_context, self.block_size))
        self.pool = BlockPool(max(2, num_blocks))
        self._longest = min(max_context, self.pool.num_blocks * self.block_size)  # tokens of a request
        self.caches = model.allocate_caches(
            self.pool.num_blocks, int(block_size), requests=rows + snapshots,
            step_rows=max(self.prefill_tokens, speculate + 1), next_n=speculate + 1, rings_together=not compile,
        )  # fmt: skip
        self._run = compiled(model, self.caches) if compile else model
        self._drafts, self._predict = speculate, None
        if speculate and drafter is None:
            self._predict = compiled(model.predictor(), self.caches) if compile else model.predictor()
        bounds = bounds_of(
            model, max_batch=rows, max_batched_tokens=self.prefill_tokens, max_model_len=self._max_context,
            next_n=speculate + 1, block_size=int(block_size), kv_rows=self._max_context,
        )  # fmt: skip
        self._workspace = locked_workspace(model, bounds)
        settings = LoopSettings(
            self._max_context, width, [1 << n for n in range((rows - 1).bit_length())] + [rows], impl=model.impl,
            keep_logprobs=logprobs, draws=self._draws_of(Sampling(), []), batch_invariant=self.batch_invariant,
            speculate=speculate, drafter=drafter, predict=self._predict,
        )  # fmt: skip
        if graph:
            size = scratch_size(model, replace(bounds, max_batched_tokens=0, kv_rows=0))
            self.loop: DecodeRows = DecodeGraph(self._run, self.caches, workspace_size=size, **settings._asdict())
        else:
            self.loop = EagerDecode(self._run, self.caches, settings)
        self.admission = Admission(
            self.loop, self.caches, self.pool, rows=rows, width=width, block_size=self.block_size,
            has_rings=model.has_rings, snapshots=snapshots, share=share,
            draws=lambda request: self._draws_of(request.sampling, request.prompt),
        )  # fmt: skip
        self._cuts = self.admission.share and model.has_rings
        self._drawn = self.loop.state.tokens.split(1)  # the first token of each row, once its prompt is computed
        self._size = None
        if self.batch_invariant:
            self._size = PrefillSize(self.prefill_tokens, rows, self._max_context)
        self._unfinished: dict[int, Request] = {}
        self._over: list[Request] = []  # of the unfinished, to be reported
        # streams, the columns of requests in them, how many steps were seen to arrive, whether decode steps
        self._in_flight: deque[tuple[TokenStream, list[tuple[int, Request]], int, bool]] = deque()
        self._spare_streams: defaultdict[int, list[TokenStream]] = defaultdict(list)  # by how many first tokens
        self._arrived: Iterator[tuple[Request, int, float]] | None = None  # that an exception of on_token left
        self._steps_ahead = self._next = self._tokens = 0

    def submit(
        self,
        prompt: Sequence[int] | torch.Tensor,
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        seed: int | None = None,
        on_token: Callable[[int, int], object] | None = None,
    ) -> int:
        """Queue a request; its number. May be called from on_token.

        Args:
            prompt: ids.
            max_new_tokens: of its continuation.
            sampling: how they are drawn.
            seed: of its draws; None: sampling.seed. It draws what generate(seeds=[seed]) draws.
            on_token: called with (number, id) for each token, in order, from within ``step``; True ends the request.

        Returns:
            The request's number.

        Raises:
            TypeError: wrong types.
            ValueError: what can never run: too long for max_context or for all blocks together, ids outside of the
                vocabulary, more stop ids or other penalties than the scheduler was made for.
            RuntimeError: max_waiting are queued.
        """
        ids, words = checked_prompt("prompt", prompt, self.model.spec, max_new_tokens)
        sampling = checked_sampling(sampling, self.model.spec.vocab_size)
        if seed is not None:
            checks.check_seed("seed", seed)
        if sampling.penalises and not self._penalties:
            raise ValueError("sampling: got penalties, allowed: none, the scheduler was made without")
        if len(sampling.stop_ids) > self._stop_ids:
            raise ValueError(f"stop_ids: got {len(sampling.stop_ids)}, allowed: at most {self._stop_ids}")
        most = int(max_new_tokens)
        if (tokens := len(ids) + most - 1) > self._longest:
            raise ValueError(f"prompt: got {tokens} tokens with its continuation, allowed: {self._longest}")
        if (waiting := len(self.admission.waiting)) >= self.max_waiting:
            raise RuntimeError(f"queue: {waiting} requests are waiting, allowed: {self.max_waiting}")
        if self.model.mesh.size > 1:
            check_same(self.model.mesh, self._device, prompt=ids, max_new_tokens=most, sampling=sampling, seed=seed)
        request = Request(
            self._next, ids, most, sampling, sampling.seed if seed is None else int(seed), on_token,
            self.admission.keys(words), self._drafts,
        )  # fmt: skip
        self._next += 1
        self.admission.waiting.append(request)
        self._unfinished[request.number] = request
        return request.number

    def cancel(self, number: int) -> bool:
        """End a request. No token of it is delivered any more; ``step`` reports it. May be called from on_token.

        Args:
            number: what submit returned.

        Returns:
            Whether it was unfinished.
        """
        request = self._unfinished.get(number)
        if request is None or request.reason is not None:
            return False
        self._end(request, "cancelled")
        return True

    def step(self) -> list[Finished]:
        """Deliver what has arrived, launch what fits, and report what finished. Never waits for the device: with work
        on its way and nothing to launch it returns at once.

        An exception of on_token passes through. Its token counts as delivered, and the next call goes on.

        Returns:
            What finished.
        """
        self._deliver()
        done = self._sweep()
        if self._unfinished or self._shares:
            with workspace.use(self._workspace):
                unfinished = len(self._unfinished)
                self.admission.admit()
                self._prefill(unfinished)
                self._decode()
            self._deliver()
            done += self._sweep()
        return done

    @property
    def idle(self) -> bool:
        """Whether every request is finished and reported; of all data ranks that share experts, as of the last step."""
        return not self._unfinished and not self._others

    def drain(self) -> list[Finished]:
        """Step until idle. Sleeps for a moment where nothing has arrived.

        Returns:
            What finished.
        """
        done, self._others = [], self._shares
        while not self.idle:
            before = self._tokens
            found = self.step()
            done += found
            if not found and before == self._tokens and self._in_flight:
                time.sleep(IDLE_S)
        return done

    def occupancy(self) -> Occupancy:
        admission = self.admission
        requests = len(admission.slots), len(admission.running), len(admission.waiting)
        blocks = self.pool.num_blocks, admission.prefixes.room()
        return Occupancy(*requests, *blocks, self._tokens, admission.reused, admission.preempted)

    # what has arrived

    def _deliver(self) -> None:
        if self._arrived is not None:
            self._hand_out(self._arrived)
        while self._in_flight:
            stream, columns, seen, decoded = self._in_flight[0]
            if self._together:
                stream.wait()
            arrived, steps = stream.arrived(), len(stream)  # asked once: what arrives later is delivered next time
            if arrived > seen:
                if decoded:
                    for _, request in columns:
                        request.in_flight -= arrived - seen
                self._in_flight[0] = stream, columns, arrived, decoded
                self._hand_out(_in_order(*stream.lists(seen), columns))
            if arrived < steps:
                break
            self._in_flight.popleft()
            self._steps_ahead -= steps
            if not decoded:
                self._spare_streams[len(columns)].append(stream)

    def _hand_out(self, arrived: Iterator[tuple[Request, int, float]]) -> None:
        """Deliver what ``arrived`` gives. Where on_token raises, the rest is delivered next time."""
        self._arrived = arrived
        for request, token, logprob in arrived:
            if request.reason is not None:
                continue
            tokens = request.tokens
            tokens.append(token)
            request.logprobs.append(logprob)
            self._tokens += 1
            if token in request.sampling.stop_ids:
                self._end(request, "stop")
            elif len(tokens) == request.max_new_tokens:
                self._end(request, "length")
            if request.on_token is not None and request.on_token(request.number, token) is True:
                self._end(request, "ended")
        self._arrived = None

    def _end(self, request: Request, reason: str) -> None:
        if request.reason is None:
            request.reason = reason
            self._over.append(request)

    def _sweep(self) -> list[Finished]:
        """Take out whoever is over."""
        if not self._over:
            return []
        over, self._over = sorted(self._over, key=AGE), []
        for request in over:
            del self._unfinished[request.number]
            self.admission.withdraw(request)
        logprobs = self._keep_logprobs
        return [Finished(one.number, one.tokens, str(one.reason), one.logprobs if logprobs else None) for one in over]

    # what runs

    def _prefill(self, unfinished: int) -> None:
        """One step of those whose prompts are not computed, the oldest first; or of padding, while others run theirs.
        unfinished: requests, before this step."""
        spans, served, prompts, tokens, keys = [], [], {}, self.prefill_tokens, self._max_context
        for request in self.admission.running:
            if request.begun or not tokens:
                continue
            row, start, prompt = request.row, request.computed, request.prompt
            stop = min(len(prompt), start + tokens)
            if self._cuts:
                stop = request.cut(stop, self.block_size)
            if spans and stop > keys:
                break
            assert row is not None
            spans.append(Span(row, start, stop))
            served.append(request)
            prompts[row] = prompt
            if stop == len(prompt) and request.max_new_tokens > 1:
                self.loop.note_length(row, stop + 1)  # of use once the step has drawn its first token
            tokens, keys = tokens - (stop - start), keys - stop
        most, size = self.prefill_tokens - tokens, self._size
        if self._shares:
            most, unfinished = most_of_all(self._sharing, self._device, most, unfinished)
            self._others = unfinished > 0
            if size is None:
                room = max(sum(span.stop for span in spans), least_capacity(self.model, self.block_size))
                size = PrefillSize(max(2, most), max(len(spans), min(2, len(self.admission.slots))), room)
        if not most:
            return
        logits = prefill_step(
            self._run, prompts, spans, self.admission.tables, self.caches, self.loop.state, self.loop.sampling,
            self._max_context, rings=self.admission.rings, pad_to=size, predict=self._predict,
        )  # fmt: skip
        ended, last, end = [], [], 0
        for (row, start, stop), request in zip(spans, served):
            end += stop - start
            request.computed = stop
            self.admission.keep(request)
            if stop == len(prompts[row]):
                ended.append(request)
                last.append(end - 1)
        if ended:
            self._begin(ended, logits, last)

    def _begin(self, requests: list[Request], logits: torch.Tensor, last: list[int]) -> None:
        """The first tokens of those whose prompts are computed go to the host, and their rows live. last: the rows of
        the logits that these were drawn from."""
        tokens = _joined([self._drawn[request.row] for request in requests if request.row is not None])
        found = [tokens]
        if self._keep_logprobs:
            found.append(token_logprobs(_joined([logits[row : row + 1] for row in last]), tokens, best=0).drawn)
        spare = self._spare_streams[len(requests)]
        self._track(on_the_way(found, spare.pop() if spare else None), list(enumerate(requests)), decoded=False)
        starting = []
        for request in requests:
            request.begun = True
            if request.max_new_tokens > 1:
                starting.append(request)
            else:
                self.admission.free(request)
        if starting:
            self.admission.start(starting)

    def _decode(self) -> None:
        """A piece of steps of those whose prompts are computed."""
        decoding, steps = [], self.piece
        for request in self.admission.running:
            if request.begun and (left := request.max_new_tokens - request.drawn):
                decoding.append((request, left))
                steps = min(steps, left)
        if self._shares:
            runs, fewer, rows = most_of_all(
                self._sharing, self._device, bool(decoding), self.piece - steps, self.loop.width
            )  # fmt: skip
            steps, options = self.piece - fewer, dict(least=rows)
        else:
            runs, options = decoding and self._steps_ahead < self.piece * self.ahead, {}
        if not runs:
            return
        for request, _ in decoding:
            if request.row is not None:  # nobody older took its blocks
                self.admission.room_for(request, min(request.most, request.length + steps * (self._drafts + 1) - 1))
        columns = [(request.row, request) for request, _ in decoding if request.row is not None]
        if not columns and not self._shares:
            return
        self._track(self.loop.run(steps, **options), columns, decoded=True)
        for request, left in decoding:
            if request.row is not None:
                request.in_flight += steps
                if left <= steps:
                    self.admission.free(request)

    def _track(self, stream: TokenStream, columns: list[tuple[int, Request]], decoded: bool) -> None:
        self._in_flight.append((stream, columns, 0, decoded))
        self._steps_ahead += len(stream)

    def _draws_of(self, sampling: Sampling, prompt: Sequence[int]) -> Draws:
        return row_draws(
            sampling, self.model.spec.vocab_size, prompt=prompt, penalties=self._penalties, stop_ids=self._stop_ids
        )


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Rows that the host names, without sending it their numbers."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _in_order(
    steps: list[Any], scores: list[Any] | None, columns: list[tuple[int, Request]]
) -> Iterator[tuple[Request, int, float]]:
    """(request, token, log-probability) of some steps, in the order in which they were drawn."""
    pairs = zip(steps, scores or steps)
    if type(steps[0][0]) is int:  # a token of each row
        return iter([(request, rows[at], known[at]) for rows, known in pairs for at, request in columns])
    return iter([
        (request, token, score)
        for rows, known in pairs
        for at, request in columns
        for token, score in zip(rows[at], known[at])
        if token >= 0
    ])  # fmt: skip
