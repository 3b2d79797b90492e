"""Products with weights that stay packed: a linear layer, and one weight for each group of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparse_attn.framework import checks
from sparse_attn.ops.layers.linears import op
from sparse_attn.ops.layers.linears.shapes import PLAIN, fits
from sparse_attn.weight_layout import PackedWeight, Weight, parse_weight_layout, weight_shape

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


ACTIVATIONS = ("exact", "fp8")


def linear(
    x: torch.Tensor,
    weight: Weight,
    *,
    activations: str = "exact",
    batch_invariant: bool = False,
    impl: str = "auto",
) -> torch.Tensor:
    """x times the transpose of a weight: [..., columns] -> [..., rows], in x's dtype.

    x: bf16, fp16 or fp32. weight: [rows, columns], a PackedWeight or a plain tensor in x's dtype, for which this is
    torch.nn.functional.linear. Of a packed weight no expanded copy is kept; grouped_linear says how products are
    rounded, and what is refused. batch_invariant: see grouped_linear, which then multiplies by plain weights, too; not
    for fp64.
    """
    checks.check_dtype("x", x, (*DTYPES, torch.float64))
    if not isinstance(weight, PackedWeight):
        if activations != "exact":
            raise ValueError(f"activations: got {activations!r}, allowed: 'exact' for a plain weight")
        checks.check_dtype("weight", weight, (x.dtype,))
        checks.check_rank("weight", weight, 2)
        checks.check_same_device(x=x, weight=weight)
        if x.shape[-1:] != weight.shape[1:]:
            raise ValueError(f"x: got shape {list(x.shape)}, allowed: [..., {weight.shape[1]}] (columns of the weight)")
        if not batch_invariant:
            return F.linear(x, weight)
    entry: Weight = weight.unsqueeze(0) if isinstance(weight, torch.Tensor) else _entry(weight)
    rows = x.reshape(-1, x.shape[-1])
    out = grouped_linear(rows, None, entry, activations=activations, batch_invariant=batch_invariant, impl=impl)
    return out.view(*x.shape[:-1], weight_shape(entry)[1])


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

    rows: bf16, fp16 or fp32 [n, columns], any strides. weight: [groups, outputs, columns], a PackedWeight or a plain
    tensor in the dtype of rows. ends: int32 [groups], ascending; group g has rows [ends[g - 1], ends[g]), the first one
    from 0 on. None: one group of all rows. Ends are clamped to n; rows behind the last end come out 0.

    Returns [n, outputs] in the dtype of rows. A row costs its own group's weight: of a group without rows nothing is
    read. Codes are exact in every dtype of rows. Products of codes are added up in fp32 within a scale block, or a part
    of it, that sum is multiplied by the block's scale in fp32, and blocks are added up in fp32. Where a scale is a
    power of two, values may be scaled first, which is as exact in bf16 down to 2^-133. NaN in a code, a scale or a row
    gives NaN. On a GPU nothing waits for the host, so a step can be captured. How sums are split depends on n. On
    Hopper many rows are multiplied by codes that were expanded to bf16, at most 64 MiB of them in scratch at a time.

    A weight that is changed in place: on Hopper products of up to 1024 rows load codes before the launch in front has
    ended. Between the change and the product launch a kernel of torch's, or synchronise.

    activations: "fp8" quantises rows to e4m3 first, with a power of two for every 128 columns that brings their largest
    magnitude to 448 at most: a value is off by 2^-4 of itself at most, or by 2^-9 times the power of two where it is
    small; infinities become NaN. For packed weights whose scale blocks have multiples of 32 columns. Products of a
    block, of 128 columns at most, are added up as the fp8 units do, which drop what lies 13 bits below the largest of a
    sum. (W8A8, W4A8)

    batch_invariant: a row's bits depend on its own values and its group's weight, on nothing else: a kernel
    and its splits are the same for any n. It costs time where they do not suit n.

    TypeError or ValueError: wrong dtypes, shapes or devices; scale blocks whose columns are no multiple of 16. Layouts:
    sparse_attn.weight_layout. Source: the products of DeepSeek-V3 and V4 without quantised activations (W8A16, W4A16).
    """
    checks.check_dtype("rows", rows, DTYPES)
    checks.check_rank("rows", rows, 2)
    checks.check_choice("activations", activations, ACTIVATIONS)
    if isinstance(weight, PackedWeight):
        codes, scales, layout = weight
        parsed = parse_weight_layout(layout)
        if parsed.block[1] % 16:
            raise ValueError(f"weight: got scale blocks of {parsed.block[1]} columns, allowed: multiples of 16")
    else:
        checks.check_dtype("weight", weight, (rows.dtype,))
        codes, scales, layout = weight, None, PLAIN
    checks.check_rank("weight", codes, 3)
    groups, _, columns = weight_shape(weight)
    checks.check_at_least("weight groups", groups, 1)
    if scales is not None:
        fits(codes, scales, layout)
        codes = codes.view(torch.uint8)
    checks.check_shape("rows", rows, (None, columns), "[rows, columns of the weight]")
    if ends is not None:
        checks.check_dtype("ends", ends, (torch.int32,))
        checks.check_shape("ends", ends, (groups,), "[groups of the weight]")
    elif groups != 1:
        raise ValueError(f"ends: got None, allowed: int32 [{groups}], or a weight of one group (got {groups})")
    checks.check_same_device(**{"rows": rows, "ends": ends, "weight": codes, "weight scales": scales})
    if activations == "fp8":
        if scales is None or parse_weight_layout(layout).block[1] % 32:
            raise ValueError(
                f"weight: got {layout}, allowed: scale blocks of multiples of 32 columns for fp8 activations"
            )
        return op.grouped_linear_fp8(rows, ends, codes, scales, layout, batch_invariant, impl)
    return op.grouped_linear(rows, ends, codes, scales, layout, batch_invariant, impl)
