"""Prefixes of prompts that requests may begin from: blocks, found by a hash of the tokens up to their end.

A block's key is a hash of all tokens from the first one to its end. Where a model has rings, its blocks alone do not
suffice: a request begins at a border whose rings were kept, too.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from sparse_attn.runtime.paging import BlockPool


@dataclass
class _Kept:
    block: int
    ring: int | None = None


class Prefixes:
    """Blocks kept for prompts to come. Each kept block has this cache as a holder; one without another is let go of
    when blocks run out, the one not used for longest first, and never before those that continue it.

    rings: ids of the rings that may hold the rings' content at a border; None: the model has no rings, and every border
    will do.
    """

    def __init__(self, pool: BlockPool, block_size: int, rings: Sequence[int] | None = None):
        self.pool, self.block_size = pool, block_size
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # what was not used for longest comes first
        self._rings = None if rings is None else list(rings)  # free ones

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def blocks(self) -> list[int]:
        """The kept blocks, least recently used first."""
        return [kept.block for kept in self._kept.values()]

    @property
    def rings(self) -> list[int]:
        """The rings in use."""
        return [kept.ring for kept in self._kept.values() if kept.ring is not None]

    def room(self) -> int:
        """Blocks that are free, or would be if everything that nobody else holds were let go of."""
        return len(self.pool) + sum(self.pool.holders(kept.block) == 1 for kept in self._kept.values())

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """The keys of the whole blocks of ``tokens``. A caller who keeps them spares the hashing of later calls."""
        ids, size, passed, keys = array("I", tokens).tobytes(), 4 * self.block_size, hashlib.blake2b(digest_size=32), []
        for start in range(0, len(ids) - size + 1, size):
            passed.update(ids[start : start + size])
            keys.append(passed.digest())
        return keys

    def begin(self, tokens: Sequence[int], *, keys: Sequence[bytes] | None = None) -> tuple[list[int], int | None, int]:
        """(blocks, ring, known) of the longest usable prefix of ``tokens``. The caller gets a hold of each block.

        ring: what to copy into the request's own before its first step; None without rings or without blocks. known:
        how many blocks of ``tokens`` are kept, usable or not. At least one token is left to compute.
        """
        found, usable = [], 0
        for key in islice(self.keys(tokens) if keys is None else keys, (len(tokens) - 1) // self.block_size):
            if key not in self._kept:
                break
            found.append(key)
            if self._rings is None or self._kept[key].ring is not None:
                usable = len(found)
        self._touch(found)
        used = [self._kept[key] for key in found[:usable]]
        blocks = [kept.block for kept in used]
        self.pool.share(blocks)
        return blocks, used[-1].ring if used else None, len(found)

    def keep(self, tokens: Sequence[int], blocks: Sequence[int], *, keys: Sequence[bytes] | None = None) -> None:
        """Keep the whole blocks of ``tokens``, whose keys were written. blocks: those of the request, of which others
        with the same tokens may be kept already."""
        keys = (self.keys(tokens) if keys is None else keys)[: len(tokens) // self.block_size]
        for key, block in zip(keys, blocks):
            if key not in self._kept:
                self.pool.share([block])
                self._kept[key] = _Kept(block)
        self._touch(keys)

    def ring_for(self, tokens: Sequence[int], *, keys: Sequence[bytes] | None = None) -> int | None:
        """The ring to copy a request's own into, that has computed ``tokens``, whole blocks that are kept; None where
        it was kept before, or where there are no rings. The ring not used for longest is taken from its border."""
        keys = (self.keys(tokens) if keys is None else keys)[: len(tokens) // self.block_size]
        key = keys[-1] if keys else None
        if self._rings is None or key is None or key not in self._kept or self._kept[key].ring is not None:
            return None
        if not self._rings:
            victim = next((kept for kept in self._kept.values() if kept.ring is not None), None)
            if victim is None or victim.ring is None:
                return None
            self._rings.append(victim.ring)
            victim.ring = None
        self._kept[key].ring = self._rings.pop()
        return self._kept[key].ring

    def make_room(self, count: int) -> bool:
        """Let go of blocks that nobody else holds until ``count`` are free; False where there are too few, in which
        case all stay."""
        if count <= len(self.pool):
            return True
        alone = (key for key, kept in self._kept.items() if self.pool.holders(kept.block) == 1)
        wanted = count - len(self.pool)
        if len(chosen := list(islice(alone, wanted))) < wanted:
            return False
        for key in chosen:
            self._let_go(key)
        return True

    def clear(self) -> None:
        """Let go of everything."""
        for key in list(self._kept):
            self._let_go(key)

    def _let_go(self, key: bytes) -> None:
        kept = self._kept.pop(key)
        self.pool.give_back([kept.block])
        if kept.ring is not None and self._rings is not None:
            self._rings.append(kept.ring)

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # the first block last, so that it outlives those that continue it
            self._kept.move_to_end(key)
