"""The two-producer decode kernel on fp8 latents: FlashMLA's kinds of case at its tolerances, on a GPU."""

import math

import pytest
import torch

from sparse_attn import LatentFp8Layout, Ragged, allocate_cache, sparse_attn_decode
from sparse_attn.ops.attention.hopper import launch as hopper_launch
from sparse_attn.ops.attention.problem import Keys, step_of
from sparse_attn.testing.compare import DECODE_LSE, DECODE_OUT, assert_close

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
INF = math.inf
LAYOUT = LatentFp8Layout(512, 64)


def case(tokens, heads, block_size, blocks, width, *, lengths="full", sink=None, layout=LAYOUT, gap=0, seed=0):
    """A cache whose unread bytes are 0xFF (NaN codes and scales), wild slots between good ones, q a view full of
    NaN."""
    torch.manual_seed(seed)
    device = "cuda"
    wide_q = torch.full((tokens, heads, 592), math.nan, device=device, dtype=torch.bfloat16)
    wide_q[..., :576] = torch.randn(tokens, heads, 576, device=device) / 10
    memory = torch.full((blocks, block_size * layout.row + gap), 0xFF, dtype=torch.uint8, device=device)
    cache = memory[:, : block_size * layout.row].unflatten(1, (block_size, layout.row))
    slots = blocks * block_size
    dense = torch.randint(0, slots, (tokens, width), device=device, dtype=torch.int32)
    column = torch.arange(width, device=device)
    wild = torch.tensor([-1, INT_MIN, INT_MAX, slots], device=device, dtype=torch.int32)
    dense = torch.where(column % 9 == 4, wild[column % 4], dense)
    length = torch.full((tokens,), width, device=device, dtype=torch.int32)
    if lengths == "random":
        length = torch.randint(0, width + 1, (tokens,), device=device, dtype=torch.int32)
    elif lengths == "gaps":
        length = torch.randint(1, width + 1, (tokens,), device=device, dtype=torch.int32)
        length[1::3] = 0
    elif lengths == "none":
        length.zero_()
    packed = dense[column < length.unsqueeze(1)]
    read = packed[(packed >= 0) & (packed < slots)].long().unique()
    if len(read):
        layout.encode(cache, read, torch.randn(len(read), layout.dim, device=device) / 10)
    indices = torch.full((tokens * width,), 0, dtype=torch.int32, device=device)
    indices[: packed.numel()] = packed
    given = None
    if sink is not None:
        given = torch.full((heads + 3,), math.nan, device=device)
        given[:heads] = torch.randn(heads, device=device) if sink == "random" else sink
    return (
        wide_q[..., :576],
        cache,
        Ragged(indices, torch.nn.functional.pad(length.cumsum(0, dtype=torch.int32), (1, 0))),
        given,
    )


def check(q, cache, ragged, sink, layout=LAYOUT):
    keys = Keys(cache, layout, *ragged)
    assert hopper_launch.choose_fp8(q, keys, None, step_of(q, keys, None, None)) is not None
    options = dict(scale=0.05, layout=layout, sink=sink)
    got, again = (sparse_attn_decode(q, cache, ragged, **options) for _ in range(2))
    assert torch.equal(got.out, again.out) and torch.equal(got.lse, again.lse)
    want = sparse_attn_decode(q, cache, ragged, **options, impl="reference")
    assert_close(got.out, want.out, DECODE_OUT)
    assert_close(got.lse, want.lse, DECODE_LSE)


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [None, "random", INF, -INF])
@pytest.mark.parametrize("lengths", ["full", "random", "none"])
@pytest.mark.parametrize("heads", [64, 128])
def test_kinds_of_rows(heads, lengths, sink):
    shapes = (27, 64, 9, 3), (1, 64, 40, 2048), (33, 64, 40, 2048), (70, 256, 7, 129), (140, 64, 33, 640)
    for at, (tokens, block_size, blocks, width) in enumerate(shapes):
        check(*case(tokens, heads, block_size, blocks, width, lengths=lengths, sink=sink, gap=16 * at, seed=at))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [LatentFp8Layout(512, 64, group=64), LatentFp8Layout(512, 64, scale_rule="pow2")])
