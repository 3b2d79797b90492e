"""Text to token ids and back: bytes for the presets, tokenizer.json for a checkpoint; and the text that ships here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from sparse_attn.files import read_text


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
    """The tokenizer of a checkpoint folder, None where it has no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
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
    return Tokenizer(lambda text: backend.encode(text).ids, lambda ids: backend.decode(list(ids)))


def printable(text: str) -> str:
    """``text`` with everything a terminal may not take escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def say(line: str) -> None:
    """Print ``line`` at once; what the terminal's encoding lacks is escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
