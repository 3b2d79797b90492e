"""A bug: a snippet that occurs once in its file, and what stands there instead."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
OPS = "sparse_attn/ops/"


class Mutation(NamedTuple):
    """what: the bug in words. tests: pytest node ids, one of which must fail. interpreted: kernels, run by Triton's
    interpreter. gpu: kernels that only the GPU they are written for runs."""

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    interpreted: bool = False
    gpu: bool = False

    def applied(self, source: str) -> str:
        """``source`` with the bug in it; ValueError unless ``old`` occurs exactly once."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"mutation {self.name}: {self.old!r} occurs {count} times in {self.file}, allowed: once")
        return source.replace(self.old, self.new)
