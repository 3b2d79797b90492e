"""Launch configuration of the step plan."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.framework.target import Target


@dataclass(frozen=True)
class StepPlanConfig:
    block_tokens: int = 64
    block_requests: int = 64
    num_warps: int = 4


def config(target: Target) -> StepPlanConfig:
    return StepPlanConfig()
