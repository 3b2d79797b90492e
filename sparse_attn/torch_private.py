"""What torch offers under private names alone, each tried with every version the README names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch.utils import _pytree

Named = TypeVar("Named", bound=tuple)


def mark_sizes(tensor: torch.Tensor, dynamic: Iterable[int] = (), static: Iterable[int] = ()) -> torch.Tensor:
    """``tensor``, its ``dynamic`` dimensions symbols of their own for Dynamo and its ``static`` ones constants.

    Says what torch._dynamo.maybe_mark_dynamic and mark_static say, without the seconds it takes to import torch._dynamo where
    nothing is ever compiled. A view or a copy of the tensor carries no marks.
    """
    if not torch.compiler.is_compiling():
        if tensor._base is not None:  # Dynamo looks at what a view is a view of, too
            mark_sizes(tensor._base, dynamic=range(tensor._base.dim()))
        tensor._dynamo_weak_dynamic_indices = set(dynamic)
        tensor._dynamo_static_indices = set(static)
        tensor._has_dynamo_dim_marking = True
    return tensor


def exported(kind: type[Named]) -> type[Named]:
    """Let torch.export save and load programs that take or return this NamedTuple, under its own name."""
    torch.serialization.add_safe_globals([kind])
    _pytree._register_namedtuple(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
    return kind
