"""Ranks as threads of one process: collectives that wait for each other and copy, so that a test needs no spawning."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest import mock

import torch

from sparse_attn.mesh import ALONE, Ranks
from sparse_attn.pipeline import ranks as pipeline_ranks
from sparse_attn.runtime import processes

Result = TypeVar("Result")
GROUP = "threads"


class Group:
    """What ``size`` threads exchange. sent: (collective, bytes a rank puts in) of every collective, as rank 0 saw it."""

    def __init__(self, size: int):
        self.size, self.here = size, threading.local()
        self.sent: list[tuple[str, int]] = []
        self._barrier, self._values = threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def exchange(self, kind: str, value: torch.Tensor) -> list[torch.Tensor]:
        rank = self.here.rank
        if rank == 0:
            self.sent.append((kind, value.numel() * value.itemsize))
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        assert all(other.shape == value.shape and other.dtype == value.dtype for other in values), kind
        self._barrier.wait()
        return values

    def all_reduce(self, value: torch.Tensor, group: str) -> torch.Tensor:
        assert group == GROUP
        return torch.stack(self.exchange("all_reduce", value)).sum(0, dtype=value.dtype)

    def all_gather(self, value: torch.Tensor, size: int, group: str) -> torch.Tensor:
        assert group == GROUP and size == self.size
        return torch.cat(self.exchange("all_gather", value))

    def all_to_all(self, value: torch.Tensor, size: int, group: str) -> torch.Tensor:
        assert group == GROUP and size == self.size == value.shape[0]
        return torch.stack([other[self.here.rank] for other in self.exchange("all_to_all", value)])

    def abort(self) -> None:
        self._barrier.abort()


@contextlib.contextmanager
def collectives(group: Group) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, name in ((pipeline_ranks, "all_reduce"), (pipeline_ranks, "all_gather"), (processes, "all_gather"),
                             (pipeline_ranks, "all_to_all")):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, getattr(group, name)))
        yield


def over_threads(size: int, work: Callable[[Ranks], Result], group: Group | None = None) -> list[Result]:
    """What ``work`` returns on each of ``size`` ranks; the first error of one ends all."""
    group = group or Group(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        group.here.rank = rank
        try:
            results[rank] = work(Ranks(size, rank, GROUP) if size > 1 else ALONE)
        except BaseException as error:
            errors.append(error)
            group.abort()

    with collectives(group):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise errors[0]
    return results
