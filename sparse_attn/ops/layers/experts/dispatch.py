"""Which kernels multiply by the experts."""

from __future__ import annotations

import functools

from sparse_attn.framework import dispatch
from sparse_attn.framework.dispatch import Choice, Kernel
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.experts.grouped import config as grouped
from sparse_attn.ops.layers.experts.hopper import config as hopper
from sparse_attn.ops.layers.experts.plan import Plan, Problem
from sparse_attn.ops.layers.experts.sorted import config as ordered
from sparse_attn.ops.layers.experts.swap_ab import config as swap_ab


def _swap_ab():
    from sparse_attn.ops.layers.experts.swap_ab import launch

    return launch


def _hopper():
    from sparse_attn.ops.layers.experts.hopper import launch

    return launch


def _sorted():
    from sparse_attn.ops.layers.experts.sorted import launch

    return launch


def _grouped():
    from sparse_attn.ops.layers.experts.grouped import launch

    return launch


KERNELS: tuple[Kernel[Problem, Plan], ...] = (
    Kernel("swap_ab", swap_ab.supports, swap_ab.plan, lambda: _swap_ab().multiply),
    Kernel("hopper", hopper.supports, hopper.plan, lambda: _hopper().multiply),
    Kernel("sorted", ordered.supports, ordered.plan, lambda: _sorted().multiply),
    Kernel("grouped", grouped.supports, grouped.plan, lambda: _grouped().multiply),
)


@functools.lru_cache(maxsize=1024)  # a pure function that every eager call asks
def choose(problem: Problem, target: Target, kernel: str | Choice[Plan] | None = None) -> Choice[Plan]:
    """The kernels that run a call, and their plan. kernel: see dispatch.choose."""
    return dispatch.choose(KERNELS, problem, target, kernel)
