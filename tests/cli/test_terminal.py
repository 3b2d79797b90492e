"""`generate` while it runs: text streams, a signal ends it with what there is, compiling is told and counts as set-up."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import expecttest
import pytest
import torch

from sparse_attn.cli import main as cli
from sparse_attn.cli import output, sources
from sparse_attn.cli.documents import question
from sparse_attn.cli.main import main
from sparse_attn.framework.compilation import Compilation
from sparse_attn.generation.selections import attended
from sparse_attn.generation.text import byte_tokenizer
from sparse_attn.spec import preset

COMMON = ["generate", "--device", "cpu", "--prompt", "abc", "--ignore-eos"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown_by_token(monkeypatch, *arguments, stdout=Terminal):
    """What stdout had been shown behind each token, and at the end."""
    seen, whole = [], cli.generate

    def generate(*args, on_token, **options):
        def watched(row, token):
            stopped = on_token(row, token)
            seen.append(sys.stdout.getvalue())
            return stopped

        return whole(*args, on_token=watched, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout())
        patch.setattr(cli, "generate", generate)
        assert main([*COMMON, *arguments]) == 0
        return seen, sys.stdout.getvalue()


def test_text_streams_on_a_terminal_and_nowhere_else(monkeypatch, tmp_path):
    seen, whole = shown_by_token(monkeypatch, "--max-new-tokens", "20", "--json", str(tmp_path / "out.json"))
    text = output.text.printable(json.loads((tmp_path / "out.json").read_text())["text"])
    assert whole == text + "\n" and len(seen) == 20
    assert all(text.startswith(one) for one in seen) and len({*seen}) > 5
    seen, piped = shown_by_token(monkeypatch, "--max-new-tokens", "20", stdout=io.StringIO)
    assert {*seen} == {""} and piped == whole
    seen, barred = shown_by_token(monkeypatch, "--max-new-tokens", "20", "--progress")
    assert {*seen} == {""} and barred == whole


def test_what_may_begin_a_stop_text_is_withheld(monkeypatch):
    text = shown_by_token(monkeypatch, "--max-new-tokens", "20")[1].rstrip("\n")
    stop = text[8:11]
    seen, whole = shown_by_token(monkeypatch, "--max-new-tokens", "20", "--stop", stop)
    assert whole == text[: text.index(stop)] + "\n" and all(whole.startswith(one) for one in seen)
    assert any(seen[:-1])


@pytest.mark.parametrize("name", ("SIGINT", "SIGTERM"))
def test_a_signal_ends_it_with_the_text_so_far(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(output.Answer, "push", push := killing(output.Answer.push, name, at=5))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started these tests
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main([*COMMON, "--max-new-tokens", "20", "--json", str(tmp_path / "out.json")]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGTERM) == handler and push.calls == 5
    found, said = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr()
    assert found["finish_reason"] == "interrupted" and len(found["tokens"]) == 5 and found["prompt_tokens"] == 3
    assert found["text"] == byte_tokenizer().decode(found["tokens"])
    assert said.out == output.text.printable(found["text"]) + "\n"
    assert "interrupted behind 5 tokens" in said.err and "3 tokens read, 5 written" in said.err
    assert found["timing"]["prefill_s"] > 0 < found["timing"]["decode_s"]


def killing(function, name, at):
    """``function``, whose call number ``at`` gets this process a signal when it is done."""

    def called(*args, **kwargs):
        result = function(*args, **kwargs)
        called.calls += 1
        if called.calls == at:
            os.kill(os.getpid(), getattr(signal, name))
        return result

    called.calls = 0
    return called


def test_a_signal_before_the_first_token_leaves_no_text(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sources.Source, "weights", killing(sources.Source.weights, "SIGTERM", at=1))
    assert main([*COMMON, "--json", str(tmp_path / "out.json")]) == 130
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["finish_reason"], found["tokens"], found["text"]) == ("interrupted", [], "")
    assert capsys.readouterr().err.endswith("interrupted before the first token\n")


def test_an_answer_that_a_signal_cut_is_not_judged(capsys, monkeypatch):
    monkeypatch.setattr(output.Answer, "push", killing(output.Answer.push, "SIGTERM", at=2))
    assert main(["generate", "--device", "cpu", "--max-new-tokens", "8"]) == 130
    said = capsys.readouterr().err
    assert "task: " in said and "interrupted behind 2 tokens" in said and "wrong" not in said


def test_a_signal_ends_other_commands_in_a_line(capsys, monkeypatch):
    monkeypatch.setattr(cli.report, "info", killing(cli.report.info, "SIGTERM", at=1))
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "python -m sparse_attn: interrupted\n"


@pytest.mark.parametrize("stop, reason", (((), "length"), (("--stop", "{}"), "stop")))
def test_a_finish_reason_is_written(stop, reason, tmp_path):
    common = [*COMMON, "--max-new-tokens", "12", "--json", str(tmp_path / "out.json")]
    assert main(common) == 0
    text = json.loads((tmp_path / "out.json").read_text())["text"]
    assert main([*common, *(part.format(text[3:5]) for part in stop)]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["finish_reason"] == reason


def test_compiling_is_told_while_it_runs_and_counts_as_set_up(tmp_path, capsys, monkeypatch):
    """Of the prefill's graph as of the decode step's."""
    took, told = 0.7, []

    def slow(graph, inputs, **options):
        told.append(capsys.readouterr().err)
        time.sleep(took)
        return graph

    torch.compiler.reset()
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, options, **kinds: whole(run, backend=slow, **kinds))
    assert main([*COMMON, "--max-new-tokens", "4", "--compile", "--json", str(tmp_path / "out.json")]) == 0
    torch.compiler.reset()
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(told) == found["compilations"] == 2
    assert told[0].endswith("set-up: compiling the model by torch.compile ...\n") and "compiling" not in told[1]
    timing = found["timing"]
    assert timing["setup_s"] >= 2 * took and 0 < timing["prefill_s"] < took and 0 < timing["decode_s"] < took


def test_kernels_that_triton_compiles_are_counted_and_told(capsys):
    knobs = pytest.importorskip("triton").knobs
    heard, kernel = [], SimpleNamespace(name="one")
    before = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook
    with Compilation(dynamo=False, triton=True, told=heard.append) as compilation:
        for _ in range(2):
            assert not knobs.runtime.jit_cache_hook(fn=kernel)
            time.sleep(0.1)
            assert compilation.seconds >= 0.1
            knobs.runtime.jit_post_compile_hook(fn=kernel)
        assert 0.2 <= compilation.seconds == compilation.seconds
    assert heard == ["one"] * 2 and before == (knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook)
    seconds = iter((0.0, 0.5, 1.5, 2.5))  # kernels that lie in Triton's cache take no second
    told = output.Compiling(lambda: next(seconds))
    for _ in range(4):
        told("one")
    assert capsys.readouterr().err == "set-up: compiling Triton kernels, which its cache keeps ...\n"


class TestGolden(expecttest.TestCase):
    def said(self, *arguments) -> str:
        out = io.StringIO()
        with redirect_stderr(out), redirect_stdout(out):
            assert main(["generate", "--device", "cpu", "--max-new-tokens", "8", *arguments]) == 0
        return re.sub(r"\d+\.\d(?= tokens a second)|\d+\.\d\d s \(\d+%\)", "#", out.getvalue())

    def test_the_task_and_what_was_saved(self):
        self.assertExpectedInline(
            self.said("--model", "reader-v32"),
            """\
