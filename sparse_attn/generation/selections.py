"""What the indexers of one request selected, row by row. Watching changes no forward."""

from __future__ import annotations

from typing import Any

import torch

from sparse_attn.framework.torch_private import TorchDispatchMode, schema
from sparse_attn.mesh import ALONE, Ranks
from sparse_attn.pipeline.parallel.ranks import all_positions
from sparse_attn.spec import CompressedSpec, Spec

_SELECTING = ("sparse_attn::index_topk_prefill", "sparse_attn::index_topk_decode")
_SELECTING_SLOTS = "sparse_attn::index_topk_decode_slots"  # takes what index_topk_decode takes
_SELECTING_OWN = ("sparse_attn::take_winners", "sparse_attn::merge_candidates")


class Watch(TorchDispatchMode):
    """Inside ``with Watch() as seen``, keeps what every selecting op selects: int32 [rows, top_k], -1 for none. For an
    op that returns slots, the selection is computed once more as positions. ranks: those that select together, each of
    which watches; what all of them select is gathered, in one more collective each time, and kept by each."""

    def __init__(self, ranks: Ranks = ALONE):
        super().__init__()
        self.ranks = ranks
        self.selected: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = schema(func).name
        if name in _SELECTING:
            self.selected.append(result.cpu())
        elif name == _SELECTING_SLOTS:
            self.selected.append(torch.ops.sparse_attn.index_topk_decode(*args, **(kwargs or {})).cpu())
        elif name in _SELECTING_OWN:
            block_size = bound(func, args, kwargs)["block_size"]
            self.selected.append(all_positions(result, self.ranks, block_size=block_size).cpu())
        return result


def bound(func, args, kwargs) -> dict[str, Any]:
    """The arguments of an operator's call by name."""
    names = [argument.name for argument in schema(func).arguments]
    return dict(zip(names, args)) | (kwargs or {})


def indexed_layers(spec: Spec | CompressedSpec) -> list[int]:
    """Layers with an indexer of their own."""
    if isinstance(spec, CompressedSpec):
        return [layer for layer, kind in enumerate(spec.layer_kinds) if kind == "indexed"]
    return [layer for layer, own in enumerate(spec.index_layers) if own]


def by_layer(selected: list[torch.Tensor], spec: Spec | CompressedSpec) -> list[torch.Tensor]:
    """What each indexer selected at every position of a single request: int32 [positions, top_k] each.

    selected: of all steps, one after the other, each with either prefill or decode rows.
    """
    layers = len(indexed_layers(spec))
    return [torch.cat(selected[layer::layers]) for layer in range(layers)]


def shares(chosen: torch.Tensor, seen: torch.Tensor, width: int) -> torch.Tensor:
    """Share of each bin of ``width`` entries that each row selected, of those it sees; fp32 [rows, bins], NaN where it
    sees none.

    chosen: int32 [rows, top_k] entries, -1 for none. seen: int64 [rows], how many entries each row sees.
    """
    bins = -(-max(int(seen.max()), 1) // width)
    places = torch.where(chosen >= 0, chosen // width, bins).long()
    counts = torch.zeros(len(chosen), bins + 1, dtype=torch.float32, device="cpu")
    counts.scatter_add_(1, places, torch.ones_like(places, dtype=torch.float32))
    there = (seen[:, None] - torch.arange(bins, device="cpu") * width).clamp(0, width)
    return counts[:, :bins] / there


def attended(spec: Spec | CompressedSpec, tokens: int, first: int = 0) -> tuple[float, float]:
    """(keys a query attends to, keys it could), the mean over layers and over positions ``first`` to ``tokens`` - 1.
    Keys of DeepSeek-V4 are those of a layer's window and its entries."""
    there = torch.arange(first + 1, tokens + 1, device="cpu")
    if not isinstance(spec, CompressedSpec):
        return there.clamp_max(spec.index.top_k).double().mean().item(), there.double().mean().item()
    found = []
    for most in (spec.index.top_k, tokens):
        rows = [_entries(spec, layer, there, most) + there.clamp_max(spec.window) for layer in range(spec.num_layers)]
        found.append(torch.stack(rows).double().mean().item())
    return found[0], found[1]


def _entries(spec: CompressedSpec, layer: int, there: torch.Tensor, most: int) -> torch.Tensor:
    """most: entries that an indexer selects."""
    kind = spec.layer_kinds[layer]
    if kind == "window":
        return torch.zeros_like(there)
    complete = there // spec.ratio(layer)
    return complete.clamp_max(most) if kind == "indexed" else complete
