"""Packed weights: their bytes against an oracle in fp64 that reads bits, cuts at every place, and what is refused."""

from __future__ import annotations

import pytest
import torch
from support.weights import random_weight

from sparse_attn.weight_layout import (
    PackedWeight,
    WeightLayout,
    dequantise,
    packed_weight,
    parse_weight_layout,
    weight_bytes,
    weight_columns,
    weight_entry,
    weight_rows,
    weight_shape,
)

FP8_FP32 = WeightLayout("e4m3", (8, 16), "fp32")
FP8_E8M0 = WeightLayout("e4m3", (8, 16), "e8m0")
MXFP4 = WeightLayout("e2m1", (1, 32), "e8m0")
LAYOUTS = (FP8_FP32, FP8_E8M0, MXFP4)


def minifloat(code, exponent_bits, mantissa_bits, bias):
    """The fp64 value of a code, out of its bits."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent, mantissa = (code >> mantissa_bits) & (2**exponent_bits - 1), code & (2**mantissa_bits - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa * 2.0**-mantissa_bits) * 2.0 ** (exponent - bias)


def oracle(weight):
    """fp64 values of a matrix, one by one."""
    layout = parse_weight_layout(weight.layout)
    rows, columns = weight_shape(weight)
    codes = weight.codes.view(torch.uint8).tolist()
    fp32 = weight.scales.dtype == torch.float32
    scales = weight.scales.tolist() if fp32 else weight.scales.tolist()
    out = torch.empty(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            if layout.codes == "e4m3":
                value = minifloat(codes[row][column], 4, 3, 7)
            else:
                pair = codes[row][column // 2]
                value = minifloat(pair & 15 if column % 2 == 0 else pair >> 4, 2, 1, 1)
            scale = scales[(row + layout.first_row) // layout.block[0]][column // layout.block[1]]
            out[row, column] = value * (scale if fp32 else 2.0 ** (scale - 127))
    return out


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("rows,columns", [(8, 32), (19, 64), (1, 32), (16, 160)])
def test_values_are_the_bits(layout, rows, columns):
    weight = random_weight(layout, rows, columns)
    want = oracle(weight)
    got = dequantise(weight)
    assert got.dtype == torch.float32 and torch.equal(got, want.float())
    if layout.scale == "e8m0":  # a power of two rounds nothing
        assert torch.equal(got.double(), want)


def test_codes_and_scales_of_a_published_row():
    """Eight bytes of an expert of DeepSeek-V4.1, whose scale is 2^-7."""
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, :8] = torch.tensor(list(bytes.fromhex("a0a8ec4aadaf42aa")), dtype=torch.uint8)
    weight = packed_weight(codes, torch.tensor([[0x78]], dtype=torch.uint8), MXFP4)
    first = [0, -0.0078125, -0.0, -0.0078125, -0.015625, -0.03125]
    assert dequantise(weight)[0, :6].tolist() == first
    assert torch.signbit(dequantise(weight)[0, :6]).tolist() == [False, True, True, True, True, True]


@pytest.mark.parametrize("byte,value", [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127), (255, torch.nan)])
def test_scales_at_the_ends_of_their_range(byte, value):
    """Byte 0 is 2^-127, not 0; 255 is NaN, not a power."""
    codes = torch.full((1, 1), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 1
    scales = torch.tensor([[byte]], dtype=torch.uint8)
    torch.testing.assert_close(
        dequantise(packed_weight(codes, scales, FP8_E8M0)), torch.tensor([[value]]), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_rows_are_cut_anywhere_and_cut_again(layout):
    whole = random_weight(layout, 3, 27, 64)
    values = dequantise(whole)
    for start in range(27):
        for stop in (start, start + 1, 16, 26, 27):
            if start > stop:
                continue
            part = weight_rows(whole, start, stop)
            assert packed_weight(part.codes, part.scales, parse_weight_layout(part.layout)) == part
            assert torch.equal(dequantise(part), values[:, start:stop])
            assert part.codes.untyped_storage().data_ptr() == whole.codes.untyped_storage().data_ptr()
            if stop - start > 2:
                again = weight_rows(part, 1, stop - start - 1)
                assert torch.equal(dequantise(again), values[:, start + 1 : stop - 1])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_columns_are_cut_at_blocks(layout):
    step, whole = layout.block[1], random_weight(layout, 3, 5, 96)
    values = dequantise(whole)
    for start in range(0, 96, step):
        for stop in range(start, 97, step):
            part = weight_columns(whole, start, stop)
            assert weight_shape(part) == (3, 5, stop - start)
            assert torch.equal(dequantise(part), values[..., start:stop])
    for start, stop in ((1, 96), (0, step + 2), (step // 2, step)):
        with pytest.raises(ValueError, match=f"^columns: got {start} to {stop}, allowed: multiples of .* {step}$"):
            weight_columns(whole, start, stop)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_an_entry_is_a_weight(layout):
    whole = random_weight(layout, 4, 9, 32)
    assert torch.equal(dequantise(weight_entry(whole, 2)), dequantise(whole)[2])
    assert weight_bytes(whole) == 4 * (9 * 32 // (2 if layout.codes == "e2m1" else 1)) + whole.scales.nbytes


def test_a_plain_tensor_is_a_weight():
    plain = torch.randn(2, 6, 8).bfloat16()
    assert torch.equal(dequantise(weight_rows(weight_columns(plain, 3, 8), 1, 6)), plain[:, 1:6, 3:8].float())
    assert torch.equal(weight_entry(plain, 1), plain[1])
    assert weight_bytes(plain) == 2 * 6 * 8 * 2 and weight_shape(plain) == (2, 6, 8)


@pytest.mark.parametrize("layout", (*LAYOUTS, WeightLayout("e4m3", (128, 128), "fp32", 77)), ids=lambda one: one.name)
def test_a_name_is_a_layout(layout):
    assert parse_weight_layout(layout.name) == layout


@pytest.mark.parametrize(
    "name", ["", "e4m3", "e4m3/8x16", "e4m3/8/fp32", "e5m2/8x16/fp32", "e4m3/8x16/bf16", "e2m1/1x31/e8m0",
             "e4m3/8x16/fp32/8", "e4m3/0x16/fp32", "e4m3/8x16/fp32/1/2"],
)  # fmt: skip
def test_names_of_no_layout(name):
    with pytest.raises(ValueError, match="^layout: got"):
        parse_weight_layout(name)


def test_a_scale_of_the_other_kind_is_refused():
    """Neither a power's byte taken for a number nor a number's bytes for powers."""
    codes = torch.zeros(8, 16, dtype=torch.float8_e4m3fn)
    number, power = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.uint8)
    for scales, layout in ((number, FP8_E8M0), (power, FP8_FP32), (number.bfloat16(), FP8_FP32)):
        with pytest.raises(TypeError, match="^scales: got"):
            packed_weight(codes, scales, layout)
    with pytest.raises(TypeError, match="^codes: got"):
        packed_weight(codes.view(torch.uint8), number, FP8_FP32)
    for grid in ((2, 1), (1, 2), (1, 1, 1)):
        with pytest.raises(ValueError, match=r"^scales: got shape .* allowed: \[1, 1\]"):
            packed_weight(codes, torch.ones(grid), FP8_FP32)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("dynamic", (False, True))
def test_a_packed_weight_is_traced(layout, dynamic):
    """As an argument and as a result, cut on the way."""
    whole = random_weight(layout, 27, 64)

    def cut(params):
        part = weight_rows(params["w"], 3, 20)
        return part, dequantise(part)

    part, values = torch.compile(cut, backend="eager", fullgraph=True, dynamic=dynamic)({"w": whole})
    assert isinstance(part, PackedWeight) and part.layout == weight_rows(whole, 3, 20).layout
    assert torch.equal(values, dequantise(whole)[3:20])


def test_a_packed_weight_is_exported(tmp_path):
    class Values(torch.nn.Module):
        def forward(self, weight):
            return dequantise(weight)

    weight = random_weight(MXFP4, 9, 64)
    torch.export.save(torch.export.export(Values(), (weight,)), tmp_path / "program.pt2")
    assert torch.equal(torch.export.load(tmp_path / "program.pt2").module()(weight), dequantise(weight))
