"""The forward of DeepSeek-V4 for training: models.deepseek_v4 without caches, rings and slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sparse_attn.models.norms import rms_norm, unit_rms
from sparse_attn.ops.layers.hyper_connection import reference as hyper
from sparse_attn.ops.layers.rope.reference import rotate
from sparse_attn.spec import CompressedSpec
from training.parts import Output, Params, Trace, best, divergence, embed, index_scores, moe, turn


class StreamOps(NamedTuple):
    """What mixes the residual streams; ops.layers.hyper_connection says how."""

    mix: Callable = hyper.hyper_mix
    merge: Callable = hyper.hyper_merge
    head: Callable = hyper.collapse_head


def fused_stream_ops() -> StreamOps:
    """The same by torch.compile: a hundred small kernels of a layer become a few."""
    return StreamOps(*(torch.compile(op, dynamic=False) for op in StreamOps()))


def forward(
    params: Params,
    spec: CompressedSpec,
    tokens: torch.Tensor,
    *,
    sparse: bool,
    index_rows: torch.Tensor | None = None,
    stable: bool = False,
    ops: StreamOps = StreamOps(),
) -> Output:
    """Logits of every position of ``tokens`` [B, L].

    sparse: layers with an indexer attend to the entries it selects, else to all. index_rows: positions [R] at which the
    indexers are compared with the attention over entries; None: nowhere. stable: see parts.best.
    """
    batch, length = tokens.shape
    flat = tokens.flatten()
    streams = embed(flat, params["embed"]).unsqueeze(1).repeat(1, spec.streams, 1)
    trace = Trace([], {})
    for layer in range(spec.num_layers):
        streams = decoder_layer(
            streams, flat, params, f"layers.{layer}.", spec, layer, sparse, index_rows, stable, trace, ops, batch
        )
    logits = streams_logits(streams, params, "", spec, ops)
    return Output(logits.unflatten(0, (batch, length)), trace, streams)


def decoder_layer(
    streams: torch.Tensor,
    tokens: torch.Tensor,
    params: Params,
    prefix: str,
    spec: CompressedSpec,
    layer: int,
    sparse: bool,
    index_rows: torch.Tensor | None,
    stable: bool,
    trace: Trace,
    ops: StreamOps,
    batch: int,
) -> torch.Tensor:
    """streams [B * L, streams, D] -> the same shape."""
    collapsed, post, comb = _mix(streams, params, prefix + "attn_hyper.", spec, ops)
    normed = rms_norm(collapsed, params[prefix + "input_norm"], spec.rms_eps).unflatten(0, (batch, -1))
    out = _attention(normed, params, prefix, spec, layer, sparse, index_rows, stable, trace)
    streams = ops.merge(out.flatten(0, 1), streams, post, comb)
    collapsed, post, comb = _mix(streams, params, prefix + "moe_hyper.", spec, ops)
    normed = rms_norm(collapsed, params[prefix + "post_norm"], spec.rms_eps)
    by_table = tokens if spec.hash_layers[layer] else None
    out = moe(normed, params, prefix + "moe.", spec.moe, by_table, trace)
    return ops.merge(out, streams, post, comb)


def streams_logits(
    streams: torch.Tensor, params: Params, prefix: str, spec: CompressedSpec, ops: StreamOps = StreamOps()
) -> torch.Tensor:
    """fp32 [B * L, vocab], by the head and the norm whose names begin with ``prefix``."""
    raw = F.linear(streams.flatten(1).float(), params[prefix + "head.fn"])
    scaled = params[prefix + "head.base"], params[prefix + "head.scale"]
    hidden = ops.head(streams, raw, *scaled, spec.hyper_eps, spec.rms_eps)
    hidden = rms_norm(hidden, params[prefix + "norm"], spec.rms_eps)
    return F.linear(hidden, params["embed" if spec.tie_embeddings else "lm_head"]).float()


def _mix(
    streams: torch.Tensor, params: Params, prefix: str, spec: CompressedSpec, ops: StreamOps
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raw = F.linear(streams.flatten(1).float(), params[prefix + "fn"])
    return ops.mix(
        streams, raw, params[prefix + "base"], params[prefix + "scale"],
        spec.sinkhorn_iterations, spec.hyper_eps, spec.rms_eps,
    )  # fmt: skip


def _attention(
    hidden: torch.Tensor,
    params: Params,
    prefix: str,
    spec: CompressedSpec,
    layer: int,
    sparse: bool,
    index_rows: torch.Tensor | None,
    stable: bool,
    trace: Trace,
) -> torch.Tensor:
    """hidden [B, L, D] -> [B, L, D]."""
    attn, kind, length = prefix + "attn.", spec.layer_kinds[layer], hidden.shape[1]
    table = params["rope" if kind == "window" else "rope_compressed"][:length]
    q_latent = rms_norm(F.linear(hidden, params[attn + "q_a"]), params[attn + "q_a_norm"], spec.rms_eps)
    keys = rms_norm(F.linear(hidden, params[attn + "kv"]), params[attn + "kv_norm"], spec.rms_eps)
    keys = turn(keys.unsqueeze(2), table, spec.nope_dim, True).squeeze(2)
    q = F.linear(q_latent, params[attn + "q_b"]).unflatten(-1, (spec.num_heads, spec.head_dim))
    q = turn(unit_rms(q, spec.rms_eps), table, spec.nope_dim, True)  # [B, L, H, D]

    entries = visible = scores = None
    if kind != "window":
        entries = _compress(hidden, params, prefix + "entry.", spec, layer)
        visible = _visible(length, spec.ratio(layer), hidden.device)
        chosen = visible
        if kind == "indexed" and (sparse or index_rows is not None):
            scores = _index_scores(hidden.detach(), q_latent.detach(), params, prefix + "index.", spec, layer)
            if sparse:
                chosen = best(scores.detach(), visible, spec.index.top_k, stable)
        visible = chosen
    out, attention = _attend(q, keys, entries, visible, params[attn + "sink"], spec)
    if scores is not None and index_rows is not None and scores.shape[2]:
        parts = scores, attention.detach().sum(1), visible.expand(hidden.shape[0], -1, -1)  # [B, L, E] each
        trace.index_loss.append(divergence(*(part.index_select(1, index_rows) for part in parts)))
    out = turn(out, table, spec.nope_dim, True, inverse=True)
    mixed = torch.einsum("blgi,goi->blgo", out.flatten(2).unflatten(2, (spec.o_groups, -1)), params[attn + "o_a"])
    return F.linear(mixed.flatten(2), params[attn + "o_b"])


def _compress(hidden: torch.Tensor, params: Params, prefix: str, spec: CompressedSpec, layer: int) -> torch.Tensor:
    """The complete entries of ``hidden`` [B, L, D], [B, L // ratio, dim], as ops.attention.compressor pools them."""
    ratio, dim, overlap = spec.ratio(layer), params[prefix + "norm"].shape[0], spec.layer_kinds[layer] == "indexed"
    batch, count = hidden.shape[0], hidden.shape[1] // ratio
    whole = hidden[:, : count * ratio].flatten(0, 1)
    kv, gate = F.linear(whole.float(), params[prefix + "kv_gate"].float()).chunk(2, dim=-1)
    kv, gate = (x.unflatten(0, (batch, count, ratio)) for x in (kv, gate))
    gate = gate + params[prefix + "position_bias"]
    if overlap:
        kv, gate = _overlapping(kv, 0.0), _overlapping(gate, float("-inf"))
    pooled = (torch.softmax(gate, dim=2) * kv).sum(2)  # [B, E, dim]
    pooled = pooled * torch.rsqrt(pooled.pow(2).mean(-1, keepdim=True) + spec.rms_eps) * params[prefix + "norm"].float()
    first = torch.arange(count, device=hidden.device) * ratio
    cos, sin = params["rope_compressed"][first].chunk(2, dim=-1)
    rotated = rotate(pooled[..., dim - spec.rope_dim :], cos, sin, True)
    return torch.cat([pooled[..., : dim - spec.rope_dim], rotated], dim=-1).to(hidden.dtype)


def _overlapping(x: torch.Tensor, missing: float) -> torch.Tensor:
    """[B, E, ratio, 2 * dim] -> [B, E, 2 * ratio, dim]: first halves of the entry before, second halves of its own."""
    before, own = x.chunk(2, dim=-1)
    before = F.pad(before, (0, 0, 0, 0, 1, 0), value=missing)[:, :-1]
    return torch.cat([before, own], dim=2)


def _visible(length: int, ratio: int, device: torch.device) -> torch.Tensor:
    """Entries complete at each position: bool [L, E]."""
    entry = torch.arange(length // ratio, device=device)
    return entry < ((torch.arange(length, device=device) + 1) // ratio).unsqueeze(1)


def _index_scores(
    hidden: torch.Tensor, q_latent: torch.Tensor, params: Params, prefix: str, spec: CompressedSpec, layer: int
) -> torch.Tensor:
    """fp32 [B, L, E]; the rest of the model takes no gradient from them."""
    index, table = spec.index, params["rope_compressed"][: hidden.shape[1]]
    keys = _compress(hidden, params, prefix, spec, layer)
    queries = F.linear(q_latent, params[prefix + "q_b"]).unflatten(-1, (index.num_heads, index.head_dim))
    queries = turn(queries, table, index.rope_start, index.rope_interleaved)
    return index_scores(queries, F.linear(hidden.float(), params[prefix + "weights"]) * index.weight_scale, keys)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    entries: torch.Tensor | None,
    visible: torch.Tensor | None,
    sink: torch.Tensor,
    spec: CompressedSpec,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out [B, L, H, D], attention over the entries fp32 [B, H, L, E]).

    One softmax over each query's window of ``keys`` [B, L, D], what is ``visible`` of ``entries`` [B, E, D], and the
    sink. Windows are read as blocks of queries against their own block of keys and the one before.
    """
    batch, length, heads, dim = q.shape
    window = spec.window
    blocks = -(-length // window)
    fill = blocks * window - length
    padded = F.pad(keys, (0, 0, window, fill)).unflatten(1, (blocks + 1, window))
    near = torch.cat([padded[:, :-1], padded[:, 1:]], dim=2)  # [B, blocks, 2 * window, D]
    blocked = F.pad(q, (0, 0, 0, 0, 0, fill)).unflatten(1, (blocks, window))
    scores = torch.einsum("bnihd,bnjd->bhnij", blocked, near).float()
    i, j = torch.arange(window, device=q.device).unsqueeze(1), torch.arange(2 * window, device=q.device)
    block = torch.arange(blocks, device=q.device).view(-1, 1, 1)
    inside = (j > i) & (j <= i + window) & (block * window + j >= window)  # [blocks, window, 2 * window]
    scores = scores.masked_fill(~inside, float("-inf")).flatten(2, 3)[:, :, :length]
    parts = [sink.view(1, heads, 1, 1).expand(batch, heads, length, 1), scores * spec.softmax_scale]
    if entries is not None:
        far = torch.einsum("blhd,bed->bhle", q, entries).float() * spec.softmax_scale
        parts.append(far.masked_fill(~(visible if visible.dim() == 2 else visible.unsqueeze(1)), float("-inf")))
    weights = torch.softmax(torch.cat(parts, dim=3), dim=3)
    seen = F.pad(weights[..., 1 : 1 + 2 * window], (0, 0, 0, fill)).unflatten(2, (blocks, window)).to(q.dtype)
    out = torch.einsum("bhnij,bnjd->bnihd", seen, near).flatten(1, 2)[:, :length]
    if entries is None:
        return out, None
    over = weights[..., 1 + 2 * window :]
    return out + torch.einsum("bhle,bed->blhd", over.to(q.dtype), entries), over
