"""Sparse attention: the reference against a plain loop, the kernels against the reference at FlashMLA's levels."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import big
from expecttest import assert_expected_inline
from support.attention import slow_attention
from support.caches import filled_cache, poison_unread
from support.extremes import INF
from support.ragged import ragged_rows

from sparse_attn.layout import IndexFp8Layout, LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention import kv_cache, sparse
from sparse_attn.ops.attention.sparse import reference
from sparse_attn.testing import compare
from sparse_attn.testing.ops import opcheck, schema
from sparse_attn.types import Ragged


def test_reference_matches_loop():
    torch.manual_seed(0)
    q, kv = torch.randn(5, 3, 24), torch.randn(40, 24)
    ragged = ragged_rows([6, 0, 33, 1, 9], 40)
    sink = torch.tensor([0.3, -INF, INF, 5.0])
    for chosen in (None, sink):
        got = sparse.sparse_attn_prefill(q, poison_unread(kv, ragged), ragged, scale=0.3, d_v=16, sink=chosen)
        out, lse = slow_attention(q, kv, ragged, 0.3, 16, chosen)
        torch.testing.assert_close(got.out.double(), out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.lse.double(), lse, rtol=1e-5, atol=1e-5)


def test_reference_in_pieces(monkeypatch):
    torch.manual_seed(0)
    q, kv, ragged = torch.randn(5, 3, 24), torch.randn(40, 24), ragged_rows([6, 9, 33, 12, 0], 40)
    want_out, want_lse = slow_attention(q, kv, ragged, 0.3, 16)
    monkeypatch.setattr(reference, "GATHERED_ELEMENTS", 2 * 33 * 24)  # two rows at a time
    got = sparse.sparse_attn_prefill(q, kv, ragged, scale=0.3, d_v=16)
    torch.testing.assert_close(got.out.double(), want_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_empty_rows_and_sinks():
    q, kv = torch.ones(2, 2, 4), torch.ones(3, 1, 4)
    ragged = Ragged(torch.tensor([0, 2, -1], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32))
    for sink in (None, torch.tensor([-INF, INF])):
        got = sparse.sparse_attn_prefill(q, kv, ragged, scale=1.0, d_v=4, sink=sink)
        assert got.out[1].abs().max() == 0 and torch.isneginf(got.lse[1]).all()
        assert torch.equal(got.lse[0], torch.full((2,), 4 + math.log(2)))
        assert torch.equal(got.out[0, 0], torch.ones(4))
        assert torch.equal(got.out[0, 1], torch.ones(4) if sink is None else torch.zeros(4))


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=pytest.mark.kernel)])
@pytest.mark.parametrize("padding", (0, 48))
@pytest.mark.parametrize(
    "layout",
    [PlainLayout("bf16", 16, 16), LatentFp8Layout(32, 16, 32), PlanarFp8Layout(32, 16, 32)],
    ids=lambda layout: layout.name,
)
def test_the_stride_of_the_one_slot_of_a_block_is_any(layout, padding, impl, device):
    """Written, gathered and attended to as where it is the row's."""
    device = device if impl == "triton" else "cpu"
    torch.manual_seed(0)
    rows = torch.randn(6, layout.dim, device=device).bfloat16()
    q, ragged = torch.randn(4, 3, layout.dim, device=device).bfloat16(), ragged_rows([6, 0, 2, 3], 6)
    ragged = Ragged(*(part.to(device) for part in ragged))
    table = torch.arange(6, dtype=torch.int32, device=device).view(1, 6)
    ends, slots = torch.tensor([0, 6], dtype=torch.int32, device=device), torch.arange(6, device=device)
    found = []
    for stride in (layout.row, 1, 12352):
        memory = torch.zeros(6, layout.row + padding, dtype=layout.dtype, device=device)
        cache = torch.as_strided(memory, (6, 1, layout.row), (layout.row + padding, stride, 1))
        kv_cache.write_kv_cache(rows[:, : layout.latent], rows[:, layout.latent :], cache, slots, layout, impl=impl)
        gathered = kv_cache.gather_kv_cache(cache, table, ends, 6, layout, impl=impl)
        attended = sparse.sparse_attn_decode(q, cache, ragged, scale=0.2, layout=layout, impl=impl)
        found.append((memory, gathered, *attended))
    assert found[0][0].any() and not any(value.isnan().any() for value in found[0][1:3])
    assert all(torch.equal(*pair) for odd in found[1:] for pair in zip(odd, found[0]))


def test_duplicates_count_as_often_as_they_stand():
    q, kv = torch.zeros(1, 1, 2), torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    ragged = Ragged(torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32))
    got = sparse.sparse_attn_prefill(q, kv, ragged, scale=1.0, d_v=1)
    torch.testing.assert_close(got.out, torch.tensor([[[2.0]]]))


