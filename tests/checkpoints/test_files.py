"""Files that are replaced: whole or not at all, whatever fails, under the mode that open() would give."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from sparse_attn import files
from sparse_attn.files import check_output, replacing, write_output


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def replace_both(folder):
    with replacing([folder / "a", folder / "b"], removing=[folder / "c"]) as fresh:
        for path, text in zip(fresh, ("new a", "new b")):
            path.write_text(text)


@pytest.mark.parametrize("there", ["abc", "c", "b", ""])
def test_every_failure_leaves_what_was_there(tmp_path, monkeypatch, there):
    """A failure is put into each call to the system in turn, until none is left to fail."""
    before = {name: f"old {name}".encode() for name in there}

    def fail_at(place):
        calls = []

        def failing(name, real):
            def call(*args, **kwargs):
                calls.append(name)
                if len(calls) == place + 1:
                    raise OSError(errno.EIO, "injected")
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in ("open", "fsync", "chmod", "link", "replace"):
                patch.setattr(files.os, name, failing(name, getattr(os, name)))
            try:
                replace_both(folder)
            except OSError as error:
                assert error.strerror == "injected"
                return True
        return False

    failed = tolerated = 0
    for place in range(40):
        folder = tmp_path / str(place)
        folder.mkdir()
        for name, data in before.items():
            (folder / name).write_bytes(data)
        if fail_at(place):
            failed += 1
            assert contents(folder) == before
        else:  # nothing failed, or what failed has another way: a link, a folder's own sync
            tolerated += 1
            assert contents(folder) == {"a": b"new a", "b": b"new b"}
    assert failed >= 10 and tolerated >= 5


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def no_links(*args, **kwargs):
        raise OSError(errno.EPERM, "no links here")

    (tmp_path / "a").write_text("old a"), (tmp_path / "c").write_text("old c")
    monkeypatch.setattr(files.os, "link", no_links)
    replace_both(tmp_path)
    assert contents(tmp_path) == {"a": b"new a", "b": b"new b"}


def test_an_error_of_the_writer_leaves_what_was_there(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing([tmp_path / "a"]) as (fresh,):
        fresh.write_text("half")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {"a": b"old"}


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_modes_follow_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_output(tmp_path / "a", b"text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


def test_a_directory_is_not_replaced(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError):
        write_output(tmp_path / "a", b"text")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").is_dir()


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_output(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"


def test_what_is_no_regular_file_is_written_into(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    read = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    check_output("--json", fifo)
    write_output(fifo, b"text")
    reader.join()
    assert read == [b"text"] and stat.S_ISFIFO(fifo.stat().st_mode) and len(list(tmp_path.iterdir())) == 1

    full = os.stat("/dev/full")
    check_output("--json", Path("/dev/full"))
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_output(Path("/dev/full"), b"text")
    assert os.stat("/dev/full").st_ino == full.st_ino and stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_stream_that_goes_to_a_file_is_appended_to(tmp_path):
    with open(tmp_path / "out", "wb") as out:
        out.write(b"before "), out.flush()
        for path in (Path(f"/dev/fd/{out.fileno()}"), tmp_path / "link"):
            if path.name == "link":
                path.symlink_to(f"/proc/self/fd/{out.fileno()}")
            write_output(path, b"text ")
    assert (tmp_path / "out").read_bytes() == b"before text text "


def test_paths_are_tried_before(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path, "a directory, allowed: a file"), (tmp_path / "no" / "x", "allowed: a file in a folder that exists"),
        (tmp_path / "file" / "x", "allowed: a file in a folder that exists"), (tmp_path / ("x" * 300), "File name too long"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"--json: got '.*{message}"):
            check_output("--json", path)
    check_output("--json", tmp_path / "fine"), check_output("--json", tmp_path / "file")
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)  # root may write to everything
    for path in (tmp_path / "file", tmp_path / "fine", Path("/dev/null")):
        with pytest.raises(ValueError, match="which takes no writing"):
            check_output("--json", path)
    assert contents(tmp_path) == {"file": b""}
