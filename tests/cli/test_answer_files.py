"""The file of answers of `generate --prompts`: nothing of a user's is cut off, no answer is taken for another's, nothing
is lost on a full disk, and one run writes at a time."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from sparse_attn.checkpoints.files import sample_of
from sparse_attn.cli import answer_files
from sparse_attn.cli.answer_files import AnswerFile, Fingerprint, answer_line, is_beginning
from sparse_attn.cli.main import main

COMMON = "generate --preset tiny-v32 --device cpu --cache fp32 --ignore-eos --max-new-tokens 3 --rows 2".split()
LINE = answer_line('a"\\\u00e9', 'b\n\u2028{"id": 1', [1, 23], "length", Fingerprint("m", "s", "p"))
PLAIN = {"id": 0, "text": "kept", "tokens": [7], "finish_reason": "length"}  # as earlier versions wrote it


@pytest.fixture
def asked(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": n, "prompt": f"text {n}"}) + "\n" for n in range(3)))
    return path


def run(asked, *more):
    return main([*COMMON, "--prompts", str(asked), "--out", str(asked.with_name("out.jsonl")), *more])


def answers(path):
    return {line["id"]: line for line in map(json.loads, path.read_bytes().splitlines())}


@pytest.mark.parametrize("end", (b"", b"\n"))
@pytest.mark.parametrize("held", (
    b'{"metric": 1}', b'{"id": 0, "name": "mine"}', b'{"id": 0}', b'{"id": 0, "prompt": "text 0"}', b"text", b"\x00\xff", b"[1, 2",
    b'{"id": 0, "text": "a"}{"id": 1, "text": "b"}', b'{"id": 0, "text": "a", "label": [', b'{"id": [], "text": ""}',
    b'{"id": true, "text": "", "tokens": [], "finish_reason": ""}', b'{"id": 0, "id": 0}', json.dumps([PLAIN]).encode(),
    json.dumps(PLAIN).encode() + b"\n" + json.dumps(PLAIN).encode(), LINE[:-1] + b"{",
))  # fmt: skip
def test_a_file_of_anything_else_is_refused_and_stays(asked, capsys, held, end):
    out = asked.with_name("out.jsonl")
    out.write_bytes(held + end)
    assert run(asked) == 2 and out.read_bytes() == held + end
    assert f"out.jsonl, line {(held + end).count(10) + (not end)}: got " in capsys.readouterr().err


@pytest.mark.parametrize("kind", ("itself", "symlink", "hardlink", "fifo", "folder", "/dev/full", "/dev/stdout"))
def test_what_is_no_file_of_its_own_is_refused(asked, capsys, kind):
    out, before = asked.with_name("out.jsonl"), asked.read_bytes()
    if kind == "fifo":
        os.mkfifo(out)
    elif kind == "folder":
        out.mkdir()
    elif kind == "hardlink":
        out.hardlink_to(asked)
    elif kind != "itself":
        out.symlink_to(asked if kind == "symlink" else kind)
    arguments = [*COMMON, "--prompts", str(asked), "--out", str(asked if kind == "itself" else out)]
    assert main(arguments) == 2 and asked.read_bytes() == before
    assert "--out: got " in capsys.readouterr().err


def test_outputs_of_any_command_are_none_of_its_inputs(asked, capsys):
    prompt, model = asked.with_name("prompt.json"), asked.with_name("model")
    prompt.write_text("[]"), model.mkdir()
    for name in ("config.json", "model-00001-of-00002.safetensors", "notes.json"):
        (model / name).write_text("{}")
    before = {path: path.read_bytes() for path in (prompt, *model.iterdir())}
    for given in (
        ["generate", "--prompt-file", prompt, "--json", prompt],
        ["generate", "--chat", prompt, "--dump-logits", prompt],
        ["plan", "--model", model, "--json", model / "config.json"],
        ["quality", "--model", model, "--json", model / "model-00001-of-00002.safetensors"],
    ):
        assert main(list(map(str, given))) == 2 and ", allowed: one that is not read" in capsys.readouterr().err
    assert main(["plan", "--model", str(model), "--json", str(model / "notes.json")]) == 2
    assert "which is read" not in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_every_beginning_of_a_line_is_known_and_nothing_else():
    assert all(is_beginning(LINE[:end]) for end in range(1, len(LINE) - 1))
    assert not is_beginning(LINE[:-1])  # a whole answer
    assert not any(is_beginning(LINE[:end] + b"\x01") for end in range(len(LINE)))
    other = answer_line(-3, None, [], "stop", Fingerprint("m", "s", "p"))
    assert all(is_beginning(other[:end]) for end in range(1, len(other) - 1))


@pytest.mark.parametrize("end", (1, 9, len(LINE) // 2, len(LINE) - 1))
def test_the_beginning_of_a_line_is_cut_and_a_whole_answer_is_not(tmp_path, end):
    path, other = tmp_path / "out.jsonl", json.dumps(PLAIN).encode() + b"\n"
    path.write_bytes(other + LINE[:end])
    file = AnswerFile(path)
    assert len(file.take()) == (2 if end == len(LINE) - 1 else 1) and path.read_bytes() == other + LINE[:end]
    file.settle()
    assert path.read_bytes() == (other + LINE if end == len(LINE) - 1 else other)
    file.close()


def disk(monkeypatch, room, *, piece=7, cuts=True):
    """Raw writes take ``piece`` bytes at most, and ``room`` in all."""
    left, write = [room], os.write

    def short(file, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= (count := write(file, data[: min(piece, left[0])]))
        time.sleep(1e-4)  # for others to run
        return count

    def refused(file, size):
        raise OSError(errno.EIO, "cannot be cut")

    monkeypatch.setattr(answer_files.os, "write", short)
    if not cuts:
        monkeypatch.setattr(answer_files.os, "ftruncate", refused)


@pytest.mark.parametrize("cuts", (True, False))
def test_a_full_disk_is_an_error_that_names_the_file(asked, capsys, monkeypatch, cuts):
    out = asked.with_name("out.jsonl")
    assert run(asked) == 0
    whole, first = answers(out), len(out.read_bytes().splitlines()[0]) + 1
    out.unlink()
    with monkeypatch.context() as patch:
        disk(patch, first + 40, cuts=cuts)
        assert run(asked) == 2
    error = capsys.readouterr().err
    assert f"No space left on device: '{out}'" in error and "prompts in" not in error.splitlines()[-1]
    assert len(out.read_bytes()) == first + (0 if cuts else 40)
    assert run(asked) == 0 and answers(out) == whole and out.read_bytes().count(b"\n") == 3
    assert "3 prompts in" in (said := capsys.readouterr().err) and "1 were there already" in said


def test_short_writes_are_completed(asked, monkeypatch):
    out = asked.with_name("out.jsonl")
    assert run(asked) == 0
    whole = out.read_bytes()
    out.unlink()
    disk(monkeypatch, 1 << 20)
    assert run(asked) == 0 and out.read_bytes() == whole


def test_a_limit_on_the_size_of_files(asked):
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # fewer bytes than a line

    out = asked.with_name("out.jsonl")
    process = subprocess.run(
        [sys.executable, "-m", "sparse_attn", *COMMON, "--prompts", asked, "--out", out], preexec_fn=limited,
        capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 2 and f"File too large: '{out}'" in process.stderr and out.read_bytes() == b""


STALE = {
    "model": ["--preset", "tiny-glm5"], "settings": ["--max-new-tokens", "2"], "settings ": ["--temperature", "1"],
    "settings  ": ["--stop", "zz"], "settings   ": ["--cache", "bf16"], "prompt": [],
}  # fmt: skip


@pytest.mark.parametrize("part", STALE)
def test_what_made_an_answer_otherwise_is_named_or_computed_anew(asked, capsys, part):
    out, more = asked.with_name("out.jsonl"), STALE[part]
    assert run(asked) == 0
    before = out.read_bytes()
    if part == "prompt":
        asked.write_text(asked.read_text().replace("text 1", "another"))
    capsys.readouterr()
    assert run(asked, *more) == 2 and out.read_bytes() == before
    error = capsys.readouterr().err
    assert f"got an answer of id {1 if part == 'prompt' else 0} in {out}, line " in error
    assert f", by another {part.strip()}, allowed" in error and "--redo" in error
    out.chmod(0o640)
    assert run(asked, *more, "--redo") == 0 and stat.S_IMODE(out.stat().st_mode) == 0o640
    kept = 2 if part == "prompt" else 0
    assert f"3 prompts in {out}, {kept} were there already" in capsys.readouterr().err
    found, old = answers(out), {line["id"]: line for line in map(json.loads, before.splitlines())}
    assert sum(found[n] == old[n] for n in range(3)) == kept and len(found) == 3
    after = out.read_bytes()
    assert run(asked, *more) == 0 and out.read_bytes() == after  # nothing differs any more
    out.unlink()
    assert run(asked, *more) == 0 and answers(out) == found
    assert [path.name for path in asked.parent.iterdir() if path.suffix == ".tmp"] == []


def test_what_changes_no_token_leaves_answers_valid(asked, capsys):
    out = asked.with_name("out.jsonl")
    assert run(asked) == 0
    before = out.read_bytes()
    assert run(asked, *"--rows 1 --blocks 8 --block-size 16 --prefill-tokens 8 --seed 5 --top-k 3 --batch-invariant "
               "--impl reference".split()) == 0  # fmt: skip
    assert out.read_bytes() == before and "3 prompts in" in (said := capsys.readouterr().err)
    assert "3 were there already; 0 tokens" in said


def test_answers_without_a_fingerprint_are_taken_with_a_warning(asked, capsys):
    out = asked.with_name("out.jsonl")
    out.write_text(json.dumps(PLAIN) + "\n")
    for more in ([], ["--redo"]):
        assert run(asked, *more) == 0
        assert "warning: 1 answers in " in capsys.readouterr().err and answers(out)[0] == PLAIN
    assert len(answers(out)) == 3


def test_a_failure_to_replace_answers_leaves_them(asked, monkeypatch, capsys):
    def failing(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = asked.with_name("out.jsonl")
    assert run(asked) == 0
    before = out.read_bytes()
    for name in ("fsync", "replace", "fchmod"):
        with monkeypatch.context() as patch:
            patch.setattr(answer_files.os, name, failing)
            assert run(asked, "--max-new-tokens", "2", "--redo") == 2
        assert f"'{out}'" in capsys.readouterr().err and out.read_bytes() == before
        assert sorted(path.name for path in asked.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_sample_of_weights_is_of_what_they_are(tmp_path):
    """The same of a copy, whose files are cut otherwise; another of any other tensor."""
    tensors = {name: torch.arange(1000.0) + at for at, name in enumerate("ab")}
    found = []
    for number, changed in enumerate(({}, {}, {"b": tensors["b"].clone().fill_(1)}, {"b": tensors["b"].view(10, 100)},
                                      {"b": tensors["b"].int()}, {"c": torch.zeros(0)})):  # fmt: skip
        (folder := tmp_path / str(number)).mkdir()
        held = tensors | changed
        if number:
            home = {name: f"{name}.safetensors" for name in held}
            for name, file in home.items():
                save_file({name: held[name]}, folder / file, metadata={"format": "pt"})
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
        else:
            save_file(held, folder / "model.safetensors")
        found.append(sample_of(folder))
    assert found[0] == found[1] and len(set(found)) == 5


def test_another_run_is_refused_until_the_first_one_is_dead(asked, capsys):
    """Before it writes anything. A process that was killed holds nothing."""
    out = asked.with_name("out.jsonl")
    command = [sys.executable, "-m", "sparse_attn", *COMMON, "--prompts", str(asked), "--out", str(out)]
    process = subprocess.Popen([*command, "--max-new-tokens", "8000"], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not out.exists() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.2)
        process.send_signal(signal.SIGSTOP)
        before = out.read_bytes()
        assert run(asked) == 2 and out.read_bytes() == before
        assert "which another run writes to, allowed: one run at a time" in capsys.readouterr().err
    finally:
        process.kill()
        process.wait()
    out.write_bytes(b"")
    assert run(asked) == 0 and len(answers(out)) == 3


def test_processes_of_one_run_take_turns_and_hold_the_file_until_the_last_has_ended(tmp_path, monkeypatch):
    """Each line is written in many pieces. The first process may end before the others."""
    path, context = tmp_path / "out.jsonl", multiprocessing.get_context("fork")
    path.write_bytes(LINE[:20])
    disk(monkeypatch, 1 << 20, piece=3)
    joined, go, ended = context.Queue(), context.Event(), context.Event()

    def other(rank):
        own = AnswerFile(path)
        own.join(rank), joined.put(rank), go.wait(60)
        for number in range(20):
            own.write(LINE.replace(b"23]", b"%d]" % (100 * rank + number)))
        own.finish(), joined.put(rank), ended.wait(60)

    first = AnswerFile(path)
    first.take(), first.settle()
    others = [context.Process(target=other, args=(rank,), daemon=True) for rank in (1, 2)]
    for process in others:
        process.start()
    assert {joined.get(timeout=60) for _ in others} == {1, 2}
    go.set()
    for number in range(20):
        first.write(LINE.replace(b"23]", b"%d]" % number))
    assert {joined.get(timeout=60) for _ in others} == {1, 2}
    first.close()
    assert sorted(json.loads(line)["tokens"][1] for line in path.read_bytes().splitlines()) == [
        100 * rank + number for rank in range(3) for number in range(20)
    ]
    path.write_bytes(LINE)  # of one answer alone
    with pytest.raises(ValueError, match="which another run writes to"):
        AnswerFile(path).take()
    ended.set()
    for process in others:
        process.join(60)
    assert len(AnswerFile(path).take()) == 1


def test_a_file_system_without_locks_is_said(asked, monkeypatch, capsys):
    def lacking(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(answer_files.fcntl, "lockf", lacking)
    assert run(asked) == 0 and len(answers(asked.with_name("out.jsonl"))) == 3
    assert capsys.readouterr().err.count("its file system has no locks; let one run at a time write it") == 1


def test_a_file_that_is_replaced_meanwhile_takes_no_answer(tmp_path):
    path = tmp_path / "out.jsonl"
    file = AnswerFile(path)
    file.take(), file.settle(), file.write(LINE)
    path.rename(tmp_path / "other"), path.write_bytes(LINE)
    with pytest.raises(OSError, match="replaced or removed while it was written: '.*out.jsonl'"):
        file.write(LINE)
    file.close()
    assert path.read_bytes() == (tmp_path / "other").read_bytes() == LINE


def test_a_run_that_writes_nothing_leaves_no_file(tmp_path):
    file = AnswerFile(tmp_path / "out.jsonl")
    assert file.take() == [] and file.path.exists()
    file.close()
    assert not file.path.exists()
    for empty, named in ((tmp_path / "mine", tmp_path / "mine"), (tmp_path / "target", tmp_path / "link")):
        if named == empty:
            empty.touch()
        else:
            named.symlink_to(empty)
        (file := AnswerFile(named)).take(), file.close()
        assert empty.exists() == (named == empty) and os.path.lexists(named)
