"""Model facts as frozen dataclasses: what a forward needs to know, for DeepSeek-V3.2 and GLM-5.

Nothing below the models reads a model's name; ``Spec.name`` is for messages. Sources: the config.json files that
DeepSeek and Zhipu publish, and transformers 5.17's DeepseekV32Config and GlmMoeDsaConfig, whose modelling code pins
what the files leave open (the latent norms' eps, half-split index rope in V3.2 and interleaved in GLM-5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The latent norms and the index key's LayerNorm keep 1e-6 in both models, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6
INDEX_NORM_EPS = 1e-6


@dataclass(frozen=True)
class YarnSpec:
    """Yarn's frequency ramp. original_max_position: tokens of the unscaled context; beta_*: rotations over it;
    attention_factor multiplies cos and sin (1 wherever mscale equals mscale_all_dim)."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts chosen by sigmoid scores plus bias, and shared experts every token takes."""

    num_experts: int
    experts_per_token: int
    num_groups: int
    top_groups: int
    routed_scale: float
    renormalise: bool
    num_shared: int
    intermediate_size: int


@dataclass(frozen=True)
class IndexSpec:
    """The lightning indexer. rope_start: first rotated dimension; the rotated width is the model's rope_dim."""

    num_heads: int
    head_dim: int
    top_k: int
    rope_interleaved: bool
    rope_start: int = 0
    hadamard: bool = False
    norm_eps: float = INDEX_NORM_EPS

    @property
    def weight_scale(self) -> float:
        """What the per-head score weights are multiplied by."""
        return self.num_heads**-0.5 * self.head_dim**-0.5


@dataclass(frozen=True)
class Spec:
    """Everything the forward needs. Per layer: ``moe_layers[i]`` says routed or dense, ``index_layers[i]`` whether the
    layer runs its own indexer (True) or shares the selection of the last layer that did.

    softmax_scale belongs to the un-absorbed head (nope + rope) and includes yarn's m squared.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora: int
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    index: IndexSpec
    moe: MoeSpec
    dense_intermediate_size: int
    moe_layers: tuple[bool, ...]
    index_layers: tuple[bool, ...]
    max_positions: int
    rope_theta: float
    softmax_scale: float
    yarn: YarnSpec | None = None
    rope_interleaved: bool = True
    rms_eps: float = 1e-6
    latent_norm_eps: float = LATENT_NORM_EPS
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = field(default=())

    def __post_init__(self):
        for name in ("moe_layers", "index_layers"):
            entries = len(getattr(self, name))
            if entries != self.num_layers:
                raise ValueError(f"{name}: got {entries} entries, allowed: num_layers = {self.num_layers}")
        if not self.index_layers or not self.index_layers[0]:
            raise ValueError("index_layers: the first layer has no selection to share, it must run its own indexer")
        if self.rope_dim % 2 or self.index.rope_start + self.rope_dim > self.index.head_dim:
            raise ValueError(
                f"rope_dim: got {self.rope_dim}, allowed: even, and with index.rope_start {self.index.rope_start} "
                f"at most index.head_dim {self.index.head_dim}"
            )
        moe = self.moe
        if any(self.moe_layers):
            if moe.num_groups < 1 or moe.num_experts % moe.num_groups or moe.num_experts // moe.num_groups < 2:
                raise ValueError(
                    f"moe.num_groups: got {moe.num_groups} for {moe.num_experts} experts, allowed: groups of equal "
                    "size, two or more experts each"
                )
            if not 1 <= moe.top_groups <= moe.num_groups:
                raise ValueError(f"moe.top_groups: got {moe.top_groups}, allowed: 1 to num_groups = {moe.num_groups}")
            reachable = moe.top_groups * (moe.num_experts // moe.num_groups)
            if not 1 <= moe.experts_per_token <= reachable:
                raise ValueError(f"moe.experts_per_token: got {moe.experts_per_token}, allowed: 1 to {reachable}")

    @property
    def qk_dim(self) -> int:
        """Width of one un-absorbed query head."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Width of an absorbed query head and of a cached row: the latent, then the rotated part."""
        return self.kv_lora + self.rope_dim

    @property
    def num_index_layers(self) -> int:
        return sum(self.index_layers)


