"""The vocabulary's two matrices, each rank with its rows of them: [rows, hidden], padded to as many on every rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models.products import product
from sparse_attn.pipeline.options import Options
from sparse_attn.pipeline.parallel.ranks import join_over_ranks, sum_over_ranks
from sparse_attn.weight_layout import Weight


def embedding(tokens: torch.Tensor, table: torch.Tensor, *, mesh: Mesh = ONE_RANK) -> torch.Tensor:
    """The rows of ``tokens`` [T], of ids of the whole vocabulary: [T, hidden]. A row is on one rank, and the others add
    zeros."""
    ranks = mesh.tensor
    if ranks.size == 1:
        return F.embedding(tokens, table)
    local = tokens - ranks.rank * table.shape[0]
    held = (local >= 0) & (local < table.shape[0])
    found = F.embedding(torch.where(held, local, 0), table)
    return sum_over_ranks(torch.where(held.unsqueeze(-1), found, 0), ranks)


def token_logits(
    hidden: torch.Tensor,
    head: Weight,
    vocab_size: int,
    options: Options,
    *,
    mesh: Mesh = ONE_RANK,
) -> torch.Tensor:
    """fp32 [T, vocab_size] of hidden [T, hidden], the same bits on every rank."""
    logits = product(hidden, head, options.exact())
    if mesh.tensor.size == 1:
        return logits.float()
    return join_over_ranks(logits, mesh.tensor)[:, :vocab_size].float().contiguous()
