"""Operators once more, in plain Python and float64, one row at a time: what references are held against."""

from __future__ import annotations

import struct

import torch
from support.hostile_bytes import (
    INF,
    MOST_ROWS,
    decoded,
    parts,
    put,
    rotated,
    slot_of,
    transformed,
    value,
)

from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout
from sparse_attn.mxfp4 import mxfp4_decode


def write(rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout) -> None:
    for row, slot in zip(rows, slot_mapping.tolist()):
        if 0 <= slot < cache.shape[0] * cache.shape[1]:
            put(cache, layout, slot, row)


def indexer_k_quant_and_cache(k, cache, slot_mapping, layout):
    write(k, cache, slot_mapping, layout)


def write_kv_cache(latent, rope, cache, slot_mapping, layout):
    write(torch.cat([latent, rope], 1), cache, slot_mapping, layout)


def gathered(cache, block_table, kv_indptr, capacity, starts=None):
    """The slot of each row, None for nowhere."""
    found = [None] * capacity
    bounds = kv_indptr.tolist()
    for request in range(len(bounds) - 1):
        for row in range(max(bounds[request], 0), min(bounds[request + 1], capacity)):
            position = row - bounds[request] + (0 if starts is None else int(starts[request]))
            found[row] = slot_of(cache, block_table, request, position, ring=starts is not None, blocks=cache.shape[0])
    return found


def gather_indexer_k(cache, block_table, kv_indptr, capacity, layout):
    found = gathered(cache, block_table, kv_indptr, capacity)
    keys = torch.zeros(capacity, layout.dim, dtype=cache.dtype)
    scales = torch.zeros(capacity)
    for row, slot in enumerate(found):
        if slot is not None:
            keys[row], scales[row] = parts(cache, layout, slot)
    return (keys, scales) if isinstance(layout, IndexFp8Layout) else (keys,)


def gather_kv_cache(cache, block_table, kv_indptr, capacity, layout, starts, dtype):
    out = torch.zeros(capacity, layout.dim, dtype=dtype)
    for row, slot in enumerate(gathered(cache, block_table, kv_indptr, capacity, starts)):
        if slot is not None:
            out[row] = value(cache, layout, slot).float().to(dtype)
    return out


# Rotation and queries.


def apply_rope(x, positions, cos_sin, start, interleaved, inverse):
    out = torch.empty(x.shape, dtype=torch.float64)
    for t, position in enumerate(positions.tolist()):
        for at in [()] if x.dim() == 2 else [(h,) for h in range(x.shape[1])]:
            out[(t, *at)] = rotated(x[(t, *at)], position, cos_sin, start, interleaved, inverse)
    return out


def hadamard_transform(x):
    return torch.stack([transformed(row) for row in x]) if len(x) else x.double()


def indexer_q_rope_quant(q, weights, positions, cos_sin, start, interleaved, hadamard, weight_scale, layout):
    """Of a plain layout."""
    query, folded = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(weights.shape, dtype=torch.float64)
    for t, position in enumerate(positions.tolist()):
        if 0 <= position < cos_sin.shape[0]:
            folded[t] = weights[t].double() * weight_scale
            for h in range(q.shape[1]):
                vector = rotated(q[t, h], position, cos_sin, start, interleaved)
                query[t, h] = transformed(vector) if hadamard else vector
    return query, folded


# Scores and selection.


def score(q, key, weights, scale):
    """One logit from q [heads, dim]."""
    return ((q @ key).relu() * weights.double()).sum() * scale


def rows_of(q, k, k_scale, flavour):
    q, k = (q.double(), k.double()) if k_scale is None else (decoded(q, flavour), decoded(k, flavour))
    return q, k, torch.ones(k.shape[0]).double() if k_scale is None else k_scale.double()


def fp8_mqa_logits(q, k, k_scale, weights, kv_start, kv_end, flavour="none"):
    q, k, scale = rows_of(q, k, k_scale, flavour)
    out = torch.full((q.shape[0], k.shape[0]), -INF, dtype=torch.float64)
    for m in range(q.shape[0]):
        for n in range(max(int(kv_start[m]), 0), min(int(kv_end[m]), k.shape[0])):
            out[m, n] = score(q[m], k[n], weights[m], scale[n])
    return out


def bf16_mqa_logits(q, k, weights, kv_start, kv_end):
    return fp8_mqa_logits(q, k, None, weights, kv_start, kv_end)


def mxfp4_mqa_logits(q, k, k_scale, weights, kv_start, kv_end):
    return fp8_mqa_logits(mxfp4_values(q), mxfp4_decode(k, k_scale), None, weights, kv_start, kv_end)


