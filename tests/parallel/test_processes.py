"""Models over several processes with gloo generate what one process does."""

from __future__ import annotations

import os

import pytest
from support.processes import (
    Case,
    Grid,
    compare_and_disagree,
    compare_with_one,
    disagree_on_weights,
    run_processes,
    write_alone,
)

from sparse_attn.checkpoints.sharding import check_mesh, rank_shapes, shard_params
from sparse_attn.cli.torchrun import of_first
from sparse_attn.generation.processes import make_mesh
from sparse_attn.mesh import ONE_RANK, Mesh, Ranks
from sparse_attn.models.params import random_params
from sparse_attn.models.shapes import param_shapes
from sparse_attn.spec import preset
from sparse_attn.weight_layout import weight_shape

MODELS = ("tiny_v32", "tiny_glm5", "tiny_v4")


@pytest.mark.few(0)
@pytest.mark.parametrize("size", (2, 4))
def test_tensor_and_expert_ranks(size, tmp_path):
    grids = [Grid(tensor=size, expert=expert) for expert in (1, 2, 4) if expert <= size]
    cases = [Case(name, grid, cache) for name in MODELS for grid in grids for cache in ("fp32", "fp8")
             if not (name == "tiny_v4" and size > 2)]  # fmt: skip
    write_alone(cases, tmp_path)
    run_processes(size, compare_with_one, tmp_path, cases, tmp_path)


@pytest.mark.few(0)
@pytest.mark.parametrize("size", (2, 3, 4))
def test_context_ranks(size, tmp_path):
    """Alone, and with tensor and expert ranks; one request is shorter than there are ranks, others end anywhere."""
    experts = [expert for expert in (1, 2, 4) if size % expert == 0]
    grids = [Grid(context=size, expert=expert) for expert in experts]
    if size == 4:
        grids += [Grid(tensor=2, context=2, expert=expert) for expert in experts]
    latent, windowed = dict(block_size=8), dict(lengths=(300, 2, 150), block_size=128)
    cases = [Case(name, grid, cache, **(windowed if name == "tiny_v4" else latent))
             for name in MODELS for grid in grids for cache in ("fp32", "fp8")
             if cache == "fp32" or grid.expert == 1]  # fmt: skip
    write_alone(cases, tmp_path)
    run_processes(size, compare_with_one, tmp_path, cases, tmp_path)


@pytest.mark.few(0)
@pytest.mark.parametrize(("size", "grids"), (
    (2, (Grid(data=2, expert=2),)), (3, (Grid(data=3, expert=3),)),
    (4, (Grid(data=4, expert=4), Grid(data=4, expert=2), Grid(data=2, tensor=2, expert=4),
         Grid(data=2, context=2, expert=4), Grid(data=2, tensor=2, expert=2))),
))  # fmt: skip
def test_data_ranks_that_share_experts(size, grids, tmp_path):
    """Three prompts, of which ranks have one or two, or none."""
    cases = [Case(name, grid, speculate=drafts, block_size=128 if name == "tiny_v4" else 16)
             for name in MODELS for grid in grids for drafts in (0, 1)
             if preset(name).moe.num_experts % size == 0]  # fmt: skip
    write_alone(cases, tmp_path)
    run_processes(size, compare_with_one, tmp_path, cases, tmp_path)


@pytest.mark.few(0)
def test_drafts_and_compiled_steps(tmp_path):
    """Two rows a request in a decode step, of drafts that are verified; and steps that Dynamo traced."""
    grids = (Grid(tensor=2, expert=2), Grid(context=2))
    cases = [Case(name, grid, speculate=1, block_size=128) for name in MODELS for grid in grids]
    cases += [Case("tiny_v32", grid, compile=True) for grid in grids]
    write_alone(cases, tmp_path)
    run_processes(2, compare_with_one, tmp_path, cases, tmp_path)


