"""hopper.swap_ab: how heads are padded and rows are split, and on a GPU FlashMLA's kinds of case at its tolerances."""

import pytest
import torch
from support.extremes import INF
from support.hopper_attention import LATENT, NARROW_ROWS, PLANAR, ROWS, check_every_code, check_swap_ab, list_of

from sparse_attn import LatentFp8Layout, Ragged, allocate_cache, sparse_attn_decode, sparse_attn_prefill
from sparse_attn.framework.target import H200
from sparse_attn.ops.attention.sparse import dispatch
from sparse_attn.ops.attention.sparse.hopper import config
from sparse_attn.ops.attention.sparse.problem import packed_decode
from sparse_attn.testing.compare import DECODE_LSE, DECODE_OUT, assert_close


def plan(tokens=64, heads=16, keys=2048, layout=LATENT, max_logits=False):
    problem = packed_decode(tokens, heads, layout, tokens * keys)._replace(max_logits=max_logits)
    assert config.supports_swap_ab(problem, H200).ok
    return config.plan_swap_ab(problem, H200)


def test_heads_are_padded():
    for layout in (LATENT, PLANAR, ROWS, NARROW_ROWS):
        assert [plan(heads=heads, layout=layout).block_m for heads in (1, 8, 16, 17, 32)] == [16, 16, 16, 32, 32]


def test_more_heads_than_a_cta_serves():
    """Wherever no other kernel of Hopper runs, and else while every tile has an SM."""
    assert [plan(1, heads).blocks for heads in (1, 32, 33, 64, 96, 128)] == [1, 1, 2, 2, 3, 4]
    assert plan(1, 128).block_m == 32 and [one.splits for one in plan(1, 128).waves] == [32]
    assert plan(500, 96).blocks == 3 and plan(500, 64, layout=LATENT, max_logits=True).blocks == 2
    for heads, keys, layout, tokens in (
        (128, 2048, LATENT, 1),
        (64, 2048, LATENT, 2),
        (64, 640, PLANAR, 6),
        (128, 1152, PLANAR, 1),
    ):
        names = [
            dispatch.choose(packed_decode(n, heads, layout, n * keys), H200).kernel.name for n in (tokens, tokens + 1)
        ]
        assert names == ["hopper.swap_ab", "hopper.decode_fp8"]
        alike = packed_decode(1, heads, layout, keys, batch_invariant=True)  # as 32 rows are
        assert dispatch.choose(alike, H200).kernel.name == "hopper.decode_fp8"


def test_how_it_splits():
    """Every SM has work, in one wave or two even ones."""

    def splits(tokens, **shape):
        (waves,) = plan(tokens, **shape).waves
        return waves.splits

    assert [splits(tokens) for tokens in (1, 8, 32, 64, 85, 100, 128, 4096)] == [32, 16, 4, 2, 3, 1, 1, 1]
    assert splits(1, keys=3) == splits(1, keys=0) == 1


SHAPES = ((27, 3, 9, 64), (3, 2048, 40, 64), (70, 129, 7, 256), (140, 640, 33, 61))  # tokens, keys, blocks, block size


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [None, "random", INF, -INF])
@pytest.mark.parametrize("lengths", ["full", "random", "none", "invalid"])
@pytest.mark.parametrize("layout", [LATENT, PLANAR, ROWS, NARROW_ROWS], ids=lambda layout: layout.name)
def test_kinds_of_rows(layout, lengths, sink):
    for at, (tokens, width, blocks, block_size) in enumerate(SHAPES):
        gap = 16 * at if layout is LATENT else 0
        heads = (1, 8, 16, 24, 32)[(at + len(lengths)) % 5]
        check_swap_ab(layout, heads, tokens, width, blocks, block_size, lengths=lengths, sink=sink, gap=gap, seed=at)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize("lengths", ["full", "random", "none"])
def test_two_caches(heads, lengths):
    for tokens, width, extra in ((3, 128, 512), (64, 128, 1024), (140, 130, 70), (33, 1, 260), (9, 260, 1)):
        check_swap_ab(PLANAR, heads, tokens, width, 40, 64, lengths=lengths, sink="random", extra=extra, seed=extra)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["full", "random", "none"])
@pytest.mark.parametrize("heads", [33, 48, 64, 96, 128])
def test_blocks_of_heads(heads, lengths):
    """Whole and split rows; of heads that no other kernel takes, many."""
    for layout in (LATENT, PLANAR, ROWS, NARROW_ROWS):
        for width in (60, 1000):
            check_swap_ab(layout, heads, 1, width, 40, 64, lengths=lengths, sink="random", seed=width)
        if heads % 64:
            check_swap_ab(layout, heads, 140, 640, 33, 61, lengths=lengths, seed=heads)
    check_swap_ab(PLANAR, heads, 1, 128, 40, 64, lengths=lengths, sink="random", extra=512, seed=heads)


@pytest.mark.gpu
def test_other_scales():
    layout = LatentFp8Layout(512, 64, group=64)
    check_swap_ab(layout, 16, 40, 300, 20, 64)
    check_swap_ab(LatentFp8Layout(512, 64, scale_rule="pow2"), 16, 40, 300, 20, 64)


@pytest.mark.gpu
def test_every_code_and_large_scales():
    for heads in (16, 64):
        check_every_code(heads, "hopper.swap_ab")


@pytest.mark.gpu
def test_offsets_beyond_2_31():
    """Of words, which the producers count in."""
    for layout in (LATENT, PLANAR):
        cache = allocate_cache(layout, 206_000, 64, "cuda")
        slots = torch.arange(206_000 * 64 - 9, 206_000 * 64, device="cuda")
        layout.encode(cache, slots, torch.randn(9, layout.dim, device="cuda") / 10)
        named = slots[torch.randint(0, 9, (40 * 70,), device="cuda")].int()
        ragged = Ragged(named, torch.arange(41, dtype=torch.int32, device="cuda") * 70)
        q = torch.randn(40, 16, layout.dim, device="cuda", dtype=torch.bfloat16)
        got = sparse_attn_decode(q, cache, ragged, scale=0.05, layout=layout)
        want = sparse_attn_decode(q, cache, ragged, scale=0.05, layout=layout, impl="reference")
        assert_close(got.out, want.out, DECODE_OUT)


@pytest.mark.gpu
def test_prefill_and_capture():
    """Many rows of plain keys; a captured call replays at other lengths."""
    torch.manual_seed(0)
    q = torch.randn(500, 16, 576, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(4000, 576, device="cuda", dtype=torch.bfloat16) / 10
    ragged, _ = list_of(500, 300, 4000, "random")
    other, _ = list_of(500, 300, 4000, "random")
    graph = torch.cuda.CUDAGraph()
    sparse_attn_prefill(q, kv, ragged, scale=0.05, d_v=512)
    with torch.cuda.graph(graph):
        got = sparse_attn_prefill(q, kv, ragged, scale=0.05, d_v=512)
    for lists in (ragged, other):
        for into, lengths in zip(ragged, lists):
            into.copy_(lengths)
        graph.replay()
        want = sparse_attn_prefill(q, kv, lists, scale=0.05, d_v=512, impl="reference")
        assert_close(got.out, want.out, DECODE_OUT)
        assert_close(got.lse, want.lse, DECODE_LSE)
