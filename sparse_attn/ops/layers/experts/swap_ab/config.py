"""What the experts' swap-AB kernels support, and their tiles."""

from __future__ import annotations

import torch

from sparse_attn.framework.dispatch import YES, Support, find, no, slower
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.experts.plan import Plan, Problem
from sparse_attn.ops.layers.linears.dispatch import KERNELS
from sparse_attn.workspace import Buffer, Scratch

PRODUCT = find(KERNELS, "swap_ab")
BLOCK_M, BLOCK_N = 8, 64
MOST_ROWS = 1024  # ids that a CTA looks through
MOST_EACH, MOST_EACH_FP4 = 0.25, 0.5  # ids of an expert in the mean; more are sorted, which costs a launch


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
    most = MOST_EACH_FP4 if problem.gate_up.codes == "e2m1" else MOST_EACH
    if not problem.batch_invariant and problem.rows > most * problem.gate_up.groups:
        return slower(f"ids: got {problem.rows}, allowed: at most {most} an expert")
    return YES


def plan(problem: Problem, target: Target) -> Plan:
    first, second = (PRODUCT.plan(one._replace(rows=1), target).block_k for one in (problem.gate_up, problem.down))
    tokens, (hidden, intermediate) = tokens_at_once(problem), (problem.gate_up.columns, problem.down.columns)
    scratch = Scratch((
        Buffer("placed", (tokens, hidden), problem.gate_up.dtype),
        Buffer("inner", (tokens * problem.k, intermediate), problem.gate_up.dtype),
        Buffer("terms", (tokens * problem.k, hidden), torch.float32),
    ))  # fmt: skip
    num_stages = 1 if target.interpreted else 3
    return Plan(BLOCK_M, BLOCK_N, 4, first, BLOCK_N, 4, second, num_stages, scratch=scratch)


def tokens_at_once(problem: Problem) -> int:
    """As many as a CTA looks through: fewer than all only where it has to be batch-invariant."""
    return min(problem.tokens, max(1, MOST_ROWS // problem.k))
