"""Products with packed weights without a GPU: their PTX, executed on the CPU. That of few rows decodes codes in
registers, which Triton's interpreter does not do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from support.products import check, check_quantised, in_line, rows_of
from support.ptx.run import execute
from support.weights import random_weight

from sparse_attn.fp8 import fp8_quantise
from sparse_attn.framework.target import H200
from sparse_attn.ops.layers.products import grouped_linear
from sparse_attn.ops.layers.products.hopper import config as hopper
from sparse_attn.ops.layers.products.portable import config as portable
from sparse_attn.ops.layers.products.problem import Product, problem_of
from sparse_attn.ops.layers.products.swap_ab import config
from sparse_attn.weight_layout import WeightLayout

pytestmark = pytest.mark.aot
V32 = WeightLayout("e4m3", (128, 128), "fp32")
V4 = WeightLayout("e4m3", (128, 128), "e8m0")
MXFP4 = WeightLayout("e2m1", (1, 32), "e8m0")
DIRT = 7.0


def product(rows, weight, splits=1):
    """bf16 [rows, outputs] of the kernel, the last outputs of a tile missing; nothing is written beside."""
    from sparse_attn.device import packed_dot
    from sparse_attn.ops.layers.products.swap_ab import kernels, launch

    codes, scales = weight.codes.view(torch.uint8), weight.scales
    (n, columns), outputs = rows.shape, codes.shape[1]
    problem = problem_of(rows, None, weight)
    old = config.plan(problem, H200)
    tile = config.Tile(old.block_m, old.block_n, old.block_k, old.num_warps, old.num_stages, old.registers)
    plan = config.planned(problem, tile, splits)
    assert plan.splits == splits
    memory = torch.full((n + 1, outputs), DIRT, dtype=torch.bfloat16)
    placed = torch.full((n, columns), torch.nan, dtype=torch.bfloat16)
    partials = [torch.full((splits, n, outputs), torch.nan)] if splits > 1 else []
    counters = torch.zeros(8, dtype=torch.int64)
    arguments = rows, None, codes, scales, memory[:-1], problem, 0, [placed, *partials], counters
    execute(packed_dot, "place_rows", lambda: launch.place(rows, placed, problem.codes, H200))
    execute(kernels, "swap_ab", lambda: launch.multiply(Product(*arguments), plan))
    assert (memory[-1] == DIRT).all() and not counters.any()
    return memory[:-1]


def streamed(rows, weight, grid, first_row=0, seed=0):
    """As product, of stream_k by ``grid`` CTAs."""
    from sparse_attn.ops.layers.products.hopper import launch, stream_k

    product, plan, memory = _stream(rows, weight, grid, first_row, hopper.supports_stream_k, hopper.plan_stream_k)
    execute(stream_k, "stream_k", lambda: launch.multiply_stream_k(product, plan), seed)
    assert (memory[-1] == DIRT).all() and not product.counters.any()
    return memory[:-1]


def streamed_wide(rows, weight, grid, first_row=0, seed=0):
    """The same of stream_k_wide."""
    from sparse_attn.ops.layers.products.hopper import launch, stream_k_wide

    product, plan, memory = _stream(
        rows, weight, grid, first_row, hopper.supports_stream_k_wide, hopper.plan_stream_k_wide
    )
    execute(stream_k_wide, "stream_k_wide", lambda: launch.multiply_stream_k_wide(product, plan), seed)
    assert (memory[-1] == DIRT).all() and not product.counters.any()
    return memory[:-1]


def _stream(rows, weight, grid, first_row, supports, planned):
    """(Product, plan by ``grid`` CTAs, what the product is written to and a row more)."""
    codes, scales = weight.codes.view(torch.uint8), weight.scales
    problem = problem_of(rows, None, weight)
    assert supports(problem, H200).able
    plan = dataclasses.replace(planned(problem, H200), grid=grid)
    memory = torch.full((len(rows) + 1, codes.shape[1]), DIRT, dtype=torch.bfloat16)
    partials = torch.full((grid, 2, plan.block_m, plan.block_n), torch.nan)
    counters = torch.zeros(plan.scratch.counters, dtype=torch.int64)
    return Product(rows, None, codes, scales, memory[:-1], problem, first_row, [partials], counters), plan, memory


def expanded(rows, weight, tile, first_row=0):
    """As product, of codes that are expanded before it."""
    from sparse_attn.ops.layers.products.portable import expanded as kernels
    from sparse_attn.ops.layers.products.portable import launch

    codes, scales = weight.codes.view(torch.uint8), weight.scales
    problem = problem_of(rows, None, weight)
    assert portable.supports_expanded(problem, H200).able
    plan = dataclasses.replace(
        portable.plan_expanded(problem, H200), tiles=-(-len(rows) // tile.rows), block_m=tile.rows, block_n=tile.outputs,
        block_k=tile.columns, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    memory = torch.full((len(rows) + 1, codes.shape[1]), DIRT, dtype=torch.bfloat16)
    values = torch.full((1, *codes.shape[1:2], rows.shape[1]), torch.nan, dtype=torch.bfloat16)
    arguments = rows, None, codes, scales, memory[:-1], problem, first_row, [values], torch.zeros(0, dtype=torch.int64)
    for kernel in ("expand", "multiply"):
        execute(kernels, kernel, lambda: launch.multiply_expanded(Product(*arguments), plan))
    assert (memory[-1] == DIRT).all()
    return memory[:-1]


def quantised(rows, weight, tile, first_row=0):
    """As product, of rows that are quantised to fp8, here by the reference."""
    from sparse_attn.ops.layers.products.portable import fp8, launch

    codes, scales = weight.codes.view(torch.uint8), weight.scales
    problem = problem_of(rows, None, weight)
    plan = dataclasses.replace(
        portable.plan_fp8(problem, H200), tiles=-(-len(rows) // tile.rows), block_m=tile.rows, block_n=tile.outputs,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    memory = torch.full((len(rows) + 1, codes.shape[1]), DIRT, dtype=torch.bfloat16)
    blocks = F.pad(rows.float(), (0, -rows.shape[1] % 128)).unflatten(1, (-1, 128))
    values, row_scales = fp8_quantise(blocks, "e4m3fn", "pow2", 448 * 2.0**-126)
    views, counters = [values.flatten(1), row_scales], torch.zeros(0, dtype=torch.int64)
    product = Product(rows, None, codes, scales, memory[:-1], problem, first_row, views, counters)
    execute(fp8, "multiply", lambda: launch.multiply_fp8(product, plan))
    assert (memory[-1] == DIRT).all()
    return memory[:-1]


def weight_in_line(layout, outputs, columns):
    weight = random_weight(layout, 1, outputs, columns, moderate=True)
    return weight._replace(codes=in_line(weight.codes))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "layout, n, outputs, columns, grid",
    [
        (V32, 3, 130, 256, 3), (V32, 16, 300, 384, 4), (V4, 8, 128, 1024, 5), (V32, 1, 200, 128, 2),
        (V4, 9, 64, 2048, 12), (V32, 2, 1, 128, 1), (V32, 5, 640, 128, 3), (V32, 2, 60, 4480, 1),
    ],
)  # fmt: skip
def test_stream_k(layout, n, outputs, columns, grid):
    """Whole tiles, tiles of two and of a dozen CTAs, CTAs of several tiles, a long run; the last outputs of a tile
    missing."""
    rows = in_line(rows_of(n, columns, torch.bfloat16))
    weight = weight_in_line(layout, outputs, columns)
    check(streamed(rows, weight, grid), rows, None, weight)


@pytest.mark.few(0)
def test_stream_k_has_the_same_bits_in_any_tile():
    """One row alone and among 16, whatever comes first."""
    rows = in_line(rows_of(16, 512, torch.bfloat16))
    weight = weight_in_line(V32, 200, 512)
    whole = streamed(rows, weight, 3, seed=1)
    assert torch.equal(streamed(rows[5:6], weight, 3, seed=2), whole[5:6])


@pytest.mark.few(0)
def test_stream_k_of_rows_apart():
    """Rows of a wider tensor, poison between them."""
    memory = torch.full((5, 400), torch.nan, dtype=torch.bfloat16)
    rows = memory[:, 16:272]
    rows[:] = rows_of(5, 256, torch.bfloat16)
    weight = weight_in_line(V32, 70, 256)
    check(streamed(rows, weight, 2), rows, None, weight)


@pytest.mark.few(1)
@pytest.mark.parametrize("grid", [1, 2])
def test_stream_k_with_nan_in_a_code(grid):
    rows = in_line(rows_of(3, 256, torch.bfloat16))
    weight = weight_in_line(V32, 130, 256)
    places = [3, 4, 40, 69, 129], [127, 128, 129, 255, 16]
    weight.codes.view(torch.uint8)[0, places[0], places[1]] = torch.tensor([0xFF, 0x7F, 0x7F, 0xFF, 0x7F]).byte()
    want = torch.zeros(3, 130, dtype=torch.bool)
    want[:, places[0]] = True
    assert torch.equal(streamed(rows, weight, grid).isnan(), want)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "layout, n, outputs, columns, grid",
    [(V32, 20, 130, 256, 2), (V32, 33, 300, 512, 3), (V4, 64, 600, 384, 2), (V32, 100, 200, 256, 2), (V4, 17, 1, 128, 1),
     (V32, 40, 100, 1280, 1), (V4, 20, 70, 4480, 1), (V32, 129, 200, 256, 3)],
)  # fmt: skip
def test_stream_k_wide(layout, n, outputs, columns, grid):
    """As test_stream_k; the next to last two cases fill each stage more than once, the last takes two launches."""
    rows, weight = in_line(rows_of(n, columns, torch.bfloat16)), weight_in_line(layout, outputs, columns)
    check(streamed_wide(rows, weight, grid), rows, None, weight)


@pytest.mark.few(0)
@pytest.mark.parametrize("n", [3, 20])
def test_stream_k_of_a_cut_weight(n):
    """Its first row is the fourth of a scale block. So eight outputs of a lane's group have two scales."""
    rows, weight = in_line(rows_of(n, 256, torch.bfloat16)), weight_in_line(V32, 300, 256)
    run = streamed if n < 17 else streamed_wide
    cut = weight._replace(codes=weight.codes[:, 3:])
    assert torch.equal(run(rows, cut, 1, first_row=3), run(rows, weight, 1)[:, 3:])