@pytest.mark.few(0)
@pytest.mark.parametrize(("size", "grids"), (
    (2, (Grid(tensor=2), Grid(context=2, expert=2))), (3, (Grid(context=3),)), (4, (Grid(tensor=2, context=2, expert=4),)),
))  # fmt: skip
def test_readers(size, grids, tmp_path):
    cases = [
        Case(name, grid, lengths=(300, 2, 150), block_size=128 if name == "reader-v4" else 16)
        for name in ("reader-v32", "reader-v4")
        for grid in grids
    ]
    write_alone(cases, tmp_path)
    run_processes(size, compare_with_one, tmp_path, cases, tmp_path)


def test_two_processes(tmp_path):
    """The small cases that are run by default."""
    cases = [
        Case("tiny_v32", Grid(tensor=2, expert=2), lengths=(5, 3)),
        Case("tiny_v32", Grid(context=2, expert=2), lengths=(5, 3), block_size=2),
        Case("tiny_v4", Grid(tensor=2), lengths=(5, 3), speculate=2),
        Case("tiny_v32", Grid(data=2, expert=2), lengths=(5, 3)),
    ]
    write_alone(cases, tmp_path)
    run_processes(2, compare_and_disagree, tmp_path, cases, tmp_path)


@pytest.mark.few(0)
def test_four_processes_compare_weights(tmp_path):
    """Of each the parts that several hold: by tensor and context ranks, by experts that data ranks share."""
    cases = [
        Case("tiny_v32", Grid(tensor=2, context=2)),
        Case("tiny_v32", Grid(tensor=4, expert=2)),
        Case("tiny_v4", Grid(context=4, expert=4), block_size=128),
        Case("tiny_v32", Grid(data=2, tensor=2, expert=4)),
    ]
    run_processes(4, disagree_on_weights, tmp_path, cases)


@pytest.mark.parametrize("name", MODELS)
def test_parts_have_the_shapes_they_are_said_to(name):
    spec = preset(name)
    mesh = Mesh(tensor=Ranks(2, 1, "t"), expert=Ranks(2, 1, "t"))
    params = random_params(spec, seed=0)
    held = shard_params(params, mesh)
    shapes = rank_shapes(param_shapes(spec), mesh)
    assert {one: weight_shape(held[one]) for one in shapes} == shapes
    assert rank_shapes(param_shapes(spec), ONE_RANK) == param_shapes(spec)
    assert all(shard_params(params, ONE_RANK)[one] is params[one] for one in params)


def test_what_cannot_be_sharded():
    for name, mesh, said in (
        ("tiny_v4", Mesh(tensor=Ranks(4, 0, "t")), "4 ranks for 2 groups of heads of tiny_v4"),
        ("tiny_v32", Mesh(tensor=Ranks(3, 0, "t")), "3 ranks for 8 heads of tiny_v32"),
        ("tiny_v32", Mesh(context=Ranks(16, 0, "c"), expert=Ranks(16, 0, "e")), "16 ranks for 8 experts"),
    ):
        with pytest.raises(ValueError, match=said):
            check_mesh(preset(name), mesh)
    with pytest.raises(ValueError, match="got tensor 2 x context 1 x data 1 for 1 processes"):
        make_mesh(tensor=2, device="cpu")
    with pytest.raises(ValueError, match="expert: got 2 ranks, allowed: a divisor of the 1 that compute"):
        make_mesh(expert=2, device="cpu")
    assert make_mesh(device="cpu") is ONE_RANK


def _of_first(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    assert of_first(lambda: (rank, {"a": 1})) == (0, {"a": 1})

    def failing():
        assert not rank  # the first alone
        raise OSError(28, "full", "out.jsonl")

    with pytest.raises(OSError, match="full: 'out.jsonl'"):
        of_first(failing)


def test_what_the_first_process_finds_all_have_and_its_error_too(tmp_path):
    """No other is left waiting."""
    run_processes(2, _of_first, tmp_path)
