"""The spec of DeepSeek-V4 from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sparse_attn.spec.compressed import CompressedSpec, first_layers, kinds_of_ratios
from sparse_attn.spec.fields import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, Fields, rope_of, short, yarn_of
from sparse_attn.spec.parts import IndexSpec, MoeSpec, YarnSpec, softmax_scale

MODEL_TYPE = "deepseek_v4"
MAX_STREAMS, MAX_ITERATIONS = 64, 1000
_FIXED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "scoring_func": "sqrtsoftplus",
    "num_key_value_heads": 1, "norm_topk_prob": True,
}  # fmt: skip
LAYER_TYPES = {
    "sliding_attention": "window", "compressed_sparse_attention": "indexed", "heavily_compressed_attention": "full",
}  # fmt: skip


def compressed_spec(config: Mapping[str, Any]) -> CompressedSpec:
    """The spec of a config.json of DeepSeek-V4."""
    fields = Fields(config)
    fields.refuse_unless(_FIXED)
    size, number = fields.size, fields.number
    layers, head_dim, index_dim = (
        size("num_hidden_layers", at_most=MAX_LAYERS),
        size("head_dim"),
        size("index_head_dim"),
    )
    rope_dim = _rope_dim_of(fields, head_dim)
    theta, compressed_theta, yarn = _ropes_of(fields)
    if yarn is not None and not yarn.truncate:  # transformers looks for it where V4's parameters are not
        raise ValueError("config rope truncate: got False, allowed: True")
    indexed_ratio, full_ratio = _rates_of(fields)
    return CompressedSpec(
        name=MODEL_TYPE,
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        num_layers=layers,
        num_heads=size("num_attention_heads"),
        q_lora=size("q_lora_rank"),
        head_dim=head_dim,
        rope_dim=rope_dim,
        window=size("sliding_window", at_least=0, at_most=MAX_POSITIONS),
        layer_kinds=_kinds_of(fields, layers),
        index=IndexSpec(
            num_heads=size("index_n_heads"),
            head_dim=index_dim,
            top_k=size("index_topk", at_most=MAX_POSITIONS),
            rope_interleaved=True,
            rope_start=index_dim - rope_dim,
        ),
        moe=MoeSpec(
            num_experts=size("n_routed_experts", "num_local_experts", at_most=MAX_EXPERTS),
            experts_per_token=size("num_experts_per_tok"),
            num_groups=1,
            top_groups=1,
            routed_scale=number("routed_scaling_factor"),
            renormalise=True,
            num_shared=1,  # whatever n_shared_experts says, as transformers has it
            intermediate_size=size("moe_intermediate_size"),
            score="sqrtsoftplus",
            clamp=number("swiglu_limit", above=0),
        ),
        hash_layers=_hash_layers_of(fields, layers),
        o_groups=size("o_groups"),
        o_lora=size("o_lora_rank"),
        max_positions=size("max_position_embeddings", at_most=MAX_POSITIONS),
        rope_theta=theta,
        compressed_rope_theta=compressed_theta,
        softmax_scale=softmax_scale(head_dim),
        yarn=yarn,
        indexed_ratio=indexed_ratio,
        full_ratio=full_ratio,
        streams=size("hc_mult", at_most=MAX_STREAMS),
        sinkhorn_iterations=size("hc_sinkhorn_iters", at_most=MAX_ITERATIONS),
        hyper_eps=number("hc_eps", at_least=0),
        rms_eps=number("rms_norm_eps", at_least=0),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=fields.ids("eos_token_id"),
    )


def _rope_dim_of(fields: Fields, head_dim: int) -> int:
    """Rotated width: qk_rope_head_dim, or a part of the head; where both are given they agree."""
    if fields.config.get("qk_rope_head_dim") is None:
        return int(head_dim * fields.number("partial_rotary_factor", above=0))
    rope_dim = fields.size("qk_rope_head_dim", at_least=2)
    part = fields.number("partial_rotary_factor", above=0, default=rope_dim / head_dim)
    if abs(head_dim * part - rope_dim) >= 0.5:
        fields.refuse("partial_rotary_factor", f"qk_rope_head_dim / head_dim = {rope_dim} / {head_dim}")
    return rope_dim


def _rates_of(fields: Fields) -> tuple[int, int]:
    """Tokens of an entry in (indexed, full) layers."""
    rates = Fields(fields.part("compress_rates"), "compress_rates", MODEL_TYPE)
    found = []
    for key, flat, default in (
        ("compressed_sparse_attention", "compress_rate_csa", 4),
        ("heavily_compressed_attention", "compress_rate_hca", 128),
    ):  # fmt: skip
        holder, name = (rates, key) if rates.config.get(key) is not None else (fields, flat)
        found.append(default if holder.config.get(name) is None else holder.size(name, at_most=MAX_POSITIONS))
    return found[0], found[1]


def _kinds_of(fields: Fields, layers: int) -> tuple[str, ...]:
    types = fields.names("layer_types", LAYER_TYPES, layers, longer=True)
    if types is not None:
        return tuple(LAYER_TYPES[kind] for kind in types)
    ratios = fields.config.get("compress_ratios")
    if ratios is None:
        raise ValueError("config compress_ratios: missing, and so is layer_types; one of them is needed")
    if not isinstance(ratios, (list, tuple)) or not all(type(ratio) is int for ratio in ratios):
        fields.refuse("compress_ratios", "integers, one per layer")
    if len(ratios) < layers:  # entries beyond belong to multi-token prediction layers
        raise ValueError(
            f"config compress_ratios: got {len(ratios)} entries, allowed: at least {layers}, one per layer"
        )
    return kinds_of_ratios(list(ratios[:layers]))


def _hash_layers_of(fields: Fields, layers: int) -> tuple[bool, ...]:
    types = fields.names("mlp_layer_types", dict.fromkeys(("hash_moe", "moe")), layers, longer=True)
    if types is not None:
        return tuple(kind == "hash_moe" for kind in types)
    if fields.config.get("num_hash_layers") is None:
        raise ValueError("config num_hash_layers: missing, and so is mlp_layer_types; one of them is needed")
    return first_layers(layers, fields.size("num_hash_layers", at_least=0))


class _Rope(NamedTuple):
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnSpec | None


def _ropes_of(fields: Fields) -> _Rope:
    """theta of window layers, theta of the others and their yarn, from the nested form or the flat one.

    Yarn does not scale cos and sin here unless the file says so; window layers have none.
    """

    def read(rope: Mapping[str, Any]) -> _Rope:
        nested = [isinstance(rope.get(part), Mapping) for part in ("main", "compress")]
        if any(nested) and not all(nested):
            raise ValueError(f"config rope_parameters: got {short(dict(rope))}, allowed: main and compress, or neither")
        yarn = yarn_of({key: value for key, value in rope.items() if key not in ("main", "compress")}, 1.0)
        if not all(nested):
            theta, compressed_theta = (fields.number(key, above=1) for key in ("rope_theta", "compress_rope_theta"))
            return _Rope(theta, compressed_theta, yarn)
        for where, found in (("main", yarn_of(rope["main"])), ("beside main and compress", yarn)):
            if found is not None:
                raise ValueError(f"config rope_parameters {where}: got yarn, allowed: 'default'")
        theta, compressed_theta = (
            Fields(rope[part], f"rope_parameters {part}", MODEL_TYPE).number("rope_theta", above=1)
            for part in ("main", "compress")
        )
        return _Rope(theta, compressed_theta, yarn_of(rope["compress"], 1.0))

    return rope_of(fields, read)
