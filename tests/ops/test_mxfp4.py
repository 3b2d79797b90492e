"""MXFP4: codes and scales against the definition, kernels against the codes; scores of any spread of scales."""

from __future__ import annotations

import math

import pytest
import torch
from support.caches import poisoned_cache
from support.index_topk import mxfp4_query

from sparse_attn.layout import IndexMxfp4Layout
from sparse_attn.mxfp4 import AMAX_FLOOR, GROUP, NAN_SCALE, VALUES, mxfp4_decode, mxfp4_quantise
from sparse_attn.ops.indexer.keys import indexer_k_quant_and_cache
from sparse_attn.ops.indexer.queries import indexer_q_rope_quant
from sparse_attn.ops.indexer.scores import mxfp4_mqa_logits, mxfp4_paged_mqa_logits
from sparse_attn.ops.layers.rope import rope_table
from sparse_attn.testing import compare

INF, NAN = math.inf, math.nan


def slow_group(values):
    """(codes, scale byte) of 32 Python floats, by the definition."""
    if not all(math.isfinite(value) for value in values):
        return [0] * GROUP, NAN_SCALE
    mantissa, exponent = math.frexp(max(max(map(abs, values)), AMAX_FLOOR) / 6)
    exponent -= mantissa == 0.5
    codes = []
    for value in values:
        size = min(abs(value) / 2.0**exponent, 6.0)
        code = min(range(8), key=lambda c: (abs(VALUES[c] - size), c % 2))
        codes.append(code | (8 if math.copysign(1, value) < 0 else 0))
    return codes, exponent + 127


