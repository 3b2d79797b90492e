"""A checkpoint in another form: bf16 is quantised as an oracle in fp64 does it, what is quantised is never rounded."""

from __future__ import annotations

import itertools
import json
import os

import pytest
import safetensors
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import SPECS, written

from sparse_attn.checkpoints import convert as converting
from sparse_attn.checkpoints import formats
from sparse_attn.checkpoints.convert import convert
from sparse_attn.checkpoints.load import load
from sparse_attn.checkpoints.published import write_published
from sparse_attn.cli.main import main
from sparse_attn.weight_layout import PackedWeight, WeightLayout, dequantise, quantise

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def tensors_of(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def same(got, want):
    return (
        got.dtype == want.dtype
        and got.shape == want.shape
        and torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    )


def nearest(value, grid):
    """The value of the grid that is nearest to a number; of two as near, that of the even code."""
    return min(range(len(grid)), key=lambda code: (abs(grid[code] - abs(value)), code % 2))


@pytest.mark.parametrize("name", ["e2m1/1x32/e8m0", "e4m3/16x32/e8m0", "e4m3/16x32/fp32"])
def test_quantise_takes_the_nearest_code(name):
    """Against plain Python in fp64, over ties, zeros of both signs, blocks of zeros, and blocks that are not full."""
    codes, (high, wide), scale = name.split("/")[0], map(int, name.split("/")[1].split("x")), name.split("/")[2]
    rows, columns = 19, 96
    grid = E2M1 if codes == "e2m1" else torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 3
    values[0, :16] = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0.0]
    )
    values[0, 16:32], values[16:, 32:64], values[3, 40] = -0.0, 0.0, 2.0**-140
    found = quantise(values, WeightLayout(codes, (high, wide), scale))
    got = dequantise(found)
    for top, left in itertools.product(range(0, rows, high), range(0, columns, wide)):
        block = values[top : top + high, left : left + wide].double()
        amax = block.abs().max().item()
        number = amax / grid[-1] if amax else 1.0
        if scale == "e8m0":
            number = next(2.0**power for power in range(-126, 128) if 2.0**power >= number) if amax else 1.0
        for row, column in itertools.product(range(block.shape[0]), range(block.shape[1])):
            value = block[row, column].item()
            want = grid[nearest(value / number, grid)] * number
            assert abs(got[top + row, left + column].item()) == pytest.approx(want, rel=1e-6), (top, left, row, column)
    assert (got * values >= 0).all()


def test_quantise_refuses_what_is_no_number():
    values = torch.ones(2, 32)
    values[1, 3] = torch.nan
    with pytest.raises(ValueError, match="values: got NaN or infinite"):
        quantise(values, WeightLayout("e2m1", (1, 32), "e8m0"))
    with pytest.raises(ValueError, match="begins inside of a block"):
        quantise(torch.ones(2, 32), WeightLayout("e4m3", (8, 32), "fp32", 3))


CASES = [("v32", "published"), ("v32", "fp8-e8m0"), ("v32", "fused"), ("glm", "published"), ("v4", "published"),
         ("v4", "flash-base"), ("v4", "fp8-e8m0"), ("v4", "fused")]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name,form", CASES)
def test_bf16_becomes_a_published_form(tmp_path, name, form):
    """The same names, dtypes and shapes as write_published gives, and values within half a step of the codes."""
    source = written(name, "bf16")
    spec, total = convert(source, tmp_path / "out", form)
    got, like = tensors_of(tmp_path / "out"), tensors_of(written(name, form))
    facts = [{key: (value.dtype, value.shape) for key, value in tensors.items()} for tensors in (got, like)]
    assert facts[0] == facts[1] and total == sum(value.nbytes for value in got.values())
    before, after = (
        load(source, dtype=torch.float32, expand=True)[1],
        load(tmp_path / "out", dtype=torch.float32, expand=True)[1],
    )
    rounded = 0
    for key, value in before.items():
        if torch.equal(after[key], value):
            continue
        fp4 = name == "v4" and form in ("published", "fused") and key.endswith(("moe.gate_up", "moe.down"))
        step = (after[key] - value).abs().max() / value.abs().max()
        assert step <= (1 / 4 if fp4 else 1 / 16), key  # the widest half step over the least amax under a power of two
        rounded += 1
    assert rounded > 5 * spec.num_layers
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        config["quantization_config"]
        == json.loads((written(name, form) / "config.json").read_text())["quantization_config"]
    )


