"""Launchers of the Hopper kernels. Gluon is imported where it is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from sparse_attn.device.grid import MOST
from sparse_attn.layout import PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.sparse.hopper.config import DecodeFp8Plan, PrefillBf16Plan, SwapAbPlan
from sparse_attn.ops.attention.sparse.hopper.constants import LOAD_BYTES
from sparse_attn.ops.attention.sparse.partials import LOG2_E, Output, outputs
from sparse_attn.ops.attention.sparse.problem import Call, KvCache
from sparse_attn.ops.attention.sparse.split_kv import Combine, Waves


def prefill_bf16(call: Call, plan: PrefillBf16Plan) -> None:
    """One persistent launch over plain rows."""
    from sparse_attn.ops.attention.sparse.hopper import prefill_bf16 as kernel

    q, keys, out = call.q, call.keys, call.out
    rows = keys.rows
    result = Output(out, call.lse, call.sink, max_logits=call.max_logits)
    kernel.attend[(plan.ctas,)](
        q,
        rows,
        keys.indices,
        keys.indptr,
        keys.lengths,
        *result.pointers,
        call.max_logits,
        call.counters,
        rows.shape[0],
        keys.indices.numel(),
        plan.tiles,
        plan.blocks,
        plan.launch_dependents,
        call.scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        rows.stride(0),
        *out.stride()[:2],
        call.lse.stride(0),
        HAS_ROPE=q.shape[2] > out.shape[2],
        HAS_SINK=result.has_sink,
        INF_LSE=call.inf_lse,
        CONSUMER_REGISTERS=plan.consumer_registers,
        PRODUCER_REGISTERS=plan.producer_registers,
        num_warps=plan.num_warps,
        launch_pdl=True,
    )


def decode_fp8(call: Call, plan: DecodeFp8Plan) -> None:
    """A launch for full waves and one for a tail, over fp8 caches, and the combine of split rows."""
    from sparse_attn.ops.attention.sparse.hopper import decode_fp8 as kernel

    results = outputs(call, plan.waves)
    # Two kernels do not fit in the instruction caches: where some rows are split and some are not, one serves both.
    whole_and_split = len({result.split for result in results}) > 1
    for waves, q, caches, result in _launches(call, plan.waves, results):
        split = None if whole_and_split else result.split
        sink, out, lse = result.pointers
        kernel.attend[(waves.rows * plan.blocks, waves.splits)](
            q,
            *caches.pointers,
            sink,
            out.view(call.q.dtype),
            lse,
            result.scale_partial,
            *caches.sizes,
            plan.blocks,
            plan.launch_dependents,
            call.scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            *caches.strides,
            *result.strides,
            LATENT=call.keys.layout.latent,
            **caches.constants,
            HAS_SINK=call.sink is not None and not split,
            SPLIT=split,
            INF_LSE=call.inf_lse and not split,
            CONSUMER_REGISTERS=plan.consumer_registers,
            PRODUCER_REGISTERS=plan.producer_registers,
            num_warps=plan.num_warps,
            launch_pdl=True,
        )
    if plan.combine is not None:
        combine(results, plan.combine, call.inf_lse)


def swap_ab(call: Call, plan: SwapAbPlan) -> None:
    """A launch for full waves and one for a tail, over plain rows or fp8 caches, and the combine of split rows."""
    from sparse_attn.ops.attention.sparse.hopper import swap_ab as kernel

    _, heads, d_qk = call.q.shape
    results = outputs(call, plan.waves)
    for waves, q, caches, result in _launches(call, plan.waves, results):
        kernel.attend[(waves.rows, waves.splits, plan.blocks)](
            q,
            *caches.pointers,
            *result.pointers,
            result.max_partial,
            heads,
            *caches.sizes,
            plan.launch_dependents,
            call.scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            *caches.strides,
            *result.strides,
            BLOCK_M=plan.block_m,
            HEAD_BLOCKS=plan.blocks > 1,
            HAS_ROPE=d_qk > call.out.shape[2],
            **caches.constants,
            HAS_SINK=result.has_sink,
            SPLIT=result.split,
            INF_LSE=call.inf_lse and not result.split,
            PRODUCER_REGISTERS=plan.producer_registers,
            LOADER_REGISTERS=plan.loader_registers,
            num_warps=plan.num_warps,
            launch_pdl=True,
        )
    if plan.combine is not None:
        combine(results, plan.combine, call.inf_lse)


def combine(results: list[Output], plan: Combine, inf_lse: bool = False) -> None:
    """Combine the partials of a step into its out, lse and max_logits: those of one launch, or of two whose rows follow
    each other. inf_lse: see Call.

    One launch does it, unless a batch-invariant step has more rows than a grid.
    """
    from sparse_attn.ops.attention.sparse.hopper import combine as kernel

    split = [result for result in results if result.split]
    first, last = split[0], split[-1]
    ctas, rows = plan.grid
    partials = [tensor for some in (first, last) for tensor in some.partials]
    out, lse, max_logits = first.out, first.lse, first.max_logits
    for begin in range(0, rows, MOST):
        if begin:
            partials = [None if partial is None else partial[:, MOST:] for partial in partials]
            out, lse, max_logits = out[MOST:], lse[MOST:], None if max_logits is None else max_logits[MOST:]
        kernel.combine[(ctas, min(rows - begin, MOST))](
            *partials,
            first.lse if first.sink is None else first.sink,
            out,
            lse,
            max_logits,
            first.lse.shape[0],
            first.out_partial.shape[0],
            last.out_partial.shape[0],
            BLOCK_S=plan.block_s,
            BLOCK_M=plan.block_m,
            LANES=plan.lanes,
            SCALED=first.scaled,
            HAS_TAIL=len(split) > 1,
            HAS_SINK=first.sink is not None,
            INF_LSE=inf_lse,
            num_warps=2 * plan.lanes,
            launch_pdl=True,
        )


class Caches(NamedTuple):
    """A kernel's arguments for one cache or two: run-time ones in the order of its parameters, constants by name."""

    pointers: tuple[torch.Tensor | None, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    constants: dict[str, int | bool]


def _launches(
    call: Call, steps: tuple[Waves, ...], results: list[Output]
) -> Iterator[tuple[Waves, torch.Tensor, Caches, Output]]:
    """(waves, their queries, their keys, where they are written)"""
    for waves, result in zip(steps, results):
        if waves.rows == call.q.shape[0]:
            yield waves, call.q, _caches(call.keys, call.extra), result
            continue
        end = waves.first + waves.rows
        bounds = slice(waves.first, end + 1)
        extra = None if call.extra is None else _bounded(call.extra, bounds)
        yield waves, call.q[waves.first : end], _caches(_bounded(call.keys, bounds), extra), result


def _bounded(keys: KvCache, bounds: slice) -> KvCache:
    """Of some rows."""
    lengths = None if keys.lengths is None else keys.lengths[bounds.start : bounds.stop - 1]
    return keys._replace(indptr=keys.indptr[bounds], lengths=lengths)


def _caches(keys: KvCache, extra: KvCache | None) -> Caches:
    both = keys, keys if extra is None else extra
    layout = keys.layout
    form = dict(GROUP=0, TOKEN=0, SCALES=0, ROPE_OFFSET=0, PADDED_BLOCKS=False, HAS_EXTRA_CACHE=extra is not None)
    if not isinstance(layout, PlainLayout):
        form |= dict(GROUP=layout.group, TOKEN=layout.row, ROPE_OFFSET=layout.rope_offset, PADDED_BLOCKS=keys.padded)
    if isinstance(layout, PlanarFp8Layout):
        form |= dict(TOKEN=layout.token_bytes, SCALES=layout.scale_bytes, PADDED_BLOCKS=True)
    tensors = [some.rows if isinstance(layout, PlainLayout) else some.cache for some in both]
    return Caches(
        tuple(
            each for some, tensor in zip(both, tensors) for each in (tensor, some.indices, some.indptr, some.lengths)
        ),
        tuple(size for some, tensor in zip(both, tensors) for size in _sizes(some, tensor)),
        tuple(tensor.stride(0) * tensor.element_size() // LOAD_BYTES for tensor in tensors),
        form,
    )


def _sizes(keys: KvCache, cache: torch.Tensor) -> tuple[int, int, int]:
    """(slots, slots of a block, indices); a plain row is a block."""
    block_size = 1 if cache.dim() == 2 else cache.shape[1]
    return cache.shape[0] * block_size, block_size, keys.indices.numel()
