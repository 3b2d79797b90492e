"""Rows of a decode loop: who sits where, changed between steps without touching the others, and steps that do not wait.

DecodeRows holds what captured and eager loops share. EagerDecode is the loop of a CPU, and of whatever cannot be
captured; generation.graph.DecodeGraph replays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from sparse_attn.framework import checks
from sparse_attn.framework.autocast import no_autocast
from sparse_attn.generation.drafts import Speculator, check_speculate
from sparse_attn.generation.inputs import checked_sampling
from sparse_attn.generation.model import AnyCaches
from sparse_attn.generation.row_settings import RowEdits, RowSettings, rows_of
from sparse_attn.generation.sampling import Draws, Sampling, check_counted, check_draws
from sparse_attn.generation.speculation import Drafter
from sparse_attn.generation.steps import Decode, Predict, Step, advance, decode_plan, slot_block
from sparse_attn.generation.stream import TokenStream, on_host_like, passed
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.ops.layers.sampling import token_logprobs
from sparse_attn.types import WindowCaches

HISTORY = 1024  # steps of drawn tokens the device keeps


class LoopSettings(NamedTuple):
    """What a decode loop is made with; see DecodeGraph."""

    max_context: int
    max_blocks: int
    buckets: Sequence[int]
    ring_blocks: int = 1
    sampling: Sampling = Sampling()
    impl: str = "auto"
    keep_logits: bool = False
    keep_logprobs: bool = False
    draws: Draws | None = None
    batch_invariant: bool = False
    speculate: int = 0
    drafter: Drafter | None = None
    predict: Predict | None = None


class DecodeRows(ABC):
    """The rows of a decode loop and their state on the device of ``caches``."""

    def __init__(self, step: Step, caches: AnyCaches, settings: LoopSettings):
        self.mesh: Mesh = getattr(step, "mesh", ONE_RANK)
        self.sampling, buckets = checked_sampling(settings.sampling), settings.buckets
        check_speculate(settings.speculate, settings.drafter)
        check_counted(self.sampling, settings.draws)
        if not buckets or min(buckets) < 1:
            raise ValueError(f"buckets: got {list(buckets)}, allowed: one or more batch sizes, each at least 1")
        if settings.batch_invariant and getattr(step, "batch_invariant", True) is False:
            raise ValueError("batch_invariant: got True, allowed: with a step that is; see Model")
        self.buckets = (max(buckets),) if settings.batch_invariant else tuple(sorted(set(buckets)))
        self.max_context, self.max_blocks = settings.max_context, settings.max_blocks
        self.keep_logits, self.keep_logprobs = settings.keep_logits, settings.keep_logprobs
        self.batch_invariant, self.speculate = settings.batch_invariant, settings.speculate
        self.logits: torch.Tensor | None = None
        self._step, self._caches, self._impl = step, caches, settings.impl
        self.live: set[int] = set()  # the rows in use, which ``load``, ``join``, ``start`` and ``leave`` change
        self._taken = 0  # steps taken, the host's count of what _place counts on the device
        with self._editing():
            self._allocate(self.buckets[-1], settings, caches.kv[0].device)

    def _allocate(self, rows: int, settings: LoopSettings, device: torch.device) -> None:
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._block_table = torch.full((rows, self.max_blocks), -1, dtype=torch.int32, device=device)
        self._ring_table = None
        if isinstance(self._caches, WindowCaches):
            self._ring_table = torch.full((rows, settings.ring_blocks), -1, dtype=torch.int32, device=device)
        self._query_start_loc = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._stop_ids = torch.tensor(self.sampling.stop_ids, dtype=torch.int64, device=device)
        self._edits = RowEdits(device, self._allocator())  # of rows, to be written before the state is read
        self._settings = RowSettings(self._edits, self.sampling, rows, device, self._ring_table, settings.draws)
        self._seeds, self._draws = self._settings.seeds, self._settings.draws
        self._row_seeds = self._seeds.clone()  # of rows that bring none
        self._length_rows, self._table_rows = (
            [((row,), (row.shape[0],)) for row in rows_of(value)] for value in (self._seq_lens, self._block_table)
        )
        self._starting: list[int] = []  # rows whose inputs may be stop ids
        self._states: dict[int, Decode] = {}
        self._speculator = None
        if self.speculate:
            self._speculator = Speculator(
                self._step, self.speculate, settings.drafter, settings.predict,
                rows=rows, max_context=self.max_context, impl=self._impl, device=device,
            )  # fmt: skip
        self._columns = (self.speculate + 1,) if self.speculate else ()  # of a row's tokens of a step
        self._history = torch.zeros(HISTORY, rows, *self._columns, dtype=torch.int64, device=device)
        self._logprobs = None
        if self.keep_logprobs:
            self._logprobs = torch.zeros(HISTORY, rows, *self._columns, dtype=torch.float32, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._whole = self._state(rows)

    @abstractmethod
    def run(self, steps: int, *, least: int = 0) -> TokenStream:
        """Take ``steps`` decode steps of the live rows, columns of the tokens. A stopped row keeps drawing tokens that
        mean nothing. least: columns at least, of padding where no more rows are live."""

    def load(
        self,
        tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        ring_table: torch.Tensor | None = None,
        seeds: torch.Tensor | None = None,
        draws: Draws | None = None,
        *,
        ends: torch.Tensor | None = None,
        known: torch.Tensor | None = None,
    ) -> None:
        """Set the live rows: the first n, and no others.

        Tensors may lie on the host or the device. The current stream waits until they are read. The host does not wait,
        so do not write to pinned tensors until a token has arrived.

        Args:
            tokens: int64 [n], each row's next input.
            seq_lens: int32 [n], tokens of the row including that one, 0 for a row that is out.
            block_table: int32 [n, at most max_blocks].
            ring_table: int32 [n, ring_blocks], where the caches have rings.
            seeds: int64 [n], what each row draws with; None: the streams (seed of the sampling, row), which change with
                a request's row.
            draws: sampling of the n rows, where the loop was made with such.
            ends: for a loop that speculates, int32 [n], tokens that each row may hold; None: max_context.
            known: for a loop that speculates, int64 [n, at most max_context], ids of the rows before the next input,
                where a drafter reads them.

        Raises:
            TypeError: wrong types or dtypes.
            ValueError: wrong shapes, strides or devices, or a value out of range.
        """
        rows = tokens.shape[0]
        if not 1 <= rows <= self.buckets[-1]:
            raise ValueError(f"tokens: got {rows} rows, allowed: 1 to {self.buckets[-1]}, the largest bucket")
        self._check(rows, seq_lens, block_table, ring_table, seeds, draws)
        self._check_speculation(rows, ends, known)
        with self._editing():
            self._settle()
            self._seq_lens.zero_()
            self._block_table.fill_(-1)
            if self._ring_table is not None:
                self._ring_table.fill_(-1)
            self._join(range(rows), tokens, seq_lens, block_table, ring_table, seeds, draws)
            self._begin(range(rows), ends, known)
        self.live = set(range(rows))

    def join(
        self,
        rows: Sequence[int],
        tokens: torch.Tensor | None,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        ring_table: torch.Tensor | None = None,
        seeds: torch.Tensor | None = None,
        draws: Draws | None = None,
        *,
        ends: torch.Tensor | None = None,
        known: torch.Tensor | None = None,
    ) -> None:
        """Set ``rows``, n of them that are not live, beside those that are.

        Args:
            rows: places in the batch.
            tokens: None: those that lie in the rows, drawn by prefill_step into ``state``.
            seq_lens: as ``load`` takes them.
            block_table: as ``load`` takes it.
            ring_table: as ``load`` takes it.
            seeds: as ``load`` takes them.
            draws: as ``load`` takes them.
            ends: as ``load`` takes them.
            known: as ``load`` takes them.

        Raises:
            TypeError: wrong types or dtypes.
            ValueError: wrong shapes; rows that are live.
        """
        self._check_rows(rows, live=False)
        if tokens is not None and tokens.shape[0] != len(rows):
            raise ValueError(f"tokens: got {tokens.shape[0]} rows, allowed: {len(rows)}, those of rows")
        self._check(len(rows), seq_lens, block_table, ring_table, seeds, draws)
        self._check_speculation(len(rows), ends, known)
        with self._editing():
            self._settle()
            self._join(rows, tokens, seq_lens, block_table, ring_table, seeds, draws)
            self._begin(rows, ends, known)
        self.live.update(rows)

    def prepare(
        self,
        row: int,
        *,
        seed: int | None = None,
        rings: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        prompt: Sequence[int] = (),
        blocks: Sequence[int] | None = None,
    ) -> None:
        """Set what prefill_step reads of ``row``, which is not live, in ``state``; ``start`` makes it live. seed: None:
        as ``load`` takes it. rings: the row's own, where the caches have rings. sampling: where the loop was made with
        draws, which decide what it may ask for; None: the loop's. prompt: the row's ids, of use with penalties.
        blocks: its block table, at most max_blocks; None: ``start`` brings one."""
        self._check_rows([row], live=False)
        if (rings is None) != (self._ring_table is None):
            raise ValueError(f"rings: got {rings}, allowed: the row's where the caches have rings, else None")
        if seed is not None:
            checks.check_seed("seed", seed)
        sampling = self._settings.checked(rings, sampling)
        table = None if blocks is None else self._table_of("blocks", blocks)
        self.prepare_checked(row, seed, rings or (), sampling, prompt, table)

    def prepare_checked(
        self, row: int, seed: int | None, rings: Sequence[int], sampling: Sampling | None, prompt: Sequence[int],
        table: bytes | None,
    ) -> None:  # fmt: skip
        """As ``prepare``, of what was checked when a request came. table: its block table, max_blocks ids of int32."""
        self._settings.set(row, seed, rings, sampling, prompt)
        if table is not None:
            self._note_table(row, table)

    def start(
        self,
        rows: Sequence[int],
        seq_lens: Sequence[int],
        block_table: torch.Tensor | None = None,
        *,
        ends: torch.Tensor | None = None,
        known: torch.Tensor | None = None,
    ) -> None:
        """Make prepared rows live. seq_lens: tokens of each including the next input, which lies in ``state``.
        block_table: int32 [n, at most max_blocks] on the host; None: those that prepare was given. ends, known: as
        ``load`` takes them. A row whose input is one of its stop ids is padding."""
        self._check_rows(rows, live=False)
        if len(seq_lens) != len(rows):
            raise ValueError(f"seq_lens: got {len(seq_lens)} rows, allowed: {len(rows)}, those of rows")
        if block_table is not None:
            checks.check_shape("block_table", block_table, (len(rows), None), "[rows, at most max_blocks]")
            for row, blocks in zip(rows, block_table.tolist()):
                self._note_table(row, self._table_of("block_table", blocks))
        self._check_speculation(len(rows), ends, known)
        for row, length in zip(rows, seq_lens):
            self.note_length(row, length)
        self.start_checked(rows, ends=ends, known=known)

    def start_checked(
        self, rows: Sequence[int], *, ends: torch.Tensor | None = None, known: torch.Tensor | None = None
    ) -> None:
        """As ``start``, of rows whose tables and lengths were noted."""
        for row in rows:
            if row in self._settings.stopping or self.sampling.stop_ids:
                self._starting.append(row)
        if self._speculator is not None:
            with self._editing():
                self._settle()
                self._begin(rows, ends, known)
        self.live.update(rows)

    def set_blocks(self, row: int, block_table: Sequence[int] | torch.Tensor) -> None:
        """Give ``row`` another block table, at most max_blocks ids, that begins as the one before. A tensor of them is
        int32 [n] on the host."""
        blocks = block_table.tolist() if isinstance(block_table, torch.Tensor) else block_table
        self._note_table(row, self._table_of("block_table", blocks))

    def leave(self, rows: Sequence[int]) -> None:
        """Take live ``rows`` out. Steps already asked for still run with them.

        Args:
            rows: places in the batch.

        Raises:
            ValueError: rows that are not live.
        """
        self._check_rows(rows, live=True)
        for row in rows:
            self.leave_checked(row)

    def leave_checked(self, row: int) -> None:
        """As ``leave``, of a row that may be live or prepared."""
        self.note_length(row, 0)
        self.live.discard(row)

    @property
    def state(self) -> Decode:
        """What the steps read and advance, of all rows; ordered by the current stream between two runs."""
        if self._edits or self._starting:
            self._settle_here()
        return self._whole

    def limit_drafts(self, most: int) -> None:
        """Let the layer of multi-token prediction draft no more than ``most`` tokens at the end of a step. Of a loop
        that is not captured."""
        if self._speculator is not None:
            self._speculator.most = most

    @property
    def known(self) -> torch.Tensor | None:
        """The ids of all rows, int64 [rows, max_context + 1], where a drafter reads them."""
        return None if self._speculator is None else self._speculator.known

    def _editing(self) -> AbstractContextManager[object]:
        """Where the state is written between steps."""
        return nullcontext()

    def _allocator(self) -> Callable[[], AbstractContextManager[object]]:
        """Where memory of the loop is allocated. It does not refer to the loop, which is freed with its last name."""
        return nullcontext

    def _settle_here(self) -> None:
        """Write what was noted of rows, for steps to come and for what the current stream does next."""
        self._settle()

    @property
    def width(self) -> int:
        """Rows up to the last live one."""
        return max(self.live, default=-1) + 1

    def _columns_of(self, least: int) -> int:
        if not (width := max(self.width, least)):
            raise RuntimeError("run: nothing is loaded; call load or join first")
        return width

    def _table_of(self, name: str, blocks: Sequence[int]) -> bytes:
        if len(blocks) > self.max_blocks:
            raise ValueError(f"{name}: got {len(blocks)} blocks, allowed: at most {self.max_blocks}")
        return array("i", blocks).tobytes() + b"\xff" * (4 * (self.max_blocks - len(blocks)))  # of which each is -1

    def note_length(self, row: int, length: int) -> None:
        """Let ``row``, which was checked, hold ``length`` tokens including the next input; 0: it is padding. Before the
        prefill step that draws that input, this is written along with what the step reads."""
        self._edits["length", row] = *self._length_rows[row], length.to_bytes(4, "little")

    def _note_table(self, row: int, table: bytes) -> None:
        self._edits["table", row] = *self._table_rows[row], table

    def _settle(self) -> None:
        """Write what was noted of rows, in the order of the current stream."""
        if self._edits:
            self._edits.write()
            if self._settings.penalised:
                self._settings.write_counts()
        for row in self._starting:
            own = None if self._draws is None else self._draws.stop_ids
            for ids in (self._stop_ids, None if own is None else own[row]):
                if ids is not None and ids.numel():
                    stopped = (self._tokens[row : row + 1] == ids).any()
                    self._seq_lens[row : row + 1].masked_fill_(stopped, 0)
        self._starting.clear()

    def _bucket(self, rows: int) -> int:
        return next(bucket for bucket in self.buckets if bucket >= rows)

    def _join(
        self,
        rows: Sequence[int],
        tokens: torch.Tensor | None,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        ring_table: torch.Tensor | None,
        seeds: torch.Tensor | None,
        draws: Draws | None,
    ) -> None:
        self._set(rows, ring_table, seeds, draws)
        if seeds is None:
            for part in [rows] if isinstance(rows, range) else [range(row, row + 1) for row in rows]:
                _put(self._seeds, part, self._row_seeds[part.start : part.stop])
        if tokens is not None:
            _put(self._tokens, rows, tokens)
        _put(self._seq_lens, rows, seq_lens)
        for row in rows:
            self._block_table[row].fill_(-1)
        _put(self._block_table[:, : block_table.shape[1]], rows, block_table)

    def _begin(self, rows: Sequence[int], ends: torch.Tensor | None, known: torch.Tensor | None) -> None:
        if self._speculator is not None:
            self._speculator.begin(rows, self.state, ends, known)

    def _set(
        self, rows: Sequence[int], rings: torch.Tensor | None, seeds: torch.Tensor | None, draws: Draws | None
    ) -> None:
        for mine, given in zip(self._draws or (), draws or ()):
            if mine is not None and given is not None:
                _put(mine, rows, given)
        if seeds is not None:
            _put(self._seeds, rows, seeds)
        if rings is not None and self._ring_table is not None:
            _put(self._ring_table, rows, rings)

    def _on_host(self, steps: int, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Room for the tokens, and for the log-probabilities where they are kept, of ``steps`` steps."""
        shape, on_host = (steps, width, *self._columns), on_host_like(self._tokens)
        tokens = torch.empty(shape, dtype=torch.int64, **on_host)
        return tokens, None if self._logprobs is None else torch.empty(shape, dtype=torch.float32, **on_host)

    def _copy_drawn(self, number: int, width: int, tokens: torch.Tensor, logprobs: torch.Tensor | None) -> None:
        """What the last step drew, to place ``number`` of what _on_host gave."""
        place = self._taken % HISTORY
        self._taken += 1
        tokens[number].copy_(self._history[place, :width], non_blocking=True)
        if logprobs is not None and self._logprobs is not None:
            logprobs[number].copy_(self._logprobs[place, :width], non_blocking=True)

    def _state(self, rows: int) -> Decode:
        if rows not in self._states:
            self._states[rows] = self._views(rows)
        return self._states[rows]

    def _views(self, rows: int) -> Decode:
        return Decode(
            self._tokens[:rows],
            self._seq_lens[:rows],
            self._block_table[:rows],
            self._query_start_loc[: rows + 1],
            self._stop_ids,
            None if self._ring_table is None else self._ring_table[:rows],
            self._seeds[:rows],
            None if self._draws is None else self._draws.rows(slice(rows)),
        )

    @no_autocast
    @torch.no_grad()
    def _decode(self, rows: int) -> None:
        """One step of the first ``rows`` rows."""
        state, speculator = self._state(rows), self._speculator
        block_size = slot_block(self._caches, self.mesh)
        if speculator is None:
            plan = decode_plan(state, block_size, self.max_context, self._impl)
            logits = self._step(state.tokens, self._caches, plan)
        else:
            logits, hidden, plan = speculator.feed(self._caches, state, block_size)
        if self.keep_logits:
            if self.logits is None:  # a captured loop's largest bucket warms up first
                shape = self.buckets[-1] * (self.speculate + 1), logits.shape[1]
                self.logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
            self.logits[: len(logits)].copy_(logits)
        if speculator is None:
            advance(state, logits, self.sampling, self.max_context)
            drawn = state.tokens
        else:
            drawn, count = speculator.advance(state, logits, self.sampling)
            speculator.predict(hidden, count, self._caches, plan, state, self.sampling, block_size)
        place = self._place % HISTORY
        self._history[:, :rows].index_copy_(0, place, drawn.unsqueeze(0))
        if self._logprobs is not None:
            scores = token_logprobs(logits, drawn.flatten().clamp_min(0), best=0).drawn
            self._logprobs[:, :rows].index_copy_(0, place, scores.view(drawn.shape).unsqueeze(0))
        self._place.add_(1)

    def warm_up(self) -> None:
        """Run a step of padding, which compiles what is to be compiled."""
        with self._editing():
            self._decode(self.buckets[-1])
            self._place.zero_()

    def _check_rows(self, rows: Sequence[int], live: bool) -> None:
        for place, row in enumerate(rows):
            if type(row) is not int:
                checks.check_integer(f"rows[{place}]", row)
            if not 0 <= row < self.buckets[-1]:
                raise ValueError(f"rows[{place}]: got {row}, allowed: 0 to {self.buckets[-1] - 1}")
            if (row in self.live) != live:
                got, allowed = ("a live row", "others") if not live else ("no live row", "live ones")
                raise ValueError(f"rows[{place}]: got {row}, {got}, allowed: {allowed}")
        if len(rows) > 1 and len(set(rows)) != len(rows):
            raise ValueError(f"rows: got {list(rows)}, allowed: each once")

    def _check(
        self,
        rows: int,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        ring_table: torch.Tensor | None,
        seeds: torch.Tensor | None,
        draws: Draws | None,
    ) -> None:
        for name, value in (("seq_lens", seq_lens), ("block_table", block_table)):
            if value.shape[0] != rows:
                raise ValueError(f"{name}: got {value.shape[0]} rows, allowed: {rows}, those of tokens")
        if block_table.shape[1] > self.max_blocks:
            raise ValueError(f"block_table: got width {block_table.shape[1]}, allowed: at most {self.max_blocks}")
        rings = self._ring_table
        if (ring_table is None) != (rings is None):
            allowed = "None, the caches have no rings" if rings is None else "a tensor, the caches have rings"
            raise ValueError(f"ring_table: got {'None' if ring_table is None else 'a tensor'}, allowed: {allowed}")
        if ring_table is not None and rings is not None and tuple(ring_table.shape) != (rows, rings.shape[1]):
            raise ValueError(
                f"ring_table: got shape {list(ring_table.shape)}, allowed: [{rows}, ring_blocks = {rings.shape[1]}]"
            )
        if seeds is not None:
            checks.check_dtype("seeds", seeds, (torch.int64,))
            checks.check_shape("seeds", seeds, (rows,), "[rows]")
        check_draws(draws, self._draws, rows)

    def _check_speculation(self, rows: int, ends: torch.Tensor | None, known: torch.Tensor | None) -> None:
        if self._speculator is not None:
            self._speculator.check(rows, ends, known)
        elif ends is not None or known is not None:
            raise ValueError("ends, known: got a tensor, allowed: None, the loop does not speculate")


class EagerDecode(DecodeRows):
    """The same loop without a capture, on any device: a step runs when it is asked for."""

    def run(self, steps: int, *, least: int = 0) -> TokenStream:
        width = self._columns_of(least)
        if not 0 <= steps <= HISTORY:
            raise ValueError(f"steps: got {steps}, allowed: 0 to {HISTORY}")
        self._settle()
        tokens, logprobs = self._on_host(steps, width)
        arrived = []
        for number in range(steps):
            self._decode(self._bucket(width))
            self._copy_drawn(number, width, tokens, logprobs)
            arrived.append(passed(self._tokens.device))
        return TokenStream(tokens, arrived, logprobs)


def _put(mine: torch.Tensor, rows: Sequence[int], given: torch.Tensor) -> None:
    """Copy row n of ``given`` to row rows[n] of ``mine``, without waiting."""
    if isinstance(rows, range):
        mine[rows.start : rows.stop].copy_(given, non_blocking=True)
        return
    for number, row in enumerate(rows):
        mine[row : row + 1].copy_(given[number : number + 1], non_blocking=True)