EXACT = [("v4", "published", "fused"), ("v4", "fused", "published"), ("v4", "published", "published"),
         ("v4", "fp8-e8m0", "flash-base"), ("v32", "fp8-e8m0", "published"), ("v32", "published", "published"),
         ("v32", "fused", "published"), ("v4", "published", "bf16")]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name,source,form", EXACT)
def test_what_is_quantised_keeps_its_values(tmp_path, name, source, form):
    before = load(written(name, source), dtype=torch.float32, expand=True)[1]
    convert(written(name, source), tmp_path / "out", form)
    after = load(tmp_path / "out", dtype=torch.float32, expand=True)[1]
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(after[key], value), key
    if source == form:
        got, want = tensors_of(tmp_path / "out"), tensors_of(written(name, source))
        assert got.keys() == want.keys() and all(same(got[key], want[key]) for key in want)


@pytest.mark.parametrize("name,source,form,weight", [
    ("v32", "published", "fp8-e8m0", "got e4m3/128x128/fp32, values that e4m3/128x128/e8m0 does not hold"),
    ("v4", "flash-base", "published", "got e4m3/128x128/fp32, values that e"),
    ("v4", "published", "flash-base", "ffn.experts.* got e2m1/1x32/e8m0, values that e4m3/128x128/fp32 does not hold"),
])  # fmt: skip
def test_what_would_be_rounded_again_is_refused(tmp_path, name, source, form, weight):
    folder = written(name, source)
    if name == "v4" and source == "published":
        folder = with_experts(folder, tmp_path / "in", 127, 110)
    with pytest.raises(ValueError, match=f"weight .*{weight}"):
        convert(folder, tmp_path / "out", form)
    assert [path.name for path in tmp_path.iterdir() if path.name != "in"] == []


def with_experts(folder, to, greatest, least):
    """A copy whose first expert has scale bytes ``greatest`` and ``least`` in a block of 128 x 128: under the one a 6,
    under the other a half."""
    tensors = tensors_of(folder)
    codes, scales = tensors["layers.1.ffn.experts.0.w2.weight"], tensors["layers.1.ffn.experts.0.w2.scale"]
    scales.view(torch.uint8)[:] = greatest
    codes.view(torch.uint8)[:] = 0x77
    scales.view(torch.uint8)[5, 1], codes.view(torch.uint8)[5, 16:32] = least, 0x11
    to.mkdir()
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


@pytest.mark.parametrize("least,exact", [(110, False), (112, False), (113, True), (127, True)])
def test_fp4_becomes_block_fp8_where_its_scales_span_little(tmp_path, least, exact):
    """A half under byte 110 beside a 6 under 127 is 2^-12 of e4m3's scale, and e4m3 ends at 2^-9."""
    weight = load(with_experts(written("v4", "published"), tmp_path / "in", 127, least), expand=False)[1][
        "layers.1.moe.down"
    ]
    one = PackedWeight(weight.codes[0], weight.scales[0], weight.layout)
    if not exact:
        with pytest.raises(
            ValueError, match=r"w2.weight: got e2m1/1x32/e8m0, values that .* does not hold \(32 of 8192\)"
        ):
            converting._converted("layers.1.ffn.experts.0.w2.weight", one, formats.FP8_E8M0)
        return
    found = converting._converted("w2", one, formats.FP8_E8M0)
    assert torch.equal(dequantise(found), dequantise(one)) and found.scales.tolist() == [[121]]


def test_the_command_converts_and_copies_the_tokenizer(tmp_path, capsys):
    source = written("v4", "bf16")
    (source / "tokenizer.json").write_text("{}")
    out = str(tmp_path / "out")
    assert main(["write-checkpoint", "--from", str(source), "--out", out]) == 0
    assert "published" in capsys.readouterr().out and (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    (source / "tokenizer.json").unlink()
    for more, message in ((["--layers", "1"], "--from: got it with --layers"), (["--seed", "1"], "--layers or --seed"),
                          ([], "which holds files"), (["--format", "flash-base"], "which holds files")):  # fmt: skip
        assert main(["write-checkpoint", "--from", str(source), "--out", out, *more]) == 2
        assert message in capsys.readouterr().err


def test_nothing_stays_of_a_folder_that_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(converting, "scale_name", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(written("v4", "bf16"), tmp_path / "out", "published")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def full(*_, **__):
        raise safetensors.SafetensorError("no space left")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match=r"out/model.*\.safetensors: no space left"):
        convert(written("v4", "bf16"), tmp_path / "out", "published")
    assert not list(tmp_path.iterdir())


def test_written_files_are_as_readable_as_others(tmp_path):
    old = os.umask(0o027)
    try:
        write_published(tmp_path / "out", SPECS["v32"], "fp8-e8m0")
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}
