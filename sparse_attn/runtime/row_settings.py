"""What is set of a row of a decode loop before its prompt is computed: its random stream, its rings, its sampling.

The tensors that a step reads hold a value a row each. A row's values go to the device in one copy, and from there into
the tensors in one launch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from sparse_attn.ops.sampling import row_seeds
from sparse_attn.runtime.draws import DTYPES, Draws, Sampling
from sparse_attn.runtime.inputs import checked_sampling
from sparse_attn.runtime.steps import sent
from sparse_attn.torch_private import copy_all

CODES = {torch.float64: "d", torch.int64: "q", torch.float32: "f", torch.int32: "i"}


class RowSettings:
    """Of the rows whose ``seeds``, ``rings`` and ``draws`` are given, tensors of a loop that live as long as this.
    sampling: of rows that bring none."""

    def __init__(
        self, sampling: Sampling, seeds: torch.Tensor, rings: torch.Tensor | None, draws: Draws | None
    ) -> None:
        self._sampling, self._draws = sampling, draws
        self._seeds: list[int] = row_seeds(sampling.seed, seeds.shape[0], "cpu").tolist()
        held: dict[str, torch.Tensor | None] = {"seed": seeds, "rings": rings}
        if draws is not None:
            held |= {name: getattr(draws, name) for name in (*DTYPES, "stop_ids")}
        self._tensors = {name: value for name, value in held.items() if value is not None}
        self._words = [value.view(torch.int32).view(seeds.shape[0], -1) for value in self._tensors.values()]
        self._sizes = [words.shape[1] for words in self._words]
        self._rows: dict[int, list[torch.Tensor]] = {}

    def set(
        self, row: int, seed: int | None, rings: Sequence[int] | None, sampling: Sampling | None, prompt: Sequence[int]
    ) -> None:
        """ValueError or TypeError, before anything is set, for what the tensors have no place for."""
        own = self._checked(sampling)
        given: dict[str, Any] = {"seed": [self._seeds[row] if seed is None else seed], "rings": rings or []}
        if "rings" in self._tensors and len(given["rings"]) != (wanted := self._tensors["rings"].shape[1]):
            raise ValueError(f"rings: got {len(given['rings'])}, allowed: {wanted}, those of a row")
        data = bytearray()
        for name, tensor in self._tensors.items():
            values = given[name] if name in given else self._values(own, name)
            data += array(CODES[tensor.dtype], values).tobytes()
        if row not in self._rows:
            self._rows[row] = [words[row] for words in self._words]
        words = sent(torch.frombuffer(data, dtype=torch.int32), self._tensors["seed"].device)
        copy_all(self._rows[row], words.split(self._sizes))
        if own.penalises and self._draws is not None and self._draws.counts is not None:
            self._clear_counts(row, prompt)

    def _values(self, sampling: Sampling, name: str) -> Sequence[Any]:
        if name != "stop_ids":
            return [getattr(sampling, name)]
        return [*sampling.stop_ids] + [-1] * (self._tensors[name].shape[1] - len(sampling.stop_ids))

    def _clear_counts(self, row: int, prompt: Sequence[int]) -> None:
        """Of a row without penalties nobody reads the counts."""
        assert self._draws is not None and self._draws.counts is not None
        self._draws.counts[row].zero_()
        if self._draws.prompted is not None:
            ids = sent(torch.tensor(prompt, dtype=torch.int64, device="cpu"), self._draws.counts.device)
            self._draws.prompted[row].zero_().index_fill_(0, ids, True)

    def _checked(self, sampling: Sampling | None) -> Sampling:
        if sampling is None:
            return self._sampling
        sampling, off = checked_sampling(sampling), Sampling()
        if self._draws is None:
            raise ValueError("sampling: got one of a row, allowed: None, the loop has no draws")
        for name in (*DTYPES, "stop_ids"):
            if name not in self._tensors and getattr(sampling, name) != getattr(off, name):
                raise ValueError(f"sampling: got {name}, allowed: what the loop has draws for")
        most = self._tensors["stop_ids"].shape[1] if "stop_ids" in self._tensors else 0
        if len(sampling.stop_ids) > most:
            raise ValueError(f"sampling: got {len(sampling.stop_ids)} stop ids, allowed: at most {most}")
        return sampling
