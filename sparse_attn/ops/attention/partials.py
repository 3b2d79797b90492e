"""Where attention is written to: its output, or one share of it per split, merged afterwards."""

from __future__ import annotations

import math

import torch
import triton

from sparse_attn import workspace
from sparse_attn.device import grid, pdl
from sparse_attn.ops.attention import config
from sparse_attn.ops.attention.portable import kernels
from sparse_attn.ops.attention.split_kv import Part
from sparse_attn.target import target_of

LOG2_E = math.log2(math.e)
MERGED_ELEMENTS = 8192  # partial values a merging program holds


class Output:
    """Where the programs of some rows write to: (out, lse), or ``shares`` of them (and those shares' scales, if they
    have any), whose sink is counted once, where they are merged."""

    def __init__(self, out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None, shares: list[torch.Tensor]):
        self.out, self.lse, self.sink, self.split = out, lse, sink, bool(shares)
        self.to, self.to_lse, *scales = shares or (out.unsqueeze(0), lse.unsqueeze(0))
        self.scaled, self.scales = bool(scales), (scales or [self.to_lse])[0]  # anything where there are none

    @property
    def has_sink(self) -> bool:
        """Whether the programs count the sink."""
        return self.sink is not None and not self.split

    @property
    def pointers(self) -> tuple[torch.Tensor, ...]:
        """(sink, out, lse) of a program; the first is anything where there is none."""
        return self.to_lse if self.sink is None else self.sink, self.to, self.to_lse

    @property
    def strides(self) -> tuple[int, ...]:
        """By split, token and head of out, by split and token of lse."""
        return *self.to.stride()[:3], *self.to_lse.stride()[:2]


def outputs(
    who: str,
    out: torch.Tensor,
    lse: torch.Tensor,
    parts: tuple[Part, ...],
    sink: torch.Tensor | None,
    scaled: bool = False,
) -> list[Output]:
    """Of the ``parts`` of a step. scaled: as ``config.scratch`` has it."""
    shares = []
    if any(part.splits > 1 for part in parts):
        shares, _ = workspace.take(who, config.scratch(parts, *out.shape[1:], scaled), out.device)
    results = []
    for part in parts:
        rows, number = slice(part.first, part.first + part.rows), 2 + scaled if part.splits > 1 else 0
        results.append(Output(out[rows], lse[rows], sink, list(shares[:number])))
        shares = shares[number:]
    return results


def merge(outs, lses, sink, out, lse, to_log2):
    """Merge states [states, tokens, heads, ...] into out and lse; ``to_log2`` times the states' lse is in base 2."""
    tokens, heads, d_v = out.shape
    if tokens * heads == 0:
        return
    if heads > grid.MOST:
        for some in grid.spans(heads):
            drain = None if sink is None else sink[some]
            merge(outs[:, :, some], lses[:, :, some], drain, out[:, some], lse[:, some], to_log2)
        return
    states = outs.shape[0]
    block_s = max(2, triton.next_power_of_2(states))
    block_d = min(max(64, MERGED_ELEMENTS // block_s), triton.next_power_of_2(d_v))
    grid.check("outs d_v", d_v, block_d)
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
        **pdl.launched(target_of(out.device)),
    )
