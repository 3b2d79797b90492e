"""Launchers of the kernels that every GPU has."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from sparse_attn.device import grid, pdl
from sparse_attn.framework.target import target_of
from sparse_attn.layout import LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.sparse.partials import LOG2_E, outputs
from sparse_attn.ops.attention.sparse.portable import kernels
from sparse_attn.ops.attention.sparse.portable import merge as merging
from sparse_attn.ops.attention.sparse.portable.config import PortablePlan, padded
from sparse_attn.ops.attention.sparse.problem import Call, KvCache

COMBINED_ELEMENTS = 8192  # partial values that a CTA holds
MERGED_STATES = 8  # that a CTA of a merge looks at together
MERGED_COLUMNS = 2048  # that it has at most
MERGED_BYTES = 16  # of a state and a thread, while a warp or more has some


class Arguments(NamedTuple):
    """What the kernel is told of one cache: run-time arguments in the order of its parameters, constants by name."""

    pointers: tuple[torch.Tensor | None, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    constants: dict[str, int | bool]


def attend(call: Call, plan: PortablePlan) -> None:
    """One launch, and where rows are split one more, which combines their partials."""
    q, sink, out = call.q, call.sink, call.out
    tokens, heads, d_qk = q.shape
    d_v = out.shape[2]
    (result,) = outputs(call, plan.waves)
    first, second = arguments(call.keys, plan.block_n), arguments(call.extra, plan.block_n)
    kernels.attend[(tokens, triton.cdiv(heads, plan.block_m), plan.splits)](
        q,
        *first.pointers,
        *second.pointers,
        sink,
        result.out_partial,
        result.lse_partial,
        result.max_partial,
        heads,
        *first.sizes,
        *second.sizes,
        call.scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        *first.strides,
        *second.strides,
        *result.strides,
        D_V=d_v,
        D_ROPE=d_qk - d_v,
        PAD_V=padded(d_v),
        PAD_ROPE=padded(d_qk - d_v) or 16,
        SPLIT=result.split,
        INF_LSE=call.inf_lse and not result.split,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        STAGES=plan.num_stages,
        HOIST=plan.hoist,
        **first.constants,
        **{f"EXTRA_{name}": value for name, value in second.constants.items()},
        num_warps=plan.num_warps,
        **pdl.launched(target_of(q.device)),
    )
    if result.split:
        partials = result.out_partial, result.lse_partial, result.max_partial
        combine(*partials, sink, out, call.lse, call.max_logits, 1.0, call.inf_lse)


def arguments(keys: KvCache | None, block_n: int) -> Arguments:
    form: dict[str, int | bool] = dict(
        GROUP=0, SCALE_OFFSET=0, ROPE_OFFSET=0, TOKEN_BYTES=0, SCALE_BYTES=0, FNUZ=False, PADDED_BLOCKS=False,
        SHORT=False,
    )  # fmt: skip
    if keys is None:
        return Arguments((None, None, None, None), (0, 0, 0), (0, 0), form)
    cache, layout, indices = keys.blocks, keys.layout, keys.indices
    num_blocks, block_size, _ = cache.shape
    if not isinstance(layout, PlainLayout):
        form |= dict(GROUP=layout.group, ROPE_OFFSET=layout.rope_offset, FNUZ=layout.flavour == "e4m3fnuz")
    if isinstance(layout, PlanarFp8Layout):
        form |= dict(TOKEN_BYTES=layout.token_bytes, SCALE_BYTES=layout.scale_bytes)
    else:
        form["PADDED_BLOCKS"] = keys.padded
    if isinstance(layout, LatentFp8Layout):
        form["SCALE_OFFSET"] = layout.scale_offset
    form["SHORT"] = indices.numel() < block_n
    sizes = (num_blocks * block_size, block_size, indices.numel())
    return Arguments((cache, indices, keys.indptr, keys.lengths), sizes, keys.strides, form)


def combine(
    outs: torch.Tensor,
    lses: torch.Tensor,
    maxima: torch.Tensor | None,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    max_logits: torch.Tensor | None,
    to_log2: float,
    inf_lse: bool = False,
) -> None:
    """States [states, tokens, heads, ...] into out, lse and, unless it is None, max_logits; ``to_log2`` times the
    states' lse is in base 2. inf_lse: see Call."""
    tokens, heads, d_v = out.shape
    if tokens * heads == 0:
        return
    if heads > grid.MOST:
        for some in grid.spans(heads):
            some_sink, some_maxima = (
                None if sink is None else sink[some],
                None if maxima is None else maxima[:, :, some],
            )
            some_largest = None if max_logits is None else max_logits[:, some]
            states = outs[:, :, some], lses[:, :, some], some_maxima
            combine(*states, some_sink, out[:, some], lse[:, some], some_largest, to_log2, inf_lse)
        return
    states = outs.shape[0]
    block_s = max(2, triton.next_power_of_2(states))
    block_d = min(max(64, COMBINED_ELEMENTS // block_s), triton.next_power_of_2(d_v))
    grid.check("outs d_v", d_v, block_d)
    kernels.combine[(tokens, heads, triton.cdiv(d_v, block_d))](
        outs,
        lses,
        maxima,
        sink,
        out,
        lse,
        max_logits,
        states,
        d_v,
        to_log2,
        *outs.stride()[:3],
        *lses.stride(),
        *out.stride()[:2],
        lse.stride(0),
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        INF_LSE=inf_lse,
        num_warps=4,
        **pdl.launched(target_of(out.device)),
    )


def merge(
    outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """States [states, tokens, heads, ...] into out and lse, all lse in natural log."""
    tokens, heads, d_v = out.shape
    if tokens * heads == 0:
        return
    block_d = min(triton.next_power_of_2(d_v), MERGED_COLUMNS)
    num_warps = min(max(block_d * outs.itemsize // (32 * MERGED_BYTES), 1), 16)
    grid.check("outs d_v", d_v, block_d)
    for some in grid.spans(heads):
        part, part_lse = out[:, some], lse[:, some]
        merging.merge[(tokens, part.shape[1], triton.cdiv(d_v, block_d))](
            outs[:, :, some], lses[:, :, some], None if sink is None else sink[some], part, part_lse,
            outs.shape[0], d_v, *outs.stride()[:3], *lses.stride(), *out.stride()[:2], lse.stride(0),
            STATES=MERGED_STATES, BLOCK_D=block_d, num_warps=num_warps, **pdl.launched(target_of(out.device)),
        )  # fmt: skip
