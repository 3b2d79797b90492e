"""Products with packed weights: the reference and the kernel against fp64, and what is refused."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from conftest import long
from expecttest import assert_expected_inline
from support.products import check, check_replays, drawn_ends, rows_of, tensor_of
from support.weights import random_weight

from sparse_attn.models.params import hold_weight
from sparse_attn.ops.layers.products import grouped_linear, linear, reference
from sparse_attn.testing.ops import opcheck, schema
from sparse_attn.weight_layout import (
    PackedWeight,
    WeightLayout,
    dequantise,
    parse_weight_layout,
    weight_columns,
    weight_rows,
    weight_shape,
)

NAN = float("nan")
V32 = WeightLayout("e4m3", (128, 128), "fp32")
V4 = WeightLayout("e4m3", (128, 128), "e8m0")
SMALL = WeightLayout("e4m3", (32, 32), "e8m0")
ODD = WeightLayout("e4m3", (24, 48), "fp32")
MXFP4 = WeightLayout("e2m1", (1, 32), "e8m0")
LAYOUTS = (V32, V4, SMALL, ODD, MXFP4)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Ends of four groups, for 37 rows: empty groups at every place, a group as long as a tile, rows behind the last.
ENDS = ([37, 37, 37, 37], [0, 0, 0, 37], [5, 21, 21, 33], [0, 1, 17, 36], [0, 0, 0, 0], [16, 32, 36, 37])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_reference(layout, dtype):
    weight, rows = random_weight(layout, 4, 70, 192, moderate=True), rows_of(37, 192, dtype)
    for ends in ENDS:
        check(grouped_linear(rows, tensor_of(ends), weight, impl="reference"), rows, ends, weight)


def test_reference_expands_a_band_at_a_time(monkeypatch):
    """No band is as large as the weight, and no group without rows is expanded."""
    seen = []
    monkeypatch.setattr(reference, "BAND", 10 * 192)
    monkeypatch.setattr(reference, "dequantise", lambda part: seen.append(weight_shape(part)) or dequantise(part))
    weight, rows = random_weight(V4, 4, 25, 192, moderate=True), rows_of(37, 192, torch.float32)
    check(grouped_linear(rows, tensor_of([0, 7, 7, 37]), weight, impl="reference"), rows, [0, 7, 7, 37], weight)
    assert seen == [(10, 192), (10, 192), (5, 192)] * 2


def test_a_plain_weight():
    weight, rows = torch.randn(4, 19, 64), rows_of(37, 64, torch.float32)
    check(grouped_linear(rows, tensor_of(ENDS[2]), weight), rows, ENDS[2], weight)
    assert torch.equal(linear(rows, weight[0]), F.linear(rows, weight[0]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_linear_of_any_leading_shape(layout):
    weight = PackedWeight(*random_weight(layout, 33, 192, moderate=True))
    rows = torch.randn(2, 3, 192)
    got = linear(rows, weight)
    assert got.shape == (2, 3, 33)
    whole = PackedWeight(weight.codes[None], weight.scales[None], weight.layout)
    check(got.flatten(0, 1), rows.flatten(0, 1), None, whole)
    assert linear(rows[:0], weight).shape == (0, 3, 33) and linear(rows[0, 0], weight).shape == (33,)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_cuts_of_a_weight_are_parts_of_the_product(layout):
    weight, rows = random_weight(layout, 2, 70, 192, moderate=True), rows_of(9, 192, torch.float32)
    ends = tensor_of([4, 9])
    whole = grouped_linear(rows, ends, weight)
    for start, stop in ((0, 70), (1, 33), (25, 26), (69, 70)):
        part = weight_rows(weight, start, stop)
        torch.testing.assert_close(grouped_linear(rows, ends, part), whole[:, start:stop], rtol=1e-4, atol=1e-4)
    half = layout.block[1] * 2 if layout.block[1] < 96 else layout.block[1]
    sums = sum(grouped_linear(rows[:, a:b], ends, weight_columns(weight, a, b)) for a, b in ((0, half), (half, 192)))
    torch.testing.assert_close(sums, whole, rtol=1e-4, atol=1e-3)


def test_schema():
    assert_expected_inline(
        schema("grouped_linear").replace(", ", ",\n"),
        """\
