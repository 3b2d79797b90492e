"""What the command line writes: places are tried first, files are whole or as they were, terminals of any kind."""

import io
import re
import sys
from pathlib import Path

import pytest

from sparse_attn.cli.main import main
from sparse_attn.generation import text
from sparse_attn.spec import preset

PROMPT = text.shipped_text()[:150]


def never(*args, **kwargs):
    raise AssertionError("reached")


@pytest.mark.parametrize(
    "command, option",
    [
        ("generate", "--json"),
        ("generate", "--dump-logits"),
        ("generate", "--plot"),
        ("plan", "--json"),
        ("quality", "--json"),
    ],
)
def test_output_paths_are_tried_before_anything_is_computed(tmp_path, capsys, monkeypatch, command, option):
    from sparse_attn.cli import main as cli
    from sparse_attn.cli import quality_report, sources

    for holder, name in ((sources, "load"), (cli, "generate"), (cli, "plan"), (quality_report, "load")):
        monkeypatch.setattr(holder, name, never)
    model = ["--preset", "tiny-v32"] if command == "plan" else []
    for path, message in (
        (tmp_path, "a directory"), (tmp_path / "no" / "x.png", "a folder that exists"),
        (tmp_path / ("x" * 300), "File name too long"), ("/proc/version/x", "takes no writing"),
    ):  # fmt: skip
        assert main([command, *model, option, str(path)]) == 2
        said = capsys.readouterr().err
        assert f"{option}: got '{path}'" in said and message in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_pictures_are_of_a_format_that_can_be_written(tmp_path, capsys, monkeypatch):
    from sparse_attn.cli import sources

    monkeypatch.setattr(sources, "load", never)
    assert main(["generate", "--plot", str(tmp_path / "x.xyz")]) == 2
    assert re.search(r"--plot: got '.*x.xyz', allowed: a name that ends in .*\.png", capsys.readouterr().err)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["generate", "--plot", str(tmp_path / "x.png")]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_one_file_takes_one_output(tmp_path, capsys):
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert main(["generate", "--json", str(tmp_path / "x"), "--dump-logits", str(tmp_path / "link")]) == 2
    assert "--dump-logits: got" in (said := capsys.readouterr().err) and "which --json writes" in said


@pytest.mark.parametrize("suffix, start", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures_follow_their_suffix(tmp_path, suffix, start):
    path = tmp_path / f"x.{suffix}"
    assert (
        main(["generate", "--device", "cpu", "--prompt", PROMPT[:70], "--max-new-tokens", "2", "--plot", str(path)])
        == 0
    )
    assert path.read_bytes().startswith(start)


@pytest.mark.parametrize("option", ["--json", "--dump-logits", "--plot"])
def test_a_device_is_written_into_and_a_failed_write_ends_with_code_2(tmp_path, capsys, option):
    before = Path("/dev/full").stat()
    common = ["generate", "--device", "cpu", "--preset", "tiny-v32", "--prompt", PROMPT[:70], "--max-new-tokens", "2"]
    assert main([*common, option, "/dev/full"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].endswith("error: [Errno 28] No space left on device: '/dev/full'")
    after = Path("/dev/full").stat()
    assert (after.st_ino, after.st_mode, after.st_rdev) == (before.st_ino, before.st_mode, before.st_rdev)
    assert main([*common, option, "/dev/null"]) == 0


def test_an_old_file_stays_where_a_new_one_cannot_be_written(tmp_path, capsys, monkeypatch):
    from sparse_attn import files

    def full(descriptor):
        raise OSError(28, "No space left on device")

    out = tmp_path / "out.json"
    out.write_text("old")
    monkeypatch.setattr(files.os, "fsync", full)
    assert main(["plan", "--preset", "tiny-v32", "--json", str(out)]) == 2
    assert capsys.readouterr().err.endswith(f"[Errno 28] No space left on device: '{out}'\n")
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]


def test_an_ascii_terminal_does_not_end_a_finished_run(tmp_path, capsys, monkeypatch):
    """What it cannot show comes escaped."""
    from dataclasses import replace

    from sparse_attn.checkpoints.save import save
    from sparse_attn.models.params import random_params

    spec = replace(preset("tiny-v32"), num_layers=1, moe_layers=(False,), index_layers=(True,))
    save(tmp_path / "mod\u00e8le", spec, random_params(spec, seed=1))
    command = ["generate", "--device", "cpu", "--model", str(tmp_path / "mod\u00e8le"), "--prompt", "caf\u00e9",
               "--max-new-tokens", "20", "--ignore-eos"]  # fmt: skip
    shown = []
    for encoding in ("utf-8", "ascii"):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        assert main(command) == 0
        shown.append(sys.stdout.buffer.getvalue().decode(encoding))
    assert not shown[0].isascii() and shown[1] == shown[0].encode("ascii", "backslashreplace").decode()


def test_a_full_device_as_stdout_ends_with_code_2(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", full := open("/dev/full", "w"))
    assert main(["plan", "--preset", "tiny-v32"]) == 2
    monkeypatch.undo()
    assert capsys.readouterr().err == "python -m sparse_attn: error: [Errno 28] No space left on device\n"
    with pytest.raises(OSError, match="No space"):  # what is still buffered
        full.close()


def test_prompts_that_are_not_utf_8_are_named(tmp_path, capsys):
    file = tmp_path / "prompt"
    file.write_bytes(b"caf\xe9")
    assert main(["generate", "--prompt-file", str(file)]) == 2
    assert f"{file}: not UTF-8 at byte 3" in capsys.readouterr().err
    assert main(["generate", "--prompt", "caf\udce9"]) == 2
    assert "--prompt: got text that is not UTF-8 at character 3" in capsys.readouterr().err
