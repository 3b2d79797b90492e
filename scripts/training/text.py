"""Text that every Python distribution carries (licence: PSF-2.0): documentation topics, docstrings, sources.

What is held out for the quality report ships with the package; a paragraph that shares eight words in a row with it is
left out here, so that training on another version of Python does not see it either.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparse_attn.cli.documents import held_out_text

END_OF_TEXT = 256
HELD_OUT_TOPICS = ("calls", "import", "objects", "raise", "truth", "typesmapping", "yield")
SHINGLE = 8  # words
SHORTEST = 60  # characters of a docstring worth reading
LEAST = 1 << 20  # bytes of prose below which something is wrong
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data", "encodings"}
_TYPOGRAPHIC = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2026": "...", "\u2013": "-", "\u2014": "--",
     "\u2022": "*", "\u00a0": " ", "\u2192": "->", "\u2264": "<=", "\u2265": ">="}
)  # fmt: skip


class Corpus(NamedTuple):
    """Byte ids, int16, a document after the other, each ended by END_OF_TEXT."""

    prose: np.ndarray
    code: np.ndarray


def plain(text: str) -> str:
    """``text`` with typographic signs in ASCII, other than ASCII left out, and no trailing blanks."""
    ascii_only = text.translate(_TYPOGRAPHIC).encode("ascii", "ignore").decode()
    return re.sub(r"[ \t\f\r]+\n", "\n", ascii_only).strip() + "\n"


def held_out() -> str:
    """What data/held_out.txt was made of."""
    from pydoc_data.topics import topics

    return "\n".join(plain(topics[name]) for name in HELD_OUT_TOPICS)


def collect() -> Corpus:
    """Everything this Python carries, the same on every call."""
    known = _shingles(held_out_text())
    prose, code = [], []
    for text in _topics():
        prose.append(_without(plain(text), known))
    for path in _modules():
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):
            continue
        code.append(plain(source))
        prose.extend(_without(plain(doc), known) for doc in _docstrings(tree))
    prose = list(dict.fromkeys(document for document in prose if len(document) >= SHORTEST))
    corpus = Corpus(_ids(prose), _ids(code))
    if len(corpus.prose) < LEAST:
        raise RuntimeError(f"text: this Python carries {len(corpus.prose)} bytes of prose, needed: {LEAST}")
    return corpus


def _topics() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    yield from (topics[name] for name in sorted(topics) if name not in HELD_OUT_TOPICS)


def _modules() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts))


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def _shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[first : first + SHINGLE]) for first in range(len(words) - SHINGLE + 1)}


def _without(text: str, known: set[tuple[str, ...]]) -> str:
    """``text`` without the paragraphs that share words with what is held out."""
    return "\n\n".join(part for part in text.split("\n\n") if not _shingles(part) & known)


def _ids(documents: list[str]) -> np.ndarray:
    parts = [np.frombuffer(document.encode("ascii"), np.uint8).astype(np.int16) for document in documents]
    end = np.array([END_OF_TEXT], np.int16)
    return np.concatenate([piece for part in parts for piece in (part, end)] or [end])
