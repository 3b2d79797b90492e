"""The grouped product's tiles: enough for any ends, and nothing read beside the group's rows, outputs and columns."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from support.weights import random_weight

from sparse_attn.explanation import explain
from sparse_attn.framework.target import H200, TARGETS
from sparse_attn.ops.layers.products import dispatch, grouped_linear
from sparse_attn.ops.layers.products.problem import Problem
from sparse_attn.weight_layout import PackedWeight, WeightLayout, weight_columns, weight_rows

V32 = WeightLayout("e4m3", (128, 128), "fp32")
V4 = WeightLayout("e4m3", (128, 128), "e8m0")
SMALL = WeightLayout("e4m3", (32, 32), "e8m0")
MXFP4 = WeightLayout("e2m1", (1, 32), "e8m0")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Scales that are multiplied into values, and into products of one scale block.
FORMS = ((V32, BF16), (V4, FP32), (SMALL, BF16), (SMALL, FP16), (MXFP4, BF16), (MXFP4, FP16), (MXFP4, FP32))
# Sums in fp32 of 200 terms in another order; then the rounding of the dtype.
CLOSE = {BF16: dict(rtol=2**-7, atol=1e-2), FP16: dict(rtol=2**-10, atol=1e-2), FP32: dict(rtol=1e-4, atol=1e-3)}


def problem(rows, groups, ends=True, **more):
    facts = dict(outputs=4096, columns=7168, dtype=BF16, codes="e4m3", scale="fp32", block=(128, 128))
    return Problem(rows, groups, **facts | more, ends=ends)


def tiles_of(ends, rows, block_m):
    return sum(-(-(end - start) // block_m) for start, end in pairwise([0, *ends, rows]))


def test_there_are_tiles_enough_for_any_ends_and_none_too_many():
    draw = random.Random(0)
    for rows, groups in [
        (1, 1),
        (1, 8),
        (16, 1),
        (17, 1),
        (15, 8),
        (33, 2),
        (64, 3),
        (100, 40),
        (1000, 7),
        (4096, 256),
    ]:
        plan = dispatch.choose(problem(rows, groups), H200).plan
        block_m = plan.block_m
        first = min(rows, groups + 1)  # groups of one row each, and the rest in whole tiles with a row beside them
        worst = [*range(1, first), *[first - 1] * (groups - first + 1)]
        assert tiles_of(worst, rows, block_m) == plan.tiles
        for _ in range(50):
            ends = sorted(draw.randint(0, rows) for _ in range(groups))
            assert tiles_of(ends, rows, block_m) <= plan.tiles
        alone = dispatch.choose(problem(rows, 1, ends=False), H200).plan
        assert alone.tiles == -(-rows // alone.block_m)


@pytest.mark.parametrize("name", TARGETS)
def test_a_product_lies_in_one_scale_block_or_in_whole_ones(name):
    for dtype in (BF16, FP16, FP32):
        for rows in (1, 100, 10_000, 1_000_000):
            for codes, scale, block in (
                ("e4m3", "fp32", (128, 128)), ("e4m3", "e8m0", (32, 32)), ("e2m1", "e8m0", (1, 32)),
                ("e4m3", "fp32", (24, 48)), ("e4m3", "e8m0", (64, 48)), ("plain", "none", (1, 1)),
            ):  # fmt: skip
                facts = dict(dtype=dtype, codes=codes, scale=scale, block=block)
                plan = dispatch.choose(problem(rows, 256, **facts), TARGETS[name]).plan
                assert plan.block_k & -plan.block_k == plan.block_k >= 16
                if plan.scaled_values:
                    assert scale == "e8m0" and dtype != FP16 and plan.block_k % block[1] == 0
                elif codes != "plain":
                    assert block[1] % plan.block_k == 0


def test_more_outputs_than_a_launch_has_room_for():
    weight = torch.empty(1, 32 * (2**16 - 1) + 1, 16, dtype=BF16, device="meta")
    with pytest.raises(ValueError, match="; portable: outputs: got 2097121, allowed: at most 2097120, for which"):
        explain("grouped_linear", torch.empty(1, 16, dtype=BF16, device="meta"), None, weight, target="sm_90")


def amid_poison(layout, groups, outputs, columns, device):
    """A weight in the midst of one whose every other code and scale is NaN, or as large as any."""
    wide = random_weight(layout, groups, outputs + 256, columns + 256, moderate=True)
    first, last = layout.block[1], layout.block[1] + columns
    codes, scales = wide.codes.view(torch.uint8).clone(), wide.scales.clone()
    each = 2 if layout.codes == "e2m1" else 1
    keep = torch.zeros(codes.shape[1:], dtype=torch.bool)
    keep[5 : 5 + outputs, first // each : last // each] = True
    codes[:, ~keep] = 0x7F
    if layout.block == (1, 32):
        inside = torch.zeros(scales.shape[1:], dtype=torch.bool)
        inside[5 : 5 + outputs, 1 : -(-last // 32)] = True
        scales[:, ~inside] = 255
    poisoned = PackedWeight(codes.view(wide.codes.dtype).to(device), scales.to(device), layout.name)
    part = weight_rows(weight_columns(poisoned, first, columns + 256), 5, 5 + outputs)
    cut = part.codes[..., : columns // each], part.scales[..., : -(-columns // layout.block[1])]
    return PackedWeight(*cut, part.layout)


@pytest.mark.kernel
@pytest.mark.parametrize("layout, dtype", FORMS, ids=str)
def test_kernel_reads_nothing_beside_its_weight(layout, dtype, device):
    """Columns end inside of a block, of a byte's neighbour, and of what is read at once; outputs begin in a block."""
    weight = amid_poison(layout, 2, 40, 168, device)
    rows = torch.randn(19, 168, generator=torch.Generator().manual_seed(2)).div(64).to(dtype).to(device)
    ends = torch.tensor([2, 19], dtype=torch.int32, device=device)
    got = grouped_linear(rows, ends, weight, impl="portable")
    want = grouped_linear(rows, ends, weight, impl="reference")
    assert want.isfinite().all()
    torch.testing.assert_close(got, want, **CLOSE[dtype])


