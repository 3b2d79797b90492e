"""Checkpoint folders: both spellings, fp8 weights, and errors that name the weight."""

import dataclasses
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.published import PUBLISHED_GLM

from sparse_attn.checkpoints.folder import Checkpoint
from sparse_attn.checkpoints.load import load
from sparse_attn.models.params import random_params
from sparse_attn.models.shapes import param_shapes
from sparse_attn.spec import deepseek_v32, from_hf_config, tiny_glm5, tiny_v32

CONFIG = PUBLISHED_GLM | dict(
    vocab_size=40, hidden_size=48, intermediate_size=80, moe_intermediate_size=24, num_hidden_layers=3,
    num_attention_heads=3, num_key_value_heads=3, n_routed_experts=4, num_experts_per_tok=2, kv_lora_rank=32,
    q_lora_rank=40, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=20, index_topk=4, index_head_dim=16,
    index_n_heads=2, first_k_dense_replace=1, max_position_embeddings=64, index_topk_pattern="FSF",
)  # fmt: skip
SPEC = from_hf_config(CONFIG)


def published(params, spec):
    """Our weights under the names DeepSeek and Zhipu publish: the inverse of loading, written apart from it."""
    out = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    if not spec.tie_embeddings:
        out["lm_head.weight"] = params["lm_head"]
    for layer in range(spec.num_layers):
        own = {k.removeprefix(f"layers.{layer}."): v for k, v in params.items() if k.startswith(f"layers.{layer}.")}
        to = f"model.layers.{layer}."
        attn = to + "self_attn."
        out[to + "input_layernorm.weight"] = own["input_norm"]
        out[to + "post_attention_layernorm.weight"] = own["post_norm"]
        for name, key in [
            ("q_a_proj", "q_a"), ("q_a_layernorm", "q_a_norm"), ("q_b_proj", "q_b"), ("kv_a_proj_with_mqa", "kv_a"),
            ("kv_a_layernorm", "kv_a_norm"), ("o_proj", "o"),
        ]:  # fmt: skip
            out[f"{attn}{name}.weight"] = own["attn." + key]
        out[attn + "kv_b_proj.weight"] = torch.cat([own["attn.w_uk"], own["attn.w_uv"].mT], 1).flatten(0, 1)
        if spec.index_layers[layer]:
            for name, key in [("wq_b", "q_b"), ("wk", "k"), ("k_norm", "k_norm"), ("weights_proj", "weights")]:
                out[f"{attn}indexer.{name}.weight"] = own["index." + key]
            out[attn + "indexer.k_norm.bias"] = own["index.k_norm_bias"]
        pairs = {}
        if spec.moe_layers[layer]:
            out[to + "mlp.gate.weight"] = own["moe.gate"]
            out[to + "mlp.gate.e_score_correction_bias"] = own["moe.bias"]
            pairs["shared_experts."] = own["moe.shared_gate_up"], own["moe.shared_down"]
            for expert in range(spec.moe.num_experts):
                pairs[f"experts.{expert}."] = own["moe.gate_up"][expert], own["moe.down"][expert]
        else:
            pairs[""] = own["mlp.gate_up"], own["mlp.down"]
        for name, (gate_up, down) in pairs.items():
            gate, up = gate_up.chunk(2)
            for part, value in (("gate", gate), ("up", up), ("down", down)):
                out[f"{to}mlp.{name}{part}_proj.weight"] = value
    return {name: value.contiguous().clone() for name, value in out.items()}


def write(folder, weights, config=CONFIG, shards=1):
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    home = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: weights[key] for key in sorted(weights)[shard::shards]}
        save_file(part, folder / name)
        home |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
    return folder


@pytest.fixture(scope="module")
def params():
    return random_params(SPEC, seed=4)


@pytest.fixture
def weights(params):
    return published(params, SPEC)


def check_equal(loaded, wanted):
    assert loaded.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("shards", [1, 3])
