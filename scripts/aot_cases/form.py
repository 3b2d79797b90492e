"""What a case is: a call of an operator package's launcher, with tensors that have a shape and no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sparse_attn.layout import Layout, PlanarFp8Layout

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
U8, I32, I64 = torch.uint8, torch.int32, torch.int64


class Case(NamedTuple):
    """more: compiled with --all only, because another case has the same code in it or it is not a published model's.
    where: without --all, too, where this is part of the target's name or of the kernel's module."""

    op: str
    name: str
    launcher: Callable
    arguments: tuple
    more: bool = False
    where: str = ""


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=I32)


def floats(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=FP32)


def cache_of(layout: Layout, num_blocks: int = 1024, block_size: int = 64) -> torch.Tensor:
    """As cache.allocate_cache lays it out."""
    if isinstance(layout, PlanarFp8Layout):
        memory = tensor(num_blocks, layout.block_stride(block_size), dtype=U8)
        return memory[:, : block_size * layout.row].unflatten(1, (block_size, layout.row))
    return tensor(num_blocks, block_size, layout.row, dtype=layout.dtype)
