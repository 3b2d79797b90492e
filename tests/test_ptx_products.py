"""Products of few rows with packed weights without a GPU: their PTX, executed on the CPU. It decodes codes in registers,
which Triton's interpreter does not do."""

from __future__ import annotations

import pytest
import torch
from support.products import check, rows_of
from support.ptx.run import execute
from support.weights import random_weight

from sparse_attn.ops.grouped_linear import grouped_linear
from sparse_attn.ops.grouped_linear.launch import Product
from sparse_attn.ops.grouped_linear.plan import problem_of
from sparse_attn.ops.grouped_linear.swap_ab import config
from sparse_attn.target import H200
from sparse_attn.weight_layout import WeightLayout

pytestmark = pytest.mark.aot
V32 = WeightLayout("e4m3", (128, 128), "fp32")
V4 = WeightLayout("e4m3", (128, 128), "e8m0")
MXFP4 = WeightLayout("e2m1", (1, 32), "e8m0")
DIRT = 7.0


def product(rows, weight, splits=1):
    """bf16 [rows, outputs] of the kernel, the last outputs of a tile missing; nothing is written beside."""
    from sparse_attn.device import packed_dot
    from sparse_attn.ops.grouped_linear.swap_ab import kernels, launch

    codes, scales = weight.codes.view(torch.uint8), weight.scales
    (n, columns), outputs = rows.shape, codes.shape[1]
    problem = problem_of(rows, None, codes, scales, weight.layout)
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
