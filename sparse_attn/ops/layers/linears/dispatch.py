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

HERE = "sparse_attn.ops.layers.linears"
KERNELS: tuple[Kernel[Problem, Plan], ...] = (
    Kernel("hopper.stream_k", hopper.supports, hopper.plan, f"{HERE}.hopper.launch:multiply"),
    Kernel("hopper.stream_k_wide", hopper.supports_wide, hopper.plan_wide, f"{HERE}.hopper.launch:multiply_wide"),
    Kernel("swap_ab", swap_ab.supports, swap_ab.plan, f"{HERE}.swap_ab.launch:multiply"),
    Kernel("expanded", expanded.supports, expanded.plan, f"{HERE}.expanded.launch:multiply"),
    Kernel("portable", portable.supports, portable.plan, f"{HERE}.portable.launch:multiply"),
)


TORCH = "torch"
FP8_KERNELS: tuple[Kernel[Problem, Plan], ...] = (
    Kernel(TORCH, fp8.torch_supports, fp8.torch_plan, f"{HERE}.fp8.launch:multiply_by_torch"),
    Kernel("fp8", lambda problem, target: YES, fp8.plan, f"{HERE}.fp8.launch:multiply"),
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
