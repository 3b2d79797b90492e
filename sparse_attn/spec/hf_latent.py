"""The spec of DeepSeek-V3.2 and GLM-5 from their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sparse_attn.spec.fields import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, Fields, rope_of, short, yarn_of
from sparse_attn.spec.latent import Spec, leading_dense, shared_index_layers
from sparse_attn.spec.parts import IndexSpec, MoeSpec, YarnSpec, softmax_scale

# model_type -> whether the indexer's rope is interleaved where the file does not say.
MODEL_TYPES = {"deepseek_v32": False, "glm_moe_dsa": True}
# What files call this attention; transformers 5.23 says the latter.
LAYER_TYPES: dict[str, None] = dict.fromkeys(("deepseek_sparse_attention", "indexed_attention"))
# What the forward computes; a file that asks for anything else is refused.
_FIXED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True,
}  # fmt: skip


def latent_spec(config: Mapping[str, Any]) -> Spec:
    """The spec of a config.json of DeepSeek-V3.2 or GLM-5."""
    fields = Fields(config)
    fields.refuse_unless(_FIXED)
    size, number = fields.size, fields.number
    model_type: str = fields.need("model_type")
    layers = size("num_hidden_layers", at_most=MAX_LAYERS)
    nope, rope_dim = size("qk_nope_head_dim"), size("qk_rope_head_dim", at_least=2)
    theta, yarn, scale = _rope_of(fields, nope + rope_dim)
    return Spec(
        name=model_type,
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        num_layers=layers,
        num_heads=size("num_attention_heads"),
        q_lora=size("q_lora_rank"),
        kv_lora=size("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope_dim,
        v_dim=size("v_head_dim"),
        index=IndexSpec(
            num_heads=size("index_n_heads"),
            head_dim=size("index_head_dim"),
            top_k=size("index_topk", at_most=MAX_POSITIONS),
            rope_interleaved=fields.flag("indexer_rope_interleave", MODEL_TYPES[model_type]),
        ),
        moe=MoeSpec(
            num_experts=size("n_routed_experts", "num_local_experts", "num_experts", at_least=0, at_most=MAX_EXPERTS),
            experts_per_token=size("num_experts_per_tok", at_least=0),
            num_groups=size("n_group", at_least=0),
            top_groups=size("topk_group", at_least=0),
            routed_scale=number("routed_scaling_factor"),
            renormalise=fields.flag("norm_topk_prob"),
            num_shared=_num_shared_of(fields),
            intermediate_size=size("moe_intermediate_size", at_least=0),
        ),
        dense_intermediate_size=size("intermediate_size", at_least=0),
        moe_layers=_moe_layers_of(fields, layers),
        index_layers=_index_layers_of(fields, layers),
        max_positions=size("max_position_embeddings", at_most=MAX_POSITIONS),
        rope_theta=theta,
        softmax_scale=scale,
        yarn=yarn,
        rms_eps=number("rms_norm_eps", at_least=0),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=fields.ids("eos_token_id"),
    )


def _num_shared_of(fields: Fields) -> int:
    """As transformers has it, one where the file is silent; null is none."""
    if "n_shared_experts" not in fields.config:
        return 1
    return 0 if fields.config["n_shared_experts"] is None else fields.size("n_shared_experts", at_least=0)


def _moe_layers_of(fields: Fields, layers: int) -> tuple[bool, ...]:
    fields.names("layer_types", LAYER_TYPES, layers)
    types = fields.names("mlp_layer_types", dict.fromkeys(("dense", "sparse")), layers)
    if types is not None:
        return tuple(kind == "sparse" for kind in types)
    if fields.config.get("first_k_dense_replace") is None:
        raise ValueError("config first_k_dense_replace: missing, and so is mlp_layer_types; one of them is needed")
    return leading_dense(layers, fields.size("first_k_dense_replace", at_least=0))


def _index_layers_of(fields: Fields, layers: int) -> tuple[bool, ...]:
    """By a pattern of at least ``layers`` entries (those beyond belong to multi-token prediction), or by a
    frequency."""
    own = {"full": True, "F": True, "shared": False, "S": False}
    for key in ("indexer_types", "index_topk_pattern"):
        kinds = fields.names(key, own, layers, longer=True)
        if kinds is not None:
            return tuple(own[kind] for kind in kinds)
    frequency, offset = (
        default if fields.config.get(key) is None else fields.size(key, at_least=0)
        for key, default in (("index_topk_freq", 1), ("index_skip_topk_offset", 2))
    )
    return shared_index_layers(layers, frequency, offset)


class _Rope(NamedTuple):
    """rope_theta: None where the file gives none."""

    rope_theta: float | None
    yarn: YarnSpec | None
    softmax_scale: float


def _rope_of(fields: Fields, qk_dim: int) -> tuple[float, YarnSpec | None, float]:
    """(theta, yarn, softmax scale) from rope_parameters, or from rope_theta and rope_scaling."""

    def read(rope: Mapping[str, Any]) -> _Rope:
        theta = rope.get("rope_theta", fields.config.get("rope_theta"))
        if theta is not None:
            theta = Fields({"rope_theta": theta}).number("rope_theta", above=1)
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"config partial_rotary_factor: got {short(rope['partial_rotary_factor'])}, allowed: 1.0")
        yarn = yarn_of(rope)
        if yarn is None:
            return _Rope(theta, None, softmax_scale(qk_dim))
        all_dim = Fields(rope, "rope").number("mscale_all_dim", default=0.0)
        return _Rope(theta, yarn, softmax_scale(qk_dim, yarn.factor, all_dim))

    theta, yarn, scale = rope_of(fields, read)
    if theta is None:
        raise ValueError("config rope_theta: missing, and so is rope_parameters.rope_theta; one of them is needed")
    return theta, yarn, scale
