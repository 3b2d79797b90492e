"""Sparse attention of a decode step with the heads one GPU of several has, L2-cold, beside FlashMLA's padded."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import decode, windowed
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run


@suite("decode_few_heads")
def decode_few_heads(run: Run) -> Iterator[Record]:
    "sparse_attn_decode with 8, 16, 32 heads, V3.2's cache and V4's two; the peer's queries are padded to 64, untimed."
    for part in (decode.few_heads, windowed.few_heads):
        yield from part(run)
