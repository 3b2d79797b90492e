"""The mixture-of-experts router with a selection bias and expert groups."""

from __future__ import annotations

import torch

from sparse_attn.framework import checks
from sparse_attn.framework.debug import look
from sparse_attn.framework.registration import define_op
from sparse_attn.framework.target import IMPLEMENTATIONS
from sparse_attn.ops.layers.router import fake, reference
from sparse_attn.ops.layers.router.reference import SCORES, hash_route

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ID_DTYPES = (torch.int64, torch.int32)
MAX_EXPERTS = 1024
_BIASED, _HASHED = checks.Guard(), checks.Guard()


def _launchers():
    from sparse_attn.ops.layers.router import launch

    return launch


_biased_grouped_topk = define_op(
    "biased_grouped_topk",
    "(Tensor logits, Tensor bias, int top_k, int num_groups, int top_groups, bool renormalise, float routed_scale, "
    "str score, str impl) -> (Tensor, Tensor)",
    fake=fake.biased_grouped_topk,
    reference=reference.biased_grouped_topk,
    rules=reference.rules_of_biased_grouped_topk,
    launch=lambda: _launchers().biased_grouped_topk,
)


def biased_grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalise: bool = True,
    routed_scale: float = 1.0,
    score: str = "sigmoid",
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ``top_k`` experts per token by biased score, and weigh them by unbiased score.

    biased = score + bias. Experts form ``num_groups`` equal groups of neighbours; a group's score is the sum of its two
    largest biased scores; the ``top_groups`` best groups are kept, every other expert gets -inf. Weights are the scores
    of the chosen experts, divided by their sum when ``renormalise`` (a sum of 0 leaves zeros), times ``routed_scale``.

    Ties go to the lowest group and the lowest expert. Ids of a row are always distinct and valid: a NaN logit or bias
    counts as -inf and, like a dropped expert, is chosen only where nothing else is left, with weight 0. Implementations
    may differ where two biased scores are closer than the rounding of the score. A row's bits do not depend on the
    others.

    Source: the gates of DeepSeek-V3 and V4, as in transformers 5.17 and vLLM 0.25 (-inf for dropped groups).

    Args:
        logits: fp32, bf16 or fp16 [tokens, experts], any strides, up-cast to fp32 before anything else.
        bias: fp32 [experts].
        top_k: experts of a token.
        num_groups: groups of experts.
        top_groups: groups that are kept.
        renormalise: divide weights by their sum.
        routed_scale: what weights are multiplied by.
        score: "sigmoid", or "sqrtsoftplus" for sqrt(log(1 + exp(logit))).
        impl: "auto", "reference" or "triton".

    Returns:
        (weights fp32 [tokens, top_k], ids int32 [tokens, top_k]), in descending biased score.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or devices; experts outside [1, 1024]; num_groups not dividing them, or several groups
            of one expert; top_groups outside [1, num_groups]; top_k above the experts of the kept groups.
    """
    if new := _BIASED.new(logits, bias, top_k, num_groups, top_groups, renormalise, routed_scale, score):
        checks.check_dtype("logits", logits, LOGIT_DTYPES)
        checks.check_rank("logits", logits, 2)
        experts = logits.shape[1]
        checks.check_dtype("bias", bias, (torch.float32,))
        checks.check_shape("bias", bias, (experts,), "[experts]")
        checks.check_same_device(logits=logits, bias=bias)
        if not 1 <= experts <= MAX_EXPERTS:
            raise ValueError(f"logits: got {experts} experts, allowed: 1 to {MAX_EXPERTS}")
        for name, value in (("top_k", top_k), ("num_groups", num_groups), ("top_groups", top_groups)):
            checks.check_integer(name, value)
        if num_groups < 1 or experts % num_groups or (num_groups > 1 and experts // num_groups < 2):
            raise ValueError(
                f"num_groups: got {num_groups}, allowed: 1, or divisors of {experts} with groups of 2 or more"
            )
        if not 1 <= top_groups <= num_groups:
            raise ValueError(f"top_groups: got {top_groups}, allowed: 1 to {num_groups}")
        if not 1 <= top_k <= experts // num_groups * top_groups:
            raise ValueError(f"top_k: got {top_k}, allowed: 1 to {experts // num_groups * top_groups}")
        checks.check_choice("score", score, SCORES)
        _BIASED.passed(new)
    return _biased_grouped_topk(logits, bias, top_k, num_groups, top_groups, renormalise, routed_scale, score, impl)


def hash_routed_experts(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    table: torch.Tensor,
    *,
    renormalise: bool = True,
    routed_scale: float = 1.0,
    score: str = "sigmoid",
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take each token's experts from a table by its id, and weigh them by score.

    Plain torch on every device. Source: DeepSeek-V4's hash-routed layers, as in transformers 5.17.

    Args:
        logits: fp32, bf16 or fp16 [tokens, experts], up-cast to fp32 first.
        tokens: int64 or int32 [tokens], ids. An id outside the vocabulary gives experts 0 with weight 0, and so does a
            table entry outside [0, experts).
        table: int64 or int32 [vocabulary, top_k].
        renormalise: see biased_grouped_topk.
        routed_scale: see biased_grouped_topk.
        score: see biased_grouped_topk.
        impl: "auto", "reference" or "triton".

    Returns:
        (weights fp32 [tokens, top_k], ids int32 [tokens, top_k]) in the table's order. Weights are the scores of these
        experts, renormalised and scaled as in biased_grouped_topk.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _HASHED.new(logits, tokens, table, renormalise, routed_scale, score, impl):
        checks.check_dtype("logits", logits, LOGIT_DTYPES)
        checks.check_rank("logits", logits, 2)
        checks.check_at_least("logits experts", logits.shape[1], 1)
        checks.check_dtype("tokens", tokens, ID_DTYPES)
        checks.check_shape("tokens", tokens, (logits.shape[0],), "[tokens]")
        checks.check_dtype("table", table, ID_DTYPES)
        checks.check_rank("table", table, 2)
        checks.check_at_least("table vocabulary", table.shape[0], 1)
        checks.check_same_device(logits=logits, tokens=tokens, table=table)
        checks.check_choice("score", score, SCORES)
        checks.check_choice("impl", impl, IMPLEMENTATIONS)
        checks.check_flag("renormalise", renormalise)
        checks.check_number("routed_scale", routed_scale)
        _HASHED.passed(new)
    look("hash_routed_experts", reference.rules_of_hash_routed_experts, logits, tokens, table)
    return hash_route(logits, tokens, table, renormalise, routed_scale, score)
