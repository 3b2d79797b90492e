"""What transformers offers under private names alone, as of 5.24."""

from __future__ import annotations

from typing import Any


def implementation(config: Any) -> str | None:
    """The attention implementation that a model's config names."""
    return config._attn_implementation


def forget(interface: type, name: str) -> None:
    """Take back ``interface.register(name, ...)``, which has no counterpart."""
    mapping: dict[str, Any] = vars(interface)["_global_mapping"]
    mapping.pop(name, None)
