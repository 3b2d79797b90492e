"""Step metadata for callers who know their lengths on the host: built there and reused while nothing changes."""

from __future__ import annotations

import torch

from sparse_attn.framework import checks
from sparse_attn.framework.registration import OPERATORS
from sparse_attn.ops.ragged.step_plans import reference
from sparse_attn.types import StepPlan

NO_SLOT, ANY_SLOT = -1, torch.iinfo(torch.int64).max


class HostPlanner:
    """Builds StepPlans in device buffers of fixed address and capacity, which captured graphs may read.

    A plan equals build_step_plan's on inputs padded to the capacity: query_start_loc by its last value, seq_lens by 0,
    slots, block table and ring table by -1. Its shapes depend only on num_decodes and next_n, so a captured graph needs
    those fixed, best with a planner of its own. Rows without a request are padding.

    Everything that follows from lengths is cached. Its key is all that it is computed from: query_start_loc, seq_lens
    (unclamped), the numbers of requests and rows, num_decodes, next_n. The rest is fixed with the planner. Tables and
    slots live on the device, where the host cannot compare them. So every call writes them afresh, and turns rows with
    a negative slot into padding. Without CPU lengths nothing is cached.

    Buffers start as padding (request, position, slot and block -1; limits and ranges 0), not as zeros: request 0 and
    slot 0 are somebody's. When a step is smaller than the last, only the rows between their extents are cleared.
    Whoever else writes to a plan's tensors calls ``invalidate``. All writing happens on the current stream.

    hits, misses, uncached count the calls that reused, rebuilt, and left the work to the device op.
    """

    def __init__(
        self, *, max_requests: int, max_tokens: int, max_blocks: int, max_context: int, kv_capacity: int = 0,
        ring_blocks: int = 0, device: torch.device | str = "cuda", impl: str = "auto",
    ):  # fmt: skip
        """max_context, kv_capacity: as in build_step_plan, but checked. ring_blocks: width of the ring table, for
        models with rings. impl: the device op's."""
        bounds = dict(max_requests=max_requests, max_tokens=max_tokens, max_blocks=max_blocks, max_context=max_context)
        for name, value in (bounds | dict(kv_capacity=kv_capacity, ring_blocks=ring_blocks)).items():
            checks.check_at_least(name, value, 0)
        self.max_requests, self.max_tokens, self.max_blocks = max_requests, max_tokens, max_blocks
        self.max_context, self.kv_capacity, self.impl = max_context, kv_capacity, impl
        self.hits = self.misses = self.uncached = 0
        width = _aligned(max_tokens)
        self._padding = torch.tensor([[-1], [-1], [0]], dtype=torch.int32, device=device)
        self._no_slot = torch.tensor(NO_SLOT, dtype=torch.int64, device=device)
        self._rows = self._padding.repeat(1, width)[:, :max_tokens]  # request_ids, positions, limits
        self._ranges = torch.zeros(2, width, dtype=torch.int32, device=device)[:, :max_tokens]  # kv_start, kv_end
        self._slots = torch.full((max_tokens,), NO_SLOT, dtype=torch.int64, device=device)
        self._table = torch.full((max_requests, max_blocks), -1, dtype=torch.int32, device=device)
        self._rings = (
            torch.full((max_requests, ring_blocks), -1, dtype=torch.int32, device=device) if ring_blocks else None
        )
        self._valid = torch.zeros(max_tokens, dtype=torch.bool, device=device)
        # What was built on the host, sent in one copy: kv_indptr, then what _split cuts out.
        self._built = torch.zeros(_aligned(max_requests + 1) + 7 * max_tokens, dtype=torch.int32, device=device)
        self._key: tuple | None = None
        self._extents = (0, 0, 0, 0)  # of tables, slots, rows and ranges: what lies beyond is padding
        self._plans: dict[tuple[int, int], StepPlan] = {}

    def invalidate(self) -> None:
        """Forget what is cached, and treat every row as written, because someone else wrote to a plan's tensors."""
        self._key = None
        self._extents = (self.max_requests, self.max_tokens, self.max_tokens, self.max_tokens)

    def plan(
        self, query_start_loc: torch.Tensor, seq_lens_cpu: torch.Tensor | None, block_table: torch.Tensor,
        slot_mapping: torch.Tensor, *, num_decodes: int = 0, next_n: int = 1, seq_lens: torch.Tensor | None = None,
        ring_table: torch.Tensor | None = None,
    ) -> StepPlan:  # fmt: skip
        """The plan of a step of B requests and T rows, valid until the next call; never waits for the device.

        query_start_loc: int32 [B + 1], seq_lens_cpu: int32 [B], on the host and exact: no upper bounds. Where the host
        does not know the lengths: None, and seq_lens: int32 [B] on the device. block_table: int32 [B, max_blocks],
        slot_mapping: int64 [T] (of the rings, for models with rings), on the device. ring_table: int32 [B,
        ring_blocks], on the device, where there are rings. num_decodes may exceed B (the size a graph was captured at),
        and num_decodes * next_n may exceed T. Beyond build_step_plan's checks: ValueError where the host sees lengths
        beyond max_context or kv_capacity, or a query_start_loc that decreases.
        """
        lengths, on_host = (seq_lens, False) if seq_lens_cpu is None else (seq_lens_cpu, True)
        if lengths is None:
            raise TypeError("seq_lens: got NoneType, allowed: a torch.Tensor")
        self._check(query_start_loc, lengths, on_host, block_table, slot_mapping, num_decodes, next_n)
        self._check_rings(ring_table, lengths.shape[0])
        requests, tokens = lengths.shape[0], slot_mapping.shape[0]
        decode_rows = num_decodes * next_n
        rows = max(tokens, decode_rows)
        shape, cached = (requests, tokens, num_decodes, next_n), self._key
        if not on_host:
            self._key = None
            self.uncached += 1
        elif cached and cached[0] == shape and cached[1].equal(query_start_loc) and cached[2].equal(lengths):
            self.hits += 1
        else:
            self._build(query_start_loc, lengths, rows, num_decodes, next_n)
            self._key = (shape, query_start_loc.clone(), lengths.clone())
            self.misses += 1
        if (plan := self._plans.get((num_decodes, next_n))) is None:
            plan = self._plans[num_decodes, next_n] = self._views(num_decodes, next_n)
        self._clear_tails(requests, tokens, rows, rows - decode_rows)
        self._table[:requests].copy_(block_table)
        if ring_table is not None and self._rings is not None:
            self._rings[:requests].copy_(ring_table)
        if not on_host:
            self._slots[:tokens].copy_(slot_mapping)
            self._plan_on_device(plan, query_start_loc, lengths, num_decodes, next_n)
            return plan
        allowed, built_rows, built_ranges = self._parts
        torch.clamp(slot_mapping, self._no_slot, allowed[:tokens], out=self._slots[:tokens])
        valid = torch.ge(self._slots[:rows], 0, out=self._valid[:rows])
        torch.where(valid, built_rows, self._padding, out=self._rows[:, :rows])
        if rows > decode_rows:
            torch.mul(built_ranges, valid[decode_rows:], out=self._ranges[:, : rows - decode_rows])
        return plan

    def _build(self, query_start_loc, seq_lens, rows: int, num_decodes: int, next_n: int) -> None:
        """What lengths determine, as if every row had a slot: built on the host, then copied without waiting."""
        starts = self._padded_starts(query_start_loc)
        lengths = torch.zeros(self.max_requests, dtype=torch.int32, device="cpu")
        lengths[: seq_lens.shape[0]] = seq_lens
        if bool((starts[num_decodes + 1 :] < starts[num_decodes:-1]).any()):
            raise ValueError("query_start_loc: got values that decrease, allowed: first rows in order")
        if (longest := max(seq_lens.tolist(), default=0)) > self.max_context:
            raise ValueError(f"seq_lens_cpu: got {longest}, allowed: at most max_context = {self.max_context}")
        every_slot = torch.zeros(rows, dtype=torch.int64, device="cpu")
        request_ids, positions, limits, _, kv_indptr, kv_start, kv_end = reference.step_plan(
            starts, lengths, every_slot, num_decodes, next_n
        )
        if (keys := int(kv_indptr[-1])) > self.kv_capacity:
            raise ValueError(f"seq_lens_cpu: got a sum of {keys}, allowed: at most kv_capacity = {self.kv_capacity}")
        self._key = None
        size = _aligned(self.max_requests + 1) + 5 * rows + 2 * (rows - num_decodes * next_n)
        staging = self._staging(size)
        staging[: kv_indptr.shape[0]] = kv_indptr
        allowed, built_rows, built_ranges = self._split(staging, rows, num_decodes * next_n)
        allowed.copy_(torch.where(limits > 0, ANY_SLOT, NO_SLOT))
        torch.stack((request_ids, positions, limits), out=built_rows)
        torch.stack((kv_start, kv_end), out=built_ranges)
        self._built[:size].copy_(staging, non_blocking=True)
        self._parts = self._split(self._built[:size], rows, num_decodes * next_n)

    def _split(self, built: torch.Tensor, rows: int, decode_rows: int) -> tuple[torch.Tensor, ...]:
        """Highest slot a row may have, int64 [rows]; [3, rows] as in _rows; [2, prefill rows] as in _ranges."""
        sizes = (_aligned(self.max_requests + 1), 2 * rows, 3 * rows, 2 * (rows - decode_rows))
        _, allowed, built_rows, built_ranges = built.split(sizes)
        return allowed.view(torch.int64), built_rows.view(3, rows), built_ranges.view(2, rows - decode_rows)

    def _plan_on_device(self, plan: StepPlan, query_start_loc, seq_lens, num_decodes: int, next_n: int) -> None:
        starts = self._padded_starts(query_start_loc).to(seq_lens.device, non_blocking=True)
        lengths = torch.zeros(self.max_requests, dtype=torch.int32, device=seq_lens.device)
        lengths[: seq_lens.shape[0]] = seq_lens
        fresh = OPERATORS["step_plan"](starts, lengths, self._slots, num_decodes, next_n, self.impl)
        for mine, value in zip((*self._rows, self._slots, plan.kv_indptr, plan.kv_start, plan.kv_end), fresh):
            mine.copy_(value)

    def _padded_starts(self, query_start_loc: torch.Tensor) -> torch.Tensor:
        starts = self._staging(self.max_requests + 1)
        starts[: query_start_loc.shape[0]] = query_start_loc
        starts[query_start_loc.shape[0] :] = query_start_loc[-1]
        return starts

    def _staging(self, size: int) -> torch.Tensor:
        """A fresh one each time: the allocator keeps pinned memory from reuse until the copies from it are done."""
        return torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=self._built.is_cuda)

    def _clear_tails(self, *extents: int) -> None:
        before, self._extents = self._extents, extents
        if all(new >= old for new, old in zip(extents, before)):
            return
        for table in (self._table, self._rings):
            if table is not None:
                table[extents[0] : before[0]].fill_(-1)
        self._slots[extents[1] : before[1]].fill_(NO_SLOT)
        tail = self._rows[:, extents[2] : before[2]]
        tail.copy_(self._padding.expand_as(tail))
        self._ranges[:, extents[3] : before[3]].zero_()

    def _views(self, num_decodes: int, next_n: int) -> StepPlan:
        rows, capacity = num_decodes * next_n, self.max_tokens
        return StepPlan(
            *self._rows,
            slot_mapping=self._slots,
            block_table=self._table,
            context_lens=self._rows[2, :rows].view(num_decodes, next_n),
            kv_indptr=self._built[: self.max_requests - num_decodes + 1],
            kv_start=self._ranges[0, : capacity - rows],
            kv_end=self._ranges[1, : capacity - rows],
            kv_capacity=self.kv_capacity,
            max_context=self.max_context,
            ring_table=self._rings,
        )

    def _check_rings(self, ring_table: torch.Tensor | None, requests: int) -> None:
        if ring_table is None:
            if self._rings is not None:
                raise ValueError("ring_table: got None, allowed: a tensor, the planner has ring_blocks")
            return
        if self._rings is None:
            raise ValueError("ring_table: got a tensor, allowed: None, the planner has no ring_blocks")
        checks.check_dtype("ring_table", ring_table, (torch.int32,))
        checks.check_shape("ring_table", ring_table, (requests, self._rings.shape[1]), "[requests, ring_blocks]")
        if ring_table.device != self._slots.device:
            raise ValueError(f"ring_table: got device {ring_table.device}, allowed: {self._slots.device}")

    def _check(self, query_start_loc, lengths, on_host: bool, block_table, slot_mapping, num_decodes, next_n) -> None:
        name = "seq_lens_cpu" if on_host else "seq_lens"
        for what, tensor in ((name, lengths), ("query_start_loc", query_start_loc), ("block_table", block_table)):
            checks.check_dtype(what, tensor, (torch.int32,))
        checks.check_dtype("slot_mapping", slot_mapping, (torch.int64,))
        checks.check_shape(name, lengths, (None,), "[requests]")
        checks.check_shape("slot_mapping", slot_mapping, (None,), "[tokens]")
        requests = lengths.shape[0]
        checks.check_shape("query_start_loc", query_start_loc, (requests + 1,), "[requests + 1]")
        checks.check_shape("block_table", block_table, (requests, self.max_blocks), "[requests, max_blocks]")
        checks.check_at_least("num_decodes", num_decodes, 0)
        checks.check_at_least("next_n", next_n, 1)
        decodes = min(self.max_requests, self.max_tokens // next_n)
        sizes = {name: (requests, self.max_requests), "slot_mapping": (slot_mapping.shape[0], self.max_tokens)}
        for what, (got, most) in (sizes | {"num_decodes": (num_decodes, decodes)}).items():
            if got > most:
                raise ValueError(f"{what}: got {got}, allowed: at most {most}, the planner's capacity")
        homes = torch.device("cpu"), torch.device("cpu") if on_host else self._slots.device, *[self._slots.device] * 2
        names = ("query_start_loc", name, "block_table", "slot_mapping")
        for what, tensor, home in zip(names, (query_start_loc, lengths, block_table, slot_mapping), homes):
            if tensor.device != home:
                raise ValueError(f"{what}: got device {tensor.device}, allowed: {home}")


def _aligned(size: int) -> int:
    """At least ``size`` int32s, in whole 16-byte pieces."""
    return -(-size // 4) * 4
