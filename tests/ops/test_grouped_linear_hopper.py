"""The linear of few rows on Hopper: where it applies, how its steps are dealt, and on a GPU its sums against fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import long
from support import products
from support.products import check
from support.weights import random_weight

from sparse_attn import workspace
from sparse_attn.framework.target import H200, TARGETS, target_of
from sparse_attn.ops.layers.products import dispatch, launch, linear
from sparse_attn.ops.layers.products.hopper import config
from sparse_attn.ops.layers.products.problem import Problem, problem_of
from sparse_attn.weight_layout import PackedWeight, WeightLayout, weight_rows

V32 = WeightLayout("e4m3", (128, 128), "fp32")
V4 = WeightLayout("e4m3", (128, 128), "e8m0")
WIDE = WeightLayout("e4m3", (24, 256), "fp32")
NAME = "hopper.stream_k"


def problem(rows=8, outputs=4096, columns=7168, dtype=torch.bfloat16, codes="e4m3", block=(128, 128), **facts):
    return Problem(rows, 1, outputs, columns, dtype, facts.pop("ends", False), codes, "fp32", block, **facts)


def test_where_it_applies():
    def name(target=H200, **facts):
        return dispatch.choose(problem(**facts), target).kernel.name

    assert name() == name(rows=1) == name(rows=16) == name(outputs=1, columns=128, block=(24, 256)) == NAME
    others = (
        dict(rows=17), dict(dtype=torch.float16), dict(ends=True), dict(batch_invariant=True), dict(aligned=False),
        dict(rows_aligned=False), dict(block=(32, 32)), dict(columns=7200),
        dict(codes="e2m1", block=(1, 32)), dict(target=TARGETS["sm_100"]), dict(target=TARGETS["gfx950"]),
    )  # fmt: skip
    for other in others:
        assert name(**other) != NAME, other
    assert not config.supports_stream_k(problem(outputs=(1 << 24) + 1), H200).able


def test_more_rows_than_a_tile_has_are_multiplied_some_at_a_time():
    """As few times as tiles of 128 rows allow, each of as many. With few codes they are soon expanded instead."""
    rows = (17, 128, 129, 256, 257, 1024)
    assert [config.rows_at_once(n) for n in rows] == [17, 128, 65, 128, 86, 128]
    assert [config.plan_stream_k_wide(problem(n), H200).block_m for n in rows] == [32, 128, 128, 128, 128, 128]
    for outputs, columns, most in ((576, 7168, 128), (7168, 2048, 448), (4096, 8192, 1024), (7168, 16384, 1024)):
        names = [dispatch.choose(problem(n, outputs, columns), H200).kernel.name for n in (16, 17, most, most + 1)]
        assert names == [NAME, f"{NAME}_wide", f"{NAME}_wide", "expanded"]


def test_rows_that_no_box_can_hold():
    """Boxes of the copy engine begin at multiples of 16 bytes, and rows do not lie in each other."""
    weight = random_weight(V32, 1, 128, 128, moderate=True)
    memory = torch.zeros(2048, dtype=torch.bfloat16)
    first = -memory.data_ptr() // 2 % 8

    def aligned(*strides, rows=3, offset=0):
        x = memory[first + offset :].as_strided((rows, 128), strides)
        return problem_of(x, None, weight).rows_aligned

    assert aligned(128, 1) and aligned(136, 1) and aligned(3, 1, rows=1) and aligned(128, 1, offset=8)
    assert not any((aligned(132, 1), aligned(0, 1), aligned(64, 1), aligned(256, 2), aligned(128, 1, offset=4)))


def test_a_lone_output_of_any_stride_is_not_read_as_words():
    """torch views bytes as words only where every stride is whole words."""
    codes = torch.zeros(640, dtype=torch.uint8)
    codes = codes[-codes.data_ptr() % 16 :].as_strided((1, 1, 128), (130, 130, 1))
    rows, scales = torch.zeros(2, 128, dtype=torch.bfloat16), torch.ones(1, 1, 1)
    found = problem_of(rows, None, PackedWeight(codes, scales, V32.name))
    assert not found.aligned and dispatch.choose(found, H200).kernel.name == "portable"


@pytest.mark.parametrize("outputs, columns", [(24576, 1536), (7168, 16384), (576, 7168), (64, 128), (130, 256)])
def test_no_cta_is_without_steps(outputs, columns):
    plan = config.plan_stream_k(problem(outputs=outputs, columns=columns), H200)
    steps = -(-outputs // plan.block_n) * columns // plan.block_k
    assert 1 <= plan.grid <= min(steps, config.FORMS[plan.block_m].ctas * H200.num_sms)
    assert plan.grid == 1 or steps // plan.grid >= config.LEAST_STEPS


def test_runs_end_with_tiles_where_that_costs_few_ctas():
    """CTAs and steps of each, of one CTA an SM and of two: V3.2's q_b (192 tiles of 12), o (56 of 128), shared gate and
    up (32 of 56) and down (56 of 16); then tiles that no number of CTAs divides."""
    runs = {}
    for outputs, columns in ((24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048), (127 * 128, 17 * 128)):
        steps = outputs // 128 * columns // 128
        ctas = [
            plan(problem(n, outputs, columns), H200).grid
            for n, plan in ((64, config.plan_stream_k_wide), (8, config.plan_stream_k))
        ]
        runs[outputs, columns] = [(n, round(steps / n, 1)) for n in ctas]
    assert runs == {
        (24576, 1536): [(96, 24), (192, 12)],
        (7168, 16384): [(112, 64), (224, 32)],
        (4096, 7168): [(128, 14), (256, 7)],
        (7168, 2048): [(112, 8), (224, 4)],
        (16256, 2176): [(127, 17), (264, 8.2)],
    }


def weight_of(layout, outputs, columns):
    codes, scales, name = random_weight(layout, 1, outputs, columns, moderate=True)
    return PackedWeight(codes[0].cuda(), scales[0].cuda(), name)


def rows_of(n, columns):
    """Every other row, NaN between."""
    memory = torch.full((2 * n, columns), torch.nan, dtype=torch.bfloat16, device="cuda")
    memory[::2] = products.rows_of(n, columns, torch.bfloat16).cuda()
    return memory[::2]


def compare(got, rows, weight):
    check(got, rows, None, PackedWeight(weight.codes.unsqueeze(0), weight.scales.unsqueeze(0), weight.layout))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [V32, V4, WIDE], ids=lambda layout: layout.name)
@pytest.mark.parametrize("n", [1, 7, 8, 9, 16])
@pytest.mark.parametrize("outputs, columns", [(7168, 2048), (576, 7168), (130, 256), (4096, 7168), (1, 128)])
def test_kernel(layout, n, outputs, columns):
    weight, rows = weight_of(layout, outputs, columns), rows_of(n, columns)
    assert dispatch.choose(problem(n, outputs, columns, block=layout.block), target_of(rows.device)).kernel.name == NAME
    compare(linear(rows, weight), rows, weight)
    if outputs > 100:
        part = weight_rows(weight, 5, outputs - 3)
        compare(linear(rows, part), rows, part)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [V32, V4, WIDE], ids=lambda layout: layout.name)
@pytest.mark.parametrize("n", [17, 128, 129, 300, 512])
@pytest.mark.parametrize("outputs, columns", [(7168, 2048), (576, 7168), (130, 256)])
def test_kernel_of_more_rows(layout, n, outputs, columns):
    weight, rows = weight_of(layout, outputs, columns), rows_of(n, columns)
    compare(linear(rows, weight, impl=f"{NAME}_wide"), rows, weight)
    part = weight_rows(weight, 5, outputs - 3)
    compare(linear(rows, part, impl=f"{NAME}_wide"), rows, part)


@pytest.mark.gpu
@pytest.mark.parametrize("grid", [1, 2, 5, 131, 264])
def test_any_number_of_ctas(grid):
    weight, rows = weight_of(V32, 1000, 8192), rows_of(11, 8192)
    facts = problem(11, 1000, 8192)
    choice = dispatch.choose(facts, target_of(rows.device))
    plan = choice.plan
    scratch = plan.scratch._replace(
        buffers=(plan.scratch.buffers[0]._replace(shape=(grid, 2, plan.block_m, plan.block_n)),)
    )
    choice = choice._replace(plan=dataclasses.replace(plan, grid=grid, scratch=scratch))
    codes, scales = weight.codes.view(torch.uint8).unsqueeze(0), weight.scales.unsqueeze(0)
    compare(launch.grouped_linear(rows, None, codes, scales, weight.layout, False, choice), rows, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [5, 300])
def test_a_chain_of_captured_launches(n):
    """Each reads what the one before wrote, whose end it does not wait for with its weight; replays give the same
    bits, whatever lies in the scratch."""
    weights = [weight_of(V32, 2048, 2048) for _ in range(6)]
    x = products.rows_of(n, 2048, torch.bfloat16).cuda()

    def chain():
        values = [x]
        for weight in weights:
            values.append(linear(values[-1], weight) * 2**-5)
        return values

    own = workspace.Workspace((1 << 26, 4096), "cuda")
    own._scratch.fill_(255)
    with workspace.use(own):
        want = chain()
        for weight, before, after in zip(weights, want, want[1:]):
            assert torch.equal(linear(before, weight) * 2**-5, after)
            compare(linear(before, weight), before, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain()
        for _ in range(50 if long() else 10):
            graph.replay()
            assert torch.equal(got[-1], want[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8, 64])
def test_a_weight_that_torch_changes_between_two_products(n):
    """With a kernel of torch's between, as the contract asks: the product is of the new codes, eager and captured."""
    weight = weight_of(V32, 7168, 2048)
    x = products.rows_of(n, 2048, torch.bfloat16).cuda()
    codes = weight.codes.view(torch.uint8)
    change = codes ^ codes.roll(1, 0)

    def turn():
        codes.bitwise_xor_(change)
        return linear(x + 0, weight)

    torch.cuda.synchronize()
    before = linear(x, weight)
    codes.bitwise_xor_(change)
    torch.cuda.synchronize()
    after = linear(x, weight)
    assert not torch.equal(before, after)
    for _ in range(50):
        assert torch.equal(turn(), before) and torch.equal(turn(), after)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = turn(), turn()
    for _ in range(50):
        graph.replay()
    assert torch.equal(first, before) and torch.equal(second, after)
