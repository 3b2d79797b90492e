"""A rank's share of a model: what one of several GPUs holds of every layer.

Heads, routed experts, the vocabulary, and the inner width of dense MLPs are sharded evenly: whole heads (and groups
of heads of DeepSeek-V4), whole experts, rows of the embedding and of the head, rows and columns of dense MLPs.
Everything else lies on every rank: projections to and from latents, compressors, indexers, shared experts, norms,
gates, hyper-connections, caches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparse_attn.framework import checks
from sparse_attn.spec import CompressedSpec, Spec


def share_of(spec: Spec | CompressedSpec, ranks: int) -> Spec | CompressedSpec:
    """The spec of what one of ``ranks`` GPUs holds. Its forward runs, without the sums over ranks.

    A token takes as many of these experts as a rank computes for it on average, rounded up. The vocabulary is rounded
    up. ValueError where anything else cannot be sharded evenly.
    """
    checks.check_at_least("ranks", ranks, 1)
    if ranks == 1:
        return spec
    compressed, moe = isinstance(spec, CompressedSpec), spec.moe
    if isinstance(spec, CompressedSpec):
        inner = ("groups of heads", spec.o_groups)
    else:
        inner = ("dense MLP's values", spec.dense_intermediate_size)
    for name, size in (("heads", spec.num_heads), ("experts", moe.num_experts), inner):
        if size % ranks:
            raise ValueError(f"ranks: got {ranks}, allowed: a divisor of the {size} {name} of {spec.name}")
    experts, groups = moe.num_experts // ranks, 1 if compressed else moe.num_groups
    if experts % groups or (not compressed and experts // groups < 2):
        raise ValueError(
            f"ranks: got {ranks} for {moe.num_experts} experts of {spec.name}, allowed: equal parts of every group, "
            "two or more experts each"
        )
    reachable = experts if compressed else experts // groups * moe.top_groups
    taken = min(-(-moe.experts_per_token // ranks), reachable)
    common: dict[str, Any] = dict(
        vocab_size=-(-spec.vocab_size // ranks), num_heads=spec.num_heads // ranks,
        moe=replace(moe, num_experts=experts, experts_per_token=taken),
    )  # fmt: skip
    if isinstance(spec, CompressedSpec):
        return replace(spec, **common, o_groups=spec.o_groups // ranks)
    return replace(spec, **common, dense_intermediate_size=spec.dense_intermediate_size // ranks)
