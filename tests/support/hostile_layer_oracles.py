"""Oracles of attention, the compressor, and what a layer does beside them: plain Python and float64."""

from __future__ import annotations

import math

import torch
from support.hostile_bytes import (
    INF,
    put,
    rotated,
    slot_of,
    transformed,
    value,
)

from sparse_attn.weight_layout import dequantise


def attend(q, sources, scale, d_v, sink):
    """sources: (fetch a row's float64, how many rows, indices, indptr) of each cache."""
    tokens, heads, _ = q.shape
    out, lse = (
        torch.zeros(tokens, heads, d_v, dtype=torch.float64),
        torch.full((tokens, heads), -INF, dtype=torch.float64),
    )
    for t in range(tokens):
        keys = []
        for fetch, count, indices, indptr in sources:
            row = indices[max(int(indptr[t]), 0) : max(int(indptr[t + 1]), 0)].tolist()
            keys += [fetch(i) for i in row if 0 <= i < count]
        if not keys:
            continue
        keys = torch.stack(keys)
        for h in range(heads):
            z = keys @ q[t, h].double() * scale
            lse[t, h] = z.logsumexp(0)
            weight = (z - lse[t, h]).exp()
            if sink is not None:
                weight = weight * torch.sigmoid(lse[t, h] - sink[h].double())
            out[t, h] = weight @ keys[:, :d_v]
    return out, lse


def sparse_attn_prefill(q, kv, ragged, scale, d_v, extra_kv, extra_ragged, sink, batch_invariant):
    sources = []
    for memory, lists in ((kv, ragged), (extra_kv, extra_ragged)):
        if memory is not None:
            rows = memory.reshape(memory.shape[0], q.shape[2]).double()
            sources.append((rows.__getitem__, len(rows), *lists))
    return attend(q, sources, scale, d_v, sink)


def sparse_attn_decode(q, cache, ragged, scale, layout, extra_cache, extra_ragged, extra_layout, sink, batch_invariant):
    sources = []
    for memory, rows, kind in ((cache, ragged, layout), (extra_cache, extra_ragged, extra_layout)):
        if memory is not None:

            def fetch(i, memory=memory, kind=kind):
                return value(memory, kind, i).float().to(q.dtype).double()

            sources.append((fetch, memory.shape[0] * memory.shape[1], *rows))
    return attend(q, sources, scale, layout.value_dim, sink)


def sparse_attn_into(
    q, cache, ragged, out, lse, scale, layout, lengths, extra_cache, extra_ragged, extra_layout, extra_lengths, sink,
    max_logits, inf_lse, batch_invariant,
):  # fmt: skip
    def first(rows, lengths):
        """Rows whose ends are where their lengths end; their starts stand in a list of their own."""
        if rows is None or lengths is None:
            return rows
        kept, indptr = [], [0]
        for t, length in enumerate(lengths.tolist()):
            begin, end = max(int(rows.indptr[t]), 0), max(int(rows.indptr[t + 1]), 0)
            kept += rows.indices[begin:end].tolist()[: max(length, 0)]
            indptr.append(len(kept))
        return type(rows)(torch.tensor(kept, dtype=torch.int32), torch.tensor(indptr, dtype=torch.int32))

    rows, extra = first(ragged, lengths), first(extra_ragged, extra_lengths)
    sources = (cache, rows, scale, layout, extra_cache, extra, extra_layout)
    result, logs = sparse_attn_decode(q, *sources, sink, batch_invariant)
    out.copy_(result)
    lse.copy_(torch.where(logs.isneginf(), INF, logs) if inf_lse else logs)
    if max_logits is not None:
        for t in range(q.shape[0]):
            scores = []
            for memory, kind, some in ((cache, layout, rows), (extra_cache, extra_layout, extra)):
                if memory is not None:
                    named = some.indices[max(int(some.indptr[t]), 0) : max(int(some.indptr[t + 1]), 0)].tolist()
                    there = [i for i in named if 0 <= i < memory.shape[0] * memory.shape[1]]
                    scores += [q[t].double() @ value(memory, kind, i).float().to(q.dtype).double() for i in there]
            max_logits[t] = torch.stack(scores).amax(0) * scale if scores else -INF


