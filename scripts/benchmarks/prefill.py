"""Sparse attention of a prefill chunk over dense bf16 rows, beside FlashMLA's sparse_fwd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.checks import check_attention
from benchmarks.inputs import D_V, distinct_rows, normal
from benchmarks.registry import Record, suite
from benchmarks.run import Run
from sparse_attn.ops.attention import sparse_attn_prefill
from sparse_attn.ops.ragged import build_ragged_indices_from_dense
from sparse_attn.testing.compare import PREFILL_LSE, PREFILL_OUT

TOKENS, TINY_TOKENS = 4096, 9


class Case(NamedTuple):
    d_qk: int
    heads: int
    top_k: int
    rows: int
    sink: bool = False
    lengths: bool = False  # per-row lengths, uniform in [128, top_k]


V32 = [Case(576, heads, 2048, rows) for heads in (128, 64) for rows in (8192, 32768, 131072)]
V32 += [Case(576, 128, 2048, 32768, lengths=True)]
V4 = [Case(512, heads, k, rows, sink=True) for heads, k in ((64, 640), (128, 1152)) for rows in (8192, 32768, 65536)]
V4 += [Case(512, heads, k, 32768, sink=True) for heads, k in ((128, 640), (64, 1152), (64, 512), (128, 1024))]
V4 += [Case(512, heads, k, 32768, sink=True, lengths=True) for heads, k in ((64, 640), (128, 1152))]


@suite("prefill_v32")
def prefill_v32(run: Run) -> Iterator[Record]:
    "bf16 sparse_attn_prefill, 4096 tokens, 576/512, top-k 2048: DeepSeek-V3.2."
    for case in run.pick(V32, [Case(576, 4, 128, 300), Case(576, 4, 160, 300, lengths=True)]):
        yield _measure(run, case)


@suite("prefill_v4")
def prefill_v4(run: Run) -> Iterator[Record]:
    "bf16 sparse_attn_prefill, 4096 tokens, 512/512 with a sink: DeepSeek-V4."
    for case in run.pick(V4, [Case(512, 4, 128, 300, sink=True), Case(512, 4, 160, 300, sink=True, lengths=True)]):
        yield _measure(run, case)


def _measure(run: Run, case: Case) -> Record:
    tokens, heads, top_k = run.pick(TOKENS, TINY_TOKENS), case.heads, case.top_k
    q = normal(tokens, heads, case.d_qk, device=run.device)
    kv = normal(case.rows, case.d_qk, device=run.device)
    dense = distinct_rows(tokens, case.rows, top_k, run.device)
    lengths = sink = None
    if case.lengths:
        lengths = torch.randint(128, top_k + 1, (tokens,), device=run.device, dtype=torch.int32)
    if case.sink:  # about as heavy as the keys together
        sink = torch.randn(heads, device=run.device) + 6
    scale = case.d_qk**-0.5
    options = {"scale": scale, "d_v": D_V, "sink": sink}
    ragged = build_ragged_indices_from_dense(dense, lengths, num_rows=case.rows)

    def ours(q):
        return sparse_attn_prefill(q, kv, ragged, **options)

    def reference(q, rows):
        few = None if lengths is None else lengths[rows]
        some = build_ragged_indices_from_dense(dense[rows], few, impl="reference")
        return sparse_attn_prefill(q[rows], kv, some, **options, impl="reference")

    def theirs(q):
        return run.peers.sparse_prefill(q, kv, dense, scale, sink, lengths)

    check_attention(q, ours, reference, run.peers and theirs, (PREFILL_OUT, PREFILL_LSE))
    pairs = tokens * top_k if lengths is None else int(lengths.sum())
    floor = run.floor(
        flops=2 * pairs * heads * (case.d_qk + D_V),
        nbytes=2 * (q.numel() + kv.numel() + tokens * heads * D_V) + 4 * pairs,
    )
    name = f"heads {heads}, top-k {top_k}, rows {case.rows}{', lengths' if case.lengths else ''}"
    calls, peer_calls = [lambda: ours(q)], run.peers and [lambda: theirs(q)]
    return run.compare(name, calls, "FlashMLA sparse_fwd", peer_calls, floor, target_ms=20, rest_s=0.4)
