"""Host bookkeeping of paged caches: which request owns which block, and how a prompt is cut into chunks."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)


def slots_of(
    block_table: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor, block_size: int
) -> torch.Tensor:
    """int64 cache slots of ``positions`` [n] of ``requests`` [n], -1 where a position is negative.

    Works on the host and on the device, without a sync. A table narrower than a request is a ring: the block behind its
    last column is its first one again.
    """
    inside = positions.long().clamp(min=0)
    block = block_table[requests.long(), inside // block_size % block_table.shape[1]].long()
    return torch.where((positions >= 0) & (block >= 0), block * block_size + inside % block_size, -1)


class BlockPool:
    """Blocks of one cache and how many hold each. Free ones are given out lowest id first after a fresh start, last
    freed first afterwards."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders: dict[int, int] = {}  # of the blocks that are not free

    def __len__(self) -> int:
        return len(self._free)

    def holders(self, block: int) -> int:
        """How many hold ``block``; 0 for a free one."""
        return self._holders.get(block, 0)

    def take(self, count: int) -> list[int]:
        """``count`` blocks with one holder each; RuntimeError where fewer are free, in which case none is taken."""
        free = self._free
        if (left := len(free) - count) < 0:
            raise RuntimeError(f"block pool: {count} blocks wanted, {len(free)} of {self.num_blocks} are free")
        blocks = free[left:][::-1]
        del free[left:]
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, blocks: Collection[int]) -> None:
        """Add a holder to each of ``blocks``; ValueError for a free one, in which case nobody holds more."""
        holders = self._holders
        if not all(map(holders.__contains__, blocks)):
            raise self._unheld(next(block for block in blocks if block not in holders))
        for block in blocks:
            holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Take a holder from each of ``blocks``, which is free once nobody holds it; ValueError for a free one."""
        holders = self._holders
        for block in blocks:
            if (held := holders.get(block)) is None:
                raise self._unheld(block)
            if held > 1:
                holders[block] = held - 1
            else:
                del holders[block]
                self._free.append(block)

    def _unheld(self, block: int) -> ValueError:
        return ValueError(f"blocks: got {block}, allowed: blocks taken from this pool and not yet returned")


class BlockTables:
    """A row of block ids per request, at fixed width; -1 where the request has none."""

    def __init__(self, pool: BlockPool, max_requests: int, max_blocks: int, block_size: int):
        self.pool = pool
        self.block_size = block_size
        self._none = array("i", [-1]) * max_blocks
        self._words = self._none * max_requests  # what ``table`` shows, written without torch
        self.table = torch.frombuffer(self._words, dtype=torch.int32).view(max_requests, max_blocks)
        self._owned: list[list[int]] = [[] for _ in range(max_requests)]

    def blocks(self, request: int) -> list[int]:
        """The blocks that ``request`` holds, in the order of its tokens."""
        return list(self._owned[request])

    def row(self, request: int) -> array[int]:
        """The row of ``request``: its blocks, and -1 behind them."""
        width = len(self._none)
        return self._words[request * width : (request + 1) * width]

    def missing(self, request: int, tokens: int) -> int:
        """Blocks that ``request`` lacks to hold ``tokens`` tokens."""
        return max(0, blocks_for(tokens, self.block_size) - len(self._owned[request]))

    def begin(self, request: int, blocks: Sequence[int], tokens: int) -> None:
        """Let ``request``, which holds nothing, hold ``tokens`` tokens and begin with ``blocks``: shared ones, of which
        the caller hands over a hold each."""
        if self._owned[request]:
            raise ValueError(f"request: got {request}, which holds blocks, allowed: one that holds none")
        self._grow(request, blocks, tokens)

    def reserve(self, request: int, tokens: int) -> None:
        """Let ``request`` hold ``tokens`` tokens; what it has stays where it is."""
        self._grow(request, [], tokens)

    def release(self, request: int) -> None:
        """Return everything ``request`` holds."""
        self.pool.give_back(self._owned[request])
        self._owned[request] = []
        start, width = request * len(self._none), len(self._none)
        self._words[start : start + width] = self._none

    def _grow(self, request: int, blocks: Sequence[int], tokens: int) -> None:
        """Add ``blocks``, and behind them as many of the pool as ``tokens`` tokens take."""
        owned, width, wanted = self._owned[request], len(self._none), blocks_for(tokens, self.block_size)
        if wanted > width:
            raise ValueError(
                f"tokens: got {tokens}, allowed: at most {width * self.block_size}, a block table row's worth"
            )
        if (missing := wanted - len(owned) - len(blocks)) > 0:
            blocks = [*blocks, *self.pool.take(missing)]
        start = request * width + len(owned)
        self._words[start : start + len(blocks)] = array("i", blocks)
        owned += blocks


class Span(NamedTuple):
    """Positions [start, stop) of one request's prompt."""

    request: int
    start: int
    stop: int


def prefill_chunks(lengths: Sequence[int], budget: int) -> Iterator[list[Span]]:
    """Cut prompts of ``lengths`` tokens into steps of at most ``budget`` tokens, first request first."""
    if budget < 1:
        raise ValueError(f"budget: got {budget}, allowed: at least 1")
    step, room = [], budget
    for request, length in enumerate(lengths):
        start = 0
        while start < length:
            count = min(room, length - start)
            step.append(Span(request, start, start + count))
            start, room = start + count, room - count
            if room == 0:
                yield step
                step, room = [], budget
    if step:
        yield step
