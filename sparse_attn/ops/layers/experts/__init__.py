"""Routed experts whose weights stay packed: each token through its own experts, and their weighted sum."""

from __future__ import annotations

import torch

from sparse_attn.framework import checks
from sparse_attn.ops.layers.experts import op
from sparse_attn.weight_layout import CODE_DTYPE, SCALE_DTYPE, PackedWeight, parse_weight_layout, weight_shape

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS = ("exact", "fp8")


def packed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    *,
    clamp: float | None = None,
    num_experts: int | None = None,
    activations: str = "exact",
    batch_invariant: bool = False,
    impl: str = "auto",
) -> torch.Tensor:
    """Gated MLPs of the experts that a token is routed to, times the token's weights, summed.

    x: bf16, fp16 or fp32 [tokens, hidden]. weights: fp32 [tokens, k]. ids: int32 [tokens, k], an expert each; one
    outside of the experts, such as another rank's, adds nothing. gate_up: [experts, 2 * intermediate, hidden], gate
    rows first. down: [experts, hidden, intermediate]. clamp: 0 or more; gates are bounded from above by it, ups both
    ways, before silu(gate) * up; None: unbounded. num_experts: of how many experts ids are, other ranks' among them, so
    that kernels are chosen by the ids that these ones have in the mean; None: of these alone. activations: "fp8"
    quantises x, and what is between the products, as grouped_linear does (W8A8, W4A8): either is off by up to 2^-4 of
    itself, or 2^-17 of the largest of its 128 columns, on Hopper of its row beside MXFP4 weights. On an H200 256 MXFP4
    experts, 6 a token, are 1.4 times as fast as exact ones at 4096 tokens, and 1.3 times as fast at 512; 256 e4m3 ones,
    8 a token, 1.6 and 1.1 times. With it, columns of MXFP4 weights whose scale is below 2^-11 of the largest of their
    256 may count as 0.

    Returns [tokens, hidden] in the dtype of x. Products are rounded as ops.layers.linears says; silu(gate) * up is
    rounded to the dtype of x, and so is the sum; the k terms of a token are added in fp32, in order. On a GPU nothing
    waits for the host. batch_invariant: a token's bits depend on no other token. Kernels for few tokens are so anyway;
    with it more tokens go through them, some at a time.

    TypeError or ValueError: wrong dtypes, shapes or devices; what grouped_linear refuses. Source: the experts of
    DeepSeek-V3 and V4 (W8A16, W4A16).
    """
    checks.check_dtype("x", x, DTYPES)
    checks.check_rank("x", x, 2)
    checks.check_dtype("ids", ids, (torch.int32,))
    checks.check_rank("ids", ids, 2)
    checks.check_dtype("weights", weights, (torch.float32,))
    checks.check_shape("weights", weights, tuple(ids.shape), "[tokens, experts of a token] (those of ids)")
    checks.check_choice("activations", activations, ACTIVATIONS)
    if clamp is not None:
        checks.check_number("clamp", clamp)
        if not clamp >= 0:
            raise ValueError(f"clamp: got {clamp}, allowed: None, or 0 and more")
    for name, weight in (("gate_up", gate_up), ("down", down)):
        _check_weight(name, weight, 16 if activations == "exact" else 32)
    experts, hidden, intermediate = weight_shape(down)
    checks.check_at_least("down experts", experts, 1)
    num_experts = experts if num_experts is None else num_experts
    checks.check_at_least("num_experts", num_experts, experts)
    if tuple(weight_shape(gate_up)) != (experts, 2 * intermediate, hidden):
        raise ValueError(
            f"gate_up: got shape {list(weight_shape(gate_up))}, allowed: {[experts, 2 * intermediate, hidden]} "
            "(experts, twice down's columns, down's rows)"
        )
    checks.check_shape("x", x, (ids.shape[0], hidden), "[tokens, rows of down]")
    parts = {
        f"{name}.{part}": getattr(weight, part) for name, weight in (("gate_up", gate_up), ("down", down))
        for part in ("codes", "scales")
    }  # fmt: skip
    checks.check_same_device(x=x, weights=weights, ids=ids, **parts)
    return op.packed_experts(
        x, weights, ids, gate_up.codes.view(torch.uint8), gate_up.scales, gate_up.layout, down.codes.view(torch.uint8),
        down.scales, down.layout, clamp, num_experts, activations, batch_invariant, impl,
    )  # fmt: skip


def _check_weight(name: str, weight: PackedWeight, multiple: int) -> None:
    """multiple: of which scale blocks have columns."""
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"{name}: got {type(weight).__name__}, allowed: a PackedWeight")
    layout = parse_weight_layout(weight.layout)
    checks.check_dtype(f"{name}.codes", weight.codes, (CODE_DTYPE[layout.codes],))
    checks.check_dtype(f"{name}.scales", weight.scales, (SCALE_DTYPE[layout.scale],))
    checks.check_rank(f"{name}.codes", weight.codes, 3)
    if layout.block[1] % multiple:
        raise ValueError(f"{name}: got scale blocks of {layout.block[1]} columns, allowed: multiples of {multiple}")
    experts, rows, columns = weight_shape(weight)
    checks.check_shape(f"{name}.scales", weight.scales, (experts, *layout.grid(rows, columns)), "[experts, blocks]")
