"""Which processes share a model, and along which dimensions: a value that forwards, caches, plans and bounds take.

Ranks are laid out as a grid of data x context x tensor, tensor ranks next to each other. Along each dimension a process
is one of a few ``Ranks``. Expert ranks lie across that grid: runs of neighbours, or every few within a tensor group.
``Mesh()`` is one process alone, which calls no collective.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from sparse_attn.framework import checks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("data", "context", "tensor")  # of the grid, the slowest first


@dataclass(frozen=True)
class Ranks:
    """The processes that share one dimension. One rank has no group and calls no collective.

    Attributes:
        size: how many.
        rank: which of them this one is.
        group: their process group's name (as torch.distributed's ``group.group_name``).

    Raises:
        TypeError: sizes that are no integers.
        ValueError: a rank outside of them, or a group that does not suit the size.
    """

    size: int = 1
    rank: int = 0
    group: str | None = None

    def __post_init__(self):
        checks.check_at_least("size", self.size, 1)
        checks.check_at_least("rank", self.rank, 0)
        if self.rank >= self.size:
            raise ValueError(f"rank: got {self.rank}, allowed: 0 to {self.size - 1} (size is {self.size})")
        if (self.group is None) != (self.size == 1):
            raise ValueError(f"group: got {self.group!r} for {self.size} ranks, allowed: None for one rank alone")


ALONE = Ranks()


def check_expert(expert: int, tensor: int, context: int, data: int = 1) -> None:
    """ValueError where so many expert ranks do not suit the grid."""
    if max(tensor, expert) % min(tensor, expert):
        raise ValueError(f"expert: got {expert} ranks, allowed: a divisor or a multiple of the {tensor} tensor ranks")
    alike, world = tensor * context, tensor * context * data
    if alike % expert and (expert % alike or world % expert):
        more = f", or a multiple of them that divides all {world}" if data > 1 else ""
        raise ValueError(
            f"expert: got {expert} ranks, allowed: a divisor of the {alike} that compute the same tokens{more}"
        )


@dataclass(frozen=True)
class Mesh:
    """The ranks of one process.

    Tensor and context ranks are one replica: they compute the same tokens. Where there are more expert ranks than a
    replica has ranks, replicas share experts: they run every step together, with as many rows
    (pipeline.parallel.experts).

    Attributes:
        tensor: each holds its heads, its part of the inner width of MLPs, and its rows of the vocabulary.
        context: each holds its blocks of the paged caches.
        data: replicas, each of which serves requests of its own.
        expert: each rank holds its own routed experts.
        expert_sum: the ranks that shard the shared experts, and over which outputs of all experts are summed: those of
            tensor or of expert, whichever are more. Collectives of expert_tensor go over them, too.
        expert_tensor: the ranks that shard the inner width of the same experts, where there are fewer expert ranks than
            tensor ranks.
        sharded: where there are context ranks, the mesh of a step whose rows are sharded over them: to experts, each is
            a replica then. None: there are none.

    Raises:
        ValueError: expert ranks that do not suit the grid.
    """

    tensor: Ranks = ALONE
    context: Ranks = ALONE
    data: Ranks = ALONE
    expert: Ranks = ALONE
    expert_sum: Ranks = field(init=False)
    expert_tensor: Ranks = field(init=False)
    sharded: Mesh | None = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        tensor, expert = self.tensor, self.expert
        check_expert(expert.size, tensor.size, self.context.size, self.data.size)
        more = max(tensor.size, expert.size)
        summed, parts = (tensor if tensor.size >= expert.size else expert), more // expert.size
        place = (self.data.rank * self.replica_size + self.context.rank * tensor.size + tensor.rank) % more
        if expert.rank != place // parts:
            raise ValueError(f"expert: got rank {expert.rank}, allowed: {place // parts} in this grid")
        object.__setattr__(self, "expert_sum", summed)
        object.__setattr__(self, "expert_tensor", Ranks(parts, place % parts, summed.group if parts > 1 else None))
        context, data, sharded = self.context, self.data, None
        if context.size > 1:
            # No collective goes over data ranks, so the group, which is not that of all of these, is never asked for.
            both = Ranks(context.size * data.size, data.rank * context.size + context.rank, context.group)
            sharded = Mesh(tensor=tensor, data=both, expert=expert)
        object.__setattr__(self, "sharded", sharded)

    def __setstate__(self, state: dict) -> None:
        """Of a pickle: what follows from the four dimensions had other names until 0.2."""
        self.__init__(**{name: state[name] for name in ("tensor", "context", "data", "expert")})

    @property
    def size(self) -> int:
        """Processes in all."""
        return self.replica_size * self.data.size

    @property
    def replica_size(self) -> int:
        """Processes that compute the same tokens."""
        return self.tensor.size * self.context.size

    @property
    def expert_replicas(self) -> int:
        """Replicas that share routed experts; 1: none does."""
        return max(1, self.expert.size // self.replica_size)

    def for_rows(self, sharded: bool) -> Mesh:
        """The mesh that experts see in a step whose rows are ``sharded`` over context ranks, or not."""
        return self.sharded if sharded and self.sharded is not None else self


ONE_RANK = Mesh()


def mesh_of(grid: DeviceMesh, *, experts: DeviceMesh | None = None) -> Mesh:
    """The mesh of this process in torch's ``grid``, whose dimensions are named as DIMENSIONS; those that are missing
    have one rank.

    Args:
        grid: a DeviceMesh of "data", "context" and "tensor".
        experts: a mesh of the same processes with a dimension "expert": of neighbours where there are at least as many
            as tensor ranks, else of every (tensor / expert)-th within a tensor group. None: one expert rank.

    Returns:
        A Mesh.

    Raises:
        ValueError: other dimensions, or expert ranks that do not suit the grid.
    """
    named = {}
    for mesh, allowed in ((grid, DIMENSIONS), (experts, ("expert",))):
        names = () if mesh is None else mesh.mesh_dim_names or ()
        for name in names:
            if name in allowed:
                named[name] = _ranks(mesh, name)
            elif mesh is grid:
                raise ValueError(f"grid: got a dimension {name!r}, allowed: {', '.join(DIMENSIONS)}")
    if experts is not None and "expert" not in named:
        raise ValueError("experts: got no dimension named 'expert', allowed: a mesh that has one")
    return Mesh(**named)


def _ranks(mesh: DeviceMesh | None, name: str) -> Ranks:
    assert mesh is not None
    group = mesh.get_group(name)
    return Ranks(group.size(), group.rank(), group.group_name if group.size() > 1 else None)


def show_mesh(mesh: Mesh) -> dict[str, int]:
    """Sizes by dimension, for reports."""
    return {one.name: getattr(mesh, one.name).size for one in fields(mesh) if one.init}


def planned_mesh(*, tensor: int = 1, context: int = 1, data: int = 1, expert: int = 1, place: int = 0) -> Mesh:
    """The mesh of the process at ``place`` of a grid that does not run: its groups have names and no processes. What is
    computed from shapes takes it; no collective does.

    Args:
        tensor: ranks of the dimension, as are the next three.
        context: see tensor.
        data: see tensor.
        expert: see tensor.
        place: the process, 0 to their product without experts.

    Returns:
        A Mesh.

    Raises:
        ValueError: sizes below 1, a place outside of the grid, and what check_expert refuses.
    """
    for name, size in (("tensor", tensor), ("context", context), ("data", data), ("expert", expert)):
        checks.check_at_least(name, size, 1)
    checks.check_integer("place", place)
    if not 0 <= place < tensor * context * data:
        raise ValueError(f"place: got {place}, allowed: 0 to {tensor * context * data - 1}")
    check_expert(expert, tensor, context, data)
    more = max(tensor, expert)

    def ranks(name: str, size: int, rank: int) -> Ranks:
        return Ranks(size, rank, f"{name} (planned)" if size > 1 else None)

    return Mesh(
        tensor=ranks("tensor", tensor, place % tensor), context=ranks("context", context, place // tensor % context),
        data=ranks("data", data, place // (tensor * context) % data),
        expert=ranks("expert", expert, place % more * expert // more),
    )  # fmt: skip
