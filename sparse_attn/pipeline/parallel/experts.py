"""Rows on their way to experts that several data ranks share, and back.

No size here depends on a value: the host knows no counts, and a step can be compiled and captured. All rows of a step
may choose experts of one rank, so every rank has room for every row, and an exchange that is exact sends that much
whatever is chosen. So rows go to all ranks (dispatch), each computes what its own experts give for them, and partial
sums go back to the ranks whose rows they are (combine). Ranks that compute the same tokens send a part of the rows
each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparse_attn.mesh import Mesh
from sparse_attn.pipeline.parallel.ranks import rows_each, shard_rows, stack_over_ranks, sum_over_ranks, swap_over_ranks

FP32 = 4  # bytes; of an id, too
NOBODY = -1  # the expert of a row of padding


def sent_rows(rows: int, mesh: Mesh) -> int:
    """Rows that one rank sends, of those of its step."""
    return rows if mesh.replica_size == 1 or rows == 1 else rows_each(rows, mesh.replica_size)


def dispatched_rows(rows: int, mesh: Mesh) -> int:
    """Rows that every rank computes its experts for, of a step of ``rows`` on each data rank; padding among them."""
    return rows if mesh.expert_replicas == 1 else mesh.expert.size * sent_rows(rows, mesh)


def most_dispatched(decode: int, prefill: int, mesh: Mesh) -> int:
    """dispatched_rows of the step that has most, of up to ``decode`` and ``prefill`` rows."""
    found = dispatched_rows(decode + prefill, mesh)
    if mesh.sharded is None or prefill < 2:
        return found
    return max(found, dispatched_rows(shard_rows(prefill, mesh.context), mesh.sharded))


def way_of(rows: int, mesh: Mesh) -> str:
    """How rows get to experts and back.

    "replicated": no data ranks share experts; ranks have the same rows, and one collective adds them up. "exchange":
    rows go to all, each rank adds up its own, and those that compute the same tokens gather theirs; the fewest bytes.
    "sum": rows go to all, and all add up all of them; one collective back in place of two or three, where a lone row is
    no bytes to speak of. Which it is follows from the mesh and from whether there is one row, so no other number of
    rows compiles anew.
    """
    if mesh.expert_replicas == 1:
        return "replicated"
    return "sum" if rows == 1 and mesh.replica_size > 1 else "exchange"


def dispatch(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, mesh: Mesh
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows of all data ranks that share experts: x [T, D], weights fp32 and ids int32 [T, K] -> the same of
    dispatched_rows, in the order of ranks. One collective. Rows of padding are zeros, of no expert."""
    dtype, top_k, alike = x.dtype, ids.shape[1], mesh.replica_size
    if alike > 1:
        own = sent_rows(x.shape[0], mesh)
        more = own * alike - x.shape[0]
        place = mesh.context.rank * mesh.tensor.size + mesh.tensor.rank
        x, weights, ids = (
            torch.unflatten(F.pad(value, (0, 0, 0, more), value=fill), 0, (alike, own))[place]
            for value, fill in ((x, 0), (weights, 0), (ids, NOBODY))
        )
    bits = [value.contiguous().view(torch.int32) for value in (x, weights, ids)]  # one message, of bits that stay
    whole = stack_over_ranks(torch.cat(bits, 1), mesh.expert).flatten(0, 1)
    x, weights, ids = whole.split([bits[0].shape[1], top_k, top_k], dim=1)
    return x.contiguous().view(dtype), weights.contiguous().view(torch.float32), ids.contiguous()


def combine(out: torch.Tensor, rows: int, mesh: Mesh) -> torch.Tensor:
    """The sums of what all ranks' experts give: out [dispatched_rows, D] -> [rows, D], this step's own. Partial sums
    are added up in fp32 in the order of ranks where they are exchanged. One to three collectives, see way_of."""
    ranks, own = mesh.expert, sent_rows(rows, mesh)
    if way_of(rows, mesh) == "sum":
        groups = torch.unflatten(sum_over_ranks(out, ranks), 0, (mesh.expert_replicas, mesh.replica_size * own))
        return groups[ranks.rank // mesh.replica_size].narrow(0, 0, rows)
    parts = swap_over_ranks(torch.unflatten(out, 0, (ranks.size, own)), ranks)
    found = parts.float().sum(0).to(out.dtype)
    for shared in (mesh.tensor, mesh.context):
        if shared.size > 1:
            found = stack_over_ranks(found, shared).flatten(0, 1)
    return found.narrow(0, 0, rows)


def dispatch_bytes(rows: int, hidden: int, top_k: int, itemsize: int, mesh: Mesh, way: str | None = None) -> int:
    """Bytes that a rank sends for a layer's rows there and back, counted as pipeline.parallel.ranks.exchanged_bytes
    counts. way: back, of way_of; None: as it says."""
    way = way_of(rows, mesh) if way is None else way
    if way == "replicated":
        return 0
    own, size = sent_rows(rows, mesh), mesh.expert.size
    there, back = (size - 1) * own * (hidden * itemsize + 2 * top_k * FP32), own * hidden * itemsize
    if way == "sum":
        return there + 2 * (size - 1) * back
    return there + (size - 1) * back + (mesh.replica_size - 1) * back


def dispatch_calls(rows: int, mesh: Mesh) -> int:
    """Collectives of a layer's rows there and back."""
    if way_of(rows, mesh) == "replicated":
        return 0
    return 2 if way_of(rows, mesh) == "sum" else 2 + sum(shared.size > 1 for shared in (mesh.tensor, mesh.context))
