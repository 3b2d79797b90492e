"""Host bookkeeping of paged caches: which request owns which block, and how a prompt is cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Free blocks of one cache, lowest id first after a fresh start, last freed first afterwards."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._taken: set[int] = set()

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` blocks; RuntimeError where fewer are free, in which case none is taken."""
        if count > len(self._free):
            raise RuntimeError(f"block pool: {count} blocks wanted, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.pop() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return blocks that were taken; ValueError for one that was not."""
        for block in blocks:
            if block not in self._taken:
                raise ValueError(f"blocks: got {block}, allowed: blocks taken from this pool and not yet returned")
            self._taken.remove(block)
            self._free.append(block)


class BlockTables:
    """A row of block ids per request, at fixed width; -1 where the request has none."""

    def __init__(self, pool: BlockPool, max_requests: int, max_blocks: int, block_size: int):
        self.pool = pool
        self.block_size = block_size
        self.table = torch.full((max_requests, max_blocks), -1, dtype=torch.int32, device="cpu")
        self._owned: list[list[int]] = [[] for _ in range(max_requests)]

    def reserve(self, request: int, tokens: int) -> None:
        """Let ``request`` hold ``tokens`` tokens; what it has stays where it is."""
        owned = self._owned[request]
        wanted = blocks_for(tokens, self.block_size)
        if wanted > self.table.shape[1]:
            raise ValueError(
                f"tokens: got {tokens}, "
                f"allowed: at most {self.table.shape[1] * self.block_size}, a block table row's worth"
            )
        if wanted > len(owned):
            fresh = self.pool.take(wanted - len(owned))
            self.table[request, len(owned) : wanted] = torch.tensor(fresh, dtype=torch.int32, device="cpu")
            owned.extend(fresh)

    def release(self, request: int) -> None:
        """Return everything ``request`` holds."""
        self.pool.give_back(self._owned[request])
        self._owned[request] = []
        self.table[request] = -1


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
