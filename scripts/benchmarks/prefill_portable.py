"""Sparse prefill attention through the portable kernel, at DeepSeek-V3.2's shape."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.registry import Record, suite
from sparse_attn.ops.attention import sparse_attn_prefill
from sparse_attn.testing.timing import floor_us, time_graph
from sparse_attn.types import Ragged

TOKENS, TOP_K, D_QK, D_V = 4096, 2048, 576, 512
# FlashMLA's sparse_fwd on an H200 (vLLM 0.25.0's build), by heads and keys.
FLASHMLA_US = {(128, 8192): 3727.0, (128, 32768): 3800.0, (128, 131072): 4028.0, (64, 32768): 1950.0}


def random_rows(tokens: int, rows: int, top_k: int) -> Ragged:
    """``top_k`` distinct rows in random order per token."""
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device="cuda")
    for part in chosen.split(1024):
        part.copy_(torch.rand(part.shape[0], rows, device="cuda").topk(top_k).indices)
    return Ragged(chosen.flatten(), torch.arange(tokens + 1, dtype=torch.int32, device="cuda") * top_k)


@suite("prefill_portable")
def prefill_portable() -> Iterator[Record]:
    "bf16 sparse_attn_prefill, 4096 tokens, top-k 2048, 576/512."
    for (heads, rows), peer_us in FLASHMLA_US.items():
        q = torch.randn(TOKENS, heads, D_QK, device="cuda", dtype=torch.bfloat16) * 0.1
        kv = torch.randn(rows, D_QK, device="cuda", dtype=torch.bfloat16) * 0.1
        ragged = random_rows(TOKENS, rows, TOP_K)
        us = time_graph([lambda: sparse_attn_prefill(q, kv, ragged, scale=D_QK**-0.5, d_v=D_V)], rest_s=0.4)
        flops = 2 * TOKENS * TOP_K * heads * (D_QK + D_V)
        nbytes = 2 * (q.numel() + kv.numel() + TOKENS * heads * D_V)
        on_h200 = torch.cuda.get_device_name() == "NVIDIA H200"
        yield Record(
            f"heads {heads}, rows {rows} ({flops / us / 1e6:.0f} TF/s)",
            us,
            peer="FlashMLA sparse_fwd" if on_h200 else None,
            peer_us=peer_us if on_h200 else None,
            floor_us=floor_us(flops=flops, nbytes=nbytes),
        )
