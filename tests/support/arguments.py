"""Legal arguments of every operator, without impl, with every kind of padding that is legal. Blocks hold 4 tokens unless said."""

from __future__ import annotations

import math

import torch
from support.extremes import INT_MAX, INT_MIN

from sparse_attn.cache import allocate_cache
from sparse_attn.layout import IndexFp8Layout, PlainLayout

INDEX, PLAIN = IndexFp8Layout(16), PlainLayout("fp32", 12, 4)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def longs(*values):
    return ints(*values, dtype=torch.int64)


TABLE = ints([2, -1, INT_MIN], [INT_MAX, 0, 1])  # neither request names its third block, the second not its first
PAGED = dict(context_lens=ints([5, 6], [0, -7]), block_table=ints([3, 0, INT_MIN], [INT_MAX] * 3))
SINK = torch.tensor([0.0, math.inf, -math.inf])
DENSE = dict(kv_start=ints(0, 3, 9), kv_end=ints(4, -5, 9))
TWO_REQUESTS = dict(block_table=ints([3, 0, -1, INT_MAX], [1, 2, INT_MIN, 0]), kv_indptr=ints(0, 6, 13))
GOOD = {
    "indexer_k_quant_and_cache": lambda: dict(
        k=torch.ones(4, 16), cache=allocate_cache(INDEX, 3, 4, "cpu"), slot_mapping=longs(-1, 11, -1, 0),
        layout=INDEX.name,
    ),
    "gather_indexer_k": lambda: dict(
        cache=allocate_cache(INDEX, 4, 4, "cpu"), **TWO_REQUESTS, capacity=13, layout=INDEX.name
    ) | dict(block_table=ints([3, 0, INT_MAX], [1, 2, -1]), kv_indptr=ints(0, 6, 13)),
    "write_kv_cache": lambda: dict(
        latent=torch.ones(4, 12), rope=torch.ones(4, 4), cache=allocate_cache(PLAIN, 3, 4, "cpu"),
        slot_mapping=ints(-1, 11, -1), layout=PLAIN.name,
    ),
    "gather_kv_cache": lambda: dict(
        cache=allocate_cache(PLAIN, 5, 4, "cpu"), block_table=ints([INT_MIN, 3, 0], [1, 2, 4]), kv_indptr=ints(0, 5, 14),
        starts=ints(7, 14), capacity=14, layout=PLAIN.name, dtype=torch.float32,
    ),
    "indexer_q_rope_quant": lambda: dict(
        q=torch.ones(3, 2, 16), weights=torch.ones(3, 2), positions=ints(-1, 0, 8), cos_sin=torch.ones(9, 4), start=0,
        interleaved=True, hadamard=False, weight_scale=1.0, layout=INDEX.name,
    ),
    "mqa_logits": lambda: dict(
        q=torch.ones(3, 2, 16), k=torch.ones(9, 16), k_scale=None, weights=torch.ones(3, 2), **DENSE, flavour="none"
    ),
    "paged_mqa_logits": lambda: dict(
        q=torch.ones(2, 2, 2, 16), cache=allocate_cache(PLAIN, 4, 4, "cpu"), weights=torch.ones(4, 2), **PAGED,
        max_context_len=11, layout=PLAIN.name,
    ),
    "top_k_per_row": lambda: dict(logits=torch.ones(3, 9), row_starts=DENSE["kv_start"], row_ends=DENSE["kv_end"], k=2),
    "count_digits": lambda: dict(
        logits=torch.ones(3, 9), row_starts=DENSE["kv_start"], row_ends=DENSE["kv_end"],
        sums=torch.ones(3, 2048, dtype=torch.int32), state=ints([0, 2], [0, 2], [0, 2]), k=2, level=1,
    ),
    "count_ties": lambda: dict(
        logits=torch.ones(3, 9), row_starts=DENSE["kv_start"], row_ends=DENSE["kv_end"],
        sums=torch.ones(3, 1024, dtype=torch.int32), state=ints([0, 2], [0, 2], [0, 2]), block_size=4,
    ),
    "take_winners": lambda: dict(
        logits=torch.ones(3, 9), row_starts=DENSE["kv_start"], row_ends=DENSE["kv_end"],
        ties=torch.full((2, 3, 3), 4, dtype=torch.uint8), above=torch.full((3, 3), 4, dtype=torch.uint8),
        state=ints([0, 2], [INT_MAX, -1], [INT_MIN, 0]), k=2, block_size=4, rank=1,
    ),
    "pack_candidates": lambda: dict(
        logits=torch.ones(3, 9), columns=ints([0, 8], [1, -1], [-1, -1]), row_starts=None, block_size=4
    ),
    "merge_candidates": lambda: dict(
        candidates=torch.zeros(2, 3, 3, dtype=torch.int32), columns=ints([0, 8], [1, -1], [-1, -1]), block_size=4,
        rank=1,
    ),
    "index_topk_prefill": lambda: dict(
        q=torch.ones(3, 2, 16), weights=torch.ones(3, 2), k=torch.ones(9, 16), k_scale=None, **DENSE, top_k=2,
        flavour="none", logits_bytes=1 << 20,
    ),
    "index_topk_decode": lambda: dict(
        q=torch.ones(2, 2, 2, 16), weights=torch.ones(4, 2), cache=allocate_cache(PLAIN, 4, 4, "cpu"), **PAGED,
        top_k=2, max_context_len=11, layout=PLAIN.name, logits_bytes=1 << 20,
    ),
    "index_topk_decode_slots": lambda: GOOD["index_topk_decode"](),
    "build_ragged_indices_from_dense": lambda: dict(
        indices=ints([4, -1, INT_MAX], [0, INT_MIN, 5]), lengths=ints(2, -3), row_offsets=ints(5, INT_MAX), num_rows=10
    ),
    "compute_global_topk_ragged_indices_and_indptr": lambda: dict(
        topk=ints([0, 7], [-1, 4], [INT_MAX, INT_MIN]), request_ids=ints(0, 1, -1), block_table=TABLE, block_size=4
    ),
    "window_indices": lambda: dict(
        positions=ints(5, 11, -1, 8), request_ids=ints(0, 1, 1, -1), block_table=TABLE, block_size=4, window=3
    ),
    "entry_indices": lambda: dict(
        limits=ints(8, 0, -3, INT_MIN, 20), request_ids=ints(0, 1, 1, 1, -1), block_table=TABLE, block_size=4,
        max_entries=20,
    ),
    "combine_topk_swa_indices_ragged": lambda: dict(
        topk=ints([3, -1, 9], [INT_MAX, 0, 1], [4, 5, 6]), limits=ints(4, 7, 0), positions=ints(6, -1, 1),
        entry_offsets=ints(2, INT_MAX, INT_MIN), window_offsets=ints(-4, INT_MAX, 8), window=3, max_entries=0, num_rows=10,
    ),
    "step_plan": lambda: dict(
        query_start_loc=ints(INT_MAX, -9, 4, 6, 6, 7), seq_lens=ints(5, -2, 2, 9, 0), slot_mapping=longs(1, 2, -1, 3, 4, 5, -1, 9),
        num_decodes=2, next_n=2,
    ),
    "compressed_plan": lambda: dict(
        request_ids=ints(0, 1, 1, -1), positions=ints(7, 12, -1, -1), block_table=ints([INT_MAX, -1], [-1, INT_MIN]),
        kv_indptr=ints(0, 8, 21), decode_rows=0, ratio=4, block_size=1,
    ) | dict(block_table=ints([INT_MAX, -1, 0, 0], [INT_MIN] * 4)),
    "sparse_attn_prefill": lambda: dict(
        q=torch.ones(3, 2, 16), kv=torch.ones(9, 16), indices=ints(INT_MIN, 8, -1, 0, 0, INT_MAX), indptr=ints(1, 3, 3, 5),
        scale=1.0, d_v=12, sink=SINK, batch_invariant=False,
    ),
    "sparse_attn_prefill_backward": lambda: dict(
        q=torch.ones(3, 2, 16), kv=torch.ones(9, 16), indices=ints(INT_MIN, 8, -1, 0, 0, INT_MAX), indptr=ints(1, 3, 3, 5),
        out=torch.ones(3, 2, 12), lse=torch.tensor([[16.0] * 2, [-math.inf] * 2, [16.0] * 2]), dout=torch.ones(3, 2, 12),
        dlse=torch.ones(3, 2), sink=SINK, scale=1.0, d_v=12, wants_q=True, wants_kv=True, wants_sink=True,
    ),
    "sparse_attn_decode": lambda: dict(
        q=torch.ones(2, 2, 16), cache=allocate_cache(PLAIN, 3, 4, "cpu"), indices=ints(11, -1, INT_MAX), indptr=ints(0, 1, 2),
        scale=1.0, layout=PLAIN.name, extra_cache=allocate_cache(PLAIN, 2, 4, "cpu"), extra_indices=ints(7, 0),
        extra_indptr=ints(0, 2, 2), extra_layout=PLAIN.name, sink=SINK, batch_invariant=False,
    ),
    "sparse_attn_into": lambda: dict(
        q=torch.ones(2, 2, 16), cache=allocate_cache(PLAIN, 3, 4, "cpu"), indices=ints(11, INT_MIN, INT_MAX), indptr=ints(0, 1, 2),
        lengths=ints(INT_MAX, -1), scale=1.0, layout=PLAIN.name, extra_cache=allocate_cache(PLAIN, 2, 4, "cpu"),
        extra_indices=ints(7, 8), extra_indptr=ints(0, 2, 2), extra_lengths=None, extra_layout=PLAIN.name, sink=SINK,
        batch_invariant=False, out=torch.empty(2, 2, 12), lse=torch.empty(2, 2), max_logits=torch.empty(2, 2), inf_lse=True,
    ),
    "merge_attn_states": lambda: dict(
        outs=torch.ones(2, 2, 2, 4), lses=torch.tensor([[[-math.inf, 1.0]] * 2, [[0.0, -math.inf]] * 2]), sink=SINK
    ),
    "apply_rope": lambda: dict(
        x=torch.ones(2, 2, 8), positions=ints(-1, 4), cos_sin=torch.ones(5, 4), start=2, interleaved=True, inverse=False
    ),
    "biased_grouped_topk": lambda: dict(
        logits=torch.tensor([[0.0, math.inf, 1.0, -math.inf]]), bias=torch.tensor([0.0, 1.0, -math.inf, 2.0]), top_k=2,
        num_groups=2, top_groups=1, renormalise=True, routed_scale=1.0, score="sigmoid",
    ),
    "grouped_linear": lambda: dict(
        rows=torch.ones(2, 32), ends=torch.tensor([1, 2], dtype=torch.int32),
        codes=torch.full((2, 3, 16), 0x31, dtype=torch.uint8), scales=torch.full((2, 3, 1), 127, dtype=torch.uint8),
        layout="e2m1/1x32/e8m0", batch_invariant=False,
    ),
    "grouped_linear_fp8": lambda: dict(
        rows=torch.ones(2, 128), ends=torch.tensor([1, 2], dtype=torch.int32),
        codes=torch.full((2, 3, 128), 0x38, dtype=torch.uint8), scales=torch.ones(2, 1, 1),
        layout="e4m3/128x128/fp32", batch_invariant=False,
    ),
    "packed_experts": lambda: dict(
        x=torch.ones(2, 32), weights=torch.ones(2, 2), ids=ints([0, 1], [1, -1]),
        gate_up=torch.full((2, 64, 16), 0x31, dtype=torch.uint8),
        gate_up_scales=torch.full((2, 64, 1), 127, dtype=torch.uint8), gate_up_layout="e2m1/1x32/e8m0",
        down=torch.full((2, 32, 16), 0x31, dtype=torch.uint8),
        down_scales=torch.full((2, 32, 1), 127, dtype=torch.uint8), down_layout="e2m1/1x32/e8m0", clamp=10.0, num_experts=2,
        activations="exact", batch_invariant=False,
    ),
    "hyper_mix": lambda: dict(
        streams=torch.ones(2, 2, 3), raw=torch.ones(2, 8), base=torch.ones(8), scale=torch.ones(3), iterations=2,
        eps=1e-6, norm_eps=1e-6,
    ),
    "hyper_merge": lambda: dict(
        out=torch.ones(2, 3), streams=torch.ones(2, 2, 3), post=torch.ones(2, 2), comb=torch.ones(2, 2, 2)
    ),
    "compress_and_cache": lambda: dict(
        kv=torch.ones(6, 32), gate=torch.ones(6, 32), position_bias=torch.ones(2, 32), norm_weight=torch.ones(16),
        positions=ints(2, 3, -1, 0, 1, 5), request_ids=ints(1, 1, 1, 0, 0, -1), state=torch.zeros(2, 4, 64),
        state_table=ints([1], [0], [INT_MAX]), cache=allocate_cache(PLAIN, 3, 4, "cpu"),
        slot_mapping=longs(2**40, 11, 11, -9, -1, 11), cos_sin=torch.ones(3, 4), ratio=2, overlap=True, eps=1e-6,
        rope_start=12, hadamard=False, layout=PLAIN.name,
    ),
}  # fmt: skip
