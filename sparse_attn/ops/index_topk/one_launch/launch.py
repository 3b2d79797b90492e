"""The launcher of few rows scored and selected in one launch."""

from __future__ import annotations

import torch

from sparse_attn.device import pdl
from sparse_attn.ops.index_topk.one_launch.config import OneLaunchPlan
from sparse_attn.ops.index_topk.one_launch.kernels import score_and_select
from sparse_attn.ops.topk.dispatch import WINDOW_SHIFT
from sparse_attn.ops.topk.launch import Slots, emulated_smem
from sparse_attn.target import interpreting, target_of

CHUNK = 4096  # columns read at once where a row is streamed


def one_launch(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    top_k: int,
    out: torch.Tensor,
    views: list[torch.Tensor],
    counters: torch.Tensor,
    how: OneLaunchPlan,
    slots: Slots | None = None,
) -> None:
    """Into ``out`` [rows, top_k], or with ``slots`` packed into [rows * top_k]: see topk.launch.Selection."""
    logits, offered = views
    next_n, heads, dim = q.shape[1:]
    rows, target = how.rows, target_of(q.device)
    threads = 32 * how.num_warps
    q, limits = q.flatten(0, 1), context_lens.reshape(-1)
    ctas = rows * how.ctas_per_row
    indptr, states = (None, None) if slots is None else slots[:2]
    score_and_select[(ctas,)](
        q, cache, weights, limits, block_table, logits, out, indptr, states, offered, counters,
        emulated_smem(logits, ctas, how, threads), rows, how.width, *cache.shape[:2], block_table.shape[1], heads,
        top_k, next_n, *q.stride()[:2], cache.stride(0), *weights.stride(), limits.stride(0), block_table.stride(0),
        logits.stride(0),
        D=dim, PAD_H=how.padded_heads, WHOLE_H=how.padded_heads == heads, FP8_DOT=not interpreting(),
        BLOCK_SIZE=1 if slots is None else slots.block_size, MOST=how.most, RESIDENT=how.resident, PARTS=how.parts,
        CTAS=how.ctas_per_row, CHUNK=CHUNK, WINDOW_SHIFT=WINDOW_SHIFT, SMEM_WORDS=how.smem_words, THREADS=threads,
        num_warps=how.num_warps, **pdl.launched(target),
    )  # fmt: skip
