"""A static cache for DeepSeek-V4, whose tensors and addresses never change. transformers has none.

A layer holds what its next rows need: a ring of raw keys as long as the window, and for each compressor a ring of
projections that are not pooled yet and room for all its entries. The number of cached tokens lies on the device, so
one compiled or captured step serves every length. Importing this module imports transformers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, StaticCache

from sparse_attn.framework.target import target_of
from sparse_attn.framework.torch_private import mark_static_address
from sparse_attn.integrations.transformers.refusals import refuse
from sparse_attn.integrations.transformers.states import SELECTING
from sparse_attn.ops.attention.sparse.hopper.constants import D_V, SWAP_AB_HEADS

FEW_ROWS = 44  # from which Hopper's kernels take all heads of a row
LINE = 32  # of whose multiples are the rows of a block, those for entries and those for the window


class Shape(NamedTuple):
    """A compressor: it pools ``ratio`` tokens to an entry of ``dim`` values. overlap: with the ``ratio`` before."""

    ratio: int
    dim: int
    overlap: bool

    @property
    def ring(self) -> int:
        return self.ratio * (1 + self.overlap)


class Step(NamedTuple):
    """Where the rows of a step stand. start: int64 [], the place of the first one. windows: int64 [count], those that
    the step touches. places: int64 [(count + overlap) * ratio], tokens of these windows and of the one before."""

    start: torch.Tensor
    windows: torch.Tensor
    places: torch.Tensor


class Pool:
    """What a compressor holds.

    values, gates: [batch, ring, width] of the last tokens, those of place p in row p % ring. slots: int64 [ring, 1],
    the rows' numbers. entries: [batch, room + others, dim]; those that are not complete yet hold anything, and so do
    the ``others`` behind them.
    """

    def __init__(self, shape: Shape, max_len: int):
        self.shape = shape
        self.room = -(-(max_len // shape.ratio + 2) // LINE) * LINE
        self.values = self.gates = self.slots = self.entries = torch.empty(0, dtype=torch.float32, device="cpu")

    def allocate(self, batch: int, others: int, keys: torch.Tensor) -> None:
        """Make the tensors, of the dtype and on the device of ``keys``."""
        width = self.shape.dim * (1 + self.shape.overlap)
        self.values, self.gates = (keys.new_zeros(batch, self.shape.ring, width) for _ in range(2))
        self.slots = torch.arange(self.shape.ring, device=keys.device).unsqueeze(1)
        self.entries = keys.new_zeros(batch, self.room + others, self.shape.dim)

    def step(self, start: torch.Tensor, rows: int) -> Step:
        """The windows of ``rows`` rows from place ``start``, as many as there may be of them."""
        ratio, before = self.shape.ratio, int(self.shape.overlap)
        count, first = (rows + ratio - 2) // ratio + 1, start // ratio
        windows = first + torch.arange(count, device=start.device)
        places = (first - before) * ratio + torch.arange((count + before) * ratio, device=start.device)
        return Step(start, windows, places)

    def extend(self, values: torch.Tensor, gates: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep rows [batch, rows, width]; returns those of ``step.places``, [batch, places, width]."""
        return self._extended(self.values, values, step), self._extended(self.gates, gates, step)

    def _extended(self, held: torch.Tensor, projected: torch.Tensor, step: Step) -> torch.Tensor:
        rows, ring = projected.shape[1], self.shape.ring
        new, old = (step.places - step.start).clamp(0, rows - 1), step.places % ring
        both = torch.where((step.places >= step.start).unsqueeze(-1), projected[:, new], held[:, old])
        kept = min(rows, ring)
        slots = (step.start + torch.arange(rows - kept, rows, device=projected.device)) % ring
        held.index_copy_(1, slots, projected[:, rows - kept :])
        return both

    def extend_by_one(self, values: torch.Tensor, gates: torch.Tensor, start: torch.Tensor) -> None:
        """Keep one row [batch, 1, width] of place ``start``. Compiled products write it themselves."""
        slot = (start % self.shape.ring).unsqueeze(0)
        self.values.index_copy_(1, slot, values)
        self.gates.index_copy_(1, slot, gates)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.values, self.gates, self.entries


