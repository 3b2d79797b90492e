"""Scores anywhere in fp32, and beyond it: the lowest count as any others do, -inf weighs nothing, NaN and +inf are NaN.

Only the last column of queries and keys is not 0 in the queries. It is bf16 in every layout, so a score is one product,
exact wherever it is added up; scores of a row are equal or far apart. The last column of the values is not compared.
"""

from __future__ import annotations

import math

import pytest
import torch
from conftest import big
from support.extremes import INF, NAN
from support.hopper_attention import LATENT, NARROW_ROWS, PLANAR, ROWS

from sparse_attn import Ragged, allocate_cache, merge_attn_states, sparse_attn_decode, sparse_attn_prefill
from sparse_attn.framework.target import target_of
from sparse_attn.layout import LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.sparse import reference
from sparse_attn.testing.compare import DECODE_LSE, DECODE_OUT, PREFILL_LSE, PREFILL_OUT, assert_close

SMALL = PlainLayout("bf16", 32, 16), PlanarFp8Layout(48, 16, 16), LatentFp8Layout(32, 16, 32)
BOTH = pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=pytest.mark.kernel)])
# What a head's query has there: the last ones make -1e30 of -2, and more than fp32 holds of some keys.
SLOPES = [
    1.0,
    -1.0,
    2.0**12,
    -(2.0**12),
    2.0**40,
    -(2.0**66),
    2.0**66,
    2.0**103,
    -(2.0**103),
    2.0**126,
    -(2.0**126),
    0.0,
]
KINDS = {
    "low": [-2.0, -1.0, -2.0, -1.0, -3.0],
    "lower and lower": [-1.0, -2.0, -4.0, -64.0],
    "higher and higher": [-64.0, -4.0, -2.0, -1.0],
    "all alike": [-1.0],
    "either side": [-2.0, 2.0, 0.0, -64.0, 64.0],
    "neighbours": [-1.0, -1.0078125],  # of bf16
    "some infinite": [-INF, -1.0, -INF, 2.0],
    "infinite": [-INF],
    "both infinities": [-INF, -1.0, INF],
    "NaN": [1.0, NAN, -1.0],
}


@pytest.fixture
def where(impl, request):
    return dict(impl=impl, device=request.getfixturevalue("device") if impl == "triton" else torch.device("cpu"))


def exact(scores):
    """(weights, lse) of natural scores, in fp64, by the rule that the operator states."""
    scores = torch.where((scores.float() * math.log2(math.e)).isinf(), torch.inf * scores, scores.double())
    if scores.numel() == 0 or bool((scores == -INF).all()):
        return torch.zeros_like(scores), -INF
    return scores.softmax(0), float(scores.logsumexp(0)) if not bool((scores == INF).any()) else NAN


@BOTH
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_every_kind(where, kind, dtype):
    impl, device = where["impl"], where["device"]
    torch.manual_seed(1)
    levels = torch.tensor((KINDS[kind] * 40)[:37])
    tokens = 1 + target_of(device).num_sms // 2  # so many that no row is split
    q, kv = torch.zeros(tokens, len(SLOPES), 20, dtype=dtype), torch.randn(37, 20) / 10
    q[..., -1], kv[:, -1] = torch.tensor(SLOPES), levels
    kv = kv.to(dtype)
    seen = torch.arange(37, device=device).repeat(tokens)
    ragged = Ragged(seen.int(), 37 * torch.arange(tokens + 1, device=device).int())
    got = sparse_attn_prefill(q.to(device), kv.to(device), ragged, scale=0.25, d_v=16, impl=impl)
    outs, lses = [], []
    for slope in SLOPES:
        weights, lse = exact(torch.tensor(slope) * levels * 0.25)
        outs.append(torch.where(weights.unsqueeze(1) == 0, 0.0, weights.unsqueeze(1) * kv[:, :16].double()).sum(0))
        lses.append(lse)
    assert_close(got.out[-1], torch.stack(outs), PREFILL_OUT)
    assert_close(got.lse[-1], torch.tensor(lses), PREFILL_LSE)


