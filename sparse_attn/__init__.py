"""DeepSeek Sparse Attention as pure functions on torch.compile."""

from sparse_attn import moved
from sparse_attn.cache import allocate_cache, mark_cache
from sparse_attn.explanation import Explanation, explain
from sparse_attn.framework.target import Target, target_of
from sparse_attn.layout import (
    IndexFp8Layout,
    IndexMxfp4Layout,
    LatentFp8Layout,
    PlainLayout,
    PlanarFp8Layout,
    parse_layout,
)
from sparse_attn.mesh import Mesh, Ranks, mesh_of, planned_mesh
from sparse_attn.ops.attention.compressor import compress_and_cache
from sparse_attn.ops.attention.kv_cache import gather_kv_cache, write_kv_cache
from sparse_attn.ops.attention.sparse import (
    lse_to_base2,
    lse_to_flashmla,
    merge_attn_states,
    sparse_attn_decode,
    sparse_attn_into,
    sparse_attn_prefill,
)
from sparse_attn.ops.indexer.keys import gather_indexer_k, indexer_k_quant_and_cache
from sparse_attn.ops.indexer.queries import hadamard_transform, indexer_q_rope_quant
from sparse_attn.ops.indexer.scores import (
    bf16_mqa_logits,
    bf16_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    mxfp4_mqa_logits,
    mxfp4_paged_mqa_logits,
)
from sparse_attn.ops.layers.experts import packed_experts
from sparse_attn.ops.layers.hyper_connection import hyper_head, hyper_merge, hyper_mix
from sparse_attn.ops.layers.linears import grouped_linear, linear
from sparse_attn.ops.layers.rope import Yarn, apply_rope, rope_table
from sparse_attn.ops.layers.router import biased_grouped_topk, hash_routed_experts
from sparse_attn.ops.layers.sampling import (
    count_tokens,
    filter_logits,
    penalise_logits,
    row_seeds,
    sample,
    token_logprobs,
)
from sparse_attn.ops.ragged.lists import (
    build_ragged_indices_from_dense,
    combine_topk_swa_indices_ragged,
    compute_global_topk_ragged_indices_and_indptr,
    entry_indices,
    window_indices,
)
from sparse_attn.ops.ragged.step_plans import build_compressed_plan, build_step_plan, build_window_plan
from sparse_attn.ops.topk.fused import index_topk_decode, index_topk_decode_slots, index_topk_prefill
from sparse_attn.ops.topk.ranks import count_digits, count_ties, merge_candidates, pack_candidates, take_winners
from sparse_attn.ops.topk.select import top_k_per_row
from sparse_attn.pipeline import (
    Bounds,
    CacheLayouts,
    Selection,
    attend,
    cache_layouts,
    index_select,
    workspace_size,
    write_index_keys,
    write_latents,
)
from sparse_attn.spec import CompressedSpec, IndexSpec, MoeSpec, Spec, YarnSpec, from_hf_config, preset
from sparse_attn.types import (
    AttentionOutput,
    Caches,
    CompressedPlan,
    HyperMix,
    IndexKeys,
    Logprobs,
    QuantisedQuery,
    Ragged,
    StepPlan,
    WindowCaches,
    WindowPlan,
)
from sparse_attn.version import __version__
from sparse_attn.workspace import Workspace, WorkspaceSize, release, reserve, use

moved.install()

__all__ = [
    "AttentionOutput", "Bounds", "CacheLayouts", "Caches", "CompressedPlan", "CompressedSpec", "Explanation",
    "HyperMix", "IndexFp8Layout", "IndexKeys", "IndexMxfp4Layout", "IndexSpec", "LatentFp8Layout", "Logprobs", "Mesh",
    "MoeSpec", "PlainLayout", "PlanarFp8Layout", "QuantisedQuery", "Ragged", "Ranks", "Selection", "Spec", "StepPlan",
    "Target", "WindowCaches", "WindowPlan", "Workspace", "WorkspaceSize", "Yarn", "YarnSpec", "__version__",
    "allocate_cache", "apply_rope", "attend", "bf16_mqa_logits", "bf16_paged_mqa_logits", "biased_grouped_topk",
    "build_compressed_plan", "build_ragged_indices_from_dense", "build_step_plan", "build_window_plan", "cache_layouts",
    "combine_topk_swa_indices_ragged", "compress_and_cache", "compute_global_topk_ragged_indices_and_indptr",
    "count_digits", "count_ties", "count_tokens", "entry_indices", "explain", "filter_logits", "fp8_mqa_logits",
    "fp8_paged_mqa_logits", "from_hf_config", "gather_indexer_k", "gather_kv_cache", "grouped_linear",
    "hadamard_transform", "hash_routed_experts", "hyper_head", "hyper_merge", "hyper_mix", "index_select",
    "index_topk_decode", "index_topk_decode_slots", "index_topk_prefill", "indexer_k_quant_and_cache",
    "indexer_q_rope_quant", "linear", "lse_to_base2", "lse_to_flashmla", "mark_cache", "merge_attn_states",
    "merge_candidates", "mesh_of", "mxfp4_mqa_logits", "mxfp4_paged_mqa_logits", "pack_candidates", "packed_experts",
    "parse_layout", "penalise_logits", "planned_mesh", "preset", "release", "reserve", "rope_table", "row_seeds",
    "sample", "sparse_attn_decode", "sparse_attn_into", "sparse_attn_prefill", "take_winners", "target_of",
    "token_logprobs", "top_k_per_row", "use", "window_indices", "workspace_size", "write_index_keys", "write_kv_cache",
    "write_latents",
]  # fmt: skip