def merge_attn_states(outs, lses, sink):
    states, tokens, heads, d_v = outs.shape
    out, lse = (
        torch.zeros(tokens, heads, d_v, dtype=torch.float64),
        torch.full((tokens, heads), -INF, dtype=torch.float64),
    )
    for t in range(tokens):
        for h in range(heads):
            there = [s for s in range(states) if lses[s, t, h] > -INF]
            if not there:
                continue
            lse[t, h] = lses[there, t, h].double().logsumexp(0)
            kept = 1.0 if sink is None else torch.sigmoid(lse[t, h] - sink[h].double())
            for s in there:
                out[t, h] += outs[s, t, h].double() * (lses[s, t, h].double() - lse[t, h]).exp() * kept
    return out, lse


# The compressor.


def compress_and_cache(
    kv, gate, position_bias, norm_weight, positions, request_ids, state, state_table, cache, slot_mapping, cos_sin, *,
    ratio, overlap, eps, rope_start, hadamard, layout,
):  # fmt: skip
    """Mutates both; entries of a plain layout."""
    dim, width = layout.dim, kv.shape[1]
    span = ratio * (1 + overlap)
    here, size = {}, state.shape[1]

    def ring(request, position):
        slot = slot_of(size, state_table, request, position, ring=True, blocks=state.shape[0])
        return None if slot is None else state[slot // size, slot % size]

    before = state.clone()
    for t, (request, position) in enumerate(zip(request_ids.tolist(), positions.tolist())):
        if position < 0 or not 0 <= request < state_table.shape[0]:
            continue
        here[request, position] = torch.cat([kv[t], gate[t] + position_bias[position % ratio]])
        slot = int(slot_mapping[t])
        if (position + 1) % ratio or not 0 <= slot < cache.shape[0] * cache.shape[1]:
            continue
        rows, halves = [], []
        for p in range(max(position - span + 1, 0), position + 1):
            row = here.get((request, p))
            if row is None:
                found = slot_of(size, state_table, request, p, ring=True, blocks=state.shape[0])
                row = None if found is None else before[found // size, found % size]
            if row is not None:
                rows.append(row)
                halves.append(dim if overlap and p > position - ratio else 0)
        pooled = []
        for d in range(dim):
            weights = torch.stack([row[width + half + d] for row, half in zip(rows, halves)]).double()
            values = torch.stack([row[half + d] for row, half in zip(rows, halves)]).double()
            pooled.append((weights.softmax(0) * values).sum())
        entry = torch.stack(pooled)
        entry = entry / (entry.pow(2).mean() + eps).sqrt() * norm_weight.double()
        entry = rotated(entry, position + 1 - ratio, cos_sin, rope_start, True)
        put(cache, layout, slot, transformed(entry) if hadamard else entry)
    for (request, position), row in here.items():
        target = ring(request, position)
        if target is not None:
            target.copy_(row)


# Experts and streams.


def weighed(scores, renormalise, routed_scale):
    total = scores.sum(1, keepdim=True)
    return scores / torch.where(total == 0, 1.0, total) * routed_scale if renormalise else scores * routed_scale


def gate_scores(logits, score):
    logits = logits.float().double()
    return torch.sigmoid(logits) if score == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()


def linear(x, weight, activations, batch_invariant):
    assert activations == "exact"
    return (x.double() @ weight.double().t()).to(x.dtype)


def grouped_linear(rows, ends, weight, activations, batch_invariant):
    assert activations == "exact"
    out = torch.zeros(len(rows), weight.shape[1], dtype=rows.dtype)
    for row in range(len(rows)):
        group = next((g for g, end in enumerate(ends.tolist()) if row < end), None)
        if group is not None:
            out[row] = weight[group].double() @ rows[row].double()
    return out


def packed_experts(x, weights, ids, gate_up, down, clamp, num_experts, activations, batch_invariant):
    assert activations == "exact"
    out = torch.zeros(x.shape, dtype=torch.float64)
    first, second = (dequantise(weight).double() for weight in (gate_up, down))
    for token in range(len(x)):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist()):
            if 0 <= expert < len(first):
                gate, up = (first[expert] @ x[token].double()).chunk(2)
                if clamp is not None:
                    gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
                out[token] += weight * (second[expert] @ (gate * torch.sigmoid(gate) * up))
    return out.to(x.dtype)


def biased_grouped_topk(logits, bias, top_k, num_groups, top_groups, renormalise, routed_scale, score):
    scores = gate_scores(logits, score)
    chosen, ids = (
        torch.zeros(len(logits), top_k, dtype=torch.float64),
        torch.zeros(len(logits), top_k, dtype=torch.int32),
    )
    size = logits.shape[1] // num_groups
    for t in range(len(logits)):
        biased = [-INF if math.isnan(b) else b for b in (scores[t] + bias.double()).tolist()]
        if top_groups < num_groups:

            def worth(g):
                first, second = sorted(biased[g * size : (g + 1) * size], reverse=True)[:2]
                return -INF if -INF in (first, second) else first + second

            kept = sorted(range(num_groups), key=lambda g: (-worth(g), g))[:top_groups]
            biased = [b if e // size in kept else -INF for e, b in enumerate(biased)]
        order = sorted(range(len(biased)), key=lambda e: (-biased[e], e))[:top_k]
        ids[t] = torch.tensor(order)
        chosen[t] = torch.stack([scores[t, e] if biased[e] > -INF else torch.zeros(()).double() for e in order])
    return weighed(chosen, renormalise, routed_scale), ids


def hash_routed_experts(logits, tokens, table, renormalise, routed_scale, score):
    scores = gate_scores(logits, score)
    ids = torch.zeros(len(tokens), table.shape[1], dtype=torch.int32)
    chosen = torch.zeros(ids.shape, dtype=torch.float64)
    for t, token in enumerate(tokens.tolist()):
        for j in range(table.shape[1]):
            expert = int(table[token, j]) if 0 <= token < len(table) else -1
            if 0 <= expert < logits.shape[1]:
                ids[t, j], chosen[t, j] = expert, scores[t, expert]
    return weighed(chosen, renormalise, routed_scale), ids


def stream_mixes(streams, fn, norm_eps):
    x = streams.double().flatten(1)
    return x / (x.pow(2).mean(1, keepdim=True) + norm_eps).sqrt() @ fn.double().T


def hyper_mix(streams, fn, base, scale, iterations, eps, norm_eps, product):
    tokens, count, _ = streams.shape
    mixes, base, scale = stream_mixes(streams, fn, norm_eps), base.double(), scale.double()
    pre = torch.sigmoid(mixes[:, :count] * scale[0] + base[:count]) + eps
    post = 2 * torch.sigmoid(mixes[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    comb = torch.zeros(tokens, count, count, dtype=torch.float64)
    for t in range(tokens):
        cell = (mixes[t, 2 * count :] * scale[2] + base[2 * count :]).reshape(count, count).softmax(1) + eps
        for number in range(2 * iterations - 1):
            cell = cell / (cell.sum(number % 2, keepdim=True) + eps)
        comb[t] = cell
    return torch.einsum("tn,tnd->td", pre, streams.double()), post, comb


def hyper_merge(out, streams, post, comb):
    merged = torch.zeros(streams.shape, dtype=torch.float64)
    for k in range(streams.shape[1]):
        merged[:, k] = post[:, k, None].double() * out.double()
        for j in range(streams.shape[1]):
            merged[:, k] += comb[:, j, k, None].double() * streams[:, j].double()
    return merged


def hyper_head(streams, fn, base, scale, eps, norm_eps, product):
    pre = torch.sigmoid(stream_mixes(streams, fn, norm_eps) * scale.double() + base.double()) + eps
    return torch.einsum("tn,tnd->td", pre, streams.double())
