"""Checkpoints that are wrong in a hundred ways: the command line ends with code 2 and one line that names file and
key."""

import itertools
import json
import os
import re
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparse_attn.checkpoints.load import load
from sparse_attn.checkpoints.save import save
from sparse_attn.cli.main import main
from sparse_attn.generation.text import file_tokenizer
from sparse_attn.models.params import random_params
from sparse_attn.spec import preset, tiny_glm5, tiny_v4, tiny_v32

SPECS = {
    "v32": replace(tiny_v32(), num_layers=2, moe_layers=(False, True), index_layers=(True, True)),
    "glm": replace(tiny_glm5(), num_layers=2, moe_layers=(False, True), index_layers=(True, False)),
    "v4": replace(tiny_v4(), num_layers=3, layer_kinds=("window", "indexed", "full"), hash_layers=(True, False, False)),
}
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A checkpoint of each architecture with nothing wrong."""
    home = tmp_path_factory.mktemp("sound")
    for name, spec in SPECS.items():
        save(home / name, spec, random_params(spec, seed=1))
        assert (
            main(
                [
                    "generate",
                    "--device",
                    "cpu",
                    "--model",
                    str(home / name),
                    "--prompt-ids",
                    "1,2",
                    "--max-new-tokens",
                    "1",
                ]
            )
            == 0
        )
    return home


def check_refused(capsys, folder, file, *named, command="generate"):
    more = ["--prompt-ids", "1,2", "--max-new-tokens", "1", "--device", "cpu"] if command == "generate" else []
    capsys.readouterr()
    start = time.perf_counter()
    code = main([command, "--model", str(folder), *more])
    seconds, said = time.perf_counter() - start, capsys.readouterr().err
    lines = [line for line in said.splitlines() if "error:" in line]
    assert code == 2 and len(lines) == 1 and said.endswith(lines[0] + "\n") and "Traceback" not in said, said
    for part in (str(folder / file) if file else str(folder), *named):
        assert part in lines[0], (part, lines[0])
    assert seconds < 5, said
    return lines[0]


COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "index_n_heads",
          "index_head_dim", "index_topk", "max_position_embeddings")  # fmt: skip
OF_ARCHITECTURE = {
    "v32": ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"),
    "v4": (
        "head_dim",
        "o_lora_rank",
        "o_groups",
        "hc_mult",
        "hc_sinkhorn_iters",
        "n_routed_experts",
        "num_experts_per_tok",
    ),
}
NO_COUNTS = (-1, 0, True, 64.0, "64", [64], {}, None, 2**64)
NUMBERS = ("rms_norm_eps", "routed_scaling_factor")
NO_NUMBERS = ("1e-6", True, [], float("nan"), float("inf"), 10**400, None)
BAD_VALUES = [
    *itertools.product(("v32", "v4"), COUNTS, NO_COUNTS),
    *((name, key, value) for name, keys in OF_ARCHITECTURE.items() for key in keys for value in NO_COUNTS),
    *itertools.product(("v32", "v4"), NUMBERS, NO_NUMBERS),
    *itertools.product(("v32", "v4"), ("tie_word_embeddings",), ("false", 1, [])),
    *itertools.product(("v32", "v4"), ("eos_token_id",), ("</s>", ["</s>"], [1, "2"], 1.0, True, {"id": 1}, [None], -3)),
    *itertools.product(("v32",), ("norm_topk_prob", "indexer_rope_interleave"), ("true", 2, [])),
    *itertools.product(("v32", "v4"), ("mlp_layer_types", "layer_types"), ("full", 7, {}, [], [[]], [1, 2, 3], ["dense"])),
    *itertools.product(("v32", "v4"), ("rope_parameters", "quantization_config"), ("yarn", 7, [1])),
    *itertools.product(("v4",), ("compress_rates",), ("4", 4, {"compressed_sparse_attention": "4"}, {"compressed_sparse_attention": 0})),
    *itertools.product(("v4",), ("swiglu_limit", "hc_eps"), ("x", -1.0, None)),
    *itertools.product(("v32", "v4"), ("model_type", "hidden_act"), ("llama", None, 3, [])),
    *itertools.product(("v32", "v4"), ("num_hidden_layers", "max_position_embeddings", "n_routed_experts"), (10**9, 10**12)),
    ("v32", "vocab_size", 2**40), ("v32", "n_group", 3), ("v32", "indexer_types", "FX"), ("v32", "index_topk_pattern", [{}, {}]),
    ("v4", "partial_rotary_factor", 0.9), ("v4", "qk_rope_head_dim", 3), ("v32", "qk_rope_head_dim", 15),
]  # fmt: skip
OTHERWISE_NAMED = {"qk_rope_head_dim": "rope_", "n_group": "num_groups", "rope_parameters": "rope"}


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["generate", "plan"])
def test_values_no_config_may_hold(sound, tmp_path, capsys, command):
    for name, key, value in BAD_VALUES:
        if command == "plan" and key == "quantization_config":  # of the weights, which plan reads none of
            continue
        config = json.loads((sound / name / CONFIG).read_text()) | {key: value}
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / WEIGHTS).unlink(missing_ok=True)
        (folder / WEIGHTS).symlink_to(sound / name / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(config))
        check_refused(capsys, folder, CONFIG, OTHERWISE_NAMED.get(key, key), command=command)


ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 256}
BAD_ROPES = [
    *itertools.product(("factor", "original_max_position_embeddings", "rope_theta"), (None, 0, -1, "40", True, [])),
    *itertools.product(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"), ("1", [], True)),
    *itertools.product(("rope_type",), ("linear", 3, [])), ("truncate", "no"), ("truncate", 0), ("beta_fast", 0.5),
    ("partial_rotary_factor", 0.5), ("partial_rotary_factor", "all"),
]  # fmt: skip


def test_ropes_no_config_may_hold(sound, tmp_path, capsys):
    config = json.loads((sound / "v32" / CONFIG).read_text())
    for key, value in BAD_ROPES:
        (tmp_path / CONFIG).write_text(json.dumps(config | {"rope_parameters": ROPE | {key: value}}))
        check_refused(capsys, tmp_path, CONFIG, key, command="plan")


@pytest.mark.parametrize("command", ["generate", "plan"])
@pytest.mark.parametrize(
    "data, said",
    [
        (b"", "not JSON"), (b"{", "not JSON"), (b"[1]", "of type list"), (b"null", "of type NoneType"), (b'"a"', "of type str"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"), (b'{"a": "\xe9"}', "not UTF-8"), (b"[" * 100_000, "not JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not JSON"), (b"{}", "model_type"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not JSON"),
    ],
)  # fmt: skip
def test_configs_that_are_no_object(sound, tmp_path, capsys, data, said, command):
    (tmp_path / CONFIG).write_bytes(data)
    (tmp_path / WEIGHTS).symlink_to(sound / "v32" / WEIGHTS)
    check_refused(capsys, tmp_path, CONFIG, said, command=command)


def _header(text):
    return len(text).to_bytes(8, "little") + text


BAD_FILES = {
    "empty": b"", "zeros": bytes(4), "text": b"not a tensor in here", "a huge header": b"\xff" * 64,
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n", "a list": _header(b"[]"),
    "no json": _header(b"{{{{"), "no utf-8": _header(b"\xff\xff"), "a header beyond the file": (10**6).to_bytes(8, "little") + b"{}",
    "offsets beyond the file": _header(json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()),
    "offsets that overlap": _header(
        json.dumps({name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for name in "ab"}).encode()
    ) + bytes(4),
    "a size that does not fit": _header(
        json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    ) + bytes(4),
    "an unknown dtype": _header(json.dumps({"a": {"dtype": "Q3", "shape": [4], "data_offsets": [0, 4]}}).encode()) + bytes(4),
    "a negative shape": _header(json.dumps({"a": {"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]}}).encode()) + bytes(4),
}  # fmt: skip


@pytest.mark.parametrize("sharded", [False, True])
def test_files_that_are_no_safetensors(sound, tmp_path, capsys, sharded):
    whole = (sound / "v32" / WEIGHTS).read_bytes()
    cut = {f"cut to {size}": whole[:size] for size in (1, 7, 8, 100, 4000, len(whole) // 2, len(whole) - 1)}
    shutil.copy(sound / "v32" / CONFIG, tmp_path)
    name = WEIGHTS
    if sharded:
        name = "model-00001-of-00001.safetensors"
        home = dict.fromkeys(load_file(sound / "v32" / WEIGHTS), name)
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": home}))
    for data in (BAD_FILES | cut | {"longer": whole + b"x"}).values():
        (tmp_path / name).write_bytes(data)
        check_refused(capsys, tmp_path, name)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    check_refused(capsys, tmp_path, name)
    (tmp_path / name).rmdir()
    (tmp_path / name).symlink_to("nowhere")
    check_refused(capsys, tmp_path, None, name)


def test_indexes_that_map_no_weights(sound, tmp_path, capsys):
    for file in (CONFIG, WEIGHTS):
        shutil.copy(sound / "v32" / file, tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "a.safetensors")
    for index in (
        b"", b"[]", b"null", b"\xff", b"{}", b'{"weight_map": null}', b'{"weight_map": {}}', b'{"weight_map": []}',
        b'{"weight_map": {"model.norm.weight": null}}', b'{"weight_map": {"model.norm.weight": "/dev/zero"}}',
        b'{"weight_map": {"model.norm.weight": "../a.safetensors"}}', b'{"weight_map": {"model.norm.weight": ""}}',
    ):  # fmt: skip
        (tmp_path / INDEX).write_bytes(index)
        check_refused(
            capsys, tmp_path, INDEX, "weight_map" if index[:1] == b"{" else "JSON" if index[:1] != b"\xff" else "UTF-8"
        )
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "b.safetensors"}}))
    check_refused(capsys, tmp_path, None, "b.safetensors", INDEX)
    (tmp_path / INDEX).unlink()
    (tmp_path / INDEX).mkdir()
    check_refused(capsys, tmp_path, INDEX)


def fp8(value, block=128):
    grid = [-(-size // block) for size in value.shape]
    return value.clamp(-4, 4).to(torch.float8_e4m3fn), torch.ones(grid)


NORM, Q_B, EMBED = "model.norm.weight", "model.layers.0.self_attn.q_b_proj.weight", "model.embed_tokens.weight"
GATE_UP, KV_B = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.self_attn.kv_b_proj.weight"
TABLE, SINK = "model.layers.0.mlp.gate.tid2eid", "model.layers.1.self_attn.sinks"


def spoilt(name, change):
    """A case that replaces one weight by what ``change`` makes of it."""
    return lambda weights: weights | {name: change(weights[name])}


def with_one(value):
    def change(weight):
        weight = weight.clone()
        weight.view(-1)[-1] = value
        return weight

    return change


def with_scale(name, codes, scale):
    return lambda weights: weights | {name: codes(weights[name]), name + "_scale_inv": scale(weights[name])}


BAD_WEIGHTS = {
    "int8 under a scale": ("v32", Q_B, "I8", with_scale(Q_B, lambda w: w.to(torch.int8), lambda w: torch.ones(3, 1))),
    "uint8 under a scale": ("v32", Q_B, "U8", with_scale(Q_B, lambda w: w.to(torch.uint8), lambda w: torch.ones(3, 1))),
    "bool": ("v32", Q_B, "BOOL", spoilt(Q_B, lambda w: w > 0)),
    "int64": ("v32", EMBED, "I64", spoilt(EMBED, lambda w: w.to(torch.int64))),
    "complex": ("v32", EMBED, "C64", spoilt(EMBED, lambda w: w.to(torch.complex64))),
    "fp8 without a scale": ("v32", Q_B, "without a", spoilt(Q_B, lambda w: fp8(w)[0])),
    "a scale of integers": ("v32", Q_B, "I64", with_scale(Q_B, lambda w: fp8(w)[0], lambda w: fp8(w)[1].long())),
    "a scale of another grid": ("v32", Q_B, "shape", with_scale(Q_B, lambda w: fp8(w)[0], lambda w: torch.ones(7, 1))),
    "a NaN scale": ("v32", Q_B, "NaN", with_scale(Q_B, lambda w: fp8(w)[0], lambda w: fp8(w)[1] * float("nan"))),
    "a negative scale": ("v32", Q_B, "_scale_inv: got a negative scale, allowed: at least 0",
                         with_scale(Q_B, lambda w: fp8(w)[0], lambda w: -fp8(w)[1])),
    "a negative scale of kv_b": ("v32", KV_B, "_scale_inv: got a negative scale",
                                 with_scale(KV_B, lambda w: fp8(w)[0], lambda w: with_one(-1.0)(fp8(w)[1]))),
    "a negative bf16 scale of fused experts": ("v32", GATE_UP, "_scale_inv: got a negative scale",
        with_scale(GATE_UP, lambda w: fp8(w)[0], lambda w: with_one(-1.0)(torch.ones(8, 1, 1, dtype=torch.bfloat16)))),
    "NaN norm": ("v32", NORM, "NaN", spoilt(NORM, with_one(float("nan")))),
    "NaN in kv_b": ("v32", KV_B, "NaN", spoilt(KV_B, with_one(float("nan")))),
    "infinite embedding": ("v32", EMBED, "infinite", spoilt(EMBED, with_one(float("-inf")))),
    "NaN in experts": ("v32", GATE_UP, "NaN", spoilt(GATE_UP, with_one(float("nan")))),
    "NaN sink": ("v4", SINK, "NaN", spoilt(SINK, with_one(float("nan")))),
    "expert beyond": ("v4", TABLE, "expert ids out of range, allowed: 0 to 7", spoilt(TABLE, with_one(8))),
    "negative expert": ("v4", TABLE, "expert ids out of range", spoilt(TABLE, with_one(-1))),
    "float table": ("v4", TABLE, "F32", spoilt(TABLE, lambda w: w.float())),
    "fused fp8 experts, a scale a half": ("v32", GATE_UP, "_scale_inv: got shape [8, 2, 1], allowed: [8, 1, 1]",
                                          with_scale(GATE_UP, lambda w: w.to(torch.float8_e4m3fn), lambda w: torch.ones(8, 2, 1))),
    "fp4 experts with fp32 scales": ("v4", GATE_UP, "_scale_inv: got F32 beside MXFP4 values (I8, two to a byte), allowed: F8_E8M0",
                           with_scale(GATE_UP, lambda w: w[..., ::2].to(torch.int8), lambda w: torch.ones(8, 128, 4))),
    "transposed": ("v32", Q_B, "shape [96, 384], allowed: [384, 96]", spoilt(Q_B, lambda w: w.T.contiguous())),
    "flat": ("v32", Q_B, "shape", spoilt(Q_B, torch.flatten)),
    "a scalar": ("v32", NORM, "shape []", spoilt(NORM, lambda w: torch.tensor(1.0))),
    "extra": ("v32", "vision.tower", "extra", lambda weights: weights | {"vision.tower": torch.ones(2)}),
    "missing": ("v32", NORM, "missing", lambda weights: {name: value for name, value in weights.items() if name != NORM}),
    "none": ("v32", "lm_head.weight", "missing", lambda weights: {}),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_weights_no_model_may_have(sound, tmp_path, capsys, case):
    name, weight, said, change = BAD_WEIGHTS[case]
    shutil.copy(sound / name / CONFIG, tmp_path)
    save_file(change(load_file(sound / name / WEIGHTS)), tmp_path / WEIGHTS)
    known = case not in ("none", "missing", "extra")
    check_refused(capsys, tmp_path, WEIGHTS if known else None, f"weight {weight}", said)


def test_a_block_of_zeros_may_have_a_scale_of_zero(sound, tmp_path):
    """As amax / 448 gives it."""
    weights = load_file(sound / "v32" / WEIGHTS)
    codes, scale = fp8(weights[Q_B])
    codes.view(torch.uint8)[:128], scale[:1] = 0, 0.0
    shutil.copy(sound / "v32" / CONFIG, tmp_path)
    save_file(weights | {Q_B: codes, Q_B + "_scale_inv": scale}, tmp_path / WEIGHTS)
    loaded = load(tmp_path, expand=True)[1]["layers.0.attn.q_b"]
    assert not loaded[:128].any() and loaded[128:].any()


def test_infinite_values_that_mean_something_are_taken(sound, tmp_path):
    weights = load_file(sound / "v4" / WEIGHTS)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    for name in (SINK, bias):
        weights = spoilt(name, with_one(float("-inf")))(weights)
    shutil.copy(sound / "v4" / CONFIG, tmp_path)
    save_file(weights, tmp_path / WEIGHTS)
    loaded = load(tmp_path)[1]
    assert [loaded[name][-1].item() for name in ("layers.1.attn.sink", "layers.1.moe.bias")] == [float("-inf")] * 2


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"version": "1.0"}', b'{"model": {"type": "Nothing"}}', b"{" * 1000],
)
def test_tokenizers_that_are_none(sound, tmp_path, capsys, data):
    for file in (CONFIG, WEIGHTS):
        shutil.copy(sound / "v32" / file, tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(data)
    check_refused(capsys, tmp_path, "tokenizer.json")


def test_directories_in_place_of_files(sound, tmp_path, capsys):
    (tmp_path / CONFIG).mkdir()
    check_refused(capsys, tmp_path, None, CONFIG)
    (tmp_path / CONFIG).rmdir()
    for file in (CONFIG, WEIGHTS):
        shutil.copy(sound / "v32" / file, tmp_path)
    (tmp_path / "tokenizer.json").mkdir()
    check_refused(capsys, tmp_path, "tokenizer.json")


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS, "tokenizer.json"])
def test_files_that_may_not_be_read(sound, tmp_path, capsys, monkeypatch, file):
    """By a patched open: root, whom tests may run as, may read everything."""
    for name in (CONFIG, WEIGHTS):
        shutil.copy(sound / "v32" / name, tmp_path)
    if file == "tokenizer.json":
        (tmp_path / file).write_text("{}")
    real = open

    def denied(path, *args, **kwargs):
        if Path(path).name == file:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", denied)
    monkeypatch.setattr(Path, "read_bytes", lambda self: denied(self, "rb").read())
    check_refused(capsys, tmp_path, file, "Permission denied")


def test_more_experts_and_layers_than_there_are_end_at_once(sound, tmp_path, capsys):
    """Within what a config may say, but far beyond what the file holds: no name is made for each."""
    config = json.loads((sound / "v32" / CONFIG).read_text())
    shutil.copy(sound / "v32" / WEIGHTS, tmp_path)
    kinds = {
        "mlp_layer_types": ["sparse"] * 4096,
        "num_hidden_layers": 4096,
        "n_routed_experts": 65536,
        "n_group": 1,
        "topk_group": 1,
    }
    (tmp_path / CONFIG).write_text(json.dumps(config | kinds))
    check_refused(capsys, tmp_path, None, "missing", "or more others")


def test_no_memory_is_taken_for_weights_that_do_not_fit(sound, tmp_path, capsys):
    config = json.loads((sound / "v32" / CONFIG).read_text())
    shutil.copy(sound / "v32" / WEIGHTS, tmp_path)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "index_n_heads", "v_head_dim"):
        (tmp_path / CONFIG).write_text(json.dumps(config | {key: 2**30}))
        check_refused(capsys, tmp_path, WEIGHTS, "shape")


def test_presets_are_within_what_a_config_may_say():
    assert max(preset(name).max_positions for name in ("deepseek_v32", "glm5", "deepseek_v4_pro")) <= 2**24


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS, INDEX, "a.safetensors", "tokenizer.json"])
def test_pipes_in_place_of_files_are_not_read(sound, tmp_path, capsys, file):
    shutil.copy(sound / "v32" / CONFIG, tmp_path)
    if file in (INDEX, "a.safetensors"):
        home = dict.fromkeys(load_file(sound / "v32" / WEIGHTS), "a.safetensors")
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": home}))
    else:
        shutil.copy(sound / "v32" / WEIGHTS, tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    writer = threading.Thread(target=lambda: (tmp_path / file).open("wb").close(), daemon=True)
    writer.start()  # whoever reads gets an end of file, and does not wait
    check_refused(capsys, tmp_path, file, "got a pipe, allowed: a regular file")
    assert writer.is_alive()
    os.close(os.open(tmp_path / file, os.O_RDONLY | os.O_NONBLOCK))


HUB = "as an id of the Hugging Face Hub: hf download deepseek-ai/DeepSeek-V3.2 --local-dir DIR"
NO_FOLDERS = {
    "deepseek-ai/DeepSeek-V3.2": HUB,
    "https://huggingface.co/deepseek-ai/DeepSeek-V3.2": HUB,
    "hf://deepseek-ai/DeepSeek-V3.2": HUB,
    "{}/glm.gguf": "glm.gguf is GGUF, which is not read: download the safetensors",
    "{}/q4": "glm-00001-of-00002.gguf is GGUF, which is not read: download the safetensors",
    "{}/with-config": "glm.gguf is GGUF, which is not read: download the safetensors",
    "{}/pickled": "pytorch_model.bin is a pickle of torch, which is not read: save its state dict",
    "{}/sound/model.safetensors": "it is a file, allowed: its folder",
}


@pytest.mark.parametrize("given", NO_FOLDERS)
def test_what_is_no_checkpoint_folder_is_named_with_what_to_do(sound, tmp_path, capsys, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    for name in ("q4", "with-config", "pickled"):
        (tmp_path / name).mkdir()
    for name in ("with-config", "pickled"):
        shutil.copy(sound / "v32" / CONFIG, tmp_path / name)
    (tmp_path / "sound").symlink_to(sound / "v32")
    for name in ("glm.gguf", "q4/glm-00001-of-00002.gguf", "with-config/glm.gguf", "pickled/pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"GGUF")
    folder, said = given.format(tmp_path), NO_FOLDERS[given]
    check_refused(capsys, folder, None, said)
    with pytest.raises(ValueError, match=re.escape(said)):
        load(folder)
    assert main(["write-checkpoint", "--from", folder, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


def test_an_end_of_text_beyond_the_vocabulary_is_an_error_of_the_config(sound, tmp_path, capsys):
    shutil.copy(sound / "v32" / WEIGHTS, tmp_path)
    config = json.loads((sound / "v32" / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"eos_token_id": [3, 257]}))
    check_refused(capsys, tmp_path, CONFIG, "config eos_token_id: got 257, allowed: 0 to 256", "--ignore-eos")
    more = ["--prompt-ids", "1,2", "--max-new-tokens", "1", "--device", "cpu"]
    assert main(["generate", "--model", str(tmp_path), "--ignore-eos", *more]) == 0


def write_words(folder, unknown=None):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(13)}, unk_token=unknown))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.enable_truncation(2)
    words.enable_padding(length=4, pad_id=7)
    words.save(str(folder / "tokenizer.json"))


def test_a_prompt_that_a_tokenizer_cannot_encode_is_named(sound, tmp_path, capsys):
    for file in (CONFIG, WEIGHTS):
        shutil.copy(sound / "v32" / file, tmp_path)
    write_words(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"id": 1, "prompt": "w1 w2"}\n{"id": 2, "prompt": "w1 rabbit"}\n')
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    for given, where in ((["--prompt", "w1 rabbit"], "error: "), (files, f"{tmp_path / 'prompts.jsonl'}, line 2: ")):
        assert main(["generate", "--model", str(tmp_path), "--device", "cpu", *given]) == 2
        said = capsys.readouterr().err
        assert f"{where}{tmp_path / 'tokenizer.json'}: cannot encode the prompt 'w1 rabbit': " in said, said
        assert "Traceback" not in said


def test_a_tokenizer_neither_cuts_nor_pads_a_prompt(tmp_path):
    write_words(tmp_path, unknown="w0")
    tokenizer = file_tokenizer(tmp_path)
    assert tokenizer.encode("w1 w2 w3") == [1, 2, 3] and tokenizer.encode("w5") == [5]
