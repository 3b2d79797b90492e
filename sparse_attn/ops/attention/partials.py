"""Where attention is written to: out and lse, or the partials of a split row, combined afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from sparse_attn.ops.attention.split_kv import Waves
from sparse_attn.workspace import Buffer, Scratch

LOG2_E = math.log2(math.e)


def scratch(waves: Sequence[Waves], heads: int, d_v: int, scaled: bool = False) -> Scratch:
    """The partials of every split, of each of ``waves`` that is split: fp32 outputs and base-2 lse. scaled: fp16
    outputs, and a scale for each half of their columns."""
    return Scratch(tuple(buffer for some in waves if some.splits > 1 for buffer in _buffers(some, heads, d_v, scaled)))


def _buffers(waves: Waves, heads: int, d_v: int, scaled: bool) -> Iterator[Buffer]:
    each = waves.splits, waves.rows, heads
    yield Buffer("out_partial", (*each, d_v), torch.float16 if scaled else torch.float32)
    yield Buffer("lse_partial", each, torch.float32)
    if scaled:
        yield Buffer("scale_partial", (*each, 2), torch.float32)


class Output:
    """Where the CTAs of some rows write to.

    out_partial, lse_partial: [splits, rows, heads, ...]; of rows that are whole, out and lse. The sink is counted once:
    where rows are whole by them, else where partials are combined.
    """

    def __init__(
        self, out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None, partials: Sequence[torch.Tensor] = ()
    ):
        self.out, self.lse, self.sink, self.split = out, lse, sink, bool(partials)
        self.out_partial, self.lse_partial, *scales = partials or (out.unsqueeze(0), lse.unsqueeze(0))
        self.scaled, self.scale_partial = (
            bool(scales),
            (scales or [self.lse_partial])[0],
        )  # anything where there is none

    @property
    def has_sink(self) -> bool:
        """Whether the CTAs count the sink."""
        return self.sink is not None and not self.split

    @property
    def pointers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(sink, out, lse) of a CTA; the first is anything where there is none."""
        return self.lse_partial if self.sink is None else self.sink, self.out_partial, self.lse_partial

    @property
    def strides(self) -> tuple[int, ...]:
        """By split, token and head of out, by split and token of lse."""
        return *self.out_partial.stride()[:3], *self.lse_partial.stride()[:2]


def outputs(
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    waves: Sequence[Waves],
    views: Sequence[torch.Tensor],
) -> list[Output]:
    """Of each of ``waves``. views: of what ``scratch`` asks for."""
    split = [some for some in waves if some.splits > 1]
    each = len(views) // len(split) if split else 0
    results, taken = [], 0
    for some in waves:
        rows, number = slice(some.first, some.first + some.rows), each if some.splits > 1 else 0
        results.append(Output(out[rows], lse[rows], sink, views[taken : taken + number]))
        taken += number
    return results
