"""The facts of a scoring, what a launcher is given, and how each kernel of index scores is launched.

A query block is the query rows that are multiplied together. Its heads are the columns of a product (MMA columns), keys
are the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sparse_attn.ops.indexer.scores.hopper.constants import BLOCK_KV, DIM
from sparse_attn.workspace import Buffer, Scratch

LINE = 16  # bytes: what TMA copies starts and is spaced at multiples of them


class Memory(NamedTuple):
    """How a tensor lies in memory. offset: bytes of its address behind a multiple of LINE. strides: in elements."""

    offset: int
    strides: tuple[int, ...]
    contiguous: bool


def memory_of(tensor: torch.Tensor) -> Memory:
    return Memory(tensor.data_ptr() % LINE, tensor.stride(), tensor.is_contiguous())


class PrefillProblem(NamedTuple):
    """Scores over contiguous keys.

    flavour: of fp8 codes, "mxfp4" of e2m1 codes, "none" of plain values, which have no k_scale. itemsize: of a query's
    element.
    """

    rows: int
    keys: int
    heads: int
    dim: int
    flavour: str
    itemsize: int
    q: Memory
    k: Memory
    k_scale: Memory | None
    weights: Memory


class PagedProblem(NamedTuple):
    """Scores over a paged cache. Otherwise as PrefillProblem."""

    requests: int
    next_n: int
    heads: int
    dim: int
    max_context_len: int
    num_blocks: int
    block_size: int
    flavour: str
    itemsize: int
    q: Memory
    cache: Memory


class Prefill(NamedTuple):
    """Scores over contiguous keys: of a row and a key at least, into fp32 ``out`` [rows, keys] of any row stride.

    clear: write -inf outside the rows' ranges, which are left as they are otherwise. scratch: as the plan lists it.
    """

    q: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor | None
    weights: torch.Tensor
    kv_start: torch.Tensor
    kv_end: torch.Tensor
    flavour: str
    out: torch.Tensor
    clear: bool = True
    scratch: Sequence[torch.Tensor] = ()

    @property
    def strides(self) -> tuple[int, ...]:
        """Of weights, kv_start, kv_end and out, as kernels take them."""
        return (*self.weights.stride(), self.kv_start.stride(0), self.kv_end.stride(0), self.out.stride(0))


class Paged(NamedTuple):
    """Scores over a paged cache: of a row and a position at least, into fp32 ``out`` [requests * next_n,
    max_context_len] of any row stride.

    clear: as Prefill's. early_dependents: whether the next launch's CTAs may start while this one runs (programmatic
    dependent launch); None: where this one is short. maxima, with a ``group`` above 1: fp32 [requests * next_n,
    cdiv(max_context_len, group)] gets the highest score of every ``group`` neighbours of which the row sees one, NaN
    where all are. Groups are whole: ``out``, whose rows have room for it, gets -inf behind the row's last score.
    """

    q: torch.Tensor
    cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    max_context_len: int
    flavour: str
    out: torch.Tensor
    clear: bool = True
    early_dependents: bool | None = None
    maxima: torch.Tensor | None = None
    group: int = 1

    @property
    def strides(self) -> tuple[int, ...]:
        """Of weights, context_lens, block_table, out and maxima, as kernels take them."""
        rows = self.block_table.stride(0), self.out.stride(0), 0 if self.maxima is None else self.maxima.stride(0)
        return (*self.weights.stride(), *self.context_lens.stride(), *rows)


class Plan:
    """Every kernel of index scores writes its output alone, but that of HopperDecodedPlan."""

    scratch = Scratch()


@dataclass(frozen=True)
class HopperPlan(Plan):
    """A persistent CTA a multiprocessor, with a producer warp and four consumer warpgroups.

    block_q: rows of a query block. ctas: launched. stages: tiles of 64 keys in flight. consumer_registers: a thread of
    all consumers but the first, which gets the rest. producer_registers: a thread of the producer.
    """

    block_q: int
    ctas: int
    stages: int = 8
    consumer_registers: int = 112
    producer_registers: int = 32


@dataclass(frozen=True)
class HopperDecodedPlan(HopperPlan):
    """MXFP4 keys are decoded to e5m2 once, in a launch of its own, and scored as fp8 keys are. Another launch, with
    ``far_stages`` tiles in flight, scores again what has groups too far apart for e5m2. keys: of the call."""

    keys: int = 0
    far_stages: int = 4

    @property
    def tiles(self) -> int:
        return -(-self.keys // BLOCK_KV)

    @property
    def scratch(self) -> Scratch:
        """far: a flag for each tile of keys and each CTA."""
        return Scratch(
            (
                Buffer("operands", (self.keys, DIM), torch.uint8),
                Buffer("factors", (self.keys,), torch.float32),
                Buffer("far", (self.tiles + self.ctas,), torch.int32),
            )
        )


@dataclass(frozen=True)
class PrefillPlan(Plan):
    """A CTA multiplies a tile of ``block_kv`` keys by ``block_q`` rows, one after the other.

    padded_heads: MMA columns of a row. fp8_dot: whether the matrix unit multiplies the codes themselves.
    """

    block_kv: int
    block_q: int
    padded_heads: int
    fp8_dot: bool
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class PagedPlan(Plan):
    """``ctas_per_block`` CTAs share the tiles of a query block: ``block_q`` rows of a request, multiplied at once.

    one_entry: whether a tile of ``block_kv`` keys lies in one block of the cache, and so needs one entry of the block
    table. Otherwise as PrefillPlan.
    """

    block_kv: int
    block_q: int
    padded_heads: int
    ctas_per_block: int
    one_entry: bool
    fp8_dot: bool
    num_warps: int
    num_stages: int
