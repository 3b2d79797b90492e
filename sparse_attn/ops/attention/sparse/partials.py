"""Where attention is written: to out and lse, or to the partials of a split row, which are combined afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from sparse_attn.ops.attention.sparse.problem import Call
from sparse_attn.ops.attention.sparse.split_kv import Waves
from sparse_attn.workspace import Buffer, Scratch

LOG2_E = math.log2(math.e)


def scratch(waves: Sequence[Waves], heads: int, d_v: int, scaled: bool = False, max_logits: bool = False) -> Scratch:
    """Partials of those of ``waves`` that are split: an fp32 output and a base-2 lse for every split.

    scaled: outputs are fp16, with a scale for each half of their columns. max_logits: with these, too.
    """
    split = (some for some in waves if some.splits > 1)
    return Scratch(tuple(buffer for some in split for buffer in _buffers(some, heads, d_v, scaled, max_logits)))


def _buffers(waves: Waves, heads: int, d_v: int, scaled: bool, max_logits: bool) -> Iterator[Buffer]:
    each = waves.splits, waves.rows, heads
    yield Buffer("out_partial", (*each, d_v), torch.float16 if scaled else torch.float32)
    yield Buffer("lse_partial", each, torch.float32)
    if scaled:
        yield Buffer("scale_partial", (*each, 2), torch.float32)
    if max_logits:
        yield Buffer("max_partial", each, torch.float32)


class Output:
    """Where the CTAs of some rows write.

    out_partial, lse_partial, max_partial: [splits, rows, heads, ...]; where rows are whole, out, lse and max_logits
    themselves. max_logits and max_partial may be None. The sink is counted once: by these CTAs where rows are whole, by
    the combine where they are split.
    """

    def __init__(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        sink: torch.Tensor | None,
        partials: Sequence[torch.Tensor] = (),
        max_logits: torch.Tensor | None = None,
    ):
        self.out, self.lse, self.sink, self.split = out, lse, sink, bool(partials)
        self.max_logits = self.max_partial = max_logits
        self.out_partial, self.lse_partial, *scales = partials or (out.unsqueeze(0), lse.unsqueeze(0))
        if partials and max_logits is not None:
            self.max_partial = scales.pop()
        self.scaled = bool(scales)
        self.scale_partial = scales[0] if scales else self.lse_partial  # anything where there is none

    @property
    def partials(self) -> tuple[torch.Tensor | None, ...]:
        """What the combine reads of split rows."""
        return self.out_partial, self.lse_partial, self.scale_partial, self.max_partial

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


def outputs(call: Call, waves: Sequence[Waves]) -> list[Output]:
    """One for each of ``waves``. The call's views are the buffers of ``scratch``, in its order."""
    views, max_logits = call.views, call.max_logits
    split = [some for some in waves if some.splits > 1]
    each = len(views) // len(split) if split else 0
    results, taken = [], 0
    for some in waves:
        rows, number = slice(some.first, some.first + some.rows), each if some.splits > 1 else 0
        partials, largest = views[taken : taken + number], None if max_logits is None else max_logits[rows]
        results.append(Output(call.out[rows], call.lse[rows], call.sink, partials, largest))
        taken += number
    return results
