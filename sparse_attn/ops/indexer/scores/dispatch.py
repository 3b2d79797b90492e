"""Which kernel computes index scores, and how it is launched.

``PREFILL_KERNELS`` score contiguous keys, ``PAGED_KERNELS`` a paged cache.

How many rows or requests there are chooses no kernel, nor does it change a bit where it chooses how one is launched:
one row's score of one key has the same bits whatever else is in the call.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from sparse_attn.framework import dispatch
from sparse_attn.framework.dispatch import YES, Choice, Kernel, Support, no, not_on
from sparse_attn.framework.target import Target
from sparse_attn.layout import IndexFp8Layout, IndexLayout, IndexMxfp4Layout, parse_layout
from sparse_attn.mxfp4 import MXFP4
from sparse_attn.ops.indexer.scores.hopper import constants as hopper
from sparse_attn.ops.indexer.scores.plan import (
    LINE,
    HopperDecodedPlan,
    HopperPlan,
    Memory,
    PagedPlan,
    PagedProblem,
    Plan,
    PrefillPlan,
    PrefillProblem,
    memory_of,
)
from sparse_attn.workspace import Scratch

MANY_KEYS = 1 << 19  # in the contexts of all requests, from which more tiles in flight were measured to be faster
# Rows, and scores of all keys, from which MXFP4 keys are decoded to scratch once. On an H100 that and one more launch
# take 10 us and 0.1 ns a key, and a row and key takes 4 ps less. 32 heads: not timed.
DECODED_ROWS, DECODED_SCORES, DECODED_HEADS = 256, 1 << 23, (64, 128)
# Of the portable kernels.
WIDE = 64 * 128  # values of a row's heads in the published models; of more, fewer keys fit beside them
MANY = 1 << 22  # scores, of which a CTA takes many rows
PAGED_COLUMNS = 128  # of a paged product: what its accumulator holds in registers


# --- the facts of a call


def prefill_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    flavour: str,
    *,
    rows: int | None = None,
) -> PrefillProblem:
    """Of mqa_logits' arguments, real or meta. rows: that are scored at a time; None: all."""
    count, heads, dim = q.shape
    return PrefillProblem(
        rows=count if rows is None else rows,
        keys=k.shape[0],
        heads=heads,
        dim=2 * k.shape[1] if flavour == MXFP4 else dim,
        flavour=flavour,
        itemsize=q.element_size(),
        q=memory_of(q),
        k=memory_of(k),
        k_scale=None if k_scale is None else memory_of(k_scale),
        weights=memory_of(weights),
    )


def paged_problem(
    q: torch.Tensor, cache: torch.Tensor, max_context_len: int, layout: str, *, requests: int | None = None
) -> PagedProblem:
    """Of paged_mqa_logits' arguments, real or meta. requests: that are scored at a time; None: all."""
    count, next_n, heads, _ = q.shape
    return PagedProblem(
        requests=count if requests is None else requests,
        next_n=next_n,
        heads=heads,
        dim=parse_layout(layout).dim,
        max_context_len=max_context_len,
        num_blocks=cache.shape[0],
        block_size=cache.shape[1],
        flavour=flavour_of(layout),
        itemsize=q.element_size(),
        q=memory_of(q),
        cache=memory_of(cache),
    )


def flavour_of(layout: str) -> str:
    """Of a cache's codes; "none" of plain values."""
    kind = parse_layout(layout)
    if isinstance(kind, IndexMxfp4Layout):
        return MXFP4
    return kind.flavour if isinstance(kind, IndexFp8Layout) else "none"


# --- what a kernel supports


def _supports_hopper_prefill(problem: PrefillProblem, target: Target) -> Support:
    if refused := _refused_on_hopper(problem, target, "e4m3fn"):
        return refused
    assert problem.k_scale is not None, "fp8 keys have scales"
    heads, dim = problem.heads, problem.dim
    return (
        _copied_whole("q", problem.q)
        or _copied_by_rows("k", problem.k, 1, dim)
        or _copied_by_rows("k_scale", problem.k_scale, 4)
        or _copied_by_rows("weights", problem.weights, 4, heads)
        or YES
    )


def _supports_hopper_paged(problem: PagedProblem, target: Target) -> Support:
    return (
        _refused_on_hopper(problem, target, "e4m3fn")
        or _in_tiles(problem)
        or _copied_whole("q", problem.q)
        or _copied_by_blocks(problem)
        or YES
    )


