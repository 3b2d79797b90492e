"""What all layers of a step share."""

from __future__ import annotations

from typing import NamedTuple

from sparse_attn.mesh import Mesh
from sparse_attn.pipeline import CacheLayouts, num_decode_rows
from sparse_attn.pipeline.options import Options
from sparse_attn.types import StepPlan


class ModelStep(NamedTuple):
    """plan: where latents are cached, this context rank's own (pipeline.parallel.context.own_plan). options: as
    options_of gives them. sharded: between attentions, hidden states are of this context rank's rows alone
    (pipeline.parallel.ranks.own_rows); attention sees all rows of ``plan``.

    Tensor ranks have heads of their own, whose outputs they sum. The indexer is whole on each of them; they may share
    its rows (pipeline.parallel.rows). Context ranks have keys of their own, and so is what they select.
    """

    plan: StepPlan
    layouts: CacheLayouts
    options: Options
    mesh: Mesh  # no default: Dynamo of torch 2.11 makes none of a tuple's
    sharded: bool = False


def options_of(plan: StepPlan, options: Options) -> Options:
    """Of a step: one of decode rows alone multiplies exact rows."""
    if options.activations == "exact" or plan.positions.shape[0] != num_decode_rows(plan):
        return options
    return options.exact()
