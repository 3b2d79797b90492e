"""The mixture-of-experts router with a selection bias and expert groups."""

from __future__ import annotations

import torch

from sparse_attn import checks
from sparse_attn.ops.router import op

LOGIT_DTYPES = (torch.float32, torch.bfloat16)
MAX_EXPERTS = 1024


def biased_grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalise: bool = True,
    routed_scale: float = 1.0,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ``top_k`` experts per token by biased score, weigh them by unbiased score.

    logits: fp32 or bf16 [tokens, experts], any strides, up-cast to fp32 before anything else. bias: fp32 [experts].
    score = sigmoid(logit); biased = score + bias. Experts form ``num_groups`` equal groups of neighbours; a group's
    score is the sum of its two largest biased scores; the ``top_groups`` best groups are kept, every other expert gets
    -inf. Weights are the scores of the chosen experts, divided by their sum when ``renormalise`` (a sum of 0 leaves
    zeros), times ``routed_scale``.

    Returns (weights fp32 [tokens, top_k], ids int32 [tokens, top_k]), in descending biased score. Ties go to the lowest
    group and the lowest expert. Ids of a row are always distinct and valid: a NaN logit or bias counts as -inf and,
    like a dropped expert, is chosen only where nothing else is left, with weight 0. Implementations may differ where
    two biased scores are closer than the rounding of the sigmoid.

    TypeError or ValueError: wrong dtypes, shapes or devices; experts outside [1, 1024]; num_groups not dividing them,
    or several groups of one expert; top_groups outside [1, num_groups]; top_k above the experts of the kept groups.
    Source: DeepSeek-V3's gate, as in transformers 5.17 and vLLM 0.25 (-inf for dropped groups).
    """
    checks.check_dtype("logits", logits, LOGIT_DTYPES)
    checks.check_rank("logits", logits, 2)
    experts = logits.shape[1]
    checks.check_dtype("bias", bias, (torch.float32,))
    checks.check_shape("bias", bias, (experts,), "[experts]")
    checks.check_same_device(logits=logits, bias=bias)
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"logits: got {experts} experts, allowed: 1 to {MAX_EXPERTS}")
    if num_groups < 1 or experts % num_groups or (num_groups > 1 and experts // num_groups < 2):
        raise ValueError(f"num_groups: got {num_groups}, allowed: 1, or divisors of {experts} with groups of 2 or more")
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"top_groups: got {top_groups}, allowed: 1 to {num_groups}")
    if not 1 <= top_k <= experts // num_groups * top_groups:
        raise ValueError(f"top_k: got {top_k}, allowed: 1 to {experts // num_groups * top_groups}")
    return op.biased_grouped_topk(logits, bias, top_k, num_groups, top_groups, renormalise, routed_scale, impl)
