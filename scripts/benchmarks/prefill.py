"""Sparse attention of a prefill chunk over dense bf16 rows, beside FlashMLA's sparse_fwd."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.checks import check_attention
from benchmarks.inputs import D_V, distinct_rows, normal
from benchmarks.peers import own_heads, padded_heads
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn import roofline
from sparse_attn.ops.attention.sparse import sparse_attn_prefill
from sparse_attn.ops.ragged.lists import build_ragged_indices_from_dense
from sparse_attn.testing.compare import PREFILL_LSE, PREFILL_OUT

TOKENS, TINY_TOKENS = 4096, 9
WINDOW = 128  # of V4's rows: the last tokens, each of which they see


class Case(NamedTuple):
    d_qk: int
    heads: int
    top_k: int
    rows: int
    sink: bool = False
    lengths: str = (
        ""  # of rows: "ragged", uniform in [128, top_k], or "prompt", what the tokens of one from its first on see
    )


V32 = [Case(576, heads, 2048, rows) for heads in (128, 64) for rows in (8192, 32768, 131072)]
V4 = [Case(512, heads, k, rows, sink=True) for heads, k in ((64, 640), (128, 1152)) for rows in (8192, 32768, 65536)]
V4 += [Case(512, heads, k, 32768, sink=True) for heads, k in ((128, 640), (64, 1152), (64, 512), (128, 1024))]
RAGGED = [Case(576, heads, 2048, 32768, lengths="ragged") for heads in (128, 64)]
RAGGED += [Case(512, heads, k, 32768, sink=True, lengths="ragged") for heads, k in ((64, 640), (128, 1152))]
PROMPT = [Case(576, heads, 2048, TOKENS, lengths="prompt") for heads in (128, 64)]
PROMPT += [Case(512, heads, k, TOKENS * 5 // 4, True, "prompt") for heads, k in ((64, 640), (128, 1152))]
FEW_HEADS = [Case(576, heads, 2048, 32768) for heads in (16, 32)] + [
    Case(512, heads, 640, 32768, True) for heads in (16, 32)
]
PORTABLE = [
    Case(576, 128, 2048, 32768),
    Case(576, 64, 2048, 32768),
    Case(512, 128, 1152, 32768),
    Case(512, 64, 640, 32768),
]


@suite("prefill_v32")
def prefill_v32(run: Run) -> Iterator[Record]:
    "bf16 sparse_attn_prefill, 4096 tokens, 576/512, top-k 2048: DeepSeek-V3.2."
    for case in run.pick(V32, [Case(576, 4, 128, 300)]):
        yield measure(run, case)


@suite("prefill_v4")
def prefill_v4(run: Run) -> Iterator[Record]:
    "bf16 sparse_attn_prefill, 4096 tokens, 512/512 with a sink: DeepSeek-V4."
    for case in run.pick(V4, [Case(512, 4, 128, 300, sink=True)]):
        yield measure(run, case)


@suite("prefill_ragged")
def prefill_ragged(run: Run) -> Iterator[Record]:
    "The same with rows of ragged length, uniform in [128, top-k]."
    tiny = [Case(576, 4, 160, 300, lengths="ragged"), Case(512, 4, 160, 300, sink=True, lengths="ragged")]
    for case in run.pick(RAGGED, tiny):
        yield measure(run, case)


@suite("prefill_prompt")
def prefill_prompt(run: Run) -> Iterator[Record]:
    "The same for a prompt's first 4096 tokens, which see no more keys than there are."
    tiny = [Case(576, 4, 160, 300, lengths="prompt"), Case(512, 4, 160, 300, sink=True, lengths="prompt")]
    for case in run.pick(PROMPT, tiny):
        yield measure(run, case)


@suite("prefill_few_heads")
def prefill_few_heads(run: Run) -> Iterator[Record]:
    "The same with 16 and 32 heads; the peer's queries are padded to the 64 it takes, outside of what is timed."
    for case in run.pick(FEW_HEADS, [Case(576, 2, 128, 300)]):
        yield measure(run, case)


@suite("prefill_portable")
def prefill_portable(run: Run) -> Iterator[Record]:
    "The portable kernel (us) beside the one that sparse_attn_prefill takes on this GPU (peer_us)."
    for case in run.pick(PORTABLE, [Case(576, 2, 128, 300)]):
        tokens, heads, top_k = run.pick(TOKENS, TINY_TOKENS), case.heads, case.top_k
        q = normal(tokens, heads, case.d_qk, device=run.device)
        kv = normal(case.rows, case.d_qk, device=run.device)
        ragged = build_ragged_indices_from_dense(distinct_rows(tokens, case.rows, top_k, run.device))
        arguments = (q, kv, *ragged, case.d_qk**-0.5, D_V, None)
        portable, chosen = _implementations(run)
        for got, want in zip(portable(*arguments), chosen(*arguments)):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-3)
        floor = run.floor(roofline.attention(q.shape, D_V, tokens * top_k, kv.nbytes))
        name = f"heads {heads}, d {case.d_qk}, top-k {top_k}, rows {case.rows}"
        ours, theirs = [lambda: portable(*arguments)], None if run.dry else [lambda: chosen(*arguments)]
        yield run.compare(name, ours, "this GPU's kernel", theirs, floor, target_ms=20, rest_s=0.4)


def _implementations(run: Run):
    """(portable, what this GPU takes) of sparse_attn_prefill; dry, the reference twice."""
    from sparse_attn.ops.attention.sparse import reference

    if run.dry:
        return reference.sparse_attn_prefill, reference.sparse_attn_prefill
    from sparse_attn.ops.attention.sparse import launch

    return functools.partial(launch.sparse_attn_prefill, kernel="portable"), launch.sparse_attn_prefill


def measure(run: Run, case: Case) -> Record:
    tokens, heads, top_k = run.pick(TOKENS, TINY_TOKENS), case.heads, case.top_k
    q = normal(tokens, heads, case.d_qk, device=run.device)
    kv = normal(case.rows, case.d_qk, device=run.device)
    dense = distinct_rows(tokens, case.rows, top_k, run.device)
    lengths, sink = _lengths(case, tokens, run.device), None
    if case.sink:  # about as heavy as the keys together
        sink = torch.randn(heads, dtype=torch.float32, device=run.device) + 6
    scale = case.d_qk**-0.5
    options = {"scale": scale, "d_v": D_V, "sink": sink}
    ragged = build_ragged_indices_from_dense(dense, lengths, num_rows=case.rows)

    def ours(q):
        return sparse_attn_prefill(q, kv, ragged, **options)

    def reference(q, rows):
        few = None if lengths is None else lengths[rows]
        some = build_ragged_indices_from_dense(dense[rows], few, impl="reference")
        return sparse_attn_prefill(q[rows], kv, some, **options, impl="reference")

    their_sink = sink if sink is None else padded_heads(sink, dim=0)

    def theirs(q):
        return run.peers.sparse_prefill(q, kv, dense, scale, their_sink, lengths)

    def their_own_heads(q):
        return own_heads(theirs(padded_heads(q)), heads)

    check_attention(q, ours, reference, run.peers and their_own_heads, (PREFILL_OUT, PREFILL_LSE))
    their_q = padded_heads(q)
    pairs = tokens * top_k if lengths is None else int(lengths.sum())
    floor = run.floor(roofline.attention(q.shape, D_V, pairs, kv.nbytes))
    shape = f", d {case.d_qk}, {'lengths' if case.lengths == 'ragged' else case.lengths}" if case.lengths else ""
    name = f"heads {heads}, top-k {top_k}, rows {case.rows}{shape}"
    calls, peer_calls = [lambda: ours(q)], run.peers and [lambda: theirs(their_q)]
    return run.compare(name, calls, "FlashMLA sparse_fwd", peer_calls, floor, target_ms=20, rest_s=0.4)


def _lengths(case: Case, tokens: int, device: torch.device) -> torch.Tensor | None:
    if case.lengths == "ragged":
        return torch.randint(128, case.top_k + 1, (tokens,), device=device, dtype=torch.int32)
    if case.lengths == "prompt":
        seen = torch.arange(1, tokens + 1, device=device, dtype=torch.int32)
        if case.sink:  # DeepSeek-V4: its window, and of all before it one compressed key for every four tokens
            return seen.clamp(max=WINDOW) + (seen // 4).clamp(max=case.top_k - WINDOW)
        return seen.clamp(max=case.top_k)
    return None
