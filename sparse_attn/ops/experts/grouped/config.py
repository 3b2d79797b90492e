"""Two grouped products take what each of them takes."""

from __future__ import annotations

from sparse_attn.dispatch import YES, Support
from sparse_attn.ops.experts.plan import Plan, Problem
from sparse_attn.target import Target


def supports(problem: Problem, target: Target) -> Support:
    return YES


def plan(problem: Problem, target: Target) -> Plan:
    return Plan()
