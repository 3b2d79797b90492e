"""The operators, in rooms that read as the pipeline does: indexer, topk, ragged, attention; and layers, which is what a
whole model needs around them."""

from __future__ import annotations

from pathlib import Path


def packages() -> list[str]:
    """The operator packages, such as "indexer.scores"."""
    root = Path(__file__).parent
    return sorted(".".join(path.parent.relative_to(root).parts) for path in root.glob("*/*/reference.py"))
