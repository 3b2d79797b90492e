"""Models that `generate` runs: presets of every size, random weights packed where they are used."""

from __future__ import annotations

import json

import pytest
import torch

from sparse_attn.cli import main as cli
from sparse_attn.cli import sources
from sparse_attn.cli.main import build_parser, main
from sparse_attn.mxfp4 import MXFP4
from sparse_attn.spec import PRESETS
from sparse_attn.weight_layout import PackedWeight


def generate(tmp_path, *more, prompt=("--prompt", "abc")):
    out = tmp_path / "out.json"
    more = (*more, *prompt)
    assert main(["generate", "--device", "cpu", "--max-new-tokens", "2", "--json", str(out), *more]) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dash", ("-", "_"))
def test_every_command_takes_every_preset(name, dash, capsys):
    spelt = name.replace("_", dash)
    for command in (["generate"], ["plan"], ["write-checkpoint", "--out", "x"]):
        found = build_parser().parse_args([*command, "--preset", spelt])
        assert (found.spec if command == ["plan"] else found.preset) == PRESETS[name]()


@pytest.mark.parametrize("name,form", (("tiny-v4", "published"), ("tiny_v4", "flash-base"), ("tiny-v32", "fused")))
def test_random_weights_are_packed(name, form, tmp_path, monkeypatch):
    taken = []
    model = cli.Model
    monkeypatch.setattr(cli, "Model", lambda spec, params, *rest, **more: taken.append((spec, params)) or model(
        spec, params, *rest, **more))  # fmt: skip
    found = generate(tmp_path, "--preset", name, "--layers", "2", "--weights", "random", "--format", form)
    ((spec, params),) = taken
    assert spec.num_layers == 2 and not any(key.startswith("layers.2.") for key in params)
    layouts = {
        weight.layout for key, weight in params.items() if isinstance(weight, PackedWeight) and "moe.down" in key
    }
    wanted = "e2m1/1x32/e8m0" if (name, form) == ("tiny-v4", "published") else "e4m3/128x128/fp32"
    assert layouts == {wanted}
    assert found["model"] == spec.name and len(found["tokens"]) == 2
    assert found["index_cache"] == (MXFP4 if wanted.startswith("e2m1") else "fp8")


def test_a_form_alone_means_random_weights(tmp_path):
    both = [generate(tmp_path, "--preset", "tiny-v4", *more) for more in (("--format", "published"), ())]
    assert both[0]["index_cache"] == MXFP4 and both[1]["index_cache"] == "fp8"


def test_a_preset_without_a_tokenizer_reads_ids(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "BYTE_VOCABULARY", 0)
    found = generate(tmp_path, "--preset", "tiny-v4", prompt=())
    assert found["prompt_tokens"] == sources.RANDOM_PROMPT and found["text"] is None
    assert generate(tmp_path, "--preset", "tiny-v4", prompt=("--prompt-ids", "5,6,7"))["prompt_tokens"] == 3
    assert main(["generate", "--preset", "tiny-v4", "--prompt", "hello"]) == 2
    assert "tiny_v4 holds no tokenizer.json; give the prompt as --prompt-ids" in capsys.readouterr().err


@pytest.mark.parametrize("more,message", [
    (["--preset", "deepseek_v4_pro", "--weights", "plain"], "61 layers of deepseek_v4_pro) for cpu, which has"),
    (["--preset", "tiny-v4", "--layers", "9"], "layers: got 9, allowed: 1 to the 5 of tiny_v4"),
    (["--layers", "1"], "--layers: got it without --preset"),
    (["--weights", "random"], "--weights: got it without --preset"),
    (["--preset", "tiny-v32", "--format", "flash-base"], "format: got 'flash-base', allowed for tiny_v32"),
    (["--preset", "tiny-v4", "--weights", "plain", "--format", "bf16"], "--format: got it with --weights plain"),
    (["--preset", "tiny-v4", "--weights", "random", "--expand-weights"], "--expand-weights: got it with --preset"),
])  # fmt: skip
def test_what_cannot_be_run_is_refused_before_weights_are_made(more, message, monkeypatch, capsys):
    for name in ("random_params", "random_packed_params", "load"):
        monkeypatch.setattr(sources, name, lambda *_, **__: pytest.fail("weights are made"))
    assert main(["generate", "--device", "cpu", *more]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_packed_weights_are_drawn_on_the_gpu_and_captured(tmp_path):
    """DeepSeek-V4-Flash's dims, its first layer; the weights alone are allocated."""
    torch.cuda.reset_peak_memory_stats()
    out = tmp_path / "out.json"
    assert main(["generate", "--preset", "deepseek-v4-flash", "--layers", "1", "--weights", "random", "--graph",
                 "--max-new-tokens", "4", "--ignore-eos", "--json", str(out)]) == 0  # fmt: skip
    found = json.loads(out.read_text())
    assert found["graph_captures"] == 1 and found["graph_replays"] == 3 and found["dtype"] == "bfloat16"
