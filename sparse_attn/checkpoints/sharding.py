"""What a rank holds of every weight: its own rows, columns and experts, by the mesh.

Heads, inner widths and experts are sharded evenly and in order, so a rank's part is one run of a dimension, or two
where gate and up lie one behind the other. The vocabulary is padded to as many rows on every rank. Everything else lies
on every rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_attn.checkpoints.names import kind_of
from sparse_attn.mesh import Mesh
from sparse_attn.models.params import ROPE_NAMES, hold_weight
from sparse_attn.models.shapes import Shapes
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.weight_layout import PackedWeight, Weight, weight_part, weight_shape

# (dimension of the mesh, dimension of the weight), and runs of that dimension which are sharded each.
CUTS: dict[str, tuple[tuple[str, int, int], ...]] = {
    "embed": (("tensor", 0, 1),),
    "lm_head": (("tensor", 0, 1),),
    "attn.q_b": (("tensor", 0, 1),),
    "attn.w_uk": (("tensor", 0, 1),),
    "attn.w_uv": (("tensor", 0, 1),),
    "attn.o": (("tensor", 1, 1),),
    "attn.sink": (("tensor", 0, 1),),
    "attn.o_a": (("tensor", 0, 1),),
    "attn.o_b": (("tensor", 1, 1),),
    "mlp.gate_up": (("tensor", 0, 2),),
    "mlp.down": (("tensor", 1, 1),),
    "moe.gate_up": (("expert", 0, 1), ("expert_tensor", 1, 2)),
    "moe.down": (("expert", 0, 1), ("expert_tensor", 2, 1)),
    "moe.shared_gate_up": (("expert_sum", 0, 2),),
    "moe.shared_down": (("expert_sum", 1, 1),),
}
PADDED = ("embed", "lm_head")
SHARDED = (
    "over tensor ranks: heads, vocabulary, inner width of MLPs; over expert ranks: routed experts; over context ranks: "
    "paged caches"
)
REPLICATED = (
    "latent projections, compressors, indexers, norms, gates, hyper-connections, projections of multi-token "
    "prediction, rings and states"
)


class Kept(NamedTuple):
    """What a rank holds of a weight [..., rows, columns]: ranges of leading entries, of rows and of columns. shape: of
    the rank's weight, with rows of zeros where the rows do not fill it."""

    shape: tuple[int, ...]
    entries: range
    rows: tuple[range, ...]
    columns: range


def kept_of(name: str, shape: tuple[int, ...], mesh: Mesh) -> Kept:
    """What this process holds of the weight called ``name``, which has ``shape`` in all."""
    held: list[tuple[range, ...]] = [(range(size),) for size in shape]
    own = list(shape)
    kind = kind_of(name)
    for dimension, axis, runs in CUTS.get(kind, ()):
        ranks, size = getattr(mesh, dimension), shape[axis]
        if ranks.size == 1:
            continue
        if kind in PADDED:
            each = -(-size // ranks.size)
            held[axis] = (range(min(ranks.rank * each, size), min((ranks.rank + 1) * each, size)),)
            own[axis] = each
            continue
        if size % (ranks.size * runs):
            raise ValueError(f"mesh: got {ranks.size} ranks for {size // runs} of {name}, allowed: a divisor")
        each, whole = size // runs // ranks.size, size // runs
        starts = (run * whole + ranks.rank * each for run in range(runs))
        held[axis] = tuple(range(start, start + each) for start in starts)
        own[axis] = each * runs
    if len(shape) == 1:
        return Kept(tuple(own), range(1), held[0], range(1))
    (entries,) = held[0] if len(shape) == 3 else (range(1),)
    (columns,) = held[-1]
    return Kept(tuple(own), entries, held[-2], columns)


def rank_shapes(shapes: Shapes, mesh: Mesh) -> Shapes:
    """The shapes of this process's weights, of those of whole ones by name."""
    return {name: kept_of(name, shape, mesh).shape for name, shape in shapes.items()}


def check_mesh(spec: Spec | CompressedSpec, mesh: Mesh) -> None:
    """ValueError where a model cannot be sharded over the mesh."""
    inner, moe = spec.moe.intermediate_size, spec.moe
    counts = [("tensor", spec.num_heads, "heads"), ("expert", moe.num_experts, "experts")]
    if isinstance(spec, CompressedSpec):
        counts.append(("tensor", spec.o_groups, "groups of heads"))
    elif not all(spec.moe_layers):
        counts.append(("tensor", spec.dense_intermediate_size, "inner values of dense MLPs"))
    counts.append(("expert_tensor", inner, "inner values of an expert"))
    counts.append(("expert_sum", moe.num_shared * inner, "of shared experts"))
    for dimension, size, what in counts:
        ranks = getattr(mesh, dimension).size
        if size % ranks:
            raise ValueError(f"mesh: got {ranks} ranks for {size} {what} of {spec.name}, allowed: a divisor")


def shard(name: str, weight: Weight, mesh: Mesh) -> Weight:
    """This process's part of a whole weight; the weight itself where it holds all of it."""
    shape = weight_shape(weight)
    kept = kept_of(name, shape, mesh)
    if kept.shape == shape:
        return weight
    if not isinstance(weight, PackedWeight):
        return _shard_plain(weight, kept)
    if len(shape) == 3:
        own = slice(kept.entries.start, kept.entries.stop)
        weight = PackedWeight(weight.codes[own], weight.scales[own], weight.layout)
    return weight_part(weight, kept.rows, kept.columns)


def shard_params(params: dict[str, Weight], mesh: Mesh) -> dict[str, Weight]:
    """This process's part of a whole model's weights."""
    return {
        name: weight if name in ROPE_NAMES else hold_weight(shard(name, weight, mesh))
        for name, weight in params.items()
    }


def _shard_plain(weight: torch.Tensor, kept: Kept) -> torch.Tensor:
    if weight.dim() == 1:
        return torch.cat([weight[rows.start : rows.stop] for rows in kept.rows])
    if weight.dim() == 3:
        weight = weight[kept.entries.start : kept.entries.stop]
    found = weight_part(weight, kept.rows, kept.columns)
    assert isinstance(found, torch.Tensor)
    own = found.new_zeros((*found.shape[:-2], kept.shape[-2], found.shape[-1]))
    own[..., : found.shape[-2], :] = found
    return own
