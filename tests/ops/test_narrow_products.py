"""Weights of gates and index weights: held as files have them, multiplied without rounding either factor."""

from __future__ import annotations

import pytest
import torch
from support.launched import launched

from sparse_attn.checkpoints.load import load
from sparse_attn.checkpoints.memory import weight_bytes
from sparse_attn.checkpoints.published import write_published
from sparse_attn.checkpoints.random_packed import random_packed_params
from sparse_attn.checkpoints.save import save
from sparse_attn.models.norms import linear_fp32
from sparse_attn.models.params import NARROW, param_dtype, random_params
from sparse_attn.spec import preset
from sparse_attn.weight_layout import weight_bytes as bytes_of


def narrow(params):
    return {name: value for name, value in params.items() if name.endswith(NARROW)}


@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
@pytest.mark.parametrize("names", ("transformers", "published"))
def test_they_are_held_and_saved_as_files_have_them(name, names, tmp_path):
    write_published(tmp_path / "files", preset(name), "published", seed=2)
    spec, held = load(tmp_path / "files")
    wide = load(tmp_path / "files", dtype=torch.float32)[1]
    assert len(narrow(held)) > spec.num_layers
    for key, value in narrow(held).items():
        assert value.dtype == torch.bfloat16 and wide[key].dtype == torch.float32
        assert torch.equal(value.float(), wide[key])
    drawn = random_packed_params(spec, seed=0)
    assert {key: value.dtype for key, value in narrow(drawn).items()} == dict.fromkeys(narrow(held), torch.bfloat16)
    assert sum(map(bytes_of, drawn.values())) == sum(weight_bytes(spec, torch.bfloat16, "published").values())
    if names == "transformers":
        held = load(tmp_path / "files", expand=True)[1]
    save(tmp_path / "again", spec, held, names=names)
    again = load(tmp_path / "again")[1]
    assert all(
        torch.equal(again[key], value) and again[key].dtype == value.dtype for key, value in narrow(held).items()
    )


@pytest.mark.parametrize("names", ("transformers", "published"))
def test_values_that_bf16_does_not_hold_stay_fp32(names, tmp_path):
    spec = preset("tiny_v32")
    params = random_params(spec, seed=1, dtype=torch.bfloat16)
    save(tmp_path, spec, params, names=names)
    found = narrow(load(tmp_path)[1])
    assert found and all(torch.equal(value, params[key]) for key, value in found.items())
    assert {value.dtype for value in found.values()} == {torch.float32}


def test_dtypes():
    assert param_dtype("layers.3.moe.gate", torch.bfloat16) == torch.float32
    assert param_dtype("layers.3.moe.gate", torch.bfloat16, torch.float32) == torch.float32
    assert param_dtype("layers.3.moe.gate", torch.float16, torch.bfloat16) == torch.float32
    assert param_dtype("layers.3.index.weights", torch.bfloat16, torch.bfloat16) == torch.bfloat16
    assert param_dtype("layers.3.moe.bias", torch.bfloat16, torch.bfloat16) == torch.float32


def factors(tokens, outputs, columns, device):
    """Sums of terms that are far larger than they are: what is rounded on the way shows."""
    generator = torch.Generator("cpu").manual_seed(tokens)
    x, weight = (torch.randn(rows, columns, generator=generator).bfloat16() for rows in (tokens, outputs))
    x[:, columns // 2 :], weight[:, columns // 2 :] = x[:, : columns // 2], -weight[:, : columns // 2]
    weight[:, 0] += 0.0625
    return x.to(device), weight.to(device)


def exact(x, weight):
    return x.double() @ weight.double().t()


@pytest.mark.parametrize("wide", (False, True))
def test_a_product_is_added_up_in_fp32(wide, device="cpu"):
    x, weight = factors(5, 24, 512, device)
    got = linear_fp32(x, weight.float() if wide else weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact(x, weight), rtol=0, atol=512 * 2.0**-22)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", (1, 2, 7, 64, 300))
@pytest.mark.parametrize("outputs,columns", ((256, 7168), (64, 7168), (256, 4096), (384, 7168), (160, 6144)))
def test_a_gpu_reads_bf16_once(tokens, outputs, columns):
    """A product, and what adds its parts up where it is split; nothing is widened first."""
    x, weight = factors(tokens, outputs, columns, "cuda")
    got = linear_fp32(x, weight)
    torch.testing.assert_close(got.double(), exact(x, weight), rtol=0, atol=columns * 2.0**-21)
    names = launched(lambda: linear_fp32(x, weight))
    assert 1 <= len(names) <= 2 and not any("elementwise" in name or "copy" in name.lower() for name in names), names
