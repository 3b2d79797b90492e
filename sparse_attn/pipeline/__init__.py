"""A layer's sparse attention, composed of operators.

A step holds decode rows first, then prefill rows; either part may be empty. Each part computes into tensors of its own,
which are concatenated at the end. So no row is written by both. Nothing here reads a value on the device: shapes tell
which part is empty.

``latent``: models that cache a latent per token. ``windowed``: models that cache a window of raw keys and compressed
entries.
"""

from sparse_attn.ops.topk.fused import LOGITS_BYTES
from sparse_attn.pipeline.bounds import Bounds, workspace_size
from sparse_attn.pipeline.latent import Selection, attend, index_select, write_index_keys, write_latents
from sparse_attn.pipeline.layouts import (
    CACHE_KINDS,
    INDEX_CACHE_KINDS,
    CacheLayouts,
    cache_layouts,
    check_block_size,
    default_block_size,
)
from sparse_attn.pipeline.memory import CacheUse, cache_bytes, cache_uses
from sparse_attn.pipeline.select import num_decode_rows

__all__ = [
    "CACHE_KINDS", "INDEX_CACHE_KINDS", "LOGITS_BYTES", "Bounds", "CacheLayouts", "CacheUse", "Selection", "attend",
    "cache_bytes", "cache_layouts", "cache_uses", "check_block_size", "default_block_size", "index_select",
    "num_decode_rows", "workspace_size", "write_index_keys", "write_latents",
]  # fmt: skip
