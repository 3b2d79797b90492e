"""Autocast changes the dtypes that functions were written for; what computes here is kept out of its reach.

Rounded scores select other keys, and operators refuse arguments of another dtype than their caches'.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def no_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which computes under torch.autocast what it computes without."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run
