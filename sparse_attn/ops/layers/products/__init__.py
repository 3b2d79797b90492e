"""Products with weights that stay packed: a linear layer, one weight for each group of rows, and routed experts.

Operators take codes as bytes, e4m3 too; of the layout "plain" they are values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparse_attn.framework import checks
from sparse_attn.framework.registration import define_op
from sparse_attn.ops.layers.products import dispatch, fake, reference
from sparse_attn.ops.layers.products.problem import PLAIN
from sparse_attn.weight_layout import (
    CODE_DTYPE,
    SCALE_DTYPE,
    PackedWeight,
    Weight,
    packed_weight,
    parse_weight_layout,
    weight_shape,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLAIN_DTYPES = (*DTYPES, torch.float64)
ACTIVATIONS = ("exact", "fp8")
_LINEAR, _EXPERTS = checks.Guard(), checks.Guard()


def _launchers():
    from sparse_attn.ops.layers.products import launch

    return launch


_grouped_linear_fp8 = define_op(
    "grouped_linear_fp8",
    "(Tensor rows, Tensor? ends, Tensor codes, Tensor scales, str layout, bool batch_invariant, str impl) -> Tensor",
    fake=fake.grouped_linear,
    reference=reference.grouped_linear_fp8,
    rules=reference.rules_of_grouped_linear,
    launch=lambda: _launchers().grouped_linear_fp8,
    kernels=dispatch.FP8_KERNELS,
)
_grouped_linear = define_op(
    "grouped_linear",
    "(Tensor rows, Tensor? ends, Tensor codes, Tensor? scales, str layout, bool batch_invariant, str impl) -> Tensor",
    fake=fake.grouped_linear,
    reference=reference.grouped_linear,
    rules=reference.rules_of_grouped_linear,
    launch=lambda: _launchers().grouped_linear,
    kernels=dispatch.KERNELS,
)
_packed_experts = define_op(
    "packed_experts",
    "(Tensor x, Tensor weights, Tensor ids, Tensor gate_up, Tensor gate_up_scales, str gate_up_layout, Tensor down, "
    "Tensor down_scales, str down_layout, float? clamp, int num_experts, str activations, bool batch_invariant, "
    "str impl) -> Tensor",
    fake=fake.packed_experts,
    reference=reference.packed_experts,
    rules=reference.rules_of_packed_experts,
    launch=lambda: _launchers().packed_experts,
    kernels=dispatch.EXPERTS_KERNELS,
)


def linear(
    x: torch.Tensor,
    weight: Weight,
    *,
    activations: str = "exact",
    batch_invariant: bool = False,
    impl: str = "auto",
) -> torch.Tensor:
    """x times the transpose of a weight: [..., columns] -> [..., rows], in x's dtype.

    Of a packed weight no expanded copy is kept; grouped_linear says how products are rounded, and what is refused.

    Args:
        x: bf16, fp16 or fp32 [..., columns]; fp64 with a plain weight.
        weight: [rows, columns], a PackedWeight or a plain tensor in x's dtype, for which this is
            torch.nn.functional.linear.
        activations: see grouped_linear; "exact" for a plain weight.
        batch_invariant: see grouped_linear, which then multiplies by plain weights, too; not for fp64.
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        [..., rows] in x's dtype.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if not isinstance(weight, PackedWeight):
        if not (  # a glance, for a step has dozens of these
            isinstance(x, torch.Tensor)
            and isinstance(weight, torch.Tensor)
            and weight.dtype == x.dtype in PLAIN_DTYPES
            and weight.dim() == 2
            and weight.device == x.device
            and x.shape[-1:] == weight.shape[1:]
            and activations == "exact"
        ):
            _check_plain(x, weight, activations)
        if not batch_invariant:
            return F.linear(x, weight)
    checks.check_dtype("x", x, PLAIN_DTYPES)
    entry: Weight = weight.unsqueeze(0) if isinstance(weight, torch.Tensor) else _entry(weight)
    rows = x.reshape(-1, x.shape[-1])
    out = grouped_linear(rows, None, entry, activations=activations, batch_invariant=batch_invariant, impl=impl)
    return out.view(*x.shape[:-1], weight_shape(entry)[1])