class WindowedLayer(CacheLayerMixin):
    """keys: [batch, block, dim], ``room`` rows of entries and then a ring of raw keys: that of place p is in row room +
    p % window. So a single row attends to one cache. pools: by a compressor's name; the index keys' blocks are as long.
    table: int32 [batch, 1], the block of each sequence. most_heads: see heads_at_once. listed: how many keys a row may
    attend to. indptr: int32 [batch * parts + 1], where lists of so many begin.

    max_len: tokens that it holds at most. selected: entries that a row attends to beside its window; None: all. parts:
    into how many rows the heads of one are taken apart at most. Tensors are made by the first step, which is not
    compiled.
    """

    is_compileable = True
    is_sliding = True

    def __init__(self, max_len: int, window: int, pools: dict[str, Shape], selected: int | None, parts: int):
        super().__init__()
        self.max_len, self.window = max_len, window
        self.pools = {name: Pool(shape, max_len) for name, shape in pools.items()}
        self.room = self.pools["compressor"].room if self.pools else 0
        self.listed, self.parts = window + (self.room if selected is None else selected), parts
        self.most_heads: int | None = None
        self.cumulative_length = torch.tensor(0, dtype=torch.int64, device="cpu")
        self.table = self.indptr = torch.empty(0, dtype=torch.float32, device="cpu")

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """key_states: [batch, 1, any, dim]. value_states: as key_states."""
        batch, _, _, dim = key_states.shape
        self.batch_size, self.device = batch, key_states.device
        others = -(-self.window // LINE) * LINE
        for pool in self.pools.values():
            pool.allocate(batch, others, key_states)
        self.keys = self.pools["compressor"].entries if self.pools else key_states.new_zeros(batch, others, dim)
        self.values = self.keys
        self.table = torch.arange(batch, dtype=torch.int32, device=self.device).unsqueeze(1)
        bounds = (batch * self.parts + 1) * self.listed
        self.indptr = torch.arange(0, bounds, self.listed, dtype=torch.int32, device=self.device)
        self.most_heads = heads_at_once(batch, key_states)
        self.cumulative_length = self.cumulative_length.to(self.device)
        constants = self.table, self.indptr, *(pool.slots for pool in self.pools.values())
        for tensor in (*self._tensors(), self.cumulative_length, *constants):
            mark_static_address(tensor)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **others: Any):
        """Refused: only the bridge's attention knows how to fill these tensors."""
        refuse("attn_implementation", "a static cache of sparse_attn under another implementation", "sparse_attn")

    def begin(self, keys: torch.Tensor) -> torch.Tensor:
        """The place of the first of these keys [batch, 1, rows, dim], int64 [], until ``advance``."""
        if not self.is_initialized:
            self.lazy_initialization(keys, keys)
        return self.cumulative_length

    def extend(self, keys: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Keep the step's keys [batch, 1, rows, dim]. Returns keys to attend to: after a single row ``keys``, where
        they lie; else [batch, window + rows, dim], the ring as it was and then the step's keys."""
        assert self.keys is not None
        rows, kept = keys.shape[2], min(keys.shape[2], self.window)
        keys = keys.squeeze(1)
        if rows == 1:
            self.keys.index_copy_(1, (start % self.window + self.room).unsqueeze(0), keys)
            return self.keys
        both = torch.cat([self.keys[:, self.room : self.room + self.window], keys], 1)
        slots = (start + torch.arange(rows - kept, rows, device=keys.device)) % self.window + self.room
        self.keys.index_copy_(1, slots, keys[:, rows - kept :])
        return both

    def rows_of(self, places: torch.Tensor, start: torch.Tensor, rows: int) -> torch.Tensor:
        """Rows, in what ``extend`` returned, of int32 places >= 0 that a row of the step sees."""
        ring = places % self.window
        return ring + self.room if rows == 1 else torch.where(places < start, ring, places - start + self.window)

    def advance(self, rows: int) -> None:
        """Count the rows of a step, which fit: see ``row_bounds``."""
        self.cumulative_length.add_(rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_len, 0

    def get_seq_length(self) -> Any:
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.max_len

    def reset(self) -> None:
        for tensor in self._tensors():
            tensor.zero_()
        self.cumulative_length.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, as transformers does for V4: what was pooled cannot be taken apart."""
        if tokens_to_remove:
            refuse("tokens_to_remove", tokens_to_remove, "0: entries that are pooled cannot be taken back")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """In place, so that what was compiled or captured still reads it."""
        for tensor in self._tensors():
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        if self.keys is None or not self.is_initialized and self.keys.numel() == 0:
            return ()
        parts = [part for pool in self.pools.values() for part in pool.tensors()]
        return tuple(parts) if self.pools else (self.keys,)


def heads_at_once(batch: int, keys: torch.Tensor) -> int | None:
    """How many heads of a sequence's single row attend together, as a row of their own, to keys [..., dim]; None: all.

    On Hopper swap-AB takes a few heads, and is faster over bf16 rows than the portable kernel, as long as rows are few.
    """
    few = batch < FEW_ROWS and keys.dtype == torch.bfloat16 and keys.shape[-1] == D_V
    return SWAP_AB_HEADS if few and target_of(keys.device).is_hopper else None


def static_cache(model: Any, max_len: int) -> Cache:
    """See the package's ``static_cache``."""
    from sparse_attn.integrations.transformers.families import WINDOWED, check_family

    config = getattr(model, "config", model).get_text_config(decoder=True)
    if max_len < 1:
        refuse("max_len", max_len, "at least 1")
    check_family(config)
    if config.model_type != WINDOWED:
        return StaticCache(config=config, max_cache_len=max_len)
    parts, selected = -(-config.num_attention_heads // SWAP_AB_HEADS), {SELECTING: config.index_topk}
    return Cache(layers=[
        WindowedLayer(max_len, config.sliding_window, shapes(config, kind), selected.get(kind), parts)
        for kind in config.layer_types
    ])  # fmt: skip


def shapes(config: Any, layer_type: str) -> dict[str, Shape]:
    """The compressors of a layer of DeepSeek-V4."""
    ratio = config.compress_rates.get(layer_type)
    if ratio is None:
        return {}
    if layer_type == "heavily_compressed_attention":
        return {"compressor": Shape(ratio, config.head_dim, False)}
    return {"compressor": Shape(ratio, config.head_dim, True), "indexer": Shape(ratio, config.index_head_dim, True)}
