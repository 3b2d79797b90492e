"""Caches that span more than 2**31 elements. Only what is read or written of them is ever real memory, so that the
interpreter can have them too."""

from __future__ import annotations

import pytest
import torch
from conftest import big
from support.caches import poison

from sparse_attn.layout import IndexFp8Layout, LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.compressor import compress_and_cache
from sparse_attn.ops.attention.kv_cache import gather_kv_cache, write_kv_cache
from sparse_attn.ops.attention.sparse import sparse_attn_decode, sparse_attn_prefill
from sparse_attn.ops.indexer.keys import gather_indexer_k, indexer_k_quant_and_cache
from sparse_attn.ops.indexer.scores import fp8_mqa_logits, fp8_paged_mqa_logits
from sparse_attn.ops.layers.rope import rope_table
from sparse_attn.ops.topk.fused import index_topk_decode
from sparse_attn.ops.topk.select import top_k_per_row
from sparse_attn.testing import compare
from sparse_attn.types import Ragged

FAR = 2**30  # elements from block to block; the third block lies beyond int32
INDEX = IndexFp8Layout(32)
KEYS = [LatentFp8Layout(32, 8, 16), PlanarFp8Layout(24, 8, group=8), PlainLayout("bf16", 24, 8)]
SLOTS = (11, 8, 0, 5)  # of blocks of four tokens, two of them in the far one


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def far(device, shape, dtype=torch.uint8):
    """[3, ...] whose first stride is FAR; memory as it comes."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    inner = strides[0]
    try:
        memory = torch.empty(2 * FAR + inner, dtype=dtype, device=device)
    except RuntimeError as error:
        pytest.skip(str(error).splitlines()[0])
    return memory.as_strided((3, *shape[1:]), (FAR, *strides[1:]))


def near(cache):
    """The same blocks side by side."""
    return cache.contiguous()


def some_layouts(device):
    return [layout for layout in KEYS if layout.dtype == torch.uint8 or big(device)]


def slots_on(device, dtype=torch.int64):
    return torch.tensor(SLOTS, dtype=dtype, device=device)


def filled(layout, device):
    """(a far cache, the same near) with values at SLOTS and NaN elsewhere."""
    cache = far(device, (3, 4, layout.row), layout.dtype)
    cache.fill_(poison(layout.dtype))
    layout.encode(cache, slots_on(device), torch.randn(len(SLOTS), layout.dim, device=device) / 10)
    return cache, near(cache)


@pytest.mark.kernel
def test_write(device):
    for layout in [INDEX, *some_layouts(device)]:
        values = torch.randn(len(SLOTS), layout.dim, device=device)
        cache = far(device, (3, 4, layout.row), layout.dtype)
        cache.fill_(0)
        want = near(cache)
        for target, impl in ((cache, "triton"), (want, "reference")):
            if layout is INDEX:
                indexer_k_quant_and_cache(values, target, slots_on(device), layout, impl=impl)
            else:
                latent, rope = values.split([layout.latent, layout.rope], 1)
                write_kv_cache(latent, rope, target, slots_on(device), layout, impl=impl)
        assert torch.equal(near(cache), want)


@pytest.mark.kernel
def test_gather(device):
    table = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32, device=device)
    indptr = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
    for layout in [INDEX, *some_layouts(device)]:
        cache, want = filled(layout, device)
        gather = gather_indexer_k if layout is INDEX else gather_kv_cache
        mine, theirs = (
            gather(at, table, indptr, 9, layout, impl=impl) for at, impl in ((cache, "triton"), (want, "reference"))
        )
        for got, good in zip((mine,) if layout is not INDEX else mine, (theirs,) if layout is not INDEX else theirs):
            torch.testing.assert_close(got, good, rtol=0, atol=0, equal_nan=True)


@pytest.mark.kernel
def test_scores(device):
    cache, want = filled(INDEX, device)
    q = torch.randint(0, 100, (2, 2, 3, 32), dtype=torch.uint8, device=device)
    weights = torch.rand(4, 3, device=device)
    lens = torch.tensor([[8, 4], [1, 12]], dtype=torch.int32, device=device)
    table = torch.tensor([[2, 1, 0], [0, 1, 2]], dtype=torch.int32, device=device)
    known = torch.tensor([[s // 4 == b and s % 4 == o for s in SLOTS] for b in range(3) for o in range(4)]).any(1)
    for cached in (cache, want):  # what is not in SLOTS: zeros
        INDEX.encode(
            cached, torch.arange(12, device=device)[~known.to(device)], torch.zeros(12 - len(SLOTS), 32, device=device)
        )
    got = fp8_paged_mqa_logits(q, cache, weights, lens, table, 12, INDEX, impl="triton")
    good = fp8_paged_mqa_logits(q, want, weights, lens, table, 12, INDEX, impl="reference")
    compare.assert_same_diff(got, good)
    chosen = index_topk_decode(q, weights, cache, lens, table, 3, 12, INDEX, impl="triton")
    assert torch.equal(chosen, top_k_per_row(got, 3, None, lens.flatten(), impl="triton"))

    k = far(device, (3, 32))
    k.copy_(torch.randint(0, 100, k.shape, dtype=torch.uint8))
    scale, ends = torch.rand(3, device=device), torch.tensor([3, 2, 3, 1], dtype=torch.int32, device=device)
    rows = q.flatten(0, 1)
    got = fp8_mqa_logits(rows, k, scale, weights, ends * 0, ends, impl="triton")
    compare.assert_same_diff(got, fp8_mqa_logits(rows, near(k), scale, weights, ends * 0, ends, impl="reference"))


@pytest.mark.kernel
def test_selection_from_far_rows(device):
    if not big(device):
        pytest.skip("rows of fp32 so far apart take 8 GiB")
    logits = far(device, (3, 50), torch.float32)
    logits.copy_(torch.randn(3, 50, device=device))
    assert torch.equal(top_k_per_row(logits, 7, impl="triton"), top_k_per_row(near(logits), 7, impl="reference"))


@pytest.mark.kernel
def test_attention(device):
    """The same bits as from the same rows side by side."""
    indptr = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
    indices = torch.tensor([11, 0, -1, 8, 5, 11], dtype=torch.int32, device=device)
    rows = Ragged(indices, indptr)
    for layout in some_layouts(device):
        cache, want = filled(layout, device)
        q = torch.randn(2, 3, layout.dim, device=device).bfloat16()
        options = dict(scale=0.2, layout=layout, extra_ragged=rows, extra_layout=layout, impl="triton")
        got = sparse_attn_decode(q, cache, rows, extra_cache=cache, **options)
        assert_same(got, sparse_attn_decode(q, want, rows, extra_cache=want, **options))
    if big(device):
        kv = far(device, (3, 32), torch.bfloat16)
        kv.copy_(torch.randn(3, 32, device=device) / 10)
        rows = Ragged(torch.tensor([2, 0, 1, 2], dtype=torch.int32, device=device), indptr.clamp_max(4))
        q = torch.randn(2, 3, 32, device=device).bfloat16()
        options = dict(scale=0.2, d_v=32, impl="triton")
        assert_same(sparse_attn_prefill(q, kv, rows, **options), sparse_attn_prefill(q, near(kv), rows, **options))


def assert_same(got, want):
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    assert want.lse.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [3, 64])
def test_attention_of_queries_whose_heads_are_far_apart(heads, device):
    """As those of many rows are where they lie head by head, which the kernels for Hopper leave to the portable one."""
    tokens, layout = 140, LatentFp8Layout(512, 64)
    apart = (2**31 // (heads - 1) // 16 + 1) * 16
    close = torch.randn(tokens, heads, layout.dim, device=device).bfloat16()
    memory = torch.full((heads * apart,), torch.nan, dtype=torch.bfloat16, device=device)
    q = memory.as_strided(close.shape, (layout.dim, apart, 1)).copy_(close)
    cache = torch.zeros(4, 64, layout.row, dtype=torch.uint8, device=device)
    layout.encode(cache, torch.arange(256, device=device), torch.randn(256, layout.dim, device=device) / 10)
    indptr = 200 * torch.arange(tokens + 1, dtype=torch.int32, device=device)
    rows = Ragged(torch.randint(-1, 256, (200 * tokens,), dtype=torch.int32, device=device), indptr)
    kv = layout.decode(cache, torch.arange(256, device=device)).bfloat16()
    for over, attend, options in (
        (kv, sparse_attn_prefill, dict(d_v=512)),
        (cache, sparse_attn_decode, dict(layout=layout)),
    ):
        got = attend(q, over, rows, scale=0.4, impl="triton", **options)
        want = attend(close, over, rows, scale=0.4, impl="reference", **options)
        compare.assert_close(got.out, want.out, compare.PREFILL_OUT, f"over {over.dtype}")
        compare.assert_close(got.lse, want.lse, compare.PREFILL_LSE)


@pytest.mark.kernel
def test_attention_over_rows_side_by_side(device):
    """Blocks that follow each other without a gap: a slot is an offset in rows."""
    layout = LatentFp8Layout(32, 12, 16)
    last = 2 * FAR // layout.row
    cache = far(device, (3, layout.row)).as_strided((last + 1, 1, layout.row), (layout.row, layout.row, 1))
    values = torch.randn(4, layout.dim, device=device) / 10
    layout.encode(cache, torch.tensor([last, 0, last - 1, 1], device=device), values)
    want = torch.zeros(4, 1, layout.row, dtype=torch.uint8, device=device)
    layout.encode(want, torch.arange(4, device=device), values)
    indptr = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
    there = torch.tensor([last, 0, -1, last - 1, 1, last], dtype=torch.int32, device=device)
    here = torch.tensor([0, 1, -1, 2, 3, 0], dtype=torch.int32, device=device)
    q = torch.randn(2, 3, layout.dim, device=device).bfloat16()
    options = dict(scale=0.2, layout=layout, impl="triton")
    got = sparse_attn_decode(q, cache, Ragged(there, indptr), **options)
    assert_same(got, sparse_attn_decode(q, want, Ragged(here, indptr), **options))


@pytest.mark.kernel
def test_compressor(device):
    for layout in (INDEX, PlanarFp8Layout(24, 8, group=8)):
        cache = far(device, (3, 4, layout.row))
        cache.fill_(0)
        want = near(cache)
        kv, gate = torch.randn(8, 32, device=device), 9 * torch.randn(8, 32, device=device)
        positions = torch.arange(8, dtype=torch.int32, device=device)
        slots = torch.tensor([-1, 11, -1, 8, -1, 0, -1, 5], device=device)
        for target, impl in ((cache, "triton"), (want, "reference")):
            compress_and_cache(
                kv, gate, torch.zeros(2, 32, device=device), torch.ones(32, device=device), positions, positions * 0,
                torch.zeros(1, 2, 64, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device), target, slots,
                rope_table(8, 8, 100.0, device=device), ratio=2, overlap=False, eps=1e-5, rope_start=24, layout=layout,
                impl=impl,
            )  # fmt: skip
        got, good = (layout.decode(at, slots_on(device)) for at in (near(cache), want))
        torch.testing.assert_close(got, good, rtol=2**-3, atol=1e-2)
        assert got.abs().amax(1).min() > 0.1


@pytest.mark.kernel
def test_compressor_state(device):
    """The second step pools what the first one left in the far ring."""
    state = far(device, (3, 4, 64), torch.float32)
    state.fill_(0)
    want = near(state)
    kv, gate, caches = torch.randn(8, 32, device=device), torch.randn(8, 32, device=device), []
    table = torch.full((1, 1), 2, dtype=torch.int32, device=device)
    for rings, impl in ((state, "triton"), (want, "reference")):
        caches.append(torch.zeros(1, 4, 32, device=device))
        for first, last in ((0, 5), (5, 8)):
            positions = torch.arange(first, last, dtype=torch.int32, device=device)
            slots = torch.where(positions % 2 == 1, positions // 2, -1).long()
            compress_and_cache(
                kv[first:last], gate[first:last], torch.zeros(2, 32, device=device), torch.ones(32, device=device), positions,
                positions * 0, rings, table, caches[-1], slots, rope_table(8, 8, 100.0, device=device), ratio=2, overlap=False,
                eps=1e-5, rope_start=24, layout=PlainLayout("fp32", 32), impl=impl,
            )  # fmt: skip
    assert torch.equal(near(state), want) and want[2].any() and not want[:2].any()
    torch.testing.assert_close(*caches, rtol=1e-5, atol=1e-5)
