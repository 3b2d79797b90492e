"""Weights that files have quantised stay as they are: codes and scales of the files, in places of their own."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import CASES, SPECS, written

from sparse_attn import Model
from sparse_attn.checkpoints import load as loading
from sparse_attn.checkpoints import memory
from sparse_attn.checkpoints.formats import form_of, form_said_by, nbytes_of, shards_of
from sparse_attn.checkpoints.load import load, read_config
from sparse_attn.checkpoints.published import write_published
from sparse_attn.checkpoints.save import save
from sparse_attn.models.params import random_params, stays_packed
from sparse_attn.models.shapes import param_shapes, prediction_shapes
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import preset, tiny_v4
from sparse_attn.weight_layout import PackedWeight, WeightLayout, dequantise, quantise, weight_bytes, weight_shape


def packed_names(params):
    return {name for name, value in params.items() if isinstance(value, PackedWeight)}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name,form", CASES)
def test_packed_weights_are_worth_what_expanded_ones_are(name, form):
    """The expanded ones are tested against fp64 and transformers."""
    packed, wide = (load(written(name, form), dtype=torch.float32, expand=expand)[1] for expand in (False, True))
    assert list(packed) == list(wide) and not packed_names(wide)
    for key, value in packed.items():
        assert torch.equal(dequantise(value) if isinstance(value, PackedWeight) else value, wide[key]), key
        if isinstance(value, PackedWeight):
            assert weight_shape(value) == param_shapes(SPECS[name])[key] and stays_packed(key)
            assert isinstance(value.codes, torch.nn.Parameter) and isinstance(value.scales, torch.nn.Parameter)
    kinds = {key.split(".", 2)[-1] for key in packed_names(packed)}
    matrices = {"attn.q_a", "attn.q_b", "moe.gate_up", "moe.down", "moe.shared_gate_up", "moe.shared_down"}
    assert matrices <= kinds if form != "bf16" else not kinds


@pytest.mark.parametrize("form,layouts", [
    ("published", {"attn.q_b": "e4m3/128x128/e8m0", "moe.down": "e2m1/1x32/e8m0", "moe.gate_up": "e2m1/1x32/e8m0"}),
    ("flash-base", {"attn.q_b": "e4m3/128x128/fp32", "moe.down": "e4m3/128x128/fp32", "moe.gate_up": "e4m3/64x128/fp32"}),
    ("fp8-e8m0", {"attn.o_a": "e4m3/64x128/e8m0", "moe.down": "e4m3/128x128/e8m0"}),
    ("fused", {"attn.q_b": "e4m3/128x128/e8m0", "moe.gate_up": "e2m1/1x32/e8m0"}),
])  # fmt: skip
def test_layouts_are_those_of_the_files(form, layouts):
    """Where parts end inside of a block of 128 rows, the blocks are as high as the parts."""
    params = load(written("v4", form), expand=False)[1]
    assert {kind: params[f"layers.1.{kind}"].layout for kind in layouts} == layouts


@pytest.mark.parametrize("fused", [False, True])
def test_parts_that_end_inside_of_a_block(tmp_path, fused):
    """Blocks of 48 rows: 64 rows of gate, 64 of up and 64 of a group are one whole block and a third of one."""
    spec = replace(tiny_v4(), num_layers=1, layer_kinds=("window",), hash_layers=(False,))
    save(tmp_path, spec, random_params(spec, seed=6), names="transformers" if fused else "published")
    weights, layout = load_file(tmp_path / "model.safetensors"), WeightLayout("e4m3", (48, 32), "fp32")
    for name in [name for name, value in weights.items() if "experts" in name or "o_a" in name]:
        packed = quantise(weights[name].float(), layout)
        scale = name + "_scale_inv" if fused else name.removesuffix("weight") + "scale"
        weights |= {name: packed.codes, scale: packed.scales}
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [48, 32]}}
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    packed, wide = (load(tmp_path, dtype=torch.float32, expand=expand)[1] for expand in (False, True))
    cut, whole = "e4m3/16x32/fp32", "e4m3/48x32/fp32"
    assert {name.split(".", 2)[-1]: packed[name].layout for name in packed_names(packed)} == {
        "attn.o_a": cut, "moe.gate_up": whole if fused else cut, "moe.down": whole, "moe.shared_gate_up": cut,
        "moe.shared_down": whole,
    }  # fmt: skip
    for name in packed_names(packed):
        assert torch.equal(dequantise(packed[name]), wide[name]), name
    save(tmp_path / "again", spec, packed, names="transformers" if fused else "published")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name].view(torch.uint8), weights[name].view(torch.uint8))
               for name in weights if weights[name].dtype == torch.float8_e4m3fn or "scale" in name.rsplit(".", 1)[-1])  # fmt: skip


def test_codes_and_scales_are_the_bytes_of_the_files():
    """Experts one after the other, gate before up."""
    folder, inner = written("v4", "published"), SPECS["v4"].moe.intermediate_size
    files = {}
    for path in folder.glob("*.safetensors"):
        files |= load_file(path)
    gate_up, down = (load(folder, expand=False)[1][f"layers.2.moe.{kind}"] for kind in ("gate_up", "down"))
    for expert in range(SPECS["v4"].moe.num_experts):
        stem = f"layers.2.ffn.experts.{expert}.w"
        for part, rows in ((1, slice(0, inner)), (3, slice(inner, 2 * inner))):
            assert torch.equal(gate_up.codes[expert, rows], files[f"{stem}{part}.weight"].view(torch.uint8))
            assert torch.equal(gate_up.scales[expert, rows], files[f"{stem}{part}.scale"].view(torch.uint8))
        assert torch.equal(down.codes[expert], files[stem + "2.weight"].view(torch.uint8))
        assert torch.equal(down.scales[expert], files[stem + "2.scale"].view(torch.uint8))


def with_tensor(folder, tmp_path, name, change):
    """A copy of a checkpoint, one tensor of it changed."""
    tensors, index = {}, json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    assert name in index
    tensors[name] = change(tensors[name].clone())
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    return tmp_path


def last(byte):
    def change(tensor):
        tensor.view(torch.uint8).view(-1)[-1] = byte
        return tensor

    return change


def last_number(number):
    def change(tensor):
        tensor.view(-1)[-1] = number
        return tensor

    return change


W1, QB = "layers.3.ffn.experts.5.w3", "layers.1.attn.wq_b"
UP, Q_B = "model.layers.3.mlp.experts.5.up_proj.weight", "model.layers.1.self_attn.q_b_proj.weight"


@pytest.mark.parametrize("form,stored,change,weight", [
    ("published", W1 + ".scale", last(255), UP), ("published", W1 + ".scale", last(254), UP),
    ("published", QB + ".scale", last(255), Q_B), ("published", QB + ".weight", last(0x7F), Q_B),
    ("published", QB + ".weight", last(0xFF), Q_B), ("flash-base", W1 + ".weight", last(0xFF), UP),
    ("flash-base", W1 + ".scale", last_number(math.nan), UP), ("flash-base", QB + ".scale", last_number(-math.inf), Q_B),
    ("flash-base", QB + ".scale", last_number(2.0**127), Q_B),
])  # fmt: skip
@pytest.mark.parametrize("expand", [False, True])
def test_codes_and_scales_that_are_no_numbers(tmp_path, form, stored, change, weight, expand):
    # 2^127 with a block whose every code is at most 1 is a number: the last block of rows keeps some larger ones.
    with_tensor(written("v4", form), tmp_path, stored, change)
    with pytest.raises(
        ValueError, match=f"weight {weight}: got values that are NaN or infinite.*; in .*model.safetensors"
    ):
        load(tmp_path, expand=expand)


def test_a_great_scale_of_small_codes_is_a_number(tmp_path):
    def change(codes):
        codes.view(torch.uint8)[-1, -16:] &= 0x99  # values 0 and 0.5
        return codes

    folder = with_tensor(written("v4", "published"), tmp_path, W1 + ".weight", change)
    tensors = load_file(folder / "model.safetensors")
    tensors[W1 + ".scale"].view(torch.uint8)[-1, -1] = 254
    save_file(tensors, folder / "model.safetensors")
    value = dequantise(load(folder, expand=False)[1]["layers.3.moe.gate_up"])
    assert value.abs().max() == 2.0**126


def test_experts_of_two_layouts_stay_packed_in_none(tmp_path):
    name = "model.layers.2.mlp.experts.3.up_proj.weight_scale_inv"
    with_tensor(written("v32", "published"), tmp_path, name, lambda scale: scale.to(torch.float8_e8m0fnu))
    with pytest.raises(ValueError, match="up_proj.weight: got e4m3/128x128/e8m0, allowed: e4m3/128x128/fp32, that of"):
        load(tmp_path, expand=False)
    assert not packed_names(load(tmp_path, expand=True)[1])


@pytest.fixture(scope="module")
def params():
    return load(written("v4", "published"), dtype=torch.bfloat16, expand=False)[1]


def model_of(params):
    return Model(SPECS["v4"], params, cache_layouts(SPECS["v4"], "fp32"))


def test_a_model_has_codes_and_scales_as_parameters(params):
    model, packed = model_of(params), packed_names(params)
    wanted = set(params) | {name + "_scale" for name in packed}
    assert packed and dict(model.named_parameters()).keys() == model.state_dict().keys() == wanted
    assert not any(value.requires_grad for value in model.parameters())
    assert model.params.keys() == params.keys()
    for name in packed:
        assert model.params[name].codes is params[name].codes and model.params[name] == params[name], name
    other = model_of({key: value if not isinstance(value, PackedWeight) else PackedWeight(
        torch.zeros_like(value.codes), torch.zeros_like(value.scales), value.layout) for key, value in params.items()
    })  # fmt: skip
    assert not any(other.load_state_dict(model.state_dict()))
    for name in packed:
        for got, want in zip(other.params[name][:2], params[name][:2]):
            assert got.dtype == want.dtype and torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name


@pytest.mark.parametrize("move", ["to", "half", "float"])
def test_another_dtype_leaves_codes_and_scales_alone(move):
    for form in ("published", "flash-base"):
        params = load(written("v4", form), dtype=torch.bfloat16, expand=False)[1]
        before = {name: [part.detach().clone() for part in params[name][:2]] for name in packed_names(params)}
        model = model_of(params)
        model = model.to(torch.float32) if move == "to" else getattr(model, move)()
        after = model.params
        assert after["embed"].dtype == (torch.float16 if move == "half" else torch.float32)
        for name, parts in before.items():
            for got, want in zip(after[name][:2], parts):
                assert got.dtype == want.dtype and torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name
    meta = model.to("meta").params
    assert all(meta[name].codes.is_meta and meta[name].scales.is_meta for name in packed_names(meta))


@pytest.mark.parametrize("part", ["", "_scale"])
def test_a_state_of_other_dtypes_is_refused(params, part):
    """It would be copied as numbers: 127 for the byte of 1.0."""
    model = model_of(params)
    state = dict(model.state_dict())
    name = "layers.1.attn.q_b" + part
    state[name] = state[name].float() if part == "" else torch.ones(state[name].shape)
    with pytest.raises(TypeError, match=f"state {name}: got torch.float32, allowed: torch."):
        model.load_state_dict(state)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name,form", CASES)
def test_memory_counts_what_is_held(name, form):
    spec, params = SPECS[name], load(written(name, form), expand=False)[1]
    assert sum(map(weight_bytes, params.values())) == sum(memory.weight_bytes(spec, torch.bfloat16, form).values())
    config, found = read_config(written(name, form))
    said = form_said_by(config, found)
    assert said == form or name != "v4" and form == "fp8-e8m0" or form == "fused"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name,form", [("deepseek_v32", "published"), ("glm5", "published"), ("deepseek_v4_pro", "published"),
                                       ("deepseek_v4_flash", "published"), ("deepseek_v4_flash", "flash-base")])  # fmt: skip
def test_a_device_holds_at_most_3_percent_more_than_the_files(name, form):
    """At full size, by what test_memory_counts_what_is_held shows to be held. Rope tables and what is expanded count."""
    spec = preset(name)
    made = form_of(spec, form)
    files = sum(nbytes_of(entry, made) for shard in shards_of(spec, made, 0) for entry in shard)
    held = sum(memory.weight_bytes(spec, torch.bfloat16, form).values())
    assert 1 < held / files < 1.03


def tensors_of(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name,form", CASES)
def test_save_writes_the_files_tensors_back(tmp_path, name, form):
    """By name, dtype, shape and bytes, but for kv_b, which the forward holds expanded."""
    spec, folder, fused = SPECS[name], written(name, form), form == "fused"
    params = load(folder, expand=False, mtp=not fused)[1]
    total = save(tmp_path, spec, params, names="transformers" if fused else "published")
    got, want = tensors_of(tmp_path), tensors_of(folder)
    assert total == sum(value.nbytes for value in got.values())
    apart = {key for key in want if "kv_b_proj" in key} if form != "bf16" else set()
    if fused:  # in transformers' files these are fp32
        apart |= {key for key in want if key.endswith(("gate.weight", "weights_proj.weight"))}
    assert got.keys() - apart == want.keys() - apart
    for key in want.keys() - apart:
        assert got[key].dtype == want[key].dtype and got[key].shape == want[key].shape, key
        assert torch.equal(got[key].view(torch.uint8), want[key].view(torch.uint8)), key
    said, wanted = (json.loads((path / "config.json").read_text()) for path in (tmp_path, folder))
    said.get("quantization_config", {}).pop("modules_to_not_convert", None)
    keys = ("quantization_config", "expert_dtype", "num_nextn_predict_layers", "dtype")
    assert [said.get(key) or None for key in keys] == [wanted.get(key) or None for key in keys]
    again = load(tmp_path, expand=False, mtp=not fused)[1]
    assert {key: weight.layout for key, weight in again.items() if isinstance(weight, PackedWeight)} == {
        key: weight.layout for key, weight in params.items() if isinstance(weight, PackedWeight)
    }


def test_fused_experts_are_saved_apart_and_together(tmp_path):
    """Halves of 64 rows under a scale for 128 rows of both: apart each has it. Halves with scales of their own are no
    fused weight in blocks of 128 rows."""
    apart, together = (load(written("v32", form), expand=False)[1] for form in ("published", "fused"))
    save(tmp_path / "apart", SPECS["v32"], together, names="published")
    again = load(tmp_path / "apart", expand=False)[1]
    for kind in ("gate_up", "down"):
        got, want = again[f"layers.1.moe.{kind}"], together[f"layers.1.moe.{kind}"]
        assert torch.equal(dequantise(got), dequantise(want))
    with pytest.raises(ValueError, match="weight layers.1.moe.gate_up: got scales that differ within 128 rows"):
        save(tmp_path / "together", SPECS["v32"], apart)
    assert not (tmp_path / "together").exists()


def spoilt_index(change):
    def spoil(folder):
        index = folder / "model.safetensors.index.json"
        index.write_text(change(index.read_text()))

    return spoil


def cut(folder):
    path = sorted(folder.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-1])


def pointer(folder):
    sorted(folder.glob("*.safetensors"))[-1].write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def other_scale(folder):
    path = sorted(folder.glob("*.safetensors"))[-3]  # the last layer
    tensors = load_file(path)
    name = "layers.4.ffn.experts.7.w2.scale"
    save_file(tensors | {name: tensors[name].float()}, path)


LAST = "model-00008-of-00008.safetensors"
FAULTS = {
    "cut short": (cut, f"{LAST}: damaged or no safetensors"),
    "a pointer": (pointer, f"{LAST}: a Git LFS pointer"),
    "out of the folder": (spoilt_index(lambda text: text.replace(f'"head.weight": "{LAST}"', f'"head.weight": "../{LAST}"')),
                          "weight_map head.weight: got '../model"),
    "in two shards": (spoilt_index(lambda text: text.replace('"head.weight"', f'"norm.weight": "{LAST}", "head.weight"')),
                      "index.json: not JSON: key 'norm.weight' stands twice"),
    "in none": (spoilt_index(lambda text: text.replace(f'"head.weight": "{LAST}"', '"head.weight": "other.safetensors"')),
                "index.json names other.safetensors, which"),
    "another scale": (other_scale, "mlp.experts.7.down_proj.weight_scale_inv: got F32 beside MXFP4"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_any_shard_are_found_before_anything_is_allocated(tmp_path, monkeypatch, fault):
    spoil, message = FAULTS[fault]
    shutil.copytree(written("v4", "published"), tmp_path / "in")
    spoil(tmp_path / "in")
    monkeypatch.setattr(loading, "fill", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "in", expand=False)


MTP = {  # of the layer's own weights: those of the forward, and the tensors of the files
    "v32": {"eh_proj": "model.layers.4.eh_proj.weight", "norm": "model.layers.4.shared_head.norm.weight",
            "lm_head": "model.layers.4.shared_head.head.weight", "embed": "model.layers.4.embed_tokens.weight",
            "attn.q_b": "model.layers.4.self_attn.q_b_proj.weight", "index.k": "model.layers.4.self_attn.indexer.wk.weight"},
    "glm": {"enorm": "model.layers.6.enorm.weight", "index.q_b": "model.layers.6.self_attn.indexer.wq_b.weight"},
    "v4": {"e_proj": "mtp.0.e_proj.weight", "h_proj": "mtp.0.h_proj.weight", "hnorm": "mtp.0.hnorm.weight",
           "norm": "mtp.0.norm.weight", "head.fn": "mtp.0.hc_head_fn", "attn.q_a": "mtp.0.attn.wq_a.weight",
           "moe_hyper.base": "mtp.0.hc_ffn_base", "attn.sink": "mtp.0.attn.attn_sink"},
}  # fmt: skip


@pytest.mark.parametrize("name", MTP)
def test_layers_of_multi_token_prediction_load_where_asked_for(name):
    spec, folder, files = SPECS[name], written(name, "published"), {}
    for path in folder.glob("*.safetensors"):
        files |= load_file(path)
    alone, params = (load(folder, expand=False, mtp=mtp)[1] for mtp in (False, True))
    assert alone.keys() | prediction_shapes(spec, 1).keys() == params.keys()
    assert not any(key.startswith("mtp.") for key in alone)
    for key, shape in prediction_shapes(spec, 1).items():
        assert weight_shape(params[key]) == shape, key
    for kind, stored in MTP[name].items():
        value = params[f"mtp.0.{kind}"]
        held = value.codes if isinstance(value, PackedWeight) else value
        assert torch.equal(held.view(torch.uint8), files[stored].view(torch.uint8)), stored
    experts = params["mtp.0.moe.down"]
    assert experts.layout == params["layers.1.moe.down"].layout and experts.codes.shape[0] == spec.moe.num_experts
    assert "mtp.0.attn.q_b_scale" in Model(spec, params, cache_layouts(spec, "fp32")).state_dict()


@pytest.mark.parametrize("change,message", [
    ({"mtp.0.hc_head_fn": None}, "weight mtp.0.hc_head_fn: missing"),
    ({"mtp.0.attn.compressor.ape": torch.ones(3)}, "weight mtp.0.self_attn.compressor.position_bias: extra"),
    ({"mtp.1.norm.weight": torch.ones(128)}, None),
    (0, "config.json: config num_nextn_predict_layers: got 0, allowed: 1 to 64, or mtp=False"),
])  # fmt: skip
def test_layers_that_are_none_of_multi_token_prediction(tmp_path, change, message):
    with_tensor(written("v4", "published"), tmp_path, "norm.weight", lambda norm: norm)
    if change == 0:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    else:
        tensors = load_file(tmp_path / "model.safetensors") | change
        save_file({key: value for key, value in tensors.items() if value is not None}, tmp_path / "model.safetensors")
    load(tmp_path)
    if message is None:
        load(tmp_path, mtp=True)
        return
    with pytest.raises(ValueError, match=message):
        load(tmp_path, mtp=True)


def test_progress_is_told_every_byte():
    folder, told = written("glm", "published"), []
    load(folder, expand=False, progress=lambda nbytes, total: told.append((nbytes, total)))
    (total,) = {total for _, total in told}
    wanted = 0
    for path in folder.glob("*.safetensors"):
        wanted += sum(value.nbytes for key, value in load_file(path).items() if "layers.6." not in key)
    assert sum(nbytes for nbytes, _ in told) == total == wanted and len(told) > 100


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from sparse_attn.checkpoints import memory
from sparse_attn.checkpoints.formats import form_of, form_said_by, nbytes_of, shards_of
from sparse_attn.checkpoints.load import load, read_config
from sparse_attn.weight_layout import weight_bytes

large, most = sys.argv[1], int(sys.argv[2])
files = sum(path.stat().st_size for path in Path(large).glob("*.safetensors"))
for expand in (False, True):
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    held = sum(map(weight_bytes, load(large, expand=expand)[1].values()))
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    size = 1024 * int(status["VmSize"].split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (size + files + held + 2 * most, resource.RLIM_INFINITY))
    load(large, expand=expand)
    print(expand, held)
"""


def test_the_host_holds_no_more_than_two_tensors_beside(tmp_path):
    """By the address space: the files mapped, the weights, and twice the largest tensor of the files."""
    moe = replace(tiny_v4().moe, intermediate_size=4096)
    spec = replace(tiny_v4(), num_layers=1, layer_kinds=("window",), hash_layers=(False,), hidden_size=256, moe=moe)
    write_published(tmp_path / "large", spec, "fused")
    most = 8 * 8192 * 128
    assert most == max(
        value.nbytes for path in (tmp_path / "large").glob("*.safetensors") for value in load_file(path).values()
    )
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "large"), str(most)]
    unmapped = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # what is freed goes at once
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | unmapped)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["False", "True"]
