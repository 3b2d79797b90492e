"""Ranks as threads of one process: collectives that wait for each other and copy, so that a test needs no spawning."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

import torch

from sparse_attn.generation import processes
from sparse_attn.mesh import ALONE, Mesh, Ranks, planned_mesh
from sparse_attn.pipeline.parallel import ranks as pipeline_ranks

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


class _Grid(Group):
    """Ranks of a grid, whose groups each have collectives of their own. A group's name ends with the places of its
    members."""

    def __init__(self, size: int):
        super().__init__(size)
        self._lock, self._groups = threading.Lock(), dict[str, Group]()

    def _values_of(self, kind: str, value: torch.Tensor, name: str) -> tuple[list[torch.Tensor], int]:
        members = [int(place) for place in name.split()[1:]]
        with self._lock:
            group = self._groups.setdefault(name, Group(len(members)))
        group.here.rank = members.index(self.here.rank)
        return group.exchange(kind, value), group.here.rank

    def all_reduce(self, value: torch.Tensor, group: str) -> torch.Tensor:
        return torch.stack(self._values_of("all_reduce", value, group)[0]).sum(0, dtype=value.dtype)

    def all_gather(self, value: torch.Tensor, size: int, group: str) -> torch.Tensor:
        return torch.cat(self._values_of("all_gather", value, group)[0])

    def all_to_all(self, value: torch.Tensor, size: int, group: str) -> torch.Tensor:
        assert size == value.shape[0]
        values, own = self._values_of("all_to_all", value, group)
        return torch.stack([other[own] for other in values])

    def abort(self) -> None:
        with self._lock:
            for group in self._groups.values():
                group.abort()


def over_mesh(work: Callable[[Mesh], Result], **sizes: int) -> list[Result]:
    """What ``work`` returns on each rank of a grid of such sizes (planned_mesh takes them)."""
    size = planned_mesh(**sizes).size
    places = [planned_mesh(**sizes, place=place) for place in range(size)]
    held = [
        {name: getattr(one, name).rank for name in ("tensor", "context", "data", "expert")}
        | {"expert_tensor": one.expert_tensor.rank}
        for one in places
    ]
    run = max(places[0].tensor.size, places[0].expert.size)

    def named(place: int, name: str) -> Ranks:
        ranks = getattr(places[place], name)
        if ranks.size == 1:
            return ranks
        others = {"expert": ("expert_tensor",)}.get(name, tuple({"tensor", "context", "data"} - {name}))
        members = [
            other
            for other in range(size)
            if all(held[other][one] == held[place][one] for one in others)
            and (name != "expert" or other // run == place // run)
        ]
        return replace(ranks, group=" ".join(map(str, (name, *members))))

    meshes = [
        Mesh(**{name: named(place, name) for name in ("tensor", "context", "data", "expert")}) for place in range(size)
    ]
    return over_threads(size, lambda ranks: work(meshes[ranks.rank]), _Grid(size))