task: 767 bytes of text hold 26 records like [CXCC=0000] and end with the key of one: what is recorded under CXCC?
...t be a Python iden[XXLF=7852]. ""max-te[LBCB=9546]ccep[FLXX=5449]ough it will not match any formal parameter that cou[LFFX=0320]red). If there is no match[CLCC=1813]l paramet[CXCC=0591]value
pai[BBLF=8069]ted by the "**" p[XLXB=1939]f the[FFCL=6082]or if ther[CFFX=5107] "Type[XCBX=0662]ption i[CXCC=
0591] an

recorded 0591, answered 0591: the record stands at byte 641, 126 before the end
in the step that answered, a dense model reads 767 keys in each layer, this one 128 keys (16.7%)
reader_v32 (reference on cpu, float32, fp8 cache): each query attended to 117.5 of 387.5 keys in the mean; # tokens a second
767 tokens read, 8 written: reading #, writing #
""",
        )

    def test_the_task_and_what_was_saved_of_deepseek_v4(self):
        """Keys of its windows and entries, on both sides."""
        self.assertExpectedInline(
            self.said("--model", "reader-v4").split("]", 1)[1],
            """\
 and end with the key of one: what is recorded under CXCC?
...t be a Python iden[XXLF=7852]. ""max-te[LBCB=9546]ccep[FLXX=5449]ough it will not match any formal parameter that cou[LFFX=0320]red). If there is no match[CLCC=1813]l paramet[CXCC=0591]value
pai[BBLF=8069]ted by the "**" p[XLXB=1939]f the[FFCL=6082]or if ther[CFFX=5107] "Type[XCBX=0662]ption i[CXCC=
0591] th

recorded 0591, answered 0591: the record stands at byte 641, 126 before the end
in the step that answered, a dense model reads 767 keys in each layer, this one 44 window keys and entries (5.7%)
reader_v4 (reference on cpu, float32, fp8 cache): each query attended to 41.6 of 63.9 window keys and entries in the mean; # tokens a second
767 tokens read, 8 written: reading #, writing #
""",
        )


def test_the_record_stands_where_it_is_said_to():
    asked = question()
    mention = asked.text[asked.record :][: len(asked.key) + len(asked.value) + 3]
    assert mention == f"[{asked.key}={asked.value}]" and asked.text.endswith(f"[{asked.key}=")


@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_keys_that_are_read_are_counted_as_those_there_are(name):
    """Where nothing is selected away, as many; else fewer. Each position by itself, and the mean of several."""
    spec = preset(name)
    for tokens in (1, 7, spec.index.top_k):
        assert attended(spec, tokens)[0] == attended(spec, tokens)[1]
    far = 64 * spec.index.top_k
    read, there = attended(spec, far)
    assert read < there and attended(spec, far, far - 1)[0] > read
    singles = [attended(spec, tokens, tokens - 1) for tokens in range(1, 10)]
    for mean, values in zip(attended(spec, 9), zip(*singles)):
        assert mean == pytest.approx(sum(values) / 9)


def test_drafts_that_stood_are_said(capsys):
    common = ["generate", "--device", "cpu", "--model", "reader-v32", "--max-new-tokens", "8", "--speculate", "2"]
    assert main(common) == 0
    assert re.search(r"tokens a second, [1-3]\.\d\d a step$", capsys.readouterr().err, re.MULTILINE)
