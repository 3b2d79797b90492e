"""The facts of a call that the choice of a kernel and its launch depend on, and the tensors a launcher is given."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sparse_attn.layout import PLAIN_NAME, KvLayout, PlainLayout, parse_kv_layout

ALIGNMENT = 16  # bytes that the widest load takes at once
# A batch-invariant step is split as a step of so many rows. In decode these are few, so that each row is split over
# CTAs. In prefill they are so many that no GPU splits one.
INVARIANT_DECODE_ROWS, INVARIANT_PREFILL_ROWS = 32, 4096


class KvCache(NamedTuple):
    """Keys, and the indices of those that each row attends to.

    cache: blocks [num_blocks, block_size, row] of ``layout``, or plain rows [rows, d_qk]. lengths: int32 [tokens], so
    many indices of a row count, the first ones; None: all.
    """

    cache: torch.Tensor
    layout: KvLayout
    indices: torch.Tensor
    indptr: torch.Tensor
    lengths: torch.Tensor | None = None

    @property
    def blocks(self) -> torch.Tensor:
        """[num_blocks, block_size, row]; plain rows are one block."""
        return self.cache.unsqueeze(0) if self.cache.dim() == 2 else self.cache

    @property
    def rows(self) -> torch.Tensor:
        """[rows, d_qk]; plain blocks have to stand side by side."""
        return self.cache if self.cache.dim() == 2 else self.cache.flatten(0, 1)

    @property
    def padded(self) -> bool:
        """Whether something lies between the last slot of a block and the first of the next one."""
        num_blocks, block_size, _ = self.blocks.shape
        return self.cache.dim() == 3 and _padded(num_blocks, block_size, *self.strides)

    @property
    def strides(self) -> tuple[int, int]:
        """From block to block, and from slot to slot of a block; of one slot, as if there were more."""
        rows, width, step = *self.cache.shape[-2:], self.cache.stride(-2)
        block = self.cache.stride(0) if self.cache.dim() == 3 else rows * step
        return block, step if rows > 1 else width


class Call(NamedTuple):
    """What a launcher is given: the tensors of a call. views, counters: what the plan's scratch asks for. max_logits:
    where rows' largest scaled scores go, or None. inf_lse: lse of a row without keys is inf, not -inf."""

    q: torch.Tensor
    keys: KvCache
    extra: KvCache | None
    scale: float
    sink: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    views: Sequence[torch.Tensor] = ()
    counters: torch.Tensor | None = None
    max_logits: torch.Tensor | None = None
    inf_lse: bool = False


class CacheFacts(NamedTuple):
    """What is known of a KvCache.

    name: of the argument. block_stride, row_stride: in elements. base: how many bytes the first record lies behind a
    multiple of ALIGNMENT.
    """

    name: str
    layout: KvLayout
    num_blocks: int
    block_size: int
    block_stride: int
    row_stride: int
    base: int = 0

    @property
    def fp8(self) -> bool:
        return not isinstance(self.layout, PlainLayout)

    @property
    def slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def padded(self) -> bool:
        """Whether something lies between the last slot of a block and the first of the next one."""
        return _padded(self.num_blocks, self.block_size, self.block_stride, self.row_stride)


