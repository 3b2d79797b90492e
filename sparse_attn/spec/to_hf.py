"""The config.json of a spec: what from_hf_config reads, and transformers too."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from sparse_attn.spec import hf_compressed
from sparse_attn.spec.compressed import CompressedSpec
from sparse_attn.spec.hf import from_hf_config
from sparse_attn.spec.latent import Spec
from sparse_attn.spec.parts import MoeSpec, YarnSpec, mscale_of

_KINDS = {ours: theirs for theirs, ours in hf_compressed.LAYER_TYPES.items()}
_ARCHITECTURES = {
    "deepseek_v32": "DeepseekV32ForCausalLM", "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
}  # fmt: skip


def to_hf_config(spec: Spec | CompressedSpec) -> dict[str, Any]:
    """The config.json that from_hf_config turns back into ``spec``, but for its name.

    Args:
        spec: of the model.

    Returns:
        The object of the file.

    Raises:
        ValueError: names the fields that no config.json can express.
    """
    config = _compressed(spec) if isinstance(spec, CompressedSpec) else _latent(spec)
    config = {"architectures": [_ARCHITECTURES[config["model_type"]]], **config}
    back = replace(from_hf_config(config), name=spec.name)
    lost = [field.name for field in fields(spec) if getattr(back, field.name) != getattr(spec, field.name)]
    if lost:
        raise ValueError(f"spec: got {', '.join(lost)} that no config.json of {config['model_type']} says")
    return config


def _common(spec: Spec | CompressedSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "q_lora_rank": spec.q_lora,
        "qk_rope_head_dim": spec.rope_dim,
        "index_n_heads": spec.index.num_heads,
        "index_head_dim": spec.index.head_dim,
        "index_topk": spec.index.top_k,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.rms_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": list(spec.eos_token_ids) or None,
        "hidden_act": "silu",
        "attention_bias": False,
        **_moe(spec.moe),
    }


def _moe(moe: MoeSpec) -> dict[str, Any]:
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "n_shared_experts": moe.num_shared,
        "moe_intermediate_size": moe.intermediate_size,
        "routed_scaling_factor": moe.routed_scale,
        "norm_topk_prob": moe.renormalise,
    }


def _rope(theta: float, yarn: YarnSpec | None, **more: Any) -> dict[str, Any]:
    if yarn is None:
        return {"rope_type": "default", "rope_theta": theta}
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "attention_factor": yarn.attention_factor,
        **({} if yarn.truncate else {"truncate": False}),
        **more,
    }


def _latent(spec: Spec) -> dict[str, Any]:
    # transformers has the rope's layout of the architecture, whatever indexer_rope_interleave says.
    model_type = "glm_moe_dsa" if spec.index.rope_interleaved else "deepseek_v32"
    shared = not all(spec.index_layers)
    if shared and model_type == "deepseek_v32":
        raise ValueError(
            "spec: got index_layers that share a selection with index.rope_interleaved False, allowed: one or the "
            "other; transformers reads no such model"
        )
    mscale = {}
    if spec.yarn is not None:
        both = mscale_of(spec.softmax_scale, spec.qk_dim, spec.yarn.factor)
        mscale = {"mscale": both, "mscale_all_dim": both}
    config = {
        "model_type": model_type,
        **_common(spec),
        "num_key_value_heads": spec.num_heads,
        "intermediate_size": spec.dense_intermediate_size,
        "kv_lora_rank": spec.kv_lora,
        "qk_nope_head_dim": spec.nope_dim,
        "v_head_dim": spec.v_dim,
        "n_group": spec.moe.num_groups,
        "topk_group": spec.moe.top_groups,
        "mlp_layer_types": ["sparse" if routed else "dense" for routed in spec.moe_layers],
        "indexer_rope_interleave": spec.index.rope_interleaved,
        "rope_parameters": _rope(spec.rope_theta, spec.yarn, **mscale),
    }
    if shared:
        config["indexer_types"] = ["full" if own else "shared" for own in spec.index_layers]
    return config


def _part(rope_dim: int, head_dim: int) -> float:
    """The part of a head that int() makes the rotated width of, as transformers does."""
    part = rope_dim / head_dim
    return part if int(head_dim * part) == rope_dim else math.nextafter(part, 1.0)


def _compressed(spec: CompressedSpec) -> dict[str, Any]:
    partial = {"partial_rotary_factor": _part(spec.rope_dim, spec.head_dim)}
    return {
        "model_type": hf_compressed.MODEL_TYPE,
        **_common(spec),
        **partial,
        "num_key_value_heads": 1,
        "head_dim": spec.head_dim,
        "sliding_window": spec.window,
        "layer_types": [_KINDS[kind] for kind in spec.layer_kinds],
        "mlp_layer_types": ["hash_moe" if by_table else "moe" for by_table in spec.hash_layers],
        "compress_rates": {_KINDS["indexed"]: spec.indexed_ratio, _KINDS["full"]: spec.full_ratio},
        "scoring_func": spec.moe.score,
        "swiglu_limit": spec.moe.clamp,
        "o_groups": spec.o_groups,
        "o_lora_rank": spec.o_lora,
        "hc_mult": spec.streams,
        "hc_sinkhorn_iters": spec.sinkhorn_iterations,
        "hc_eps": spec.hyper_eps,
        "rope_theta": spec.rope_theta,
        "compress_rope_theta": spec.compressed_rope_theta,
        "rope_parameters": {
            "main": _rope(spec.rope_theta, None) | partial,
            "compress": _rope(spec.compressed_rope_theta, spec.yarn) | partial,
        },
    }
