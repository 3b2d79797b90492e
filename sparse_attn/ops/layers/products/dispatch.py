"""Which kernels multiply rows by packed weights, and which run the experts. Their problems and plans: problem.py."""

from __future__ import annotations

import functools

import torch

from sparse_attn.framework import dispatch
from sparse_attn.framework.dispatch import YES, Choice, Kernel
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.products.hopper import config as hopper
from sparse_attn.ops.layers.products.portable import config as portable
from sparse_attn.ops.layers.products.problem import ExpertsPlan, ExpertsProblem, Plan, Problem
from sparse_attn.ops.layers.products.swap_ab import config as swap_ab
from sparse_attn.workspace import Buffer, Scratch


def _hopper():
    from sparse_attn.ops.layers.products.hopper import launch

    return launch


def _swap_ab():
    from sparse_attn.ops.layers.products.swap_ab import launch

    return launch


def _portable():
    from sparse_attn.ops.layers.products.portable import launch

    return launch


# --- linears

KERNELS: tuple[Kernel[Problem, Plan], ...] = (
    Kernel("hopper.stream_k", hopper.supports_stream_k, hopper.plan_stream_k, lambda: _hopper().multiply_stream_k),
    Kernel(
        "hopper.stream_k_wide",
        hopper.supports_stream_k_wide,
        hopper.plan_stream_k_wide,
        lambda: _hopper().multiply_stream_k_wide,
    ),
    Kernel("swap_ab", swap_ab.supports, swap_ab.plan, lambda: _swap_ab().multiply),
    Kernel("expanded", portable.supports_expanded, portable.plan_expanded, lambda: _portable().multiply_expanded),
    Kernel("portable", portable.supports, portable.plan, lambda: _portable().multiply),
)
TORCH = "torch"
FP8_KERNELS: tuple[Kernel[Problem, Plan], ...] = (
    Kernel(TORCH, portable.supports_torch, portable.plan_torch, lambda: _portable().multiply_by_torch),
    Kernel("fp8", lambda problem, target: YES, portable.plan_fp8, lambda: _portable().multiply_fp8),
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


# --- experts


def grouped_products(problem: ExpertsProblem, target: Target) -> tuple[Choice[Plan], Choice[Plan]]:
    """The kernels of gate and up, and of down, where each is a grouped product of its own."""
    choose = CHOOSE[problem.activations]
    known = dict(batch_invariant=problem.batch_invariant, share=problem.gate_up.groups / problem.num_experts)
    first, second = (choose(one._replace(**known), target) for one in (problem.gate_up, problem.down))
    return first, second


def _plan_grouped(problem: ExpertsProblem, target: Target) -> ExpertsPlan:
    rows, experts, dtype = problem.rows, problem.gate_up.groups, problem.gate_up.dtype
    hidden, intermediate = problem.gate_up.columns, problem.down.columns
    own = (
        Buffer("order", (rows,), torch.int32),
        Buffer("place", (rows,), torch.int32),
        Buffer("ends", (experts,), torch.int32),
        Buffer("rows", (rows, hidden), dtype),
        Buffer("both", (rows, 2 * intermediate), dtype),
        Buffer("inner", (rows, intermediate), dtype),
        Buffer("terms", (rows, hidden), dtype),
    )
    first, second = (one.plan.scratch for one in grouped_products(problem, target))
    return ExpertsPlan(scratch=Scratch(own + first.buffers + second.buffers, first.counters + second.counters))


EXPERTS_KERNELS: tuple[Kernel[ExpertsProblem, ExpertsPlan], ...] = (
    Kernel("swap_ab", swap_ab.supports_experts, swap_ab.plan_experts, lambda: _swap_ab().multiply_experts),
    Kernel("hopper", hopper.supports_experts, hopper.plan_experts, lambda: _hopper().multiply_experts),
    Kernel("sorted", swap_ab.supports_sorted, swap_ab.plan_sorted, lambda: _swap_ab().multiply_sorted),
    Kernel(
        "grouped",
        lambda problem, target: YES,
        _plan_grouped,
        lambda: functools.partial(_portable().multiply_grouped, products=grouped_products),
    ),
)


@functools.lru_cache(maxsize=1024)
def choose_experts(
    problem: ExpertsProblem, target: Target, kernel: str | Choice[ExpertsPlan] | None = None
) -> Choice[ExpertsPlan]:
    """The kernels that run a call, and their plan. kernel: see dispatch.choose."""
    return dispatch.choose(EXPERTS_KERNELS, problem, target, kernel)
