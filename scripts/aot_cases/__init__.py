"""Calls of every operator package's launcher that between them take every shipped launch configuration."""

from __future__ import annotations

from collections.abc import Iterator

from aot_cases import attention, caches, indexing, layers, plans
from aot_cases.form import Case


def all_cases() -> Iterator[Case]:
    for module in (attention, indexing, plans, caches, layers):
        yield from module.cases()
