"""`generate --prompts`: every line answered once, whatever interrupts it."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import time

import pytest
from conftest import long

from sparse_attn import Batching, Model, Sampling, generate
from sparse_attn.cli.jsonl import Table, read_prompts
from sparse_attn.cli.main import main
from sparse_attn.generation.scheduler import Occupancy
from sparse_attn.generation.text import byte_tokenizer
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import preset

COMMON = "generate --preset tiny-v32 --device cpu --cache fp32 --ignore-eos --max-new-tokens 6 --rows 2".split()


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(tmp_path, *more):
    return [*COMMON, "--prompts", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl"), *more]


def test_every_line_is_answered_as_it_asks(tmp_path, capsys):
    ids = [5, 6, 7, 8]
    lines = [
        {"id": "plain", "prompt": "The sparse"},
        {"id": 2, "prompt_ids": ids, "max_new_tokens": 3, "temperature": 1.0, "seed": 11},
        {"id": "filtered", "prompt_ids": ids, "temperature": 1.0, "top_k": 5, "top_p": 0.9, "presence": 0.5},
    ]
    written(tmp_path / "in.jsonl", lines)
    assert main(command(tmp_path)) == 0
    found = {line["id"]: line for line in answers(tmp_path / "out.jsonl")}
    assert list(found[2]) == ["id", "text", "tokens", "finish_reason", "fingerprint"] and len(found) == 3
    spec = preset("tiny_v32")
    model = Model(spec, random_params(spec, 0), cache_layouts(spec, "fp32"))
    want = generate(model, [ids], max_new_tokens=3, sampling=Sampling(1.0), seeds=[11]).tokens[0]
    assert found[2]["tokens"] == want and [len(one["tokens"]) for one in found.values()].count(6) == 2
    assert {one["finish_reason"] for one in found.values()} == {"length"}
    first = next(c for c in found["plain"]["text"] if c.isprintable())
    lines = [{"id": 1, "prompt": "The sparse", "stop": first}, {"id": 3, "prompt": "x"}]
    written(tmp_path / "in.jsonl", lines)
    (tmp_path / "out.jsonl").unlink()
    assert main(command(tmp_path)) == 0
    stopped = next(line for line in answers(tmp_path / "out.jsonl") if line["id"] == 1)
    assert stopped["finish_reason"] == "stop" and stopped["text"] == found["plain"]["text"].split(first)[0]
    assert "2 prompts in" in capsys.readouterr().err


def test_penalties_go_by_the_names_of_their_options(tmp_path):
    lines = [{"id": 1, "prompt": "aa", "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -1},
             {"id": 2, "prompt": "aa", "repetition": 1.5, "presence": 0.5, "frequency": -1}]  # fmt: skip
    path = written(tmp_path / "in.jsonl", lines)
    given = dict(max_new_tokens=3, sampling=Sampling())
    asked = read_prompts(path, preset("tiny_v32"), byte_tokenizer(), **given)
    assert [one.sampling for one in asked] == [Sampling(repetition=1.5, presence=0.5, frequency=-1)] * 2
    written(path, [{"id": 1, "prompt": "aa", "presence_penalty": 0.5, "presence": 0.5}])
    with pytest.raises(ValueError, match="line 1: presence_penalty: got it and presence, allowed: one of them"):
        read_prompts(path, preset("tiny_v32"), byte_tokenizer(), **given)


def test_what_is_finished_is_not_computed_again_and_a_cut_line_is(tmp_path):
    written(tmp_path / "in.jsonl", [{"id": n, "prompt": f"text {n}"} for n in range(4)])
    out = tmp_path / "out.jsonl"
    assert main(command(tmp_path)) == 0
    whole = {line["id"]: line for line in answers(out)}
    kept = {"id": 2, "text": "kept", "tokens": [], "finish_reason": "length"}
    out.write_text(json.dumps(kept) + "\n" + json.dumps(whole[1])[:-20])
    assert main(command(tmp_path)) == 0
    assert {line["id"]: line for line in answers(out)} == whole | {2: kept}
    before = out.read_bytes()
    assert main(command(tmp_path)) == 0 and out.read_bytes() == before


def test_an_interrupt_says_how_far_it_came(tmp_path, capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    written(tmp_path / "in.jsonl", [{"id": n, "prompt": "x"} for n in range(3)])
    written(tmp_path / "out.jsonl", [{"id": 1, "text": "x", "tokens": [], "finish_reason": "length"}])
    monkeypatch.setattr(Batching, "step", interrupted)
    assert main(command(tmp_path)) == 130
    assert "1 of 3 finished; the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line,message",
    (
        ('{"id": 1', "not JSON"), ("[1]", "got JSON of type list"), ('{"prompt": "x"}', "id: got None"),
        ('{"id": true, "prompt": "x"}', "id: got True"), ('{"id": 1}', "prompt: got both or neither"),
        ('{"id": 1, "prompt": 3}', "prompt: got int"), ('{"id": 1, "prompt": ""}', "got no token"),
        ('{"id": 0, "prompt": "x"}', "id: got 0 again"), ('{"id": 1, "prompt_ids": [1.5]}', "got 1.5"),
        ('{"id": 1, "prompt": "x", "top_p": 2}', "top_p: got 2"), ('{"id": 1, "prompt": "x", "stop": [""]}', "stop: got"),
        ('{"id": 1, "prompt": "x", "temprature": 1}', "temprature: got a key that is unknown"),
        ('{"id": 1, "prompt": "x", "seed": "a"}', "seed: got"), ('{"id": 1, "prompt": "x", "max_new_tokens": 0}', "got 0"),
        ('{"id": 1, "prompt": "a\\ud800"}', "prompt: got text that is not UTF-8 at character 1"),
        ('{"id": "\\udfff", "prompt": "a"}', "id: got text that is not"), ('{"id": 1, "prompt": "a", "id": 2}', "'id' stands twice"),
        ('{"id": 1, "prompt": "a", "stop": "\\ud800"}', "stop: got text that is not"), ("[" * 100_000, "nested too deeply"),
        (b'{"id": 1, "prompt": "\xff"}', "can't decode byte 0xff"), ('{"id": [], "prompt": "a"}', "id: got []"),
    ),
)  # fmt: skip
def test_a_line_at_fault_is_named_before_anything_runs(tmp_path, capsys, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "in.jsonl").write_bytes(b'{"id": 0, "prompt": "x"}\n\n' + line + b"\n")
    assert main(command(tmp_path)) == 2
    error = capsys.readouterr().err
    assert "in.jsonl, line 3: " in error and message in error and not (tmp_path / "out.jsonl").exists()


def test_lines_end_at_newlines_alone(tmp_path):
    """Not at what Unicode calls the end of a line, which JSON may hold as it is."""
    texts = [f"a{mark}b" for mark in "\u2028\u2029\u0085\x1c\x0b"]
    lines = [json.dumps({"id": n, "prompt": text}, ensure_ascii=n > 2) for n, text in enumerate(texts)]
    path, spec = tmp_path / "in.jsonl", preset("tiny_v32")
    path.write_bytes("\r\n".join([*lines, ""]).encode())
    found = read_prompts(path, spec, byte_tokenizer(), max_new_tokens=1, sampling=Sampling())
    assert [bytes(one.prompt).decode() for one in found] == texts


@pytest.mark.parametrize(
    "more,message",
    (
        (["--json", "x.json"], "--json: got it, allowed: without --prompts"),
        (["--logprobs", "1"], "--logprobs: got it"),
        (["--blocks", "1", "--block-size", "4"], "--blocks: got 1"),
    ),
)
def test_options_that_do_not_go_with_prompts(tmp_path, capsys, more, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "in.jsonl", [{"id": 0, "prompt": "text"}])
    assert main(command(tmp_path, *more)) == 2 and message in capsys.readouterr().err


def test_files_that_do_not_fit(tmp_path, capsys):
    written(tmp_path / "in.jsonl", [{"id": 0, "prompt": "text"}])
    for arguments, message in (
        ([*COMMON, "--prompts", "in.jsonl"], "--prompts: got it or --out alone"),
        (COMMON, "--rows: got it, allowed: with --prompts"),
        ([*COMMON[:-2], "--redo"], "--redo: got it, allowed: with --prompts"),
        ([*command(tmp_path)[:-1], str(tmp_path / "in.jsonl")], "the file of --prompts"),
    ):
        assert main(arguments) == 2 and message in capsys.readouterr().err
    written(tmp_path / "out.jsonl", [{"id": 9, "text": None, "tokens": [], "finish_reason": "length"}])
    assert main(command(tmp_path)) == 2 and "got an answer of id 9" in capsys.readouterr().err


def test_the_table_draws_over_itself_on_a_terminal_alone():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    now, screen, pipe = Occupancy(8, 3, 5, 64, 52, 1200, 64, 1), Terminal(), io.StringIO()
    for stream in (screen, pipe):
        table = Table(stream, 20, 4)
        table.show(now, 1)
        table.close(now)
    drawn = screen.getvalue().split("\x1b[2A")
    assert len(drawn) == 2 and pipe.getvalue() == ""
    names, values = (line.removeprefix("\r\x1b[K") for line in drawn[1].split("\n")[:2])
    assert names.split() == "finished running blocks in use tokens tokens/s reused preempted".split()
    assert values.split()[:4] == ["5/20", "3/8", "12/64", "1200"] and values.split()[-2:] == ["64", "1"]
    assert len(names) == len(values)


@pytest.mark.parametrize("seed", range(20 if long() else 1))
def test_killed_at_a_random_moment_and_run_again(tmp_path, seed):
    """Killed once some answers are there, perhaps while one is written, then run to its end: all answers are there
    once, and are those of a run that nobody killed."""
    draw, count = random.Random(seed), 12 if long() else 6
    lines = [
        {"id": n, "prompt": f"text {n}" * draw.randint(1, 4), "temperature": n % 2, "max_new_tokens": 1 + n % 4}
        for n in range(count)
    ]
    written(tmp_path / "in.jsonl", lines)
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    run = command(tmp_path, "--batch-invariant", "--prefill-tokens", "16")
    process = subprocess.Popen([sys.executable, "-m", "sparse_attn", *run], stderr=subprocess.DEVNULL)
    least, end = draw.randint(1, count // 2), time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end:
        if out.exists() and out.read_bytes().count(b"\n") >= least:
            time.sleep(draw.random() * 0.05)
            process.kill()
            break
        time.sleep(0.002)
    process.wait()
    killed = out.read_bytes()
    assert killed.count(b"\n") >= least
    assert main(run) == 0
    assert out.read_bytes().startswith(killed[: killed.rfind(b"\n") + 1])
    assert main([str(whole) if one == str(out) else one for one in run]) == 0
    found = answers(out)
    assert sorted(line["id"] for line in found) == list(range(count))
    assert {line["id"]: line for line in found} == {line["id"]: line for line in answers(whole)}
