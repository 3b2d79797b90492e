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
    """The processes that share one dimension: how many, which of them this one is, and their process group's name (as
    torch.distributed's ``group.group_name``). One rank has no group and calls no collective."""

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

    tensor: each holds its heads, its part of the inner width of MLPs, and its rows of the vocabulary. context: each
    holds its blocks of the paged caches. data: each serves requests of its own. expert: each holds its own routed
    experts. Tensor and context ranks compute the same tokens. Where there are more expert ranks than those, data ranks
    share experts: they run every step together, with as many rows (pipeline.parallel.experts).

    routed: the ranks that sum what routed and shared experts give, and cut shared experts among them: those of tensor
    or of expert, whichever are more. Where there are fewer expert ranks than tensor ranks, the rest of the tensor ranks
    cut the experts' inner width: inner, whose collectives go over routed.

    dealt: where there are context ranks, the mesh of a step whose rows are dealt out to them: to experts, they are data
    ranks. None: there are none.
    """

    tensor: Ranks = ALONE
    context: Ranks = ALONE
    data: Ranks = ALONE
    expert: Ranks = ALONE
    routed: Ranks = field(init=False)
    inner: Ranks = field(init=False)
    dealt: Mesh | None = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        tensor, expert = self.tensor, self.expert
        check_expert(expert.size, tensor.size, self.context.size, self.data.size)
        more = max(tensor.size, expert.size)
        routed, cut = (tensor if tensor.size >= expert.size else expert), more // expert.size
        place = (self.data.rank * self.alike + self.context.rank * tensor.size + tensor.rank) % more
        if expert.rank != place // cut:
            raise ValueError(f"expert: got rank {expert.rank}, allowed: {place // cut} in this grid")
        object.__setattr__(self, "routed", routed)
        object.__setattr__(self, "inner", Ranks(cut, place % cut, routed.group if cut > 1 else None))
        context, data, dealt = self.context, self.data, None
        if context.size > 1:
            # No collective goes over data ranks, so the group, which is not that of all of these, is never asked for.
            both = Ranks(context.size * data.size, data.rank * context.size + context.rank, context.group)
            dealt = Mesh(tensor=tensor, data=both, expert=expert)
        object.__setattr__(self, "dealt", dealt)

    @property
    def size(self) -> int:
        """Processes in all."""
        return self.alike * self.data.size

    @property
    def alike(self) -> int:
        """Processes that compute the same tokens."""
        return self.tensor.size * self.context.size

    @property
    def sharing(self) -> int:
        """Groups of such processes, each with tokens of its own, that share routed experts; 1: none does."""
        return max(1, self.expert.size // self.alike)

    def of_rows(self, dealt: bool) -> Mesh:
        """The mesh that experts see: that of dealt rows where a step's rows are dealt out to context ranks."""
        return self.dealt if dealt and self.dealt is not None else self


ONE_RANK = Mesh()


def mesh_of(grid: DeviceMesh, *, experts: DeviceMesh | None = None) -> Mesh:
    """The mesh of this process in torch's ``grid``, whose dimensions are named as DIMENSIONS; those that are missing
    have one rank.

    experts: a mesh of the same processes with a dimension "expert": of neighbours where there are at least as many as
    tensor ranks, else of every (tensor / expert)-th within a tensor group. None: one expert rank.
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
    """The mesh of the process at ``place`` of a grid that does not run: its groups have names and no processes. What
    is computed from shapes takes it; no collective does. ValueError for sizes below 1, a place outside of the grid, and
    what check_expert refuses."""
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
