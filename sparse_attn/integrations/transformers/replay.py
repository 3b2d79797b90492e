"""What a model's indexers selected, recorded in one forward and used again in another.

A trainer that replays the selection of a rollout attends to the same keys, whatever its own weights would select.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sparse_attn.framework.torch_private import assert_on_device
from sparse_attn.integrations.transformers.refusals import refuse

HELD = "sparse_attn_indices"  # of an indexer, while it is recorded or replayed


@contextlib.contextmanager
def record_indices(model: Any) -> Iterator[dict[int, torch.Tensor]]:
    """Keep what the indexers of ``model`` select within the block.

    Calls follow each other, as a prefill and the steps of ``generate`` do: their rows stand behind each other.

    Args:
        model: a model of transformers under attn_implementation="sparse_attn".

    Yields:
        What is filled when the block ends: by layer with an indexer, int32 [batch, rows, k], cache positions (of
        DeepSeek-V4 entries) ascending, -1 behind.

    Raises:
        ValueError: a model without indexers, or one that is recorded or replayed already; a call in grad mode.
    """
    recorded: dict[int, torch.Tensor] = {}
    parts: dict[int, list[torch.Tensor]] = {}

    def recorder(layer: int) -> Callable:
        def keep(bounds: torch.Tensor, select: Callable[[], torch.Tensor]) -> torch.Tensor:
            if torch.is_grad_enabled():
                refuse("record_indices", "a call in grad mode, which may run twice", "calls under torch.no_grad()")
            parts.setdefault(layer, []).append(select())
            return parts[layer][-1]

        return keep

    with _held(model, recorder):
        yield recorded
    recorded.update({layer: torch.cat(found, 1) for layer, found in parts.items()})


@contextlib.contextmanager
def replay_indices(model: Any, indices: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Have the indexers of ``model`` select ``indices`` within the block.

    A backward belongs into the block, too, where activations are checkpointed. Indices are not copied.

    Args:
        model: a model of transformers under attn_implementation="sparse_attn".
        indices: as record_indices gives them, for the rows of one call.

    Raises:
        ValueError: a layer too many or too few; a model that is recorded or replayed already; in a call, indices of
            another shape, and such as are not ascending, or outside of what their row may see. Where indices lie on a
            GPU, the device stops.
        TypeError: indices that are no int32.
    """
    for layer, found in indices.items():
        if found.dtype != torch.int32:
            raise TypeError(f"indices[{layer}]: got dtype {found.dtype}, allowed: int32")

    def player(layer: int) -> Callable:
        if layer not in indices:
            refuse("indices", f"none of layer {layer}", "those of every layer with an indexer")
        return lambda bounds, select: _checked(layer, indices[layer], bounds)

    with _held(model, player) as layers:
        if unknown := sorted(set(indices) - set(layers)):
            refuse("indices", f"those of layer {unknown[0]}", f"those of layers {', '.join(map(str, layers))}")
        yield


def selected(indexer: Any, bounds: torch.Tensor, select: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What ``indexer`` selects of rows that may see ``bounds``, int32 [batch, rows, 2]: ``select()``, unless it is
    replayed."""
    held = getattr(indexer, HELD, None)
    return select() if held is None else held(bounds, select)


@contextlib.contextmanager
def _held(model: Any, hold: Callable[[int], Callable]) -> Iterator[list[int]]:
    found = dict(_indexers(model))
    if not found:
        refuse("model", f"a {type(model).__name__} without indexers", "a model of transformers with indexers")
    if any(hasattr(one, HELD) for one in found.values()):
        refuse("model", "one that is recorded or replayed already", "one at a time")
    holders = {layer: hold(layer) for layer in found}
    for layer, one in found.items():
        setattr(one, HELD, holders[layer])
    try:
        yield list(found)
    finally:
        for one in found.values():
            delattr(one, HELD)


def _indexers(model: Any) -> Iterator[tuple[int, Any]]:
    """(layer, indexer) of attention layers that have one of their own."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            owner = module if hasattr(module, "indexer") else getattr(module, "compressor", None)
            indexer = getattr(owner, "indexer", None)
            if indexer is not None:
                yield module.layer_idx, indexer


def _checked(layer: int, indices: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    if indices.shape[:2] != bounds.shape[:2] or indices.dim() != 3:
        refuse(f"indices[{layer}]", f"shape {list(indices.shape)}", f"[{bounds.shape[0]}, {bounds.shape[1]}, k]")
    first, end = bounds[..., :1], bounds[..., 1:]
    seen = ((indices >= first) & (indices < end)) | (indices == -1)
    before, after = indices[..., :-1], indices[..., 1:]
    rising = (after == -1) | ((before >= 0) & (after > before))
    good, message = seen.all() & rising.all(), "ascending indices of what a row may see, -1 behind"
    if good.is_cuda or torch.compiler.is_compiling():
        assert_on_device(good, f"indices[{layer}]: allowed: {message}")
    elif not good:
        wrong = ~(seen.all(-1) & rising.all(-1))
        batch, row = (int(place) for place in wrong.nonzero()[0])
        refuse(f"indices[{layer}]", f"{indices[batch, row].tolist()} in row {row} of sequence {batch}", message)
    return indices
