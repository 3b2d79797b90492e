"""The forward of DeepSeek-V3.2 for training: models.deepseek_v32 without caches, attention not absorbed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparse_attn.models.moe import gated_mlp
from sparse_attn.models.norms import layer_norm, rms_norm
from sparse_attn.spec import Spec
from training.parts import Output, Params, Trace, best, divergence, embed, index_scores, moe, turn


def forward(
    params: Params,
    spec: Spec,
    tokens: torch.Tensor,
    *,
    sparse: bool,
    index_rows: torch.Tensor | None = None,
    stable: bool = False,
) -> Output:
    """Logits of every position of ``tokens`` [B, L].

    sparse: attend to what the indexers select, else to everything before. index_rows: positions [R] at which the
    indexers are compared with the attention; None: nowhere. stable: see parts.best.
    """
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    hidden, trace, kept = embed(tokens, params["embed"]), Trace([], {}), None
    for layer in range(spec.num_layers):
        hidden, kept = decoder_layer(
            hidden, params, f"layers.{layer}.", spec, layer, causal, kept, sparse, index_rows, stable, trace
        )
    hidden = rms_norm(hidden, params["norm"], spec.rms_eps)
    return Output(F.linear(hidden, params["embed" if spec.tie_embeddings else "lm_head"]).float(), trace, hidden)


def decoder_layer(
    hidden: torch.Tensor,
    params: Params,
    prefix: str,
    spec: Spec,
    layer: int,
    causal: torch.Tensor,
    kept: torch.Tensor | None,
    sparse: bool,
    index_rows: torch.Tensor | None,
    stable: bool,
    trace: Trace,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """hidden [B, L, D] -> [B, L, D], and which keys were attended to, None for all."""
    normed = rms_norm(hidden, params[prefix + "input_norm"], spec.rms_eps)
    out, kept = _attention(normed, params, prefix, spec, layer, causal, kept, sparse, index_rows, stable, trace)
    hidden = hidden + out
    normed = rms_norm(hidden, params[prefix + "post_norm"], spec.rms_eps)
    if spec.moe_layers[layer]:
        out = moe(normed.flatten(0, 1), params, prefix + "moe.", spec.moe, None, trace)
        return hidden + out.unflatten(0, hidden.shape[:2]), kept
    return hidden + gated_mlp(normed, params[prefix + "mlp.gate_up"], params[prefix + "mlp.down"]), kept


def _attention(
    hidden: torch.Tensor,
    params: Params,
    prefix: str,
    spec: Spec,
    layer: int,
    causal: torch.Tensor,
    kept: torch.Tensor | None,
    sparse: bool,
    index_rows: torch.Tensor | None,
    stable: bool,
    trace: Trace,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """hidden [B, L, D] -> [B, L, D], and which keys were attended to, None for all."""
    attn, table = prefix + "attn.", params["rope"][: hidden.shape[1]]
    q_latent = rms_norm(F.linear(hidden, params[attn + "q_a"]), params[attn + "q_a_norm"], spec.latent_norm_eps)
    latent, key_rope = F.linear(hidden, params[attn + "kv_a"]).split([spec.kv_lora, spec.rope_dim], dim=-1)
    latent = rms_norm(latent, params[attn + "kv_a_norm"], spec.latent_norm_eps)
    key_rope = turn(key_rope.unsqueeze(2), table, 0, spec.rope_interleaved)
    q = F.linear(q_latent, params[attn + "q_b"]).unflatten(-1, (spec.num_heads, spec.qk_dim))
    q = turn(q, table, spec.nope_dim, spec.rope_interleaved).transpose(1, 2)  # [B, H, L, qk_dim]
    key_nope = F.linear(latent, params[attn + "w_uk"].flatten(0, 1)).unflatten(-1, (spec.num_heads, spec.nope_dim))
    keys = torch.cat([key_nope, key_rope.expand(-1, -1, spec.num_heads, -1)], dim=-1).transpose(1, 2)
    w_uv = params[attn + "w_uv"].transpose(1, 2).flatten(0, 1)
    values = F.linear(latent, w_uv).unflatten(-1, (spec.num_heads, spec.v_dim)).transpose(1, 2)

    if spec.index_layers[layer] and (sparse or index_rows is not None):
        index = _Indexer(hidden.detach(), q_latent.detach(), params, prefix + "index.", spec)
        if sparse:
            with torch.no_grad():
                kept = best(index.scores(None), causal, spec.index.top_k, stable)
        if index_rows is not None:
            rows = (
                causal[index_rows].expand(hidden.shape[0], -1, -1) if kept is None else kept.index_select(1, index_rows)
            )
            attention = _summed(q, keys, index_rows, rows, spec.softmax_scale)
            trace.index_loss.append(divergence(index.scores(index_rows), attention, rows))
    out = _attend(q, keys, values, kept if sparse else None, spec.softmax_scale)
    return F.linear(out.transpose(1, 2).flatten(2), params[attn + "o"]), kept


class _Indexer:
    """A layer's index queries, weights and keys; the rest of the model takes no gradient from them."""

    def __init__(self, hidden: torch.Tensor, q_latent: torch.Tensor, params: Params, prefix: str, spec: Spec):
        index, table = spec.index, params["rope"][: hidden.shape[1]]
        keys = layer_norm(
            F.linear(hidden, params[prefix + "k"]),
            params[prefix + "k_norm"],
            params[prefix + "k_norm_bias"],
            index.norm_eps,
        )
        queries = F.linear(q_latent, params[prefix + "q_b"]).unflatten(-1, (index.num_heads, index.head_dim))
        self.keys = turn(keys.unsqueeze(2), table, index.rope_start, index.rope_interleaved).squeeze(2)
        self.queries = turn(queries, table, index.rope_start, index.rope_interleaved)
        self.weights = F.linear(hidden.float(), params[prefix + "weights"]) * index.weight_scale

    def scores(self, rows: torch.Tensor | None) -> torch.Tensor:
        """fp32 [B, R, L] of some rows, None: of all."""
        if rows is None:
            return index_scores(self.queries, self.weights, self.keys)
        return index_scores(self.queries.index_select(1, rows), self.weights.index_select(1, rows), self.keys)


@torch.no_grad()
def _summed(q: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of ``rows`` over what is ``kept`` [B, R, L], summed over the heads."""
    scores = (q.index_select(2, rows) @ keys.transpose(2, 3)).float() * scale
    return torch.softmax(scores.masked_fill(~kept.unsqueeze(1), float("-inf")), dim=-1).sum(1)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """[B, H, L, v_dim]. Values are padded to the width of keys, which the fast attention of torch asks for."""
    pad = q.shape[-1] - values.shape[-1]
    wide = F.pad(values, (0, pad)) if pad > 0 else values
    mask = None if kept is None else kept.unsqueeze(1)
    out = F.scaled_dot_product_attention(q, keys, wide, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[..., : values.shape[-1]]
