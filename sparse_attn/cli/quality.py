"""How well a checkpoint reads in every way to run it: bits per byte of held-out text, and values retrieved by their
keys.

All ways predict the same tokens from the same true tokens before them. So only their arithmetic makes their numbers
differ. A value counts as retrieved when every token of it is the likeliest one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from sparse_attn import workspace
from sparse_attn.cli.documents import Document
from sparse_attn.generation.batch import Batch, compiled, locked_workspace, prepare, scratch_size
from sparse_attn.generation.graph import DecodeGraph
from sparse_attn.generation.model import Model
from sparse_attn.generation.sampling import Sampling
from sparse_attn.generation.steps import decode_plan, prefill_step, slot_block
from sparse_attn.generation.text import Tokenizer
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.weight_layout import Weight

PREFILL_TOKENS = 2048
TOGETHER = 16  # documents that run as one batch


class Way(NamedTuple):
    """A way to run a model. cache: "plain" (the weights' dtype) or "fp8". index: of index keys, where not as cache.
    dense: attend to everything. prefill_tokens: a step's. decode: feed what is scored token by token, by replays of a
    captured step with graph. gpu: needs one."""

    name: str
    cache: str
    impl: str = "auto"
    dense: bool = False
    compile: bool = False
    prefill_tokens: int = PREFILL_TOKENS
    decode: bool = False
    graph: bool = False
    gpu: bool = False
    index: str | None = None


WAYS = {
    way.name: way
    for way in (
        Way("dense", "plain", "reference", dense=True),
        Way("sparse", "plain", "reference"),
        Way("triton", "plain", "triton", gpu=True),
        Way("fp8", "fp8"),
        Way("mxfp4", "fp8", index="mxfp4"),
        Way("compiled", "fp8", compile=True),
        Way("chunked", "fp8", prefill_tokens=96),
        Way("decoded", "fp8", decode=True),
        Way("replayed", "fp8", decode=True, graph=True, gpu=True),
    )
}  # fmt: skip
MEANING = {
    "dense": "attention to everything, unquantised caches",
    "sparse": "the reference, unquantised caches",
    "triton": "Triton, unquantised caches",
    "fp8": "fp8 caches",
    "mxfp4": "fp8 caches, MXFP4 index keys",
    "compiled": "fp8 caches, torch.compile",
    "chunked": f"fp8 caches, prefilled {WAYS['chunked'].prefill_tokens} tokens a step",
    "decoded": "fp8 caches, token by token",
    "replayed": "fp8 caches, token by token, a captured graph replayed",
}


class Encoded(NamedTuple):
    """A document's ids, [start, stop) of its scored pieces among them, and how many bytes those are."""

    ids: list[int]
    spans: list[tuple[int, int]]
    scored_bytes: int


class Quality(NamedTuple):
    """bits_per_byte: of the texts' tails, None without texts. right, asked: values. seconds: what it took."""

    bits_per_byte: float | None
    right: int
    asked: int
    seconds: float

    @property
    def retrieval(self) -> float | None:
        """The share of values that were retrieved."""
        return self.right / self.asked if self.asked else None


def encode(document: Document, tokenizer: Tokenizer) -> Encoded:
    """A document piece by piece, so that no token reaches over the border of what is scored."""
    ids, spans, scored = [], [], set(document.scored)
    for place, piece in enumerate(document.pieces):
        start = len(ids)
        ids += tokenizer.encode(piece)
        if place in scored:
            spans.append((start, len(ids)))
    return Encoded(ids, spans, sum(len(document.pieces[place]) for place in document.scored))


def measure(
    spec: Spec | CompressedSpec,
    params: Mapping[str, Weight],
    way: Way,
    texts: Sequence[Encoded],
    asked: Sequence[Encoded],
    *,
    prefill_activations: str = "exact",
    mesh: Mesh = ONE_RANK,
) -> Quality:
    """Run ``texts`` and ``asked`` the way that ``way`` says. prefill_activations: as Model takes it. mesh: whose part
    of the weights ``params`` are."""
    began, longest = time.perf_counter(), max(len(document.ids) for document in (*texts, *asked))
    if way.dense:
        spec = replace(spec, index=replace(spec.index, top_k=longest))
    embed = params["embed"]
    assert isinstance(embed, torch.Tensor)
    kind = {torch.float32: "fp32", torch.bfloat16: "bf16"}[embed.dtype] if way.cache == "plain" else way.cache
    model = Model(
        spec, params, cache_layouts(spec, kind, index_kind=way.index), way.impl,
        prefill_activations=prefill_activations, mesh=mesh,
    )  # fmt: skip
    bits = None
    if texts:
        nll = sum(losses[start - 1 : stop - 1].sum().item() for document, (losses, _) in _scored(model, texts, way)
                  for start, stop in document.spans)  # fmt: skip
        bits = nll / math.log(2) / sum(document.scored_bytes for document in texts)
    values = [bool(hits[start - 1 : stop - 1].all()) for document, (_, hits) in _scored(model, asked, way)
              for start, stop in document.spans]  # fmt: skip
    return Quality(bits, sum(values), len(values), time.perf_counter() - began)


def _scored(model: Model, documents: Sequence[Encoded], way: Way):
    for first in range(0, len(documents), TOGETHER):
        some = documents[first : first + TOGETHER]
        yield from zip(some, score(model, some, way))


@torch.no_grad()
def score(model: Model, documents: Sequence[Encoded], way: Way) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(nll fp32, whether it was the likeliest) of each document's tokens but the first, on the CPU."""
    whole = [document.ids for document in documents]
    steps = 0
    if way.decode:
        steps = max(len(document.ids) - document.spans[0][0] for document in documents)
        steps = min(steps, min(map(len, whole)) - 2)
    fed = [ids[: len(ids) - 1 - steps] for ids in whole]  # the last token is never fed
    batch = prepare(
        model, [len(ids) for ids in fed], [len(ids) - 1 for ids in whole], block_size=None,
        prefill_tokens=way.prefill_tokens,
    )  # fmt: skip
    run = compiled(model, batch.caches) if way.compile else model
    parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in whole]

    with workspace.use(locked_workspace(model, batch.bounds)):
        for spans in batch.chunks:
            logits = prefill_step(
                run, fed, spans, batch.tables, batch.caches, batch.state, Sampling(), batch.max_context
            )
            for span, rows in zip(spans, logits.split([span.stop - span.start for span in spans])):
                parts[span.request].append(_compared(rows, whole[span.request][span.start + 1 : span.stop + 1]))
        if steps:
            feed = _Graph(model, run, batch) if way.graph else _Eager(model, run, batch)
            for step in range(steps):
                at = [len(ids) + step for ids in fed]
                logits = feed([ids[place] for ids, place in zip(whole, at)], [place + 1 for place in at])
                for mine, row, ids, place in zip(parts, logits, whole, at):
                    mine.append(_compared(row.unsqueeze(0), ids[place + 1 : place + 2]))
    columns = (zip(*mine) for mine in parts)
    return [(torch.cat(losses).cpu(), torch.cat(best).cpu()) for losses, best in columns]


