"""Rows of all layers' caches, copied within the device or to the host and back, to the bit and without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_attn.runtime.steps import AnyCaches, sent
from sparse_attn.torch_private import copy_all
from sparse_attn.types import Caches


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
    """Rows of ``tensors``, which live as long as this, copied by a few launches for all tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors = tensors
        self._rows: dict[int, list[torch.Tensor]] = {}

    def copy(self, source: int, target: int) -> None:
        for row in (source, target):
            if row not in self._rows:
                self._rows[row] = [tensor[row] for tensor in self._tensors]
        if self._tensors:
            copy_all(self._rows[target], self._rows[source])


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
