"""Scores that grow along a row, by much more than sums may lag behind them, in some heads and not in others.

What makes them grow is the last column of the keys, which is bf16 in every layout; the last column of the values is not
compared.
"""

import pytest
import torch
from conftest import big
from support.hopper_attention import LATENT, NARROW_ROWS, PLANAR, ROWS

from sparse_attn import Ragged, allocate_cache, sparse_attn_decode
from sparse_attn.layout import PlainLayout, PlanarFp8Layout
from sparse_attn.testing.compare import DECODE_LSE, DECODE_OUT, assert_close

SMALL = PlainLayout("bf16", 32, 16), PlanarFp8Layout(48, 16, 16)


def levels(kind, keys):
    """The last column of the keys: a few that outweigh many (2^9, once 2^10.5), or steps of 2^11 and more up and
    down."""
    if kind == "steps":
        return (torch.randn(1 + keys // 16) * 20).cumsum(0).repeat_interleave(16)[:keys]
    spikes = torch.zeros(keys)
    spikes[keys // 3 :: 67] = 15.6
    spikes[keys // 2 :: 301] = 18.2
    return spikes


def queries(tokens, heads, dim):
    """With the keys' last column scores grow in some heads, fall in others; in every third token they grow in none of
    the first eight of 16 heads, in every third in none of the last eight: what a warp holds."""
    head, slopes = torch.arange(heads), torch.tensor([8.0, -8.0, 0.0, 24.0, 7.0])
    q = torch.randn(tokens, heads, dim) / 10
    q[..., -1] = slopes[head % 5]
    q[1::3, head % 16 < 8, -1] = -8.0
    q[2::3, head % 16 >= 8, -1] = -8.0
    return q.bfloat16()


def check(layout, heads, tokens, keys, extra, kind, device, scale=0.05):
    torch.manual_seed(keys)
    q = queries(tokens, heads, layout.dim).to(device)
    caches, slots = [], torch.arange(extra + keys, device=device)
    for first, count in ((0, extra), (extra, keys)):
        rows = torch.randn(count, layout.dim, device=device) / 10
        rows[:, -1] = levels(kind, extra + keys)[first : first + count].to(device)
        cache = allocate_cache(layout, 1 + count // 64, 64, device)
        layout.encode(cache, slots[:count], rows)
        # Every token sees them from another one on.
        seen = (slots[:count] + 37 * torch.arange(tokens, device=device).unsqueeze(1)) % max(count, 1)
        indptr = torch.arange(tokens + 1, dtype=torch.int32, device=device) * count
        caches.append((cache, Ragged(seen.flatten().int(), indptr)))
    (second, more), (cache, ragged) = caches
    options = dict(scale=scale, layout=layout)
    if extra:
        options |= dict(extra_cache=second, extra_ragged=more, extra_layout=layout)
    got = sparse_attn_decode(q, cache, ragged, **options, impl="triton")
    want = sparse_attn_decode(q, cache, ragged, **options, impl="reference")
    assert_close(got.out[..., :-1], want.out[..., :-1], DECODE_OUT)
    assert_close(got.lse, want.lse, DECODE_LSE)


@pytest.mark.kernel
@pytest.mark.parametrize("kind", ["spikes", "steps"])
@pytest.mark.parametrize("layout", SMALL, ids=lambda layout: layout.name)
def test_portable_kernel(layout, kind, device):
    check(layout, 5, 3, 150, 0, kind, device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["spikes", "steps"])
@pytest.mark.parametrize("heads", [10, 32, 64, 128])
@pytest.mark.parametrize("layout", [LATENT, PLANAR, ROWS, NARROW_ROWS], ids=lambda layout: layout.name)
def test_hopper_kernels(layout, heads, kind, device):
    """Whole rows, rows of many splits, and full waves with a tail."""
    for tokens, keys in ((140, 640), (3, 2048), (67, 1152)) if big(device) else ((2, 300),):
        check(layout, heads, tokens, keys, 0, kind, device)
        if layout is PLANAR:
            check(layout, heads, tokens, keys, 200, kind, device)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.0, -0.05])
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("layout", [PLANAR, ROWS], ids=lambda layout: layout.name)
def test_scales_that_are_not_positive(layout, heads, scale, device):
    check(layout, heads, 140, 300, 0, "steps", device, scale)
