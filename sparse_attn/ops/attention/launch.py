"""The GPU implementation: one attention launch, and one merge where rows are split."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from sparse_attn import workspace
from sparse_attn.layout import LatentFp8Layout, PlainLayout, PlanarFp8Layout, parse_layout
from sparse_attn.ops.attention import config, kernels, shapes
from sparse_attn.target import target_of

LOG2_E = math.log2(math.e)
MERGED_ELEMENTS = 8192  # partial values a merging program holds


class Keys(NamedTuple):
    """A cache (or the rows of one block), its format, None for plain rows, and the indices into it."""

    cache: torch.Tensor
    layout: LatentFp8Layout | PlanarFp8Layout | None
    indices: torch.Tensor
    indptr: torch.Tensor


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
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = _hopper(q, kv, d_v)
    if chosen is not None:
        return _attend_on_hopper(q, kv, indices, indptr, scale, d_v, sink, chosen)
    return portable_prefill(q, kv, indices, indptr, scale, d_v, sink)


def portable_prefill(q, kv, indices, indptr, scale, d_v, sink):
    """sparse_attn_prefill by the kernel that every GPU has."""
    rows = kv.unsqueeze(0)  # one block that holds every row
    return _attend("sparse_attn_prefill", q, Keys(rows, None, indices, indptr), None, scale, d_v, sink)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    keys = Keys(cache, _fp8(layout), indices, indptr)
    d_v = shapes.value_dim(layout)
    if keys.layout is None and extra_cache is None and cache.is_contiguous() and cache.dtype == q.dtype:
        rows = cache.flatten(0, 1)
        chosen = _hopper(q, rows, d_v)
        if chosen is not None:
            return _attend_on_hopper(q, rows, indices, indptr, scale, d_v, sink, chosen)
    if isinstance(keys.layout, LatentFp8Layout) and extra_cache is None:
        chosen = _hopper_latents(q, keys)
        if chosen is not None:
            return _attend_latents_on_hopper(q, keys, scale, sink, chosen)
    extra = None
    if extra_cache is not None:
        extra = Keys(extra_cache, _fp8(extra_layout), extra_indices, extra_indptr)
    return _attend("sparse_attn_decode", q, keys, extra, scale, d_v, sink)


def merge_attn_states(
    outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    _, tokens, heads, d_v = outs.shape
    out, lse = shapes.allocate_output(tokens, heads, d_v, outs)
    _merge(outs, lses, sink, out, lse, LOG2_E)
    return out, lse


def _attend(who, q, keys, extra, scale, d_v, sink):
    tokens, heads, d_qk = q.shape
    out, lse = shapes.allocate_output(tokens, heads, d_v, q)
    if tokens == 0:
        return out, lse
    parts = [keys] if extra is None else [keys, extra]
    capacity = sum(part.indices.numel() for part in parts)
    kinds = {part.layout is not None for part in parts}
    launch = config.config(
        tokens, heads, d_qk, capacity, q.element_size(), kinds == {True}, target_of(q.device), mixed=len(kinds) > 1
    )
    split = launch.splits > 1
    views, _ = workspace.take(who, config.scratch(tokens, heads, d_v, launch.splits), q.device)
    to, to_lse = views if split else (out.unsqueeze(0), lse.unsqueeze(0))
    first, second = _arguments(keys, launch.block_k), _arguments(extra, launch.block_k)
    kernels.attend[(tokens, triton.cdiv(heads, launch.block_h), launch.splits)](
        q,
        *first.pointers,
        *second.pointers,
        sink,
        to,
        to_lse,
        heads,
        *first.sizes,
        *second.sizes,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        *first.strides,
        *second.strides,
        to.stride(0),
        to.stride(1),
        to.stride(2),
        to_lse.stride(0),
        to_lse.stride(1),
        D_V=d_v,
        D_REST=d_qk - d_v,
        PAD_V=_padded(d_v),
        PAD_REST=_padded(d_qk - d_v),
        SPLIT=split,
        BLOCK_H=launch.block_h,
        BLOCK_K=launch.block_k,
        STAGES=launch.num_stages,
        HOIST=launch.hoist,
        **first.constants,
        **{f"EXTRA_{name}": value for name, value in second.constants.items()},
        num_warps=launch.num_warps,
    )
    if split:
        _merge(to, to_lse, sink, out, lse, 1.0)
    return out, lse


def _hopper(q: torch.Tensor, rows: torch.Tensor, d_v: int) -> config.HopperConfig | None:
    chosen = config.hopper(*q.shape, d_v, q.dtype, target_of(q.device))
    return chosen if chosen is not None and _copies_whole_lines(q) and _copies_whole_lines(rows) else None


def _attend_on_hopper(q, kv, indices, indptr, scale, d_v, sink, chosen):
    from sparse_attn.ops.attention import hopper  # Gluon is looked for where it is used

    tokens, heads, d_qk = q.shape
    out, lse = shapes.allocate_output(tokens, heads, d_v, q)
    blocks = heads // config.HOPPER_HEADS
    hopper.attend[(tokens * blocks,)](
        q,
        kv,
        indices,
        indptr,
        lse if sink is None else sink,
        out,
        lse,
        kv.shape[0],
        indices.numel(),
        blocks,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        HAS_REST=d_qk > d_v,
        HAS_SINK=sink is not None,
        CONSUMER_REGISTERS=chosen.consumer_registers,
        PRODUCER_REGISTERS=chosen.producer_registers,
        num_warps=chosen.num_warps,
    )
    return out, lse


def _hopper_latents(q: torch.Tensor, keys: Keys) -> config.HopperConfig | None:
    cache, layout, indices, _ = keys
    if not _copies_whole_lines(q) or cache.data_ptr() % 16 or cache.stride(0) % 64 or layout.row % 16:
        return None
    return config.hopper_latents(q.shape[0], q.shape[1], indices.numel(), layout, q.dtype, target_of(q.device))


def _attend_latents_on_hopper(q, keys, scale, sink, chosen):
    from sparse_attn.ops.attention import hopper_latents

    (tokens, heads, _), (cache, layout, indices, indptr) = q.shape, keys
    out, lse = shapes.allocate_output(tokens, heads, layout.latent, q)
    if tokens == 0:
        return out, lse
    split = chosen.splits > 1
    views, _ = workspace.take(
        "sparse_attn_decode", config.scratch(tokens, heads, layout.latent, chosen.splits), q.device
    )
    to, to_lse = views if split else (out.unsqueeze(0), lse.unsqueeze(0))
    num_blocks, block_size, _ = cache.shape
    blocks = heads // config.HOPPER_HEADS
    with_sink = sink is not None and not split  # a split row's sink is counted when its shares are merged
    hopper_latents.attend[(tokens * blocks, chosen.splits)](
        q,
        cache,
        indices,
        indptr,
        sink if with_sink else to_lse,
        to,
        to_lse,
        num_blocks * block_size,
        block_size,
        indices.numel(),
        blocks,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        cache.stride(0) // 4,
        to.stride(0),
        to.stride(1),
        to.stride(2),
        to_lse.stride(0),
        to_lse.stride(1),
        LATENT=layout.latent,
        GROUP=layout.group,
        RECORD=layout.row,
        REST_AT=layout.rope_offset,
        PAGED=num_blocks > 1 and cache.stride(0) != block_size * cache.stride(1),
        HAS_SINK=with_sink,
        SPLIT=split,
        CONSUMER_REGISTERS=chosen.consumer_registers,
        PRODUCER_REGISTERS=chosen.producer_registers,
        num_warps=chosen.num_warps,
    )
    if split:
        _merge(to, to_lse, sink, out, lse, 1.0)
    return out, lse


def _copies_whole_lines(rows: torch.Tensor) -> bool:
    """Whether every row starts where a 16-byte copy may start, in terms the compiler is told of: pointers and strides."""
    return rows.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in rows.stride()[:-1])


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
        form["PAGED"] = num_blocks > 1 and cache.stride(0) != block_size * cache.stride(1)
    if isinstance(layout, LatentFp8Layout):
        form["SCALE_AT"] = layout.scale_offset
    form["SHORT"] = indices.numel() < block_k
    sizes = (num_blocks * block_size, block_size, indices.numel())
    return Arguments((cache, indices, indptr), sizes, cache.stride()[:2], form)


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _merge(outs, lses, sink, out, lse, to_log2):
    states, tokens, heads, d_v = outs.shape
    if tokens * heads == 0:
        return
    block_s = max(2, triton.next_power_of_2(states))
    block_d = min(max(64, MERGED_ELEMENTS // block_s), triton.next_power_of_2(d_v))
    kernels.merge[(tokens, heads, triton.cdiv(d_v, block_d))](
        outs,
        lses,
        sink,
        out,
        lse,
        states,
        d_v,
        to_log2,
        *outs.stride()[:3],
        *lses.stride(),
        *out.stride()[:2],
        lse.stride(0),
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        num_warps=4,
    )
