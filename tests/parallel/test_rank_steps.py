"""One process as a rank of several: what its steps send, and how often they compile. Collectives give back what this
rank sends, so its tokens mean nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compilations import ALONE, TOGETHER, Graphs, counts_behind, prompts_of, small
from support.processes import Grid, mesh_of_grid

from sparse_attn import Model, Sampling, generate
from sparse_attn.checkpoints.sharding import shard_params
from sparse_attn.framework.torch_private import TorchDispatchMode, all_gather, all_reduce, all_to_all, fake_processes
from sparse_attn.generation.batch import prepare
from sparse_attn.generation.loop import EagerDecode, LoopSettings
from sparse_attn.generation.steps import decode_step
from sparse_attn.mesh import Mesh
from sparse_attn.models.exchange import drafting_bytes, drafting_calls, step_bytes, step_calls
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.pipeline.parallel import rows
from sparse_attn.spec import preset

GRIDS = (Grid(tensor=2), Grid(tensor=2, expert=2), Grid(context=2), Grid(tensor=2, context=2, expert=4))
SHARING = (Grid(data=2, expert=2), Grid(tensor=2, data=2, expert=4))  # data ranks share experts


@pytest.fixture
def as_rank(request):
    """The mesh of rank 1 of a grid; no other process runs."""
    with fake_processes(1, request.param.size):
        yield mesh_of_grid(request.param)


class Sent(TorchDispatchMode):
    """Counts the collectives of this rank, and the bytes that it sends in them, taken for rings."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.nbytes = self.calls = 0
        self.sizes = {ranks.group: ranks.size for ranks in (mesh.tensor, mesh.context, mesh.expert_sum)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and "wait" not in func.name():
            size = self.sizes[args[-1]]
            own = args[0].numel() * args[0].itemsize
            if "all_to_all" in func.name():
                own //= size
            self.calls += 1
            self.nbytes += 2 * (size - 1) * own // size if "all_reduce" in func.name() else (size - 1) * own
        return out


def model_of(spec, mesh: Mesh, cache: str = "fp8") -> Model:
    params = shard_params(dict(random_params(spec, seed=1)), mesh)
    return Model(spec, params, cache_layouts(spec, cache), mesh=mesh)


@pytest.mark.parametrize("as_rank", GRIDS[:1], indirect=True, ids=str)
def test_collectives_give_back_what_is_sent(as_rank):
    sent, group = torch.arange(6.0).view(2, 3), as_rank.tensor.group
    junk = [torch.full((2, 3), torch.nan) for _ in range(8)]
    del junk
    assert torch.equal(all_to_all(sent, 2, group), sent) and torch.equal(all_reduce(sent, group), sent)
    assert torch.equal(all_gather(sent, 2, group), sent.repeat(2, 1))


@pytest.mark.parametrize("as_rank", GRIDS + SHARING, indirect=True, ids=str)
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_glm5", "tiny_v4"))
def test_a_step_sends_what_is_counted(name, as_rank):
    model, lengths = model_of(preset(name), as_rank), [300, 7, 150]
    block_size = 128 if name == "tiny_v4" else 16
    _, caches, state, _, max_context, _ = prepare(
        model, lengths, [length + 4 for length in lengths], block_size=block_size, prefill_tokens=64
    )
    with Sent(as_rank) as sent:
        decode_step(model, caches, state, Sampling(), max_context)
    sizes: dict[str, Any] = dict(max_context=max_context, block_size=block_size)
    counted = step_bytes(model.spec, as_rank, len(lengths), torch.float32, **sizes)
    assert sent.nbytes == sum(counted.values()), counted
    assert sent.calls == step_calls(model.spec, as_rank, len(lengths), **sizes)


@pytest.mark.few(2)
@pytest.mark.parametrize("as_rank", (GRIDS[0], GRIDS[3]), indirect=True, ids=str)
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_a_step_whose_rows_are_sharded_sends_what_is_counted(name, as_rank, monkeypatch):
    monkeypatch.setattr(rows, "SHARDED_KEYS", 1)
    test_a_step_sends_what_is_counted(name, as_rank)


@pytest.mark.few(3)
@pytest.mark.parametrize("drafts", (1, 3))
@pytest.mark.parametrize("as_rank", GRIDS + SHARING, indirect=True, ids=str)
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_glm5", "tiny_v4"))
def test_a_step_that_drafts_sends_what_is_counted(name, as_rank, drafts):
    params = shard_params(dict(random_params(preset(name), seed=1, mtp=True)), as_rank)
    model = Model(preset(name), params, cache_layouts(preset(name), "fp8"), mesh=as_rank)
    lengths, block_size = [300, 7, 150], 128 if name == "tiny_v4" else 16
    _, caches, state, _, max_context, _ = prepare(
        model, lengths, [length + 9 for length in lengths], block_size=block_size, prefill_tokens=64, next_n=drafts + 1
    )
    loop = EagerDecode(model, caches, LoopSettings(max_context, state.block_table.shape[1], (3,), speculate=drafts))
    loop.load(state.tokens, state.seq_lens, state.block_table, state.ring_table)
    with Sent(as_rank) as sent:
        loop.run(1)
    sizes: dict[str, Any] = dict(max_context=max_context, block_size=block_size)
    counted = step_bytes(model.spec, as_rank, 3 * (drafts + 1), torch.float32, **sizes)
    drafting = drafting_bytes(model.spec, as_rank, 3, drafts, torch.float32, **sizes)
    assert sent.nbytes == sum(counted.values()) + sum(drafting.values()), (counted, drafting)
    calls = step_calls(model.spec, as_rank, 3 * (drafts + 1), **sizes)
    assert sent.calls == calls + drafting_calls(model.spec, as_rank, 3, drafts, **sizes)


@pytest.mark.few(0)
@pytest.mark.parametrize(
    ("name", "as_rank"),
    (("tiny_v4", GRIDS[3]), ("tiny_v32", GRIDS[1]), ("tiny_glm5", GRIDS[3]), ("tiny_v4", GRIDS[2])),
    indirect=["as_rank"],
    ids=str,
)
def test_a_rank_compiles_as_often_as_one_process(name, as_rank, monkeypatch):
    """fullgraph, dynamic: prefill and decode once for one prompt, once for several."""
    torch.compiler.reset()
    spec, graphs = small(name), Graphs()
    model = model_of(spec, as_rank, "fp32")
    counts = counts_behind(model, graphs, monkeypatch, (*ALONE, *TOGETHER))
    assert counts == [2] * len(ALONE) + [4] * len(TOGETHER)
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("as_rank", GRIDS, indirect=True, ids=str)
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_a_rank_replays_what_it_captured(name, as_rank):
    """With collectives in the graph."""
    spec = small(name)
    params = shard_params(dict(random_params(spec, seed=1)), as_rank)
    model = Model(spec, params, cache_layouts(spec, "fp32"), mesh=as_rank).to("cuda")
    common = dict(max_new_tokens=6, block_size=32, prefill_tokens=64)
    want, found = (generate(model, prompts_of([90, 5]), graph=graph, **common) for graph in (False, True))
    assert found.tokens == want.tokens and found.graph_captures == 1