@pytest.mark.kernel
@pytest.mark.parametrize("ends", [[5, 3, 8, 8], [-1, -(2**31), 2**31 - 1, 4], [30, 0, 0, 0], [0, 20, 10, 30]], ids=str)
def test_kernel_of_ends_out_of_order(ends, device):
    """A group whose end lies before an earlier one has no rows, here and in the reference."""
    weight = torch.randn(4, 24, 16, generator=torch.Generator().manual_seed(1)).to(device)
    rows = torch.randn(30, 16, generator=torch.Generator().manual_seed(2)).to(device)
    given = torch.tensor(ends, dtype=torch.int32, device=device)
    got = grouped_linear(rows, given, weight, impl="portable")
    torch.testing.assert_close(got, grouped_linear(rows, given, weight, impl="reference"), **CLOSE[FP32])


@pytest.mark.kernel
@pytest.mark.parametrize("layout, dtype", [(MXFP4, BF16), (MXFP4, FP32), (SMALL, BF16)], ids=str)
def test_kernel_of_scales_at_the_ends_of_their_range(layout, dtype, device):
    """2^-127, by which codes become subnormal in bf16: e2m1's stay exact, e4m3's lose what lies below 2^-133; NaN."""
    weight = random_weight(layout, 1, 4 * layout.block[0], 128)
    scales = weight.scales.clone()
    least = 16 if dtype == BF16 and device.type == "cpu" else 0  # the interpreter loses bf16's subnormals
    scales[0] = torch.tensor([[least], [1 + least], [127], [255]])
    weight = PackedWeight(weight.codes.to(device), scales.to(device), layout.name)
    rows = torch.ones(2, 128, dtype=dtype, device=device) * 2.0**14
    got = grouped_linear(rows, None, weight, impl="portable").float()
    want = grouped_linear(rows, None, weight, impl="reference").float()
    assert want[:, -layout.block[0] :].isnan().all() and want.isnan().sum() == want.numel() / 4
    lost = 128 * 2.0**14 * 2.0**-134 * (layout.codes == "e4m3")
    torch.testing.assert_close(got, want, rtol=2**-7, atol=lost, equal_nan=True)