def softmax_scale(qk_dim: int, yarn_factor: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """qk_dim^-0.5 times the square of yarn's m = 0.1 * mscale_all_dim * ln(factor) + 1."""
    return qk_dim**-0.5 * _mscale(yarn_factor, mscale_all_dim) ** 2


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def leading_dense(num_layers: int, num_dense: int) -> tuple[bool, ...]:
    """``moe_layers`` of a model whose first ``num_dense`` layers are dense."""
    return tuple(layer >= num_dense for layer in range(num_layers))


def shared_index_layers(num_layers: int, frequency: int = 1, offset: int = 2) -> tuple[bool, ...]:
    """``index_layers`` where layer i runs its own indexer iff max(i - offset + 1, 0) is a multiple of ``frequency``."""
    return tuple(max(layer - offset + 1, 0) % max(frequency, 1) == 0 for layer in range(num_layers))


def deepseek_v32() -> Spec:
    """DeepSeek-V3.2."""
    return Spec(
        name="deepseek_v32",
        vocab_size=129280, hidden_size=7168, num_layers=61, num_heads=128,
        q_lora=1536, kv_lora=512, nope_dim=128, rope_dim=64, v_dim=128,
        index=IndexSpec(num_heads=64, head_dim=128, top_k=2048, rope_interleaved=False),
        moe=MoeSpec(num_experts=256, experts_per_token=8, num_groups=8, top_groups=4, routed_scale=2.5,
                    renormalise=True, num_shared=1, intermediate_size=2048),
        dense_intermediate_size=18432, moe_layers=leading_dense(61, 3), index_layers=shared_index_layers(61),
        max_positions=163840, rope_theta=1e4, softmax_scale=softmax_scale(192, 40.0, 1.0), yarn=YarnSpec(40.0, 4096),
        rms_eps=1e-6, eos_token_ids=(1,),
    )  # fmt: skip


def glm5(index_topk_freq: int = 1, index_skip_topk_offset: int = 2) -> Spec:
    """GLM-5; a frequency above 1 gives the shared indexers of its successors."""
    return Spec(
        name="glm5",
        vocab_size=154880, hidden_size=6144, num_layers=78, num_heads=64,
        q_lora=2048, kv_lora=512, nope_dim=192, rope_dim=64, v_dim=256,
        index=IndexSpec(num_heads=32, head_dim=128, top_k=2048, rope_interleaved=True),
        moe=MoeSpec(num_experts=256, experts_per_token=8, num_groups=1, top_groups=1, routed_scale=2.5,
                    renormalise=True, num_shared=1, intermediate_size=2048),
        dense_intermediate_size=12288, moe_layers=leading_dense(78, 3),
        index_layers=shared_index_layers(78, index_topk_freq, index_skip_topk_offset),
        max_positions=202752, rope_theta=1e6, softmax_scale=softmax_scale(256), rms_eps=1e-5,
        eos_token_ids=(154820, 154827, 154829),
    )  # fmt: skip


def tiny_v32() -> Spec:
    """A byte-level model of DeepSeek-V3.2's architecture: ids 0..255 are bytes, 256 ends a text."""
    return Spec(
        name="tiny_v32",
        vocab_size=257, hidden_size=128, num_layers=4, num_heads=8,
        q_lora=96, kv_lora=64, nope_dim=32, rope_dim=16, v_dim=32,
        index=IndexSpec(num_heads=4, head_dim=32, top_k=64, rope_interleaved=False),
        moe=MoeSpec(num_experts=8, experts_per_token=2, num_groups=4, top_groups=2, routed_scale=2.5, renormalise=True,
                    num_shared=1, intermediate_size=64),
        dense_intermediate_size=256, moe_layers=leading_dense(4, 1), index_layers=shared_index_layers(4),
        max_positions=8192, rope_theta=1e4, softmax_scale=softmax_scale(48, 40.0, 1.0), yarn=YarnSpec(40.0, 256),
        rms_eps=1e-6, eos_token_ids=(256,),
    )  # fmt: skip


def tiny_glm5() -> Spec:
    """A byte-level model of GLM-5's architecture, with shared index layers: ids 0..255 are bytes, 256 ends a text."""
    return Spec(
        name="tiny_glm5",
        vocab_size=257, hidden_size=128, num_layers=6, num_heads=4,
        q_lora=96, kv_lora=64, nope_dim=48, rope_dim=16, v_dim=64,
        index=IndexSpec(num_heads=2, head_dim=32, top_k=64, rope_interleaved=True),
        moe=MoeSpec(num_experts=8, experts_per_token=2, num_groups=1, top_groups=1, routed_scale=2.5, renormalise=True,
                    num_shared=1, intermediate_size=64),
        dense_intermediate_size=256, moe_layers=leading_dense(6, 1), index_layers=shared_index_layers(6, 3, 2),
        max_positions=8192, rope_theta=1e6, softmax_scale=softmax_scale(64), rms_eps=1e-5, eos_token_ids=(256,),
    )  # fmt: skip


PRESETS = {"deepseek_v32": deepseek_v32, "glm5": glm5, "tiny_v32": tiny_v32, "tiny_glm5": tiny_glm5}


def preset(name: str) -> Spec:
    """The preset called ``name``; a dash counts as an underscore."""
    if name.replace("-", "_") not in PRESETS:
        raise ValueError(f"preset: got {name!r}, allowed: {', '.join(PRESETS)}")
    return PRESETS[name.replace("-", "_")]()


# model_type -> whether the indexer's rope is interleaved where the file does not say.
_MODEL_TYPES = {"deepseek_v32": False, "glm_moe_dsa": True}
# What the forward computes; a file that asks for anything else is refused.
_FIXED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True,
}  # fmt: skip


