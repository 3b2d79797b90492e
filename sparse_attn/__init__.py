"""DeepSeek Sparse Attention as pure functions on torch.compile.

Here stands what a layer and a model are made of. The rest has its place in the package: sparse_attn/README.md, "The
front", says where.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sparse_attn import moved
from sparse_attn.cache import allocate_cache, mark_cache
from sparse_attn.explanation import explain
from sparse_attn.framework.target import target_of
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.compressor import compress_and_cache
from sparse_attn.ops.attention.kv_cache import gather_kv_cache, write_kv_cache
from sparse_attn.ops.attention.sparse import merge_attn_states, sparse_attn_decode, sparse_attn_prefill
from sparse_attn.ops.indexer.keys import gather_indexer_k, indexer_k_quant_and_cache
from sparse_attn.ops.indexer.queries import indexer_q_rope_quant
from sparse_attn.ops.indexer.scores import fp8_mqa_logits, fp8_paged_mqa_logits
from sparse_attn.ops.layers import hyper_connection, router  # noqa: F401 for their operators, which saved programs hold
from sparse_attn.ops.layers.rope import apply_rope, rope_table
from sparse_attn.ops.layers.sampling import row_seeds, sample
from sparse_attn.ops.ragged.lists import build_ragged_indices_from_dense
from sparse_attn.ops.ragged.step_plans import build_step_plan
from sparse_attn.ops.topk.fused import index_topk_decode, index_topk_decode_slots, index_topk_prefill
from sparse_attn.ops.topk.select import top_k_per_row
from sparse_attn.pipeline import (
    Bounds,
    CacheLayouts,
    attend,
    cache_layouts,
    index_select,
    workspace_size,
    write_index_keys,
    write_latents,
)
from sparse_attn.spec import from_hf_config, preset
from sparse_attn.types import QuantisedQuery, Ragged
from sparse_attn.version import __version__
from sparse_attn.workspace import reserve, use

moved.install()

__all__ = [
    "Batching", "Bounds", "CacheLayouts", "DecodeGraph", "IndexFp8Layout", "IndexMxfp4Layout", "LatentFp8Layout",
    "Model", "PlainLayout", "PlanarFp8Layout", "QuantisedQuery", "Ragged", "Sampling", "__version__", "allocate_cache",
    "apply_rope", "attend", "build_ragged_indices_from_dense", "build_step_plan", "cache_layouts", "compress_and_cache",
    "explain", "fp8_mqa_logits", "fp8_paged_mqa_logits", "from_hf_config", "gather_indexer_k", "gather_kv_cache",
    "generate", "index_select", "index_topk_decode", "index_topk_decode_slots", "index_topk_prefill",
    "indexer_k_quant_and_cache", "indexer_q_rope_quant", "mark_cache", "merge_attn_states", "preset", "reserve",
    "rope_table", "row_seeds", "sample", "sparse_attn_decode", "sparse_attn_prefill", "target_of", "top_k_per_row",
    "use", "workspace_size", "write_index_keys", "write_kv_cache", "write_latents",
]  # fmt: skip

if TYPE_CHECKING:
    from sparse_attn.generation.generate import generate
    from sparse_attn.generation.graph import DecodeGraph
    from sparse_attn.generation.model import Model
    from sparse_attn.generation.sampling import Sampling
    from sparse_attn.generation.scheduler import Batching
else:
    _LATER = {  # imported when first asked for: an operator needs no model
        "Batching": "sparse_attn.generation.scheduler",
        "DecodeGraph": "sparse_attn.generation.graph",
        "Model": "sparse_attn.generation.model",
        "Sampling": "sparse_attn.generation.sampling",
        "generate": "sparse_attn.generation.generate",
    }

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            return moved.left_the_top(name)
        value = globals()[name] = getattr(import_module(_LATER[name]), name)
        return value


def __dir__() -> list[str]:
    return __all__
