"""The command line end to end on a CPU: generate, info, plan, quality."""

import functools
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

from sparse_attn import workspace
from sparse_attn.cli import main as cli
from sparse_attn.cli.documents import question
from sparse_attn.cli.main import main
from sparse_attn.cli.shipped import shipped_models
from sparse_attn.generation import text
from sparse_attn.models.shapes import param_shapes
from sparse_attn.spec import PRESETS, preset, to_hf_config

ROOT = Path(__file__).parents[2]
PROMPT = text.shipped_text()[:150]  # more tokens than the tiny models' top-k of 64


def generate(tmp_path, *arguments, logits=False):
    """Run `generate` on the CPU; (JSON, logits or None)."""
    out, dump = tmp_path / "out.json", tmp_path / "logits.safetensors"
    dumping = ["--dump-logits", str(dump)] if logits else []
    assert main(["generate", "--device", "cpu", "--json", str(out), *dumping, *map(str, arguments)]) == 0
    return json.loads(out.read_text()), load_file(str(dump))["logits"] if logits else None


@pytest.mark.parametrize("cache", ("fp8", "bf16", "fp32"))
@pytest.mark.parametrize("name", ("tiny-v32", "tiny-glm5", "tiny-v4"))
def test_generate(tmp_path, capsys, name, cache):
    found, logits = generate(
        tmp_path,
        "--preset",
        name,
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        5,
        "--cache",
        cache,
        "--ignore-eos",
        "--progress",
        logits=True,
    )
    assert found["prompt_tokens"] == len(PROMPT.encode())
    assert len(found["tokens"]) == 5
    assert set(found["timing"]) == {"prefill_s", "setup_s", "decode_s", "tokens_per_s"}
    assert all(value > 0 for value in found["timing"].values())
    assert [found[key] for key in ("graph_captures", "graph_replays", "graph_breaks")] == [0, 0, 0]
    assert found["device"] == "cpu" and found["versions"]["torch"] == torch.__version__
    assert found["compilations"] == 0
    assert logits.shape == (len(PROMPT.encode()) + 4, preset(name).vocab_size) and logits.dtype == torch.float32
    assert logits.isfinite().all()
    assert logits[-5:].argmax(1).tolist() == found["tokens"]
    captured = capsys.readouterr()
    assert "prefill" in captured.err and "decode" in captured.err and captured.out.strip()


@pytest.mark.parametrize("name,block_size", (("tiny-v32", 5), ("tiny-glm5", 5), ("tiny-v4", 256)))
def test_chunks_and_blocks_do_not_change_the_result(tmp_path, name, block_size):
    common = ("--preset", name, "--prompt", PROMPT, "--max-new-tokens", 6, "--cache", "fp32")
    whole, logits = generate(tmp_path, *common, logits=True)
    pieces, chunked = generate(tmp_path, *common, "--prefill-tokens", 37, "--block-size", block_size, logits=True)
    assert pieces["tokens"] == whole["tokens"]
    torch.testing.assert_close(chunked, logits, atol=1e-4, rtol=0)