class Problem(NamedTuple):
    """What the choice of a kernel and its launch depend on.

    dtype: of q. indices: the room for indices of all rows together, into both caches. q_strides: from token to token
    and from head to head, in elements. q_base: as CacheFacts.base. invariant_rows: a batch-invariant step is split as a
    step of so many rows would be, each with the same room for indices; None where the step's own rows decide.
    max_logits: whether rows' largest scores are wanted.
    """

    tokens: int
    heads: int
    dtype: torch.dtype
    scale: float
    indices: int
    cache: CacheFacts
    extra: CacheFacts | None
    q_strides: tuple[int, int]
    q_base: int = 0
    invariant_rows: int | None = None
    max_logits: bool = False

    @property
    def d_qk(self) -> int:
        return self.cache.layout.dim

    @property
    def d_v(self) -> int:
        return self.cache.layout.value_dim

    @property
    def d_rope(self) -> int:
        """Columns of a key that are no part of its value."""
        return self.d_qk - self.d_v

    @property
    def caches(self) -> tuple[CacheFacts, ...]:
        return (self.cache,) if self.extra is None else (self.cache, self.extra)

    @property
    def split_as(self) -> tuple[int, int]:
        """(rows, indices) of the step whose splits this one takes."""
        if self.invariant_rows is None or not self.tokens:
            return self.tokens, self.indices
        return self.invariant_rows, self.invariant_rows * -(-self.indices // self.tokens)


def _padded(num_blocks: int, block_size: int, block_stride: int, row_stride: int) -> bool:
    return num_blocks > 1 and block_stride != block_size * row_stride


def kv_rows(kv: torch.Tensor, d_v: int, indices: torch.Tensor, indptr: torch.Tensor) -> KvCache:
    """Rows [rows, d_qk], whose first ``d_v`` columns are their value."""
    return KvCache(kv, _plain_layout(kv.dtype, d_v, kv.shape[1] - d_v), indices, indptr)


def kv_caches(
    cache: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    layout: str,
    extra_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_indptr: torch.Tensor | None,
    extra_layout: str,
    lengths: torch.Tensor | None = None,
    extra_lengths: torch.Tensor | None = None,
) -> tuple[KvCache, KvCache | None]:
    """One cache of blocks or two. layout, extra_layout: their names."""
    keys = KvCache(cache, parse_kv_layout(layout), indices, indptr, lengths)
    if extra_cache is None or extra_indices is None or extra_indptr is None:
        return keys, None
    return keys, KvCache(extra_cache, parse_kv_layout(extra_layout), extra_indices, extra_indptr, extra_lengths)


@functools.cache
def _plain_layout(dtype: torch.dtype, d_v: int, d_rope: int) -> PlainLayout:
    return PlainLayout(PLAIN_NAME[dtype], d_v, d_rope)


def problem_of(
    q: torch.Tensor, cache: KvCache, extra: KvCache | None, scale: float, invariant_rows: int | None,
    max_logits: bool = False,
) -> Problem:  # fmt: skip
    tokens, heads, _ = q.shape
    indices = cache.indices.numel()
    if extra is not None:
        indices += extra.indices.numel()
    return Problem(
        tokens, heads, q.dtype, scale, indices,
        _facts("cache", cache), None if extra is None else _facts("extra_cache", extra),
        (q.stride(0), q.stride(1)), q.data_ptr() % ALIGNMENT, invariant_rows, max_logits,
    )  # fmt: skip


def _facts(name: str, keys: KvCache) -> CacheFacts:
    cache, base = keys.cache, keys.cache.data_ptr() % ALIGNMENT
    if cache.dim() == 2:
        rows, stride = cache.shape[0], cache.stride(0)
        return CacheFacts("kv", keys.layout, 1, rows, rows * stride, stride, base)
    num_blocks, block_size, _ = cache.shape
    return CacheFacts(name, keys.layout, num_blocks, block_size, *keys.strides, base)


def packed_prefill(
    tokens: int,
    heads: int,
    layout: KvLayout,
    indices: int,
    dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
) -> Problem:
    """A call of sparse_attn_prefill whose tensors are contiguous and aligned."""
    return _packed(tokens, heads, layout, indices, dtype, INVARIANT_PREFILL_ROWS if batch_invariant else None)


def packed_decode(
    tokens: int,
    heads: int,
    layout: KvLayout,
    indices: int,
    dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    extra: KvLayout | None = None,
) -> Problem:
    """A call of sparse_attn_decode whose tensors are contiguous and aligned."""
    return _packed(tokens, heads, layout, indices, dtype, INVARIANT_DECODE_ROWS if batch_invariant else None, extra)


def _packed(
    tokens: int,
    heads: int,
    layout: KvLayout,
    indices: int,
    dtype: torch.dtype,
    invariant_rows: int | None,
    extra: KvLayout | None = None,
) -> Problem:
    first = _packed_facts("cache", layout)
    second = None if extra is None else _packed_facts("extra_cache", extra)
    q_strides = heads * layout.dim, layout.dim
    return Problem(tokens, heads, dtype, 1.0, indices, first, second, q_strides, invariant_rows=invariant_rows)


def _packed_facts(name: str, layout: KvLayout) -> CacheFacts:
    return CacheFacts(name, layout, 64, 64, 64 * layout.row, layout.row)
