"""What a preempted request had on the device: taken to the host, and put back into whatever row and blocks it gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparse_attn.generation.cache_rows import paged, put_back, ringed, take_out
from sparse_attn.generation.loop import DecodeRows
from sparse_attn.generation.model import AnyCaches
from sparse_attn.generation.requests import Parked
from sparse_attn.generation.sampling import Draws


def park(loop: DecodeRows, caches: AnyCaches, row: int, blocks: Sequence[int], length: int) -> Parked:
    """Copies on the host of what ``row`` and its ``blocks`` hold, which may be read once the current stream has passed
    here. length: the host's bound on its tokens."""
    state, known = loop.state, loop.known
    counts = None if state.draws is None else state.draws.counts
    wanted = dict(token=state.tokens, seq_len=state.seq_lens, counts=counts, known=known)
    names = [name for name, value in wanted.items() if value is not None]
    kept: dict[str, Any] = dict.fromkeys(wanted) | dict(
        zip(names, take_out([value for value in wanted.values() if value is not None], [row]))
    )
    return Parked(length, take_out(paged(caches), blocks), take_out(ringed(caches), [row]), **kept)


def unpark(
    parked: Parked,
    loop: DecodeRows,
    caches: AnyCaches,
    row: int,
    blocks: Sequence[int],
    block_table: torch.Tensor,
    rings: torch.Tensor | None,
    seed: torch.Tensor,
    draws: Draws,
    ends: torch.Tensor | None,
) -> None:
    """Make ``row`` live as it was, in ``blocks``, as many as were parked. The others: as DecodeRows.join takes them."""
    put_back(paged(caches), blocks, parked.blocks)
    put_back(ringed(caches), [row], parked.rings)
    loop.join(
        [row], parked.token, parked.seq_len, block_table, rings, seed,
        draws if parked.counts is None else draws._replace(counts=parked.counts),
        ends=ends, known=None if parked.known is None else parked.known[:, : loop.max_context],
    )  # fmt: skip