def test_other_scales(layout):
    check(*case(40, 64, 64, 20, 300, layout=layout), layout=layout)


@pytest.mark.gpu
def test_every_code_and_large_scales():
    """All 256 codes, NaN among them, and scales beyond what a product in bf16 would hold."""
    cache = allocate_cache(LAYOUT, 1, 64, "cuda")
    for token in range(8):
        cache[0, token, :512] = torch.arange(512, device="cuda").remainder(256).to(torch.uint8)
        if token != 5:
            cache[0, token, :512][cache[0, token, :512] & 0x7F == 0x7F] = 0
        cache[0, token, 512:528] = torch.tensor([2.0**-9, 1000.0, 0.37, 3e-5], device="cuda").view(torch.uint8)
    q = torch.zeros(40, 64, 576, device="cuda", dtype=torch.bfloat16)
    for tokens in ([0, 1, 2], [5]):
        slots = torch.tensor(tokens * 40, dtype=torch.int32, device="cuda")
        ragged = Ragged(slots, torch.arange(41, dtype=torch.int32, device="cuda") * len(tokens))
        got = sparse_attn_decode(q, cache, ragged, scale=1.0, layout=LAYOUT)
        want = sparse_attn_decode(q, cache, ragged, scale=1.0, layout=LAYOUT, impl="reference")
        assert torch.equal(got.out.isnan(), want.out.isnan())
        torch.testing.assert_close(got.out.nan_to_num(), want.out.nan_to_num(), rtol=2**-7, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [300, 4000])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25, 2e38])
def test_shares_of_any_size(size, width):
    """Split rows of values that fp16 cannot hold without its scale; beside sums beyond fp32, 1 is still 1."""
    torch.manual_seed(0)
    cache = allocate_cache(LAYOUT, 10, 64, "cuda")
    values, overflows = torch.rand(640, 576, device="cuda") + 0.5, size == 2e38
    if overflows:
        values[:, :128] *= size
    else:
        values *= size
        values[:, :256] *= 1000.0
    LAYOUT.encode(cache, torch.arange(640, device="cuda"), values)
    tokens = 5
    slots = torch.randint(0, 640, (tokens * width,), device="cuda", dtype=torch.int32)
    ragged = Ragged(slots, torch.arange(tokens + 1, dtype=torch.int32, device="cuda") * width)
    q = torch.zeros(tokens, 64, 576, device="cuda", dtype=torch.bfloat16)
    keys = Keys(cache, LAYOUT, *ragged)
    (part,) = hopper_launch.choose_fp8(q, keys, None, step_of(q, keys, None, None)).parts
    assert part.splits == (3 if width == 300 else 16)
    got, want = (
        sparse_attn_decode(q, cache, ragged, scale=1.0, layout=LAYOUT, impl=impl).out
        for impl in ("triton", "reference")
    )
    assert want.isfinite().all() and got[..., :128].isinf().all() == overflows
    compared = slice(128, 512) if overflows else slice(512)
    torch.testing.assert_close(got[..., compared], want[..., compared], rtol=2**-7, atol=0)


@pytest.mark.gpu
def test_offsets_beyond_2_31():
    """Of words, which the producers count in."""
    cache = allocate_cache(LAYOUT, 206_000, 64, "cuda")
    slots = torch.arange(206_000 * 64 - 9, 206_000 * 64, device="cuda")
    LAYOUT.encode(cache, slots, torch.randn(9, 576, device="cuda") / 10)
    chosen = slots[torch.randint(0, 9, (40, 70), device="cuda")].int()
    ragged = Ragged(chosen.flatten(), torch.arange(41, dtype=torch.int32, device="cuda") * 70)
    check(torch.randn(40, 64, 576, device="cuda", dtype=torch.bfloat16) / 10, cache, ragged, None)
