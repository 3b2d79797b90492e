"""Files that are written whole or not at all, and errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_STREAMS = ("/proc/", "/dev/fd/", "/dev/stdout", "/dev/stderr")  # names of what a process has open


@contextlib.contextmanager
def replacing(paths: Sequence[Path], removing: Sequence[Path] = ()) -> Iterator[list[Path]]:
    """Paths beside ``paths``, to be written inside the block. After the block they replace ``paths``, in this order.

    Then the files of ``removing`` that exist are deleted. An error in the block or after it leaves every file as it
    was, and none of the new ones. The files get the mode that open() would give them.
    """
    fresh = [beside(path) for path in paths]
    undo = contextlib.ExitStack()
    kept: list[Path] = []
    try:
        modes = [_made(path) for path in fresh]
        yield fresh
        for path, source, mode in zip(paths, fresh, modes):
            with naming(path):
                _settle(source, mode)
        for source, path in zip(fresh, paths):
            _keep(path, kept, undo)
            os.replace(source, path)
        for path in filter(os.path.lexists, removing):
            _keep(path, kept, undo)
            _unlink(path)
        for folder in {path.parent for path in paths}:
            _sync_folder(folder)
    except BaseException:
        undo.close()
        for path in fresh:
            _unlink(path)
        raise
    undo.pop_all()
    for path in kept:
        _unlink(path)


def write_output(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``. A regular or new file is written whole or not at all. Anything else (a pipe, a
    device) is written into."""
    with naming(path):
        if _is_stream(path):
            with open(os.open(path, os.O_WRONLY | os.O_APPEND), "wb") as file:
                file.write(data)
            return
        with replacing([Path(os.path.realpath(path))]) as (fresh,):
            fresh.write_bytes(data)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of the system in the block names ``path``, whatever it named: what is written to a file that is open
    names none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_output(name: str, path: Path, *, regular: bool = False) -> None:
    """ValueError where ``path`` cannot be written to. Called before the output is computed. name: the argument that
    gave the path. regular: refuse pipes, devices and what a process has open, too."""
    got = f"{name}: got {str(path)!r}"
    try:
        if path.is_dir():
            raise ValueError(f"{got}, a directory, allowed: a file")
        stream = _is_stream(path)
        if stream and regular:
            raise ValueError(f"{got}, allowed: a regular or a new file")
        if stream:
            writable = os.access(path, os.W_OK)
        else:
            where = Path(os.path.realpath(path))
            if not where.parent.is_dir():
                raise ValueError(f"{got}, allowed: a file in a folder that exists")
            writable = os.access(where.parent, os.W_OK | os.X_OK) and (not where.exists() or os.access(where, os.W_OK))
            if writable:
                _try(where)
    except OSError as error:  # a name too long, a read-only or a full file system
        raise ValueError(f"{got}: {error.strerror}") from error
    if not writable:
        raise ValueError(f"{got}, which takes no writing")


def beside(path: Path) -> Path:
    """A new name in the same folder."""
    return path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.tmp")


def read_text(path: Path) -> str:
    """A UTF-8 file; ValueError that names it where it is none."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from error


def check_regular(path: Path) -> None:
    """ValueError where ``path`` is there and no regular file: a pipe may never be written to, a device never end."""
    if path.exists() and not path.is_file():
        kind = "a directory" if path.is_dir() else "a pipe" if path.is_fifo() else "a device or a socket"
        raise ValueError(f"{path}: got {kind}, allowed: a regular file")


def read_json(path: Path) -> Any:
    """What a JSON file holds; ValueError that names it where it is none, or where a key stands twice."""
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """As ``read_json``, of a regular file that holds an object."""
    check_regular(path)
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: got JSON of type {type(value).__name__}, allowed: an object")
    return value


def parse_json(text: str) -> Any:
    """What ``text`` says; ValueError where it is no JSON, or where a key stands twice in an object."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("not JSON: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return found


def _is_stream(path: Path) -> bool:
    """Whether ``path`` exists and is no regular file, or names a file that some process has open."""
    hop = os.path.abspath(path)
    for _ in range(40):
        if hop.startswith(_STREAMS):
            return True
        if not os.path.islink(hop):
            break
        hop = os.path.abspath(os.path.join(os.path.dirname(hop), os.readlink(hop)))
    return path.exists() and not stat.S_ISREG(path.stat().st_mode)


def _made(path: Path) -> int:
    """Make an empty file; its mode, which follows the umask."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


def _try(path: Path) -> None:
    trial = beside(path)
    try:
        _made(trial)
    finally:
        _unlink(trial)


def _settle(path: Path, mode: int) -> None:
    """Flush what was written to the disk, and set the mode that the file was made with: a writer may have made a file
    of its own."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.chmod(path, mode)
    finally:
        os.close(descriptor)


def _keep(path: Path, kept: list[Path], undo: contextlib.ExitStack) -> None:
    """Give the file at ``path`` a second name. Where the file system has no links, that becomes its only name."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not os.path.lexists(path):
        undo.callback(_unlink, path)
        return
    kept.append(beside(path))
    undo.callback(_put_back, kept[-1], path)
    try:
        os.link(path, kept[-1], follow_symlinks=False)
    except OSError:
        os.replace(path, kept[-1])


def _put_back(kept: Path, path: Path) -> None:
    if os.path.lexists(kept):
        os.replace(kept, path)
        _unlink(kept)  # renaming a file to another of its names leaves both


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems sync no folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
