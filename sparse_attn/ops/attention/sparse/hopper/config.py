"""The Hopper kernels: what each supports, how it is launched, and its scratch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from sparse_attn.framework.dispatch import YES, Support, no, not_on, slower
from sparse_attn.framework.target import Target
from sparse_attn.layout import LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.sparse.hopper.constants import BLOCK_M, BLOCK_N, D_ROPE, D_V, LOAD_BYTES, SWAP_AB_HEADS
from sparse_attn.ops.attention.sparse.partials import scratch
from sparse_attn.ops.attention.sparse.problem import CacheFacts, Problem
from sparse_attn.ops.attention.sparse.split_kv import (
    PAIRS,
    TILES,
    Combine,
    CostModel,
    Waves,
    combine_of,
    may_start_early,
    waves_of,
)
from sparse_attn.workspace import Scratch, size_of

GROUPS = {LatentFp8Layout: (64, 128), PlanarFp8Layout: (64,)}  # codes to a scale
KNOWN_MULTIPLE = 16  # of which Triton tells the compiler
MOST_BLOCK_BYTES = 2**33  # the offset of a record in its block has 32 bits and counts words
HEADS_SPAN = 2**31  # offsets of heads have 32 bits
TILE_COUNTER = Scratch(counters=1)  # how many work tiles the persistent kernel's CTAs have taken


@dataclass(frozen=True)
class SwapAbPlan:
    """A CTA serves at most SWAP_AB_HEADS heads of a row.

    block_m: these, padded to what the matrix unit takes. blocks: CTAs for each row and split. waves: launched one after
    the other. launch_dependents: whether the next launch may start while this one runs. producer_registers: of a thread
    of the two warpgroups that produce tiles. loader_registers: of a thread of the one that loads fp8 records for them.
    The consumer gets the rest.
    """

    block_m: int
    blocks: int
    waves: tuple[Waves, ...]
    combine: Combine | None
    launch_dependents: bool
    producer_registers: int
    loader_registers: int
    scratch: Scratch
    num_warps: int = 4


@dataclass(frozen=True)
class DecodeFp8Plan:
    """A CTA serves BLOCK_M heads of a row.

    blocks: CTAs for each row and split. consumer_registers: of a thread of warpgroup 1; warpgroup 0 gets the rest.
    Others as SwapAbPlan's.
    """

    blocks: int
    waves: tuple[Waves, ...]
    combine: Combine | None
    launch_dependents: bool
    scratch: Scratch
    consumer_registers: int = 192
    producer_registers: int = 64
    num_warps: int = 4


@dataclass(frozen=True)
class PrefillBf16Plan:
    """``ctas`` take ``tiles`` work tiles from a counter; a work tile is BLOCK_M heads of a row.

    Others as DecodeFp8Plan's.
    """

    blocks: int
    tiles: int
    ctas: int
    launch_dependents: bool
    scratch: Scratch = TILE_COUNTER
    consumer_registers: int = 216
    producer_registers: int = 72
    num_warps: int = 4


Plan = SwapAbPlan | DecodeFp8Plan | PrefillBf16Plan


# --- what a kernel supports


def supports_swap_ab(problem: Problem, target: Target) -> Support:
    """Plain rows, fp8 latents, or one or two planar caches.

    Each block of heads reads all records anew. So where there are several and another kernel here can run the problem,
    this one is faster only while every tile of every row has an SM of its own.
    """
    plain = isinstance(problem.cache.layout, PlainLayout)
    support = _support(
        target,
        _scores(problem),
        _rows(problem) if plain else _records(problem),
        _queries(problem),
        *(_memory(cache) for cache in problem.caches),
    )
    if support.ok and _tiles(problem) > _most_tiles(problem, target):
        return slower(f"heads: got {problem.heads}, faster up to {SWAP_AB_HEADS}")
    return support


def supports_decode_fp8(problem: Problem, target: Target) -> Support:
    """Whole blocks of heads over fp8 latents, or one or two planar caches."""
    return _support(
        target,
        _scores(problem),
        _no_max_logits(problem),
        _records(problem),
        _whole_blocks_of_heads(problem),
        _queries(problem),
        *(_memory(cache) for cache in problem.caches),
    )


def supports_prefill_bf16(problem: Problem, target: Target) -> Support:
    """Whole blocks of heads over plain rows. No row is split, so a step needs a CTA for every third SM."""
    support = _support(
        target,
        _scores(problem),
        _rows(problem),
        _whole_blocks_of_heads(problem),
        _queries(problem),
        _copies(problem.cache),
    )
    rows, _ = problem.split_as
    blocks = problem.heads // BLOCK_M
    if support.ok and 3 * rows * blocks < target.num_sms:
        return slower(f"tokens: got {rows}, faster from {-(-target.num_sms // (3 * blocks))}")
    return support


def _support(target: Target, *refusals: Iterator[str]) -> Support:
    if not target.is_hopper:
        return not_on(target, "sm_90")
    reason = next(chain(*refusals), None)
    return YES if reason is None else no(reason)


def _scores(problem: Problem) -> Iterator[str]:
    if problem.dtype != torch.bfloat16:
        yield f"q dtype: got {problem.dtype}, allowed: torch.bfloat16"
    if not problem.scale > 0:  # the maximum of a row is taken before scores are scaled
        yield f"scale: got {problem.scale}, allowed: above 0"


def _no_max_logits(problem: Problem) -> Iterator[str]:
    if problem.max_logits:
        yield "max_logits: got a tensor, allowed: None"


def _whole_blocks_of_heads(problem: Problem) -> Iterator[str]:
    if problem.heads % BLOCK_M:
        yield f"heads: got {problem.heads}, allowed: a multiple of {BLOCK_M}"


def _rows(problem: Problem) -> Iterator[str]:
    """Plain rows, in one cache, side by side."""
    name, layout = problem.cache.name, problem.cache.layout
    if not isinstance(layout, PlainLayout):
        yield f"layout: got {layout.name}, allowed: plain rows"
    if layout.dtype != problem.dtype:
        yield f"{name} dtype: got {layout.dtype}, allowed: {problem.dtype}, as q has"
    if problem.d_v != D_V:
        yield f"d_v: got {problem.d_v}, allowed: {D_V}"
    if problem.d_rope not in (0, D_ROPE):
        yield f"d_qk: got {problem.d_qk}, allowed: {D_V} or {D_V + D_ROPE}"
    if problem.extra is not None:
        yield f"extra_cache: got one beside plain rows, allowed: beside {_planar()} of the same layout"
    if problem.cache.padded:
        packed = problem.cache.block_size * problem.cache.row_stride
        yield f"{name} block stride: got {problem.cache.block_stride}, allowed: {packed}, plain blocks side by side"


def _records(problem: Problem) -> Iterator[str]:
    """fp8 records that the producers can read."""
    layout, extra = problem.cache.layout, problem.extra
    if isinstance(layout, PlainLayout):
        yield f"layout: got {layout.name}, allowed: fp8 records"
        return
    planar = isinstance(layout, PlanarFp8Layout)
    if (layout.latent, layout.rope) != (D_V - D_ROPE if planar else D_V, D_ROPE):
        yield f"layout: got {layout.name}, allowed: {_latent()} or {_planar()}"
    if layout.flavour != "e4m3fn":
        yield f"layout flavour: got {layout.flavour}, allowed: e4m3fn"
    if layout.group not in GROUPS[type(layout)]:
        groups = " or ".join(map(str, GROUPS[type(layout)]))
        yield f"layout group: got {layout.group}, allowed: {groups} of {'planar' if planar else 'latent'}_fp8"
    if extra is not None and not planar:
        yield f"extra_cache: got one beside {layout.name}, allowed: beside {_planar()} of the same layout"
    if extra is not None and extra.layout != layout:
        yield f"extra_layout: got {extra.layout.name}, allowed: {layout.name}, as the first cache has"


def _latent() -> str:
    return f"latent_fp8/{D_V}+{D_ROPE}"


def _planar() -> str:
    return f"planar_fp8/{D_V - D_ROPE}+{D_ROPE}"


def _queries(problem: Problem) -> Iterator[str]:
    """Queries are copied by 16 bytes, which needs multiples that the compiler knows, and by 32-bit offsets of heads."""
    if problem.q_base:
        yield f"q address: got {problem.q_base} bytes behind a multiple of {LOAD_BYTES}, allowed: 0"
    if any(stride % KNOWN_MULTIPLE for stride in problem.q_strides):
        yield f"q strides: got {problem.q_strides}, allowed: multiples of {KNOWN_MULTIPLE}"
    span = (problem.heads - 1) * problem.q_strides[1]
    if span >= HEADS_SPAN:
        yield f"q heads: got a span of {span} values, allowed: at most {HEADS_SPAN - 1}"


def _memory(cache: CacheFacts) -> Iterator[str]:
    """Records are loaded by 16 bytes, at 32-bit offsets in their block; a plain row is a block."""
    name, element = cache.name, cache.layout.dtype.itemsize
    kind, stride, size = ("block", cache.block_stride, cache.block_size) if cache.fp8 else ("row", cache.row_stride, 1)
    if not cache.slots:
        yield f"{name} slots: got 0, allowed: at least 1"
    if cache.base:
        yield f"{name} address: got {cache.base} bytes behind a multiple of {LOAD_BYTES}, allowed: 0"
    if stride * element % LOAD_BYTES:
        yield f"{name} {kind} stride: got {stride * element} bytes, allowed: a multiple of {LOAD_BYTES}"
    nbytes = size * cache.layout.row * element
    if nbytes > MOST_BLOCK_BYTES:
        yield f"{name} {kind}: got {nbytes} bytes, allowed: at most {MOST_BLOCK_BYTES} bytes"


def _copies(cache: CacheFacts) -> Iterator[str]:
    """Plain rows are copied by 16 bytes, which needs multiples that the compiler knows."""
    if cache.base:
        yield f"{cache.name} address: got {cache.base} bytes behind a multiple of {LOAD_BYTES}, allowed: 0"
    if cache.row_stride % KNOWN_MULTIPLE:
        yield f"{cache.name} row stride: got {cache.row_stride}, allowed: a multiple of {KNOWN_MULTIPLE}"


# --- how it is launched


def plan_swap_ab(problem: Problem, target: Target) -> SwapAbPlan:
    waves, blocks = waves_of(*_swap_ab_units(problem, target)), _swap_ab_blocks(problem)
    block_m = 16 if problem.heads <= 16 else SWAP_AB_HEADS
    producers = 136 if not problem.cache.fp8 else 112 if block_m == 16 else 104
    return SwapAbPlan(
        block_m, blocks, waves, *_combined(problem, waves, blocks, target),
        producer_registers=producers, loader_registers=96 if block_m == 16 else 80,
        scratch=scratch(waves, problem.heads, D_V, max_logits=problem.max_logits),
    )  # fmt: skip


def plan_decode_fp8(problem: Problem, target: Target) -> DecodeFp8Plan:
    waves, blocks = waves_of(*_decode_fp8_units(problem, target)), problem.heads // BLOCK_M
    combined = _combined(problem, waves, blocks, target)
    return DecodeFp8Plan(blocks, waves, *combined, scratch=scratch(waves, problem.heads, D_V, scaled=True))


def plan_prefill_bf16(problem: Problem, target: Target) -> PrefillBf16Plan:
    blocks = problem.heads // BLOCK_M
    tiles = problem.tokens * blocks
    ctas = min(tiles, target.num_sms)
    # With more of them an early start costs steps of many rows more than it spares.
    return PrefillBf16Plan(blocks, tiles, ctas, launch_dependents=4 * ctas <= 3 * target.num_sms)


Units = tuple[CostModel, int, int, int, int, int | None]  # the arguments of waves_of


def _swap_ab_units(problem: Problem, target: Target, tiles: int | None = None) -> Units:
    return _units(TILES, problem, _swap_ab_blocks(problem), _tiles(problem) if tiles is None else tiles, target)


def _swap_ab_blocks(problem: Problem) -> int:
    return -(-problem.heads // SWAP_AB_HEADS)


def _tiles(problem: Problem) -> int:
    """Of a row's keys."""
    rows, indices = problem.split_as
    return max(1, -(-indices // (max(1, rows) * BLOCK_N)))


def _most_tiles(problem: Problem, target: Target) -> int:
    """Tiles of a row up to which swap-AB is faster than others."""
    blocks, others = _swap_ab_blocks(problem), (supports_decode_fp8, supports_prefill_bf16)
    if blocks == 1 or not any(supports(problem, target).able for supports in others):
        return _tiles(problem)
    return target.num_sms // (max(1, problem.split_as[0]) * blocks)


def _decode_fp8_units(problem: Problem, target: Target) -> Units:
    rows, indices = problem.split_as
    return _units(PAIRS, problem, problem.heads // BLOCK_M, -(-indices // (rows * 2 * BLOCK_N)), target)


def _units(model: CostModel, problem: Problem, blocks: int, units: int, target: Target) -> Units:
    return model, problem.tokens, blocks, units, target.num_sms, problem.invariant_rows


def _combined(problem: Problem, waves: tuple[Waves, ...], blocks: int, target: Target) -> tuple[Combine | None, bool]:
    """(how partials are combined, whether each launch lets the next one start early)."""
    split = [some for some in waves if some.splits > 1]
    if not split:
        return None, True
    rows = sum(some.rows for some in split)
    combine = combine_of(target, rows, problem.heads, *(some.splits for some in split))
    if len(waves) > 1:
        return combine, True
    return combine, may_start_early(target, rows * blocks * split[0].splits, combine)


def reserved(problem: Problem, target: Target) -> Iterator[Scratch]:
    """The most scratch that a kernel here needs for as many rows, each with as many keys or fewer. Fewer keys may be
    split more often."""
    if not problem.tokens:
        return
    swap_ab = supports_swap_ab(problem, target)
    if swap_ab.able:
        fewer = min(_tiles(problem), _most_tiles(problem, target))
        yield _most(_swap_ab_units(problem, target, fewer), problem.heads, problem.max_logits, scaled=False)
    if not swap_ab.ok and supports_decode_fp8(problem, target).ok:
        yield _most(_decode_fp8_units(problem, target), problem.heads, problem.max_logits, scaled=True)


def _most(asked: Units, heads: int, max_logits: bool, scaled: bool) -> Scratch:
    asked_for = (scratch(waves, heads, D_V, scaled, max_logits) for waves in _waves_up_to(asked))
    return max(asked_for, key=lambda one: size_of(one).nbytes, default=Scratch())


@functools.lru_cache(maxsize=1 << 12)  # plans for other numbers of GPUs ask for many of them again
def _waves_up_to(asked: Units) -> frozenset[tuple[Waves, ...]]:
    """How as many rows are launched, each of as many units or fewer."""
    model, rows, blocks, units, num_sms, split_as = asked
    return frozenset(waves_of(model, rows, blocks, fewer, num_sms, split_as) for fewer in range(1, units + 1))
