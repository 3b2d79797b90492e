"""Decode steps captured in CUDA or HIP graphs: after capture, N steps are N replays and nothing on the host.

Next token, position, slot and plan advance on the device. A graph is captured for each of a few batch sizes, while
every row is padding. It then serves any lengths up to ``max_context`` and any block table, because nothing that depends
on a value is baked in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sparse_attn import checks, workspace
from sparse_attn.models.moe import DENSE_MAX_EXPERTS, grouped_waits, takes_grouped
from sparse_attn.ops.sampling import row_seeds
from sparse_attn.runtime.draws import Draws, check_counted
from sparse_attn.runtime.inputs import checked_sampling
from sparse_attn.runtime.steps import AnyCaches, Decode, Sampling, Step, advance, decode_plan
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.target import target_of
from sparse_attn.types import WindowCaches
from sparse_attn.workspace import Workspace, WorkspaceSize

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
HISTORY = 1024  # steps of drawn tokens the device keeps


def uncapturable(device: torch.device, impl: str, spec: Spec | CompressedSpec, dtype: torch.dtype) -> str | None:
    """Why a decode step of a model with weights in ``dtype`` cannot be captured on ``device``; None where it can."""
    if device.type != "cuda":
        return f"device {device}, needs a CUDA or HIP device"
    if impl == "reference":
        return "impl 'reference', which waits for the host, allowed: 'auto', 'triton'"
    routed = isinstance(spec, CompressedSpec) or any(spec.moe_layers)
    target = target_of(device)
    if routed and takes_grouped(spec.moe, spec.hidden_size, dtype, on_gpu=True) and grouped_waits(target):
        return (
            f"{spec.moe.num_experts} bf16 experts on {torch.cuda.get_device_name(device)} ({target.name}), where "
            "torch's grouped matrix product waits for the host, allowed: sm_90 and sm_10x, or at most "
            f"{DENSE_MAX_EXPERTS} experts, or fp16 or fp32"
        )
    return None


def check_capturable(device: torch.device, impl: str, spec: Spec | CompressedSpec, dtype: torch.dtype) -> None:
    """ValueError where a decode step cannot be captured."""
    if (reason := uncapturable(device, impl, spec, dtype)) is not None:
        raise ValueError(f"graph: got {reason}")


class TokenStream:
    """Tokens of some replayed steps on their way to the host. Iterating yields int64 [rows] per step, as they
    arrive."""

    def __init__(self, tokens: torch.Tensor, arrived: list[torch.cuda.Event]):
        self._tokens, self._arrived = tokens, arrived

    def __len__(self) -> int:
        return len(self._arrived)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row, event in zip(self._tokens, self._arrived):
            event.synchronize()
            yield row

    def wait(self) -> torch.Tensor:
        """All tokens, int64 [steps, rows]; blocks until the last one arrived."""
        if self._arrived:
            self._arrived[-1].synchronize()
        return self._tokens


class DecodeGraph:
    """Captured decode of ``step`` (tokens int64 [B], caches, plan) -> logits [B, vocab], a Model for instance.

    max_context: tokens a row may hold; a row that reaches it becomes padding. max_blocks: width of the block table.
    ring_blocks: width of the ring table, for caches that have rings.
    buckets: batch sizes to capture, the largest bounds the batch. workspace_size: what the step's ops need, reserved
    and locked; None: what the warm-up takes. keep_logits: ``logits`` [largest bucket, vocab] holds the logits of the
    last step, for work on the current stream between two runs. draws: sampling a row, in place of ``sampling``; of any
    number of rows. ``load`` sets its values; which of its fields are None, and how many stop ids a row may have, stays.

    The graph owns its stream, its workspace and its state. Two graphs may run at the same time on caches of their own.
    A graph lives on the device of ``caches``; "the current stream" is that device's, whichever device is current. It
    may be freed, with its caches, while steps or the tokens of a TokenStream are still on their way.
    """

    def __init__(
        self,
        step: Step,
        caches: AnyCaches,
        *,
        max_context: int,
        max_blocks: int,
        ring_blocks: int = 1,
        buckets: Sequence[int] = BUCKETS,
        sampling: Sampling = Sampling(),
        workspace_size: WorkspaceSize | None = None,
        impl: str = "auto",
        keep_logits: bool = False,
        draws: Draws | None = None,
    ):
        sampling, device = checked_sampling(sampling), caches.kv[0].device
        if device.type != "cuda":
            raise ValueError(f"caches: got device {device}, allowed: a CUDA or HIP device, graphs need one")
        check_counted(sampling, draws)
        if not buckets or min(buckets) < 1:
            raise ValueError(f"buckets: got {list(buckets)}, allowed: one or more batch sizes, each at least 1")
        self.buckets = tuple(sorted(set(buckets)))
        self.max_context, self.max_blocks, self.sampling = max_context, max_blocks, sampling
        self.replays = 0
        self.keep_logits = keep_logits
        self.logits: torch.Tensor | None = None
        self._step, self._caches, self._impl = step, caches, impl
        self.stream, self._copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
        with torch.cuda.stream(self.stream):  # whose order decides when what is allocated here may be used again
            self._allocate(self.buckets[-1], max_blocks, ring_blocks, device)
            self._draws = None
            if draws is not None:
                zeros = lambda value: torch.zeros(self.buckets[-1], *value.shape[1:], dtype=value.dtype, device=device)
                self._draws = draws.map(zeros)
            self.workspace = Workspace(workspace_size or (0, 0), device)
        if workspace_size is not None:
            self.workspace.lock()
        for cache in (cache for layers in caches for cache in layers if cache is not None):
            cache.record_stream(self.stream)
        self._graphs = self._capture()

    def _allocate(self, rows: int, max_blocks: int, ring_blocks: int, device: torch.device) -> None:
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._block_table = torch.full((rows, max_blocks), -1, dtype=torch.int32, device=device)
        self._ring_table = None
        if isinstance(self._caches, WindowCaches):
            self._ring_table = torch.full((rows, ring_blocks), -1, dtype=torch.int32, device=device)
        self._query_start_loc = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._seeds = row_seeds(self.sampling.seed, rows, device)
        self._row_seeds = self._seeds.clone()  # of rows that bring none
        self._stop_ids = torch.tensor(self.sampling.stop_ids, dtype=torch.int64, device=device)
        self._history = torch.zeros(HISTORY, rows, dtype=torch.int64, device=device)
        self._history.record_stream(self._copies)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._taken = 0  # steps replayed, the host's count of what _place counts on the device
        self._rows = 0

    @property
    def captures(self) -> int:
        return len(self._graphs)

    def load(
        self,
        tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        ring_table: torch.Tensor | None = None,
        seeds: torch.Tensor | None = None,
        draws: Draws | None = None,
    ) -> None:
        """Set the live rows.

        tokens: int64 [n], each row's next input. seq_lens: int32 [n], tokens of the row including that one, 0 for a row
        that is out. block_table: int32 [n, at most max_blocks]. ring_table: int32 [n, ring_blocks], where the caches
        have rings. seeds: int64 [n], what each row draws with; None: the streams (seed of the sampling, row), which
        change with a request's row. draws: sampling of the n rows, where the graph was made with such. Tensors may lie
        on the host or the device. The current stream waits until they are read. The host does not wait, so do not write
        to pinned tensors until a token has arrived."""
        rows = tokens.shape[0]
        if not 1 <= rows <= self.buckets[-1]:
            raise ValueError(f"tokens: got {rows} rows, allowed: 1 to {self.buckets[-1]}, the largest bucket")
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
        _check_draws(draws, self._draws, rows)
        self.stream.wait_stream(self._current_stream())
        with torch.cuda.stream(self.stream):
            for mine, given in zip(self._draws or (), draws or ()):
                if mine is not None and given is not None:
                    mine[:rows].copy_(given, non_blocking=True)
            self._seeds[:rows].copy_(self._row_seeds[:rows] if seeds is None else seeds, non_blocking=True)
            if ring_table is not None and rings is not None:
                rings.fill_(-1)
                rings[:rows].copy_(ring_table, non_blocking=True)
            self._tokens[:rows].copy_(tokens, non_blocking=True)
            self._seq_lens.zero_()
            self._seq_lens[:rows].copy_(seq_lens, non_blocking=True)
            self._block_table.fill_(-1)
            self._block_table[:rows, : block_table.shape[1]].copy_(block_table, non_blocking=True)
        self._current_stream().wait_stream(self.stream)  # the caller may write to these tensors, or let go of them
        self._rows = rows

    def run(self, steps: int) -> TokenStream:
        """Replay ``steps`` decode steps; returns at once. A stopped row keeps drawing tokens that mean nothing."""
        if not self._rows:
            raise RuntimeError("run: nothing is loaded; call load first")
        if not 0 <= steps <= HISTORY:
            raise ValueError(f"steps: got {steps}, allowed: 0 to {HISTORY}")
        graph = self._graphs[self._bucket(self._rows)]
        tokens = torch.empty(steps, self._rows, dtype=torch.int64, device="cpu", pin_memory=True)
        arrived = []
        self.stream.wait_stream(self._current_stream())
        self.stream.wait_stream(self._copies)  # the history may not overrun what is still being copied
        for row in tokens:
            with torch.cuda.stream(self.stream):
                graph.replay()
                done = self.stream.record_event()
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(done)
                row.copy_(self._history[self._taken % HISTORY, : self._rows], non_blocking=True)
                arrived.append(self._copies.record_event())
            self._taken += 1
        self.replays += steps
        self._current_stream().wait_stream(self.stream)
        if self.logits is not None:
            self.logits.record_stream(self._current_stream())
        return TokenStream(tokens, arrived)

    def _current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.stream.device)

    def _bucket(self, rows: int) -> int:
        return next(bucket for bucket in self.buckets if bucket >= rows)

    def _state(self, rows: int) -> Decode:
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

    @torch.no_grad()
    def _decode(self, rows: int) -> None:
        state = self._state(rows)
        block_size = self._caches.kv[0].shape[1]
        plan = decode_plan(state, block_size, self.max_context, self._impl)
        logits = self._step(state.tokens, self._caches, plan)
        if self.keep_logits:
            if self.logits is None:  # the largest bucket warms up first
                self.logits = torch.empty_like(logits)
            self.logits[:rows].copy_(logits)
        advance(state, logits, self.sampling, self.max_context)
        self._history[:, :rows].index_copy_(0, self._place % HISTORY, state.tokens.unsqueeze(0))
        self._place.add_(1)

    def _capture(self) -> dict[int, torch.cuda.CUDAGraph]:
        """Capture every bucket, the largest first so that the others find its memory; rows are padding throughout."""
        graphs, pool = {}, None
        self.stream.wait_stream(self._current_stream())
        with torch.cuda.stream(self.stream), workspace.use(self.workspace):
            for rows in reversed(self.buckets):
                for _ in range(2):
                    self._decode(rows)
            self.stream.synchronize()
            self.workspace.lock()
            for rows in reversed(self.buckets):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                    self._decode(rows)
                pool = pool or graph.pool()
                graphs[rows] = graph
            self._place.zero_()
        self._current_stream().wait_stream(self.stream)
        return graphs


def _check_draws(draws: Draws | None, mine: Draws | None, rows: int) -> None:
    """ValueError unless ``draws`` holds for ``rows`` rows what the graph reads."""
    if (draws is None) != (mine is None):
        allowed = "None, the graph has none" if mine is None else "a Draws, the graph has one"
        raise ValueError(f"draws: got {'None' if draws is None else 'a Draws'}, allowed: {allowed}")
    for name, given, buffer in zip(Draws._fields, draws or (), mine or ()):
        if given is not None and buffer is not None:
            checks.check_dtype(f"draws.{name}", given, (buffer.dtype,))
            checks.check_shape(f"draws.{name}", given, (rows, *buffer.shape[1:]), "[rows, as in the graph]")
        elif given is not buffer:
            got, allowed = ("None" if value is None else "a tensor" for value in (given, buffer))
            raise ValueError(f"draws.{name}: got {got}, allowed: {allowed}")
