"""What processes of one mesh tell each other: that they were given the same, and that none is lost."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from sparse_attn.checkpoints.names import kind_of
from sparse_attn.checkpoints.sharding import CUTS
from sparse_attn.framework.torch_private import all_gather
from sparse_attn.mesh import DIMENSIONS, ONE_RANK, Mesh, Ranks, check_expert, mesh_of
from sparse_attn.models.params import ROPE_NAMES
from sparse_attn.weight_layout import PackedWeight, Weight

REPLAY_S = 60.0  # of a captured step, which compiles nothing
SAMPLED = 64  # values of a weight that ranks compare
STRIDE = 2_654_435_761  # between them, a prime: they lie in any row and column
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LostRankError(OSError):
    """Another process ended, or did not answer in time."""


def make_mesh(
    *, tensor: int | None = None, context: int | None = 1, data: int | None = 1, expert: int | None = 1,
    device: torch.device | str,
) -> Mesh:  # fmt: skip
    """The mesh of this process among all of torch.distributed's; ONE_RANK where it is the only one.

    Sizes by dimension; tensor None: what the others leave. ValueError unless tensor x context x data processes run and
    expert suits them. Every process calls it, with the same sizes.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    context, data, expert = context or 1, data or 1, expert or 1
    tensor = checked_tensor(tensor, context, data, world)
    check_expert(expert, tensor, context, data)
    if world == 1:
        return ONE_RANK
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    kind = torch.device(device).type
    grid = init_device_mesh(kind, (data, context, tensor), mesh_dim_names=DIMENSIONS)
    if expert == 1:
        return mesh_of(grid)
    ranks, wide = torch.arange(world, dtype=torch.int, device="cpu"), max(tensor, expert)
    names = ("runs", "expert", "inner")
    return mesh_of(grid, experts=DeviceMesh(kind, ranks.view(-1, expert, wide // expert), mesh_dim_names=names))


def checked_tensor(tensor: int | None, context: int, data: int, world: int) -> int:
    """How many tensor ranks there are of ``world`` processes; None: what the others leave. ValueError where the product
    of all sizes is another."""
    rest = context * data
    if tensor is None:
        tensor = world // rest if world % rest == 0 else 0
    if tensor * rest != world:
        raise ValueError(
            f"mesh: got tensor {tensor or 'by default'} x context {context} x data {data} for {world} processes, "
            "allowed: sizes whose product is the number of processes"
        )
    return tensor


def most_of_all(ranks: Ranks, device: torch.device, *values: int) -> list[int]:
    """The largest of each of ``values`` on any of ``ranks``, for which the host waits. Every rank calls it."""
    if ranks.group is None:
        return list(values)
    own = torch.tensor(values, dtype=torch.int64, device=device)
    return all_gather(own, ranks.size, ranks.group).view(ranks.size, -1).amax(0).tolist()


def check_same(mesh: Mesh, device: torch.device, *, sharing: bool = False, **values: object) -> None:
    """ValueError that names a value which other ranks of the same tokens have otherwise; sharing: or which others of
    those that share experts have otherwise. Hashes of what values print as are gathered, for which the host waits;
    nothing is done where there is one rank. Every rank calls it, and each gets the same answer."""
    if groups := _groups(mesh, sharing):
        found = _of_all(mesh, groups, device, [[_hash(repr(value).encode())] for value in values.values()])
        for at, name in enumerate(values):
            _refuse_others(name, {number: rows[at] for number, rows in found.items()}, _who(sharing))


def check_same_weights(
    mesh: Mesh, device: torch.device, params: Mapping[str, Weight], *, sharing: bool = False
) -> None:
    """As check_same, of weights: names, shapes and formats, then SAMPLED values of each on the ranks that hold the same
    part of it. What is sharded over all ranks is on one of them, and compared with nothing."""
    if not (groups := _groups(mesh, sharing)):
        return
    named = {name: weight for name, weight in params.items() if name not in ROPE_NAMES}  # which follow from the spec
    tensors = {
        name: (one.codes, one.scales) if isinstance(one, PackedWeight) else (one,) for name, one in named.items()
    }
    formats = [(name, [(one.dtype, one.shape) for one in held]) for name, held in tensors.items()]
    check_same(mesh, device, sharing=sharing, weights=formats)
    samples = [_sample(one) for held in tensors.values() for one in held]
    read = iter(torch.cat(samples).cpu().split([one.shape[0] for one in samples]))
    own = [
        [_part(name, mesh), _hash(b"".join(next(read).numpy().tobytes() for _ in held))]
        for name, held in tensors.items()
    ]
    found = _of_all(mesh, groups, device, own)
    for at, name in enumerate(tensors):
        for part in {rows[at][0] for rows in found.values()}:
            alike = {number: rows[at][1:] for number, rows in found.items() if rows[at][0] == part}
            _refuse_others(f"weight {name}", alike, _who(sharing))


def check_same_everywhere(**values: object) -> None:
    """ValueError that names a value which other processes have otherwise, those of all data ranks among them. Nothing
    is done where there is one process. Every process calls it, and each gets the same answer."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    own, found = {name: _hash(repr(value).encode()) for name, value in values.items()}, [{}] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for name in sorted({name for one in found for name in one}):
        _refuse_others(name, {number: [one.get(name, -1)] for number, one in enumerate(found)}, "run together")


def _hash(value: bytes) -> int:
    return int.from_bytes(hashlib.sha256(value).digest()[:7], "big")


def _part(name: str, mesh: Mesh) -> int:
    """Which part of a weight this process holds, as a number."""
    part = 0
    for dimension, _, _ in CUTS.get(kind_of(name), ()):
        ranks = getattr(mesh, dimension)
        part = part * ranks.size + ranks.rank
    return part


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """The bytes of SAMPLED of its values, or of all, as uint8 on its device."""
    bits = weight.detach().view(BITS[weight.dtype.itemsize])  # which every device can index
    places = torch.arange(min(SAMPLED, bits.numel()), device=bits.device)
    if bits.numel() > SAMPLED:
        places = places * STRIDE % bits.numel()
    index = []
    for size in reversed(bits.shape):
        index.insert(0, places % size)
        places = places // size
    return bits[tuple(index)].view(torch.uint8)


def _groups(mesh: Mesh, sharing: bool) -> list[Ranks]:
    names = ("tensor", "context", "expert") if sharing and mesh.expert_replicas > 1 else ("tensor", "context")
    return [ranks for ranks in (getattr(mesh, name) for name in names) if ranks.group is not None]


def _who(sharing: bool) -> str:
    return "compute the same tokens or share experts" if sharing else "compute the same tokens"


def _of_all(
    mesh: Mesh, groups: Sequence[Ranks], device: torch.device, own: list[list[int]]
) -> dict[int, list[list[int]]]:
    """``own`` of every rank that any of ``groups`` leads to, by its number: all of them see the same, so that none
    waits for one that has raised."""
    number = mesh.data.rank * mesh.replica_size + mesh.context.rank * mesh.tensor.size + mesh.tensor.rank
    found = torch.tensor([[number, *sum(own, [])]], dtype=torch.int64, device=device)
    for ranks in groups:
        assert ranks.group is not None
        found = all_gather(found, ranks.size, ranks.group)
    wide = len(own[0])
    return {row[0]: [row[at : at + wide] for at in range(1, len(row), wide)] for row in sorted(found.tolist())}


def _refuse_others(name: str, values: dict[int, list[int]], who: str) -> None:
    """ValueError where a rank has another value than the first. who: which ranks have the same."""
    first = min(values)
    if others := [str(number) for number, value in values.items() if value != values[first]]:
        raise ValueError(
            f"{name}: got another value on rank {', '.join(others)} than on rank {first}, allowed: the same on all "
            f"ranks that {who}"
        )


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def wait_for(event: torch.cuda.Event, timeout_s: float | None) -> None:
    """Wait until ``event`` has happened. LostRankError after ``timeout_s`` seconds, where there are any: no watchdog
    sees collectives in a captured graph."""
    if timeout_s is None:
        event.synchronize()
        return
    end = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > end:
            raise LostRankError(
                f"rank {_rank()}: a captured step has not ended after {timeout_s:.0f} s: a rank is lost"
            )
        time.sleep(20e-6)