LAYOUTS = {
    "fp8 raw": LatentFp8Layout(64, 16, 32),
    "fp8 pow2": LatentFp8Layout(64, 16, 64, scale_rule="pow2"),
    "fp8 fnuz": LatentFp8Layout(128, 32, 128, flavour="e4m3fnuz"),
    "fp8 odd": LatentFp8Layout(96, 16, 32),
    "planar odd": PlanarFp8Layout(50, 2, 2),  # records of 54 bytes
    "bf16": PlainLayout("bf16", 64, 16),
    "fp32": PlainLayout("fp32", 48, 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_reference_decode_reads_the_layout(name):
    layout = LAYOUTS[name]
    ragged = ragged_rows([9, 0, 20], 30)
    cache = filled_cache(layout, 6, 5, ragged, "cpu", padding=64)
    q = torch.randn(3, 2, layout.dim)
    got = sparse.sparse_attn_decode(q, cache, ragged, scale=0.2, layout=layout)
    rows = layout.decode(cache, torch.arange(30))
    out, lse = slow_attention(q, rows, ragged, 0.2, layout.value_dim)
    torch.testing.assert_close(got.out.double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse.double(), lse, rtol=1e-5, atol=1e-5)


def test_merge_equals_attention_over_the_union():
    q, kv = torch.randn(4, 2, 8), torch.randn(20, 8)
    sink = torch.tensor([1.0, -2.0])
    whole = ragged_rows([10, 4, 0, 6], 20, wild=False)
    parts = []
    for half in range(2):
        pieces = [
            whole.indices[
                int(a) + half * ((int(b) - int(a)) // 2) : int(b) if half else int(a) + (int(b) - int(a)) // 2
            ]
            for a, b in zip(whole.indptr[:-1], whole.indptr[1:])
        ]
        indptr = torch.tensor([0, *torch.tensor([p.numel() for p in pieces]).cumsum(0).tolist()], dtype=torch.int32)
        parts.append(sparse.sparse_attn_prefill(q, kv, Ragged(torch.cat(pieces), indptr), scale=0.5, d_v=8))
    outs = torch.stack([part.out for part in parts])
    lses = torch.stack([part.lse for part in parts])
    outs[lses.isneginf()] = torch.nan
    got = sparse.merge_attn_states(outs, lses, sink=sink)
    want = sparse.sparse_attn_prefill(q, kv, whole, scale=0.5, d_v=8, sink=sink)
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.lse, want.lse)


def test_lse_conversions():
    lse = torch.tensor([-INF, 0.0, math.log(2)])
    assert sparse.lse_to_flashmla(lse).tolist() == [INF, 0.0, float(lse[2])]
    assert sparse.lse_to_base2(lse).tolist() == [-INF, 0.0, 1.0]


def test_schemas():
    assert_expected_inline(
        "\n".join(schema(name) for name in ("sparse_attn_prefill", "sparse_attn_decode", "merge_attn_states")),
        """\
sparse_attn::sparse_attn_prefill(Tensor q, Tensor kv, Tensor indices, Tensor indptr, float scale, int d_v, Tensor? sink, bool batch_invariant, str impl) -> (Tensor out, Tensor lse)
sparse_attn::sparse_attn_decode(Tensor q, Tensor cache, Tensor indices, Tensor indptr, float scale, str layout, Tensor? extra_cache, Tensor? extra_indices, Tensor? extra_indptr, str extra_layout, Tensor? sink, bool batch_invariant, str impl) -> (Tensor out, Tensor lse)
sparse_attn::merge_attn_states(Tensor outs, Tensor lses, Tensor? sink, str impl) -> (Tensor out, Tensor lse)""",
    )


def check_opcheck(impl, device):
    q, kv = torch.randn(3, 2, 24, device=device), torch.randn(20, 24, device=device)
    ragged = ragged_rows([5, 0, 8], 20, device=device)
    sink = torch.randn(2, device=device)
    opcheck("sparse_attn_prefill", q, kv, *ragged, 0.3, 16, sink, False, impl)
    layout = LAYOUTS["fp8 raw"]
    cache = filled_cache(layout, 4, 5, ragged, device)
    opcheck(
        "sparse_attn_decode",
        torch.randn(3, 2, 80, device=device),
        cache,
        *ragged,
        0.3,
        layout.name,
        None,
        None,
        None,
        "",
        None,
        False,
        impl,
    )
    outs, lses = torch.randn(2, 3, 2, 8, device=device), torch.randn(2, 3, 2, device=device)
    opcheck("merge_attn_states", outs, lses, sink, impl)


def test_opcheck_reference():
    check_opcheck("reference", "cpu")


GOOD = dict(
    q=torch.zeros(2, 4, 8),
    kv=torch.zeros(6, 8),
    ragged=Ragged(torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)),
    scale=1.0,
    d_v=8,
)


@pytest.mark.parametrize(
    "change,name,kind",
    [
        (dict(q=torch.zeros(2, 4, 8, dtype=torch.int32)), "q", TypeError),
        (dict(q=torch.zeros(2, 129, 8)), "q", ValueError),
        (dict(q=torch.zeros(2, 8)), "q", ValueError),
        (dict(kv=torch.zeros(6, 7)), "kv", ValueError),
        (dict(kv=torch.zeros(6, 2, 8)), "kv", ValueError),
        (dict(kv=torch.zeros(6, 8, dtype=torch.bfloat16)), "kv", TypeError),
        (dict(kv=torch.zeros(8, 6).t()), "kv", ValueError),
        (dict(d_v=9), "d_v", ValueError),
        (dict(sink=torch.zeros(3)), "sink", ValueError),
        (dict(sink=torch.zeros(4, dtype=torch.bfloat16)), "sink", TypeError),
        (dict(ragged=Ragged(torch.zeros(4), torch.zeros(3, dtype=torch.int32))), "ragged.indices", TypeError),
        (dict(ragged=Ragged(GOOD["ragged"].indices, torch.zeros(2, dtype=torch.int32))), "ragged.indptr", ValueError),
    ],
)
def test_prefill_errors_name_the_argument(change, name, kind):
    with pytest.raises(kind, match=rf"^{name}: got"):
        sparse.sparse_attn_prefill(**(GOOD | change))


@pytest.mark.parametrize(
    "change,name,kind",
    [
        (dict(cache=torch.zeros(2, 3, 8, dtype=torch.uint8)), "cache", TypeError),
        (dict(cache=torch.zeros(2, 3, 9)), "cache", ValueError),
        (dict(cache=torch.zeros(2, 8, 3).transpose(1, 2)), "cache", ValueError),
        (dict(layout=IndexFp8Layout(128)), "layout", ValueError),
        (dict(q=torch.zeros(2, 4, 6)), "q", ValueError),
    ],
)
def test_decode_errors_name_the_argument(change, name, kind):
    arguments = {key: GOOD[key] for key in ("q", "ragged", "scale")}
    arguments |= dict(cache=torch.zeros(2, 3, 8), layout=PlainLayout("fp32", 8))
    with pytest.raises(kind, match=rf"^{name}: got"):
        sparse.sparse_attn_decode(**(arguments | change))


SINKS = {"no sink": None, "sink": 0.4, "-inf": -INF, "+inf": INF}


def sink_of(name, heads, device):
    if SINKS[name] is None:
        return None
    sink = torch.randn(heads + 3, device=device)
    sink[::2] = SINKS[name]
    return sink


PREFILL_CASES = [  # heads, d_qk, d_v, rows, lengths, dtype, sink
    (3, 80, 64, 50, [20, 0, 1, 37], torch.float32, "sink"),
    (20, 80, 64, 50, [20, 0, 1, 70], torch.bfloat16, "no sink"),
    (1, 24, 24, 9, [5, 3], torch.bfloat16, "-inf"),
    (16, 48, 32, 40, [40] * 3, torch.float16, "+inf"),
]
GPU_PREFILL_CASES = [
    (128, 576, 512, 1333, [2048, 0, 1, 700, 64, 2048], torch.bfloat16, "no sink"),
    (64, 512, 512, 4000, [640] * 200, torch.bfloat16, "sink"),
    (64, 576, 512, 4000, [640, 128] * 3, torch.float32, "sink"),
    (16, 576, 512, 4000, [2048] * 3, torch.bfloat16, "+inf"),
    (8, 512, 512, 4000, [1152] * 300, torch.float16, "-inf"),
    (32, 576, 512, 100, [300] * 140, torch.bfloat16, "sink"),
]


@pytest.mark.kernel
def test_prefill_kernel(device, dirty_workspace):
    cases = PREFILL_CASES + (GPU_PREFILL_CASES if big(device) else [])
    for case, (heads, d_qk, d_v, rows, lengths, dtype, sink_name) in enumerate(cases):
        torch.manual_seed(case)
        ragged = ragged_rows(lengths, rows, seed=case, device=device)
        q = torch.randn(len(lengths), heads, 2 * d_qk, device=device).to(dtype)[..., :d_qk]
        kv = (torch.randn(rows, d_qk + 16, device=device) / 10).to(dtype)
        kv = poison_unread(kv, ragged)[:, :d_qk]
        sink = sink_of(sink_name, heads, device)
        scale = d_qk**-0.5
        got = sparse.sparse_attn_prefill(q, kv, ragged, scale=scale, d_v=d_v, sink=sink, impl="triton")
        want = reference.sparse_attn_prefill(q.float(), kv, *ragged, scale, d_v, sink)
        compare.assert_close(got.out, want[0], compare.PREFILL_OUT, f"out of case {case}")
        compare.assert_close(got.lse, want[1], compare.PREFILL_LSE, f"lse of case {case}")


DECODE_CASES = [  # layout, blocks, block size, heads, lengths, dtype, padding
    ("fp8 raw", 8, 5, 3, [20, 0, 9], torch.float32, 0),
    ("fp8 pow2", 8, 5, 16, [130], torch.bfloat16, 60),
    ("fp8 fnuz", 3, 64, 2, [200, 3], torch.bfloat16, 4),
    ("fp8 odd", 8, 5, 3, [33, 1], torch.bfloat16, 0),
    ("planar odd", 8, 5, 3, [33, 1], torch.bfloat16, 2),
    ("bf16", 4, 16, 5, [30, 70], torch.bfloat16, 32),
    ("bf16", 4, 16, 5, [30, 7], torch.float32, 0),
    ("fp32", 4, 16, 5, [300], torch.float32, 8),
]
FULL = LatentFp8Layout(512, 64)
GPU_DECODE_CASES = [
    (layout, 60, 64, heads, lengths, torch.bfloat16, padding)
    for layout in (FULL, PlainLayout("bf16", 512, 64), PlainLayout("bf16", 512, 0))
    for heads, lengths, padding in (
        (128, [2048], 0),
        (128, [2048, 0, 5, 300] * 20, 576),
        (64, [2048] * 8, 64),
        (16, [2048, 100], 0),
        (1, [17] * 300, 0),
    )
]


@pytest.mark.kernel
def test_decode_kernel(device, dirty_workspace):
    cases = DECODE_CASES + (GPU_DECODE_CASES if big(device) else [])
    for case, (layout, blocks, block_size, heads, lengths, dtype, padding) in enumerate(cases):
        torch.manual_seed(case)
        layout = LAYOUTS[layout] if isinstance(layout, str) else layout
        ragged = ragged_rows(lengths, blocks * block_size, seed=case, device=device)
        cache = filled_cache(layout, blocks, block_size, ragged, device, padding=padding)
        q = torch.randn(len(lengths), heads, layout.dim, device=device).to(dtype)
        sink = sink_of("sink" if case % 2 else "no sink", heads, device)
        scale = layout.dim**-0.5
        got = sparse.sparse_attn_decode(q, cache, ragged, scale=scale, layout=layout, sink=sink, impl="triton")
        want = reference.sparse_attn_decode(q, cache, *ragged, scale, layout.name, None, None, None, "", sink)
        compare.assert_close(got.out, want[0], compare.DECODE_OUT, f"out of case {case}")
        compare.assert_close(got.lse, want[1], compare.DECODE_LSE, f"lse of case {case}")


@pytest.mark.kernel
def test_merge_kernel(device):
    for states, d_v, dtype in ((1, 16, torch.float32), (3, 80, torch.bfloat16), (5, 600, torch.float16)):
        outs = torch.randn(states, 4, 3, d_v, device=device).to(dtype)
        lses = torch.randn(4, states, 3, device=device).transpose(0, 1) * 4
        lses[0, 1] = -INF
        lses[:, 2] = -INF
        outs[lses.isneginf()] = torch.nan
        for sink in (None, torch.tensor([0.5, INF, -INF, 1.0], device=device)):
            got = sparse.merge_attn_states(outs, lses, sink=sink, impl="triton")
            want = reference.merge_attn_states(outs.float(), lses, sink)
            compare.assert_close(got.out, want[0], compare.PREFILL_OUT)
            compare.assert_close(got.lse, want[1], compare.PREFILL_LSE)


@pytest.mark.kernel
def test_kernel_without_tokens_or_rows(device):
    ragged = Ragged(torch.zeros(0, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device))
    q, kv = torch.zeros(0, 4, 32, device=device), torch.zeros(0, 32, device=device)
    got = sparse.sparse_attn_prefill(q, kv, ragged, scale=1.0, d_v=32, impl="triton")
    assert got.out.shape == (0, 4, 32) and got.lse.shape == (0, 4)
    ragged = ragged_rows([3], 5, device=device)
    got = sparse.sparse_attn_prefill(q.new_zeros(1, 4, 32), kv, ragged, scale=1.0, d_v=32, impl="triton")
    assert got.out.abs().max() == 0 and torch.isneginf(got.lse).all()


@pytest.mark.kernel
def test_opcheck_kernel(device):
    check_opcheck("triton", device)
