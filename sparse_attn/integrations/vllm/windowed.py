"""DeepSeek-V4 in vLLM: the selection of entries, and attention over a row's window and its entries.

vLLM's attention layer keeps its projections, norms, rotations, compressors and cache writes. Its caches hold the bytes
of PlanarFp8Layout and IndexFp8Layout. The metadata of a step is built here: vLLM's own builders need a Triton that
compiles for CPUs.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.models.deepseek_v4.compressor import CompressorMetadata
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from sparse_attn.integrations.vllm import check_failure
from sparse_attn.integrations.vllm.backend import (
    INDEX_CACHE,
    SparseAttnBackend,
    SparseAttnMetadataBuilder,
    problems_of,
    refuse,
    refuse_later_rows,
    step_plan,
)
from sparse_attn.layout import IndexFp8Layout, PlanarFp8Layout
from sparse_attn.ops.ragged.step_plans import build_compressed_plan
from sparse_attn.pipeline.layouts import CacheLayouts
from sparse_attn.pipeline.windowed import (
    Entries,
    WindowStep,
    all_entries,
    attend,
    no_entries,
    plan_windows,
    select_entries,
)
from sparse_attn.types import QuantisedQuery, StepPlan

if not current_platform.is_cpu():
    refuse([f"model: got deepseek_v4 on {current_platform.device_type}, allowed: on a CPU, so far"])
from vllm.models.deepseek_v4.cpu import model  # noqa: E402
from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention  # noqa: E402

WINDOWED_STEPS = "sparse_attn_windows"
logger = init_logger("vllm.sparse_attn")


@dataclass
class WindowedMetadata(CompressorMetadata):
    """Of a step, for one cache: window keys, entries, index keys or a compressor's state. vLLM's compressors read the
    fields that they know; slots of entries are those that a row completes, -1 for the others."""

    num_prefill_tokens: int = 0
    num_actual_tokens: int = 0
    num_decodes: int = 0
    num_prefills: int = 0
    max_seq_len: int = 0
    plan: StepPlan = cast(Any, None)  # of the cache's own blocks


class WindowedMetadataBuilder(SparseAttnMetadataBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> WindowedMetadata:
        common, spec = common_attn_metadata, self.kv_cache_spec
        refuse_later_rows(common)
        decodes, prefills, decode_tokens, prefill_tokens = split_decodes_and_prefills(common, decode_threshold=1)
        plan, ratio = step_plan(common, decodes), getattr(spec, "tokens_per_state", 1)
        slots = plan.slot_mapping
        if ratio > 1:
            slots = build_compressed_plan(plan, ratio=ratio, block_size=spec.block_size // ratio).slot_mapping
        return WindowedMetadata(
            block_table=plan.block_table.clamp(min=0), slot_mapping=slots, block_size=spec.block_size,
            token_to_req_indices=plan.request_ids.clamp(min=0), num_decode_tokens=decode_tokens,
            num_prefill_tokens=prefill_tokens, num_actual_tokens=common.num_actual_tokens, num_decodes=decodes,
            num_prefills=prefills, max_seq_len=common.max_seq_len, plan=plan,
        )  # fmt: skip


class WindowedBackend(SparseAttnBackend):
    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return DeepseekV4IndexerBackend.supported_kv_cache_layouts()  # caches of one block beside each other

    @staticmethod
    def get_builder_cls() -> type[WindowedMetadataBuilder]:
        return WindowedMetadataBuilder


class PlannedStep(NamedTuple):
    plan: StepPlan
    windows: WindowStep


class SparseAttnWindowedAttention(DeepseekV4CPUAttention):
    backend_cls = swa_backend_cls = WindowedBackend

    def __init__(self, *args, **kwargs):
        check_failure()
        problems, kind = problems_of(get_current_vllm_config()), os.environ.get(INDEX_CACHE, "fp8")
        if kind != "fp8":
            problems.append(f"{INDEX_CACHE}: got {kind}, allowed: fp8 for deepseek_v4")
        if problems:
            refuse(problems)
        super().__init__(*args, **kwargs)
        logger.info_once("sparse_attn has selection and attention of DeepSeek-V4: the reference in PyTorch.")
        states = [self.compressor] if self.compressor is not None else []
        if self.indexer is not None:
            states.append(self.indexer.compressor)
            self.indexer.k_cache.get_attn_backend = backend
        for one in states:
            one.state_cache.get_attn_backend = backend
        index = cast(Any, None) if self.indexer is None else IndexFp8Layout(self.indexer.head_dim)
        self.layouts = CacheLayouts(PlanarFp8Layout(self.nope_head_dim, self.rope_head_dim), index)

    def _sparse_indexer_and_attn(
        self, hidden_states, index_q, index_q_scale, index_weights, q, kv, positions, out
    ) -> None:
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # a profiling run
            out.zero_()
            return
        plan, windows = self._planned(metadata)
        rows, compressed = plan.positions.shape[0], self.kv_cache if self.compress_ratio > 1 else None
        entries = self._entries(plan, windows, index_q, index_weights)
        out[:rows] = attend(
            q[:rows], self.swa_cache_layer.kv_cache, compressed, plan, windows, entries, ratio=self.compress_ratio,
            layouts=self.layouts, scale=self.scale, sink=self.attn_sink,
        ).out  # fmt: skip
        out[rows:] = 0

    def _planned(self, metadata: dict[str, WindowedMetadata]) -> PlannedStep:
        """Of the layers that compress alike, once a step."""
        steps = get_forward_context().additional_kwargs.setdefault(WINDOWED_STEPS, {})
        ratio = self.compress_ratio
        if ratio not in steps:
            plan, held = metadata[self.swa_cache_layer.prefix].plan, {}
            plan = plan._replace(ring_table=plan.block_table)
            if ratio > 1:
                plan = plan._replace(block_table=metadata[self.prefix].plan.block_table)
                held = {ratio: self.kv_cache.shape[1]}
            ring = self.swa_cache_layer.kv_cache.shape[1]
            steps[ratio] = PlannedStep(
                plan, plan_windows(plan, window=self.window_size, ring=ring, entries_per_block=held)
            )
        return steps[ratio]

    def _entries(self, plan: StepPlan, windows: WindowStep, index_q: Any, index_weights: Any) -> Entries:
        ratio, window = self.compress_ratio, self.window_size
        if ratio <= 1:
            return no_entries(plan, windows, window=window)
        held = self.kv_cache.shape[1]
        if index_q is None:  # a layer without an indexer, or no row sees more entries than are selected
            return all_entries(plan, windows, ratio=ratio, window=window, block_size=held)
        rows, cache = plan.positions.shape[0], self.indexer.k_cache.kv_cache
        query = QuantisedQuery(index_q[:rows].view(torch.uint8), index_weights[:rows])
        return select_entries(
            query, cache, plan, windows, ratio=ratio, window=window, layouts=self.layouts,
            top_k=self.indexer.topk_tokens,
        )  # fmt: skip


def backend() -> type[WindowedBackend]:
    return WindowedBackend


model.DeepseekV4CPUAttention = SparseAttnWindowedAttention
DeepseekV4ForCausalLM = model.DeepseekV4ForCausalLM
