"""What Dynamo compiles, and how often: two compilations of decode and two of prefill serve whatever comes.

Dynamo takes sizes of 0 and 1 for constants, equal sizes for one symbol, and counts compilations per code object.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from support.compilations import ALONE, TOGETHER, Graphs, compiled_by, counts_behind, prompts_of, small

from sparse_attn import Model, allocate_cache, build_step_plan, generate, mark_cache
from sparse_attn.framework.torch_private import recompile_limit
from sparse_attn.layout import parse_layout
from sparse_attn.models import deepseek_v4, deepseek_v32
from sparse_attn.models.params import random_params
from sparse_attn.ops.attention.sparse import sparse_attn_decode
from sparse_attn.pipeline import cache_layouts
from sparse_attn.types import Ragged


@pytest.fixture
def graphs():
    torch.compiler.reset()
    yield Graphs()
    torch.compiler.reset()


@pytest.mark.few(1)
@pytest.mark.parametrize("name, cache, order", (("tiny_v4", "fp8", 1), ("tiny_glm5", "fp32", -1)))
def test_batches_of_every_kind(graphs, monkeypatch, name, cache, order):
    """The first batch of one prompt and the first of several compile prefill and decode, the others nothing."""
    spec = small(name)
    model = Model(spec, random_params(spec, seed=1), cache_layouts(spec, cache))
    counts = counts_behind(model, graphs, monkeypatch, (*ALONE[::order], *TOGETHER[::order]))
    assert counts == [2] * len(ALONE) + [4] * len(TOGETHER)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_other_blocks_steps_and_counts_compile_nothing_more(graphs, monkeypatch, name):
    spec = small(name, layers=1)
    model = Model(spec, random_params(spec, seed=1), cache_layouts(spec, "fp8"))
    monkeypatch.setattr(torch, "compile", compiled_by(graphs))
    common = dict(max_new_tokens=3, block_size=32, prefill_tokens=201)
    for options in ({}, dict(block_size=64), dict(prefill_tokens=9), dict(max_new_tokens=1)):
        generate(model, prompts_of([31, 21, 1]), compile=True, **common | options)
        assert graphs.count == 2


@pytest.mark.few(0)
def test_any_number_of_models(graphs, monkeypatch):
    """More than Dynamo compiles of one function, by generate and by torch.compile of a model."""
    monkeypatch.setattr(torch, "compile", compiled_by(graphs))
    for count in range(1, 6):
        spec = small("tiny_v32", layers=1)
        spec = replace(spec, index=replace(spec.index, top_k=16 + count))
        model = Model(spec, random_params(spec, seed=0), cache_layouts(spec, "fp8"))
        generate(model, prompts_of([30, 20]), max_new_tokens=2, compile=True)
        assert graphs.count == 2 * count
    assert 2 * count > recompile_limit()


def forward_of(name):
    return (deepseek_v4 if name == "tiny_v4" else deepseek_v32).forward


def step_of(spec, layouts, rows, width=9):
    """(tokens, caches, plan) of a prompt of ``rows`` tokens."""
    model = Model(spec, {"embed": torch.empty(0)}, layouts)
    caches = model.allocate_caches(width, 64, requests=2, step_rows=120)
    ints = dict(dtype=torch.int32)
    plan = build_step_plan(
        torch.tensor([0, rows], **ints), torch.tensor([rows], **ints), torch.arange(width, **ints).view(1, width),
        torch.arange(rows), kv_capacity=rows, max_context=512,
    )  # fmt: skip
    plan = plan._replace(ring_table=torch.zeros(1, 1, **ints) if model.has_rings else None)
    return torch.arange(rows) % 50, caches, plan


SPEC, LAYOUTS = small("tiny_v32"), cache_layouts(small("tiny_v32"), "fp8")


def by_argument(name):
    return lambda params, step, spec, layouts: forward_of(name)(params, spec, *step, layouts=layouts)


def by_closure(name):
    def outer(spec, layouts):
        return lambda params, step: forward_of(name)(params, spec, *step, layouts=layouts)

    return outer


def by_partial(name):
    def outer(spec, layouts):
        return functools.partial(
            lambda spec, layouts, params, step: by_argument(name)(params, step, spec, layouts), spec, layouts
        )

    return outer


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name, form",
    (("tiny_v32", by_argument), ("tiny_v32", by_closure), ("tiny_v32", by_partial), ("tiny_v4", by_argument)),
)
def test_spec_and_layouts_reach_a_compiled_function_in_any_way(graphs, name, form):
    """One graph for lengths that collide with rows, heads, blocks and the table, and for others; another spec and other
    layouts are not taken for the first ones."""
    spec = small(name, layers=1)
    params = random_params(spec, seed=0)
    function = form(name)
    compiled = compiled_by(graphs)(function, fullgraph=True, dynamic=True) if form is by_argument else None
    other = replace(spec, index=replace(spec.index, top_k=3)), cache_layouts(spec, "fp32")
    for count, (mine, layouts) in enumerate(((spec, cache_layouts(spec, "fp8")), other), 1):
        extra = (mine, layouts) if compiled else ()
        run = compiled or compiled_by(graphs)(function(mine, layouts), fullgraph=True, dynamic=True)
        for rows in (100, 64, 9, 57) if count == 1 else (57,):
            want = forward_of(name)(params, mine, *step_of(mine, layouts, rows), layouts=layouts)
            torch.testing.assert_close(run(params, step_of(mine, layouts, rows), *extra), want)
        assert graphs.count == count


def as_global(params, step):
    return deepseek_v32.forward(params, SPEC, *step, layouts=LAYOUTS)


def test_spec_and_layouts_as_globals(graphs):
    run = compiled_by(graphs)(as_global, fullgraph=True, dynamic=True)
    params = random_params(SPEC, seed=0)
    for rows in (LAYOUTS.kv.row, 57, 64, 9, 11):
        want = as_global(params, step_of(SPEC, LAYOUTS, rows))
        torch.testing.assert_close(run(params, step_of(SPEC, LAYOUTS, rows)), want)
    assert graphs.count == 1


@pytest.mark.parametrize("name", ("plain/fp32/16+0", "planar_fp8/8+4/8/e4m3fn"))
def test_a_cache_made_by_hand_is_marked_by_hand(graphs, name):
    """Queries as many as the cache has blocks, then as a block has slots, then others; the cache is a view."""
    layout = parse_layout(name)
    stacked = torch.stack([allocate_cache(layout, 6, 5, "cpu") for _ in range(2)])
    views = [mark_cache(cache.contiguous()) for cache in stacked] if "plain" in name else [
        mark_cache(allocate_cache(layout, 6, 5, "cpu")[:]) for _ in range(2)]  # fmt: skip

    def attend(q, cache, indices, indptr):
        return sparse_attn_decode(q, cache, Ragged(indices, indptr), scale=1.0, layout=layout).out

    run = compiled_by(graphs)(attend, fullgraph=True, dynamic=True)
    for rows in (6, 5, 9):
        q, indptr = torch.ones(rows, 2, layout.dim), torch.arange(rows + 1, dtype=torch.int32)
        given = q, views[rows % 2], torch.arange(rows, dtype=torch.int32), indptr
        torch.testing.assert_close(run(*given), attend(*given))
    assert graphs.count == 1
