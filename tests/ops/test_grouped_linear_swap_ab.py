"""The product of few rows: its kernel against fp64, what it takes, and codes and scales that its fast way cannot."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from conftest import long
from support import products
from support.products import check, problem, tensor_of
from support.weights import random_weight

from sparse_attn.device.packed_dot import CODES_PER_WORD, _gathered
from sparse_attn.framework.target import H200, TARGETS, target_of
from sparse_attn.ops.layers.products import dispatch, grouped_linear, launch
from sparse_attn.ops.layers.products.problem import Problem
from sparse_attn.ops.layers.products.swap_ab import config
from sparse_attn.ops.layers.products.swap_ab.launch import PLACED, place
from sparse_attn.weight_layout import PackedWeight, WeightLayout, weight_rows

V32 = WeightLayout("e4m3", (128, 128), "fp32")
V4 = WeightLayout("e4m3", (128, 128), "e8m0")
WIDE = WeightLayout("e4m3", (24, 256), "fp32")
MXFP4 = WeightLayout("e2m1", (1, 32), "e8m0")
LAYOUTS = (V32, V4, WIDE, MXFP4)
ENDS = ([5, 21, 21, 33], [0, 1, 17, 36], [37, 37, 37, 37], [0, 0, 0, 37], [0, 0, 0, 0])


def rows_of(n, columns, device):
    return products.rows_of(n, columns, torch.bfloat16, device)


def weight_of(layout, groups, outputs, columns, device):
    codes, scales, name = random_weight(layout, groups, outputs, columns, moderate=True)
    return PackedWeight(codes.to(device), scales.to(device), name)


@pytest.mark.kernel
@pytest.mark.few(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_kernel(layout, device):
    weight, rows = weight_of(layout, 4, 70, 256, device), rows_of(37, 256, device)
    for ends in ENDS if long() else ENDS[:1]:
        check(grouped_linear(rows, tensor_of(ends, device), weight, impl="swap_ab"), rows, ends, weight)
    part = weight_rows(weight, 5, 69)
    wild = grouped_linear(rows, tensor_of([-9, 21, 21, 2**31 - 1], device), part, impl="swap_ab")
    check(wild, rows, [0, 21, 21, 37], part)


@pytest.mark.kernel
@pytest.mark.few(2)
@pytest.mark.parametrize("layout", [V32, MXFP4], ids=lambda layout: layout.name)
@pytest.mark.parametrize("splits, rows", [(1, 1), (3, 20), (4, 1)])
def test_kernel_of_splits(layout, splits, rows, device):
    """The columns of a tile in parts, of which the last may be shorter; the sums are those of whole rows."""
    weight, rows = weight_of(layout, 1, 130, 1024, device), rows_of(rows, 1024, device)
    problem = Problem(rows.shape[0], 1, 130, 1024, torch.bfloat16, False, layout.codes, layout.scale, layout.block)
    choice = dispatch.choose(problem, target_of(device), "swap_ab")
    old = choice.plan
    plan = config.planned(problem, config.Tile(old.block_m, old.block_n, old.block_k, 4, 1), splits)
    codes = weight.codes.view(torch.uint8)
    got = launch.grouped_linear(rows, None, codes, weight.scales, layout.name, False, choice._replace(plan=plan))
    check(got, rows, None, weight)


@pytest.mark.kernel
@pytest.mark.parametrize("codes", CODES_PER_WORD)
@pytest.mark.parametrize("columns", [128, PLACED, PLACED + 384])
def test_kernel_that_places_rows(codes, columns, device):
    """Of every eight words first the values of codes 0, then those of codes 1, and so on; of rows with any strides,
    around which there is NaN. Nothing is written beside."""
    rows = torch.full((3, columns + 5, 2), torch.nan, dtype=torch.bfloat16, device=device)[:, 3 : columns + 3, 1]
    rows.copy_(torch.randint(-(2**14), 2**14, rows.shape, dtype=torch.int16, device=device).view(torch.bfloat16))
    out = torch.full((5, columns), 7.0, dtype=torch.bfloat16, device=device)
    place(rows, out[1:4], codes, target_of(device))
    want = rows.reshape(3, -1, 8, CODES_PER_WORD[codes]).transpose(2, 3).reshape(3, columns)
    assert torch.equal(out[1:4].view(torch.int16), want.view(torch.int16)) and out[[0, 4]].eq(7).all()


@pytest.mark.kernel
def test_kernel_of_every_e2m1_code_and_every_scale(device):
    """A row of one 1 reads a column of the weight: each value is exact, or what bf16 makes of it; NaN where it is."""
    columns, scales = 256, torch.arange(256, dtype=torch.uint8)
    codes = torch.arange(128, dtype=torch.uint8).view(1, 1, 128).repeat(1, 256, 1) * 37 + 11
    weight = PackedWeight(codes, scales.view(1, 256, 1).repeat(1, 1, 8).contiguous(), MXFP4.name)
    interpreted = device.type == "cpu"
    if interpreted:  # which loses bf16's subnormals
        weight.scales[0, :8] = 8
    weight = PackedWeight(weight.codes.to(device), weight.scales.to(device), MXFP4.name)
    rows = torch.zeros(16, columns, dtype=torch.bfloat16, device=device)
    rows[torch.arange(16), torch.arange(16) * 17] = 1
    got = grouped_linear(rows, None, weight, impl="swap_ab")
    want = grouped_linear(rows, None, weight, impl="reference")
    assert want[:, 255].isnan().all() and torch.equal(got.isnan(), want.isnan())
    infinite = want.isinf()  # times a row's zeros: NaN or infinite
    torch.testing.assert_close(got[~infinite], want[~infinite], rtol=0, atol=0, equal_nan=True)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", [V32, V4], ids=lambda layout: layout.name)
def test_kernel_of_every_e4m3_code(layout, device):
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 128)
    weight = weight_of(layout, 1, 256, 128, device)._replace(codes=codes.to(device).view(torch.float8_e4m3fn))
    rows = torch.zeros(3, 128, dtype=torch.bfloat16, device=device)
    rows[torch.arange(3), torch.tensor([0, 77, 126])] = 1
    got, want = (grouped_linear(rows, None, weight, impl=impl) for impl in ("swap_ab", "reference"))
    assert got.isnan().sum() == 6
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.kernel
def test_kernel_gives_nan_where_a_scale_a_code_or_a_row_is_one_and_nowhere_else(device):
    rows = rows_of(3, 256, device).clone()
    rows[1, 7] = float("nan")
    weight = weight_of(V4, 1, 140, 256, "cpu")
    codes, scales = weight.codes.clone(), weight.scales.clone()
    codes.view(torch.uint8)[0, 3, 127], scales[0, 1, 0] = 0xFF, 255
    bad = grouped_linear(rows, None, PackedWeight(codes.to(device), scales.to(device), weight.layout), impl="swap_ab")
    want = torch.zeros(3, 140, dtype=torch.bool)
    want[1], want[:, 3], want[:, 128:] = True, True, True
    assert torch.equal(bad.isnan().cpu(), want)


@triton.jit
def gather(flags, out, ROWS: tl.constexpr, WORDS: tl.constexpr):
    row, four = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, 4)[None, :]
    each = tl.load(flags + row * WORDS + tl.arange(0, WORDS)[None, :])
    tl.store(out + row * 4 + four, _gathered(each, ROWS, WORDS))


@pytest.mark.kernel
@pytest.mark.parametrize("words", [8, 16, 32, 64])
def test_flags_of_every_word_are_gathered(words, device):
    """A row for each bit of each word, which has nothing else."""
    bit = torch.arange(32 * words, device=device)
    flags = torch.zeros(32 * words, words, dtype=torch.int32, device=device)
    want, out = flags[:, :4].clone(), flags[:, :4].clone()
    value = (1 << bit % 32).int()
    flags[bit, bit // 32] = want[bit, bit // 32 % 8 // 2] = value
    gather[(words // 2,)](flags, out, 64, words)
    assert torch.equal(out, want)


@pytest.mark.kernel
@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [1, 40, 128])
def test_kernel_of_nan_in_one_code_of_a_tile(rows, device):
    """Tile c of 64 outputs has one, in column c."""
    codes, scales, name = random_weight(V32, 1, 64 * 128, 128, moderate=True)
    at = torch.arange(128)
    codes.view(torch.uint8)[0, 64 * at + at % 64, at] = torch.where(at % 2 == 0, 0x7F, 0xFF).to(torch.uint8)
    weight = PackedWeight(codes.to(device), scales.to(device), name)
    bad = grouped_linear(rows_of(rows, 128, device), None, weight, impl="swap_ab").isnan().cpu()
    want = torch.zeros(rows, 64 * 128, dtype=torch.bool)
    want[:, 64 * at + at % 64] = True
    assert torch.equal(bad, want)


@pytest.mark.parametrize("change, reason", [
    (dict(dtype=torch.float16), "rows: got float16, allowed: bfloat16"),
    (dict(codes="plain", scale="none", block=(1, 1)), "codes: got plain, allowed: e2m1, e4m3"),
    (dict(block=(32, 32)), "scale blocks: got 32x32 of fp32, allowed: a multiple of 128 columns"),
    (dict(codes="e2m1", block=(1, 32)), "scale blocks: got 1x32 of fp32, allowed: 1x32 of e8m0"),
    (dict(codes="e2m1", scale="e8m0", block=(1, 64)), "scale blocks: got 1x64 of e8m0, allowed: 1x32 of e8m0"),
    (dict(columns=7200), "columns: got 7200, allowed: multiples of 128"),
    (dict(aligned=False), "codes: got any address and strides"),
    (dict(rows=258, groups=2), "rows: got 129 a group, allowed: at most 128"),
])  # fmt: skip
def test_what_it_does_not_take(change, reason):
    choice = dispatch.choose(problem(**dict(rows=1, groups=1) | change), H200)
    assert choice.kernel.name == ("expanded" if "rows" in change else "portable")
    assert dict(choice.passed_over)["swap_ab"].startswith(reason)


@pytest.mark.parametrize("name", TARGETS)
def test_splits_cover_the_columns_and_none_is_empty(name):
    for codes, scale, block in (("e4m3", "fp32", (128, 128)), ("e2m1", "e8m0", (1, 32))):
        for steps in (1, 2, 3, 7, 12, 56, 57, 128):
            for rows, outputs in ((1, 64), (1, 4096), (64, 7168), (128, 24576)):
                facts = dict(codes=codes, scale=scale, block=block, outputs=outputs, columns=steps * 256)
                plan = dispatch.choose(problem(rows, 1, **facts), TARGETS[name], "swap_ab").plan
                count = steps * 256 // plan.block_k
                each = -(-count // plan.splits)
                assert (plan.splits - 1) * each < count <= plan.splits * each
