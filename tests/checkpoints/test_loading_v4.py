"""DeepSeek-V4 checkpoints: DeepSeek's own names, transformers' names, fp8 weights with their scales, errors."""

import json

import pytest
import torch
from safetensors.torch import save_file
from support.published import PUBLISHED_FLASH

from sparse_attn.checkpoints.convert import convert
from sparse_attn.checkpoints.load import load
from sparse_attn.cli.main import main
from sparse_attn.models.params import random_params
from sparse_attn.spec import from_hf_config

CONFIG = PUBLISHED_FLASH | dict(
    vocab_size=40, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, head_dim=32, qk_rope_head_dim=8,
    q_lora_rank=24, sliding_window=8, compress_ratios=[0, 4, 128, 0], index_n_heads=2, index_head_dim=16, index_topk=4,
    o_groups=2, o_lora_rank=16, n_routed_experts=4, num_experts_per_tok=2, num_hash_layers=1, moe_intermediate_size=24,
    max_position_embeddings=64,
)  # fmt: skip
SPEC = from_hf_config(CONFIG)


def deepseeks(params):
    """Our weights under the names of DeepSeek's files: the inverse of loading, written apart from it."""
    out = {
        "embed.weight": params["embed"], "norm.weight": params["norm"], "head.weight": params["lm_head"],
        "hc_head_fn": params["head.fn"], "hc_head_base": params["head.base"], "hc_head_scale": params["head.scale"],
    }  # fmt: skip
    for layer in range(SPEC.num_layers):
        own = {k.removeprefix(f"layers.{layer}."): v for k, v in params.items() if k.startswith(f"layers.{layer}.")}
        to = f"layers.{layer}."
        names = {
            "attn_norm.weight": "input_norm", "ffn_norm.weight": "post_norm", "attn.wq_a.weight": "attn.q_a",
            "attn.q_norm.weight": "attn.q_a_norm", "attn.wq_b.weight": "attn.q_b", "attn.wkv.weight": "attn.kv",
            "attn.kv_norm.weight": "attn.kv_norm", "attn.attn_sink": "attn.sink", "attn.wo_b.weight": "attn.o_b",
            "ffn.gate.weight": "moe.gate",
        }  # fmt: skip
        for site, ours in (("attn", "attn_hyper"), ("ffn", "moe_hyper")):
            names |= {f"hc_{site}_{part}": f"{ours}.{part}" for part in ("fn", "base", "scale")}
        names["ffn.gate.tid2eid" if SPEC.hash_layers[layer] else "ffn.gate.bias"] = (
            "moe.table" if SPEC.hash_layers[layer] else "moe.bias"
        )
        for theirs, ours in (("attn.compressor", "entry"), ("attn.indexer.compressor", "index")):
            if f"{ours}.norm" in own:
                names |= {f"{theirs}.norm.weight": f"{ours}.norm", f"{theirs}.ape": f"{ours}.position_bias"}
                out[f"{to}{theirs}.wkv.weight"], out[f"{to}{theirs}.wgate.weight"] = own[f"{ours}.kv_gate"].chunk(2)
        if "index.q_b" in own:
            names |= {"attn.indexer.wq_b.weight": "index.q_b", "attn.indexer.weights_proj.weight": "index.weights"}
        out |= {to + theirs: own[ours] for theirs, ours in names.items()}
        out[to + "attn.wo_a.weight"] = own["attn.o_a"].flatten(0, 1)
        pairs = {"shared_experts.": (own["moe.shared_gate_up"], own["moe.shared_down"])}
        for expert in range(SPEC.moe.num_experts):
            pairs[f"experts.{expert}."] = own["moe.gate_up"][expert], own["moe.down"][expert]
        for name, (gate_up, down) in pairs.items():
            gate, up = gate_up.chunk(2)
            for part, value in (("w1", gate), ("w2", down), ("w3", up)):
                out[f"{to}ffn.{name}{part}.weight"] = value
    return {name: value.contiguous().clone() for name, value in out.items()}


def write(folder, weights, config=CONFIG):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def params():
    return random_params(SPEC, seed=4)


def check_equal(loaded, wanted):
    assert loaded.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("to", ["", "model."])
def test_deepseeks_names(tmp_path, params, to):
    weights = deepseeks(params) | {f"{to}mtp.0.attn.wq_a.weight": torch.zeros(3)}
    spec, loaded = load(write(tmp_path, weights), dtype=torch.float32)
    assert spec == SPEC and loaded["layers.0.moe.table"].dtype == torch.int32
    check_equal(loaded, params)


