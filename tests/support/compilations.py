"""What counts Dynamo's graphs, and batches that may make it compile once more."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from sparse_attn import generate
from sparse_attn.generation.text import shipped_text
from sparse_attn.spec import CompressedSpec, preset

TEXT = list(shipped_text().encode())


class Graphs:
    """A backend that runs Dynamo's graphs as they are, and counts them."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs, **options):
        self.count += 1
        return graph


def small(name: str, layers: int = 2):
    """A preset's first layers: a dense and a sparse one, or one of each kind."""
    spec = preset(name)
    if isinstance(spec, CompressedSpec):
        kinds = ("indexed", "full")[:layers]
        return replace(spec, num_layers=layers, layer_kinds=kinds, full_ratio=16, hash_layers=(True, False)[:layers])
    return replace(
        spec, num_layers=layers, moe_layers=(False, True)[:layers], index_layers=(True, spec.index_layers[-1])[:layers]
    )


def compiled_by(graphs):
    return functools.partial(torch.compile, backend=graphs)


def prompts_of(lengths):
    return [TEXT[7 * row : 7 * row + length] for row, length in enumerate(lengths)]


def counts_behind(model, graphs, monkeypatch, batches):
    """How often Dynamo has compiled behind each of ``batches`` of lengths, whose tokens are those of eager code."""
    counts = []
    for lengths in batches:
        common = dict(max_new_tokens=3, block_size=32, prefill_tokens=201)
        want = generate(model, prompts_of(lengths), **common)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", compiled_by(graphs))
            found = generate(model, prompts_of(lengths), compile=True, **common)
        assert found.tokens == want.tokens
        counts.append(graphs.count)
    return counts


# One token, two, as many as a block, as bytes of a cache's row, as heads; beyond top-k; batches as large as a block and
# as a block table is wide; one prompt of a batch alone in a step.
ALONE = ([1], [2], [300], [64], [100], [8])
TOGETHER = ([1, 1], [2, 3], [200, 150], [1, 90], [100, 100], [64] * 4, [8] * 8, [5] * 32)
