"""MLA layers whose indexer is ours. Their other modules stay vLLM's."""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import os
from typing import Any, cast

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.utils.torch_utils import direct_register_custom_op

from sparse_attn.integrations.vllm.backend import INDEX_CACHE, STEP, SelectedStep, SparseAttnBackend, selected_step
from sparse_attn.layout import PLAIN_NAME, IndexFp8Layout, IndexLayout, PlainLayout
from sparse_attn.ops.indexer.queries import indexer_q_rope_quant
from sparse_attn.ops.layers.rope import apply_rope
from sparse_attn.pipeline.latent import index_select, write_index_keys
from sparse_attn.pipeline.layouts import CacheLayouts
from sparse_attn.types import QuantisedQuery

LAYER = MultiHeadLatentAttentionWrapper.__name__
INDEX_DTYPES = {"fp8": torch.uint8, "bf16": torch.bfloat16, "fp32": torch.float32}


def index_layout(dtype: torch.dtype, dim: int) -> IndexLayout:
    return IndexFp8Layout(dim) if dtype == torch.uint8 else PlainLayout(PLAIN_NAME[dtype], dim)


@eager_break_during_capture
def sparse_attn_select(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    order: torch.Tensor,
    name: str,
    top_k: int,
) -> None:
    """Write the step's index keys, and leave the selection for the layers that attend by it. Nothing is written to
    ``order``: an operator that seems to write it stays where it is."""
    context, found = get_forward_context(), selected_step()
    if context.attn_metadata is None:  # a profiling run
        return
    cache = context.no_compile_layers[name].kv_cache
    plan = found[STEP].plan if STEP in found else context.attn_metadata[name].plan()
    layout = index_layout(cache.dtype, keys.shape[1])
    layouts = CacheLayouts(kv=cast(Any, None), index=layout)  # latents are attention's
    rows = plan.slot_mapping.shape[0]
    write_index_keys(keys[:rows], cache, plan, layouts=layouts)
    query_rows = QuantisedQuery(query[:rows], weights[:rows])
    found[STEP] = SelectedStep(plan, index_select(query_rows, cache, plan, layouts=layouts, top_k=top_k))


logger = init_logger("vllm.sparse_attn")  # vLLM shows what is logged under its own name
OPERATOR = "sparse_attn_select"
direct_register_custom_op(OPERATOR, sparse_attn_select, mutates_args=["order"], fake_impl=lambda *arguments: None)


class Rope(torch.nn.Module):
    """vLLM's rotary embedding by our operator: on a CPU vLLM's own rotates 3-D queries wrongly (0.32)."""

    def __init__(self, theirs: Any):
        super().__init__()
        self.interleaved, self.cos_sin = not theirs.is_neox_style, fp32_table(theirs)

    def one(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return apply_rope(x, positions, self.cos_sin, start=0, interleaved=self.interleaved)

    def forward(self, positions, query, key):
        return self.one(query, positions), self.one(key, positions)


def fp32_table(rotary: Any) -> torch.Tensor:
    """cos and sin, made once of a module that layers share."""
    if not hasattr(rotary, "cos_sin_fp32"):
        rotary.cos_sin_fp32 = rotary.cos_sin_cache.float()
    return rotary.cos_sin_fp32


def run_indexer(indexer: Any, rope: Rope, hidden_states, qr, positions, rotary_emb) -> torch.Tensor:
    """In place of vLLM's Indexer.forward."""
    dim, heads = indexer.head_dim, indexer.n_head
    q = indexer.wq_b(qr)[0].view(-1, heads, dim)
    keys, weights = indexer.wk_weights_proj(hidden_states)[0].split([dim, heads], dim=-1)
    query = indexer_q_rope_quant(
        q, weights, positions, rope.cos_sin, start=0, interleaved=rope.interleaved,
        weight_scale=indexer.softmax_scale * heads**-0.5, layout=index_layout(indexer.k_cache.dtype, dim),
    )  # fmt: skip
    torch.ops.vllm.sparse_attn_select(
        query.query, query.weights, rope.one(indexer.k_norm(keys), positions), indexer.topk_indices_buffer,
        indexer.k_cache.prefix, indexer.topk_tokens,
    )  # fmt: skip
    return indexer.topk_indices_buffer


@PluggableLayer.register_oot(name=LAYER)
class SparseAttnLayer(MultiHeadLatentAttentionWrapper):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not self.is_sparse:
            return
        device = self.o_proj.weight.device
        kernels = "the reference in PyTorch" if device.type == "cpu" else f"Triton kernels on {device}"
        logger.info_once("sparse_attn has indexers, selection, cache writes and attention of %s: %s.", LAYER, kernels)
        if self.rotary_emb is not None and self.rotary_emb.cos_sin_cache.device.type == "cpu":
            self.rotary_emb = Rope(self.rotary_emb)
        if self.indexer is None:
            return
        own_index_cache(self.indexer)
        rope = Rope(self.indexer_rope_emb)
        self.indexer.forward = functools.partial(run_indexer, self.indexer, rope)
        splitting = get_current_vllm_config().compilation_config.splitting_ops
        if splitting and f"vllm::{OPERATOR}" not in splitting:  # what reads a step's metadata is in no captured piece
            splitting.append(f"vllm::{OPERATOR}")


def own_index_cache(indexer: Any) -> None:
    """Have index keys kept as SPARSE_ATTN_VLLM_INDEX_CACHE says, and their metadata built here."""
    kind, cache = os.environ.get(INDEX_CACHE, "fp8"), indexer.k_cache
    if kind not in INDEX_DTYPES:
        raise ValueError(f"{INDEX_CACHE}: got {kind!r}, allowed: {', '.join(INDEX_DTYPES)}")
    layout = index_layout(INDEX_DTYPES[kind], indexer.head_dim)
    cache.dtype, cache.head_dim = INDEX_DTYPES[kind], layout.row
    cache.get_attn_backend = backend_of_index_cache


def backend_of_index_cache() -> type[SparseAttnBackend]:
    return SparseAttnBackend
