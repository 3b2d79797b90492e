"""Checkpoints in the forms that are published: every format is read as an oracle in fp64 reads it, and what dtype,
shape, scale and config do not agree on is an error."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparse_attn.checkpoints.load import load
from sparse_attn.checkpoints.save import save
from sparse_attn.models.params import random_params
from sparse_attn.spec import tiny_v4, tiny_v32

SPECS = {
    "v32": replace(tiny_v32(), num_layers=1, moe_layers=(True,), index_layers=(True,)),
    "v4": replace(tiny_v4(), num_layers=1, layer_kinds=("window",), hash_layers=(False,)),
}
FUSED = {"gate_up": "model.layers.0.mlp.experts.gate_up_proj", "down": "model.layers.0.mlp.experts.down_proj"}
BLOCK = (32, 16)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(config, weights in fp32 by transformers' names) of each architecture."""
    found = {}
    for name, spec in SPECS.items():
        home = tmp_path_factory.mktemp(name)
        save(home, spec, random_params(spec, seed=2), torch.float32)
        found[name] = json.loads((home / "config.json").read_text()), load_file(home / "model.safetensors")
    return found


def write(folder, config, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def drawn(shape, seed, least, most):
    return torch.randint(least, most, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def mxfp4(shape, seed):
    """(codes int8, scales e8m0, their values in fp64), all codes and the bytes 100 to 139."""
    *leading, rows, columns = shape
    codes = drawn((*leading, rows, columns // 2), seed, 0, 256)
    scales = drawn((*leading, rows, columns // 32), seed + 1, 100, 140)
    nibbles = torch.stack([codes % 16, codes // 16], -1).flatten(-2).long()
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    powers = torch.pow(2.0, scales.double() - 127).repeat_interleave(32, -1)
    return codes.view(torch.int8), scales.view(torch.float8_e8m0fnu), table[nibbles] * powers


def fp8(shape, seed, scale_dtype):
    """(codes, scales, their values in fp64): sizes that blocks do not divide."""
    *leading, rows, columns = shape
    codes = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)
    grid = (*leading, -(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    scales = (torch.rand(grid, generator=torch.Generator().manual_seed(seed + 1)) + 0.5).to(scale_dtype)
    number = (
        scales.double()
        if scale_dtype != torch.float8_e8m0fnu
        else torch.pow(2.0, scales.view(torch.uint8).double() - 127)
    )
    wide = number.repeat_interleave(BLOCK[0], -2)[..., :rows, :].repeat_interleave(BLOCK[1], -1)[..., :columns]
    return codes, scales, codes.double() * wide


def with_experts(weights, make):
    """The weights with ``make(shape, seed)`` for the experts; and the values in fp64."""
    weights, values = dict(weights), {}
    for seed, (kind, name) in enumerate(FUSED.items()):
        weights[name], weights[name + "_scale_inv"], values[kind] = make(tuple(weights[name].shape), 10 * seed)
    return weights, values


def split_as_deepseek_does(weights):
    """Fused experts as a tensor each, w1, w3 and w2, with scales under DeepSeek's suffix."""
    weights = dict(weights)
    for name, parts in ((FUSED["gate_up"], "13"), (FUSED["down"], "2")):
        fused, scales = weights.pop(name), weights.pop(name + "_scale_inv")
        for expert in range(fused.shape[0]):
            halves = zip(parts, fused[expert].chunk(len(parts)), scales[expert].chunk(len(parts)))
            for part, codes, scale in halves:
                stem = f"layers.0.ffn.experts.{expert}.w{part}"
                weights |= {f"{stem}.weight": codes.clone(), f"{stem}.scale": scale.clone()}
    return weights


@pytest.mark.parametrize(
    "config", [{"expert_dtype": "fp4"}, {}, {"quantization_config": FP8 | {"expert_dtype": "fp4"}}]
)
@pytest.mark.parametrize("spelling", [lambda weights: weights, split_as_deepseek_does], ids=["fused", "deepseek"])
def test_mxfp4_experts(plain, tmp_path, spelling, config):
    base, weights = plain["v4"]
    weights, values = with_experts(weights, mxfp4)
    loaded = load(write(tmp_path, base | config, spelling(weights)), dtype=torch.float32, expand=True)[1]
    for kind, want in values.items():
        assert torch.equal(loaded[f"layers.0.moe.{kind}"].double(), want), kind


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("name", SPECS)
def test_fused_fp8_experts(plain, tmp_path, name, scale_dtype):
    base, weights = plain[name]
    weights, values = with_experts(weights, lambda shape, seed: fp8(shape, seed, scale_dtype))
    config = base | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}
    loaded = load(write(tmp_path, config, weights), dtype=torch.float32, expand=True)[1]
    for kind, want in values.items():
        assert torch.equal(loaded[f"layers.0.moe.{kind}"], want.float()), kind


Q_B = "model.layers.0.self_attn.q_b_proj.weight"
UP = FUSED["gate_up"]


def without(key):
    return lambda config, weights: (config, {name: value for name, value in weights.items() if name != key})


def changed(name, change):
    return lambda config, weights: (config, weights | {name: change(weights[name])})


def said(**config):
    return lambda old, weights: (old | config, weights)


def byte(value):
    def change(scales):
        scales = scales.view(torch.uint8).clone()
        scales.view(-1)[-1] = value
        return scales.view(torch.float8_e8m0fnu)

    return change


def packed_linear(config, weights):
    rows, columns = weights[Q_B].shape
    codes, scales, _ = mxfp4((rows, columns), 5)
    return config, weights | {Q_B: codes, Q_B + "_scale_inv": scales}


DISAGREEING = {
    "fp8 by config": (mxfp4, said(expert_dtype="fp8"),
                      f"weight {UP}: got MXFP4 values (I8, two to a byte) where the config's expert_dtype says 'fp8', allowed"),
    "fp4 by config": (lambda shape, seed: fp8(shape, seed, torch.float32),
                      said(expert_dtype="fp4", quantization_config=FP8),
                      f"weight {UP}: got F8_E4M3 values where the config's expert_dtype says 'fp4', allowed: experts in fp4"),
    "another block": (lambda shape, seed: fp8(shape, seed, torch.float32),
                      said(quantization_config=FP8 | {"weight_block_size": [16, 16]}), f"weight {UP}_scale_inv: got shape"),
    "float by config": (lambda shape, seed: fp8(shape, seed, torch.float8_e8m0fnu),
                        said(quantization_config=FP8 | {"scale_fmt": "float"}),
                        f"weight {UP}_scale_inv: got F8_E8M0 where the config's scale_fmt says 'float', allowed: fp32"),
    "scales as bytes": (mxfp4, changed(UP + "_scale_inv", lambda scales: scales.view(torch.uint8)),
                        f"weight {UP}_scale_inv: got U8 beside MXFP4 values"),
    "fp8 scales as bytes": (lambda shape, seed: fp8(shape, seed, torch.float8_e8m0fnu),
                            lambda config, weights: changed(UP + "_scale_inv", lambda scales: scales.view(torch.uint8))(
                                config | {"quantization_config": FP8}, weights),
                            f"weight {UP}_scale_inv: got U8, allowed: fp32"),
    "a scale for every 16": (mxfp4, changed(UP + "_scale_inv", lambda one: one.view(torch.uint8).repeat(1, 1, 2).view(torch.float8_e8m0fnu)),
                             f"weight {UP}_scale_inv: got shape"),
    "NVFP4": (mxfp4, changed(UP + "_scale_inv", lambda scales: torch.ones(scales.shape).repeat(1, 1, 2).to(torch.float8_e4m3fn)),
              f"weight {UP}: got NVFP4 (I8, two values to a byte, scales in F8_E4M3), allowed: bf16"),
    "a scale that is NaN": (mxfp4, changed(UP + "_scale_inv", byte(255)), f"weight {UP}: got values that are NaN"),
    "a power beyond fp32": (mxfp4, changed(UP + "_scale_inv", byte(254)), f"weight {UP}: got values that are NaN or infinite"),
    "no scale": (mxfp4, without(UP + "_scale_inv"), f"weight {UP}: got I8, allowed"),
    "a linear in fp4": (mxfp4, packed_linear, f"weight {Q_B}: got MXFP4 values (I8, two to a byte), allowed: MXFP4 for routed"),
    "two readings in the config": (mxfp4, said(expert_dtype="fp4", quantization_config=FP8 | {"expert_dtype": "fp8"}),
                                   "config expert_dtype: got 'fp4', allowed: 'fp8', as quantization_config says"),
    "another expert_dtype": (mxfp4, said(expert_dtype="int4"), "config expert_dtype: got 'int4', allowed: 'fp4', 'fp8'"),
    "e5m2": (mxfp4, said(quantization_config=FP8 | {"fmt": "e5m2"}), "config quantization_config fmt: got 'e5m2', allowed: 'e4m3'"),
    "compressed-tensors": (mxfp4, said(quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}),
                           "got quant_method 'compressed-tensors' with weight_block_size None and format 'pack-quantized', allowed"),
    "awq": (mxfp4, said(quantization_config={"quant_method": "awq", "bits": 4}), "got quant_method 'awq' with"),
    "NVFP4 of experts": (mxfp4, said(quantization_config=FP8 | {"moe_quant_algo": "NVFP4"}),
                         "got quant_method 'fp8' with weight_block_size [32, 16] and moe_quant_algo 'NVFP4', allowed"),
}  # fmt: skip


@pytest.mark.parametrize("case", DISAGREEING)
def test_what_disagrees_is_an_error(plain, tmp_path, case):
    make, change, message = DISAGREEING[case]
    config, weights = plain["v4"]
    write(tmp_path, *change(config, with_experts(weights, make)[0]))
    with pytest.raises(ValueError) as raised:
        load(tmp_path)
    assert message in str(raised.value)
    assert "config.json" in str(raised.value) or "model.safetensors" in str(raised.value)


@pytest.mark.parametrize("expert_dtype", ("fp4", "fp8"))
def test_plain_experts_where_the_config_says_others(plain, tmp_path, expert_dtype):
    config, weights = plain["v4"]
    write(tmp_path, config | {"expert_dtype": expert_dtype}, weights)
    message = f"weight {UP}: got F32 values where the config's expert_dtype says '{expert_dtype}', allowed: experts in"
    with pytest.raises(ValueError, match=f"{message} {expert_dtype}; in .*model.safetensors"):
        load(tmp_path)
