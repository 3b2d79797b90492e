"""Which requests have a slot of the batch and which blocks, which wait, and which are preempted, for the scheduler."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch

from sparse_attn.generation.blocks import BlockPool, BlockTables, blocks_for
from sparse_attn.generation.cache_rows import Rows, ringed
from sparse_attn.generation.loop import DecodeRows
from sparse_attn.generation.model import AnyCaches
from sparse_attn.generation.preemption import preempt, resume
from sparse_attn.generation.prefixes import Prefixes
from sparse_attn.generation.requests import Request
from sparse_attn.generation.sampling import Draws

AGE = attrgetter("number")  # of a request, the oldest first


class Admission:
    """The slots of a batch, which are the rows of ``loop`` over ``caches``; and the queue of requests without one.

    rows: how many. width: of the block tables. block_size: tokens of a block on all context ranks. has_rings: whether
    row n of the caches of rings is that of row n of the loop, as it is then. snapshots: rings behind those, for
    prefixes. share: whether prompts begin with blocks of earlier ones. draws: a request's sampling on the host.
    """

    def __init__(
        self,
        loop: DecodeRows,
        caches: AnyCaches,
        pool: BlockPool,
        *,
        rows: int,
        width: int,
        block_size: int,
        has_rings: bool,
        snapshots: int,
        share: bool,
        draws: Callable[[Request], Draws],
    ):
        self.loop, self.pool, self.block_size = loop, pool, block_size
        self.tables = BlockTables(pool, rows, width, block_size)
        self.prefixes = Prefixes(pool, block_size, range(rows, rows + snapshots) if has_rings else None)
        self.share = share and (not has_rings or snapshots > 0)
        self.rings = None
        if has_rings:
            self.rings = torch.arange(rows, dtype=torch.int32, device="cpu").unsqueeze(1)
        self.slots: list[Request | None] = [None] * rows
        self.running: list[Request] = []  # those that have a slot, in order of arrival
        self.waiting: list[Request] = []
        self.reused = self.preempted = 0
        self._caches, self._ringed, self._draws = caches, Rows(ringed(caches)), draws
        self._full = False  # the first of those waiting did not fit, and nothing was freed since

    def keys(self, words: Sequence[int]) -> list[bytes]:
        """Of a prompt's whole blocks, where prompts share them."""
        return self.prefixes.keys(words) if self.share else []

    def admit(self) -> None:
        """Give rows to those waiting, in order, as long as the next one fits."""
        while self.waiting and not self._full and None in self.slots:
            request, row = self.waiting[0], self.slots.index(None)
            if not (self._resume if request.preempted else self._place)(request, row):
                self._full = True
                return
            self.waiting.pop(0)
            self.slots[row], request.row = request, row
            insort(self.running, request, key=AGE)

    def withdraw(self, request: Request) -> None:
        """Take out a request, that waits or runs."""
        if request.row is not None:
            self.free(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self._full = False

    def free(self, request: Request) -> None:
        """Let go of its row and its blocks. Steps on their way still read and write them, before any step to come."""
        row = request.row
        assert row is not None
        self.loop.leave_checked(row)
        self.tables.release(row)
        self.slots[row] = request.row = None
        self.running.remove(request)
        self._full = False

    def preempt(self, request: Request) -> None:
        """Take a request out, to go on later. One whose prompt is not computed yet begins anew."""
        row = request.row
        assert row is not None
        if request.begun:
            blocks = self.tables.blocks(row)[: blocks_for(request.length - 1, self.block_size)]
            request.preempted = preempt(self.loop, self._caches, row, blocks, request.length)
        self.free(request)
        self.preempted += 1
        request.computed = 0
        insort(self.waiting, request, key=AGE)

    def room_for(self, request: Request, tokens: int) -> bool:
        """Let a running request hold ``tokens`` tokens, at the cost of younger ones; False where it had to give way
        itself."""
        row = request.row
        assert row is not None
        if not (missing := self.tables.missing(row, tokens)):
            return True
        while not self.prefixes.make_room(missing):
            youngest = self.running[-1]
            self.preempt(youngest)
            if youngest is request:
                return False
        self.tables.reserve(row, tokens)
        self.loop.set_blocks(row, self.tables.blocks(row))
        return True

    def keep(self, request: Request) -> None:
        """Let others begin with what the request has computed of its prompt."""
        row = request.row
        if not self.share or row is None:
            return
        whole, more = divmod(request.computed, self.block_size)
        keys = request.keys[:whole]
        self.prefixes.keep_keys(keys, self.tables.blocks(row))
        if self.rings is not None and keys and not more and (ring := self.prefixes.ring_at(keys[-1])) is not None:
            self._ringed.copy(row, ring)

    def start(self, requests: Sequence[Request]) -> None:
        """Let rows decode, whose prompts are computed, whose first tokens are drawn and whose lengths were noted."""
        rows = [request.row for request in requests if request.row is not None]
        self.loop.start_checked(rows, **self._speculation(requests))

    def _speculation(self, requests: Sequence[Request]) -> dict[str, torch.Tensor]:
        """What a loop that speculates wants to know of rows that start."""
        if not self.loop.speculate:
            return {}
        ends = torch.tensor([one.most for one in requests], dtype=torch.int32, device="cpu")
        if self.loop.known is None:
            return dict(ends=ends)
        longest = max(len(one.prompt) for one in requests)
        ids = [one.prompt + [0] * (longest - len(one.prompt)) for one in requests]
        return dict(ends=ends, known=torch.tensor(ids, dtype=torch.int64, device="cpu"))

    def _fits(self, blocks: int) -> bool:
        """Whether so many blocks can be had, and one more for each that runs, so that it is not preempted at once."""
        return self.prefixes.make_room(blocks + len(self.running))

    def _place(self, request: Request, row: int) -> bool:
        shared, ring, known = self.prefixes.begin(request.prompt, keys=request.keys) if self.share else ([], None, 0)
        wanted = min(len(request.prompt) + 1, request.most)
        if not self._fits(blocks_for(wanted, self.block_size) - len(shared)):
            self.pool.give_back(shared)
            return False
        self.tables.begin(row, shared, wanted)
        if ring is not None:
            self._ringed.copy(ring, row)
        request.computed, request.border = len(shared) * self.block_size, known * self.block_size
        self.reused += request.computed
        self.loop.prepare_checked(
            row, request.seed, () if self.rings is None else (row,), request.sampling, request.prompt,
            self.tables.row(row).tobytes(),
        )  # fmt: skip
        return True

    def _resume(self, request: Request, row: int) -> bool:
        preempted = request.preempted
        assert preempted is not None
        if not self._fits(blocks_for(min(preempted.length, request.most), self.block_size)):
            return False
        self.tables.reserve(row, min(preempted.length, request.most))
        resume(
            preempted, self.loop, self._caches, row, self.tables.blocks(row)[: len(preempted.blocks[0])],
            self.tables.table[row : row + 1], None if self.rings is None else self.rings[row : row + 1],
            torch.tensor([request.seed], dtype=torch.int64, device="cpu"), self._draws(request),
            torch.tensor([request.most], dtype=torch.int32, device="cpu") if self.loop.speculate else None,
        )  # fmt: skip
        request.preempted = None
        return True