def mxfp4_values(q):
    """[..., heads, dim] of queries [..., heads, codes and scales]: all codes of a row, then all scales."""
    heads, groups = q.shape[-2], q.shape[-1] // 17
    codes, scales = q.flatten(-2).split([heads * groups * 16, heads * groups], -1)
    return mxfp4_decode(codes.unflatten(-1, (heads, groups * 16)), scales.unflatten(-1, (heads, groups)))


def paged_mqa_logits(q, cache, weights, context_lens, block_table, max_context_len, layout):
    requests, next_n = q.shape[:2]
    if isinstance(layout, IndexMxfp4Layout):
        q = mxfp4_values(q).double()
    else:
        q = decoded(q, layout.flavour) if isinstance(layout, IndexFp8Layout) else q.double()
    out = torch.full((requests * next_n, max_context_len), -INF, dtype=torch.float64)
    for b in range(requests):
        for j in range(next_n):
            for position in range(min(int(context_lens[b, j]), max_context_len)):
                slot = slot_of(cache, block_table, b, position, blocks=cache.shape[0])
                if slot is not None:
                    codes, scale = parts(cache, layout, slot)
                    key = decoded(codes, layout.flavour) if isinstance(layout, IndexFp8Layout) else codes.double()
                    out[b * next_n + j, position] = score(q[b, j], key, weights[b * next_n + j], scale.double())
    return out


def top_k_per_row(logits, k, row_starts=None, row_ends=None):
    rows, width = logits.shape
    out = torch.full((rows, k), -1, dtype=torch.int32)
    for r in range(rows):
        start = 0 if row_starts is None else min(max(int(row_starts[r]), 0), width)
        end = width if row_ends is None else min(max(int(row_ends[r]), 0), width)
        line = logits[r].tolist()
        chosen = sorted((-line[c], c) for c in range(start, end) if line[c] > -INF)[:k]
        columns = sorted(c - start for _, c in chosen)
        out[r, : len(columns)] = torch.tensor(columns, dtype=torch.int32)
    return out


def ordered_keys(logits, row, row_starts, row_ends):
    """(column relative to the start, key) of a row's range; key 0 is never selected."""
    width = logits.shape[1]
    start = 0 if row_starts is None else min(max(int(row_starts[row]), 0), width)
    end = width if row_ends is None else min(max(int(row_ends[row]), 0), width)
    for c in range(start, end):
        value = float(logits[row, c])
        bits = struct.unpack("<I", struct.pack("<f", value or 0.0))[0]
        key = 2**32 - 1 - bits if bits >> 31 else bits + 2**31
        yield c - start, key if value > -INF else 0


def descended(sums, state, row, bits):
    """(prefix, need) with one more digit."""
    prefix, need = (int(value) for value in state[row])
    for digit in reversed(range(1 << bits)):
        found = max(int(sums[row, digit]), 0)
        if found >= need or digit == 0:
            return prefix << bits | digit, need
        need -= found


def count_digits(logits, k, level, sums=None, state=None, row_starts=None, row_ends=None):
    rows, bits, shift = logits.shape[0], (11, 11, 10)[level], (21, 10, 0)[level]
    counts, found = torch.zeros(rows, 1 << bits, dtype=torch.int32), torch.zeros(rows, 2, dtype=torch.int32)
    for r in range(rows):
        prefix, need = descended(sums, state, r, 11) if level else (0, k)
        found[r] = torch.tensor([prefix, need])
        for _, key in ordered_keys(logits, r, row_starts, row_ends):
            if key and key >> (shift + bits) == prefix:
                counts[r, key >> shift & ((1 << bits) - 1)] += 1
    return counts, found