@pytest.mark.few(1)
@pytest.mark.parametrize("n", [20, 70])
def test_stream_k_wide_with_nan_in_a_code(n):
    rows, weight = in_line(rows_of(n, 256, torch.bfloat16)), weight_in_line(V32, 130, 256)
    places = [3, 4, 40, 69, 129], [127, 128, 129, 255, 16]
    weight.codes.view(torch.uint8)[0, places[0], places[1]] = torch.tensor([0xFF, 0x7F, 0x7F, 0xFF, 0x7F]).byte()
    want = torch.zeros(n, 130, dtype=torch.bool)
    want[:, places[0]] = True
    assert torch.equal(streamed_wide(rows, weight, 2).isnan(), want)


@pytest.mark.few(0)
def test_stream_k_wide_has_the_same_bits_in_any_tile():
    """A row among 20 and among 33, whatever comes first."""
    rows, weight = in_line(rows_of(33, 512, torch.bfloat16)), weight_in_line(V32, 300, 512)
    whole = streamed_wide(rows, weight, 3, seed=1)
    assert torch.equal(streamed_wide(rows[5:25], weight, 3, seed=2), whole[5:25])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "layout, tile, n, outputs, columns",
    [
        (V32, portable.EXPANDED_TILE, 140, 150, 640), (V4, portable.EXPANDED_TILE, 140, 300, 640),
        (V32, portable.EXPANDED_FEW_TILES, 70, 130, 640), (MXFP4, portable.EXPANDED_FEW_TILES, 20, 70, 1056),
    ],
)  # fmt: skip
def test_expanded(layout, tile, n, outputs, columns):
    """Every stage is filled more than once; the last tiles are not whole."""
    rows, weight = in_line(rows_of(n, columns, torch.bfloat16)), weight_in_line(layout, outputs, columns)
    check(expanded(rows, weight, tile), rows, None, weight)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "layout, tile, n, outputs, columns",
    [
        (V32, portable.FP8_WIDE, 140, 150, 640), (V4, portable.FP8_WIDE, 20, 260, 320), (MXFP4, portable.FP8_TILES[0], 20, 70, 256),
        (V32, portable.FP8_WIDE_FEW, 70, 150, 640), (V32, portable.FP8_INVARIANT_TILE, 70, 70, 640),
    ],
)  # fmt: skip
def test_quantised_rows(layout, tile, n, outputs, columns):
    rows, weight = in_line(rows_of(n, columns, torch.bfloat16)), weight_in_line(layout, outputs, columns)
    check_quantised(quantised(rows, weight, tile), rows, None, weight)


