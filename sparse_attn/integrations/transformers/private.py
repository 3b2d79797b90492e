"""What transformers offers under private names alone, as of 5.24."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def implementation(config: Any) -> str | None:
    """The attention implementation that a model's config names."""
    return config._attn_implementation


def forget(interface: type, name: str) -> None:
    """Take back ``interface.register(name, ...)``, which has no counterpart."""
    mapping: dict[str, Any] = vars(interface)["_global_mapping"]
    mapping.pop(name, None)


def documents_of(mask_function: Callable) -> torch.Tensor | None:
    """The document of each row, [batch, rows], of the mask function that transformers makes for packed sequences; None
    of any other mask function. A function is known by its code, which is a constant of what makes it."""
    from transformers import masking_utils

    parts = _captured(mask_function, masking_utils.and_masks).get("mask_functions", ())
    if len(parts) != 2:
        return None
    # Within a document, rows and keys at their positions.
    if (
        _captured(parts[0], masking_utils.remap_positions_for_packed_sequence).get("mask_function")
        is not masking_utils.causal_mask_function
    ):
        return None
    return _captured(parts[1], masking_utils.packed_sequence_mask_function).get("packed_sequence_mask")


def _captured(function: Any, maker: Any) -> dict[str, Any]:
    """What ``function`` holds of the call of ``maker`` that made it, by name; nothing where another made it."""
    code = getattr(function, "__code__", None)
    if code is None or code not in maker.__code__.co_consts:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__)))
