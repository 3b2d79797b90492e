"""Rules of debug mode for each argument."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug


def hyper_mix(
    streams: torch.Tensor,
    raw: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> None:
    debug.finite("streams", streams)
    debug.finite("fn times streams", raw)
    debug.finite("base", base)
    debug.finite("scale", scale)


def hyper_merge(out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> None:
    debug.finite("out", out)
    debug.finite("streams", streams)
    debug.finite("post", post)
    debug.finite("comb", comb)
