"""DeepSeek-V4 at its real dimensions, a layer of each kind at a time, on a GPU; see support/real_dims.py.

Beside what stands there:

- entries: the pooling sums in another order, so an entry's bf16 rounding, and then its fp8 code, may fall the
  other way: one value in a thousand, or two, by one step of what it is stored in. The state, which is only copied, is equal;
- hyper-connections: fp32 throughout and rounded once, so half a step of the streams' dtype, u, and 1e-5 in fp32.
"""

from dataclasses import replace

import pytest
import torch
from support import requests
from support.real_dims import (
    U,
    check_attention,
    check_decode_slots,
    check_equal,
    check_layer,
    check_prefill_topk,
    check_routing,
)

from sparse_attn.layout import PlainLayout
from sparse_attn.models import deepseek_v4, moe, windowed
from sparse_attn.pipeline import select
from sparse_attn.pipeline import windowed as pipeline
from sparse_attn.spec import deepseek_v4_flash, deepseek_v4_pro, tiny_v4

FLIPPED = 1e-3


def check_entries(name, got, want, arguments, keywords):
    (state, cache), (their_state, their_cache) = got, want
    check_equal(f"{name} state", state, their_state)
    layout = keywords["layout"]
    slots = arguments[9]
    slots = slots[(slots >= 0) & (slots < cache.shape[0] * cache.shape[1])]
    rows, wanted = layout.decode(cache, slots), layout.decode(their_cache, slots)
    step = 2 * U if isinstance(layout, PlainLayout) else 2**-3
    torch.testing.assert_close(rows, wanted, rtol=step, atol=1e-3, msg=name)
    assert (rows != wanted).sum() <= 2 + FLIPPED * rows.numel(), name


def check_mix(name, got, want, *_):
    torch.testing.assert_close(got.collapsed, want.collapsed, rtol=2 * U, atol=1e-4, msg=name)
    for one, other in zip(got[1:], want[1:]):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


def check_streams(name, got, want, *_):
    torch.testing.assert_close(got, want, rtol=2 * U, atol=1e-4, msg=name)


COMMON = {
    (requests, "build_step_plan"): check_equal,
    (pipeline, "window_indices"): check_equal,
    (pipeline, "combine_topk_swa_indices_ragged"): check_equal,
    (pipeline, "write_kv_cache"): check_equal,
    (pipeline, "gather_kv_cache"): check_equal,
    (pipeline, "sparse_attn_prefill"): check_attention,
    (pipeline, "sparse_attn_decode"): check_attention,
    (deepseek_v4, "hyper_mix"): check_mix,
    (deepseek_v4, "hyper_merge"): check_streams,
    (moe, "biased_grouped_topk"): check_routing,
}
COMPRESSED = {
    (pipeline, "build_compressed_plan"): check_equal,
    (windowed, "compress_and_cache"): check_entries,
}
CHECKED = {
    "window": COMMON,
    "indexed": COMMON | COMPRESSED | {
        (windowed, "indexer_q_rope_quant"): check_equal,
        (select, "gather_indexer_k"): check_equal,
        (select, "index_topk_prefill"): check_prefill_topk,
        (select, "index_topk_decode_slots"): check_decode_slots,
    },
    "full": COMMON | COMPRESSED | {(pipeline, "entry_indices"): check_equal},
}  # fmt: skip


def one_layer(spec, kind, **changes):
    return replace(spec, num_layers=1, layer_kinds=(kind,), hash_layers=(False,), **changes)


def real(make, kind):
    """Cut beside the attention; a top-k that a test's prompts exceed."""
    spec = make()
    cut = dict(vocab_size=512, moe=replace(spec.moe, num_experts=32), max_positions=8192)
    return one_layer(spec, kind, index=replace(spec.index, top_k=256), **cut)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CHECKED)
@pytest.mark.parametrize("make", [deepseek_v4_flash, deepseek_v4_pro])
def test_real_layer(make, kind, device):
    torch.cuda.reset_peak_memory_stats()
    check_layer(real(make, kind), device, (2700, 2043), checked=CHECKED[kind], block_size=256, decode_steps=6)
    assert torch.cuda.max_memory_allocated() < 30e9


@pytest.mark.few(0)
@pytest.mark.kernel
@pytest.mark.parametrize("kind,cache", [("window", "fp8"), ("indexed", "fp8"), ("full", "bf16")])
def test_tiny_layer(kind, cache, device):
    spec = one_layer(tiny_v4(), kind, num_heads=2, window=5, full_ratio=8, index=replace(tiny_v4().index, top_k=4))
    check_layer(spec, device, (21, 13), kind=cache, decode_steps=3, checked=CHECKED[kind], block_size=8)
