"""vLLM's side of attention: the plan of a step, the writer of latents, and attention over what an indexer selected."""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, cast

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLAAttentionImpl,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from sparse_attn.layout import PLAIN_NAME, LatentFp8Layout, PlainLayout
from sparse_attn.ops.attention.kv_cache import write_kv_cache
from sparse_attn.ops.ragged.step_plans import build_step_plan
from sparse_attn.pipeline.latent import Selection, attend
from sparse_attn.pipeline.layouts import CacheLayouts
from sparse_attn.spec.latent import deepseek_v32
from sparse_attn.types import StepPlan

FP8_RECORDS = "fp8_ds_mla"  # vLLM's name of LatentFp8Layout, in the size that it has for DeepSeek-V3.2
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", FP8_RECORDS)
MODELS = ("deepseek_v32", "glm_moe_dsa", "deepseek_v4")
STEP = "sparse_attn"
INDEX_CACHE = "SPARSE_ATTN_VLLM_INDEX_CACHE"


@dataclass
class SparseAttnMetadata(AttentionMetadata):
    """Of a step, for latents and for index keys. vLLM reads the numbers."""

    num_actual_tokens: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    common: CommonAttentionMetadata
    prefill: None = None  # vLLM's dense prefill is never taken

    def plan(self) -> StepPlan:
        """What an indexer asks for once a step. It is built within the forward: a captured graph then reads vLLM's own
        persistent tensors."""
        return step_plan(self.common, self.num_decodes)


def step_plan(common: CommonAttentionMetadata, num_decodes: int) -> StepPlan:
    requests = common.num_reqs
    return build_step_plan(
        common.query_start_loc[: requests + 1].int(),
        common.seq_lens[:requests].int(),
        common.block_table_tensor[:requests].int(),
        common.slot_mapping[: common.num_actual_tokens].long(),
        max_context=int(common.max_seq_len),
        num_decodes=num_decodes,
        kv_capacity=int(common.seq_lens_cpu_upper_bound[num_decodes:requests].sum()),
    )


class SelectedStep(NamedTuple):
    """What the last indexer of a forward left, for its own layer and for those without one."""

    plan: StepPlan
    selection: Selection


def selected_step() -> dict[str, SelectedStep]:
    """Of the forward that runs, under STEP."""
    return get_forward_context().additional_kwargs


class SparseAttnMetadataBuilder(AttentionMetadataBuilder[SparseAttnMetadata]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.reorder_batch_threshold = 1  # vLLM puts requests of so many rows, the decodes, first

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseAttnMetadata:
        common = common_attn_metadata
        refuse_later_rows(common)
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(common, decode_threshold=1)
        return SparseAttnMetadata(common.num_actual_tokens, decodes, prefills, decode_tokens, common)


class SparseAttnBackend(AttentionBackend):
    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes = list(KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_builder_cls() -> type[SparseAttnMetadataBuilder]:
        return SparseAttnMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[SparseAttnImpl]:
        return SparseAttnImpl

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class SparseAttnImpl(MLAAttentionImpl[SparseAttnMetadata]):
    """Attention of one layer."""

    is_sparse = True
    supports_dense_mha_prefill = False
    supports_pcp = False

    def __init__(
        self, num_heads: int, head_size: int, scale: float, *, kv_cache_dtype: str, kv_lora_rank: int, **given
    ):
        rope = head_size - kv_lora_rank
        none = ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name")
        problems = [f"{name}: got {given[name]}, allowed: None" for name in none if given[name] is not None]
        problems += problems_of(get_current_vllm_config()) + problems_of_cache(kv_cache_dtype, kv_lora_rank, rope)
        if problems:
            refuse(problems)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.latent, self.rope, self.fp8 = kv_lora_rank, rope, kv_cache_dtype == FP8_RECORDS

    def record_logical_topk_ready(self) -> None:
        """vLLM says here that an indexer has run."""

    def _layout(self, cache: torch.Tensor) -> LatentFp8Layout | PlainLayout:
        if self.fp8:
            return LatentFp8Layout(self.latent, self.rope, scale_rule="pow2")  # as vLLM 0.33 writes these records
        return PlainLayout(PLAIN_NAME[cache.dtype], self.latent, self.rope)

    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale) -> None:
        if kv_cache.numel():  # none yet in a profiling run
            slots = slot_mapping.flatten()
            write_kv_cache(kv_c_normed, k_pe.flatten(1), kv_cache, slots, self._layout(kv_cache))

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata: SparseAttnMetadata, layer):
        cache, (plan, selection) = kv_c_and_k_pe_cache, selected_step()[STEP]
        if attn_metadata.common.block_table_tensor.data_ptr() != plan.block_table.data_ptr():
            raise RuntimeError("sparse_attn in vLLM: got a block table of index keys alone, allowed: the latents' own")
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        layouts = CacheLayouts(kv=self._layout(cache), index=cast(Any, None))  # index keys are the indexer's
        return attend(q, cache, plan, selection, layouts=layouts, scale=self.scale, d_v=self.latent)


def refuse_later_rows(common: CommonAttentionMetadata) -> None:
    if common.causal is not True:
        refuse(["causal: got rows that see later ones, allowed: True"])


def refuse(problems: list[str]) -> NoReturn:
    raise NotImplementedError(f"sparse_attn in vLLM: {'; '.join(problems)}")


def problems_of(config: VllmConfig) -> list[str]:
    """What of an engine's settings was never run with these layers."""
    parallel, model = config.parallel_config, config.model_config.hf_text_config
    asked = {
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size > 1,
        "speculative_config": config.speculative_config is not None,
        "lora_config": config.lora_config is not None,
        "enable_dbo": parallel.enable_dbo,
        "attention_config.hisparse_config": config.attention_config.hisparse_config is not None,
    }
    problems = [f"{name}: is set, allowed: not with these layers yet" for name, found in asked.items() if found]
    if model.model_type not in MODELS:
        problems.append(f"model: got {model.model_type}, allowed: {', '.join(MODELS)}")
    # transformers rotates interleaved pairs whatever is said, and saves no such key; without it vLLM rotates halves.
    if model.model_type == "glm_moe_dsa" and not getattr(model, "indexer_rope_interleave", False):
        problems.append("config.json: got no indexer_rope_interleave, allowed: true for glm_moe_dsa")
    return problems


def problems_of_cache(dtype: str, latent: int, rope: int) -> list[str]:
    if dtype not in KV_CACHE_DTYPES:
        return [f"kv_cache_dtype: got {dtype}, allowed: {', '.join(KV_CACHE_DTYPES)}"]
    spec = deepseek_v32()
    if dtype == FP8_RECORDS and (latent, rope) != (spec.kv_lora, spec.rope_dim):
        allowed = f"{spec.kv_lora} + {spec.rope_dim}"
        return [f"kv_cache_dtype: got {dtype} with latents of {latent} + {rope}, allowed: {allowed}"]
    return []
