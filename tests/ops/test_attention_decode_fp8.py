"""hopper.decode_fp8: its plans, compiled ahead of time, and on a GPU planar caches, one or two."""

import itertools
from dataclasses import replace

import pytest
import torch
from support.attention import BLOCK_SIZES, V4, V4_FNUZ, Case, check_case
from support.extremes import INF
from support.hopper_attention import LATENT
from support.launched import compiled_case

from sparse_attn import LatentFp8Layout, Ragged, allocate_cache, sparse_attn_decode
from sparse_attn.framework.target import H200
from sparse_attn.ops.attention.sparse import dispatch
from sparse_attn.ops.attention.sparse.hopper import config
from sparse_attn.ops.attention.sparse.partials import scratch
from sparse_attn.ops.attention.sparse.problem import packed_decode
from sparse_attn.ops.attention.sparse.split_kv import Waves, combine_of, may_start_early
from sparse_attn.workspace import Buffer, largest, size_of


def plan(tokens=9, heads=64, keys=1152, layout=V4):
    problem = packed_decode(tokens, heads, layout, tokens * keys)
    assert config.supports_decode_fp8(problem, H200).ok
    return config.plan_decode_fp8(problem, H200)


def test_scales_that_it_reads():
    assert plan(layout=LATENT) == plan(layout=LatentFp8Layout(512, 64, group=64))
    assert plan(layout=LATENT) == plan(layout=LatentFp8Layout(512, 64, scale_rule="pow2"))


def test_how_it_splits():
    """Where that spares two pairs of a row; all run at once."""

    def splits(*shape):
        (waves,) = plan(*shape).waves
        return waves.splits

    tokens = (1, 8, 32, 64, 128)
    assert [splits(n, 128) for n in tokens] == [9, 5, 2, 1, 1]
    assert [splits(n, 64, 640) for n in tokens] == [5, 5, 3, 2, 1]
    assert [splits(n, 128, 2048, LATENT) for n in tokens] == [16, 8, 2, 1, 1]
    assert [splits(n, 64, 2048, LATENT) for n in (4, 8, 9)] == [16, 16, 8]
    assert [splits(1, 64, keys) for keys in (0, 1, 256, 257, 385)] == [1, 1, 1, 3, 4]
    for n in range(1, 200, 7):
        for keys in (1, 640, 2048, 100_000):
            for waves in plan(n, 64, keys).waves:
                assert waves.splits * waves.rows <= max(waves.rows, H200.num_sms)


def test_scratch_that_is_reserved():
    """Of a row's keys and of any fewer; for few heads, whose partials are fp32, as for many."""
    for tokens in (1, 5, 24, 33, 88, 100, 140, 264, 265, 3000):  # 88: two ways to split take as many partials
        for heads in (3, 64, 128):
            for keys in (1, 500, 2200):
                shorter = [packed_decode(tokens, heads, V4, tokens * row) for row in range(1, keys + 1)]
                needed = {dispatch.choose(problem, H200).plan.scratch for problem in shorter}
                reserved = list(config.reserved(packed_decode(tokens, heads, V4, tokens * keys), H200))
                assert largest(map(size_of, reserved)) == largest(map(size_of, needed))
    assert not list(config.reserved(packed_decode(1, 16, V4, 500), replace(H200, arch=80)))


def test_layout_of_partials():
    made = plan(1, 128, 2048)
    assert made.waves == (Waves(0, 1, 16),)
    assert made.scratch == scratch(made.waves, 128, 512, scaled=True)
    assert made.scratch.buffers == (
        Buffer("out_partial", (16, 1, 128, 512), torch.float16),
        Buffer("lse_partial", (16, 1, 128), torch.float32),
        Buffer("scale_partial", (16, 1, 128, 2), torch.float32),
    )


def test_how_many_splits_are_combined_at_a_time():
    sizes = {splits: combine_of(H200, 3, 64, splits)[:3] for splits in (2, 3, 5, 6, 7, 8, 9, 16, 17, 33, 132)}
    assert sizes == {2: (2, 1, 2), 3: (4, 1, 1), 5: (8, 1, 1), 6: (8, 1, 1), 7: (8, 2, 1), 8: (8, 2, 1), 9: (16, 2, 1),
                     16: (16, 2, 1), 17: (32, 4, 1), 33: (32, 4, 1), 132: (32, 4, 1)}  # fmt: skip
    beside = {(few, more): combine_of(H200, 3, 64, few, more).block_s for few in (2, 3, 6) for more in (2, 9, 16, 32)}
    assert beside == {(2, 2): 2, (2, 9): 4, (2, 16): 4, (2, 32): 8, (3, 2): 4, (3, 9): 4, (3, 16): 4, (3, 32): 8,
                      (6, 2): 8, (6, 9): 8, (6, 16): 8, (6, 32): 8}  # fmt: skip


def test_heads_of_a_combining_cta():
    """Two where CTAs are many and do little, and heads are even."""
    assert [combine_of(H200, rows, 64, 4).block_m for rows in (33, 34)] == [1, 2]
    assert [combine_of(H200, 9, heads, 2).block_m for heads in (1, 7, 8)] == [1, 1, 2]
    assert combine_of(H200, 200, 64, 5).block_m == 1


