"""Decode by the Hopper kernels against the reference, on a GPU: rows of every kind, all that they do not name poison."""

from __future__ import annotations

import torch
from support.caches import poisoned_cache
from support.extremes import INT_MAX, INT_MIN, NAN

from sparse_attn import LatentFp8Layout, PlainLayout, Ragged, allocate_cache, sparse_attn_decode
from sparse_attn.layout import PlanarFp8Layout
from sparse_attn.testing.compare import DECODE_LSE, DECODE_OUT, assert_close

LATENT, PLANAR = LatentFp8Layout(512, 64), PlanarFp8Layout(448, 64)
ROWS, NARROW_ROWS = PlainLayout("bf16", 512, 64), PlainLayout("bf16", 512, 0)


def queries(tokens, heads, dim, scale=1.0):
    """A view of a tensor full of NaN."""
    wide = torch.full((tokens, heads, dim + 16), NAN, device="cuda", dtype=torch.bfloat16)
    wide[..., :dim] = torch.randn(tokens, heads, dim, device="cuda") * scale
    return wide[..., :dim]


def list_of(tokens, width, slots, lengths):
    """(ragged, slots it names): wild slots between good ones, a tail that must stay unread."""
    dense = torch.randint(0, slots, (tokens, width), device="cuda", dtype=torch.int32)
    column = torch.arange(width, device="cuda")
    wild = torch.tensor([-1, INT_MIN, INT_MAX, slots], device="cuda", dtype=torch.int32)
    dense = torch.where((column % 9 == 4) | (lengths == "invalid"), wild[column % 4], dense)
    length = torch.full((tokens,), width, device="cuda", dtype=torch.int32)
    if lengths == "random":
        length = torch.randint(0, width + 1, (tokens,), device="cuda", dtype=torch.int32)
    elif lengths == "gaps":
        length = torch.randint(1, width + 1, (tokens,), device="cuda", dtype=torch.int32)
        length[1::3] = 0
    elif lengths == "none":
        length.zero_()
    packed = dense[column < length.unsqueeze(1)]
    indices = torch.zeros(tokens * width, dtype=torch.int32, device="cuda")
    indices[: packed.numel()] = packed
    ragged = Ragged(indices, torch.nn.functional.pad(length.cumsum(0, dtype=torch.int32), (1, 0)))
    return ragged, packed[(packed >= 0) & (packed < slots)].long().unique()


def cache_of(layout, blocks, block_size, read, gap=0):
    """Only the slots ``read`` hold values; blocks stand ``gap`` further apart than allocate_cache has them."""
    if isinstance(layout, PlanarFp8Layout):
        gap += layout.block_stride(block_size) - block_size * layout.row
    cache, _ = poisoned_cache(layout, blocks, block_size, "cuda", gap)
    if len(read):
        layout.encode(cache, read, torch.randn(len(read), layout.dim, device="cuda") / 10)
    return cache


def sink_of(kind, heads):
    """The front of a tensor of NaN."""
    if kind is None:
        return None
    sink = torch.full((heads + 3,), NAN, device="cuda")
    sink[:heads] = torch.randn(heads, device="cuda") if kind == "random" else kind
    return sink


def check(kernel, q, cache, ragged, **options):
    """``kernel`` against the reference, twice alike."""
    got, again = (sparse_attn_decode(q, cache, ragged, **options, impl=kernel) for _ in range(2))
    assert torch.equal(got.out, again.out) and torch.equal(got.lse, again.lse)
    want = sparse_attn_decode(q, cache, ragged, **options, impl="reference")
    assert_close(got.out, want.out, DECODE_OUT)
    assert_close(got.lse, want.lse, DECODE_LSE)


def check_swap_ab(
    layout, heads, tokens, width, blocks, block_size, *, lengths="full", sink=None, gap=0, extra=0, seed=0
):
    """``extra`` keys of a second cache."""
    torch.manual_seed(seed)
    q = queries(tokens, heads, layout.dim)
    ragged, read = list_of(tokens, width, blocks * block_size, lengths)
    cache = cache_of(layout, blocks, block_size, read, gap)
    options = dict(scale=0.05, layout=layout)
    if extra:
        extra_ragged, read = list_of(tokens, extra, blocks * 7, lengths)
        extra_cache = cache_of(layout, blocks, 7, read)
        options |= dict(extra_cache=extra_cache, extra_ragged=extra_ragged, extra_layout=layout)
    check("hopper.swap_ab", q, cache, ragged, sink=sink_of(sink, heads), **options)


def latent_case(tokens, heads, block_size, blocks, width, *, lengths="full", sink=None, layout=LATENT, gap=0, seed=0):
    """(q, cache, ragged, sink) of decode over one cache of fp8 latents."""
    torch.manual_seed(seed)
    q = queries(tokens, heads, layout.dim, 0.1)
    ragged, read = list_of(tokens, width, blocks * block_size, lengths)
    return q, cache_of(layout, blocks, block_size, read, gap), ragged, sink_of(sink, heads)


def check_latents(q, cache, ragged, sink, layout=LATENT):
    check("hopper.decode_fp8", q, cache, ragged, scale=0.05, layout=layout, sink=sink)


def check_every_code(heads, kernel):
    """All 256 codes, NaN among them, and scales beyond what a product in bf16 would hold."""
    cache = allocate_cache(LATENT, 1, 64, "cuda")
    for token in range(8):
        cache[0, token, :512] = torch.arange(512, device="cuda").remainder(256).to(torch.uint8)
        if token != 5:
            cache[0, token, :512][cache[0, token, :512] & 0x7F == 0x7F] = 0
        cache[0, token, 512:528] = torch.tensor([2.0**-9, 1000.0, 0.37, 3e-5], device="cuda").view(torch.uint8)
    q = torch.zeros(40, heads, 576, device="cuda", dtype=torch.bfloat16)
    for tokens in ([0, 1, 2], [5]):
        slots = torch.tensor(tokens * 40, dtype=torch.int32, device="cuda")
        ragged = Ragged(slots, torch.arange(41, dtype=torch.int32, device="cuda") * len(tokens))
        got = sparse_attn_decode(q, cache, ragged, scale=1.0, layout=LATENT, impl=kernel)
        want = sparse_attn_decode(q, cache, ragged, scale=1.0, layout=LATENT, impl="reference")
        assert torch.equal(got.out.isnan(), want.out.isnan())
        torch.testing.assert_close(got.out.nan_to_num(), want.out.nan_to_num(), rtol=2**-7, atol=1e-6)