def test_batch_invariant_attention_is_asked_for(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(cli, "generate", lambda model, *_, **__: built.append(model.batch_invariant) or sys.exit())
    for options in ((), ("--batch-invariant",)):
        with pytest.raises(SystemExit):
            generate(tmp_path, "--preset", "tiny-v32", "--prompt", "a", *options)
    assert built == [False, True]


def test_prompt_sources_agree(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("h\u00e9llo")
    ids = list("h\u00e9llo".encode())
    found = [
        generate(tmp_path, *given, "--max-new-tokens", 2)[0]
        for given in (("--prompt", "h\u00e9llo"), ("--prompt-file", file), ("--prompt-ids", ",".join(map(str, ids))))
    ]
    assert [each["prompt_tokens"] for each in found] == [6, 6, 6]
    assert found[0]["tokens"] == found[1]["tokens"] == found[2]["tokens"]


def test_the_model_that_ships_answers_and_draws(tmp_path, capsys):
    """Without arguments: a text with records in it, and the value of the key it ends with."""
    picture = tmp_path / "picture.png"
    found, _ = generate(tmp_path, "--max-new-tokens", 8, "--plot", picture)
    read, value = question()
    assert found["text"].startswith(value + "]") and found["prompt_tokens"] == len(read)
    assert found["model"] == next(iter(shipped_models())).replace("-", "_")
    said = capsys.readouterr().err
    assert f"recorded {value}, answered {value}" in said and read[-100:] in said
    assert re.search(r"each query attended to \d+\.\d of \d+\.\d keys in the mean; \d+\.\d tokens a second", said)
    assert re.search(r"\d+ tokens read, 8 written: reading \d+\.\d\d s \(\d+%\)", said)
    image = PIL.Image.open(picture)
    assert image.format == "PNG" and min(image.size) > 300 and len(image.convert("RGB").getcolors(1 << 24)) > 20


def test_temperature_is_seeded(tmp_path):
    def tokens(*given):
        return generate(tmp_path, "--prompt", "abc", "--max-new-tokens", 12, "--ignore-eos", *given)[0]["tokens"]

    first = tokens("--temperature", 5, "--seed", 1)
    assert first == tokens("--temperature", 5, "--seed", 1)
    assert first != tokens("--temperature", 5, "--seed", 2)


def test_filters_and_penalties_reach_the_draw(tmp_path):
    def tokens(*given):
        return generate(tmp_path, "--prompt", "abc", "--max-new-tokens", 12, "--ignore-eos", *given)[0]["tokens"]

    greedy, hot = tokens(), ("--temperature", 5)
    for one in (("--top-k", 1), ("--top-p", 0), ("--min-p", 1)):
        assert tokens(*hot, *one) == greedy != tokens(*hot)
    for name in ("repetition", "presence", "frequency"):
        assert len(set(tokens(f"--{name}-penalty", 1e9))) == 12 > len(set(greedy))


def test_a_stop_string_ends_the_text_and_logprobs_are_written(tmp_path):
    common = ("--prompt", "abc", "--max-new-tokens", 12, "--ignore-eos")
    whole = generate(tmp_path, *common)[0]
    stop = whole["text"][3:5]
    found = generate(tmp_path, *common, "--stop", "\n\n\n", "--stop", stop, "--logprobs", 2)[0]
    end = whole["text"].index(stop)
    assert found["text"] == whole["text"][:end] and found["stop"] == stop
    count = len(found["tokens"])
    assert found["tokens"] == whole["tokens"][:count] and count == end + len(stop) == len(found["logprobs"])
    for token, row in zip(found["tokens"], found["logprobs"]):
        assert row["best"][0] == [token, row["drawn"]] and len(row["best"]) == 2 and row["drawn"] <= 0
    missed = generate(tmp_path, *common, "--stop", "\n\n\n")[0]
    assert (missed["text"], missed["stop"]) == (whole["text"], None) and "stop" not in whole


def test_eos_ends_a_text_unless_ignored(tmp_path, monkeypatch):
    common = ("--preset", "tiny-v32", "--prompt", "abc", "--max-new-tokens", 6)
    whole = generate(tmp_path, *common, "--ignore-eos")[0]["tokens"]
    place = next(n for n, token in enumerate(whole) if token != whole[0]) if len(set(whole)) > 1 else 0
    from dataclasses import replace

    from sparse_attn.cli import arguments

    monkeypatch.setattr(arguments, "preset", lambda name: replace(preset(name), eos_token_ids=(whole[place],)))
    found, logits = generate(tmp_path, *common, logits=True)
    assert found["tokens"] == whole[: place + 1]
    assert logits.shape[0] == 3 + place
    assert generate(tmp_path, *common, "--ignore-eos")[0]["tokens"] == whole


def test_bf16_weights(tmp_path):
    found, logits = generate(tmp_path, "--prompt", PROMPT, "--max-new-tokens", 3, "--dtype", "bf16", logits=True)
    assert found["dtype"] == "bfloat16" and logits.dtype == torch.float32 and logits.isfinite().all()


def test_compile(tmp_path, monkeypatch):
    """Dynamo alone, so that no C++ compiler is needed."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    common = ("--preset", "tiny-glm5", "--prompt", PROMPT, "--max-new-tokens", 5, "--cache", "fp32", "--ignore-eos")
    plain, compiled = generate(tmp_path, *common), generate(tmp_path, *common, "--compile")
    torch.compiler.reset()
    assert compiled[0]["tokens"] == plain[0]["tokens"]
    assert [compiled[0][key] for key in ("compilations", "graph_breaks", "graph_captures", "graph_replays")] == [
        2,
        0,
        0,
        0,
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("tiny-v32", "tiny-glm5", "tiny-v4"))
def test_compiled_and_captured_tokens_equal_the_reference_on_the_cpu(tmp_path, name):
    torch.compiler.reset()
    common = ("--preset", name, "--prompt", PROMPT, "--max-new-tokens", 40, "--cache", "fp32", "--ignore-eos")
    want = generate(tmp_path, *common, "--impl", "reference")[0]
    found, logits = generate(
        tmp_path, *common, "--device", "cuda", "--compile", "--graph", "--prefill-tokens", 64, logits=True
    )
    assert found["tokens"] == want["tokens"]
    assert [found[key] for key in ("graph_captures", "graph_replays", "graph_breaks")] == [1, 39, 0]
    assert 2 <= found["compilations"] <= 4
    assert logits[-40:].argmax(1).tolist() == found["tokens"]
    again = generate(tmp_path, *common, "--device", "cuda", "--compile", "--graph", "--prefill-tokens", 64)[0]
    assert again["tokens"] == want["tokens"]
    assert [again[key] for key in ("graph_captures", "graph_replays", "compilations")] == [
        1,
        39,
        2,
    ]  # a model of its own


def write_checkpoint(folder, tokenizer):
    """A tiny checkpoint of transformers' making, with a word tokenizer where asked for."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.DeepseekV32Config(
        vocab_size=13, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, kv_lora_rank=16, q_lora_rank=16,
        qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8, n_group=1, topk_group=1, num_experts_per_tok=2,
        max_position_embeddings=64, index_topk=4, index_head_dim=16, index_n_heads=2, first_k_dense_replace=1,
        rope_parameters=dict(rope_type="default", rope_theta=1e4), eos_token_id=12,
    )  # fmt: skip
    transformers.DeepseekV32ForCausalLM(config).save_pretrained(folder)
    if tokenizer:
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(13)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.save(str(folder / "tokenizer.json"))


def test_checkpoint_folder(tmp_path, capsys):
    write_checkpoint(tmp_path, tokenizer=True)
    common = ("--model", tmp_path, "--cache", "fp32", "--max-new-tokens", 4, "--ignore-eos")
    named = generate(tmp_path, *common, "--prompt", "w1 w5 w2 w9 w3 w7")[0]
    assert named["prompt_tokens"] == 6 and len(named["tokens"]) == 4
    assert named["text"].split() == [f"w{token}" for token in named["tokens"]]
    assert generate(tmp_path, *common, "--prompt-ids", "1,5,2,9,3,7")[0]["tokens"] == named["tokens"]
    capsys.readouterr()
    assert main(["plan", "--model", str(tmp_path)]) == 0
    assert "deepseek_v32" in capsys.readouterr().out


def test_checkpoint_without_tokenizer(tmp_path, capsys):
    write_checkpoint(tmp_path, tokenizer=False)
    assert generate(tmp_path, "--model", tmp_path, "--prompt-ids", "1,2", "--max-new-tokens", 2, "--cache", "bf16")[0][
        "tokens"
    ]
    assert main(["generate", "--model", str(tmp_path), "--prompt", "hello"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err
    weights = load_file(str(tmp_path / "model.safetensors"))
    del weights["lm_head.weight"]
    save_file(weights, str(tmp_path / "model.safetensors"))
    assert main(["generate", "--model", str(tmp_path), "--prompt-ids", "1,2"]) == 2
    assert "lm_head.weight" in capsys.readouterr().err


ERRORS = {
    "--plot: got it with --compile": ["--plot", "x.png", "--compile"],
    "argument --preset": ["--preset", "tiny-v99"],
    "not allowed with": ["--preset", "tiny-v32", "--model", "x"],
    "not allowed with argument --prompt": ["--prompt", "a", "--prompt-ids", "1"],
    "graph: got device cpu, needs a CUDA or HIP device": ["--graph", "--device", "cpu"],
    "--max-new-tokens: got '0'": ["--max-new-tokens", "0"],
    "--prompt-ids: got '1,x'": ["--prompt-ids", "1,x"],
    "got id 257, allowed: 0 to 256": ["--prompt-ids", "1,257"],
    "got id -1": ["--prompt-ids=-1"],
    "--prompt: got an empty text": ["--prompt", ""],
    "No such file": ["--prompt-file", "/nonexistent/prompt"],
    "8193 in all": ["--prompt", "a" * 8192, "--max-new-tokens", "2"],
    "--temperature: got '-1'": ["--temperature", "-1"],
    "--stop: got an empty text, allowed: at least one": ["--stop", ""],
    "--logprobs: got '-1', allowed: an integer of at least 0": ["--logprobs", "-1"],
    "logprobs: got 999, allowed: 0 to 257": ["--preset", "tiny-v32", "--logprobs", "999"],
    "--top-k: got '-1', allowed: an integer of at least 0": ["--top-k", "-1"],
    "--top-p: got '1.5', allowed: a number from 0 to 1": ["--top-p", "1.5"],
    "--min-p: got 'nan', allowed: a number from 0 to 1": ["--min-p", "nan"],
    "--repetition-penalty: got '0', allowed": ["--repetition-penalty", "0"],
    "--presence-penalty: got 'inf', allowed": ["--presence-penalty", "inf"],
    "'triton' needs a CUDA": ["--impl", "triton", "--device", "cpu"],
    "--model: got '/nonexistent', allowed: a folder with a config.json": [
        "--model",
        "/nonexistent",
        "--prompt-ids",
        "1",
    ],
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_what_is_wrong(capsys, message):
    try:
        code = main(["generate", *ERRORS[message]])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(capsys):
    assert main(["generate", "--device", "cuda"]) == 2
    assert "--device: got 'cuda'" in capsys.readouterr().err


def test_module_runs_as_a_program(tmp_path):
    command = [sys.executable, "-m", "sparse_attn", "generate", "--prompt", "abc", "--max-new-tokens", "2", "--no-compile",
               "--no-graph", "--device", "cpu", "--impl", "reference", "--json", str(tmp_path / "out.json")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["prompt_tokens"] == 3 and found["compilations"] == 0 and len(found["tokens"]) <= 2


def test_info(capsys):
    assert main(["info", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    for name in ("torch", "sparse_attn_prefill", "index_topk_decode", "reference", "sampling"):
        assert name in shown
    assert main(["info", "--device", "cpu", "--short"]) == 0
    machine = capsys.readouterr().out
    assert shown.startswith(machine) and machine.splitlines()[-1].startswith("target ") and "reference" not in machine


def test_plan_counts_every_byte(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert main(["plan", "--preset", "deepseek_v32", "--max-batched-tokens", "8192", "--max-model-len", "163840",
                 "--max-batch", "2", "--json", str(out)]) == 0  # fmt: skip
    numbers = json.loads(out.read_text())
    tokens = 2 * 163840
    assert numbers["caches"]["kv"]["bytes"] == 656 * 61 * tokens
    assert numbers["caches"]["index"]["bytes"] == 132 * 61 * tokens
    assert numbers["cache_bytes"] == (656 + 132) * 61 * tokens
    assert (
        numbers["workspace"]["bytes"] == numbers["workspace"]["scratch_bytes"] + numbers["workspace"]["counter_bytes"]
    )
    assert numbers["weight_bytes"] == sum(numbers["weights"].values())
    assert numbers["weights"]["mtp"] == 0 < numbers["files"]["mtp"]
    with_mtp = numbers["weight_bytes"] + numbers["files"]["mtp"]
    assert 1 < with_mtp / numbers["file_bytes"] < 1.03 and 1 < with_mtp / 689e9 < 1.03  # what the files hold
    assert numbers["gathered_bytes"] == 163840 * 576 * 2 and numbers["activation_bytes"] > 8192 * 129280 * 6
    parts = [numbers[f"{part}_bytes"] for part in ("weight", "cache", "gathered", "activation")]
    assert numbers["bytes"] == sum(parts) + numbers["workspace"]["bytes"]
    shown = capsys.readouterr().out
    for what, nbytes in (("kv cache", 656 * 61 * tokens), ("index cache", 132 * 61 * tokens), ("weights", parts[0]),
                         ("expert weights", numbers["weights"]["expert"]), ("workspace", numbers["workspace"]["bytes"]),
                         ("gathered", parts[2]), ("activations", parts[3]), ("in all", numbers["bytes"])):  # fmt: skip
        assert re.search(rf"^{what} .* {nbytes:,}$", shown, re.MULTILINE), what


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "kinds"),
    (("deepseek_v32", ("mtp kv", "mtp index")), ("deepseek_v4_flash", ("mtp window",)), ("tiny_v32", ("mtp kv",))),
)
def test_plan_counts_what_speculation_takes(name, kinds, tmp_path, capsys):
    numbers = []
    for drafts in (0, 2):
        out = tmp_path / f"{drafts}.json"
        given = ["plan", "--preset", name, "--max-model-len", "8192", "--max-batch", "3", "--json", str(out)]
        assert main([*given, "--speculate", str(drafts)]) == 0
        numbers.append(json.loads(out.read_text()))
    alone, both = numbers
    assert both["bounds"]["next_n"] == 3 and both["files"] == alone["files"]
    assert both["weight_bytes"] - alone["weight_bytes"] == both["weights"]["mtp"] > 0
    assert 0.9 < both["weights"]["mtp"] / both["files"]["mtp"] < 1.1
    added = {kind for kind in both["caches"] if kind not in alone["caches"]}
    assert added >= {*kinds} and all(both["caches"][kind]["layers"] == 1 for kind in added)
    assert both["cache_bytes"] == sum(cache["bytes"] for cache in both["caches"].values()) > alone["cache_bytes"]
    for part in ("activation_bytes", "bytes"):
        assert both[part] > alone[part]
    assert both["workspace"]["bytes"] >= alone["workspace"]["bytes"]
    sent = [sum(one["gpus"][1]["collective_bytes_per_step"].values()) for one in numbers]
    assert sent[1] > 3 * sent[0]
    assert "mtp weights" in capsys.readouterr().out
    assert main(["plan", "--preset", name, "--format", "fused", "--speculate", "1"]) == 2
    assert "speculate: got 1, allowed: 0, fused files" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name,said,options,want",
    [
        ("tiny_v4", {"expert_dtype": "fp4"}, (), "index_mxfp4/32"),
        ("tiny_v4", {"expert_dtype": "fp8"}, (), "index_fp8/32/e4m3fn/pow2"),
        ("tiny_v4", {}, (), "index_fp8/32/e4m3fn/pow2"),
        ("tiny_v4", {"expert_dtype": "fp4"}, ("--index-cache", "fp8"), "index_fp8/32/e4m3fn/pow2"),
        ("tiny_v4", {"expert_dtype": "fp4"}, ("--cache", "bf16"), "plain/bf16/32+0"),
        ("tiny_v32", {}, ("--index-cache", "mxfp4"), "index_mxfp4/32"),
        ("tiny_glm5", {}, ("--cache", "bf16", "--index-cache", "mxfp4"), "index_mxfp4/32"),
    ],
)
def test_which_index_keys_a_model_has(tmp_path, name, said, options, want):
    """MXFP4 where they are asked for, and for a DeepSeek-V4 that was trained with them where nothing else is."""
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(preset(name)) | said))
    out = tmp_path / "plan.json"
    assert main(["plan", "--model", str(tmp_path), *options, "--json", str(out)]) == 0
    assert json.loads(out.read_text())["caches"]["index"]["layout"] == want


def test_generates_with_mxfp4_index_keys(tmp_path):
    common = ("--preset", "tiny-v4", "--prompt", PROMPT, "--max-new-tokens", 3, "--ignore-eos")
    found = generate(tmp_path, *common, "--index-cache", "mxfp4")[0]
    assert found["index_cache"] == "mxfp4" and found["cache"] == "fp8" and len(found["tokens"]) == 3


@pytest.mark.parametrize("block_size", (2, 6, 0, -4))
def test_plan_refuses_the_block_sizes_that_generate_refuses(block_size, capsys):
    said = []
    for command in ("generate", "plan"):
        try:
            code = main([command, "--preset", "tiny-v4", f"--block-size={block_size}"])
        except SystemExit as exit:
            code = exit.code
        assert code == 2
        said.append(capsys.readouterr().err.splitlines()[-1].split("error: ")[1])
    assert said[0] == said[1] and "block" in said[0]


def test_plan_of_large_bounds_asks_few_sizes(monkeypatch, capsys):
    asked = itertools.count()
    size_of = workspace.size_of
    monkeypatch.setattr(workspace, "size_of", lambda scratch: (next(asked), size_of(scratch))[1])
    assert main(["plan", "--preset", "deepseek_v4_pro", "--max-batch", "4096", "--max-batched-tokens", "1048576"]) == 0
    assert 1000 < next(asked) < 70_000  # 42,572 when written; there are 1,048,576 rows


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [spelt for name in PRESETS for spelt in sorted({name, name.replace("_", "-")})])
@pytest.mark.parametrize("cache", ("fp8", "bf16", "fp32"))
def test_plan_knows_every_preset(name, cache, capsys):
    assert main(["plan", "--preset", name, "--cache", cache]) == 0
    assert f"{preset(name).num_layers} " in capsys.readouterr().out


def test_plan_errors(capsys):
    assert main(["plan", "--preset", "tiny-v32", "--max-model-len", "8193"]) == 2
    assert "--max-model-len: got 8193" in capsys.readouterr().err
    assert main(["plan", "--model", "/nonexistent"]) == 2
    assert "--model: got '/nonexistent', allowed: a folder with a config.json, or one" in capsys.readouterr().err


@pytest.mark.few(1)
@pytest.mark.parametrize("more,least", [(["--format", "bf16"], 1.36e12), (["--format", "fp8-e8m0"], 6.85e11)])
def test_plan_counts_weights_in_every_form(more, least, tmp_path):
    out = tmp_path / "plan.json"
    assert main(["plan", "--preset", "deepseek_v32", *more, "--speculate", "1", "--json", str(out)]) == 0
    numbers = json.loads(out.read_text())
    assert numbers["format"] == more[1] and least < numbers["weight_bytes"] < 1.03 * least


def test_plan_refuses_forms_that_a_model_does_not_have(capsys):
    assert main(["plan", "--preset", "deepseek_v32", "--format", "flash-base"]) == 2
    assert "format: got 'flash-base', allowed for deepseek_v32" in capsys.readouterr().err


def test_plan_of_a_shipped_model(capsys):
    assert main(["plan", "--model", "reader-v4"]) == 0
    assert "full entries cache" in capsys.readouterr().out


def test_shipped_text_is_longer_than_top_k():
    length = len(text.byte_tokenizer().encode(text.shipped_text()))
    for name in ("tiny-v32", "tiny-glm5"):
        assert preset(name).index.top_k * 4 < length < preset(name).max_positions
        assert param_shapes(preset(name))["embed"][0] == 257


def test_byte_tokenizer_and_printable():
    tokenizer = text.byte_tokenizer()
    assert tokenizer.decode(tokenizer.encode("na\u00efve")) == "na\u00efve"
    assert tokenizer.decode([72, 256, 105, 0xFF]) == "Hi\ufffd"
    assert text.printable("a\x1b\n") == "a\\x1b\n"


def test_quality(tmp_path, capsys):
    written = tmp_path / "quality.json"
    common = ["quality", "--device", "cpu", "--documents", "1", "--context", "320", "--ways", "sparse,chunked"]
    assert main([*common, "--json", str(written)]) == 0
    found = json.loads(written.read_text())
    table = capsys.readouterr().out
    for name, row in found["ways"].items():
        assert re.search(rf"^{name} +{row['bits_per_byte']:.4f} .*{row['right']}/{row['asked']}", table, re.MULTILINE)
        assert row["asked"] >= 4 and 0.5 < row["bits_per_byte"] < 4
    for wrong, message in (
        (["--ways", "sparse,dear"], "--ways: got 'dear'"),
        (["--ways", "replayed"], "--ways: got 'replayed' on cpu, needs a GPU"),
        (["--context", "9000"], "--context: got 9000 bytes"),
        (["--context", "10"], "--context: got 10 bytes, allowed: at least 40"),
        (["--context", "26000"], "--context: got 26000 bytes, 26000 tokens, allowed: 8192"),
        (["--model", "/nonexistent"], "--model: got '/nonexistent'"),
    ):
        try:
            code = main([*common, *wrong])
        except SystemExit as exit:
            code = exit.code
        assert code == 2 and message in capsys.readouterr().err


def test_a_picture_of_any_vocabulary(tmp_path):
    write_checkpoint(tmp_path, tokenizer=True)
    picture = tmp_path / "x.svg"
    generate(tmp_path, "--model", tmp_path, "--prompt", "w1 w2", "--max-new-tokens", 2, "--plot", picture)
    assert "<svg" in picture.read_text()