def test_attention_that_lets_its_combine_start():
    """Where the combine's CTAs do not crowd on the SMs that attention leaves, or are so many that most do not."""
    early = {rows: may_start_early(H200, 10 * rows, combine_of(H200, rows, 32, 10)) for rows in (6, 8, 9, 13)}
    assert early == {6: True, 8: True, 9: False, 13: False}
    early = {rows: may_start_early(H200, 5 * rows, combine_of(H200, rows, 64, 5)) for rows in (8, 13, 16, 26)}
    assert early == {8: True, 13: False, 16: False, 26: True}
    assert not may_start_early(H200, 200, combine_of(H200, 20, 16, 10))


@pytest.mark.aot
@pytest.mark.parametrize(
    "form", ["deepseek_v32 fp8, batch 128, 128 heads", "deepseek_v4, batch 128, 128 heads", "deepseek_v4, window layer"]
)
def test_compiles_for_hopper(form):
    """A few scalars of the producers spill; spills of the consumers would serialise the matrix unit."""
    compiled, *_ = compiled_case(f"sparse_attn_decode: {form}")
    assert compiled.spill_bytes <= 64 and compiled.shared_memory <= H200.shared_memory
    assert compiled.count("HGMMA") and compiled.count("DEPBAR") <= 16 and compiled.count(r"LDG\.E\.128") >= 30


def kinds():
    for at, (one, other) in enumerate(itertools.product(BLOCK_SIZES, BLOCK_SIZES)):
        lengths = ([9, 40, 0], [640, 0, 65], [64, 128, 300])[at % 3]
        more = ([70, 0, 0], [130, 5, 2048], [0, 64, 129])[at // 3 % 3]
        first, second = (
            (V4, 1 + keys // size, size, -size * V4.row % 576 + 16 * (at % 4), rows)
            for keys, size, rows in ((200 + at, one, lengths), (3000, other, more))
        )
        yield Case(
            (64, 128)[at % 2], 1 + at % 3, first, None if at % 7 == 3 else second, (None, 0.4, INF, -INF)[at % 4]
        )
    for lengths, more in (([0, 0], [0, 0]), ([20, 70], [90, 3])):
        yield Case(64, 3, (V4, 6, 5, 8, lengths), (V4, 9, 7, 24, more), 0.1, invalid=True)
    for one, other in ((300, 0), (0, 300), (130, 200), (1, 260), (260, 1), (64, 192), (63, 65), (128, 1024)):
        yield Case(64, 1, (V4, 9, 64, 64, [one]), (V4, 19, 64, 64, [other]), 0.2)
    yield Case(64, 1, (V4, 40, 64, 64, [128] * 140), (V4, 90, 64, 64, [512, 0, 511, 700, 1, 64, 65] * 20), 0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(kinds()), ids=str)
def test_kinds_of_rows(case, device):
    check_case(case, len(str(case)), device, impl="hopper.decode_fp8")


@pytest.mark.gpu
def test_what_it_cannot_load_takes_the_portable_kernel(device):
    for first, second, refusal in (
        ((V4, 6, 5, 12, [20, 9]), (V4, 9, 7, 8, [90, 3]), "cache block stride: got 2932 bytes"),
        ((V4, 6, 5, 8, [20, 9]), (V4_FNUZ, 9, 7, 8, [90, 3]), "extra_layout: got planar_fp8/448"),
    ):
        with pytest.raises(ValueError, match=f"^{refusal}"):
            check_case(Case(64, 1, first, second, 0.0), 0, device, impl="hopper.decode_fp8")
        check_case(Case(64, 1, first, second, 0.0), 0, device)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [256, 8])
def test_every_code_and_every_scale(rows):
    """A row's only key comes out as it is stored: NaN codes, scales from 2^-127 to infinity. Whole rows, and split
    ones."""
    cache = allocate_cache(V4, 2, 128, "cuda")
    plane = 128 * V4.token_bytes
    codes = torch.arange(256 * 448, device="cuda").mul(37).remainder(256).view(2, 128, 448).to(torch.uint8)
    codes[:, ::2][(codes[:, ::2] & 0x7F) == 0x7F] = 1
    rest = torch.randn(2, 128, 64, device="cuda").bfloat16().view(torch.uint8)
    cache.flatten(1)[:, :plane] = torch.cat([codes, rest], 2).flatten(1)
    scales = torch.arange(256, device="cuda").view(2, 128, 1) - torch.arange(8, device="cuda")
    cache.flatten(1)[:, plane : plane + 1024] = scales.clamp_min(0).to(torch.uint8).flatten(1)
    spare = 0 if rows == 256 else rows * 1152  # indices that no row has, but for which rows are split
    chosen = config.plan_decode_fp8(packed_decode(rows, 64, V4, rows + spare), H200)
    assert (chosen.waves[0].splits > 1) == (rows == 8)
    q = torch.zeros(rows, 64, 512, device="cuda", dtype=torch.bfloat16)
    bounds = torch.arange(rows + 1, dtype=torch.int32, device="cuda")

    def attended(impl):
        outs = []
        for first in range(0, 256, rows):
            slots = torch.arange(first, first + rows + spare, dtype=torch.int32, device="cuda")
            outs.append(sparse_attn_decode(q, cache, Ragged(slots, bounds), scale=1.0, layout=V4, impl=impl).out)
        return torch.cat(outs)

    got, want = attended("triton"), attended("reference")
    assert torch.equal(got.isnan(), want.isnan()) and not want.isnan().all(2).all()
    got, want = (some.nan_to_num().float().unflatten(2, (2, 256)) for some in (got, want))
    least = (
        1e-37 if rows == 256 else want.abs().amax(3, keepdim=True) * 2**-39 + 1e-37
    )  # partials are fp16, scaled by halves
    assert ((got - want).abs() <= want.abs() * 2**-8 + least).all()
