"""Debug mode: with SPARSE_ATTN_DEBUG=1 values on the device are checked before an op runs.

Readers treat a wild index as none. In debug mode it is a ValueError that names op, argument, place and value. Padding
stays legal: -1 for an index, a request, a position, a slot or a block, and a length <= 0. An op's rules are a function
of its package's reference.py. They take those of the op's arguments that they name, and are made of the helpers below.
A check waits for the device, so a call that is being captured is not checked. Plans whose tensors all lie on the host
are checked without debug mode, too.

A call that no kernel made for this GPU takes runs on a slower one that every GPU has. Debug mode warns of it, once for
each op and reason: launchers hand their choice to ``warn_of_slow_path``.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Sequence

import torch

from sparse_attn.framework import streams
from sparse_attn.framework.dispatch import Choice
from sparse_attn.framework.torch_private import dispatch_modes

INT32_MAX = 2**31 - 1


@functools.cache
def on() -> bool:
    """Whether SPARSE_ATTN_DEBUG asks for it, read when an op first runs."""
    return os.environ.get("SPARSE_ATTN_DEBUG", "0").lower() in ("1", "true", "on", "yes")


class SlowPathWarning(UserWarning):
    """A faster kernel of this GPU refuses a call, and why."""


def look(name: str, rules: Callable[..., None], *arguments: object, always_on_host: bool = False) -> None:
    """Apply the ``rules`` of op ``name``. Nothing is checked while tracing or capturing. always_on_host: without debug
    mode, too, where it waits for no device."""
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    if not _looks([value.device for value in tensors]) and not (always_on_host and on_host(*tensors)):
        return
    try:
        rules(*arguments)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def on_host(*tensors: torch.Tensor) -> bool:
    """Whether the values of all ``tensors`` lie on the host, and nobody traces what is done with them."""
    if torch.compiler.is_compiling() or dispatch_modes():
        return False
    plain = (torch.Tensor, torch.nn.Parameter)
    return all(type(tensor) in plain and tensor.device.type == "cpu" for tensor in tensors)


def warn_of_slow_path(name: str, device: torch.device, *choices: Choice) -> None:
    """SlowPathWarning, once for each reason, where op ``name`` has faster kernels on ``device`` than those chosen for a
    call."""
    if on() and _looks([device]) and (reasons := [reason for choice in choices for reason in choice.slow_path]):
        with _WARNING:
            _warn_once(f"{name}: {'; '.join(reasons)}")


_WARNING = threading.RLock()


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, SlowPathWarning, stacklevel=2)


def _looks(devices: Sequence[torch.device]) -> bool:
    return not torch.compiler.is_compiling() and on() and not any(map(streams.capturing, devices))


def refuse(
    name: str,
    values: torch.Tensor,
    bad: torch.Tensor,
    allowed: str,
    *,
    limit: torch.Tensor | None = None,
    row: torch.Tensor | None = None,
) -> None:
    """ValueError at the first of ``values`` that is ``bad``.

    limit: what takes the place of {} in ``allowed`` where it differs from value to value. row: the row a value belongs
    to, where its place does not say it.
    """
    if not bool(bad.any()):
        return
    place = tuple(bad.nonzero()[0].tolist())
    if limit is not None:
        allowed = allowed.format(limit.expand_as(values)[place].item())
    where = "" if row is None else f" of row {row[place].item()}"
    raise ValueError(f"{name}{list(place)}{where}: got {values[place].item()}, allowed: {allowed}")


def places(name: str, values: torch.Tensor, count: int, of: str, row: torch.Tensor | None = None) -> None:
    """-1 or within [0, count)."""
    wide = values.long()
    refuse(name, values, (wide < -1) | (wide >= count), f"-1, or 0 to {count - 1} ({of})", row=row)


def at_most(name: str, values: torch.Tensor, limit: int | torch.Tensor, of: str) -> None:
    """No more than ``limit``, a number or one per value; anything <= 0 is none."""
    bad = values.long() > limit
    if isinstance(limit, torch.Tensor):
        refuse(name, values, bad, f"at most {{}} ({of})", limit=limit)
    else:
        refuse(name, values, bad, f"at most {limit} ({of})")


def at_least(name: str, values: torch.Tensor, limit: int, of: str) -> None:
    refuse(name, values, values.long() < limit, f"at least {limit} ({of})")


def indptr(name: str, values: torch.Tensor, capacity: int, of: str, first: int = 0) -> None:
    """From ``first`` on within [0, capacity], and no value below the one before it."""
    wide = values.long()
    counted = torch.arange(values.shape[0], device=values.device) >= first
    refuse(name, values, counted & ((wide < 0) | (wide > capacity)), f"0 to {capacity} ({of})")
    before = wide.roll(1)
    falls = (wide < before) & counted.roll(1) & counted
    falls[:1] = False
    refuse(name, values, falls, "at least {} (the value before it)", limit=before)


def ranges(start: str, starts: torch.Tensor | None, end: str, ends: torch.Tensor | None, width: int, of: str) -> None:
    """Rows' ranges within [0, width]; an end at or below its start is an empty row."""
    if starts is not None:
        refuse(start, starts, (starts < 0) | (starts.long() > width), f"0 to {width} ({of})")
    if ends is not None:
        at_most(end, ends, width, of)


