"""Text to token ids and back: bytes for the presets, tokenizer.json for a checkpoint; and the text that ships here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from sparse_attn.files import check_regular, read_text
from sparse_attn.spec.fields import short


class Tokenizer(NamedTuple):
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def shipped_text() -> str:
    """The opening of a novel; see data/NOTICE."""
    return (resources.files("sparse_attn.data") / "down_the_rabbit_hole.txt").read_text(encoding="utf-8")


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; ids beyond them mean no text."""
    return Tokenizer(
        lambda text: list(text.encode("utf-8")),
        lambda ids: bytes(token for token in ids if token < 256).decode("utf-8", errors="replace"),
    )


def file_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder, None where it has no tokenizer.json. As transformers does, it neither cuts
    nor pads a text, whatever the file says."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    check_regular(path)
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise ImportError("reading tokenizer.json needs tokenizers: pip install 'sparse_attn[models]'") from error
    try:
        backend = Backend.from_str(read_text(path))
    except OSError:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        raise ValueError(f"{path}: no tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()

    def encode(text: str) -> list[int]:
        try:
            return backend.encode(text).ids
        except Exception as error:
            raise ValueError(f"{path}: cannot encode the prompt {short(text)}: {error}") from error

    return Tokenizer(encode, lambda ids: backend.decode(list(ids)))


class TextStream:
    """The text of tokens that come one by one. A piece is held back while its last character may be unfinished."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []  # those given out last, which what follows is decoded with, and those held back
        self._given = 0  # how many of them were given out

    def push(self, token: int) -> str:
        """What there is to give out with ``token``; may be empty."""
        self._ids.append(token)
        before, now = self._decode(self._ids[: self._given]), self._decode(self._ids)
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return now[len(before) :]

    def rest(self) -> str:
        """What is held back."""
        return self._decode(self._ids)[len(self._decode(self._ids[: self._given])) :]


class StopStrings:
    """Watches the text of one request for the first of some strings. text: what was given out before it. found: the
    string, None until then."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]):
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"stops: got {stops!r}, allowed: texts of at least one character")
        self._stream, self._stops = TextStream(decode), tuple(stops)
        self._longest = max(map(len, self._stops), default=1)
        self.text, self.found = "", None

    def push(self, token: int) -> bool:
        """Whether a stop string is in the text with ``token``. Of several the one that begins first counts, of those
        the longest."""
        first = max(0, len(self.text) - self._longest + 1)
        self.text += self._stream.push(token)
        places = [(place, -len(stop), stop) for stop in self._stops if (place := self.text.find(stop, first)) >= 0]
        if places:
            place, _, self.found = min(places)
            self.text = self.text[:place]
        return bool(places)


def check_text(name: str, given: str) -> None:
    """ValueError for half a surrogate pair, which no encoding of text has."""
    try:
        given.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: got text that is not UTF-8 at character {error.start}") from error


def printable(text: str) -> str:
    """``text`` with everything a terminal may not take escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def say(line: str, end: str = "\n") -> None:
    """Print ``line`` at once; what the terminal's encoding lacks is escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)