DRAFTER = {
    "mtp.0.main_proj.weight": torch.zeros(48, 96), "mtp.0.attn.wq_a.weight": torch.zeros(3), "mtp.2.norm.weight": torch.zeros(48),
    "mtp.2.markov_head.markov_w1.weight": torch.zeros(40, 8), "mtp.2.confidence_head.proj.weight": torch.zeros(1, 56),
}  # fmt: skip


@pytest.mark.parametrize(
    "keys", [dict(dspark_block_size=5, num_nextn_predict_layers=3), dict(num_nextn_predict_layers=1)]
)
def test_drafts_of_a_dspark_checkpoint_are_refused_by_that_name(tmp_path, params, keys, capsys):
    folder = write(tmp_path, deepseeks(params) | DRAFTER, CONFIG | keys)
    check_equal(load(folder, dtype=torch.float32)[1], params)
    with pytest.raises(ValueError, match="mtp: got True, and .* holds a DSpark drafter .*, allowed: layers of multi"):
        load(folder, mtp=True)
    drafts = ["--model", str(folder), "--speculate", "2"]
    for command in (["generate", *drafts, "--prompt-ids", "1,2"], ["plan", *drafts]):
        if command[0] == "generate" or "dspark_block_size" in keys:
            assert main(command) == 2
            said = capsys.readouterr().err
            assert "holds a DSpark drafter (" in said and len(said) < 400


def test_a_conversion_says_that_it_leaves_a_dspark_drafter_out(tmp_path, params):
    (tmp_path / "source").mkdir()
    source = write(tmp_path / "source", deepseeks(params) | DRAFTER, CONFIG | dict(dspark_block_size=5))
    with pytest.warns(UserWarning, match="its DSpark drafter .* is left out"):
        convert(source, tmp_path / "made", "bf16")
    written = json.loads((tmp_path / "made/config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0 and "dspark_block_size" not in written
    assert load(tmp_path / "made")[1].keys() == params.keys()


@pytest.mark.parametrize("original", [True, False])
def test_save_pretrained(tmp_path, original):
    import transformers

    torch.manual_seed(1)
    config = transformers.DeepseekV4Config(**{key: value for key, value in CONFIG.items() if key != "model_type"})
    model = transformers.DeepseekV4ForCausalLM(config)
    model.save_pretrained(tmp_path, save_original_format=original, max_shard_size="40KB")
    _, loaded = load(tmp_path, dtype=torch.float32)
    theirs = model.state_dict()
    for ours, name in (
        ("embed", "model.embed_tokens.weight"),
        ("layers.1.index.q_b", "model.layers.1.self_attn.compressor.indexer.q_b_proj.weight"),
        ("layers.2.moe.gate_up", "model.layers.2.mlp.experts.gate_up_proj"),
        ("head.fn", "model.hc_head.hc_fn"),
        ("layers.0.attn.o_b", "model.layers.0.self_attn.o_b_proj.weight"),
    ):
        torch.testing.assert_close(loaded[ours].data, theirs[name], rtol=0, atol=0)
    both = [theirs[f"model.layers.2.self_attn.compressor.{part}_proj.weight"] for part in ("kv", "gate")]
    torch.testing.assert_close(loaded["layers.2.entry.kv_gate"].data, torch.cat(both), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_weights(tmp_path, params, dtype):
    """DeepSeek writes ``.scale`` beside an fp8 ``.weight``."""
    weights = deepseeks(params)
    name = "layers.1.attn.wq_b"
    scale = torch.full((1, 1), 0.5).to(dtype)
    codes = (params["layers.1.attn.q_b"] / 0.5).to(torch.float8_e4m3fn)
    weights |= {f"{name}.weight": codes, f"{name}.scale": scale}
    loaded = load(write(tmp_path, weights), dtype=torch.float32, expand=True)[1]
    torch.testing.assert_close(loaded["layers.1.attn.q_b"].data, codes.float() * 0.5, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layers.1.attn.compressor.ape": None}, "layers.1.self_attn.compressor.position_bias: missing"),
        (
            {"model.norm.weight": torch.ones(48)},
            "model.norm.weight: found twice, as (model.)?norm.weight and as (model.)?norm",
        ),
        ({"layers.0.ffn.gate.bias": torch.zeros(4)}, "layers.0.mlp.gate.e_score_correction_bias: extra"),
        ({"layers.2.attn.wkv.weight": torch.zeros(5, 48)}, r"kv_proj.weight: got shape \[5, 48\], allowed: \[32, 48\]"),
    ],
)
def test_errors_name_the_weight(tmp_path, params, change, message):
    weights = deepseeks(params) | change
    weights = {name: value for name, value in weights.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, weights))