@pytest.mark.few(0)
@pytest.mark.parametrize("run, tile", [(expanded, portable.EXPANDED_FEW_TILES), (quantised, portable.FP8_WIDE)])
def test_many_rows_of_a_cut_weight(run, tile):
    """Its first row is the fourth of a scale block."""
    rows, weight = in_line(rows_of(20, 256, torch.bfloat16)), weight_in_line(V32, 300, 256)
    cut = weight._replace(codes=weight.codes[:, 3:])
    assert torch.equal(run(rows, cut, tile, first_row=3), run(rows, weight, tile)[:, 3:])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "layout, n, columns, splits",
    [
        (V32, 3, 512, 2), (V32, 16, 256, 1), (V4, 20, 256, 1), (V32, 64, 256, 2), (V32, 128, 4096, 1),
        (MXFP4, 5, 1024, 2), (MXFP4, 13, 256, 1), (MXFP4, 33, 256, 1),
    ],
)  # fmt: skip
def test_swap_ab(layout, n, columns, splits):
    rows, weight = rows_of(n, columns, torch.bfloat16), random_weight(layout, 1, 70, columns, moderate=True)
    check(product(rows, weight, splits), rows, None, weight)


@pytest.mark.few(1)
@pytest.mark.parametrize("n", [2, 20, 64])
def test_nan_in_a_code(n):
    """Of one step, in either half of a tile of outputs."""
    rows, weight = rows_of(n, 256, torch.bfloat16), random_weight(V32, 1, 70, 256, moderate=True)
    weight.codes.view(torch.uint8)[0, [3, 40, 69], [127, 128, 255]] = torch.tensor(
        [0xFF, 0x7F, 0x7F], dtype=torch.uint8
    )
    bad = product(rows, weight).isnan()
    want = torch.zeros(n, 70, dtype=torch.bool)
    want[:, [3, 40, 69]] = True
    assert torch.equal(bad, want)


@pytest.mark.few(1)
@pytest.mark.parametrize("n", [5, 13])
def test_scales_that_are_multiplied_again(n):
    """Above 2, of which the fast way would overflow, the least one, and NaN."""
    rows, weight = rows_of(n, 256, torch.bfloat16), random_weight(MXFP4, 1, 70, 256, moderate=True)
    weight.scales[0, 7, 3], weight.scales[0, 60, 0], weight.scales[0, 65, 7] = 200, 0, 255
    got, want = product(rows, weight), grouped_linear(rows, None, weight, impl="reference")
    assert got[:, 65].isnan().all() and torch.equal(got.isnan(), want.isnan())
    weight.scales[0, 65, 7] = 120
    check(product(rows, weight), rows, None, weight)
