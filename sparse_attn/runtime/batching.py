"""Requests that arrive at any time, decoded together: what a server calls between its clients and the device.

A call of ``step`` admits waiting requests, runs one prefill step of newcomers and some decode steps of the others, and
delivers the tokens that have arrived. It never waits for the device. What is where:

- Requests are admitted in the order in which they came, each once its prompt's blocks are free. Nobody overtakes.
- A prompt begins with blocks that earlier ones left (runtime.prefixes), with rings where the model has them.
- When blocks run out, kept prefixes are let go of, then the youngest request is preempted: what it wrote is copied to
  the host, its blocks serve the others, and later it goes on as if nothing had been. The oldest request always gets
  what it needs, and no request is taken that could not run alone, so something always finishes.
- Ranks that compute the same tokens are called alike and decide alike: there, a step waits for the tokens on their way,
  because when they arrive must not decide what runs. Each request is compared over ranks as it comes.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparse_attn import checks, workspace
from sparse_attn.autocast import no_autocast
from sparse_attn.ops.sampling import token_logprobs
from sparse_attn.pipeline import Bounds, check_block_size, default_block_size
from sparse_attn.runtime.batch import compiled, locked_workspace, scratch_size
from sparse_attn.runtime.cache_rows import copy_row, ringed
from sparse_attn.runtime.draws import Draws, row_draws
from sparse_attn.runtime.graph import DecodeGraph, check_capturable
from sparse_attn.runtime.inputs import checked_prompts, checked_sampling
from sparse_attn.runtime.paging import BlockPool, BlockTables, Span, blocks_for
from sparse_attn.runtime.parking import park, unpark
from sparse_attn.runtime.prefixes import Prefixes
from sparse_attn.runtime.processes import check_same
from sparse_attn.runtime.requests import Finished, Occupancy, Request
from sparse_attn.runtime.rows import DecodeRows, EagerDecode, TokenStream, on_the_way
from sparse_attn.runtime.speculation import Drafter
from sparse_attn.runtime.speculator import check_speculate
from sparse_attn.runtime.steps import Model, PrefillSize, Sampling, least_capacity, prefill_step, sent

IDLE_S = 100e-6  # between two looks of ``drain`` while nothing has arrived


class Batching:
    """A scheduler over the caches it allocates for ``model``.

    rows: requests that run at a time. num_blocks: of the paged caches, shared by all. max_context: tokens a request may
    hold. block_size: tokens a block covers on a context rank; None: what suits the model. prefill_tokens: tokens a
    prefill step takes at most. piece: decode steps between two prefill steps. ahead: pieces that may be on their way; a
    step that has so many launches none. max_waiting: bound on the queue. snapshots: borders of prompts whose rings are
    kept, for a model that has rings; each takes the memory of a request's. share: whether prompts begin with blocks of
    earlier ones. penalties: whether requests may ask for them; they take a count for each row and token id. stop_ids:
    how many a request may have. logprobs: keep those of the tokens. compile, graph: as generate takes them.
    batch_invariant: None: as the model is. True: a request's tokens and their log-probabilities are the same to the bit
    alone and among others. Then all steps have one size each: decode steps all rows, prefill steps prefill_tokens, rows
    requests and max_context keys, so that matrix products, which torch computes otherwise for other sizes, always have
    the same.

    TypeError or ValueError names an argument that does not fit.
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
        self._together = mesh.tensor.size * mesh.context.size > 1
        check_same(
            mesh, model.device, spec=model.spec, layouts=model.layouts, sizes=sizes, snapshots=snapshots, share=share,
            options=(block_size, penalties, stop_ids, logprobs, compile, graph),
        )  # fmt: skip
        self.batch_invariant = model.batch_invariant if batch_invariant is None else batch_invariant
        self.model, self.piece, self.ahead = model, piece, ahead
        self.block_size = int(block_size) * model.mesh.context.size  # of all context ranks
        self.prefill_tokens, self.max_waiting = max(2, prefill_tokens), max_waiting
        self._penalties, self._stop_ids, self._keep_logprobs = penalties, stop_ids, logprobs
        self._max_context = max(max_context, least_capacity(model, self.block_size))
        self._longest, snapshots = max_context, snapshots if model.has_rings else 0
        width = max(2, blocks_for(self._max_context, self.block_size))
        self.pool = BlockPool(max(2, num_blocks))
        self.tables = BlockTables(self.pool, rows, width, self.block_size)
        spare = range(rows, rows + snapshots) if model.has_rings else None
        self.prefixes = Prefixes(self.pool, self.block_size, spare)
        self._share = share and (not model.has_rings or snapshots > 0)
        self.caches = model.allocate_caches(
            self.pool.num_blocks, int(block_size), requests=rows + snapshots,
            step_rows=max(self.prefill_tokens, speculate + 1), next_n=speculate + 1,
        )  # fmt: skip
        self._rings = None
        if model.has_rings:
            self._rings = torch.arange(rows, dtype=torch.int32, device="cpu").unsqueeze(1)
        self._run = compiled(model, self.caches) if compile else model
        self._drafts, self._predict = speculate, None
        if speculate and drafter is None:
            self._predict = compiled(model.predictor(), self.caches) if compile else model.predictor()
        bounds: dict[str, Any] = dict(
            max_batch=rows, max_model_len=self._max_context, next_n=speculate + 1, block_size=int(block_size),
            mesh=model.mesh, logits_bytes=model.logits_bytes, batch_invariant=model.batch_invariant,
            dtype=model.embed.dtype,
        )  # fmt: skip
        self._workspace = locked_workspace(
            model, Bounds(max_batched_tokens=self.prefill_tokens, kv_rows=self._max_context, **bounds)
        )
        options: dict[str, Any] = dict(
            max_context=self._max_context, max_blocks=width, impl=model.impl, keep_logprobs=logprobs,
            draws=self._draws_of(Sampling(), []), batch_invariant=self.batch_invariant,
            buckets=[1 << n for n in range((rows - 1).bit_length())] + [rows], speculate=speculate, drafter=drafter,
            predict=self._predict,
        )  # fmt: skip
        if graph:
            size = scratch_size(model, Bounds(max_batched_tokens=0, kv_rows=0, **bounds))
            self.loop: DecodeRows = DecodeGraph(self._run, self.caches, workspace_size=size, **options)
        else:
            self.loop = EagerDecode(self._run, self.caches, **options)
        self._size = None
        if self.batch_invariant:
            self._size = PrefillSize(self.prefill_tokens, rows, self._max_context)
        self._sitting: list[Request | None] = [None] * rows
        self._waiting: list[Request] = []
        self._unfinished: dict[int, Request] = {}
        self._flying: deque[tuple[TokenStream, list[tuple[int, Request]], int, bool]] = deque()
        self._arrived: deque[tuple[Request, int, float]] = deque()
        self._steps_ahead = self._next = self._tokens = self._reused = self._preempted = 0
        self._full = False  # the first of those waiting did not fit, and nothing was freed since

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

        prompt: ids. seed: of its draws; None: sampling.seed. It draws what generate(seeds=[seed]) draws. on_token:
        called with (number, id) for each token, in order, from within ``step``; True ends the request.

        ValueError or TypeError for what can never run: too long for max_context or for all blocks together, ids
        outside of the vocabulary, more stop ids or other penalties than the scheduler was made for. RuntimeError where
        max_waiting are queued.
        """
        ids = checked_prompts([prompt], self.model.spec, max_new_tokens)[0]
        sampling = checked_sampling(sampling, self.model.spec.vocab_size)
        if seed is not None:
            checks.check_seed("seed", seed)
        if sampling.penalises and not self._penalties:
            raise ValueError("sampling: got penalties, allowed: none, the scheduler was made without")
        if len(sampling.stop_ids) > self._stop_ids:
            raise ValueError(f"stop_ids: got {len(sampling.stop_ids)}, allowed: at most {self._stop_ids}")
        most = min(self._longest, self.pool.num_blocks * self.block_size)
        if (tokens := len(ids) + int(max_new_tokens) - 1) > most:
            raise ValueError(f"prompt: got {tokens} tokens with its continuation, allowed: {most}")
        if len(self._waiting) >= self.max_waiting:
            raise RuntimeError(f"queue: {len(self._waiting)} requests are waiting, allowed: {self.max_waiting}")
        check_same(
            self.model.mesh, self.model.device, prompt=ids, max_new_tokens=int(max_new_tokens), sampling=sampling,
            seed=seed,
        )  # fmt: skip
        request = Request(
            self._next, ids, int(max_new_tokens), sampling, sampling.seed if seed is None else int(seed), on_token,
            drafts=self._drafts,
        )  # fmt: skip
        request.keys = self.prefixes.keys(ids) if self._share else []
        self._next += 1
        self._waiting.append(request)
        self._unfinished[request.number] = request
        return request.number

    def cancel(self, number: int) -> bool:
        """End a request; whether it was unfinished. No token of it is delivered any more; ``step`` reports it. May be
        called from on_token."""
        request = self._unfinished.get(number)
        if request is None or request.reason is not None:
            return False
        request.reason = "cancelled"
        return True

    @no_autocast
    @torch.no_grad()
    def step(self) -> list[Finished]:
        """Deliver what has arrived, launch what fits, and report what finished. Never waits for the device: with work
        on its way and nothing to launch it returns at once.

        An exception of on_token passes through. Its token counts as delivered, and the next call goes on."""
        self._deliver()
        done = self._sweep()
        with workspace.use(self._workspace):
            self._admit()
            self._prefill()
            self._decode()
        self._deliver()
        return done + self._sweep()

    @property
    def idle(self) -> bool:
        """Whether every request is finished and reported."""
        return not self._unfinished

    def drain(self) -> list[Finished]:
        """Step until idle. Sleeps for a moment where nothing has arrived."""
        done = []
        while not self.idle:
            before = self._tokens
            found = self.step()
            done += found
            if not found and before == self._tokens and self._flying:
                time.sleep(IDLE_S)
        return done

    def occupancy(self) -> Occupancy:
        running = sum(request is not None for request in self._sitting)
        return Occupancy(
            len(self._sitting), running, len(self._waiting), self.pool.num_blocks, self.prefixes.room(), self._tokens,
            self._reused, self._preempted,
        )  # fmt: skip

    def _running(self) -> list[Request]:
        """Those that have a row, in order of arrival."""
        return sorted(request for request in self._sitting if request is not None)

    # what has arrived

    def _deliver(self) -> None:
        while self._flying:
            stream, columns, seen, decoded = self._flying.popleft()
            if self._together:
                stream.wait()
            arrived = stream.arrived()  # asked once: what arrives after it is delivered next time
            for number in range(seen, arrived):
                tokens, logprobs = stream.step(number)
                rows = tokens.view(len(tokens), -1).tolist()
                scores = rows if logprobs is None else logprobs.view(len(tokens), -1).tolist()
                for at, request in columns:
                    own = [(token, score) for token, score in zip(rows[at], scores[at]) if token >= 0]
                    self._arrived.extend((request, token, score) for token, score in own)
                    request.flying, request.pending = request.flying - decoded, request.pending + len(own)
            if arrived < len(stream):
                self._flying.appendleft((stream, columns, arrived, decoded))
                break
            self._steps_ahead -= len(stream)
        while self._arrived:
            request, token, logprob = self._arrived.popleft()
            request.pending -= 1
            if request.reason is not None:
                continue
            self._tokens += 1
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if token in request.sampling.stop_ids:
                request.reason = "stop"
            elif len(request.tokens) == request.max_new_tokens:
                request.reason = "length"
            if request.on_token is not None and request.on_token(request.number, token) is True:
                request.reason = request.reason or "ended"

    def _sweep(self) -> list[Finished]:
        """Take out whoever is over."""
        done = [request for request in self._unfinished.values() if request.reason is not None]
        for request in done:
            del self._unfinished[request.number]
            if request.row is None:
                if request in self._waiting:
                    self._waiting.remove(request)
                    self._full = False
            else:
                self._free(request)
        logprobs = self._keep_logprobs
        return [Finished(one.number, one.tokens, str(one.reason), one.logprobs if logprobs else None) for one in done]

    def _free(self, request: Request) -> None:
        """Let go of its row and its blocks. Steps on their way still read and write them, before any step to come."""
        row = request.row
        assert row is not None
        if row in self.loop.live:
            self.loop.leave([row])
        self.tables.release(row)
        self._sitting[row] = request.row = None
        self._full = False

    # who runs

    def _admit(self) -> None:
        while self._waiting and not self._full and None in self._sitting:
            request, row = self._waiting[0], self._sitting.index(None)
            if not (self._resume if request.parked else self._seat)(request, row):
                self._full = True
                return
            self._waiting.pop(0)
            self._sitting[row], request.row = request, row

    def _fits(self, blocks: int) -> bool:
        """Whether so many blocks can be had, and one more for each that runs, so that it is not preempted at once."""
        running = sum(request is not None for request in self._sitting)
        return self.prefixes.make_room(blocks + running)

    def _seat(self, request: Request, row: int) -> bool:
        shared, ring, known = self.prefixes.begin(request.prompt, keys=request.keys) if self._share else ([], None, 0)
        wanted = min(len(request.prompt) + 1, request.most)
        if not self._fits(blocks_for(wanted, self.block_size) - len(shared)):
            self.pool.give_back(shared)
            return False
        self.tables.begin(row, shared)
        self.tables.reserve(row, wanted)
        if ring is not None:
            copy_row(ringed(self.caches), ring, row)
        request.computed, request.border = len(shared) * self.block_size, known * self.block_size
        self._reused += request.computed
        rings = None if self._rings is None else self._rings[row : row + 1]
        self.loop.prepare(row, rings, _seed(request), self._draws_of(request.sampling, request.prompt))
        return True

    def _resume(self, request: Request, row: int) -> bool:
        parked = request.parked
        assert parked is not None
        if not self._fits(blocks_for(min(parked.length, request.most), self.block_size)):
            return False
        self.tables.reserve(row, min(parked.length, request.most))
        unpark(
            parked, self.loop, self.caches, row, self.tables.blocks(row)[: len(parked.blocks[0])],
            self.tables.table[row : row + 1], None if self._rings is None else self._rings[row : row + 1],
            _seed(request), self._draws_of(request.sampling, request.prompt), self._ends(request),
        )  # fmt: skip
        request.parked = None
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request out, to go on later. One whose prompt is not computed yet begins anew."""
        row = request.row
        assert row is not None
        if request.begun:
            blocks = self.tables.blocks(row)[: blocks_for(request.length - 1, self.block_size)]
            request.parked = park(self.loop, self.caches, row, blocks, request.length)
        self._free(request)
        self._preempted += 1
        request.computed = 0
        insort(self._waiting, request)

    def _room_for(self, request: Request, tokens: int) -> bool:
        """Let a running request hold ``tokens`` tokens, at the cost of younger ones; False where it had to give way
        itself."""
        row = request.row
        assert row is not None
        while not self.prefixes.make_room(self.tables.missing(row, tokens)):
            youngest = self._running()[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        if self.tables.missing(row, tokens):
            self.tables.reserve(row, tokens)
            self.loop.set_blocks(row, self.tables.table[row])
        return True

    # what runs

    def _prefill(self) -> None:
        """One step of those whose prompts are not computed, the oldest first."""
        spans, tokens, keys = [], self.prefill_tokens, self._max_context
        for request in self._running():
            if request.begun or not tokens:
                continue
            stop = min(len(request.prompt), request.computed + tokens)
            if self._share and self.model.has_rings:
                stop = request.cut(stop, self.block_size)
            if spans and stop > keys:
                break
            assert request.row is not None
            spans.append(Span(request.row, request.computed, stop))
            tokens, keys = tokens - (stop - request.computed), keys - stop
        if not spans:
            return
        state, prompts = self.loop.state, [[] if one is None else one.prompt for one in self._sitting]
        logits = prefill_step(
            self._run, prompts, spans, self.tables, self.caches, state, Sampling(), self._max_context,
            rings=self._rings, pad_to=self._size, predict=self._predict,
        )  # fmt: skip
        ends, end = [], 0
        for span in spans:
            end += span.stop - span.start
            request = self._sitting[span.request]
            assert request is not None
            request.computed = span.stop
            self._keep(request, span.request)
            if span.stop == len(request.prompt):
                ends.append((end - 1, request))
        if ends:
            self._begin(logits, ends)

    def _keep(self, request: Request, row: int) -> None:
        if not self._share:
            return
        whole = request.computed // self.block_size
        computed, keys = request.prompt[: request.computed], request.keys
        self.prefixes.keep(computed, self.tables.blocks(row)[:whole], keys=keys)
        if self.model.has_rings and request.computed == whole * self.block_size:
            ring = self.prefixes.ring_for(computed, keys=keys)
            if ring is not None:
                copy_row(ringed(self.caches), row, ring)

    def _begin(self, logits: torch.Tensor, ends: list[tuple[int, Request]]) -> None:
        """The first tokens of those whose prompts are computed go to the host, and their rows live."""
        device = self.model.device
        rows = [request.row for _, request in ends if request.row is not None]
        tokens = self.loop.state.tokens[sent(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)]
        found = [tokens]
        if self._keep_logprobs:
            at = sent(torch.tensor([end for end, _ in ends], dtype=torch.int64, device="cpu"), device)
            found.append(token_logprobs(logits[at], tokens, best=0).drawn)
        stream = on_the_way(found)
        self._fly(stream, [(column, request) for column, (_, request) in enumerate(ends)], decoded=False)
        for _, request in ends:
            request.begun = True
            if request.decoding and request.row is not None:
                known = None
                if self.loop.known is not None:
                    known = torch.tensor([request.prompt], dtype=torch.int64, device="cpu")
                self.loop.start(
                    request.row, request.length, self.tables.table[request.row], ends=self._ends(request), known=known
                )
            else:
                self._free(request)

    def _decode(self) -> None:
        """A piece of steps of those whose prompts are computed."""
        decoding = [request for request in self._running() if request.decoding]
        if not decoding or self._steps_ahead >= self.piece * self.ahead:
            return
        steps = min(self.piece, *(request.max_new_tokens - request.drawn for request in decoding))
        for request in decoding:
            if request.row is not None:  # nobody older took its blocks
                self._room_for(request, min(request.most, request.length + steps * (self._drafts + 1) - 1))
        decoding = [request for request in decoding if request.row is not None]
        if not decoding:
            return
        columns = [(request.row, request) for request in decoding if request.row is not None]
        self._fly(self.loop.run(steps), columns, decoded=True)
        for request in decoding:
            request.flying += steps
            if not request.decoding:
                self._free(request)

    def _fly(self, stream: TokenStream, columns: list[tuple[int, Request]], decoded: bool) -> None:
        self._flying.append((stream, columns, 0, decoded))
        self._steps_ahead += len(stream)

    def _ends(self, request: Request) -> torch.Tensor | None:
        return torch.tensor([request.most], dtype=torch.int32, device="cpu") if self._drafts else None

    def _draws_of(self, sampling: Sampling, prompt: Sequence[int]) -> Draws:
        return row_draws(
            sampling, self.model.spec.vocab_size, prompt=prompt, penalties=self._penalties, stop_ids=self._stop_ids
        )


def _seed(request: Request) -> torch.Tensor:
    return torch.tensor([request.seed], dtype=torch.int64, device="cpu")
