"""What torch offers under private names alone, each tried with every version the README names."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def mark_sizes(tensor: torch.Tensor, dynamic: Iterable[int] = (), static: Iterable[int] = ()) -> torch.Tensor:
    """``tensor``, its ``dynamic`` dimensions symbols of their own for Dynamo and its ``static`` ones constants.

    Says what torch._dynamo.maybe_mark_dynamic and mark_static say, without the seconds it takes to import torch._dynamo where
    nothing is ever compiled. A view or a copy of the tensor carries no marks.
    """
    if not torch.compiler.is_compiling():
        tensor._dynamo_weak_dynamic_indices = set(dynamic)
        tensor._dynamo_static_indices = set(static)
        tensor._has_dynamo_dim_marking = True
    return tensor