def _check_plain(x: torch.Tensor, weight: torch.Tensor, activations: str) -> None:
    checks.check_dtype("x", x, PLAIN_DTYPES)
    if activations != "exact":
        raise ValueError(f"activations: got {activations!r}, allowed: 'exact' for a plain weight")
    checks.check_dtype("weight", weight, (x.dtype,))
    checks.check_rank("weight", weight, 2)
    checks.check_same_device(x=x, weight=weight)
    if x.shape[-1:] != weight.shape[1:]:
        raise ValueError(f"x: got shape {list(x.shape)}, allowed: [..., {weight.shape[1]}] (columns of the weight)")


def _entry(weight: PackedWeight) -> PackedWeight:
    return PackedWeight(weight.codes.unsqueeze(0), weight.scales.unsqueeze(0), weight.layout)


def grouped_linear(
    rows: torch.Tensor,
    ends: torch.Tensor | None,
    weight: Weight,
    *,
    activations: str = "exact",
    batch_invariant: bool = False,
    impl: str = "auto",
) -> torch.Tensor:
    """Each group of rows times the transpose of a weight of its own, such as an expert's.

    A row costs its own group's weight: of a group without rows nothing is read. Codes are exact in every dtype of rows.
    Products of codes are added up in fp32 within a scale block, or a part of it, that sum is multiplied by the block's
    scale in fp32, and blocks are added up in fp32. Where a scale is a power of two, values may be scaled first, which
    is as exact in bf16 down to 2^-133. NaN in a code, a scale or a row gives NaN. On a GPU nothing waits for the host,
    so a step can be captured. How sums are split depends on n. On Hopper many rows are multiplied by codes that were
    expanded to bf16, at most 64 MiB of them in scratch at a time.

    A weight that is changed in place: on Hopper products of up to 1024 rows load codes before the launch in front has
    ended. Between the change and the product launch a kernel of torch's, or synchronise.

    Source: the products of DeepSeek-V3 and V4 without quantised activations (W8A16, W4A16). Layouts:
    sparse_attn.weight_layout.

    Args:
        rows: bf16, fp16 or fp32 [n, columns], any strides.
        ends: int32 [groups], ascending; group g has rows [ends[g - 1], ends[g]), the first one from 0 on. None: one
            group of all rows. Ends are clamped to n; rows behind the last end come out 0.
        weight: [groups, outputs, columns], a PackedWeight or a plain tensor in the dtype of rows.
        activations: "exact", or "fp8" (W8A8, W4A8), which quantises rows to e4m3 first, with a power of two for every
            128 columns that brings their largest magnitude to 448 at most: a value is off by 2^-4 of itself at most, or
            by 2^-9 times the power of two where it is small; infinities become NaN. For packed weights whose scale
            blocks have multiples of 32 columns. Products of a block, of 128 columns at most, are added up as the fp8
            units do, which drop what lies 13 bits below the largest of a sum.
        batch_invariant: a row's bits depend on its own values and its group's weight, on nothing else: a kernel and its
            splits are the same for any n. It costs time where they do not suit n.
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        [n, outputs] in the dtype of rows.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or devices; scale blocks whose columns are no multiple of 16.
    """
    if new := _LINEAR.new(rows, ends, weight, activations):
        _check_grouped(rows, ends, weight, activations)
        _LINEAR.passed(new)
    if not isinstance(weight, PackedWeight):
        return _grouped_linear(rows, ends, weight, None, PLAIN, batch_invariant, impl)
    op = _grouped_linear if activations == "exact" else _grouped_linear_fp8
    return op(rows, ends, weight.codes.view(torch.uint8), weight.scales, weight.layout, batch_invariant, impl)