def _compared(logits: torch.Tensor, targets: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = torch.tensor(targets, dtype=torch.int64, device=logits.device)
    return torch.nn.functional.cross_entropy(logits, wanted, reduction="none"), logits.argmax(-1) == wanted


def _on_host(values: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


class _Eager:
    """Feeds one token per request; logits [B, vocab]."""

    def __init__(self, model: Model, run: Model, batch: Batch):
        self.model, self.run, self.batch = model, run, batch

    def __call__(self, tokens: list[int], seq_lens: list[int]) -> torch.Tensor:
        state, caches = self.batch.state, self.batch.caches
        state.tokens.copy_(_on_host(tokens, torch.int64))
        state.seq_lens.copy_(_on_host(seq_lens, torch.int32))
        plan = decode_plan(state, slot_block(caches, self.model.mesh), self.batch.max_context, self.model.impl)
        return self.run(state.tokens, caches, plan)


class _Graph:
    """The same by replays of a captured step."""

    def __init__(self, model: Model, run: Model, batch: Batch):
        self.batch = batch
        bounds = replace(batch.bounds, max_batched_tokens=0, kv_rows=0)
        self.graph = DecodeGraph(
            run, batch.caches, max_context=batch.max_context, max_blocks=batch.state.block_table.shape[1],
            buckets=(batch.bounds.max_batch,), workspace_size=scratch_size(model, bounds), impl=model.impl,
            keep_logits=True,
        )  # fmt: skip

    def __call__(self, tokens: list[int], seq_lens: list[int]) -> torch.Tensor:
        state = self.batch.state
        self.graph.load(
            _on_host(tokens, torch.int64), _on_host(seq_lens, torch.int32), state.block_table, state.ring_table
        )
        self.graph.run(1)
        assert self.graph.logits is not None  # keep_logits
        return self.graph.logits[: len(tokens)]
