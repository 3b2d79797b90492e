"""Names and shapes of the weights each forward needs. Names of layer i start with "layers.{i}.", those of layer m of
multi-token prediction with "mtp.{m}."."""

from __future__ import annotations

from dataclasses import replace

from sparse_attn.spec import CompressedSpec, MoeSpec, Spec

Shapes = dict[str, tuple[int, ...]]


def param_shapes(spec: Spec | CompressedSpec) -> Shapes:
    """Shape of every weight of the forward, by name, in a fixed order."""
    shapes: Shapes = {"embed": (spec.vocab_size, spec.hidden_size), "norm": (spec.hidden_size,)}
    if not spec.tie_embeddings:
        shapes["lm_head"] = (spec.vocab_size, spec.hidden_size)
    if isinstance(spec, CompressedSpec):
        shapes |= {f"head.{name}": shape for name, shape in _hyper_shapes(spec, spec.streams, 1).items()}
    for layer in range(spec.num_layers):
        own = _compressed_layer(spec, layer) if isinstance(spec, CompressedSpec) else _latent_layer(spec, layer)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def prediction_spec(spec: Spec | CompressedSpec) -> Spec | CompressedSpec:
    """The layer of a layer of multi-token prediction: ``spec`` with that layer alone."""
    if isinstance(spec, CompressedSpec):
        return replace(spec, num_layers=1, layer_kinds=("window",), hash_layers=(False,))
    return replace(spec, num_layers=1, moe_layers=(True,), index_layers=(True,))


def prediction_shapes(spec: Spec | CompressedSpec, layers: int) -> Shapes:
    """Shape of every weight of ``layers`` layers of multi-token prediction, which models.mtp takes.

    Each is a layer of the model, routed and with an indexer of its own (DeepSeek-V3.2, GLM-5), or over the window alone
    (DeepSeek-V4), and projections of the token's embedding and of the hidden state. The first have an embedding and a
    head of their own; DeepSeek-V4 has the streams' head.
    """
    hidden, norms, one = spec.hidden_size, ("enorm", "hnorm", "norm"), prediction_spec(spec)
    if isinstance(one, CompressedSpec):
        own = _compressed_layer(one, 0) | dict.fromkeys(("e_proj", "h_proj"), (hidden, hidden))
        own |= {f"head.{name}": shape for name, shape in _hyper_shapes(one, one.streams, 1).items()}
    else:
        own = _latent_layer(one, 0) | {"eh_proj": (hidden, 2 * hidden)}
        own |= dict.fromkeys(("embed", "lm_head"), (spec.vocab_size, hidden))
    own |= dict.fromkeys(norms, (hidden,))
    return {f"mtp.{layer}.{name}": shape for layer in range(layers) for name, shape in own.items()}


def _latent_layer(spec: Spec, layer: int) -> Shapes:
    hidden, heads, index = spec.hidden_size, spec.num_heads, spec.index
    shapes = {
        "input_norm": (hidden,),
        "post_norm": (hidden,),
        "attn.q_a": (spec.q_lora, hidden),
        "attn.q_a_norm": (spec.q_lora,),
        "attn.q_b": (heads * spec.qk_dim, spec.q_lora),
        "attn.kv_a": (spec.latent_dim, hidden),
        "attn.kv_a_norm": (spec.kv_lora,),
        "attn.w_uk": (heads, spec.nope_dim, spec.kv_lora),
        "attn.w_uv": (heads, spec.kv_lora, spec.v_dim),
        "attn.o": (hidden, heads * spec.v_dim),
    }
    if spec.index_layers[layer]:
        shapes |= {
            "index.q_b": (index.num_heads * index.head_dim, spec.q_lora),
            "index.k": (index.head_dim, hidden),
            "index.k_norm": (index.head_dim,),
            "index.k_norm_bias": (index.head_dim,),
            "index.weights": (index.num_heads, hidden),
        }
    if spec.moe_layers[layer]:
        return shapes | _moe_shapes(spec.moe, hidden, {"moe.bias": (spec.moe.num_experts,)})
    inner = spec.dense_intermediate_size
    return shapes | {"mlp.gate_up": (2 * inner, hidden), "mlp.down": (hidden, inner)}


def _compressed_layer(spec: CompressedSpec, layer: int) -> Shapes:
    hidden, heads, index = spec.hidden_size, spec.num_heads, spec.index
    kind, moe = spec.layer_kinds[layer], spec.moe
    shapes = {
        "input_norm": (hidden,),
        "post_norm": (hidden,),
        "attn.q_a": (spec.q_lora, hidden),
        "attn.q_a_norm": (spec.q_lora,),
        "attn.q_b": (heads * spec.head_dim, spec.q_lora),
        "attn.kv": (spec.head_dim, hidden),
        "attn.kv_norm": (spec.head_dim,),
        "attn.sink": (heads,),
        "attn.o_a": (spec.o_groups, spec.o_lora, heads // spec.o_groups * spec.head_dim),
        "attn.o_b": (hidden, spec.o_groups * spec.o_lora),
    }
    if kind != "window":
        shapes |= _compressor_shapes("entry", spec, layer, spec.head_dim)
    if kind == "indexed":
        shapes |= _compressor_shapes("index", spec, layer, index.head_dim) | {
            "index.q_b": (index.num_heads * index.head_dim, spec.q_lora),
            "index.weights": (index.num_heads, hidden),
        }
    mixes = (2 + spec.streams) * spec.streams
    for site in ("attn_hyper", "moe_hyper"):
        shapes |= {f"{site}.{name}": shape for name, shape in _hyper_shapes(spec, mixes, 3).items()}
    by_table = {"moe.table": (spec.vocab_size, moe.experts_per_token)}
    routing = by_table if spec.hash_layers[layer] else {"moe.bias": (moe.num_experts,)}
    return shapes | _moe_shapes(moe, hidden, routing)


def _compressor_shapes(prefix: str, spec: CompressedSpec, layer: int, dim: int) -> Shapes:
    width = 2 * dim if spec.layer_kinds[layer] == "indexed" else dim
    return {
        f"{prefix}.kv_gate": (2 * width, spec.hidden_size),
        f"{prefix}.position_bias": (spec.ratio(layer), width),
        f"{prefix}.norm": (dim,),
    }


def _hyper_shapes(spec: CompressedSpec, mixes: int, scales: int) -> Shapes:
    return {"fn": (mixes, spec.streams * spec.hidden_size), "base": (mixes,), "scale": (scales,)}


def _moe_shapes(moe: MoeSpec, hidden: int, routing: Shapes) -> Shapes:
    shapes = {
        "moe.gate": (moe.num_experts, hidden),
        **routing,
        "moe.gate_up": (moe.num_experts, 2 * moe.intermediate_size, hidden),
        "moe.down": (moe.num_experts, hidden, moe.intermediate_size),
    }
    if moe.num_shared:
        shapes["moe.shared_gate_up"] = (2 * moe.num_shared * moe.intermediate_size, hidden)
        shapes["moe.shared_down"] = (hidden, moe.num_shared * moe.intermediate_size)
    return shapes