def count_ties(logits, sums, state, row_starts=None, row_ends=None, *, block_size):
    rows, width = logits.shape
    found, (ties, above) = torch.zeros(rows, 2, dtype=torch.int32), torch.zeros(2, rows, -(-width // block_size)).int()
    for r in range(rows):
        threshold, need = descended(sums, state, r, 10)
        found[r] = torch.tensor([threshold - 2**31, need])
        for column, key in ordered_keys(logits, r, row_starts, row_ends):
            ties[r, column // block_size] += key == threshold and key > 0
            above[r, column // block_size] += key > threshold
    dtype = torch.uint8 if block_size < 256 else torch.int32
    return ties.to(dtype), above.to(dtype), found


def take_winners(logits, k, ties, above, state, row_starts=None, row_ends=None, *, block_size, rank):
    ranks, rows, blocks = ties.shape
    out = torch.full((rows, k), -1, dtype=torch.int32)
    for r in range(rows):
        threshold, need = int(state[r, 0]) + 2**31, int(state[r, 1])
        others, own, chosen = 0, 0, []
        keys = dict(ordered_keys(logits, r, row_starts, row_ends))
        for block in range(blocks * ranks):
            if block % ranks != rank:
                others += int(ties[block % ranks, r, block // ranks])
                continue
            first = block // ranks * block_size
            for column in range(first, first + block_size):
                key = keys.get(column, 0)
                tied = key == threshold and key > 0
                if key > threshold or (tied and others + own < need):
                    chosen.append(column)
                own += tied
        out[r, : len(chosen[:k])] = torch.tensor(chosen[:k], dtype=torch.int32)
    return out


def pack_candidates(logits, columns, row_starts=None, *, block_size):
    (rows, width), k = logits.shape, columns.shape[1]
    blocks = -(-width // block_size)
    dtype = torch.uint8 if block_size < 256 else torch.int32
    out = torch.zeros(rows, k + (-(-blocks // 4) if dtype == torch.uint8 else blocks), dtype=torch.int32)
    out[:, :k] = torch.tensor(-INF).view(torch.int32)
    counts = out[:, k:].view(dtype)
    for r in range(rows):
        start = 0 if row_starts is None else min(max(int(row_starts[r]), 0), width)
        for n, column in enumerate(columns[r].tolist()):
            if column >= 0:
                out[r, n] = logits[r, start + column].view(torch.int32)
                counts[r, column // block_size] += 1
    return out


def merge_candidates(candidates, columns, *, block_size, rank):
    (ranks, rows, _), k = candidates.shape, columns.shape[1]
    dtype = torch.uint8 if block_size < 256 else torch.int32
    out = torch.full((rows, k), -1, dtype=torch.int32)
    for r in range(rows):
        found = []
        for other in range(ranks):
            counts = candidates[other, r, k:].contiguous().view(dtype).tolist()
            block = [n for n, count in enumerate(counts) for _ in range(count)]
            scores = candidates[other, r, :k].contiguous().view(torch.float32).tolist()
            found += [(-scores[n], block[n] * ranks + other, n) for n in range(len(block))]
        own = [n for _, block, n in sorted(found)[:k] if block % ranks == rank]
        out[r, : len(own)] = columns[r, sorted(own)]
    return out


# Ragged indices.


def ragged(rows: list[list[int]], capacity: int):
    """(indices, indptr) of rows."""
    packed = [index for row in rows for index in row]
    indptr = [0]
    for row in rows:
        indptr.append(indptr[-1] + len(row))
    packed += [-1] * (capacity - len(packed))
    return torch.tensor(packed, dtype=torch.int32), torch.tensor(indptr, dtype=torch.int32)


def build_ragged_indices_from_dense(indices, lengths, num_rows, row_offsets):
    rows = []
    for t, line in enumerate(indices.tolist()):
        line = line[: max(int(lengths[t]), 0)] if lengths is not None else line
        shift = 0 if row_offsets is None else int(row_offsets[t])
        limit = MOST_ROWS if num_rows is None else num_rows
        rows.append([i + shift for i in line if i >= 0 and 0 <= i + shift < limit])
    return ragged(rows, indices.numel())


def slots(local, request, table, size, ring=False):
    found = [slot_of(size, table, request, position, ring=ring) for position in local]
    return [slot for slot in found if slot is not None and slot < MOST_ROWS]


def compute_global_topk_ragged_indices_and_indptr(topk, request_ids, block_table, block_size):
    rows = [slots(line, r, block_table, block_size) for line, r in zip(topk.tolist(), request_ids.tolist())]
    return ragged(rows, topk.numel())


def window_of(position, window):
    return range(max(position - window + 1, 0), position + 1)


def window_indices(positions, request_ids, block_table, block_size, window):
    each = zip(positions.tolist(), request_ids.tolist())
    rows = [slots(window_of(p, window), r, block_table, block_size, ring=True) for p, r in each]
    return ragged(rows, len(positions) * window)


def entry_indices(limits, request_ids, block_table, block_size, max_entries):
    each = zip(limits.tolist(), request_ids.tolist())
    rows = [slots(range(min(limit, max_entries)), r, block_table, block_size) for limit, r in each]
    return ragged(rows, len(limits) * max_entries)


def combine_topk_swa_indices_ragged(
    topk, limits, positions, entry_offsets, window_offsets, window, max_entries, num_rows
):
    rows = []
    for t, position in enumerate(positions.tolist()):
        line = list(range(max_entries)) if topk is None else topk[t].tolist()
        entries = [e + int(entry_offsets[t]) for e in line if position >= 0 and 0 <= e < int(limits[t])]
        seen = [p + int(window_offsets[t]) for p in window_of(position, window)]
        rows.append([row for row in entries + seen if 0 <= row < num_rows])
    return ragged(rows, len(positions) * ((max_entries if topk is None else topk.shape[1]) + window))


# Plans.


def step_plan(query_start_loc, seq_lens, slot_mapping, num_decodes, next_n):
    """(request_ids, positions, limits, slots, kv_indptr, kv_start, kv_end)."""
    starts, lengths, decode_rows = query_start_loc.tolist(), seq_lens.tolist(), num_decodes * next_n
    kv_indptr = [0]
    for b in range(num_decodes, len(lengths)):
        kv_indptr.append(kv_indptr[-1] + (max(lengths[b], 0) if starts[b + 1] > starts[b] else 0))
    ids, kv = [], []
    for row, slot in enumerate(slot_mapping.tolist()):
        request, position = -1, -1
        if row < decode_rows:
            request = row // next_n
            position = lengths[request] - next_n + row % next_n
        else:
            for b in range(num_decodes, len(lengths)):
                if starts[b] <= row < starts[b + 1] and lengths[b] > 0:
                    request = b
                    position = lengths[b] - (starts[b + 1] - starts[b]) + row - starts[b]
        if request < 0 or position < 0 or slot < 0:
            request = position = slot = -1
        ids.append((request, position, position + 1, slot if request >= 0 else -1))
        if row >= decode_rows:
            first = kv_indptr[request - num_decodes] if request >= 0 else 0
            kv.append((first, first + position + 1))
    columns = list(zip(*ids)) or [()] * 4
    ranges = list(zip(*kv)) or [()] * 2
    tensors = [torch.tensor(column, dtype=torch.int32) for column in (*columns[:3], kv_indptr, *ranges)]
    return *tensors[:3], torch.tensor(columns[3], dtype=torch.int64), *tensors[3:]


def compressed_plan(plan, ratio, block_size):
    """(limits, slots, kv_indptr, kv_start, kv_end)."""
    requests, decode_rows = plan.block_table.shape[0], plan.context_lens.numel()
    prefills = plan.kv_indptr.shape[0] - 1
    bounds, entries = plan.kv_indptr.tolist(), [0]
    for low, high in zip(bounds, bounds[1:]):
        entries.append(entries[-1] + (high - low) // ratio)
    limits, slot, kv = [], [], []
    for row, (request, position) in enumerate(zip(plan.request_ids.tolist(), plan.positions.tolist())):
        valid = 0 <= request < requests and position >= 0
        limits.append((position + 1) // ratio if valid else 0)
        found = None
        if valid and (position + 1) % ratio == 0:
            found = slot_of(block_size, plan.block_table, request, position // ratio)
        slot.append(-1 if found is None else found)
        if row >= decode_rows:
            place = request - (requests - prefills)
            inside = valid and 0 <= place < prefills
            first = entries[place] if inside else 0
            kv.append((first, first + (limits[-1] if inside else 0)))
    ranges = list(zip(*kv)) or [()] * 2
    limits, entries, start, end = (torch.tensor(x, dtype=torch.int32) for x in (limits, entries, *ranges))
    return limits, torch.tensor(slot, dtype=torch.int64), entries, start, end


def window_plan(plan, window):
    """(kv_indptr, starts, offsets)."""
    decodes, decode_rows = plan.context_lens.shape[0], plan.context_lens.numel()
    each = list(zip(plan.request_ids.tolist(), plan.positions.tolist()))[decode_rows:]
    bounds, indptr, starts, shift = plan.kv_indptr.tolist(), [0], [], {}
    for place in range(len(bounds) - 1):
        length, request = bounds[place + 1] - bounds[place], decodes + place
        mine = [position for owner, position in each if owner == request and position >= 0]
        starts.append(max(min(mine) - window + 1, 0) if mine and min(mine) < length else length)
        shift[request] = indptr[-1] - starts[-1]
        indptr.append(indptr[-1] + length - starts[-1])
    offsets = [shift[request] if request >= 0 and position >= 0 else 0 for request, position in each]
    return tuple(torch.tensor(values, dtype=torch.int32) for values in (indptr, starts, offsets))


# Attention.
