"""Batches drawn on the device: windows of text, and windows over which keys and values are scattered.

The mentions have the form of cli.documents. All work is on whole tensors, so that a GPU makes a batch in well under
a millisecond.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_attn.cli.documents import CELL, KEY_BYTES, KEY_LETTERS, MENTION_BYTES, VALUE_BYTES, VALUE_LETTERS
from training.parts import one_hot
from training.text import Corpus

ALPHABETS = (4, 6, len(KEY_LETTERS))  # letters that the keys of a document are made of


class Batch(NamedTuple):
    """tokens: int64 [B, L + 1], fed but for the last, predicted but for the first. text, answer: fp32 [B, L], 1 where
    the prediction counts as text (what cannot be known counts as neither), or as the value of a key that was
    mentioned."""

    tokens: torch.Tensor
    text: torch.Tensor
    answer: torch.Tensor


class Source:
    """A corpus on a device, and the generator that draws from it."""

    def __init__(self, corpus: Corpus, device: torch.device, seed: int, code_share: float = 0.25):
        self.prose = torch.from_numpy(corpus.prose).to(device)
        self.code = torch.from_numpy(corpus.code).to(device)
        self.device, self.code_share = device, code_share
        self.generator = torch.Generator(device).manual_seed(seed)
        # Made once: copying them from the host would wait for the device on every batch.
        self._letters, self._digits, self._sizes, self._powers = (
            torch.tensor(values, dtype=torch.int64, device=device)
            for values in (
                list(KEY_LETTERS.encode()), list(VALUE_LETTERS.encode()), ALPHABETS,
                [len(KEY_LETTERS) ** place for place in range(KEY_BYTES)],
            )
        )  # fmt: skip

    def batch(self, rows: int, length: int, retrieval_share: float) -> Batch:
        """``rows`` rows of ``length`` predictions, the first of them with mentions."""
        tokens = self._windows(rows, length + 1)
        text = torch.ones(rows, length + 1, dtype=torch.float32, device=self.device)
        answer = torch.zeros_like(text)
        some = round(rows * retrieval_share)
        if some and length + 1 >= 2 * CELL:
            self._mention(tokens[:some], text[:some], answer[:some])
        return Batch(tokens, text[:, 1:].contiguous(), answer[:, 1:].contiguous())

    def _uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float32, device=self.device)

    def _below(self, limit: torch.Tensor | int, *shape: int) -> torch.Tensor:
        return (self._uniform(*shape) * limit).long().clamp_max(limit - 1)

    def _windows(self, rows: int, length: int) -> torch.Tensor:
        of_code = round(rows * self.code_share)
        parts = []
        for source, count in ((self.prose, rows - of_code), (self.code, of_code)):
            start = self._below(len(source) - length, count)
            parts.append(source[start.unsqueeze(1) + torch.arange(length, device=self.device)].long())
        return torch.cat(parts)[torch.randperm(rows, generator=self.generator, device=self.device)]

    def _mention(self, tokens: torch.Tensor, text: torch.Tensor, answer: torch.Tensor) -> None:
        """Write mentions over ``tokens`` [B, n], in place, and mark what they make of the predictions."""
        rows, length = tokens.shape
        cells = length // CELL
        number = self._numbers(rows, cells)
        active = self._uniform(rows, cells) < 0.25 + 0.7 * self._uniform(rows, 1)
        keys = self._strings(rows, cells, KEY_BYTES, KEY_LETTERS, self._alphabet(rows))
        values = self._strings(rows, cells, VALUE_BYTES, VALUE_LETTERS, None)

        which = one_hot(number, cells, torch.bool) & active.unsqueeze(2)  # [B, cell, number]
        seen = (which.long().cumsum(1) > 1).gather(2, number.unsqueeze(2)).squeeze(2) & active
        packed = (keys * self._powers).sum(2)
        used = which.any(1)
        twins = (packed.unsqueeze(1) == packed.unsqueeze(2)) & used.unsqueeze(1) & used.unsqueeze(2)
        ambiguous = (twins.sum(2) > 1).gather(1, number)
        asked = seen & ~ambiguous

        at = number.unsqueeze(2).expand(-1, -1, KEY_BYTES)
        key_ids = self._letters[keys].gather(1, at)
        value_ids = self._digits[values].gather(1, at)
        sign = {c: torch.full((rows, cells, 1), ord(c), dtype=torch.int64, device=self.device) for c in "[=]"}
        mention = torch.cat([sign["["], key_ids, sign["="], value_ids, sign["]"]], dim=2)
        start = torch.arange(cells, device=self.device) * CELL + self._below(CELL - MENTION_BYTES + 1, rows, cells)
        place = start.unsqueeze(2) + torch.arange(MENTION_BYTES, device=self.device)
        place = torch.where(active.unsqueeze(2), place, length)  # what is not active lands behind the end

        def write(target: torch.Tensor, values: torch.Tensor) -> None:
            wide = torch.cat([target, target[:, :1]], dim=1)
            target.copy_(wide.scatter(1, place.flatten(1), values.to(target.dtype).expand_as(place).flatten(1))[:, :-1])

        within = torch.arange(MENTION_BYTES, device=self.device)
        is_value = (within > KEY_BYTES + 1) & (within <= KEY_BYTES + 1 + VALUE_BYTES)
        is_known = (within == KEY_BYTES + 1) | (within == MENTION_BYTES - 1)
        write(tokens, mention)
        write(text, is_known.float().expand(rows, cells, -1))
        write(answer, (asked.unsqueeze(2) & is_value).float())

    def _numbers(self, rows: int, cells: int) -> torch.Tensor:
        """The key each cell would mention, int64 [B, cells]: in half of the documents any of a few, in the others each
        key once in a first part and any of them behind it."""
        few = self._below((2 + self._uniform(rows, 1) * cells / 2).long(), rows, cells)
        cut = ((0.4 + 0.4 * self._uniform(rows, 1)) * cells).long().clamp_min(1)
        cell = torch.arange(cells, device=self.device).expand(rows, -1)
        spread = torch.where(cell < cut, cell, self._below(cut, rows, cells))
        return torch.where(self._uniform(rows, 1) < 0.5, few, spread)

    def _alphabet(self, rows: int) -> torch.Tensor:
        """Letters each document's keys are made of, int64 [B, 26], of which any column may be taken."""
        order = self._uniform(rows, len(KEY_LETTERS)).argsort(1)
        sizes = self._sizes[self._below(len(ALPHABETS), rows)]
        return order.gather(1, torch.arange(len(KEY_LETTERS), device=self.device) % sizes.unsqueeze(1))

    def _strings(self, rows: int, count: int, width: int, letters: str, alphabet: torch.Tensor | None) -> torch.Tensor:
        drawn = self._below(len(letters), rows, count, width)
        return drawn if alphabet is None else alphabet.gather(1, drawn.flatten(1)).view_as(drawn)
