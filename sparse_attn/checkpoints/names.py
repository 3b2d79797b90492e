"""Which weights of a checkpoint make up which weights of the forward."""

from __future__ import annotations

import functools
import re
from collections.abc import Container

from sparse_attn.spec import CompressedSpec, Spec

PREDICTED = "num_nextn_predict_layers"  # what a config.json calls the number of layers of multi-token prediction
_FUSED_GATE_UP, _FUSED_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_KV_B = ("attn.w_uk", "attn.w_uv")


class Spelling:
    """Names of a checkpoint's weights, relative to their layer where they belong to one.

    direct: read as they are, but for the shape. stacked: one after the other along the first dimension. prediction: as
    direct, of what layers of multi-token prediction have beside a layer's weights. predicted: how many of these layers
    are read; the others are left out on purpose.
    """

    direct: dict[str, str] = {}
    stacked: dict[str, tuple[str, ...]] = {}
    prediction: dict[str, str] = {}

    def __init__(self, spec: Spec | CompressedSpec, predicted: int = 0):
        self.spec, self.predicted = spec, predicted

    def rename(self, stored: str) -> str:
        """The name that a weight called ``stored`` in the files is read by."""
        return stored

    def published(self, name: str) -> str:
        """The name that a weight which is read as ``name`` has in files as they are published."""
        return name

    def ignores(self, name: str) -> bool:
        """Whether ``name`` is left out on purpose."""
        match = re.match(r"model\.layers\.(\d+)\.", name)
        beyond = match is not None and int(match[1]) >= self.spec.num_layers + self.predicted
        return beyond or name.endswith("rotary_emb.inv_freq")

    def unused_indexer(self, name: str) -> int | None:
        """The layer of ``name`` where it belongs to an indexer and the layer shares the selection of another."""
        return None

    def prediction_prefix(self, layer: int) -> str:
        """What the names of a layer of multi-token prediction begin with."""
        return f"model.layers.{self.spec.num_layers + layer}."

    def sources(self, name: str, checkpoint: Container[str]) -> list[str]:
        """The checkpoint's weights that a weight of the forward is read from."""
        prefix, kind = layer_of(name)
        match = re.match(r"mtp\.(\d+)\.(.*)", name)
        if match:
            prefix, kind = self.prediction_prefix(int(match[1])), match[2]
            if kind in self.prediction:
                return [prefix + self.prediction[kind]]
        if kind in self.direct:
            return [prefix + self.direct[kind]]
        if kind in self.stacked:
            return [prefix + part for part in self.stacked[kind]]
        fused, parts = (_FUSED_GATE_UP, ("gate", "up")) if kind == "moe.gate_up" else (_FUSED_DOWN, ("down",))
        if prefix + fused in checkpoint:
            return [prefix + fused]
        experts = range(self.spec.moe.num_experts)
        return [f"{prefix}mlp.experts.{expert}.{part}_proj.weight" for expert in experts for part in parts]

    def source_shape(self, name: str, shape: tuple[int, ...], sources: list[str]) -> tuple[int, ...]:
        """Shape of each of the ``sources`` that a weight of ``shape`` is read from."""
        if sources[0].endswith((_FUSED_GATE_UP, _FUSED_DOWN)):
            return shape
        rows = shape[0] * shape[1] if len(shape) == 3 else shape[0]
        return (rows // len(sources), *shape[1:][-1:])

    def together(self, name: str) -> tuple[str, ...]:
        """The weights that are read at once with ``name``, itself among them: those of the same source."""
        return (name,)


def layer_of(name: str) -> tuple[str, str]:
    """(checkpoint prefix, name inside its layer) of a weight of the forward."""
    match = re.match(r"layers\.(\d+)\.(.*)", name)
    return (f"model.layers.{match[1]}.", match[2]) if match else ("", name)


def kind_of(name: str) -> str:
    """The name of a weight inside its layer, be it one of multi-token prediction."""
    return re.sub(r"^(layers|mtp)\.\d+\.", "", name)


class LatentSpelling(Spelling):
    """DeepSeek-V3.2 and GLM-5."""

    direct = {
        "embed": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "lm_head": "lm_head.weight",
        "input_norm": "input_layernorm.weight",
        "post_norm": "post_attention_layernorm.weight",
        "attn.q_a": "self_attn.q_a_proj.weight",
        "attn.q_a_norm": "self_attn.q_a_layernorm.weight",
        "attn.q_b": "self_attn.q_b_proj.weight",
        "attn.kv_a": "self_attn.kv_a_proj_with_mqa.weight",
        "attn.kv_a_norm": "self_attn.kv_a_layernorm.weight",
        "attn.w_uk": "self_attn.kv_b_proj.weight",
        "attn.w_uv": "self_attn.kv_b_proj.weight",
        "attn.o": "self_attn.o_proj.weight",
        "index.q_b": "self_attn.indexer.wq_b.weight",
        "index.k": "self_attn.indexer.wk.weight",
        "index.k_norm": "self_attn.indexer.k_norm.weight",
        "index.k_norm_bias": "self_attn.indexer.k_norm.bias",
        "index.weights": "self_attn.indexer.weights_proj.weight",
        "mlp.down": "mlp.down_proj.weight",
        "moe.gate": "mlp.gate.weight",
        "moe.bias": "mlp.gate.e_score_correction_bias",
        "moe.shared_down": "mlp.shared_experts.down_proj.weight",
    }
    stacked = {
        "mlp.gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "moe.shared_gate_up": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    }
    prediction = {
        "enorm": "enorm.weight",
        "hnorm": "hnorm.weight",
        "eh_proj": "eh_proj.weight",
        "norm": "shared_head.norm.weight",
        "embed": "embed_tokens.weight",
        "lm_head": "shared_head.head.weight",
    }

    spec: Spec

    def unused_indexer(self, name: str) -> int | None:
        match = re.match(r"model\.layers\.(\d+)\.self_attn\.indexer\.", name)
        layer = int(match[1]) if match else self.spec.num_layers
        return layer if layer < self.spec.num_layers and not self.spec.index_layers[layer] else None

    def source_shape(self, name: str, shape: tuple[int, ...], sources: list[str]) -> tuple[int, ...]:
        if kind_of(name) in _KV_B:
            return (self.spec.num_heads * (self.spec.nope_dim + self.spec.v_dim), self.spec.kv_lora)
        return super().source_shape(name, shape, sources)

    def together(self, name: str) -> tuple[str, ...]:
        kind = kind_of(name)
        return tuple(name.removesuffix(kind) + one for one in _KV_B) if kind in _KV_B else (name,)


_ATTENTION, _INDEXER = "self_attn.", "self_attn.compressor.indexer."
# DeepSeek's names -> transformers'. Applied in this order, to a name with "model." in front.
_RENAMES = (
    (r"^(layers|embed|norm|hc_head)(?=[._])", r"model.\1"),
    (r"^model\.mtp\.", "mtp."),
    (r"^head\.", "lm_head."),
    (r"^model\.embed\.", "model.embed_tokens."),
    (r"^model\.hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_sink$", ".sinks"),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"(?<=\.self_attn)\.norm\.", ".kv_norm."),
    (r"(?<=compressor)\.norm\.", ".kv_norm."),
    (r"(?<=indexer)\.norm\.", ".kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.w(q_a|q_b|kv|o_a|o_b)\.", r".\1_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"_proj\.scale$", "_proj.weight_scale_inv"),
)

# And back.
_TO_DEEPSEEK = (
    (r"^lm_head\.", "head."),
    (r"^model\.embed_tokens\.", "embed."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.", ""),
    (r"\.self_attn\.sinks$", ".attn.attn_sink"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"(?<=\.)(attn|ffn)_hc\.", r"hc_\1_"),
    (r"(?<=\.)input_layernorm\.", "attn_norm."),
    (r"(?<=\.)post_attention_layernorm\.", "ffn_norm."),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"compressor\.kv_norm\.", "compressor.norm."),
    (r"compressor\.position_bias$", "compressor.ape"),
    (r"compressor\.gate_proj\.", "compressor.wgate."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.(q_a|q_b|kv|o_a|o_b)_proj\.", r".w\1."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
)


_NUMBER, _COUNTED = re.compile(r"(?<=\.)\d+(?=\.)"), re.compile("#")  # of a layer or an expert


@functools.lru_cache(maxsize=4096)
def _renamed(name: str) -> str:
    """``name``, a # in place of each number, by transformers' names, which have the numbers in the same order."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


class CompressedSpelling(Spelling):
    """DeepSeek-V4, by transformers' names; DeepSeek's own are renamed to them."""

    direct = {
        "embed": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "lm_head": "lm_head.weight",
        "head.fn": "model.hc_head.hc_fn",
        "head.base": "model.hc_head.hc_base",
        "head.scale": "model.hc_head.hc_scale",
        "input_norm": "input_layernorm.weight",
        "post_norm": "post_attention_layernorm.weight",
        "attn.q_a": _ATTENTION + "q_a_proj.weight",
        "attn.q_a_norm": _ATTENTION + "q_a_norm.weight",
        "attn.q_b": _ATTENTION + "q_b_proj.weight",
        "attn.kv": _ATTENTION + "kv_proj.weight",
        "attn.kv_norm": _ATTENTION + "kv_norm.weight",
        "attn.sink": _ATTENTION + "sinks",
        "attn.o_a": _ATTENTION + "o_a_proj.weight",
        "attn.o_b": _ATTENTION + "o_b_proj.weight",
        "entry.position_bias": _ATTENTION + "compressor.position_bias",
        "entry.norm": _ATTENTION + "compressor.kv_norm.weight",
        "index.position_bias": _INDEXER + "position_bias",
        "index.norm": _INDEXER + "kv_norm.weight",
        "index.q_b": _INDEXER + "q_b_proj.weight",
        "index.weights": _INDEXER + "scorer.weights_proj.weight",
        "moe.gate": "mlp.gate.weight",
        "moe.bias": "mlp.gate.e_score_correction_bias",
        "moe.table": "mlp.gate.tid2eid",
        "moe.shared_down": "mlp.shared_experts.down_proj.weight",
    } | {
        f"{ours}.{part}": f"{theirs}.{part}"
        for ours, theirs in (("attn_hyper", "attn_hc"), ("moe_hyper", "ffn_hc"))
        for part in ("fn", "base", "scale")
    }  # fmt: skip
    stacked = {
        "entry.kv_gate": (_ATTENTION + "compressor.kv_proj.weight", _ATTENTION + "compressor.gate_proj.weight"),
        "index.kv_gate": (_INDEXER + "kv_proj.weight", _INDEXER + "gate_proj.weight"),
        "moe.shared_gate_up": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    }

    prediction = {
        "enorm": "enorm.weight",
        "hnorm": "hnorm.weight",
        "e_proj": "e_proj.weight",
        "h_proj": "h_proj.weight",
        "norm": "norm.weight",
        "head.fn": "hc_head_fn",
        "head.base": "hc_head_base",
        "head.scale": "hc_head_scale",
    }

    def rename(self, stored: str) -> str:
        if "#" in stored:
            return _renamed(stored)
        numbers = iter(_NUMBER.findall(stored))
        return _COUNTED.sub(lambda _: next(numbers), _renamed(_NUMBER.sub("#", stored)))

    def published(self, name: str) -> str:
        for pattern, replacement in _TO_DEEPSEEK:
            name = re.sub(pattern, replacement, name)
        return name

    def ignores(self, name: str) -> bool:
        read = tuple(self.prediction_prefix(layer) for layer in range(self.predicted))
        return super().ignores(name) or name.startswith("mtp.") and not name.startswith(read)

    def prediction_prefix(self, layer: int) -> str:
        return f"mtp.{layer}."


def spelling_of(spec: Spec | CompressedSpec, predicted: int = 0) -> Spelling:
    """How checkpoints of ``spec``'s architecture name their weights. predicted: layers of multi-token prediction that
    are read, too."""
    return (CompressedSpelling if isinstance(spec, CompressedSpec) else LatentSpelling)(spec, predicted)