def spread(rows, groups, seed=0):
    """Values of which every group has a magnitude of its own, among them the least and the greatest; zeros of both
    signs, ties, NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, groups, GROUP, generator=generator)
    exponents = torch.randint(-140, 124, (rows, groups, 1), generator=generator)
    values = torch.ldexp(values, exponents.clamp_min(-100)) * torch.exp2((exponents + 100.0).clamp_max(0))
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    values[0, 0] = torch.cat(
        [halves, -halves, halves.nextafter(torch.tensor(9.0)), halves.nextafter(torch.tensor(0.0))]
    )
    values[1, 0] = 0.0
    values[2, 0] = -0.0
    values[3, -1, 7], values[4, 0, 31], values[5, -1, 0] = NAN, INF, -INF
    values[6, 0, 0] = torch.finfo(torch.float32).max
    values[7, 0] = torch.full((GROUP,), 1.5 * 2.0**-124).nextafter(torch.tensor(1.0))  # just above AMAX_FLOOR
    values[8, 0] = 6.0 * torch.exp2(torch.arange(GROUP) - 30.0)
    return values.flatten(1)


def test_the_definition():
    values = spread(40, 3)
    codes, scales = mxfp4_quantise(values)
    assert codes.shape == (40, 48) and scales.shape == (40, 3) and codes.dtype == scales.dtype == torch.uint8
    for row in range(40):
        for group in range(3):
            want, scale = slow_group(values[row, group * GROUP : (group + 1) * GROUP].tolist())
            packed = codes[row, group * 16 : group * 16 + 16].tolist()
            assert [code for byte in packed for code in (byte & 15, byte >> 4)] == want, (row, group)
            assert scales[row, group] == scale, (row, group)
    assert {int(scales.min()), int(scales[scales < NAN_SCALE].max())} == {1, 253}


def test_decoding():
    """Every code under every scale, the least of which is subnormal, and the greatest with which 6 overflows left out;
    bf16 holds them all."""
    codes = torch.arange(256, dtype=torch.uint8)[:16].repeat(256, 1)
    codes = codes | (codes << 4)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    values = mxfp4_decode(codes, scales)
    assert values[NAN_SCALE].isnan().all()
    magnitudes = torch.tensor(VALUES).repeat_interleave(2).double()
    want = torch.cat([magnitudes, -magnitudes]) * torch.exp2(torch.arange(253).double() - 127)[:, None]
    assert torch.equal(values[:253].double(), want)
    assert torch.equal(values[:253].bfloat16().float(), values[:253])
    again, bytes_again = mxfp4_quantise(values[1:253])
    assert torch.equal(mxfp4_decode(again, bytes_again), values[1:253])


def test_layout():
    """68 bytes a key; codes of all keys of a block, then scales of all."""
    layout = IndexMxfp4Layout(128)
    assert layout.row == 68 and layout.name == "index_mxfp4/128"
    cache, memory = poisoned_cache(layout, 2, 3, padding=5)
    values = spread(9, 4)[[0, 8]]
    layout.encode(cache, torch.tensor([4, 2]), values)
    codes, scales = mxfp4_quantise(values)
    assert torch.equal(memory[1, 64:128], codes[0]) and torch.equal(memory[1, 3 * 64 + 4 : 3 * 64 + 8], scales[0])
    assert torch.equal(memory[0, 128:192], codes[1]) and torch.equal(memory[0, 3 * 64 + 8 : 3 * 64 + 12], scales[1])
    assert int((memory == 0xFF).sum()) >= memory.numel() - 2 * 68
    assert torch.equal(layout.decode(cache, torch.tensor([4, 2])), mxfp4_decode(codes, scales))
    with pytest.raises(ValueError, match="^dim: got 48, allowed: multiples of the scale group 32"):
        IndexMxfp4Layout(48)


@pytest.mark.kernel
def test_keys_and_queries_of_any_spread(device):
    """Written by kernels: the bytes of the reference, NaN and infinities included."""
    for groups in (1, 3, 4):
        layout, values = IndexMxfp4Layout(32 * groups), spread(40, groups, seed=groups)
        slots = torch.randperm(42)[:40].to(device)
        cache, memory = poisoned_cache(layout, 6, 7, device, 3)
        want, want_memory = poisoned_cache(layout, 6, 7, "cpu", 3)
        indexer_k_quant_and_cache(values.to(device), cache, slots, layout, impl="triton")
        indexer_k_quant_and_cache(values, want, slots.cpu(), layout, impl="reference")
        assert torch.equal(memory.cpu(), want_memory)
        q = values.unflatten(0, (8, 5))
        others = torch.randn(8, 5), torch.tensor([1, 0, -1, 3, 2, 9, 1, 1], dtype=torch.int32), rope_table(4, 8, 1e4)
        for start, hadamard in ((0, False), (16, groups != 3)):
            options = dict(start=start, interleaved=True, hadamard=hadamard, weight_scale=0.3, layout=layout)
            mine = indexer_q_rope_quant(*(x.to(device) for x in (q, *others)), **options, impl="triton")
            right = indexer_q_rope_quant(q, *others, **options, impl="reference")
            assert torch.equal(mine.query.cpu(), right.query) and torch.equal(mine.weights.cpu(), right.weights)
            assert right.query[2].flatten()[: 5 * layout.code_bytes].max() == 0 and right.weights[2].abs().max() == 0


def whole(rows, keys, device):
    return (torch.full((rows,), edge, dtype=torch.int32, device=device) for edge in (0, keys))


def check_spread(impl, device):
    """Groups whose powers of two lie far apart, within a key and between keys, and groups of zeros."""
    torch.manual_seed(0)
    heads, groups = 5, 4
    for apart in (3, 12, 25):
        powers = torch.exp2(torch.randint(-apart, apart, (20, groups, 1)).float())
        k = (torch.randn(20, groups, GROUP) * powers).flatten(1)
        q = torch.randn(6, heads, groups, GROUP) * torch.exp2(
            torch.randint(-apart, apart, (6, heads, groups, 1)).float()
        )
        k[3], k[4, :32], q[1, 2] = 0, 0, 0
        weights = torch.randn(6, heads)
        codes, scales = mxfp4_quantise(k)
        query = mxfp4_query(q.flatten(2))
        values = mxfp4_decode(*mxfp4_quantise(q.flatten(2))).double()
        want = torch.einsum("mhn,mh->mn", (values @ mxfp4_decode(codes, scales).double().T).relu(), weights.double())
        got = mxfp4_mqa_logits(
            *(x.to(device) for x in (query, codes, scales, weights)), *whole(6, 20, device), impl=impl
        )
        scale = torch.einsum(
            "mhn,mh->mn", values.abs() @ mxfp4_decode(codes, scales).double().abs().T, weights.double().abs()
        )
        assert ((got.cpu().double() - want).abs() <= 1e-5 * scale).all()
        assert (got[:, 3] == 0).all()
        compare.assert_same_diff(got.cpu(), want.float())


def test_scores_of_any_spread_reference():
    check_spread("reference", "cpu")


@pytest.mark.kernel
def test_scores_of_any_spread_kernel(device):
    check_spread("triton", device)


def check_nan(impl, device):
    """A NaN in a group of a key makes its score NaN, and one in a query's head the row's; no other."""
    k, q = torch.randn(9, 64), torch.randn(3, 4, 64)
    k[4, 40], q[1, 2, 0] = INF, NAN
    codes, scales = (x.to(device) for x in mxfp4_quantise(k))
    got = mxfp4_mqa_logits(
        mxfp4_query(q).to(device), codes, scales, torch.ones(3, 4, device=device), *whole(3, 9, device), impl=impl
    )
    want = torch.zeros(3, 9, dtype=torch.bool)
    want[:, 4], want[1] = True, True
    assert torch.equal(got.isnan().cpu(), want)


def test_nan_reference():
    check_nan("reference", "cpu")


@pytest.mark.kernel
def test_nan_kernel(device):
    check_nan("triton", device)


def test_subnormal_scales_of_a_cache():
    """Of a byte 0, which other writers may write: 2^-127."""
    codes, scales = torch.full((2, 16), 0x77, dtype=torch.uint8), torch.tensor([[0], [127]], dtype=torch.uint8)
    query = torch.cat(
        [torch.full((1, 1, 16), 0x22, dtype=torch.uint8), torch.full((1, 1, 1), 127, dtype=torch.uint8)], 2
    )
    got = mxfp4_mqa_logits(query, codes, scales, torch.ones(1, 1), *whole(1, 2, "cpu"))
    assert got.tolist() == [[32 * 6 * 2.0**-127, 192.0]]


@pytest.mark.parametrize(
    "change,name",
    [
        (dict(q=torch.zeros(2, 3, 32, dtype=torch.uint8)), "q"),
        (dict(q=torch.zeros(2, 3, 34, dtype=torch.uint8)[..., :17]), "q"),
        (dict(k=torch.zeros(5, 24, dtype=torch.uint8)), "k"),
        (dict(k_scale=torch.zeros(5, 2, dtype=torch.uint8)), "k_scale"),
        (dict(k_scale=torch.zeros(5, 1)), "k_scale"),
        (dict(weights=torch.ones(2, 4)), "weights"),
    ],
)
def test_errors_name_the_argument(change, name):
    good = dict(
        q=torch.zeros(2, 3, 17, dtype=torch.uint8), k=torch.zeros(5, 16, dtype=torch.uint8),
        k_scale=torch.zeros(5, 1, dtype=torch.uint8), weights=torch.ones(2, 3),
        kv_start=torch.zeros(2, dtype=torch.int32), kv_end=torch.ones(2, dtype=torch.int32),
    )  # fmt: skip
    assert mxfp4_mqa_logits(**good).shape == (2, 5)
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: got"):
        mxfp4_mqa_logits(**(good | change))


def test_paged_errors_name_the_argument():
    layout, i32 = IndexMxfp4Layout(32), dict(dtype=torch.int32)
    cache, q = torch.zeros(2, 4, 17, dtype=torch.uint8), torch.zeros(2, 1, 3, 17, dtype=torch.uint8)
    rest = torch.ones(2, 3), torch.zeros(2, 1, **i32), torch.zeros(2, 4, **i32), 8
    assert mxfp4_paged_mqa_logits(q, cache, *rest, layout).shape == (2, 8)
    for wrong, name in (((q[..., :16], cache), "q"), ((q, cache[..., :16]), "cache"), ((q.float(), cache), "q")):
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: got"):
            mxfp4_paged_mqa_logits(*wrong, *rest, layout)
    with pytest.raises(ValueError, match="^q: got strides"):
        mxfp4_paged_mqa_logits(torch.zeros(2, 1, 3, 34, dtype=torch.uint8)[..., :17], cache, *rest, layout)
    with pytest.raises(ValueError, match="^layout: got"):
        mxfp4_paged_mqa_logits(q, cache, *rest, "index_mxfp4/32")