def _supports_hopper_prefill_mxfp4(problem: PrefillProblem, target: Target) -> Support:
    if refused := _refused_on_hopper(problem, target, MXFP4):
        return refused
    assert problem.k_scale is not None, "MXFP4 keys have scales"
    if not problem.k_scale.contiguous:
        return no(f"k_scale: got strides {list(problem.k_scale.strides)}, allowed: contiguous")
    if problem.q.strides[0] % LINE:
        return no(f"q row stride: got {problem.q.strides[0]}, allowed: a multiple of {LINE}")
    return (
        _at_a_line("q", problem.q)
        or _copied_by_rows("k", problem.k, 1, problem.dim // 2)
        or _at_a_line("k_scale", problem.k_scale)
        or YES
    )


def _supports_hopper_paged_mxfp4(problem: PagedProblem, target: Target) -> Support:
    if refused := _refused_on_hopper(problem, target, MXFP4) or _in_tiles(problem):
        return refused
    if any(stride % LINE for stride in problem.q.strides[:2]):
        return no(f"q strides: got {list(problem.q.strides)}, allowed: multiples of {LINE} of requests and rows")
    return _at_a_line("q", problem.q) or _copied_by_blocks(problem) or YES


def _refused_on_hopper(problem: PrefillProblem | PagedProblem, target: Target, flavour: str) -> Support | None:
    """What keeps every Hopper kernel of ``flavour`` from running it."""
    if not target.is_hopper:
        return not_on(target, "sm_90")
    if problem.flavour != flavour:
        return no(f"flavour: got {problem.flavour}, allowed: {flavour}")
    if problem.heads not in hopper.HEADS:
        return no(f"heads: got {problem.heads}, allowed: {', '.join(map(str, hopper.HEADS))}")
    if problem.dim != hopper.DIM:
        return no(f"dim: got {problem.dim}, allowed: {hopper.DIM}")
    return None


def _in_tiles(problem: PagedProblem) -> Support | None:
    """What keeps a block from being a tile."""
    if problem.block_size != hopper.BLOCK_KV:
        return no(f"block_size: got {problem.block_size}, allowed: {hopper.BLOCK_KV}")
    if problem.num_blocks == 0:
        return no("cache blocks: got 0, allowed: at least 1")
    return None


def _copied_by_blocks(problem: PagedProblem) -> Support | None:
    """What keeps TMA from copying a cache's blocks."""
    return _copied_by_rows("cache", problem.cache, 1, problem.block_size * problem.cache.strides[1], "block")


def _copied_whole(name: str, memory: Memory) -> Support | None:
    """What keeps TMA from copying boxes of a tensor seen as rows of its last dimension."""
    if not memory.contiguous:
        return no(f"{name}: got strides {list(memory.strides)}, allowed: contiguous")
    return _at_a_line(name, memory)


def _copied_by_rows(
    name: str, memory: Memory, itemsize: int, width: int | None = None, row: str = "row"
) -> Support | None:
    """The same of rows of ``width`` elements, or of one row: whole lines that do not overlap. row: what it is."""
    if memory.strides[-1] != 1:
        return no(f"{name}: got strides {list(memory.strides)}, allowed: a contiguous last dimension")
    stride = memory.strides[0]
    if width is not None and (stride * itemsize % LINE or stride < width):
        lines = LINE // itemsize
        return no(f"{name} {row} stride: got {stride}, allowed: a multiple of {lines}, at least {width}")
    return _at_a_line(name, memory)


def _at_a_line(name: str, memory: Memory) -> Support | None:
    if not memory.offset:
        return None
    return no(f"{name} address: got {memory.offset} bytes behind a multiple of {LINE}, allowed: 0")


def _always(problem: PrefillProblem | PagedProblem, target: Target) -> Support:
    return YES


# --- how it is launched


def _plan_hopper_prefill(problem: PrefillProblem, target: Target) -> HopperPlan:
    return HopperPlan(hopper.PRODUCTS * hopper.COLUMNS // problem.heads, target.num_sms)


def _plan_hopper_paged(problem: PagedProblem, target: Target) -> HopperPlan:
    """Rows of one request share its keys."""
    rows = min(hopper.PRODUCTS * hopper.COLUMNS // problem.heads, hopper.BLOCK_Q, power_of_two(problem.next_n))
    return HopperPlan(rows, target.num_sms)


def _plan_hopper_prefill_mxfp4(problem: PrefillProblem, target: Target) -> HopperPlan:
    plan = _plan_hopper_prefill(problem, target)
    many = problem.rows >= DECODED_ROWS and problem.rows * problem.keys >= DECODED_SCORES
    if many and problem.heads in DECODED_HEADS:
        return HopperDecodedPlan(plan.block_q, plan.ctas, keys=problem.keys)
    return replace(plan, stages=16)


def _plan_hopper_paged_mxfp4(problem: PagedProblem, target: Target) -> HopperPlan:
    """As many bytes in flight as of fp8 keys, where bytes bind."""
    plan = _plan_hopper_paged(problem, target)
    many = problem.requests * problem.max_context_len > MANY_KEYS and plan.block_q * problem.heads <= 64
    return replace(plan, stages=16) if many else plan


def _plan_prefill(problem: PrefillProblem, target: Target) -> PrefillPlan:
    heads, dim, shared_operands = problem.heads, problem.dim, target.reads_shared_operands
    padded = max(16, power_of_two(heads))
    if problem.itemsize == 4:
        return PrefillPlan(32, 16, padded, False, 4 if shared_operands else 8, 1)
    if target.interpreted:
        return PrefillPlan(64, 16, padded, False, 4, 1)
    block_q = 64 if problem.rows * problem.keys >= MANY else 8
    if _multiplies_codes(problem, target):
        return PrefillPlan(128, block_q, padded, True, 4, 3)
    block_kv = 64 if heads * dim > WIDE and not shared_operands else 128
    values = (heads + block_kv) * dim * 2 + 2048  # bytes of bf16; 2048 for sums across warps
    return PrefillPlan(block_kv, block_q, padded, False, 8, 2 if values <= target.shared_memory else 1)


def _plan_paged(problem: PagedProblem, target: Target) -> PagedPlan:
    next_n, heads, fp32 = problem.next_n, problem.heads, problem.itemsize == 4
    columns, fp8_dot = next_n * heads, _multiplies_codes(problem, target)
    block_kv = 64 if fp8_dot or columns > 64 else 128  # 64 x 128 sums in fp32 fill half the registers
    if problem.flavour == MXFP4:
        block_kv = 64  # both operands are decoded in registers; a tile of keys lies in one block of 64
    num_warps, num_stages, ctas_an_sm = 4, 3 if fp8_dot else 2, 6 if fp8_dot else 4
    if fp32:  # multiplied without a matrix unit: few products in a thread, for its operands are many
        block_kv, num_warps, num_stages = 32 if columns <= 64 else 16, 4 if columns <= 32 else 8, 1
    elif columns > 64 and not fp8_dot and target.vendor == "nvidia" and not target.reads_shared_operands:
        num_warps = 8  # keys are decoded in registers, beside the sums
    padded = power_of_two(heads)
    block_q = min(power_of_two(next_n), max(1, PAGED_COLUMNS // padded))
    tiles = -(-problem.max_context_len // block_kv)
    one_entry = problem.flavour in ("e4m3fn", MXFP4) and problem.block_size % block_kv == 0  # others would spill
    ctas = max(1, min(tiles, ctas_an_sm * target.num_sms // max(problem.requests, 1)))
    return PagedPlan(block_kv, block_q, max(16 // block_q, padded), ctas, one_entry, fp8_dot, num_warps, num_stages)


def _multiplies_codes(problem: PrefillProblem | PagedProblem, target: Target) -> bool:
    return problem.flavour == "e4m3fn" and target.fp8_dot


def power_of_two(value: int) -> int:
    """The least power of two that is not below ``value``, which is at least 1."""
    return 1 << (value - 1).bit_length()


# --- the tables


def _hopper():
    from sparse_attn.ops.indexer.scores.hopper import launch

    return launch


def _portable():
    from sparse_attn.ops.indexer.scores.portable import launch

    return launch


PREFILL_KERNELS: tuple[Kernel[PrefillProblem, Plan], ...] = (
    Kernel("hopper.prefill", _supports_hopper_prefill, _plan_hopper_prefill, lambda: _hopper().prefill),
    Kernel(
        "hopper.prefill_mxfp4",
        _supports_hopper_prefill_mxfp4,
        _plan_hopper_prefill_mxfp4,
        lambda: _hopper().score_prefill_mxfp4,
    ),
    Kernel("portable", _always, _plan_prefill, lambda: _portable().prefill),
)
PAGED_KERNELS: tuple[Kernel[PagedProblem, Plan], ...] = (
    Kernel("hopper.paged", _supports_hopper_paged, _plan_hopper_paged, lambda: _hopper().paged),
    Kernel(
        "hopper.paged_mxfp4",
        _supports_hopper_paged_mxfp4,
        _plan_hopper_paged_mxfp4,
        lambda: _hopper().score_paged_mxfp4,
    ),
    Kernel("portable", _always, _plan_paged, lambda: _portable().paged),
)


@functools.lru_cache(maxsize=1024)  # a pure function that every eager call asks
def choose_prefill(problem: PrefillProblem, target: Target, kernel: str | Choice[Plan] | None = None) -> Choice[Plan]:
    """The kernel that scores contiguous keys, and its plan. kernel: see dispatch.choose."""
    return dispatch.choose(PREFILL_KERNELS, problem, target, kernel)


def prefill_scratch(rows: int, keys: int, heads: int, layout: IndexLayout, target: Target) -> Scratch:
    """Of scoring ``rows`` against ``keys`` that were gathered from a cache of ``layout``."""
    if not isinstance(layout, IndexMxfp4Layout) or rows == 0 or keys == 0:
        return Scratch()
    shapes = (rows, heads, layout.row), (keys, layout.code_bytes), (keys, layout.groups), (rows, heads)
    q, k, k_scale, weights = (torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes)
    return choose_prefill(prefill_problem(q, k, k_scale, weights, MXFP4), target).plan.scratch


@functools.lru_cache(maxsize=1024)
def choose_paged(problem: PagedProblem, target: Target, kernel: str | Choice[Plan] | None = None) -> Choice[Plan]:
    """The same of a paged cache."""
    return dispatch.choose(PAGED_KERNELS, problem, target, kernel)
