"""Where attention is written to: its output, or one share of it per split, merged afterwards."""

from __future__ import annotations

import math

import torch
import triton

from sparse_attn import workspace
from sparse_attn.ops.attention import config, kernels

LOG2_E = math.log2(math.e)
MERGED_ELEMENTS = 8192  # partial values a merging program holds


class Output:
    """Where the programs of ``splits`` shares of (out, lse) write to; their sink is counted once, where shares are merged.
    The next one takes the same scratch, so its programs are launched behind this one's merge."""

    def __init__(self, who: str, out: torch.Tensor, lse: torch.Tensor, splits: int, sink: torch.Tensor | None):
        self.out, self.lse, self.sink, self.split = out, lse, sink, splits > 1
        self.to, self.to_lse = out.unsqueeze(0), lse.unsqueeze(0)
        if self.split:
            (self.to, self.to_lse), _ = workspace.take(who, config.scratch(*out.shape, splits), out.device)

    @property
    def has_sink(self) -> bool:
        """Whether the programs count the sink."""
        return self.sink is not None and not self.split

    @property
    def pointers(self) -> tuple[torch.Tensor, ...]:
        """(sink, out, lse) of a program; the first is anything where there is none to count."""
        return self.sink if self.has_sink else self.to_lse, self.to, self.to_lse

    @property
    def strides(self) -> tuple[int, ...]:
        """By split, token and head of out, by split and token of lse."""
        return *self.to.stride()[:3], *self.to_lse.stride()[:2]

    def merge(self) -> None:
        """All shares into (out, lse)."""
        if self.split:
            merge(self.to, self.to_lse, self.sink, self.out, self.lse, 1.0)


def merge(outs, lses, sink, out, lse, to_log2):
    """Merge states [states, tokens, heads, ...] into out and lse; ``to_log2`` times the states' lse is in base 2."""
    states, tokens, heads, d_v = outs.shape
    if tokens * heads == 0:
        return
    block_s = max(2, triton.next_power_of_2(states))
    block_d = min(max(64, MERGED_ELEMENTS // block_s), triton.next_power_of_2(d_v))
    kernels.merge[(tokens, heads, triton.cdiv(d_v, block_d))](
        outs,
        lses,
        sink,
        out,
        lse,
        states,
        d_v,
        to_log2,
        *outs.stride()[:3],
        *lses.stride(),
        *out.stride()[:2],
        lse.stride(0),
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        num_warps=4,
    )