def _check_grouped(rows: torch.Tensor, ends: torch.Tensor | None, weight: Weight, activations: str) -> None:
    checks.check_dtype("rows", rows, DTYPES)
    checks.check_rank("rows", rows, 2)
    checks.check_choice("activations", activations, ACTIVATIONS)
    if isinstance(weight, PackedWeight):
        codes, scales, layout = weight
        width = parse_weight_layout(layout).block[1]
        if width % 16:
            raise ValueError(f"weight: got scale blocks of {width} columns, allowed: multiples of 16")
    else:
        checks.check_dtype("weight", weight, (rows.dtype,))
        codes, scales, layout, width = weight, None, PLAIN, 1
    checks.check_rank("weight", codes, 3)
    groups, _, columns = weight_shape(weight)
    checks.check_at_least("weight groups", groups, 1)
    if scales is not None:
        packed_weight(codes, scales, parse_weight_layout(layout))
    checks.check_shape("rows", rows, (None, columns), "[rows, columns of the weight]")
    if ends is not None:
        checks.check_dtype("ends", ends, (torch.int32,))
        checks.check_shape("ends", ends, (groups,), "[groups of the weight]")
    elif groups != 1:
        raise ValueError(f"ends: got None, allowed: int32 [{groups}], or a weight of one group (got {groups})")
    checks.check_same_device(**{"rows": rows, "ends": ends, "weight": codes, "weight scales": scales})
    if activations == "fp8" and width % 32:  # a plain weight, too
        raise ValueError(f"weight: got {layout}, allowed: scale blocks of multiples of 32 columns for fp8 activations")


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

    Products are rounded as grouped_linear says; silu(gate) * up is rounded to the dtype of x, and so is the sum; the k
    terms of a token are added in fp32, in order. On a GPU nothing waits for the host.

    Source: the experts of DeepSeek-V3 and V4 (W8A16, W4A16).

    Args:
        x: bf16, fp16 or fp32 [tokens, hidden].
        weights: fp32 [tokens, k].
        ids: int32 [tokens, k], an expert each; one outside of the experts, such as another rank's, adds nothing.
        gate_up: [experts, 2 * intermediate, hidden], gate rows first.
        down: [experts, hidden, intermediate].
        clamp: 0 or more; gates are bounded from above by it, ups both ways, before silu(gate) * up; None: unbounded.
        num_experts: of how many experts ids are, other ranks' among them, so that kernels are chosen by the ids that
            these ones have in the mean; None: of these alone.
        activations: "fp8" quantises x, and what is between the products, as grouped_linear does (W8A8, W4A8): either is
            off by up to 2^-4 of itself, or 2^-17 of the largest of its 128 columns, on Hopper of its row beside MXFP4
            weights. On an H200 256 MXFP4 experts, 6 a token, are 1.4 times as fast as exact ones at 4096 tokens, and
            1.3 times as fast at 512; 256 e4m3 ones, 8 a token, 1.6 and 1.1 times. With it, columns of MXFP4 weights
            whose scale is below 2^-11 of the largest of their 256 may count as 0.
        batch_invariant: a token's bits depend on no other token. Kernels for few tokens are so anyway; with it more
            tokens go through them, some at a time.
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        [tokens, hidden] in the dtype of x.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or devices; what grouped_linear refuses.
    """
    if new := _EXPERTS.new(x, weights, ids, gate_up, down, clamp, num_experts, activations):
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
        if num_experts is not None:
            checks.check_at_least("num_experts", num_experts, experts)
        if tuple(weight_shape(gate_up)) != (experts, 2 * intermediate, hidden):
            raise ValueError(
                f"gate_up: got shape {list(weight_shape(gate_up))}, allowed: {[experts, 2 * intermediate, hidden]} "
                "(experts, twice down's columns, down's rows)"
            )
        checks.check_shape("x", x, (ids.shape[0], hidden), "[tokens, rows of down]")
        parts = {
            f"{name}.{part}": getattr(weight, part)
            for name, weight in (("gate_up", gate_up), ("down", down))
            for part in ("codes", "scales")
        }
        checks.check_same_device(x=x, weights=weights, ids=ids, **parts)
        _EXPERTS.passed(new)
    return _packed_experts(
        x,
        weights,
        ids,
        gate_up.codes.view(torch.uint8),
        gate_up.scales,
        gate_up.layout,
        down.codes.view(torch.uint8),
        down.scales,
        down.layout,
        clamp,
        down.codes.shape[0] if num_experts is None else num_experts,
        activations,
        batch_invariant,
        impl,
    )


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
