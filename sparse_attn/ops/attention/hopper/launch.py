"""Launchers of the Hopper kernels; of each also whether it takes a call, and with which configuration.

Gluon is looked for where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from sparse_attn import workspace
from sparse_attn.device.grid import MOST
from sparse_attn.layout import PlanarFp8Layout
from sparse_attn.ops.attention import config, shapes
from sparse_attn.ops.attention.combine_plan import Merge, leaves_room, merge_of
from sparse_attn.ops.attention.partials import LOG2_E, Output, outputs
from sparse_attn.ops.attention.problem import Keys, Step, are_apart
from sparse_attn.ops.attention.split_kv import Part
from sparse_attn.target import target_of


def choose_rows(q: torch.Tensor, keys: Keys, d_v: int, step: Step) -> config.HopperConfig | None:
    """For plain rows [num_rows, d_qk]."""
    if not (_asks(q) and _copies_whole_lines(keys.cache) and keys.cache.dtype == q.dtype):
        return None
    return config.hopper(step.tokens, *q.shape[1:], d_v, q.dtype, target_of(q.device))


def attend_rows(who, q, keys, scale, d_v, sink, chosen):
    from sparse_attn.ops.attention.hopper import prefill_bf16

    tokens, heads, d_qk = q.shape
    rows, _, indices, indptr = keys
    blocks = heads // config.HOPPER_HEADS
    items = tokens * blocks
    out, lse = shapes.allocate_output(tokens, heads, d_v, q)
    result = Output(out, lse, sink, [])
    _, handed_out = workspace.take(who, config.HANDED_OUT, q.device)
    num_sms = target_of(q.device).num_sms
    programs = min(items, num_sms)
    prefill_bf16.attend[(programs,)](
        q,
        rows,
        indices,
        indptr,
        *result.pointers,
        handed_out,
        rows.shape[0],
        indices.numel(),
        items,
        blocks,
        4 * programs <= 3 * num_sms,  # behind more, an early start costs many rows more than it spares
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        rows.stride(0),
        *out.stride()[:2],
        lse.stride(0),
        HAS_REST=d_qk > d_v,
        HAS_SINK=result.has_sink,
        CONSUMER_REGISTERS=chosen.consumer_registers,
        PRODUCER_REGISTERS=chosen.producer_registers,
        num_warps=chosen.num_warps,
        launch_pdl=True,
    )
    return out, lse


def choose_fp8(q: torch.Tensor, keys: Keys, extra: Keys | None, step: Step) -> config.HopperConfig | None:
    """For fp8 caches and whole blocks of heads."""
    if keys.layout is None or not (_asks(q) and _reads(keys, extra)):
        return None
    sizes = (step.tokens, q.shape[1], step.capacity)
    return config.hopper_fp8(*sizes, keys.layout, q.dtype, target_of(q.device), step.invariant)


def attend_fp8(who, q, keys, extra, scale, sink, chosen):
    from sparse_attn.ops.attention.hopper import decode_fp8

    tokens, heads, _ = q.shape
    blocks = heads // config.HOPPER_HEADS
    out, lse = shapes.allocate_output(tokens, heads, keys.layout.value_dim, q)
    results = outputs(who, out, lse, chosen.parts, sink, scaled=True)
    # Two kernels do not fit in the instruction caches: where some rows are split and some are not, one serves both.
    whole_and_split = len({result.split for result in results}) > 1
    for grid, rows, caches, result, early in _launches(Rows(q, keys, extra), chosen.parts, blocks, results):
        split = None if whole_and_split else result.split
        drain, to, to_lse = result.pointers
        decode_fp8.attend[grid](
            rows.q,
            *caches.pointers,
            drain,
            to.view(q.dtype),
            to_lse,
            result.scales,
            *caches.sizes,
            blocks,
            early,
            scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            *caches.strides,
            *result.strides,
            LATENT=keys.layout.latent,
            **caches.constants,
            HAS_SINK=sink is not None and not split,
            SPLIT=split,
            CONSUMER_REGISTERS=chosen.consumer_registers,
            PRODUCER_REGISTERS=chosen.producer_registers,
            num_warps=chosen.num_warps,
            launch_pdl=True,
        )
    merge_shares(results)
    return out, lse


def choose_few_heads(
    q: torch.Tensor, keys: Keys, extra: Keys | None, d_v: int, step: Step
) -> config.FewHeadsConfig | None:
    """For at most config.FEW_HEADS heads over plain rows [num_rows, d_qk] or fp8 caches."""
    if keys.layout is None and keys.cache.dtype != q.dtype or not (_asks(q) and _reads(keys, extra)):
        return None
    sizes = (step.tokens, *q.shape[1:], d_v, step.capacity)
    return config.hopper_few_heads(*sizes, keys.layout, q.dtype, target_of(q.device), step.invariant)


def attend_few_heads(who, q, keys, extra, scale, d_v, sink, chosen):
    from sparse_attn.ops.attention.hopper import swap_ab

    tokens, heads, d_qk = q.shape
    out, lse = shapes.allocate_output(tokens, heads, d_v, q)
    results = outputs(who, out, lse, chosen.parts, sink)
    for grid, rows, caches, result, early in _launches(Rows(q, keys, extra), chosen.parts, 1, results):
        swap_ab.attend[grid](
            rows.q,
            *caches.pointers,
            *result.pointers,
            heads,
            *caches.sizes,
            early,
            scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            *caches.strides,
            *result.strides,
            N=chosen.heads,
            HAS_REST=d_qk > d_v,
            **caches.constants,
            HAS_SINK=result.has_sink,
            SPLIT=result.split,
            PRODUCER_REGISTERS=chosen.producer_registers,
            ASKER_REGISTERS=chosen.asker_registers,
            num_warps=chosen.num_warps,
            launch_pdl=True,
        )
    merge_shares(results)
    return out, lse


def merge_shares(results: list[Output]) -> None:
    """What of a step is in shares into its (out, lse): one part, or two whose rows follow each other. In one launch,
    unless a batch-invariant step has more rows than fit."""
    from sparse_attn.ops.attention.hopper import combine

    split = [result for result in results if result.split]
    if not split:
        return
    first, last = split[0], split[-1]
    at_once, sharers, heads, _, (programs, rows) = _merge_of(split)
    shares = [tensor for part in (first, last) for tensor in (part.to, part.to_lse, part.scales)]
    out, lse = first.out, first.lse
    for begin in range(0, rows, MOST):
        if begin:
            shares = [share[:, MOST:] for share in shares]
            out, lse = out[MOST:], lse[MOST:]
        grid = programs, min(rows - begin, MOST)
        combine.combine[grid](
            *shares,
            first.lse if first.sink is None else first.sink,
            out,
            lse,
            first.lse.shape[0],
            first.to.shape[0],
            last.to.shape[0],
            BLOCK_S=at_once,
            BLOCK_M=heads,
            LANES=sharers,
            SCALED=first.scaled,
            HAS_TAIL=len(split) > 1,
            HAS_SINK=first.sink is not None,
            num_warps=2 * sharers,
            launch_pdl=True,
        )


def _merge_of(split: list[Output]) -> Merge:
    """How the shares of a step's ``split`` parts are merged."""
    tokens, heads = sum(part.lse.shape[0] for part in split), split[0].lse.shape[1]
    return merge_of(target_of(split[0].out.device), tokens, heads, *(part.to.shape[0] for part in split))