def test_published_spelling(tmp_path, params, weights, shards):
    spec, loaded = load(write(tmp_path, weights, shards=shards), dtype=torch.float32)
    assert spec == SPEC
    check_equal(loaded, params)


def test_shards_without_an_index_are_no_checkpoint(tmp_path, weights):
    write(tmp_path, weights, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(
        ValueError, match="no model.safetensors and no .*index.json; model-00001-of-00002.safetensors alone"
    ):
        load(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
def test_other_safetensors_in_the_folder_are_none_of_the_checkpoint(tmp_path, params, weights, shards):
    write(tmp_path, weights, shards=shards)
    save_file({"logits": torch.ones(2, 3)}, tmp_path / "logits.safetensors")
    (tmp_path / "adapter.safetensors").write_bytes(b"no tensors at all")
    check_equal(load(tmp_path, dtype=torch.float32)[1], params)


def test_a_whole_file_counts_before_an_index_as_in_transformers(tmp_path, params, weights):
    write(tmp_path, {name: value + 1 for name, value in weights.items()}, shards=2)
    write(tmp_path, weights)
    check_equal(load(tmp_path, dtype=torch.float32)[1], params)


def test_the_index_decides_which_shard_counts(tmp_path, params, weights):
    write(tmp_path, weights, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    home = json.loads(index.read_text())["weight_map"]
    first, second = sorted(set(home.values()))
    held = load_file(tmp_path / second)
    doubled = "model.norm.weight"
    other = first if home[doubled] == second else second
    save_file(
        load_file(tmp_path / other) | {doubled: weights[doubled] + 1, "unmapped": torch.ones(1)}, tmp_path / other
    )
    check_equal(load(tmp_path, dtype=torch.float32)[1], params)

    index.write_text(
        json.dumps({"weight_map": home | dict.fromkeys(held, second) | {"model.embed_tokens.weight": second}})
    )
    del held["model.embed_tokens.weight"]
    save_file(held, tmp_path / second)
    with pytest.raises(
        ValueError, match="weight model.embed_tokens.weight: missing in model-00002-of-00002.safetensors, where"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["/etc/w.safetensors", "../w.safetensors", "a/../../w.safetensors", "..\\w.safetensors", "w.bin", 3]
)
def test_shard_names_stay_in_the_folder(tmp_path, weights, name):
    write(tmp_path, weights, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    home = json.loads(index.read_text())["weight_map"] | {"model.norm.weight": name}
    index.write_text(json.dumps({"weight_map": home}))
    with pytest.raises(
        ValueError, match="index.json: weight_map model.norm.weight: got .*, allowed: a .safetensors file in"
    ):
        load(tmp_path)


def test_links_into_a_store_are_followed(tmp_path, params, weights):
    """Download caches hold links to files elsewhere."""
    store, folder = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir(), folder.mkdir()
    write(store, weights, shards=2)
    for path in store.iterdir():
        (folder / path.name).symlink_to(path)
    check_equal(load(folder, dtype=torch.float32)[1], params)


def test_fused_experts(tmp_path, params, weights):
    weights = {name: value for name, value in weights.items() if ".experts." not in name}
    for layer in (1, 2):
        weights[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = params[f"layers.{layer}.moe.gate_up"]
        weights[f"model.layers.{layer}.mlp.experts.down_proj"] = params[f"layers.{layer}.moe.down"]
    check_equal(load(write(tmp_path, weights), dtype=torch.float32)[1], params)


def test_every_weight_is_read_once(tmp_path, params, weights, monkeypatch):
    read, real = [], Checkpoint._get
    monkeypatch.setattr(Checkpoint, "_get", lambda self, name: read.append(name) or real(self, name))
    check_equal(load(write(tmp_path, weights), dtype=torch.float32)[1], params)
    assert sorted(read) == sorted(weights)


@pytest.mark.parametrize("original", [True, False])
def test_save_pretrained(tmp_path, original):
    import transformers

    torch.manual_seed(1)
    model = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**CONFIG))
    model.save_pretrained(tmp_path, save_original_format=original, max_shard_size="40KB")
    names = {name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert ("model.layers.1.mlp.experts.gate_up_proj" in names) != original
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _, loaded = load(tmp_path, dtype=torch.float32)
    state = model.state_dict()
    experts = "model.layers.1.mlp.experts."
    assert torch.equal(loaded["layers.1.moe.gate_up"], state[experts + "gate_up_proj"])
    assert torch.equal(loaded["layers.1.moe.down"], state[experts + "down_proj"])
    kv_b = state["model.layers.2.self_attn.kv_b_proj.weight"].unflatten(0, (3, 32))
    assert torch.equal(loaded["layers.2.attn.w_uk"], kv_b[:, :12])
    assert torch.equal(loaded["layers.2.attn.w_uv"], kv_b[:, 12:].mT)


def test_tied_embeddings(tmp_path):
    config = CONFIG | {"tie_word_embeddings": True}
    spec = from_hf_config(config)
    weights = published(random_params(spec, seed=1), spec)
    assert "lm_head" not in load(write(tmp_path, weights, config))[1]
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    assert "lm_head" not in load(write(tmp_path, weights, config))[1]


def test_known_extras_are_skipped(tmp_path, params, weights):
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    weights["model.layers.3.eh_proj.weight"] = torch.ones(4)
    check_equal(load(write(tmp_path, weights), dtype=torch.float32)[1], params)


SHARED = [dict(index_topk_pattern="FSS"), dict(index_topk_freq=9, index_skip_topk_offset=1)]


@pytest.mark.parametrize("change", [*SHARED, dict(indexer_types=["full", "shared", "shared"])])
def test_indexers_of_layers_that_share_are_left_out_as_transformers_does(tmp_path, change):
    """The files hold an indexer a layer; the config switches sharing on."""
    import transformers

    config = {key: value for key, value in CONFIG.items() if key != "index_topk_pattern"}
    full = from_hf_config(config)
    weights = published(random_params(full, seed=4), full)
    weights["model.layers.2.self_attn.indexer.wk.weight_scale_inv"] = torch.full((7,), torch.nan)  # read by nobody
    write(tmp_path, weights, config | change)
    with pytest.warns(UserWarning, match=r"indexers of 2 layers are left out \(11 tensors\), .*: 1, 2$"):
        spec, loaded = load(tmp_path, dtype=torch.float32)
    assert spec.index_layers == (True, False, False)
    assert not [name for name in loaded if "index." in name and not name.startswith("layers.0.")]
    state = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert {name for name in state if "indexer" in name} <= {name for name in weights if ".layers.0." in name}
    own = {name: value for name, value in weights.items() if "indexer" not in name or ".layers.0." in name}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(write(tmp_path, own, config | change))


def test_fp8_blocks(tmp_path, params, weights):
    name = "model.layers.1.self_attn.q_b_proj.weight"
    block = (32, 16)
    generator = torch.Generator().manual_seed(9)
    codes = torch.randn(weights[name].shape, generator=generator).to(torch.float8_e4m3fn)
    grid = [-(-size // step) for size, step in zip(codes.shape, block)]
    assert codes.shape[0] % block[0] and codes.shape[1] % block[1]
    scale = torch.rand(grid, generator=generator) + 0.5
    weights |= {name: codes, name + "_scale_inv": scale}
    config = CONFIG | {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    _, loaded = load(write(tmp_path, weights, config), dtype=torch.float32, expand=True)
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: codes.shape[0], : codes.shape[1]]
    assert torch.equal(loaded["layers.1.attn.q_b"], codes.float() * wide)

    del weights[name + "_scale_inv"]
    with pytest.raises(ValueError, match=name + ": got F8_E4M3 without a .*_scale_inv"):
        load(write(tmp_path, weights, config))
    weights[name + "_scale_inv"] = scale[:1]
    with pytest.raises(ValueError, match=name + r"_scale_inv: got shape \[1, 3\], allowed: \[2, 3\]"):
        load(write(tmp_path, weights, config))
    weights[name] = codes.float()
    with pytest.raises(ValueError, match=name + "_scale_inv: extra, .* takes no scale"):
        load(write(tmp_path, weights, config))


def test_dtypes(tmp_path, weights):
    _, loaded = load(write(tmp_path, weights), dtype=torch.bfloat16)
    fp32 = {name for name, value in loaded.items() if value.dtype == torch.float32}
    wanted = {f"layers.{layer}.{name}" for layer in (1, 2) for name in ("moe.gate", "moe.bias")}
    assert fp32 == wanted | {"rope", "layers.0.index.weights", "layers.2.index.weights"}


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.2.mlp.experts.3.up_proj.weight",
        "model.layers.0.self_attn.indexer.k_norm.bias",
    ],
)
def test_missing_weight(tmp_path, weights, name):
    del weights[name]
    with pytest.raises(ValueError, match=name + ": missing"):
        load(write(tmp_path, weights))


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.indexer_wk.weight", "model.layers.2.mlp.experts.4.up_proj.weight", "vision.proj"]
)
def test_extra_weight(tmp_path, weights, name):
    weights[name] = torch.ones(2)
    with pytest.raises(ValueError, match=name + ": extra"):
        load(write(tmp_path, weights))


@pytest.mark.parametrize(
    "name, shown",
    [
        ("model.embed_tokens.weight", r"\[39, 48\], allowed: \[40, 48\]"),
        ("model.layers.1.self_attn.kv_b_proj.weight", r"\[95, 32\], allowed: \[96, 32\]"),
        ("model.layers.2.mlp.experts.3.up_proj.weight", r"\[23, 48\], allowed: \[24, 48\]"),
    ],
)
def test_misshaped_weight(tmp_path, weights, name, shown):
    weights[name] = weights[name][:-1].clone()
    with pytest.raises(ValueError, match=f"weight {name}: got shape {shown}"):
        load(write(tmp_path, weights))


def test_folders_that_are_no_checkpoint(tmp_path, weights):
    with pytest.raises(ValueError, match="holds no config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="holds no model.safetensors and no model.safetensors.index.json$"):
        load(tmp_path)
    write(tmp_path, weights, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="names model-00002-of-00002.safetensors, which"):
        load(tmp_path)
    for wrong in (dict(quant_method="gptq"), dict(quant_method="gptq", weight_block_size=[128, 128]), dict(quant_method="fp8"),
                  dict(quant_method="fp8", weight_block_size=[128])):  # fmt: skip
        with pytest.raises(ValueError, match=f"quant_method '{wrong['quant_method']}' with weight_block_size"):
            load(write(tmp_path, weights, CONFIG | {"quantization_config": wrong}))


@pytest.mark.parametrize("make", [tiny_v32, tiny_glm5])
def test_random_params(make):
    spec = make()
    params = random_params(spec, seed=7)
    assert {name: tuple(value.shape) for name, value in params.items() if name != "rope"} == param_shapes(spec)
    assert params["rope"].shape == (spec.max_positions, spec.rope_dim)
    again, other = random_params(spec, seed=7, dtype=torch.bfloat16), random_params(spec, seed=8)
    assert torch.equal(again["lm_head"], params["lm_head"].bfloat16())
    assert not torch.equal(other["lm_head"], params["lm_head"])
    assert params["layers.0.attn.q_b"].std().item() == pytest.approx(spec.q_lora**-0.5, rel=0.05)


def test_random_params_are_pinned():
    """The demo's models are these; a change of the draw changes every recorded output."""
    params = random_params(dataclasses.replace(SPEC, num_layers=1, moe_layers=(False,), index_layers=(True,)), seed=0)
    assert params["embed"][0, :3].tolist() == pytest.approx([-0.0074868, 0.5364436, -0.8230451], abs=1e-6)


def test_full_size_shapes():
    """671 billion weights, as the model's card says, without multi-token prediction and index keys' 1%."""
    total = sum(torch.Size(shape).numel() for shape in param_shapes(deepseek_v32()).values())
    assert total == pytest.approx(671e9, rel=0.01)
