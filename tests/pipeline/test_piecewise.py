"""Callers who compile or capture a part of a step alone: per layer, or everything but attention."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from support.steps import MAX_CONTEXT, decode_state, model_of, plan_of

from sparse_attn import workspace
from sparse_attn.framework.torch_private import counters, mark_sizes
from sparse_attn.mesh import ONE_RANK
from sparse_attn.models.mla import attention
from sparse_attn.models.moe import gated_mlp, moe
from sparse_attn.models.norms import rms_norm
from sparse_attn.models.step import ModelStep
from sparse_attn.pipeline.options import Options

LAYERS = 3


def layers_of(model):
    """Each layer's weights by the same names, so that one compiled function serves them all."""
    found = []
    for layer in range(model.spec.num_layers):
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): value for name, value in model.params.items() if name.startswith(prefix)}
        found.append(own | {"rope": model.params["rope"]})
    return found


class Pieces(torch.nn.Module):
    """A user's own model around our attention."""

    def __init__(self, model):
        super().__init__()
        self.spec, self.layouts = model.spec, model.layouts

    def attend(self, weights, hidden, kv_cache, index_cache, plan):
        normed = rms_norm(hidden, weights["input_norm"], self.spec.rms_eps)
        step = ModelStep(plan, self.layouts, Options(logits_bytes=1 << 20), ONE_RANK)
        out, _ = attention(normed, weights, "", self.spec, kv_cache, index_cache, None, step)
        return hidden + out

    def feed(self, weights, hidden):
        normed = rms_norm(hidden, weights["post_norm"], self.spec.rms_eps)
        if "moe.gate" in weights:
            return hidden + moe(normed, weights, "moe.", self.spec.moe, options=Options())
        return hidden + gated_mlp(normed, weights["mlp.gate_up"], weights["mlp.down"])

    def layer(self, weights, hidden, kv_cache, index_cache, plan):
        return self.feed(weights, self.attend(weights, hidden, kv_cache, index_cache, plan))


def logits_of(model, hidden):
    hidden = rms_norm(hidden, model.params["norm"], model.spec.rms_eps)
    return F.linear(hidden, model.params["lm_head"]).float()


def world(device, batch=3):
    model = model_of("tiny_v32", "fp8", device, layers=LAYERS)
    state = decode_state(batch, MAX_CONTEXT, device)
    caches = [
        model.allocate_caches(batch * state.block_table.shape[1], 16, requests=batch, step_rows=1) for _ in range(2)
    ]
    return model, Pieces(model), layers_of(model), state, caches


def test_one_compiled_layer_serves_all():
    """The dense layer and the routed ones are a compilation each, whatever the batch; decode at any length."""
    torch.compiler.reset()
    model, pieces, layers, *_ = world("cpu")
    compiled = torch.compile(pieces.layer, fullgraph=True, dynamic=True, backend="aot_eager")
    counters().clear()
    for batch, length in ((3, 40), (7, MAX_CONTEXT), (5, 1)):
        state = decode_state(batch, length)
        caches = [
            model.allocate_caches(batch * state.block_table.shape[1], 16, requests=batch, step_rows=1) for _ in range(2)
        ]
        plan, hidden = plan_of(model, state), F.embedding(state.tokens, model.params["embed"])
        for weights, kv, index in zip(layers, *caches[0]):
            for value in weights.values():
                mark_sizes(value, static=range(value.dim()))
            hidden = compiled(weights, hidden, kv, index, plan)
        want = model(state.tokens, caches[1], plan)
        alive = state.seq_lens > 0
        torch.testing.assert_close(logits_of(model, hidden)[alive], want[alive], atol=1e-5, rtol=1e-5)
        assert all(torch.equal(a, b) for one, two in zip(*caches) for a, b in zip(one, two))
    assert counters()["stats"]["unique_graphs"] <= 4


def warmed(stream, owner, run):
    """``run`` once on ``stream`` with a workspace that may grow, which it then must not."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), workspace.use(owner):
        run()
    owner.lock()


@pytest.mark.gpu
@pytest.mark.parametrize("part", ("layer", "feed"))
def test_captured_piece_by_piece(part):
    """A graph per layer out of one pool and one workspace, or graphs of all but attention, which runs between them."""
    model, pieces, layers, state, (mine, theirs) = world("cuda")
    owner, stream, pool = workspace.Workspace((0, 0), "cuda"), torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    plan = plan_of(model, state)
    hidden = F.embedding(state.tokens, model.params["embed"])
    model(state.tokens, theirs, plan)  # what the warm-up writes

    def arguments(layer):
        return mine.kv[layer], mine.index[layer], plan

    def whole():
        inner = hidden
        for layer, weights in enumerate(layers):
            inner = pieces.layer(weights, inner, *arguments(layer))

    warmed(stream, owner, whole)
    graphs, entries, exits = [], [], []
    for layer, weights in enumerate(layers):
        entries.append(torch.zeros_like(hidden))
        graphs.append(torch.cuda.CUDAGraph())
        with workspace.use(owner), torch.cuda.graph(graphs[-1], pool=pool, stream=stream):
            if part == "layer":
                exits.append(pieces.layer(weights, entries[-1], *arguments(layer)))
            else:
                exits.append(pieces.feed(weights, entries[-1]))

    for length in (1, 2, 100, MAX_CONTEXT):
        state.seq_lens.copy_(torch.tensor([length, 0, max(1, length - 7)]))
        for old, new in zip(plan, plan_of(model, state)):
            if isinstance(old, torch.Tensor):
                old.copy_(new)
        inner = hidden
        with workspace.use(owner) if part == "feed" else contextlib.nullcontext():
            for layer, weights in enumerate(layers):
                if part == "feed":
                    inner = pieces.attend(weights, inner, *arguments(layer))
                entries[layer].copy_(inner)
                graphs[layer].replay()
                inner = exits[layer]
        want = model(state.tokens, theirs, plan)
        assert torch.equal(logits_of(model, inner)[::2], want[::2])
        assert all(torch.equal(a, b) for a, b in zip(mine.kv, theirs.kv))
