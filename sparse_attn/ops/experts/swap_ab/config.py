"""What the experts' swap-AB kernels support, and their tiles."""

from __future__ import annotations

from sparse_attn.dispatch import YES, Support, no, slower
from sparse_attn.ops.experts.plan import Plan, Problem
from sparse_attn.ops.grouped_linear.swap_ab import config as product
from sparse_attn.target import Target

BLOCK_M = 8
MOST_ROWS = 1024  # ids that a CTA looks through
MOST_EACH = 16  # rows of an expert in the mean, of which every BLOCK_M read its weights


def supports(problem: Problem, target: Target) -> Support:
    for name, one in (("gate_up", problem.gate_up), ("down", problem.down)):
        alone = product.supports(one._replace(rows=1), target)
        if not alone.ok:
            return alone._replace(reason=f"{name}: {alone.reason}")
    if problem.rows > MOST_ROWS:
        return no(f"ids: got {problem.rows}, allowed: at most {MOST_ROWS}")
    if problem.rows > MOST_EACH * problem.gate_up.groups:
        return slower(f"ids: got {problem.rows}, allowed: at most {MOST_EACH} an expert")
    return YES


def plan(problem: Problem, target: Target) -> Plan:
    return Plan(BLOCK_M, 128, 8, 64, 4, 1 if target.interpreted else 4)
