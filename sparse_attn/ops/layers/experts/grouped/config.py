"""Two grouped products take what each of them takes."""

from __future__ import annotations

import torch

from sparse_attn.framework.dispatch import YES, Choice, Support
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.experts.plan import Plan, Problem
from sparse_attn.ops.layers.linears import dispatch
from sparse_attn.workspace import Buffer, Scratch

COUNTED = 4096  # ids that a CTA of order_rows looks at together


def supports(problem: Problem, target: Target) -> Support:
    return YES


def plan(problem: Problem, target: Target) -> Plan:
    rows, experts, dtype = problem.rows, problem.gate_up.groups, problem.gate_up.dtype
    hidden, intermediate = problem.gate_up.columns, problem.down.columns
    own = (
        Buffer("order", (rows,), torch.int32), Buffer("place", (rows,), torch.int32),
        Buffer("ends", (experts,), torch.int32), Buffer("rows", (rows, hidden), dtype),
        Buffer("both", (rows, 2 * intermediate), dtype), Buffer("inner", (rows, intermediate), dtype),
        Buffer("terms", (rows, hidden), dtype),
    )  # fmt: skip
    first, second = (one.plan.scratch for one in products(problem, target))
    return Plan(scratch=Scratch(own + first.buffers + second.buffers, first.counters + second.counters))


def products(problem: Problem, target: Target) -> tuple[Choice, Choice]:
    """The kernels of gate and up, and of down."""
    choose = dispatch.CHOOSE[problem.activations]
    known = dict(batch_invariant=problem.batch_invariant, share=problem.gate_up.groups / problem.num_experts)
    first, second = (choose(one._replace(**known), target) for one in (problem.gate_up, problem.down))
    return first, second
