"""The spec of DeepSeek-V4 from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_attn.spec.compressed import CompressedSpec, first_layers, kinds_of_ratios
from sparse_attn.spec.fields import Fields, yarn_of
from sparse_attn.spec.parts import IndexSpec, MoeSpec, YarnSpec, softmax_scale

MODEL_TYPE = "deepseek_v4"
_FIXED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "scoring_func": "sqrtsoftplus",
    "num_key_value_heads": 1, "n_shared_experts": 1, "norm_topk_prob": True,
}  # fmt: skip
LAYER_TYPES = {
    "sliding_attention": "window", "compressed_sparse_attention": "indexed", "heavily_compressed_attention": "full",
}  # fmt: skip


def compressed_spec(config: Mapping[str, Any]) -> CompressedSpec:
    """The spec of a config.json of DeepSeek-V4."""
    fields = Fields(config)
    fields.refuse_unless(_FIXED)
    need = fields.need
    layers, head_dim, index_dim = need("num_hidden_layers"), need("head_dim"), need("index_head_dim")
    rope_dim = config.get("qk_rope_head_dim")
    if rope_dim is None:
        rope_dim = int(head_dim * need("partial_rotary_factor"))
    theta, compressed_theta, yarn = _ropes_of(fields)
    rates = dict(config.get("compress_rates") or {})
    return CompressedSpec(
        name=MODEL_TYPE,
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        num_layers=layers,
        num_heads=need("num_attention_heads"),
        q_lora=need("q_lora_rank"),
        head_dim=head_dim,
        rope_dim=rope_dim,
        window=need("sliding_window"),
        layer_kinds=_kinds_of(config, layers),
        index=IndexSpec(
            num_heads=need("index_n_heads"),
            head_dim=index_dim,
            top_k=need("index_topk"),
            rope_interleaved=True,
            rope_start=index_dim - rope_dim,
        ),
        moe=MoeSpec(
            num_experts=need("n_routed_experts", "num_local_experts"),
            experts_per_token=need("num_experts_per_tok"),
            num_groups=1,
            top_groups=1,
            routed_scale=float(need("routed_scaling_factor")),
            renormalise=True,
            num_shared=1,
            intermediate_size=need("moe_intermediate_size"),
            score="sqrtsoftplus",
            clamp=float(need("swiglu_limit")),
        ),
        hash_layers=_hash_layers_of(config, layers),
        o_groups=need("o_groups"),
        o_lora=need("o_lora_rank"),
        max_positions=need("max_position_embeddings"),
        rope_theta=theta,
        compressed_rope_theta=compressed_theta,
        softmax_scale=softmax_scale(head_dim),
        yarn=yarn,
        indexed_ratio=rates.get("compressed_sparse_attention", config.get("compress_rate_csa") or 4),
        full_ratio=rates.get("heavily_compressed_attention", config.get("compress_rate_hca") or 128),
        streams=need("hc_mult"),
        sinkhorn_iterations=need("hc_sinkhorn_iters"),
        hyper_eps=float(need("hc_eps")),
        rms_eps=float(need("rms_norm_eps")),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=fields.ids("eos_token_id"),
    )


def _kinds_of(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    types = config.get("layer_types")
    if types is not None:
        if len(types) != layers or not set(types) <= set(LAYER_TYPES):
            raise ValueError(f"config layer_types: got {types!r}, allowed: {layers} times one of {', '.join(LAYER_TYPES)}")
        return tuple(LAYER_TYPES[kind] for kind in types)
    ratios = config.get("compress_ratios")
    if ratios is None:
        raise ValueError("config compress_ratios: missing, and so is layer_types; one of them is needed")
    if len(ratios) < layers:  # entries beyond belong to multi-token prediction layers
        raise ValueError(f"config compress_ratios: got {len(ratios)} entries, allowed: at least {layers}, one per layer")
    return kinds_of_ratios(list(ratios[:layers]))


def _hash_layers_of(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    types = config.get("mlp_layer_types")
    if types is None:
        if config.get("num_hash_layers") is None:
            raise ValueError("config num_hash_layers: missing, and so is mlp_layer_types; one of them is needed")
        return first_layers(layers, config["num_hash_layers"])
    if len(types) != layers or not set(types) <= {"hash_moe", "moe"}:
        raise ValueError(f"config mlp_layer_types: got {types!r}, allowed: {layers} times 'hash_moe' or 'moe'")
    return tuple(kind == "hash_moe" for kind in types)


def _ropes_of(fields: Fields) -> tuple[float, float, YarnSpec | None]:
    """(theta of window layers, theta of the others, their yarn) from the nested form or the flat one.

    Yarn does not scale cos and sin here unless the file says so; window layers have none.
    """
    config = fields.config
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    if isinstance(rope.get("main"), Mapping) and isinstance(rope.get("compress"), Mapping):
        main, compressed = rope["main"], rope["compress"]
        if yarn_of(main) is not None:
            raise ValueError("config rope_parameters main: got yarn, allowed: 'default'")
        return float(main["rope_theta"]), float(compressed["rope_theta"]), yarn_of(compressed, 1.0)
    return float(fields.need("rope_theta")), float(fields.need("compress_rope_theta")), yarn_of(rope, 1.0)
