"""Rows of all layers' caches, copied within the device or to the host and back, to the bit and without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_attn.framework.torch_private import copy_all, storage_key
from sparse_attn.generation.model import AnyCaches
from sparse_attn.generation.steps import sent
from sparse_attn.types import Caches

WORDS = torch.int64, torch.int32, torch.int16, torch.uint8


def paged(caches: AnyCaches) -> list[torch.Tensor]:
    """The caches whose first dimension is blocks of tokens, or of entries."""
    kinds = (caches.kv, caches.index) if isinstance(caches, Caches) else (caches.compressed, caches.index)
    return [cache for layers in kinds for cache in layers if cache is not None]


def ringed(caches: AnyCaches) -> list[torch.Tensor]:
    """The caches whose first dimension is requests' rings: window keys and compressor state."""
    if isinstance(caches, Caches):
        return []
    return [cache for layers in (caches.kv, caches.state, caches.index_state) for cache in layers if cache is not None]


class Rows:
    """Rows of ``tensors``, which live as long as this. Those that lie side by side in one memory are copied as one; a
    few launches copy all.

    Row n of a memory holds row n of all its tensors, and nothing else (cache.allocate_side_by_side). Copies of one call
    have one dtype, or torch launches one for each: the widest words that every memory consists of.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        tensors = [_memory_of(tensor) for tensor in {storage_key(tensor): tensor for tensor in tensors}.values()]
        words = next((dtype for dtype in WORDS if all(_consists_of(tensor, dtype) for tensor in tensors)), None)
        self._tensors = [tensor if words is None else tensor.view(words) for tensor in tensors]
        self._rows = list(zip(*(tensor.unbind(0) for tensor in self._tensors)))

    def copy(self, source: int, target: int) -> None:
        if len(self._tensors) == 1:
            self._rows[target][0].copy_(self._rows[source][0])
        elif self._rows:
            copy_all(self._rows[target], self._rows[source])


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All rows of the memory that ``tensor`` is a part of, as bytes."""
    rows, row = tensor.shape[0], tensor.stride(0) * tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), 0, (rows, row), (row, 1))


def _consists_of(tensor: torch.Tensor, words: torch.dtype) -> bool:
    """Whether ``tensor``, as it lies in memory, can be seen as ``words``."""
    size = tensor.element_size()
    counts = [tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1]]
    aligned = tensor.data_ptr() % words.itemsize == 0
    return tensor.stride(-1) == 1 and aligned and all(count * size % words.itemsize == 0 for count in counts)


def take_out(tensors: Sequence[torch.Tensor], rows: Sequence[int]) -> list[torch.Tensor]:
    """Copies of ``rows`` of each tensor on the host, which may be read once the current stream has passed here."""
    found = []
    for tensor, index in _indexed(tensors, rows):
        values = tensor.index_select(0, index)
        kept = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=tensor.is_cuda)
        found.append(kept.copy_(values, non_blocking=True))
    return found


def put_back(tensors: Sequence[torch.Tensor], rows: Sequence[int], kept: Sequence[torch.Tensor]) -> None:
    """Write what ``take_out`` gave into ``rows`` of each tensor, others or the same."""
    for (tensor, index), values in zip(_indexed(tensors, rows), kept, strict=True):
        tensor.index_copy_(0, index, values.to(tensor.device, non_blocking=True))


def _indexed(tensors: Sequence[torch.Tensor], rows: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if not tensors:
        return []
    index = sent(torch.tensor(rows, dtype=torch.int64, device="cpu"), tensors[0].device)
    return [(tensor, index) for tensor in tensors]
