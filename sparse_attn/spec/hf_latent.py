"""The spec of DeepSeek-V3.2 and GLM-5 from their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_attn.spec.fields import Fields, yarn_of
from sparse_attn.spec.latent import Spec, leading_dense, shared_index_layers
from sparse_attn.spec.parts import IndexSpec, MoeSpec, YarnSpec, softmax_scale

# model_type -> whether the indexer's rope is interleaved where the file does not say.
MODEL_TYPES = {"deepseek_v32": False, "glm_moe_dsa": True}
# What files call this attention; transformers 5.23 says the latter.
LAYER_TYPES = {"deepseek_sparse_attention", "indexed_attention"}
# What the forward computes; a file that asks for anything else is refused.
_FIXED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True,
}  # fmt: skip


def latent_spec(config: Mapping[str, Any]) -> Spec:
    """The spec of a config.json of DeepSeek-V3.2 or GLM-5."""
    fields = Fields(config)
    fields.refuse_unless(_FIXED)
    need, model_type = fields.need, fields.model_type
    layers = need("num_hidden_layers")
    nope, rope_dim = need("qk_nope_head_dim"), need("qk_rope_head_dim")
    theta, yarn, scale = _rope_of(config, nope + rope_dim)
    return Spec(
        name=model_type,
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        num_layers=layers,
        num_heads=need("num_attention_heads"),
        q_lora=need("q_lora_rank"),
        kv_lora=need("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope_dim,
        v_dim=need("v_head_dim"),
        index=IndexSpec(
            num_heads=need("index_n_heads"),
            head_dim=need("index_head_dim"),
            top_k=need("index_topk"),
            rope_interleaved=bool(config.get("indexer_rope_interleave", MODEL_TYPES[model_type])),
        ),
        moe=MoeSpec(
            num_experts=need("n_routed_experts", "num_local_experts", "num_experts"),
            experts_per_token=need("num_experts_per_tok"),
            num_groups=need("n_group"),
            top_groups=need("topk_group"),
            routed_scale=float(need("routed_scaling_factor")),
            renormalise=bool(need("norm_topk_prob")),
            num_shared=config.get("n_shared_experts") or 0,
            intermediate_size=need("moe_intermediate_size"),
        ),
        dense_intermediate_size=need("intermediate_size"),
        moe_layers=_moe_layers_of(config, layers),
        index_layers=_index_layers_of(config, layers),
        max_positions=need("max_position_embeddings"),
        rope_theta=theta,
        softmax_scale=scale,
        yarn=yarn,
        rms_eps=float(need("rms_norm_eps")),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=fields.ids("eos_token_id"),
    )


def _moe_layers_of(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    kinds = config.get("layer_types")
    if kinds is not None and not (kinds and set(kinds) <= LAYER_TYPES):
        raise ValueError(f"config layer_types: got {sorted(set(kinds))}, allowed: {' or '.join(sorted(LAYER_TYPES))} alone")
    types = config.get("mlp_layer_types")
    if types is None:
        if config.get("first_k_dense_replace") is None:
            raise ValueError("config first_k_dense_replace: missing, and so is mlp_layer_types; one of them is needed")
        return leading_dense(layers, config["first_k_dense_replace"])
    if len(types) != layers or not set(types) <= {"dense", "sparse"}:
        raise ValueError(f"config mlp_layer_types: got {types!r}, allowed: {layers} times 'dense' or 'sparse'")
    return tuple(kind == "sparse" for kind in types)


def _index_layers_of(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    pattern = config.get("indexer_types")
    if pattern is None:
        pattern = config.get("index_topk_pattern")
    if pattern is None:
        offset = config.get("index_skip_topk_offset")
        return shared_index_layers(layers, config.get("index_topk_freq") or 1, 2 if offset is None else offset)
    names = {"F": "full", "S": "shared"}
    types = [names.get(kind, kind) for kind in pattern]
    if len(types) != layers or not set(types) <= {"full", "shared"}:
        raise ValueError(f"config indexer_types: got {pattern!r}, allowed: {layers} times 'full' or 'shared'")
    return tuple(kind == "full" for kind in types)


def _rope_of(config: Mapping[str, Any], qk_dim: int) -> tuple[float, YarnSpec | None, float]:
    """(theta, yarn, softmax scale) from rope_parameters, or from rope_theta and rope_scaling."""
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("config rope_theta: missing, and so is rope_parameters.rope_theta; one of them is needed")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config partial_rotary_factor: got {rope['partial_rotary_factor']!r}, allowed: 1.0")
    yarn = yarn_of(rope)
    if yarn is None:
        return float(theta), None, softmax_scale(qk_dim)
    return float(theta), yarn, softmax_scale(qk_dim, yarn.factor, rope.get("mscale_all_dim") or 0.0)
