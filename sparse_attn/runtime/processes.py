"""Processes that run one model together, as torchrun starts them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sparse_attn.mesh import DIMENSIONS, ONE_RANK, Mesh, mesh_of


def make_mesh(
    *, tensor: int | None = None, context: int = 1, data: int = 1, expert: int = 1, device: torch.device | str
) -> Mesh:
    """The mesh of this process among all of torch.distributed's; ONE_RANK where it is the only one.

    Sizes by dimension; tensor None: what the others leave. ValueError unless tensor x context x data processes run and
    expert suits them. Every process calls it, with the same sizes.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    rest = context * data
    if tensor is None:
        tensor = world // rest if world % rest == 0 else 0
    if tensor * rest != world:
        raise ValueError(
            f"mesh: got tensor {tensor or 'by default'} x context {context} x data {data} for {world} processes, "
            "allowed: sizes whose product is the number of processes"
        )
    check_expert(expert, tensor, context)
    if world == 1:
        return ONE_RANK
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    kind = torch.device(device).type
    grid = init_device_mesh(kind, (data, context, tensor), mesh_dim_names=DIMENSIONS)
    if expert == 1:
        return mesh_of(grid)
    ranks, wide = torch.arange(world, dtype=torch.int, device="cpu"), max(tensor, expert)
    names = ("runs", "expert", "inner")
    return mesh_of(grid, DeviceMesh(kind, ranks.view(-1, expert, wide // expert), mesh_dim_names=names))


def check_expert(expert: int, tensor: int, context: int) -> None:
    """ValueError where so many expert ranks do not suit the grid."""
    more, fewer = max(tensor, expert), min(tensor, expert)
    if more % fewer or (tensor * context) % expert:
        raise ValueError(
            f"expert: got {expert} ranks, allowed: a divisor of the {tensor * context} that compute the same tokens, "
            f"and a divisor or a multiple of the {tensor} tensor ranks"
        )