def slots(name: str, values: torch.Tensor, cache: torch.Tensor, ranks: int = 1) -> None:
    """-1 or a slot of ``cache``, or of those of so many ``ranks``, and none of them twice."""
    count = cache.shape[0] * cache.shape[1] * ranks
    places(name, values, count, "slots of the cache")
    order = values.argsort(stable=True)
    again = torch.zeros_like(values, dtype=torch.bool)
    order = order[values[order] >= 0]
    again[order[1:]] = values[order[1:]] == values[order[:-1]]
    refuse(name, values, again, "slots that no other row writes")


def blocks(table: torch.Tensor, used: torch.Tensor, count: int | None, name: str = "block_table") -> None:
    """The ``used`` blocks of a table are -1 or within [0, count); None: any that is not below -1."""
    wide = table.long()
    if count is None:
        refuse(name, table, used & (wide < -1), "at least -1")
    else:
        refuse(name, table, used & ((wide < -1) | (wide >= count)), f"-1, or 0 to {count - 1} (blocks of the cache)")


def used_by(table: torch.Tensor, requests: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """bool like ``table``: which of its blocks (requests, columns) name; what lies outside it is left out."""
    requests, columns = torch.broadcast_tensors(requests.long(), columns)
    inside = (requests >= 0) & (requests < table.shape[0]) & (columns >= 0) & (columns < table.shape[1])
    used = torch.zeros_like(table, dtype=torch.bool)
    used[requests[inside], columns[inside]] = True
    return used


def paged(cache: torch.Tensor, context_lens: torch.Tensor, block_table: torch.Tensor, max_context_len: int) -> None:
    """Lengths [requests, next_n] within their bound and their request's table, whose blocks are the cache's."""
    block_size, (_, columns) = cache.shape[1], block_table.shape
    at_most("context_lens", context_lens, max_context_len, "max_context_len")
    at_most("context_lens", context_lens, columns * block_size, "what block_table has room for")
    if context_lens.numel():
        longest = context_lens.long().amax(1, keepdim=True)
        column = torch.arange(columns, device=cache.device)
        blocks(block_table, column * block_size < longest, cache.shape[0])


def gathered(
    cache: torch.Tensor, block_table: torch.Tensor, kv_indptr: torch.Tensor, starts: torch.Tensor | None, capacity: int
) -> None:
    """Requests' rows within ``capacity`` and their request's table, whose blocks are the cache's; ``starts`` of
    rings."""
    block_size, (_, columns) = cache.shape[1], block_table.shape
    indptr("kv_indptr", kv_indptr, capacity, "capacity")
    lengths = kv_indptr.long().diff()
    room = columns * block_size
    before = torch.cat([kv_indptr[:1], kv_indptr[:-1]]).long()
    refuse("kv_indptr", kv_indptr, kv_indptr > before + room, "at most {} (what the row of block_table has room for)",
           limit=before + room)  # fmt: skip
    first = torch.zeros_like(lengths)
    if starts is not None:
        refuse("starts", starts, (starts < 0) & (lengths > 0), "at least 0")
        first = starts.long().clamp_min(0) // block_size
        lengths = lengths + torch.where(lengths > 0, starts.long() % block_size, 0)
    if columns:
        turn = (torch.arange(columns, device=cache.device) - first.unsqueeze(1)) % columns
        blocks(block_table, turn * block_size < lengths.unsqueeze(1), cache.shape[0])


def finite(name: str, values: torch.Tensor | None) -> None:
    if values is not None:
        refuse(name, values, ~torch.isfinite(values), "finite numbers")


def not_nan(name: str, values: torch.Tensor | None) -> None:
    if values is not None:
        refuse(name, values, torch.isnan(values), "numbers")
