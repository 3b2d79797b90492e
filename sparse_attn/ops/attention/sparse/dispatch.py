"""Which kernel attends, and how it is launched.

``KERNELS`` are asked in order. Each says what it supports and plans its launch in the config.py of its folder. Decode
and prefill share the table: a plain cache whose blocks stand side by side is a matrix of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from sparse_attn.framework import dispatch
from sparse_attn.framework.dispatch import Choice, Kernel
from sparse_attn.framework.target import Target
from sparse_attn.ops.attention.sparse.hopper import config as hopper
from sparse_attn.ops.attention.sparse.portable import config as portable
from sparse_attn.ops.attention.sparse.problem import (
    INVARIANT_DECODE_ROWS,
    INVARIANT_PREFILL_ROWS,
    Problem,
    kv_caches,
    kv_rows,
    problem_of,
)
from sparse_attn.ops.attention.sparse.split_kv import rows_of_most_partials
from sparse_attn.workspace import Scratch

Plan = hopper.Plan | portable.PortablePlan
MACHINES = (hopper, portable)


def _hopper():
    from sparse_attn.ops.attention.sparse.hopper import launch

    return launch


def _portable():
    from sparse_attn.ops.attention.sparse.portable import launch

    return launch


KERNELS: tuple[Kernel[Problem, Plan], ...] = (
    Kernel("hopper.swap_ab", hopper.supports_swap_ab, hopper.plan_swap_ab, lambda: _hopper().swap_ab),
    Kernel("hopper.decode_fp8", hopper.supports_decode_fp8, hopper.plan_decode_fp8, lambda: _hopper().decode_fp8),
    Kernel(
        "hopper.prefill_bf16", hopper.supports_prefill_bf16, hopper.plan_prefill_bf16,
        lambda: _hopper().prefill_bf16,
    ),
    Kernel("portable", portable.supports, portable.plan, lambda: _portable().attend),
)  # fmt: skip


@functools.lru_cache(maxsize=1024)  # a pure function that every eager call asks
def choose(problem: Problem, target: Target, kernel: str | Choice[Plan] | None = None) -> Choice[Plan]:
    """The kernel that attends, and its plan. kernel: see dispatch.choose.

    ValueError where not even the portable kernel, which asks least, can run the problem.
    """
    if kernel is None and not (fits := portable.supports(problem, target)).ok:
        raise ValueError(fits.reason)
    return dispatch.choose(KERNELS, problem, target, kernel)


def prefill_problem(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    scale: float,
    d_v: int,
    batch_invariant: bool = False,
) -> Problem:
    """The problem that the arguments of the operator sparse_attn_prefill make, real or on meta."""
    rows = INVARIANT_PREFILL_ROWS if batch_invariant else None
    return problem_of(q, kv_rows(kv, d_v, indices, indptr), None, scale, rows)


def decode_problem(q: torch.Tensor, scale: float, batch_invariant: bool, *caches: Any) -> Problem:
    """The problem that the arguments of the operator sparse_attn_decode make, real or on meta. caches: what kv_caches
    takes."""
    return problem_of(q, *kv_caches(*caches), scale, INVARIANT_DECODE_ROWS if batch_invariant else None)


def reserved(problem: Problem, target: Target, step: int = 1) -> Iterator[Scratch]:
    """The scratch of calls like ``problem``, the largest among it.

    They have at most its rows, a multiple of ``step``, and each row holds at most as many keys. Strides and addresses
    may send a call to any kernel that could run it, so all of these count.
    """
    yield hopper.TILE_COUNTER
    if not problem.tokens:
        return
    keys = -(-problem.indices // problem.tokens)
    rows = range(step, min(problem.tokens, rows_of_most_partials(target, step)) + 1, step)
    if problem.invariant_rows is not None:
        rows = (problem.tokens,)  # however many, all are split alike: more take more
    for tokens in rows:
        some = problem._replace(tokens=tokens, indices=tokens * keys)
        for machine in MACHINES:
            yield from machine.reserved(some, target)