class Rows(NamedTuple):
    """What of a launch's inputs is by rows."""

    q: torch.Tensor
    keys: Keys
    extra: Keys | None

    def of(self, part: Part) -> Rows:
        """Those of ``part``."""
        if part.rows == self.q.shape[0]:
            return self
        here, bounds = slice(part.first, part.first + part.rows), slice(part.first, part.first + part.rows + 1)
        keys, extra = (
            None if some is None else some._replace(indptr=some.indptr[bounds]) for some in (self.keys, self.extra)
        )
        return Rows(self.q[here], keys, extra)


class Launch(NamedTuple):
    """What a part of a step is launched with. early: whether the next launch may start while this one runs."""

    grid: tuple[int, int]
    rows: Rows
    caches: Caches
    result: Output
    early: bool


def _launches(whole: Rows, parts: tuple[Part, ...], blocks: int, results: list[Output]) -> Iterator[Launch]:
    """Of each part, whose rows ``blocks`` programs share or a multiple."""
    target = target_of(whole.q.device)
    for part, result in zip(parts, results):
        rows, programs = whole.of(part), part.rows * blocks
        merge = _merge_of(results) if result.split and len(parts) == 1 else None
        early = merge is None or leaves_room(target, programs * part.splits, merge)
        yield Launch((programs, part.splits), rows, _caches(rows.keys, rows.extra), result, early)


class Caches(NamedTuple):
    """What a kernel is told of one cache or two: run-time arguments in the order of its parameters, constants by
    name."""

    pointers: tuple[torch.Tensor, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    constants: dict[str, int | bool]


def _caches(keys: Keys, extra: Keys | None) -> Caches:
    parts = keys, keys if extra is None else extra
    layout = keys.layout
    form = dict(GROUP=0, TOKEN=0, SCALES=0, REST_AT=0, PAGED=False, TWO=extra is not None)
    if layout is not None:
        form |= dict(GROUP=layout.group, TOKEN=layout.row, REST_AT=layout.rope_offset, PAGED=are_apart(keys.cache))
    if isinstance(layout, PlanarFp8Layout):
        form |= dict(TOKEN=layout.token_bytes, SCALES=layout.scale_bytes, PAGED=True)
    return Caches(
        tuple(tensor for part in parts for tensor in (part.cache, part.indices, part.indptr)),
        tuple(size for part in parts for size in _sizes(part)),
        tuple(_stride_bytes(part.cache) // config.HOPPER_UNIT for part in parts),
        form,
    )


def _sizes(keys: Keys) -> tuple[int, int, int]:
    """(slots, slots of a block, indices); a plain row is a block."""
    num_blocks = keys.cache.shape[0]
    block_size = 1 if keys.layout is None else keys.cache.shape[1]
    return num_blocks * block_size, block_size, keys.indices.numel()


def _asks(q: torch.Tensor) -> bool:
    """Whether queries can be copied, whose heads lie within 32-bit offsets."""
    return _copies_whole_lines(q) and (q.shape[1] - 1) * q.stride(1) < 2**31


def _reads(keys: Keys, extra: Keys | None) -> bool:
    """Whether the producers can read these caches: two of them planar and alike, blocks where 16-byte loads may start,
    records within 32-bit offsets of their block, in words."""
    if extra is not None and not (isinstance(keys.layout, PlanarFp8Layout) and extra.layout == keys.layout):
        return False
    return all(
        part.cache.numel() > 0
        and part.cache.data_ptr() % config.HOPPER_UNIT == 0
        and _stride_bytes(part.cache) % config.HOPPER_UNIT == 0
        and part.cache.shape[1:].numel() * part.cache.element_size() <= 2**33
        for part in ((keys,) if extra is None else (keys, extra))
    )


def _stride_bytes(cache: torch.Tensor) -> int:
    return cache.stride(0) * cache.element_size()


def _copies_whole_lines(rows: torch.Tensor) -> bool:
    """Whether every row starts where a 16-byte copy may start, in terms the compiler is told of: pointers and
    strides."""
    return rows.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in rows.stride()[:-1])
