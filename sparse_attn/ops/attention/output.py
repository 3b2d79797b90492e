"""Where attention is written to: its output, or one share of it per split, merged afterwards."""

from __future__ import annotations

import math

import torch
import triton

from sparse_attn import workspace
from sparse_attn.device import chain
from sparse_attn.ops.attention import config, kernels
from sparse_attn.ops.attention.parts import Part
from sparse_attn.target import target_of

LOG2_E = math.log2(math.e)
MERGED_ELEMENTS = 8192  # partial values a merging program holds


class Output:
    """Where the programs of some rows write to: (out, lse), or ``shares`` of them, whose sink is counted once, where they are
    merged."""

    def __init__(self, out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None, shares: list[torch.Tensor]):
        self.out, self.lse, self.sink, self.split = out, lse, sink, bool(shares)
        self.to, self.to_lse = shares or (out.unsqueeze(0), lse.unsqueeze(0))

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
    who: str, out: torch.Tensor, lse: torch.Tensor, parts: tuple[Part, ...], sink: torch.Tensor | None
) -> list[Output]:
    """Of the ``parts`` of a step."""
    shares = []
    if any(part.splits > 1 for part in parts):
        shares, _ = workspace.take(who, config.scratch(parts, *out.shape[1:]), out.device)
    results = []
    for part in parts:
        rows, number = slice(part.first, part.first + part.rows), 2 if part.splits > 1 else 0
        results.append(Output(out[rows], lse[rows], sink, list(shares[:number])))
        shares = shares[number:]
    return results


def merge_shares(results: list[Output]) -> None:
    """What is in shares into (out, lse), in one launch: rows that follow each other."""
    split = [result for result in results if result.split]
    if not split:
        return
    (first, *more), tokens = split, sum(result.out.shape[0] for result in split)
    out, lse = (at.as_strided((tokens, *at.shape[1:]), at.stride()) for at in (first.out, first.lse))
    merge(first.to, first.to_lse, first.sink, out, lse, 1.0, *((rest.to, rest.to_lse) for rest in more))


def merge(outs, lses, sink, out, lse, to_log2, more=None):
    """Merge states [states, tokens, heads, ...] into out and lse; ``to_log2`` times the states' lse is in base 2. more: the
    states of the last tokens where these are others, and differ in their number; their tokens and heads lie as the first's."""
    tokens, heads, d_v = out.shape
    if tokens * heads == 0:
        return
    states, more_states = outs.shape[0], (more[0] if more else outs).shape[0]
    (block_s, block_d), (more_block_s, more_block_d) = (_blocks(number, d_v) for number in (states, more_states))
    kernels.merge[(tokens, heads, triton.cdiv(d_v, min(block_d, more_block_d)))](
        outs,
        lses,
        *(more or (None, None)),
        sink,
        out,
        lse,
        outs.shape[1],
        states,
        more_states,
        d_v,
        to_log2,
        *outs.stride()[:3],
        *lses.stride(),
        *(at.stride(0) if more else 0 for at in more or (outs, lses)),
        *out.stride()[:2],
        lse.stride(0),
        BLOCK_S=block_s,
        MORE_BLOCK_S=more_block_s,
        BLOCK_D=block_d,
        MORE_BLOCK_D=more_block_d,
        num_warps=4,
        **chain.chained(target_of(out.device)),
    )


def _blocks(states: int, d_v: int) -> tuple[int, int]:
    """(states, values) that a merging program holds."""
    block_s = max(2, triton.next_power_of_2(states))
    return block_s, min(max(64, MERGED_ELEMENTS // block_s), triton.next_power_of_2(d_v))
