"""The file of answers that `generate --prompts` writes: by one run at a time, in whole lines, each of which says what
it was made by. Nothing but the beginning of such a line is ever cut off.

Locks are those of fcntl, on single bytes far beyond the end: the processes of a run hold one each, and share one in
turn. The system lets go of them when a process ends, and also when it closes any other descriptor of the file: so
nothing here opens it twice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sparse_attn.files import beside, naming, parse_json

TURN = 1 << 62  # the byte that a process holds while it writes
SEATS = TURN + 1  # of the first process; those of the others follow
MOST = 1 << 20  # processes
TAKEN, LACKING = (errno.EACCES, errno.EAGAIN), (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
STRING = rb'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrtu])*(?:"|\\?)'
KINDS = {"id": (str, int), "text": (str, type(None)), "tokens": (list,), "finish_reason": (str,)}
FORM = (  # what stands before a value, and the value or its beginning
    (b'{"id": ', STRING + rb"|-?\d*"), (b', "text": ', STRING + rb"|n?u?l?l?"), (b', "tokens": [', rb"[\d, ]*"),
    (b'], "finish_reason": ', STRING), (b', "fingerprint": {"model": ', STRING), (b', "settings": ', STRING),
    (b', "prompt": ', STRING), (b"}}", b""),
)  # fmt: skip


class Fingerprint(NamedTuple):
    """What an answer was made by, as hashes."""

    model: str
    settings: str
    prompt: str


class Answer(NamedTuple):
    """A line, by its number from 1. fingerprint: None where an earlier version wrote it."""

    number: int
    id: str | int
    fingerprint: Fingerprint | None


def hash_of(value: Any) -> str:
    """A hash of what JSON can express."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def answer_line(
    id: str | int, text: str | None, tokens: list[int], finish_reason: str, fingerprint: Fingerprint
) -> bytes:
    line = {"id": id, "text": text, "tokens": tokens, "finish_reason": finish_reason}
    line["fingerprint"] = fingerprint._asdict()
    return (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


class AnswerFile:
    """The file at ``path``. The first process of a run calls take, settle, write and finish; others that write call
    join, write and finish. All call close."""

    def __init__(self, path: Path):
        self.path, self._file, self._locks = path, -1, True
        self._new = False  # made by this run, which has not begun to write
        self._size = 0  # when it was read

    def take(self) -> list[Answer]:
        """What the file holds, which is made where it is missing and held for this run. Nothing is written. ValueError
        where another run holds it, or where it is not of this command's."""
        while self._file < 0:
            self._new = not self.path.exists()
            self._open(os.O_CREAT)
            try:
                self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, SEATS, MOST)
            except BaseException:
                self.close()
                raise
            if not self._in_place():  # another run replaced or removed it meanwhile
                self.close()
        if not self._locks:
            print(f"{self.path}: its file system has no locks; let one run at a time write it", file=sys.stderr)
        data = self._read()
        self._size = len(data)
        return self._answers(data)[0]

    def settle(self, without: Collection[int] = ()) -> None:
        """Make the file ready to be appended to: without the beginning of a line at its end, and without the lines of
        these numbers. It is replaced then, under its mode."""
        data = self._read()
        if len(data) != self._size or not self._in_place():
            raise OSError(f"{self.path}: something else wrote it meanwhile")
        _, whole, end = self._answers(data)
        with naming(self.path):
            if without:
                self._replace(line for number, line in enumerate(whole, 1) if number not in without)
            elif end:
                os.ftruncate(self._file, len(data) - len(end))
            elif data and not data.endswith(b"\n"):
                self._append(b"\n")
        self._new = False
        self._lock(fcntl.LOCK_UN, SEATS + 1, MOST - 1)

    def join(self, rank: int) -> None:
        """Open what the first process has settled."""
        self._open(0)
        self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, SEATS + rank)

    def write(self, line: bytes) -> None:
        """Append ``line``. An OSError names the file, and leaves nothing of the line there if it can be cut off."""
        with naming(self.path), self._turn():
            if not self._in_place():
                raise OSError(errno.ESTALE, "replaced or removed while it was written")
            end = os.fstat(self._file).st_size
            if end and os.pread(self._file, 1, end - 1) != b"\n":
                raise OSError(errno.EIO, "ends in a line that another process began")
            self._append(line)

    def finish(self) -> None:
        """Write to the disk what is not there yet."""
        if self._file >= 0:
            with naming(self.path):
                os.fsync(self._file)

    def count(self, *, wait: bool) -> int | None:
        """Answers in the file. wait: until the other processes of the run have closed it; None where no lock says
        so."""
        if wait:
            self._lock(fcntl.LOCK_EX, SEATS + 1, MOST - 1)
            if not self._locks:
                return None
        return len(self._answers(self._read())[0])

    def close(self) -> None:
        if self._file >= 0:
            if self._new and self._in_place() and not os.fstat(self._file).st_size:
                Path(os.path.realpath(self.path)).unlink()
            os.close(self._file)
            self._file = -1

    def _append(self, data: bytes) -> None:
        """All of ``data``, or nothing of it where it can be cut off."""
        end, done = os.fstat(self._file).st_size, 0
        try:
            while done < len(data):
                count = os.write(self._file, data[done:])
                if not count:
                    raise OSError(errno.EIO, "takes no more bytes")
                done += count
        finally:
            if done < len(data):
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, end)

    def _open(self, flags: int) -> None:
        with naming(self.path):
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | flags, 0o666)

    def _lock(self, how: int, first: int, count: int = 1) -> None:
        if not self._locks:
            return
        try:
            fcntl.lockf(self._file, how, count, first)
        except OSError as error:
            if error.errno in TAKEN:
                raise ValueError(
                    f"--out: got {str(self.path)!r}, which another run writes to, allowed: one run at a time"
                ) from error
            self._locks = error.errno not in LACKING
            if self._locks:
                raise OSError(error.errno, error.strerror, str(self.path)) from error

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        self._lock(fcntl.LOCK_EX, TURN)
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_UN, TURN)

    def _in_place(self) -> bool:
        """Whether ``path`` still names the file that is open."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def _read(self) -> bytes:
        with naming(self.path), open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            return file.read()

    def _answers(self, data: bytes) -> tuple[list[Answer], list[bytes], bytes]:
        """(answers, their lines, the beginning of one at the end). ValueError names any other line."""
        *lines, end = data.split(b"\n")
        found, seen = [], {}
        if end and not is_beginning(end):  # a whole one, but for the newline, or none
            lines, end = [*lines, end], b""
        for number, line in enumerate(lines, 1):
            try:
                answer = _answer(number, line)
            except ValueError as error:
                raise ValueError(
                    f"{self.path}, line {number}: got no answer ({error}), allowed: a file that this command wrote"
                ) from error
            if answer.id in seen:
                raise ValueError(
                    f"{self.path}, line {number}: got an answer of id {answer.id!r}, as line {seen[answer.id]} is, "
                    "allowed: one of each"
                )
            seen[answer.id] = number
            found.append(answer)
        return found, lines, end

    def _replace(self, lines: Iterator[bytes]) -> None:
        path = Path(os.path.realpath(self.path))
        fresh, before = beside(path), os.fstat(self._file)
        old, file = self._file, os.open(fresh, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(file, "wb", closefd=False) as writer:
                writer.writelines(line + b"\n" for line in lines)
            with contextlib.suppress(PermissionError):
                os.fchown(file, before.st_uid, before.st_gid)
            os.fchmod(file, before.st_mode & 0o7777)
            os.fsync(file)
            self._file = file
            self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, SEATS, MOST)  # before another run can open it
            os.replace(fresh, path)
        except BaseException:
            self._file = old
            os.close(file)
            fresh.unlink(missing_ok=True)
            raise
        os.close(old)


def is_beginning(line: bytes) -> bool:
    """Whether ``line`` is the beginning of an answer's line, and not all of it."""
    for before, value in FORM:
        if len(line) < len(before):
            return before.startswith(line)
        if not line.startswith(before):
            return False
        line = line[len(before) :]
        found = re.match(value, line)
        line = line[found.end() :] if found else line
        if not line:
            return bool(value)
    return False


def _answer(number: int, line: bytes) -> Answer:
    given = parse_json(line.decode("utf-8"))
    if not isinstance(given, dict):
        raise ValueError(f"got JSON of type {type(given).__name__}, allowed: an object")
    for name, kinds in KINDS.items():
        if name not in given:
            raise ValueError(f"{name}: missing")
        if type(given[name]) not in kinds:
            raise ValueError(f"{name}: got JSON of type {type(given[name]).__name__}")
    fingerprint = given.get("fingerprint")
    if fingerprint is not None and (not isinstance(fingerprint, dict) or set(fingerprint) != set(Fingerprint._fields)):
        raise ValueError(f"fingerprint: got {fingerprint!r}, allowed: an object of {', '.join(Fingerprint._fields)}")
    return Answer(number, given["id"], None if fingerprint is None else Fingerprint(**fingerprint))
