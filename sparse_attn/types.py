"""The values that flow between functions."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_attn.framework.torch_private import exported


@exported
class Ragged(NamedTuple):
    """Rows of different length, packed one after the other.

    Attributes:
        indices: int32 [capacity]; row t owns indices[indptr[t]:indptr[t + 1]], the tail beyond indptr[-1] is -1.
        indptr: int32 [rows + 1]. The capacity is known on the host, the live size indptr[-1] only on the device.
    """

    indices: torch.Tensor
    indptr: torch.Tensor


@exported
class AttentionOutput(NamedTuple):
    """What attention gives.

    Callers unpack the pair, so it stays a pair. A row's largest score (FlashMLA's max_logits) is not returned. Whatever
    a keyword may add comes in a type of its own.

    Attributes:
        out: [tokens, heads, d_v].
        lse: fp32 [tokens, heads], natural log, without the sink, -inf for an empty row.
    """

    out: torch.Tensor
    lse: torch.Tensor


@exported
class QuantisedQuery(NamedTuple):
    """What index logits take of queries.

    Attributes:
        query: [tokens, index_heads, dim], uint8 holding fp8 or the input dtype, or MXFP4 codes and scales [tokens,
            index_heads, dim / 2 + dim / 32].
        weights: fp32 [tokens, index_heads].
    """

    query: torch.Tensor
    weights: torch.Tensor


@exported
class IndexKeys(NamedTuple):
    """Gathered index keys.

    Attributes:
        keys: [capacity, dim] (uint8 holding fp8, or floating); MXFP4: codes uint8 [capacity, dim / 2].
        scales: fp32 [capacity] or None; MXFP4: ue8m0 bytes [capacity, dim / 32].
    """

    keys: torch.Tensor
    scales: torch.Tensor | None


@exported
class StepPlan(NamedTuple):
    """Everything a step needs, per token row, at fixed capacity and on the device.

    Rows [0, num_decodes * next_n) are decode rows, the others prefill rows; a padded row has request -1, position -1,
    limit 0 and slot -1.

    Attributes:
        request_ids: int32 [tokens].
        positions: int32 [tokens].
        limits: int32 [tokens] (position + 1, 0 for padding).
        slot_mapping: int64 [tokens].
        block_table: int32 [requests, max_blocks].
        context_lens: int32 [num_decodes, next_n] (the limits of the decode rows).
        kv_indptr: int32 [prefill requests + 1] (cumulative sequence lengths of the prefill requests).
        kv_start: int32 [prefill tokens] (first of each prefill row's range in the keys gathered by kv_indptr).
        kv_end: int32 [prefill tokens] (the end of that range).
        kv_capacity: rows the gathered keys may take; the host's bound on kv_indptr[-1].
        max_context: the host's bound on every length.
        ring_table: int32 [requests, ring blocks] or None, the blocks of each request's rings (window keys, compressor
            state): position p lies in column (p // block_size) % ring blocks; slot_mapping then points into the rings.
    """

    request_ids: torch.Tensor
    positions: torch.Tensor
    limits: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    kv_indptr: torch.Tensor
    kv_start: torch.Tensor
    kv_end: torch.Tensor
    kv_capacity: int
    max_context: int
    ring_table: torch.Tensor | None = None


@exported
class Caches(NamedTuple):
    """One tensor per layer.

    Attributes:
        kv: latents and rotated keys.
        index: index keys; None for layers that share another layer's selection.
    """

    kv: tuple[torch.Tensor, ...]
    index: tuple[torch.Tensor | None, ...]


@exported
class WindowCaches(NamedTuple):
    """One tensor per layer, None where the layer has no such cache.

    Attributes:
        kv: rings of raw keys.
        compressed: entries, paged.
        index: the entries' index keys, paged.
        state: fp32 rings of tokens that the compressors of entries have not pooled yet.
        index_state: as state, of index keys.
    """

    kv: tuple[torch.Tensor, ...]
    compressed: tuple[torch.Tensor | None, ...]
    index: tuple[torch.Tensor | None, ...]
    state: tuple[torch.Tensor | None, ...]
    index_state: tuple[torch.Tensor | None, ...]


@exported
class CompressedPlan(NamedTuple):
    """What a step needs beside its StepPlan for entries that each stand for ``ratio`` tokens. All counts are entries.

    Attributes:
        limits: int32 [tokens], entries each row may see.
        context_lens: int32 [num_decodes, next_n], those of the decode rows.
        slot_mapping: int64 [tokens], where the entry that a row completes goes, -1 for rows that complete none.
        kv_indptr: int32 [prefill requests + 1] (cumulative entries of the prefill requests).
        kv_start: int32 [prefill tokens] (first of each prefill row's range in the entries gathered by kv_indptr).
        kv_end: int32 [prefill tokens] (the end of that range).
        kv_capacity: the host's bound on kv_indptr[-1].
        max_context: the host's bound on every length.
    """

    limits: torch.Tensor
    context_lens: torch.Tensor
    slot_mapping: torch.Tensor
    kv_indptr: torch.Tensor
    kv_start: torch.Tensor
    kv_end: torch.Tensor
    kv_capacity: int
    max_context: int


@exported
class WindowPlan(NamedTuple):
    """The raw keys that a step's prefill rows see in their window, gathered request by request.

    Attributes:
        kv_indptr: int32 [prefill requests + 1], cumulative rows.
        starts: int32 [prefill requests], position of each request's first row.
        offsets: int32 [prefill tokens], position + offset is its row; 0 for padding.
        capacity: the host's bound on kv_indptr[-1].
    """

    kv_indptr: torch.Tensor
    starts: torch.Tensor
    offsets: torch.Tensor
    capacity: int


@exported
class HyperMix(NamedTuple):
    """What a sublayer takes, and how its output and the streams are mixed.

    Attributes:
        collapsed: [tokens, hidden], what the sublayer takes.
        post: fp32 [tokens, streams], where its output goes.
        comb: fp32 [tokens, streams, streams], how the streams mix: new[k] = post[k] * output + sum_j comb[j, k] *
            old[j].
    """

    collapsed: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


@exported
class Logprobs(NamedTuple):
    """Log-probabilities of tokens.

    Attributes:
        drawn: fp32 [rows], natural log-probability of each row's token.
        ids: int64 [rows, best], the most likely tokens, in this order.
        values: fp32 [rows, best], theirs.
    """

    drawn: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor
