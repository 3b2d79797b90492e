"""The GPU implementation: one attention launch, on Hopper one or two, and one that merges the rows that are split."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from sparse_attn.device import pdl
from sparse_attn.layout import LatentFp8Layout, PlainLayout, PlanarFp8Layout, parse_layout
from sparse_attn.ops.attention import config, shapes
from sparse_attn.ops.attention.hopper import launch as hopper_launch
from sparse_attn.ops.attention.partials import LOG2_E, merge, outputs
from sparse_attn.ops.attention.portable import kernels
from sparse_attn.ops.attention.problem import Keys, are_apart, step_of
from sparse_attn.ops.attention.split_kv import SPLIT, WHOLE, Part
from sparse_attn.target import target_of


class Arguments(NamedTuple):
    """What the kernel is told of one cache: run-time arguments in the order of its parameters, constants by name."""

    pointers: tuple[torch.Tensor | None, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    constants: dict[str, int | bool]


def sparse_attn_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    scale: float,
    d_v: int,
    sink: torch.Tensor | None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = Keys(kv, None, indices, indptr)
    step = step_of(q, rows, None, WHOLE if batch_invariant else None)
    done = _on_hopper("sparse_attn_prefill", q, rows, None, scale, d_v, sink, step)
    return done or portable_prefill(q, kv, indices, indptr, scale, d_v, sink, batch_invariant)


def portable_prefill(q, kv, indices, indptr, scale, d_v, sink, batch_invariant=False):
    """sparse_attn_prefill by the kernel that every GPU has."""
    rows = Keys(kv.unsqueeze(0), None, indices, indptr)  # one block that holds every row
    step = step_of(q, rows, None, WHOLE if batch_invariant else None)
    return _attend("sparse_attn_prefill", q, rows, None, scale, d_v, sink, step)


def sparse_attn_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    scale: float,
    layout: str,
    extra_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_indptr: torch.Tensor | None,
    extra_layout: str,
    sink: torch.Tensor | None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, extra, d_v = Keys(cache, _fp8(layout), indices, indptr), None, shapes.value_dim(layout)
    if extra_cache is not None:
        extra = Keys(extra_cache, _fp8(extra_layout), extra_indices, extra_indptr)
    done, step = None, step_of(q, keys, extra, SPLIT if batch_invariant else None)
    if keys.layout is not None:
        done = _on_hopper("sparse_attn_decode", q, keys, extra, scale, d_v, sink, step)
    elif extra is None and cache.is_contiguous():
        rows = keys._replace(cache=cache.flatten(0, 1))
        done = _on_hopper("sparse_attn_decode", q, rows, None, scale, d_v, sink, step)
    return done or portable_decode(q, keys, extra, scale, d_v, sink, batch_invariant)


def portable_decode(q, keys, extra, scale, d_v, sink, batch_invariant=False):
    """sparse_attn_decode by the kernel that every GPU has."""
    step = step_of(q, keys, extra, SPLIT if batch_invariant else None)
    return _attend("sparse_attn_decode", q, keys, extra, scale, d_v, sink, step)


def merge_attn_states(
    outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    _, tokens, heads, d_v = outs.shape
    out, lse = shapes.allocate_output(tokens, heads, d_v, outs)
    merge(outs, lses, sink, out, lse, LOG2_E)
    return out, lse


def _on_hopper(who, q, keys, extra, scale, d_v, sink, step) -> tuple[torch.Tensor, torch.Tensor] | None:
    """By a kernel of Hopper's own, over plain rows [num_rows, d_qk] or fp8 caches; None where none takes the call."""
    if not scale > 0:  # they look for a row's largest score before they scale it
        return None
    if chosen := hopper_launch.choose_few_heads(q, keys, extra, d_v, step):
        return hopper_launch.attend_few_heads(who, q, keys, extra, scale, d_v, sink, chosen)
    if chosen := hopper_launch.choose_fp8(q, keys, extra, step):
        return hopper_launch.attend_fp8(who, q, keys, extra, scale, sink, chosen)
    if keys.layout is None and (chosen := hopper_launch.choose_rows(q, keys, d_v, step)):
        return hopper_launch.attend_rows(who, q, keys, scale, d_v, sink, chosen)
    return None


def _attend(who, q, keys, extra, scale, d_v, sink, step):
    tokens, heads, d_qk = q.shape
    if tokens == 0:
        return shapes.allocate_output(tokens, heads, d_v, q)
    parts = (keys,) if extra is None else (keys, extra)
    kinds = {part.layout is not None for part in parts}
    apart = any(part.layout is None and are_apart(part.cache) for part in parts)
    target = target_of(q.device)
    launch = config.config(
        step.tokens, heads, d_qk, d_v, step.capacity, q.element_size(), kinds == {True}, target,
        mixed=len(kinds) > 1, apart=apart,
    )  # fmt: skip
    out, lse = shapes.allocate_output(tokens, heads, d_v, q)
    (result,) = outputs(who, out, lse, (Part(0, tokens, launch.splits),), sink)
    first, second = _arguments(keys, launch.block_k), _arguments(extra, launch.block_k)
    kernels.attend[(tokens, triton.cdiv(heads, launch.block_h), launch.splits)](
        q,
        *first.pointers,
        *second.pointers,
        sink,
        result.to,
        result.to_lse,
        heads,
        *first.sizes,
        *second.sizes,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        *first.strides,
        *second.strides,
        *result.strides,
        D_V=d_v,
        D_REST=d_qk - d_v,
        PAD_V=config.padded(d_v),
        PAD_REST=config.padded(d_qk - d_v) or 16,
        SPLIT=result.split,
        BLOCK_H=launch.block_h,
        BLOCK_K=launch.block_k,
        STAGES=launch.num_stages,
        HOIST=launch.hoist,
        **first.constants,
        **{f"EXTRA_{name}": value for name, value in second.constants.items()},
        num_warps=launch.num_warps,
        **pdl.launched(target),
    )
    if result.split:
        merge(result.to, result.to_lse, sink, out, lse, 1.0)
    return out, lse


def _fp8(layout: str) -> LatentFp8Layout | PlanarFp8Layout | None:
    kind = parse_layout(layout)
    return None if isinstance(kind, PlainLayout) else kind


def _arguments(keys: Keys | None, block_k: int) -> Arguments:
    form = dict(
        GROUP=0, SCALE_AT=0, REST_AT=0, TOKEN_BYTES=0, SCALE_BYTES=0, FNUZ=False, PAGED=False, SHORT=False
    )  # fmt: skip
    if keys is None:
        return Arguments((None, None, None), (0, 0, 0), (0, 0), form)
    cache, layout, indices, indptr = keys
    num_blocks, block_size, _ = cache.shape
    if layout is not None:
        form |= dict(GROUP=layout.group, REST_AT=layout.rope_offset, FNUZ=layout.flavour == "e4m3fnuz")
    if isinstance(layout, PlanarFp8Layout):
        form |= dict(TOKEN_BYTES=layout.token_bytes, SCALE_BYTES=layout.scale_bytes)
    else:
        form["PAGED"] = are_apart(cache)
    if isinstance(layout, LatentFp8Layout):
        form["SCALE_AT"] = layout.scale_offset
    form["SHORT"] = indices.numel() < block_k
    sizes = (num_blocks * block_size, block_size, indices.numel())
    return Arguments((cache, indices, indptr), sizes, cache.stride()[:2], form)