def from_hf_config(config: Mapping[str, Any]) -> Spec:
    """The spec of a Hugging Face config.json, as published by DeepSeek or Zhipu or as written by save_pretrained.

    ValueError where a key is missing or asks for something the forward does not compute.
    """
    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise ValueError(f"config model_type: got {model_type!r}, allowed: {', '.join(_MODEL_TYPES)}")
    for key, wanted in _FIXED.items():
        if config.get(key, wanted) != wanted:
            raise ValueError(f"config {key}: got {config[key]!r}, allowed: {wanted!r}")

    def need(key: str, *aliases: str) -> Any:
        for name in (key, *aliases):
            if config.get(name) is not None:
                return config[name]
        raise ValueError(f"config {key}: missing; {model_type} needs it")

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
            rope_interleaved=bool(config.get("indexer_rope_interleave", _MODEL_TYPES[model_type])),
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
        eos_token_ids=_ids(config.get("eos_token_id")),
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _moe_layers_of(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    kinds = config.get("layer_types")
    if kinds is not None and set(kinds) != {"deepseek_sparse_attention"}:
        raise ValueError(f"config layer_types: got {sorted(set(kinds))}, allowed: 'deepseek_sparse_attention' alone")
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
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return float(theta), None, softmax_scale(qk_dim)
    if kind != "yarn":
        raise ValueError(f"config rope_type: got {kind!r}, allowed: 'default', 'yarn'")
    if not rope.get("truncate", True):
        raise ValueError("config rope truncate: got False, allowed: True")
    for key in ("factor", "original_max_position_embeddings"):
        if rope.get(key) is None:
            raise ValueError(f"config rope {key}: missing; yarn needs it")
    factor = float(rope["factor"])
    mscale, all_dim = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        both = mscale and all_dim
        attention_factor = _mscale(factor, mscale) / _mscale(factor, all_dim) if both else _mscale(factor, 1.0)
    yarn = YarnSpec(
        factor,
        rope["original_max_position_embeddings"],
        float(rope.get("beta_fast") or 32.0),
        float(rope.get("beta_slow") or 1.0),
        float(attention_factor),
    )
    return float(theta), yarn, softmax_scale(qk_dim, factor, all_dim)
