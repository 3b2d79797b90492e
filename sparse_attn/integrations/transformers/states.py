"""Window keys and pooled entries of DeepSeek-V4, as a layer's cache holds them: one that grows, or one of fixed size.

Entries follow transformers' rules: they are pooled by place in the cache, and a row sees those that its position has
passed. A single row of a layer without an indexer sees all entries. Source: modeling_deepseek_v4.py of transformers
5.24.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from sparse_attn.framework.registration import followed
from sparse_attn.integrations.transformers.refusals import other_than

POOLED_ROPE = "compress"
SELECTING = "compressed_sparse_attention"  # layers with an indexer


class Turn(NamedTuple):
    """Factors of values [..., rope], rotated by pairs of neighbours. Compiled: cos and sin as factors of the values and
    of their neighbours, fp32 [..., rope]. Else: cos + i sin, complex [..., rope / 2], and nothing."""

    first: torch.Tensor
    second: torch.Tensor | None

    def over_heads(self) -> Turn:
        """For values [batch, rows, heads, dim]."""
        return Turn(self.first.unsqueeze(2), None if self.second is None else self.second.unsqueeze(2))

    def back(self) -> Turn:
        """The rotation that takes this one back."""
        return Turn(self.first.conj_physical(), None) if self.second is None else Turn(self.first, -self.second)

    def of(self, rows: slice) -> Turn:
        return Turn(self.first[:, rows], None if self.second is None else self.second[:, rows])


def turn_of(cos: torch.Tensor, sin: torch.Tensor) -> Turn:
    """Of cos and sin [..., rope / 2]."""
    if torch.compiler.is_compiling():  # which has no code for complex numbers
        cos, sin = cos.float().repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2).float()
        return Turn(cos, sin)
    return Turn(torch.complex(cos.float(), sin.float()), None)


def rotate(values: torch.Tensor, turn: Turn) -> torch.Tensor:
    """``values`` [..., dim] with the last values rotated, in fp32. They are written in place where it is not compiled,
    which takes half of the calls."""
    if turn.second is None:
        if followed((values,), (0,)):  # what made them may need them as they are
            values = values.clone()
        rope = values[..., -2 * turn.first.shape[-1] :]
        pairs = torch.view_as_complex(torch.unflatten(rope.float(), -1, (-1, 2)))
        rope.copy_(torch.view_as_real(pairs * turn.first).flatten(-2))
        return values
    rest = values.shape[-1] - turn.first.shape[-1]
    cos, sin = functional.pad(turn.first, (rest, 0)), functional.pad(turn.second, (rest, 0))
    wide = values.float()
    turned = torch.addcmul(wide * cos, torch.unflatten(wide, -1, (-1, 2)).flip(-1).flatten(-2), sin)
    columns = torch.arange(values.shape[-1], device=values.device)
    return torch.where(columns < rest, values, turned.to(values.dtype))


def written(values: torch.Tensor) -> torch.Tensor:
    """``values``, which compiled code writes to memory. A product of one row, which is generated code, else computes
    them anew for each of its outputs."""
    return values.as_strided(values.shape, values.stride()) if torch.compiler.is_compiling() else values


def normed(norm: Any, values: torch.Tensor) -> torch.Tensor:
    """transformers' norm of ``values``, by one kernel where a call would run nothing else."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

    if other_than(norm, DeepseekV4RMSNorm):
        return norm(values)
    weight = norm.weight
    return functional.rms_norm(values.float(), weight.shape, weight.float(), norm.variance_epsilon).to(values.dtype)


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

    def __init__(self, layer: Any):
        self.layer = layer

    def window(self, keys: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Growing. After a single row the keys are the cache's ring, where it lies."""
        start, rows = self.layer.begin(keys), keys.shape[2]
        held = self.layer.extend(keys, start)
        return held, torch.where(columns < 0, -1, self.layer.rows_of(columns, start, rows))

    def entries(self, module: Any, hidden: torch.Tensor, name: str) -> torch.Tensor:
        """Room for all entries, [batch, room, dim]. Behind those that are complete lies anything."""
        pool, rows, start = self.layer.pools[name], hidden.shape[1], self.layer.cumulative_length
        values, gates = module.kv_proj(hidden), module.gate_proj(hidden)
        if rows == 1:
            pool.extend_by_one(values, gates, start)
            values, gates = self._one_window(module, pool, start)
            windows = (start // module.compress_rate).unsqueeze(0)
        else:
            step = pool.step(start, rows)
            values, gates = self._windows(module, pool, pool.extend(values, gates, step), step)
            windows = step.windows
        made = pooled(module, values, gates, windows * module.compress_rate)
        pool.entries.index_copy_(1, windows, made)
        return pool.entries

    def _windows(
        self, module: Any, pool: Any, projected: tuple[torch.Tensor, torch.Tensor], step: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and gates [batch, windows, tokens, dim] of the windows that the step touches."""
        values, gates = (torch.unflatten(part, 1, (-1, module.compress_rate)) for part in projected)
        gates, dim = gates + module.position_bias, module.head_dim
        if pool.shape.overlap:
            nothing = torch.unflatten(step.places < 0, 0, (-1, module.compress_rate))[:-1].unsqueeze(-1)
            lead = torch.where(nothing, 0.0, values[:, :-1, :, :dim])
            values = torch.cat([lead, values[:, 1:, :, dim:]], 2)
            gates = torch.cat([gates[:, :-1, :, :dim].masked_fill(nothing, -torch.inf), gates[:, 1:, :, dim:]], 2)
        return values, gates

    def _one_window(self, module: Any, pool: Any, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As _windows of a single row, tokens in the order of the ring, which a softmax does not ask for."""
        ratio, dim, values = module.compress_rate, module.head_dim, pool.values
        gates = (torch.unflatten(pool.gates, 1, (-1, ratio)) + module.position_bias).flatten(1, 2)
        if pool.shape.overlap:
            own = pool.slots // ratio == (start // ratio) % 2
            nothing = ~own & (start < ratio)
            values = torch.where(own, values[..., dim:], values[..., :dim]).masked_fill(nothing, 0.0)
            gates = torch.where(own, gates[..., dim:], gates[..., :dim]).masked_fill(nothing, -torch.inf)
        return values.unsqueeze(1), gates.unsqueeze(1)

    def limits(self, at: torch.Tensor, ratio: int, count: int, selects: bool) -> torch.Tensor:
        """See Growing; no row sees an entry that is not complete."""
        complete = ((self.layer.cumulative_length + at.shape[1]) // ratio).to(torch.int32)
        if at.shape[1] == 1 and not selects:
            return complete.expand(at.shape)
        return torch.minimum(((at + 1) // ratio).to(torch.int32), complete)

    def finish(self, rows: int) -> None:
        self.layer.advance(rows)


State = Growing | Fixed


def pooled(module: Any, values: torch.Tensor, gates: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Entries [batch, windows, dim] of values and gates [batch, windows, tokens, dim]; at: int64 [windows]."""
    weights = gates.softmax(2, dtype=torch.float32).to(values.dtype)
    entries = normed(module.kv_norm, (values * weights).sum(2))
    cos, sin = module.rotary_emb(entries, position_ids=at.unsqueeze(0), layer_type=POOLED_ROPE)
    return rotate(entries, turn_of(cos, sin))