sparse_attn::grouped_linear(Tensor rows,
Tensor? ends,
Tensor codes,
Tensor? scales,
str layout,
bool batch_invariant,
str impl) -> Tensor""",
    )


@pytest.mark.parametrize("layout", [V32, MXFP4], ids=lambda layout: layout.name)
def test_opcheck(layout):
    rows, (codes, scales, name) = torch.randn(9, 128).bfloat16(), random_weight(layout, 3, 17, 128, moderate=True)
    codes, ends = codes.view(torch.uint8), torch.tensor([2, 2, 8], dtype=torch.int32)
    opcheck("grouped_linear", rows, ends, codes, scales, name, False, "auto")
    opcheck("grouped_linear", rows[:0], ends * 0, codes, scales, name, False, "auto")
    opcheck("grouped_linear", rows.t().contiguous().t(), None, codes[:1], scales[:1], name, False, "auto")
    opcheck("grouped_linear", rows, ends, torch.randn(3, 17, 128).bfloat16(), None, "plain", True, "auto")


def test_traces_without_breaks_or_recompiles():
    weight = hold_weight(random_weight(V4, 3, 17, 128, moderate=True))

    def step(rows, ends, weight):
        return grouped_linear(rows, ends, weight)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (17, 3, 128, 9):  # as many as outputs, groups and columns among them
        rows, ends = rows_of(n, 128, torch.float32), tensor_of([n // 2, n // 2, n])
        with torch.compiler.set_stance("default" if n == 17 else "fail_on_recompile"):
            assert torch.equal(compiled(rows, ends, weight), step(rows, ends, weight))


@pytest.mark.parametrize("change,error,message", [
    (dict(rows=torch.zeros(3, 128, dtype=torch.float64)), TypeError, "rows: got dtype float64"),
    (dict(rows=torch.zeros(3, 64)), ValueError, "rows: got shape"),
    (dict(rows=torch.zeros(128)), ValueError, "rows: got"),
    (dict(ends=torch.zeros(2, dtype=torch.int64)), TypeError, "ends: got dtype int64"),
    (dict(ends=torch.zeros(3, dtype=torch.int32)), ValueError, "ends: got shape"),
    (dict(ends=None), ValueError, r"ends: got None, allowed: int32 \[2\]"),
    (dict(weight=torch.zeros(2, 5, 128, dtype=torch.float16)), TypeError, "weight: got dtype float16"),
    (dict(weight=torch.zeros(5, 128)), ValueError, "weight: got"),
    (dict(weight=random_weight(MXFP4, 2, 5, 128)._replace(layout="e2m1/1x64/e8m0")), ValueError, "scales: got shape"),
    (dict(weight=random_weight(MXFP4, 2, 5, 128)._replace(layout="e4m3/1x32/e8m0")), TypeError, "codes: got torch.uint8"),
    (dict(weight=random_weight(V4, 2, 5, 128)._replace(layout="e4m3/128x128/fp32")), TypeError, "scales: got torch.uint8"),
    (dict(weight=random_weight(WeightLayout("e4m3", (8, 24), "fp32"), 2, 5, 128)), ValueError, "scale blocks of 24"),
    (dict(impl="hopper"), ValueError, "impl: got 'hopper'"),
])  # fmt: skip
def test_errors(change, error, message):
    arguments = dict(
        rows=torch.zeros(3, 128), ends=torch.tensor([1, 3], dtype=torch.int32), weight=random_weight(MXFP4, 2, 5, 128)
    )
    arguments |= change
    with pytest.raises(error, match=message):
        grouped_linear(arguments.pop("rows"), arguments.pop("ends"), arguments.pop("weight"), **arguments)


@pytest.mark.kernel
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_kernel(layout, dtype, device):
    weight = random_weight(layout, 4, 34, 96, moderate=True)
    weight = PackedWeight(weight.codes.to(device), weight.scales.to(device), weight.layout)
    rows = rows_of(37, 96, dtype, device)
    for ends in ENDS if long() else ENDS[2:4]:
        check(grouped_linear(rows, tensor_of(ends, device), weight, impl="triton"), rows, ends, weight)
    part = weight_rows(weight, 5, 33)
    wild = grouped_linear(rows, tensor_of([-9, 21, 21, 2**31 - 1], device), part, impl="triton")
    check(wild, rows, [0, 21, 21, 37], part)


@pytest.mark.kernel
def test_kernel_of_a_plain_weight_of_other_strides(device):
    rows = rows_of(37, 65, torch.bfloat16, device)
    weight = torch.randn(4, 65, 70, device=device).bfloat16().transpose(1, 2)
    check(grouped_linear(rows, tensor_of(ENDS[2], device), weight, impl="triton"), rows, ENDS[2], weight)


@pytest.mark.kernel
def test_kernel_gives_nan_where_a_scale_a_code_or_a_row_is_one_and_nowhere_else(device):
    rows = torch.randn(3, 128, device=device)
    rows[1, 7] = NAN
    weight = random_weight(V4, 1, 140, 128, moderate=True)
    codes, scales = weight.codes.clone(), weight.scales.clone()
    codes.view(torch.uint8)[0, 3, 127], scales[0, 1, 0] = 0x7F, 255
    weight = PackedWeight(codes.to(device), scales.to(device), weight.layout)
    for impl in ("reference", "triton"):
        bad = grouped_linear(rows, None, weight, impl=impl).isnan().cpu()
        want = torch.zeros(3, 140, dtype=torch.bool)
        want[1], want[:, 3], want[:, 128:] = True, True, True
        assert torch.equal(bad, want)


@pytest.mark.gpu
@pytest.mark.parametrize("layout,shape", [(MXFP4, (32, 512, 1024)), (V32, (8, 700, 2048)), (V4, (1, 2048, 1536))])
@pytest.mark.parametrize("n", [1, 16, 100, 3000])
def test_gpu_many_rows_compiled_and_captured(layout, shape, n):
    weight = random_weight(layout, *shape, moderate=True)
    weight = PackedWeight(weight.codes.cuda(), weight.scales.cuda(), weight.layout)
    rows = rows_of(n, shape[2], torch.bfloat16, "cuda")
    spread = drawn_ends(n, shape[0])
    spread[:, -1] = n
    given = spread[0].int().cuda()
    check(grouped_linear(rows, given, weight), rows, spread[0].tolist(), weight)
    compiled = torch.compile(grouped_linear, fullgraph=True, dynamic=True)
    eager = grouped_linear(rows, given, weight)
    assert torch.equal(compiled(rows, given, weight), eager)
    multiply = functools.partial(grouped_linear, rows, given, weight)
    check_replays(multiply, given, spread, lambda out, ends: check(out, rows, ends, weight))


@pytest.mark.gpu
def test_gpu_weights_of_more_than_two_gib():
    """Offsets of groups, rows and codes beyond 2**31."""
    layout = parse_weight_layout("e4m3/128x128/e8m0")
    codes = torch.zeros(2, 70_000, 32_768, dtype=torch.uint8, device="cuda")
    codes[1, -1] = 0x38  # 1.0
    scales = torch.full((2, *layout.grid(70_000, 32_768)), 127, dtype=torch.uint8, device="cuda")
    weight = PackedWeight(codes.view(torch.float8_e4m3fn), scales, layout.name)
    rows = torch.ones(2, 32_768, dtype=torch.bfloat16, device="cuda")
    out = grouped_linear(rows, torch.tensor([1, 2], dtype=torch.int32, device="cuda"), weight)
    assert out[1, -1].item() == 32_768 and out.count_nonzero().item() == 1
