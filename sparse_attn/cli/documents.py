"""Documents that quality is measured on: held-out text, and mentions of keys and values scattered through it.

A mention is ``[KEYS=1234]``. Every key is mentioned once among the records in the first part of a document, and asked
for once in its tail, where the value is the answer.
"""

from __future__ import annotations

import random
import string
from importlib import resources
from typing import NamedTuple

from sparse_attn.framework import checks

CELL = 20  # bytes in which a mention stands somewhere
KEY_BYTES = VALUE_BYTES = 4
MENTION_BYTES = KEY_BYTES + VALUE_BYTES + len("[=]")
KEY_LETTERS, VALUE_LETTERS = string.ascii_uppercase, string.digits
ALPHABET = 5  # letters that the keys of one document are made of at least: many share three of four
LEAST_BYTES = 2 * CELL  # a record, and a cell that asks for it
MOST_RECORDS = len(KEY_LETTERS) ** KEY_BYTES
RECORD_SHARE = 0.75  # of a document before its tail


class Document(NamedTuple):
    """Pieces of ASCII text, one after the other, and which of them are scored: a text's tail, or the answers."""

    pieces: list[str]
    scored: list[int]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def held_out_text() -> str:
    """Documentation that no shipped model was trained on, ASCII; see data/NOTICE."""
    return (resources.files("sparse_attn.data") / "held_out.txt").read_text(encoding="ascii")


def text_documents(count: int, length: int) -> list[Document]:
    """``count`` windows of ``length`` bytes of the held-out text, evenly spaced, of which the tails are scored."""
    checks.check_at_least("length", length, LEAST_BYTES)
    text, tail = _repeated(held_out_text(), length), tail_of(length)
    step = (len(text) - length) / max(count - 1, 1)
    starts = [round(number * step) for number in range(count)]
    return [Document([text[start : start + tail], text[start + tail : start + length]], [1]) for start in starts]


def tail_of(length: int) -> int:
    """The first byte of a document of ``length`` bytes that is scored. A mention fits behind it."""
    return min(int(length * RECORD_SHARE) // CELL, length // CELL - 1) * CELL


def retrieval_documents(count: int, length: int, seed: int = 0, queries: int | None = None) -> list[Document]:
    """``count`` documents of at most ``length`` bytes. Every cell of a tail asks for a key among the document's
    records.

    queries: how many a document asks at most; None: as many as fit. There are twice as many records. Their keys use as
    few letters as possible, ALPHABET or more, so the keys of longer documents share letters, too.
    """
    checks.check_at_least("length", length, LEAST_BYTES)
    draw, text = random.Random(seed), held_out_text()
    return [_retrieval(draw, _repeated(text, length), length, queries) for _ in range(count)]


class Question(NamedTuple):
    """A text with records in it that ends with the key of one of them, and the value a reader should go on with."""

    text: str
    value: str

    @property
    def key(self) -> str:
        return self.text[-KEY_BYTES - 1 : -1]

    @property
    def record(self) -> int:
        """The byte at which the record of the key begins."""
        return self.text.index(f"[{self.key}=")


def question(length: int = 1024, seed: int = 2) -> Question:
    """A question. Behind the default's value, prose follows."""
    (document,) = retrieval_documents(1, length, seed)
    asked = document.scored[0]
    return Question("".join(document.pieces[:asked]), document.pieces[asked])


def asked_record(read: str) -> range:
    """Where the record lies in a question's text whose key stands at the text's end."""
    start = read.index(read[read.rindex("[") :])
    return range(start, start + MENTION_BYTES)


def _retrieval(draw: random.Random, text: str, length: int, queries: int | None) -> Document:
    tail, cells = tail_of(length) // CELL, length // CELL
    asked = min(cells - tail, tail, cells if queries is None else queries)
    records = min(2 * asked, tail)
    keys = _keys(draw, records)
    values = ["".join(draw.choice(VALUE_LETTERS) for _ in range(VALUE_BYTES)) for _ in keys]
    number_in = dict(zip(draw.sample(range(tail), records), range(records)))
    number_in |= dict(zip(draw.sample(range(tail, cells), asked), draw.sample(range(records), asked)))
    start = draw.randrange(len(text) - length + 1)
    pieces, scored = [], []
    for cell in range(cells):
        filler = text[start + cell * CELL : start + (cell + 1) * CELL]
        if cell not in number_in:
            pieces.append(filler)
            continue
        number, before = number_in[cell], draw.randrange(CELL - MENTION_BYTES + 1)
        if cell >= tail:
            scored.append(len(pieces) + 1)
        pieces += [f"{filler[:before]}[{keys[number]}=", values[number], f"]{filler[before + MENTION_BYTES :]}"]
    return Document(pieces, scored)


def _keys(draw: random.Random, count: int) -> list[str]:
    """``count`` distinct keys."""
    if count > MOST_RECORDS:
        raise ValueError(
            f"length: got room for {count} records, allowed: at most {MOST_RECORDS}, as many as there are keys"
        )
    letters = ALPHABET
    while letters**KEY_BYTES < count:
        letters += 1
    alphabet = draw.sample(KEY_LETTERS, letters)
    if letters > ALPHABET:
        return [_spelt(number, alphabet) for number in draw.sample(range(letters**KEY_BYTES), count)]
    keys: dict[str, None] = {}  # so few that drawing again is quick
    while len(keys) < count:
        keys["".join(draw.choice(alphabet) for _ in range(KEY_BYTES))] = None
    return list(keys)


def _spelt(number: int, alphabet: list[str]) -> str:
    """The key with that number."""
    key = ""
    for _ in range(KEY_BYTES):
        number, letter = divmod(number, len(alphabet))
        key += alphabet[letter]
    return key


def _repeated(text: str, length: int) -> str:
    return text * (1 + length // len(text)) if length >= len(text) else text
