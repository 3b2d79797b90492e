"""What a preempted request had on the device: taken to the host, and put back into whatever row and blocks it gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparse_attn.generation.cache_rows import paged, put_back, ringed, take_out
from sparse_attn.generation.loop import DecodeRows
from sparse_attn.generation.model import AnyCaches
from sparse_attn.generation.requests import Preempted
from sparse_attn.generation.sampling import Draws


def preempt(loop: DecodeRows, caches: AnyCaches, row: int, blocks: Sequence[int], length: int) -> Preempted:
    """Copies on the host of what ``row`` and its ``blocks`` hold, which may be read once the current stream has passed
    here. length: the host's bound on its tokens."""
    state, known = loop.state, loop.known
    counts = None if state.draws is None else state.draws.counts
    wanted = dict(token=state.tokens, seq_len=state.seq_lens, counts=counts, known=known)
    names = [name for name, value in wanted.items() if value is not None]
    kept: dict[str, Any] = dict.fromkeys(wanted) | dict(
        zip(names, take_out([value for value in wanted.values() if value is not None], [row]))
    )
    return Preempted(length, take_out(paged(caches), blocks), take_out(ringed(caches), [row]), **kept)


def resume(
    preempted: Preempted,
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
    """Make ``row`` live as it was, in ``blocks``, as many as it had. The others: as DecodeRows.join takes them."""
    put_back(paged(caches), blocks, preempted.blocks)
    put_back(ringed(caches), [row], preempted.rings)
    loop.join(
        [row], preempted.token, preempted.seq_len, block_table, rings, seed,
        draws if preempted.counts is None else draws._replace(counts=preempted.counts),
        ends=ends, known=None if preempted.known is None else preempted.known[:, : loop.max_context],
    )  # fmt: skip
