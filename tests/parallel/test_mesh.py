"""The grid of processes as a value: who is who, and what it refuses."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sparse_attn.mesh import ALONE, ONE_RANK, Mesh, Ranks, mesh_of, planned_mesh, show_mesh


def test_one_rank():
    assert Mesh() == ONE_RANK and ONE_RANK.size == 1
    assert ONE_RANK.expert_sum == ONE_RANK.expert_tensor == ALONE and ONE_RANK.sharded is None
    assert show_mesh(ONE_RANK) == {"tensor": 1, "context": 1, "data": 1, "expert": 1}


@pytest.mark.parametrize(("tensor", "context", "expert"), ((4, 1, 2), (2, 2, 4), (4, 1, 1), (1, 4, 2), (2, 2, 1)))
def test_every_part_of_every_expert_lies_on_one_of_the_ranks_that_sum(tensor, context, expert):
    places = [
        planned_mesh(tensor=tensor, context=context, expert=expert, place=place) for place in range(tensor * context)
    ]
    size = max(tensor, expert)
    for start in range(0, len(places), size):
        run = places[start : start + size]
        assert sorted((one.expert.rank, one.expert_tensor.rank) for one in run) == [
            (which, part) for which in range(expert) for part in range(size // expert)
        ]
        assert [one.expert_sum.rank for one in run] == list(range(size))
        assert {one.expert_sum.group for one in run} == {
            None if size == 1 else f"{'tensor' if tensor >= expert else 'expert'} (planned)"
        }


@pytest.mark.parametrize(
    ("tensor", "context", "data", "expert"), ((1, 4, 1, 4), (2, 2, 2, 8), (2, 3, 1, 2), (1, 2, 2, 1))
)
def test_context_ranks_of_sharded_rows_are_data_ranks_to_experts(tensor, context, data, expert):
    sizes = dict(tensor=tensor, context=context, data=data, expert=expert)
    for place in range(tensor * context * data):
        mesh = planned_mesh(**sizes, place=place)
        sharded = mesh.sharded
        assert sharded is not None and sharded.sharded is None and sharded.size == mesh.size
        assert (sharded.tensor, sharded.expert, sharded.expert_sum) == (mesh.tensor, mesh.expert, mesh.expert_sum)
        assert sharded.expert_tensor == mesh.expert_tensor and sharded.replica_size == tensor
        assert sharded.expert_replicas == max(1, expert // tensor)


def test_what_a_mesh_refuses():
    for tensor, expert, message in (
        (4, 3, "expert: got 3 ranks, allowed: a divisor or a multiple of the 4 tensor ranks"),
        (2, 4, "expert: got 4 ranks, allowed: a divisor of the 2 that compute the same tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            planned_mesh(tensor=tensor, expert=expert)
    with pytest.raises(ValueError, match="expert: got rank 1, allowed: 0 in this grid"):
        Mesh(tensor=Ranks(2, 0, "t"), expert=Ranks(2, 1, "e"))


def test_a_mesh_of_torch(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert mesh_of(init_device_mesh("cpu", (1, 1), mesh_dim_names=("context", "tensor"))) == ONE_RANK
        wrong = init_device_mesh("cpu", (1,), mesh_dim_names=("pipeline",))
        with pytest.raises(ValueError, match="grid: got a dimension 'pipeline', allowed: data, context, tensor"):
            mesh_of(wrong)
        with pytest.raises(ValueError, match="experts: got no dimension named 'expert'"):
            mesh_of(init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",)), experts=wrong)
    finally:
        dist.destroy_process_group()
