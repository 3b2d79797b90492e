"""What the experts' swap-AB kernels support, and their tiles."""

from __future__ import annotations

from sparse_attn.dispatch import YES, Support, find, no, slower
from sparse_attn.ops.experts.plan import Plan, Problem
from sparse_attn.ops.grouped_linear.dispatch import KERNELS
from sparse_attn.target import Target

PRODUCT = find(KERNELS, "swap_ab")
BLOCK_M, BLOCK_N = 8, 64
MOST_ROWS = 1024  # ids that a CTA looks through
MOST_EACH = 16  # rows of an expert in the mean, of which every BLOCK_M read its weights


def supports(problem: Problem, target: Target) -> Support:
    if problem.activations != "exact":
        return no(f"activations: got {problem.activations}, allowed: exact")
    for name, one in (("gate_up", problem.gate_up), ("down", problem.down)):
        alone = PRODUCT.supports(one._replace(rows=1), target)
        if not alone.ok:
            return alone._replace(reason=f"{name}: {alone.reason}")
    rows = problem.k if problem.batch_invariant else problem.rows
    if rows > MOST_ROWS:
        return no(f"ids: got {rows}, allowed: at most {MOST_ROWS}")
    if not problem.batch_invariant and problem.rows > MOST_EACH * problem.gate_up.groups:
        return slower(f"ids: got {problem.rows}, allowed: at most {MOST_EACH} an expert")
    return YES


def plan(problem: Problem, target: Target) -> Plan:
    first, second = (PRODUCT.plan(one._replace(rows=1), target).block_k for one in (problem.gate_up, problem.down))
    return Plan(BLOCK_M, BLOCK_N, 4, first, BLOCK_N, 4, second, 1 if target.interpreted else 3)
