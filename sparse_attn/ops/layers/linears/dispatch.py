"""Which kernel multiplies rows by packed weights, and how it is launched."""

from __future__ import annotations

import functools

from sparse_attn.framework import dispatch
from sparse_attn.framework.dispatch import YES, Choice, Kernel
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.linears.expanded import config as expanded
from sparse_attn.ops.layers.linears.fp8 import config as fp8
from sparse_attn.ops.layers.linears.hopper import config as hopper
from sparse_attn.ops.layers.linears.plan import Plan, Problem
from sparse_attn.ops.layers.linears.portable import config as portable
from sparse_attn.ops.layers.linears.swap_ab import config as swap_ab


def _hopper():
    from sparse_attn.ops.layers.linears.hopper import launch

    return launch


def _swap_ab():
    from sparse_attn.ops.layers.linears.swap_ab import launch

    return launch


def _expanded():
    from sparse_attn.ops.layers.linears.expanded import launch

    return launch


def _portable():
    from sparse_attn.ops.layers.linears.portable import launch

    return launch


def _fp8():
    from sparse_attn.ops.layers.linears.fp8 import launch

    return launch


KERNELS: tuple[Kernel[Problem, Plan], ...] = (
    Kernel("hopper.stream_k", hopper.supports, hopper.plan, lambda: _hopper().multiply),
    Kernel("hopper.stream_k_wide", hopper.supports_wide, hopper.plan_wide, lambda: _hopper().multiply_wide),
    Kernel("swap_ab", swap_ab.supports, swap_ab.plan, lambda: _swap_ab().multiply),
    Kernel("expanded", expanded.supports, expanded.plan, lambda: _expanded().multiply),
    Kernel("portable", portable.supports, portable.plan, lambda: _portable().multiply),
)


TORCH = "torch"
FP8_KERNELS: tuple[Kernel[Problem, Plan], ...] = (
    Kernel(TORCH, fp8.torch_supports, fp8.torch_plan, lambda: _fp8().multiply_by_torch),
    Kernel("fp8", lambda problem, target: YES, fp8.plan, lambda: _fp8().multiply),
)


@functools.lru_cache(maxsize=1024)  # a pure function that every eager call asks
def choose(problem: Problem, target: Target, kernel: str | Choice[Plan] | None = None) -> Choice[Plan]:
    """The kernel that runs a product, and its plan. kernel: see dispatch.choose."""
    return dispatch.choose(KERNELS, problem, target, kernel)


@functools.lru_cache(maxsize=1024)
def choose_fp8(problem: Problem, target: Target, kernel: str | Choice[Plan] | None = None) -> Choice[Plan]:
    """The same of rows that are quantised to fp8."""
    return dispatch.choose(FP8_KERNELS, problem, target, kernel)


CHOOSE = {"exact": choose, "fp8": choose_fp8}  # by activations
