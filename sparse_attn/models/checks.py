"""Checks of what every forward is given."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from sparse_attn.checkpoints.names import spelling_of
from sparse_attn.framework import debug
from sparse_attn.models.params import ROPE_NAMES
from sparse_attn.models.shapes import Shapes, param_shapes, prediction_shapes
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.types import StepPlan


def check_params(params: Iterable[str], spec: Spec | CompressedSpec, *, predicts: bool = False) -> None:
    """ValueError where ``params``, a dict or its names, lacks a weight of the forward. predicts: of a layer of
    multi-token prediction, which ``spec`` has (prediction_spec), in place of the forward's."""
    if torch.compiler.is_compiling():  # a name that is missing ends the trace
        return
    names, shapes = _needed(spec, predicts)
    missing = names.difference(params)
    if not missing:
        return
    name = next(name for name in (*shapes, *ROPE_NAMES) if name in missing)
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    what = "the table of cos and sin, which model_rope_tables(spec) gives"
    if name in shapes:
        what = str(list(shapes[name]))
        if not predicts:  # whose number in files is the model's number of layers
            what += f", which files call {spelling_of(spec).sources(name, ())[0]}"
    maker = "prediction_shapes(spec, 1)" if predicts else "param_shapes(spec)"
    raise ValueError(
        f"params: got no {name} ({what}){more}, allowed: every name of models.shapes.{maker}, and "
        f"{' and '.join(_ropes(spec))}; checkpoints.load.load and models.params.random_params give them"
    )


@functools.lru_cache(maxsize=16)
def _needed(spec: Spec | CompressedSpec, predicts: bool) -> tuple[frozenset[str], Shapes]:
    """The names that a forward takes, and the shapes of the weights among them."""
    shapes = prediction_shapes(spec, 1) if predicts else param_shapes(spec)
    return frozenset((*shapes, *_ropes(spec))), shapes


def _ropes(spec: Spec | CompressedSpec) -> tuple[str, ...]:
    return ROPE_NAMES if isinstance(spec, CompressedSpec) else ROPE_NAMES[:1]


def check_tokens(tokens: torch.Tensor, plan: StepPlan) -> None:
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"tokens: got dtype {tokens.dtype}, allowed: torch.int64, torch.int32")
    if tokens.dim() != 1 or tokens.shape[0] != plan.positions.shape[0]:
        rows = plan.positions.shape[0]
        raise ValueError(f"tokens: got shape {list(tokens.shape)}, allowed: [{rows}], a row per row of the plan")


def check_caches(name: str, caches: Sequence[torch.Tensor | None], present: Sequence[bool]) -> None:
    """One entry per layer, a tensor where ``present`` says so and None elsewhere."""
    if len(caches) != len(present):
        raise ValueError(f"{name}: got {len(caches)} entries, allowed: num_layers = {len(present)}")
    for layer, own in enumerate(present):
        if own != (caches[layer] is not None):
            raise ValueError(
                f"{name}[{layer}]: got {'None' if own else 'a tensor'}, allowed: "
                f"{'a tensor, the layer has such a cache' if own else 'None, the layer has no such cache'}"
            )


def check_plan(
    plan: StepPlan,
    written: torch.Tensor,
    paged: torch.Tensor | None,
    *,
    block_size: int,
    ratio: int = 1,
    ranks: int = 1,
) -> None:
    """ValueError where a plan whose values lie on the host names slots or blocks that a model's caches do not have.

    written: what plan.slot_mapping points into, a part of it on each of ``ranks``. paged: what plan.block_table points
    into, None where there is nothing; a block holds ``block_size`` entries of ``ratio`` tokens, of all ranks together.
    """
    table, requests = plan.block_table, plan.request_ids
    if not debug.on_host(table, requests, plan.positions, plan.slot_mapping):
        return
    debug.slots("plan.slot_mapping", plan.slot_mapping, written, ranks)
    if paged is None:
        return
    count, columns = table.shape
    debug.places("plan.request_ids", requests, count, "requests")
    entries = (plan.positions.long() + 1) // ratio
    debug.refuse(
        "plan.positions", plan.positions, entries > columns * block_size,
        f"at most {(columns * block_size + 1) * ratio - 2} (what plan.block_table has room for)",
    )  # fmt: skip
    held = torch.zeros(count + 1, dtype=torch.int64, device="cpu")  # the last of rows of padding
    held.scatter_reduce_(0, torch.where(requests < 0, count, requests).long(), entries, "amax")
    first = torch.arange(columns, device="cpu") * block_size
    debug.blocks(table, first < held[:-1].unsqueeze(1), paged.shape[0], "plan.block_table")
