"""Window keys and pooled entries of DeepSeek-V4, as a layer's cache holds them: one that grows, or one of fixed size.

Entries follow transformers' rules: they are pooled by place in the cache, and a row sees those that its position has
passed. A single row of a layer without an indexer sees all entries. Source: modeling_deepseek_v4.py of transformers
5.24.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

Turn = tuple[torch.Tensor, torch.Tensor]
POOLED_ROPE = "compress"


def turn_of(cos: torch.Tensor, sin: torch.Tensor) -> Turn:
    """(cos, sin) [..., rope / 2] of pairs of neighbours, as factors [..., rope] of both."""
    return cos.repeat_interleave(2, -1).float(), torch.stack([-sin, sin], -1).flatten(-2).float()


def over_heads(turn: Turn) -> Turn:
    """The factors [batch, rows, rope] for values [batch, rows, heads, dim]."""
    return turn[0].unsqueeze(2), turn[1].unsqueeze(2)


def rotate(values: torch.Tensor, turn: Turn) -> torch.Tensor:
    """``values`` [..., dim] with the last values rotated, in fp32, by pairs of neighbours."""
    cos, sin = turn
    rest, rope = values.split([values.shape[-1] - cos.shape[-1], cos.shape[-1]], -1)
    rope = rope.float()
    swapped = torch.unflatten(rope, -1, (-1, 2)).flip(-1).flatten(-2)
    return torch.cat([rest, torch.addcmul(rope * cos, swapped, sin).to(values.dtype)], -1)


class Growing(NamedTuple):
    """A layer of transformers' own cache, or none, where the step is the whole sequence."""

    cache: Any
    layer: int

    @property
    def state(self) -> Any:
        return None if self.cache is None else self.cache.layers[self.layer]

    def window(self, keys: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the step's keys [batch, 1, rows, dim]. columns: int32 [batch, rows, window], places that rows see, -1
        for none. Returns the keys to attend to, [batch, n, dim], and those columns among them."""
        if self.cache is not None:
            keys = self.cache.update(keys, keys, self.layer)[0]
        return keys.squeeze(1).contiguous(), columns

    def entries(self, module: Any, hidden: torch.Tensor, name: str) -> torch.Tensor:
        """All entries so far, [batch, n, dim], those that this step completes among them."""
        values, gates, state = module.kv_proj(hidden), module.gate_proj(hidden), self.state
        ratio, dim, first = module.compress_rate, module.head_dim, 0
        if state is None:
            whole = values.shape[1] // ratio * ratio
            values, gates = values[:, :whole], gates[:, :whole]
        else:
            values, gates, first = state.store_compression_weights(name, values, gates)
        count = values.shape[1] // ratio
        made = values[:, :0, :dim]
        if count:
            values, gates = (torch.unflatten(part, 1, (count, ratio)) for part in (values, gates))
            gates = gates + module.position_bias
            if values.shape[-1] == 2 * dim:
                before = (None, None) if state is None else state.update_overlap_state(name, values, gates, dim)
                values, gates = _led(values, before[0], 0.0, dim), _led(gates, before[1], -torch.inf, dim)
            at = torch.arange(first, first + count * ratio, ratio, dtype=torch.int64, device=hidden.device)
            made = pooled(module, values, gates, at)
        return made if state is None else state.update_compressor_states(name, made)

    def limits(self, at: torch.Tensor, ratio: int, count: int, selects: bool) -> torch.Tensor:
        """How many of ``count`` entries each row sees, int32 [batch, rows]. at: positions [batch, rows]."""
        if at.shape[1] == 1 and not selects:
            return torch.full(at.shape, count, dtype=torch.int32, device=at.device)
        return ((at + 1) // ratio).to(torch.int32)

    def finish(self, rows: int) -> None:
        pass


def _led(parts: torch.Tensor, before: torch.Tensor | None, empty: float, dim: int) -> torch.Tensor:
    """[batch, windows, 2 * ratio, dim]: the leading half of the window before, then the trailing half of the own."""
    last = torch.full_like(parts[:, :1, :, :dim], empty) if before is None else before.to(parts.dtype).unsqueeze(1)
    lead = last if parts.shape[1] == 1 else torch.cat([last, parts[:, :-1, :, :dim]], 1)
    return torch.cat([lead, parts[..., dim:]], 2)


class Fixed:
    """A layer of ``static_cache``, and the place of the step's first row in it, int64 []."""

    def __init__(self, layer: Any, index: int):
        self.layer, self.index = layer, index

    def window(self, keys: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Growing. After a single row the keys are the cache's ring, where it lies."""
        start, rows = self.layer.begin(keys), keys.shape[2]
        held = self.layer.extend(keys, start)
        return held, torch.where(columns < 0, -1, self.layer.rows_of(columns, start, rows))

    def entries(self, module: Any, hidden: torch.Tensor, name: str) -> torch.Tensor:
        """Room for all entries, [batch, room, dim]. Behind those that are complete lies anything."""
        pool, rows, dim = self.layer.pools[name], hidden.shape[1], module.head_dim
        step = pool.step(self.layer.cumulative_length, rows)
        values, gates = pool.extend(module.kv_proj(hidden), module.gate_proj(hidden), step)
        values, gates = (torch.unflatten(part, 1, (-1, module.compress_rate)) for part in (values, gates))
        gates = gates + module.position_bias
        if pool.shape.overlap:
            nothing = torch.unflatten(step.places < 0, 0, (-1, module.compress_rate))[:-1].unsqueeze(-1)
            lead = torch.where(nothing, 0.0, values[:, :-1, :, :dim])
            values = torch.cat([lead, values[:, 1:, :, dim:]], 2)
            gates = torch.cat([gates[:, :-1, :, :dim].masked_fill(nothing, -torch.inf), gates[:, 1:, :, dim:]], 2)
        made = pooled(module, values, gates, step.windows * module.compress_rate)
        pool.entries.index_copy_(1, step.windows, made)
        return pool.entries

    def limits(self, at: torch.Tensor, ratio: int, count: int, selects: bool) -> torch.Tensor:
        """See Growing; no row sees an entry that is not complete."""
        complete = ((self.layer.cumulative_length + at.shape[1]) // ratio).to(torch.int32)
        if at.shape[1] == 1 and not selects:
            return complete.expand(at.shape)
        return torch.minimum(((at + 1) // ratio).to(torch.int32), complete)

    def finish(self, rows: int) -> None:
        self.layer.advance(rows, first=self.index == 0)


State = Growing | Fixed


def pooled(module: Any, values: torch.Tensor, gates: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Entries [batch, windows, dim] of values and gates [batch, windows, tokens, dim]; at: int64 [windows]."""
    weights = gates.softmax(2, dtype=torch.float32).to(values.dtype)
    entries = module.kv_norm((values * weights).sum(2))
    cos, sin = module.rotary_emb(entries, position_ids=at.unsqueeze(0), layer_type=POOLED_ROPE)
    return rotate(entries, turn_of(cos, sin))
