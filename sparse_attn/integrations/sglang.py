"""SGLang's DSA selects keys by top_k_per_row where SPARSE_ATTN_SGLANG=1 is set: the exact top-k for any k, the lowest
keys of equal scores, the same in every run.

``register`` is the entry point that SGLang loads (group sglang.srt.plugins in setup.cfg). The rest of its layers stays.
The hook was compared with SGLang's sources and executed without them: SGLang needs a GPU for DSA, and was not run.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from sparse_attn.ops.topk.select import top_k_per_row

VARIABLE = "SPARSE_ATTN_SGLANG"
FUSED = "SGLANG_DSA_FUSE_TOPK"  # SGLang's own: selection in one kernel with what follows, which asks no hook
VERSIONS = ("0.5.23",)
TARGET = "sglang.srt.layers.attention.dsa.dsa_topk_backend.DSATopKBackend.topk_func"


def register() -> None:
    """Put ``topk_func`` in place of SGLang's, where the variable asks for it. What is wrong is raised by the first
    selection, for SGLang logs what a plugin raises and goes on without it."""
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    problem = problem_of(metadata.version("sglang"), os.environ)
    HookRegistry.register(TARGET, refusing(problem) if problem else topk_func, HookType.REPLACE)
    os.environ.setdefault(FUSED, "0")


def problem_of(version: str, environment: Any) -> str | None:
    if environment[VARIABLE] != "1":
        return f"{VARIABLE}: got {environment[VARIABLE]!r}, allowed: 1, or 0 for SGLang's own"
    if version not in VERSIONS:
        return f"sglang: got version {version}, allowed: {', '.join(VERSIONS)}"
    if environment.get(FUSED, "0").lower() not in ("0", "false"):
        return f"{FUSED}: got {environment[FUSED]!r}, allowed: 0 with {VARIABLE}"
    return None


def refusing(problem: str) -> Callable[..., torch.Tensor]:
    def topk_func(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError(f"{VARIABLE} is set, and sparse_attn cannot select: {problem}")

    return topk_func


def topk_func(
    self: object, score: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None = None
) -> torch.Tensor:
    """In place of DSATopKBackend.topk_func.

    Args:
        self: SGLang's choice of a backend, which does not matter.
        score: fp32 [rows, width].
        lengths: [rows], keys of a row.
        topk: keys to select.
        row_starts: [rows] or None, the column of a row's first key; None: 0.

    Returns:
        int32 [rows, topk]: keys counted from the row's first, ascending, -1 behind.
    """
    starts = None if row_starts is None else row_starts.int()
    ends = lengths.int() if starts is None else starts + lengths.int()
    return top_k_per_row(score, topk, starts, ends)
