"""hopper.decode_fp8 over fp8 latents: FlashMLA's kinds of case at its tolerances, on a GPU."""

import pytest
import torch
from support.extremes import INF
from support.hopper_attention import LATENT, check_every_code, check_latents, latent_case

from sparse_attn import LatentFp8Layout, Ragged, allocate_cache, sparse_attn_decode
from sparse_attn.framework.target import H200
from sparse_attn.ops.attention.sparse.hopper import config
from sparse_attn.ops.attention.sparse.problem import packed_decode


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [None, "random", INF, -INF])
@pytest.mark.parametrize("lengths", ["full", "random", "none"])
@pytest.mark.parametrize("heads", [64, 128])
def test_kinds_of_rows(heads, lengths, sink):
    shapes = (27, 64, 9, 3), (1, 64, 40, 2048), (33, 64, 40, 2048), (70, 256, 7, 129), (140, 64, 33, 640)
    for at, (tokens, block_size, blocks, width) in enumerate(shapes):
        check_latents(
            *latent_case(tokens, heads, block_size, blocks, width, lengths=lengths, sink=sink, gap=16 * at, seed=at)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [LatentFp8Layout(512, 64, group=64), LatentFp8Layout(512, 64, scale_rule="pow2")])
def test_other_scales(layout):
    check_latents(*latent_case(40, 64, 64, 20, 300, layout=layout), layout=layout)


@pytest.mark.gpu
def test_every_code_and_large_scales():
    check_every_code(64, "hopper.decode_fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [300, 4000])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25, 2e38])
def test_shares_of_any_size(size, width):
    """Split rows of values that fp16 cannot hold without its scale; beside sums beyond fp32, 1 is still 1."""
    torch.manual_seed(0)
    cache = allocate_cache(LATENT, 10, 64, "cuda")
    values, overflows = torch.rand(640, 576, device="cuda") + 0.5, size == 2e38
    if overflows:
        values[:, :128] *= size
    else:
        values *= size
        values[:, :256] *= 1000.0
    LATENT.encode(cache, torch.arange(640, device="cuda"), values)
    tokens = 5
    slots = torch.randint(0, 640, (tokens * width,), device="cuda", dtype=torch.int32)
    ragged = Ragged(slots, torch.arange(tokens + 1, dtype=torch.int32, device="cuda") * width)
    q = torch.zeros(tokens, 64, 576, device="cuda", dtype=torch.bfloat16)
    (waves,) = config.plan_decode_fp8(packed_decode(tokens, 64, LATENT, tokens * width), H200).waves
    assert waves.splits == (3 if width == 300 else 16)
    got, want = (
        sparse_attn_decode(q, cache, ragged, scale=1.0, layout=LATENT, impl=impl).out
        for impl in ("hopper.decode_fp8", "reference")
    )
    assert want.isfinite().all() and got[..., :128].isinf().all() == overflows
    compared = slice(128, 512) if overflows else slice(512)
    torch.testing.assert_close(got[..., compared], want[..., compared], rtol=2**-7, atol=0)


@pytest.mark.gpu
def test_offsets_beyond_2_31():
    """Of words, which the producers count in."""
    cache = allocate_cache(LATENT, 206_000, 64, "cuda")
    slots = torch.arange(206_000 * 64 - 9, 206_000 * 64, device="cuda")
    LATENT.encode(cache, slots, torch.randn(9, 576, device="cuda") / 10)
    chosen = slots[torch.randint(0, 9, (40, 70), device="cuda")].int()
    ragged = Ragged(chosen.flatten(), torch.arange(41, dtype=torch.int32, device="cuda") * 70)
    check_latents(torch.randn(40, 64, 576, device="cuda", dtype=torch.bfloat16) / 10, cache, ragged, None)