def levels_of(kind, keys):
    """Of which the lowest and the highest are one key's: splits of a row are combined by lse, which beside large scores
    is not exact enough to tell one key from three."""
    levels = torch.tensor((KINDS[kind] * keys)[:keys])
    low, high = levels.nan_to_num(0.0).clamp(-1e30, 1e30).aminmax()
    levels[7], levels[keys // 2] = 2 * low - 1, 2 * high.abs() + 1
    return levels if kind != "infinite" else torch.full((keys,), -INF)


def check(layout, heads, tokens, keys, extra, kind, device, scale=0.25, sink=None):
    torch.manual_seed(keys)
    q = torch.zeros(tokens, heads, layout.dim)
    q[..., -1] = torch.tensor(SLOPES)[(torch.arange(heads) + torch.arange(tokens).unsqueeze(1)) % len(SLOPES)]
    caches, slots = [], torch.arange(max(extra, keys))
    levels = levels_of(kind, extra + keys)
    for first, count in ((0, extra), (extra, keys)):
        rows = torch.randn(count, layout.dim) / 10
        rows[:, -1] = levels[first : first + count]
        cache = allocate_cache(layout, 1 + count // 64, 64, "cpu")
        layout.encode(cache, slots[:count], rows)
        seen = (slots[:count] + 37 * torch.arange(tokens).unsqueeze(1)) % max(count, 1)
        seen[tokens // 2] = -1  # a row of no keys
        indptr = torch.arange(tokens + 1, dtype=torch.int32) * count
        if isinstance(layout, PlanarFp8Layout):  # as allocate_cache has them, blocks apart
            moved = allocate_cache(layout, cache.shape[0], 64, device)
            moved.copy_(cache)
        else:
            moved = cache.to(device)
        caches.append((moved, Ragged(seen.flatten().int().to(device), indptr.to(device))))
    (second, more), (cache, ragged) = caches
    options = dict(scale=scale, layout=layout, sink=None if sink is None else sink.to(device))
    if extra:
        options |= dict(extra_cache=second, extra_ragged=more, extra_layout=layout)
    q = q.bfloat16().to(device)
    got = sparse_attn_decode(q, cache, ragged, **options, impl="triton")
    want = sparse_attn_decode(q, cache, ragged, **options, impl="reference")
    assert_close(got.out[..., :-1], want.out[..., :-1], DECODE_OUT)
    assert_close(got.lse, want.lse, DECODE_LSE)
    assert got.lse[tokens // 2].isneginf().all() and not got.out[tokens // 2].any()
    return got


@pytest.mark.kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", SMALL, ids=lambda layout: layout.name)
def test_portable_kernel(layout, kind, device):
    check(layout, 12, 3, 70, 0, kind, device)
    if isinstance(layout, PlanarFp8Layout):
        check(layout, 12, 3, 40, 30, kind, device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [12, 32, 64])
@pytest.mark.parametrize("layout", [LATENT, PLANAR, ROWS, NARROW_ROWS], ids=lambda layout: layout.name)
def test_hopper_kernels(layout, heads, kind, device):
    """Whole rows, rows of many splits, and full waves with a tail; scales that are powers of two or not, or above
    1."""
    for tokens, keys in ((140, 640), (3, 2048), (67, 1152)) if big(device) else ((3, 300),):
        for scale in (0.25, 0.0417, 3.1):
            check(layout, heads, tokens, keys, 0, kind, device, scale)
        if layout is PLANAR:
            check(layout, heads, tokens, keys, 200, kind, device)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [LATENT, PLANAR, ROWS], ids=lambda layout: layout.name)
@pytest.mark.parametrize("heads", [12, 64])
def test_sinks_beside_scores_of_any_size(layout, heads, device):
    sink = torch.tensor([0.0, INF, -INF, 3e38, -3e38, 1e9, NAN]).repeat(10)[:heads]
    for tokens in (140, 3):
        check(layout, heads, tokens, 640, 0, "low", device, sink=sink)


STATES = [  # lses of three states
    [-INF, -INF, -INF], [0.5, -INF, 1.0], [NAN, 0.5, -INF], [NAN, NAN, NAN], [INF, 0.5, 1.0], [INF, INF, -INF], [NAN, INF, 1.0],
    [-1e30, -1e30, -INF], [-2e38, -2e38, -2e38], [-3e38, -3e38, 1.0], [-3e38, -3e38, -INF], [3e38, 1.0, -INF], [1e9, 1e9, 1e9],
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("sink", [None, 0.5, INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_states_of_any_lse(where, dtype, sink):
    impl, device = where["impl"], where["device"]
    lses = torch.tensor(STATES).T.unsqueeze(1).contiguous()  # [states, 1, heads]
    outs = torch.randn(3, 1, len(STATES), 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    outs[lses.isneginf()] = NAN
    sinks = None if sink is None else torch.full((len(STATES),), sink)
    got = merge_attn_states(
        outs.to(device), lses.to(device), sink=None if sinks is None else sinks.to(device), impl=impl
    )
    for head, lse in enumerate(STATES):
        weights, whole = exact(torch.tensor(lse))
        kept = (
            1.0 if sink is None or whole == -INF else float(torch.tensor(whole - sink, dtype=torch.float64).sigmoid())
        )
        weights = kept * weights.unsqueeze(1)
        out = torch.where(weights == 0, 0.0, weights * outs[:, 0, head].double()).sum(0)
        assert_close(got.out[0, head], out.to(dtype), DECODE_OUT, f"out of {lse}")
        assert_close(got.lse[0, head], torch.tensor(whole), DECODE_LSE, f"lse of {lse}")


def test_the_reference_divides_by_what_it_adds_up():
    """The logarithm of 3 is lost beside 1e9."""
    weights, lse = reference.softmax(torch.full((3,), 1e9), 0)
    assert weights.tolist() == [pytest.approx(1 / 3)] * 3 and lse == 1e9
