"""Routed experts that data ranks share: rows there and back, a layer of them, requests of several schedulers.

Ranks are threads here; test_processes runs processes."""

from __future__ import annotations

import pytest
import torch
from support.rank_threads import over_mesh
from support.steps import small

from sparse_attn import Batching, Model, generate
from sparse_attn.checkpoints.sharding import shard_params
from sparse_attn.mesh import ONE_RANK, Mesh, planned_mesh
from sparse_attn.models.moe import moe
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.pipeline.options import Options
from sparse_attn.pipeline.parallel.experts import NOBODY, combine, dispatch, dispatch_bytes, dispatched_rows, way_of
from sparse_attn.spec import CompressedSpec, preset

GRIDS = (
    dict(data=2, expert=2), dict(data=4, expert=2), dict(tensor=2, data=2, expert=4), dict(context=3, data=2, expert=6),
    dict(tensor=2, context=2, data=2, expert=8),
)  # fmt: skip


def rows_of(mesh: Mesh, rows: int, width: int) -> torch.Tensor:
    """Of a data rank's step: small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(mesh.data.rank)
    return torch.randint(-8, 8, (rows, width), generator=generator).float()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("rows", (1, 2, 7))
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_rows_go_to_all_and_come_back_as_sums(sizes, rows, dtype):
    def there_and_back(mesh: Mesh):
        x = rows_of(mesh, rows, 6).to(dtype)
        weights, ids = rows_of(mesh, rows, 3), rows_of(mesh, rows, 3).int().abs()
        all_x, all_weights, all_ids = dispatch(x, weights, ids, mesh)
        assert all_x.shape == (dispatched_rows(rows, mesh), 6) and all_x.dtype == dtype
        seen = [value[all_ids[:, 0] != NOBODY].float() for value in (all_x, all_weights, all_ids)]
        return mesh, x, torch.cat(seen, 1), combine(all_x * (mesh.expert.rank + 1), rows, mesh)

    found = over_mesh(there_and_back, **sizes)
    size = found[0][0].expert.size
    for mesh, x, _, back in found:
        assert torch.equal(back, x * (size * (size + 1) // 2)), mesh
    for start in range(0, len(found), size):
        first, *others = found[start : start + size]
        groups = [one[1].float() for one in found[start : start + size : first[0].replica_size]]
        assert all(torch.equal(one[2], first[2]) for one in others) and torch.equal(first[2][:, :6], torch.cat(groups))


def test_rows_of_padding_have_no_expert():
    def ids_of(mesh: Mesh):
        x, ids = rows_of(mesh, 3, 4), torch.full((3, 2), 5, dtype=torch.int32)
        return dispatch(x, torch.ones(3, 2), ids, mesh)[2].sort(0).values.tolist()

    assert over_mesh(ids_of, tensor=2, data=2, expert=4) == [[[-1, -1]] * 2 + [[5, 5]] * 6] * 4


def test_the_way_follows_from_the_mesh_and_a_lone_row():
    alone, wide = planned_mesh(data=8, expert=8), planned_mesh(tensor=4, data=2, expert=8)
    assert [way_of(rows, alone) for rows in (1, 2, 64)] == ["exchange"] * 3
    assert [way_of(rows, wide) for rows in (1, 2, 64)] == ["sum", "exchange", "exchange"]
    assert way_of(64, ONE_RANK) == "replicated" and dispatch_bytes(64, 7168, 8, 2, ONE_RANK) == 0
    for mesh in (alone, wide):
        both = [dispatch_bytes(64, 7168, 8, 2, mesh, way) for way in ("exchange", "sum")]
        assert dispatch_bytes(64, 7168, 8, 2, mesh) == both[0] < both[1]


@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
@pytest.mark.parametrize("sizes", GRIDS[:3], ids=str)
def test_a_layer_gives_what_one_process_gives(sizes, name):
    spec = preset(name)
    params = random_params(spec, seed=0)
    layer = next(one for one in range(spec.num_layers) if isinstance(spec, CompressedSpec) or spec.moe_layers[one])
    prefix = f"layers.{layer}.moe."
    by_table = isinstance(spec, CompressedSpec) and spec.hash_layers[layer]

    def layer_of(mesh: Mesh, rows: int = 5):
        x = rows_of(mesh, rows, spec.hidden_size) / 8
        tokens = rows_of(mesh, rows, 1)[:, 0].long().abs() if by_table else None
        held = shard_params(dict(params), mesh)
        own = moe(x, held, prefix, spec.moe, tokens, mesh=mesh, options=Options("reference"))
        return own, moe(x, dict(params), prefix, spec.moe, tokens, options=Options("reference"))

    for own, alone in over_mesh(layer_of, **sizes):
        torch.testing.assert_close(own, alone, rtol=0, atol=1e-5)


@pytest.mark.few(0)
@pytest.mark.parametrize("options", (dict(), dict(speculate=1), dict(batch_invariant=True)), ids=str)
@pytest.mark.parametrize("name", ("tiny_glm5", "tiny_v4"))
def test_schedulers_of_data_ranks_step_together(name, options):
    """Requests of different lengths and numbers, none at all on one of them; blocks run out, and prefixes are shared."""
    spec = small(name, 3)
    params = random_params(spec, seed=0, mtp="speculate" in options)
    asked = [(13, 24), (3, 33), (30, 2), (19, 3)], [], [(9, 3), (17, 8)]
    prompt = [(7 * place) % 251 for place in range(40)]

    def finished(mesh: Mesh, own: list[tuple[int, int]]) -> list:
        model = Model(spec, shard_params(dict(params), mesh), cache_layouts(spec, "fp32"), "reference", mesh=mesh)
        batching = Batching(
            model, rows=3, num_blocks=3, max_context=48, block_size=16, prefill_tokens=16, snapshots=2, **options
        )
        for length, new in own:
            batching.submit(prompt[:length], max_new_tokens=new)
        done = sorted(batching.drain())
        for length, _ in own[:1]:
            batching.submit(prompt[: length + 1], max_new_tokens=2)
        done += batching.drain()
        assert batching.idle and len(done) == len(own) + len(own[:1])
        assert len(own) < 3 or batching.occupancy().preempted
        return [one.tokens for one in done]

    want = [finished(ONE_RANK, own) for own in asked[:2]]
    found = over_mesh(lambda mesh: finished(mesh, asked[mesh.data.rank]), data=2, expert=2)
    assert found == want
    if options.get("speculate"):
        return
    want = [finished(ONE_RANK, own) for own in (asked[2], asked[0])]
    found = over_mesh(lambda mesh: finished(mesh, asked[2 * (1 - mesh.data.rank)]), data=2, tensor=2, expert=4)
    assert found == [want[0]] * 2 + [want[1]] * 2


def test_one_batch_of_ranks_that_share_experts_is_refused():
    spec = preset("tiny_v32")
    mesh = planned_mesh(data=2, expert=2)
    model = Model(spec, shard_params(dict(random_params(spec, 0)), mesh), cache_layouts(spec, "fp32"), mesh=mesh)
    with pytest.raises(ValueError, match=r"model: got experts that 2 data ranks share, allowed: Batching"):
        generate(model, [[1, 2]], max_new_tokens=2)
