"""Prefixes of prompts that requests may begin from: blocks, found by a hash of the tokens up to their end.

A block's key is a hash of all tokens from the first one to its end. Where a model has rings, its blocks alone do not
suffice: a request begins at a border whose rings were kept, too.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from sparse_attn.generation.blocks import BlockPool


class Prefixes:
    """Blocks kept for prompts to come. Each kept block has this cache as a holder; one without another is let go of
    when blocks run out, the one not used for longest first, and never before those that continue it.

    rings: ids of the rings that may hold the rings' content at a border; None: the model has no rings, and every border
    will do.
    """

    def __init__(self, pool: BlockPool, block_size: int, rings: Sequence[int] | None = None):
        self.pool, self.block_size = pool, block_size
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # blocks; what was not used for longest comes first
        self._borders: dict[bytes, int] = {}  # rings, by the key of the block that ends there
        self._rings = None if rings is None else list(rings)  # free ones

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def blocks(self) -> list[int]:
        """The kept blocks, least recently used first."""
        return list(self._kept.values())

    @property
    def rings(self) -> list[int]:
        """The rings in use."""
        return list(self._borders.values())

    def room(self) -> int:
        """Blocks that are free, or would be if everything that nobody else holds were let go of."""
        return len(self.pool) + sum(self.pool.holders(block) == 1 for block in self._kept.values())

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
        kept, most, blocks = self._kept, (len(tokens) - 1) // self.block_size, []
        if keys is None:
            keys = self.keys(tokens)
        for key in keys[:most]:
            if (block := kept.get(key)) is None:
                break
            blocks.append(block)
        usable = known = len(blocks)
        while usable and self._rings is not None and keys[usable - 1] not in self._borders:
            usable -= 1
        for key in reversed(keys[:known]):  # the first block last, so that it outlives those that continue it
            kept.move_to_end(key)
        del blocks[usable:]
        self.pool.share(blocks)
        return blocks, self._borders.get(keys[usable - 1]) if usable else None, known

    def keep(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Keep the whole blocks of ``tokens``, whose keys were written. blocks: those of the request, of which others
        with the same tokens may be kept already."""
        self.keep_keys(self.keys(tokens), blocks)

    def keep_keys(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """As ``keep``, of tokens whose whole blocks have ``keys``."""
        kept, pairs = self._kept, list(zip(keys, blocks))
        self.pool.share([block for key, block in pairs if key not in kept])
        for key, block in reversed(pairs):  # the first block last, as above
            if key in kept:
                kept.move_to_end(key)
            else:
                kept[key] = block

    def ring_for(self, tokens: Sequence[int]) -> int | None:
        """The ring to copy a request's own into, that has computed ``tokens``, whole blocks that are kept; None where
        it was kept before, or where there are no rings. The ring not used for longest is taken from its border."""
        keys = self.keys(tokens)
        return self.ring_at(keys[-1]) if keys else None

    def ring_at(self, key: bytes) -> int | None:
        """As ``ring_for``, of tokens whose last block has ``key``."""
        if self._rings is None or key not in self._kept or key in self._borders:
            return None
        if not self._rings:
            victim = next((key for key in self._kept if key in self._borders), None)
            if victim is None:
                return None
            self._rings.append(self._borders.pop(victim))
        ring = self._borders[key] = self._rings.pop()
        return ring

    def make_room(self, count: int) -> bool:
        """Let go of blocks that nobody else holds until ``count`` are free; False where there are too few, in which
        case all stay."""
        if count <= len(self.pool):
            return True
        alone = (key for key, block in self._kept.items() if self.pool.holders(block) == 1)
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
        self.pool.give_back([self._kept.pop(key)])
        if self._rings is not None and key in self._borders:
            self._rings.append(self._borders.pop(key))
