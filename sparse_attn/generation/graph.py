"""Decode steps captured in CUDA or HIP graphs: after capture, N steps are N replays and nothing on the host.

Next token, position, slot and plan advance on the device. A graph is captured for each of a few batch sizes, while
every row is padding. It then serves any lengths up to ``max_context`` and any block table, because nothing that depends
on a value is baked in.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence

import torch

from sparse_attn import workspace
from sparse_attn.framework import streams, torch_private
from sparse_attn.framework.target import target_of
from sparse_attn.generation.inputs import checked_sampling
from sparse_attn.generation.loop import HISTORY, DecodeRows, LoopSettings
from sparse_attn.generation.model import AnyCaches
from sparse_attn.generation.processes import REPLAY_S
from sparse_attn.generation.sampling import Draws, Sampling
from sparse_attn.generation.speculation import Drafter
from sparse_attn.generation.steps import Predict, Step
from sparse_attn.generation.stream import TokenStream
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models.moe import DENSE_MAX_EXPERTS, grouped_waits, takes_grouped
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.workspace import Workspace, WorkspaceSize

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


def uncapturable(
    device: torch.device, impl: str, spec: Spec | CompressedSpec, dtype: torch.dtype, *, mesh: Mesh = ONE_RANK,
    packed: bool = False,
) -> str | None:  # fmt: skip
    """Why a decode step of a model with weights in ``dtype`` cannot be captured on ``device``; None where it can.
    packed: whether routed experts are."""
    if device.type != "cuda" and mesh.size > 1:
        return f"{mesh.size} processes on device {device}, whose collectives (gloo) cannot be captured"
    if device.type != "cuda":
        return f"device {device}, needs a CUDA or HIP device"
    if impl == "reference":
        return "impl 'reference', which waits for the host, allowed: 'auto', 'triton'"
    routed = isinstance(spec, CompressedSpec) or any(spec.moe_layers)
    target = target_of(device)
    grouped = routed and not packed and takes_grouped(spec.moe, spec.hidden_size, dtype, on_gpu=True, mesh=mesh)
    if grouped and grouped_waits(target):
        return (
            f"{spec.moe.num_experts} bf16 experts on {torch.cuda.get_device_name(device)} ({target.name}), where "
            "torch's grouped matrix product waits for the host, allowed: sm_90 and sm_10x, or at most "
            f"{DENSE_MAX_EXPERTS} experts, or fp16 or fp32"
        )
    return None


def check_capturable(
    device: torch.device, impl: str, spec: Spec | CompressedSpec, dtype: torch.dtype, *, mesh: Mesh = ONE_RANK,
    packed: bool = False,
) -> None:  # fmt: skip
    """ValueError where a decode step cannot be captured."""
    if (reason := uncapturable(device, impl, spec, dtype, mesh=mesh, packed=packed)) is not None:
        raise ValueError(f"graph: got {reason}")


class DecodeGraph(DecodeRows):
    """Captured decode of ``step`` (tokens int64 [B], caches, plan) -> logits [B, vocab], a Model for instance.

    ``load`` sets all rows at once. Between runs rows ``join`` and ``leave`` without touching the others.

    The graph owns its stream, its workspace and its state. Two graphs may run at the same time on caches of their own.
    A graph lives on the device of ``caches``; "the current stream" is that device's, whichever device is current. It
    may be freed, with its caches, while steps or the tokens of a TokenStream are still on their way.

    Args:
        step: what is captured.
        caches: on a CUDA or HIP device.
        max_context: tokens a row may hold; a row that reaches it becomes padding.
        max_blocks: width of the block table.
        ring_blocks: width of the ring table, for caches that have rings.
        buckets: batch sizes to capture, the largest bounds the batch.
        sampling: of every row.
        workspace_size: what the step's ops need, reserved and locked; None: what the warm-up takes.
        impl: "auto", "reference" or "triton", of the step's plan.
        keep_logits: ``logits`` [largest bucket, vocab] holds the logits of the last step, for work on the current
            stream between two runs.
        keep_logprobs: the streams hold the log-probability of each token, under the model's own softmax.
        draws: sampling a row, in place of ``sampling``; of any number of rows. ``load`` sets its values; which of its
            fields are None, and how many stop ids a row may have, stays.
        batch_invariant: of a step that is, see Model. Every step runs the largest bucket then, so that what
            torch.compile made has one shape whoever is there, too.
        speculate: drafts a step feeds behind each row's token, see generation.speculation; steps then take (drafts + 1)
            rows a row, ``logits`` holds as many, and caches are to be allocated with next_n and step_rows of at least
            that.
        drafter: a function that drafts, captured with the step; None: the layer of multi-token prediction of ``step``,
            a Model with its weights, whose keys prefill_step wrote.
        predict: that layer under torch.compile.

    Raises:
        TypeError: wrong types.
        ValueError: caches on a CPU; sampling or sizes out of range.
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
        keep_logprobs: bool = False,
        draws: Draws | None = None,
        batch_invariant: bool = False,
        speculate: int = 0,
        drafter: Drafter | None = None,
        predict: Predict | None = None,
    ):
        device = caches.kv[0].device
        checked_sampling(sampling)
        if device.type != "cuda":
            raise ValueError(f"caches: got device {device}, allowed: a CUDA or HIP device, graphs need one")
        self.replays, self._device = 0, device
        self.stream, self._copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._passed = torch.cuda.Event()  # recorded anew by whoever waits for a stream next
        self._behind: torch.cuda.Stream | None = None  # has waited for everything on the graph's stream
        settings = LoopSettings(
            max_context, max_blocks, buckets, ring_blocks, sampling, impl, keep_logits, keep_logprobs, draws,
            batch_invariant, speculate, drafter, predict,
        )  # fmt: skip
        super().__init__(step, caches, settings)
        for history in (self._history, self._logprobs):
            if history is not None:
                history.record_stream(self._copies)
        with torch.cuda.stream(self.stream):
            self.workspace = Workspace(workspace_size or (0, 0), device)
        if workspace_size is not None:
            self.workspace.lock()
        for cache in (cache for layers in caches for cache in layers if cache is not None):
            cache.record_stream(self.stream)
        self._graphs = self._capture()

    @property
    def captures(self) -> int:
        return len(self._graphs)

    def run(self, steps: int, *, least: int = 0) -> TokenStream:
        """Replay ``steps`` decode steps; returns at once. A stopped row keeps drawing tokens that mean nothing.

        Args:
            steps: 0 or more.
            least: columns at least, of padding where no more rows are live.

        Returns:
            The tokens, as they arrive.

        Raises:
            ValueError: steps that are below 0 or more than the history holds.
            RuntimeError: nothing is loaded.
        """
        width = self._columns_of(least)
        if not 0 <= steps <= HISTORY:
            raise ValueError(f"steps: got {steps}, allowed: 0 to {HISTORY}")
        graph = self._graphs[self._bucket(width)]
        tokens, logprobs = self._on_host(steps, width)
        arrived = []
        self.stream.wait_stream(self._current_stream())
        self.stream.wait_stream(self._copies)  # the history may not overrun what is still being copied
        with torch.cuda.stream(self.stream):  # which puts back what was current, whatever is within
            self._settle()
            for number in range(steps):
                graph.replay()
                self._copies.wait_event(self.stream.record_event(self._passed))
                torch.cuda.set_stream(self._copies)
                self._copy_drawn(number, width, tokens, logprobs)
                arrived.append(self._copies.record_event())
                torch.cuda.set_stream(self.stream)
        self.replays += steps
        self._let_follow(self._current_stream())
        if self.logits is not None:
            self.logits.record_stream(self._current_stream())
        return TokenStream(tokens, arrived, logprobs, REPLAY_S if self.mesh.size > 1 else None)

    @contextlib.contextmanager
    def _editing(self) -> Iterator[None]:
        """On the graph's stream, whose order decides when what is allocated here may be used again. The current stream
        waits, because the caller may write to the tensors it gave, or let go of them."""
        current = self._current_stream()
        self.stream.wait_event(current.record_event(self._passed))
        with torch.cuda.stream(self.stream):
            yield
        self._let_follow(current)

    def _allocator(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        return functools.partial(torch.cuda.stream, self.stream)

    def _settle_here(self) -> None:
        """On the current stream, which spares the host a change of streams."""
        current = self._current_stream()
        if current is not self._behind:
            self._let_follow(current)
        self._settle()
        self.stream.wait_event(current.record_event(self._passed))

    def _let_follow(self, current: torch.cuda.Stream) -> None:
        current.wait_event(self.stream.record_event(self._passed))
        self._behind = current

    def _current_stream(self) -> torch.cuda.Stream:
        return torch_private.current_stream(self._device)

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
            gc.collect()  # what it frees is room for the graphs
            for rows in reversed(self.buckets):
                graph = torch.cuda.CUDAGraph()
                with (
                    streams.garbage_kept(),
                    torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"),
                ):
                    self._decode(rows)
                pool = pool or graph.pool()
                graphs[rows] = graph
            self._place.zero_()
        self._current_stream().wait_stream(self.stream)
        return graphs
