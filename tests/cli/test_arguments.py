"""What commands are told: errors in one line, help in groups, a name for each thing."""

from __future__ import annotations

import re
import shlex

import pytest

from sparse_attn.checkpoints.load import read_config
from sparse_attn.cli.explain_calls import FUNCTIONS
from sparse_attn.cli.main import build_parser, main
from sparse_attn.cli.shipped import folder_of
from sparse_attn.framework.target import TARGETS
from sparse_attn.roofline import CARDS, GPUS
from sparse_attn.spec import PRESETS, preset
from sparse_attn.version import __version__


def said(capsys, *arguments):
    """(code, stdout, stderr)"""
    try:
        code = main([*map(str, arguments)])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("line, message", [
    ("generate --temprature 0.5", "generate: error: --temprature: did you mean --temperature?"),
    ("generate --max_new_tokens=3", "generate: error: --max_new_tokens: did you mean --max-new-tokens?"),
    ("plan --preset glm5 --max-batches 3", "plan: error: --max-batches: did you mean --max-batch?"),
    ("generate --zzz", "generate: error: --zzz: there is no such option"),
    ("generate hello", "error: unrecognized arguments: hello"),
    ("generate --temperature", "generate: error: argument --temperature: expected one argument"),
    ("genrate", "error: argument {generate,info,plan,quality,explain,write-checkpoint}: invalid choice: 'genrate'"),
])  # fmt: skip
def test_an_error_of_arguments_takes_a_line(line, message, capsys):
    code, out, err = said(capsys, *line.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err


def test_the_version_is_said(capsys):
    assert said(capsys, "--version") == (0, f"sparse_attn {__version__}\n", "")


def test_every_group_of_generate_has_an_example_that_parses(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, help, _ = said(capsys, "generate", "--help")
    examples = re.findall(r"^(\w[\w -]*):\n  example: (.+)\n\n", help, re.MULTILINE)
    named = [name for name, _ in examples]
    assert code == 0 and named == [
        "model",
        "prompt",
        "many prompts",
        "how it is computed",
        "drawing",
        "output",
        "many GPUs",
    ]
    assert re.findall(r"^(\w[\w -]*):$", help, re.MULTILINE) == ["options", *named]
    for _, example in examples:
        words = shlex.split(example.split(", under torchrun")[0])
        assert words[0].startswith("--") and build_parser().parse_args(["generate", *words]).run
    for command in ("info", "plan", "quality", "explain", "write-checkpoint"):
        example = re.search(r"^example: (.*)$", said(capsys, command, "--help")[1], re.MULTILINE)[1].split()
        assert example[0] == command and build_parser().parse_args(example).run


@pytest.mark.parametrize("name", PRESETS)
def test_presets_go_by_any_spelling_of_their_name(name):
    spelt = {"deepseek_v32": "DeepSeek-V3.2", "glm5": "GLM-5", "tiny_v32": "tiny-v3.2"}.get(name, name.upper())
    assert preset(spelt) == preset(name.replace("_", "-")) == preset(name.replace("_", "")) == preset(name)


def test_checkpoints_that_ship_are_written_by_name(tmp_path, capsys):
    code, out, _ = said(
        capsys, "write-checkpoint", "--from", "reader-v32", "--format", "bf16", "--out", tmp_path / "out"
    )
    assert code == 0 and "layers of reader-v32, bf16" in out
    assert read_config(tmp_path / "out")[1] == read_config(folder_of("reader-v32"))[1]
    code, _, err = said(capsys, "write-checkpoint", "--from", "reader-v99", "--out", tmp_path / "other")
    assert code == 2 and "--from: got 'reader-v99', allowed: a folder with a config.json, or one that ships here" in err


@pytest.mark.parametrize("function", FUNCTIONS)
def test_calls_are_explained_by_the_name_of_their_function(function, capsys):
    call, fixed = FUNCTIONS[function]
    options = [part for name, value in fixed.items() for part in (f"--{name}", value)]
    found = said(capsys, "explain", function, "--target", "sm_90")
    assert found == (0, said(capsys, "explain", call, *options, "--target", "sm_90")[1].replace(call, function, 1), "")
    if fixed:
        code, _, err = said(capsys, "explain", function, "--layout", "bf16")
        assert code == 2 and f"--layout: got bf16 for {function}, allowed: --tokens" in err


@pytest.mark.parametrize("card", CARDS)
def test_cards_stand_for_their_targets(card, capsys):
    gpu = CARDS[card]
    found = said(capsys, "explain", "topk", "--target", card.upper())[1]
    assert found.startswith(f"topk on {gpu.target}: ") and f"floors on {gpu.name}: " in found
    assert gpu.target in TARGETS and card.replace("-", " ") in gpu.name.lower().replace("-", " ")


def test_every_gpu_has_a_name_of_a_card():
    assert [*CARDS.values()] == [*GPUS]
