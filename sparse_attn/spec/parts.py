"""Parts that the specs of several architectures share."""

from __future__ import annotations

import math
from dataclasses import dataclass

INDEX_NORM_EPS = 1e-6  # of the index key's LayerNorm, whatever rms_norm_eps says
SCORES = ("sigmoid", "sqrtsoftplus")


@dataclass(frozen=True)
class YarnSpec:
    """Yarn's frequency ramp.

    Attributes:
        factor: how many times the context grew.
        original_max_position: tokens of the unscaled context.
        beta_fast: rotations over it from which a dimension keeps its frequency.
        beta_slow: rotations over it up to which a frequency is divided by the factor.
        attention_factor: multiplies cos and sin (1 wherever mscale equals mscale_all_dim).
        truncate: the ramp's ends are whole dimensions.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts chosen by scores plus bias, and shared experts every token takes.

    Attributes:
        num_experts: routed ones.
        experts_per_token: routed ones that a token takes.
        num_groups: groups of experts.
        top_groups: groups that a token's experts are of.
        routed_scale: what weights of routed experts are multiplied by.
        renormalise: divide these by their sum first.
        num_shared: experts that every token takes.
        intermediate_size: of an expert.
        score: what a gate logit becomes, "sigmoid" or "sqrtsoftplus".
        clamp: bound on the gate's (from above) and the up projection's (both ways) values before they are multiplied,
            in routed and shared experts; None: no bound.

    Raises:
        ValueError: another score.
    """

    num_experts: int
    experts_per_token: int
    num_groups: int
    top_groups: int
    routed_scale: float
    renormalise: bool
    num_shared: int
    intermediate_size: int
    score: str = "sigmoid"
    clamp: float | None = None

    def __post_init__(self):
        if self.score not in SCORES:
            raise ValueError(f"moe.score: got {self.score!r}, allowed: {', '.join(SCORES)}")


@dataclass(frozen=True)
class IndexSpec:
    """The lightning indexer.

    Attributes:
        num_heads: of its queries.
        head_dim: of its queries and keys.
        top_k: keys that a row selects.
        rope_interleaved: rotate pairs (2i, 2i + 1), else (i, i + R / 2).
        rope_start: first rotated dimension; the rotated width is the model's rope_dim.
        hadamard: transform queries and keys afterwards.
        norm_eps: of the keys' LayerNorm.
    """

    num_heads: int
    head_dim: int
    top_k: int
    rope_interleaved: bool
    rope_start: int = 0
    hadamard: bool = False
    norm_eps: float = INDEX_NORM_EPS

    @property
    def weight_scale(self) -> float:
        """What the per-head score weights are multiplied by."""
        return self.num_heads**-0.5 * self.head_dim**-0.5


def softmax_scale(qk_dim: int, yarn_factor: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """qk_dim^-0.5 times the square of yarn's m = 0.1 * mscale_all_dim * ln(factor) + 1.

    Args:
        qk_dim: width of an un-absorbed head.
        yarn_factor: how many times the context grew.
        mscale_all_dim: of the model's config; 0: no yarn.

    Returns:
        What scores are multiplied by before the softmax.
    """
    return qk_dim**-0.5 * yarn_mscale(yarn_factor, mscale_all_dim) ** 2


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def mscale_of(scale: float, qk_dim: int, yarn_factor: float) -> float:
    """The mscale_all_dim that softmax_scale makes ``scale`` of."""
    if yarn_factor <= 1:
        return 0.0
    return round((math.sqrt(scale * math.sqrt(qk_dim)) - 1) / (0.1 * math.log(yarn_factor)), 12)
