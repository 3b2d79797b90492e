"""What a row may see, in the place of a mask of rows times keys.

The cached keys that a row may see are one range: from the first token of its sequence that is no padding, or of its
document among those packed into one sequence, to the row's own. So the mask of a step is int32 [batch, 1, rows, 2],
which holds that range of cache positions for each row. A row that is padding has an empty range.
"""

from __future__ import annotations

from typing import Any

import torch

from sparse_attn.framework import streams
from sparse_attn.framework.torch_private import assert_on_device
from sparse_attn.integrations.transformers.private import documents_of
from sparse_attn.integrations.transformers.refusals import refuse


def row_bounds(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    attention_mask: torch.Tensor | None = None,
    kv_offset: int = 0,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> torch.Tensor:
    """The mask function of this implementation: (first, end) of each row's range, int32 [batch, 1, rows, 2].

    attention_mask: [batch, at most kv_length], False for padding, or None. The tokens of a sequence are contiguous: the
    padding is in front of them or behind them. q_offset, kv_offset: cache positions of the first row and the first key
    that a layer returns. local_size: a row sees that many keys at most, itself included. Ranges count from kv_offset.

    Raises ValueError for masks that are not causal, for padding between tokens, and for rows behind the end of a cache
    of fixed size. Where the host would have to wait to know, the device is stopped.
    """
    from transformers.masking_utils import causal_mask_function

    function, documents = others.get("mask_function", causal_mask_function), None
    if function is not causal_mask_function and local_size is None:
        documents = documents_of(function)
        if documents is None:
            refuse("attention_mask", "a mask that is not causal", "causal sequences, or such packed into one")
    _check_room(q_offset + q_length, kv_offset + kv_length)
    at = torch.arange(q_length, dtype=torch.int64, device=device) + q_offset
    if attention_mask is None:
        first = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        seen = (at >= 0).expand(batch_size, -1)
    else:
        tokens = attention_mask.to(torch.bool)
        columns = torch.arange(tokens.shape[1], dtype=torch.int64, device=device)
        first = tokens.to(torch.int64).argmax(-1, keepdim=True)
        last = torch.where(tokens, columns, -1).amax(-1, keepdim=True)
        _check_contiguous(tokens.sum(-1, keepdim=True), first, last)
        seen = (first <= at) & (at <= last)
    first = first.expand(-1, q_length)
    if documents is not None:
        begins = torch.cat([documents.new_ones(batch_size, 1), documents.diff(dim=1)], 1) != 0
        first = torch.where(begins, at, 0).cummax(1).values
    if local_size is not None:
        first = torch.maximum(first, at + 1 - local_size)
    ranges = torch.stack([first, torch.where(seen, at + 1, first)], -1) - kv_offset
    return ranges.clamp(min=0).to(torch.int32).unsqueeze(1)


def _check_room(end: int | torch.Tensor, room: int) -> None:
    if not isinstance(end, torch.Tensor):
        if end > room:
            refuse("cache", "more tokens than fit", f"max_len = {room}")
        return
    fits = end <= room
    if fits.is_cuda or torch.compiler.is_compiling():
        assert_on_device(fits, f"cache: got more tokens than fit, allowed: max_len = {room}")
    elif not fits:
        refuse("cache", "more tokens than fit", f"max_len = {room}")


def _check_contiguous(count: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> None:
    message = (
        "attention_mask: got padding between tokens, allowed: padding in front of a sequence or behind it. Where"
        " generate infers a mask, as for an assistant, allowed: a pad_token_id that no text holds, or eos_token_id"
    )
    good = ((count == last - first + 1) | (count == 0)).all()
    if torch.compiler.is_compiling() or streams.capturing(good.device):
        assert_on_device(good, message)
    elif not good:
        raise ValueError(message)


def is_bounds(mask: Any) -> bool:
    """Whether a mask, whole or without its dimension of heads, is what ``row_bounds`` returned."""
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.int32 and mask.shape[-1] == 2
