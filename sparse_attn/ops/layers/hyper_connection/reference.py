"""The oracle: gates, Sinkhorn's normalisation, weighted sums."""

from __future__ import annotations

import functools

import torch

from sparse_attn.framework import debug
from sparse_attn.framework.lanes import by_rows


def hyper_mix(
    streams: torch.Tensor,
    raw: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``raw``: fp32 [tokens, (2 + N) * N], fn times the flattened streams before their norm is divided out."""
    count = streams.shape[1]
    sizes = [count, count, count * count]
    parts = (raw * inverse_rms(streams, norm_eps)).split(sizes, dim=1)
    a, b, c = (part * factor + offset for part, factor, offset in zip(parts, scale.unbind(), base.split(sizes)))
    pre = by_rows(torch.sigmoid, a) + eps
    comb = torch.softmax(c.unflatten(1, (count, count)), dim=2) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return collapse(streams, pre), 2 * by_rows(torch.sigmoid, b), comb


def hyper_merge(out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    terms = (comb.unsqueeze(3) * streams.float().unsqueeze(2)).unbind(1)  # comb[j, k] * streams[j]
    mixed = functools.reduce(torch.add, terms)  # in order, whatever the number of tokens is
    return (post.unsqueeze(2) * out.float().unsqueeze(1) + mixed).to(streams.dtype)


def collapse_head(
    streams: torch.Tensor, raw: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, eps: float, norm_eps: float
) -> torch.Tensor:
    return collapse(streams, by_rows(torch.sigmoid, raw * inverse_rms(streams, norm_eps) * scale + base) + eps)


def inverse_rms(streams: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """fp32 [tokens, 1]."""
    return torch.rsqrt(streams.flatten(1).float().pow(2).mean(1, keepdim=True) + norm_eps)


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.add, (pre.unsqueeze(2) * streams.float()).unbind(1)).to(streams.dtype)


# --- what debug mode asks of values


def rules_of_hyper_mix(streams: torch.Tensor, raw: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> None:
    debug.finite("streams", streams)
    debug.finite("fn times streams", raw)
    debug.finite("base", base)
    debug.finite("scale", scale)


def rules_of_hyper_merge(out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> None:
    debug.finite("out", out)
    debug.finite("streams", streams)
    debug.finite("post", post)
    debug.finite("comb", comb)
