"""Decode over two caches under one softmax, and over planar caches: FlashMLA's sparse decode cases, at its levels."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import big
from support.attention import BLOCK_SIZES, V4, V4_FNUZ, Case, check_case, slow_attention
from support.caches import filled_cache
from support.extremes import INF
from support.launched import compiled_case
from support.ragged import ragged_rows

from sparse_attn.cache import allocate_cache
from sparse_attn.device.triton_private import VERSION
from sparse_attn.framework.target import H200
from sparse_attn.layout import IndexFp8Layout, LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention import sparse
from sparse_attn.ops.attention.sparse import reference
from sparse_attn.ops.attention.sparse.portable import config
from sparse_attn.ops.attention.sparse.problem import packed_decode
from sparse_attn.testing import compare
from sparse_attn.testing.ops import opcheck
from sparse_attn.types import Ragged

SMALL = PlanarFp8Layout(48, 16, 16)
SMALL_FNUZ = PlanarFp8Layout(32, 32, 16, flavour="e4m3fnuz")
LAYOUTS = {  # of one dim and value_dim
    "planar": SMALL,
    "planar fnuz": SMALL_FNUZ,
    "planar, narrow groups": PlanarFp8Layout(56, 8, 8),
    "plain bf16": PlainLayout("bf16", 64),
    "plain fp32": PlainLayout("fp32", 64),
    "latent": LatentFp8Layout(64, 0, 32),
}
ODD = PlanarFp8Layout(80, 12, 40), PlanarFp8Layout(60, 32, 12, flavour="e4m3fnuz")  # dims that are no power of two


def union(first, second, q, layouts, caches):
    """Keys of both caches as one matrix, and both ragged rows as one."""
    rows = [
        layout.decode(cache, torch.arange(cache.shape[0] * cache.shape[1])) for layout, cache in zip(layouts, caches)
    ]
    (slots, extra_slots), kept, shifted = map(len, rows), first.indices.long(), second.indices.long()
    kept = torch.where((kept >= 0) & (kept < slots), kept, -1)
    shifted = torch.where((shifted >= 0) & (shifted < extra_slots), shifted + slots, -1)
    pieces, lengths = [], []
    for t in range(q.shape[0]):
        pieces += [kept[first.indptr[t] : first.indptr[t + 1]], shifted[second.indptr[t] : second.indptr[t + 1]]]
        lengths.append(pieces[-2].numel() + pieces[-1].numel())
    indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return torch.cat(rows), Ragged(torch.cat(pieces), indptr)


@pytest.mark.parametrize("names", list(itertools.product(LAYOUTS, LAYOUTS)), ids=" and ".join)
def test_reference_is_attention_over_the_union(names):
    torch.manual_seed(0)
    layouts = [LAYOUTS[name] for name in names]
    first, second = ragged_rows([9, 0, 20, 0], 30), ragged_rows([0, 11, 4, 0], 28, seed=1)
    caches = [
        filled_cache(layouts[0], 6, 5, first, "cpu", padding=64),
        filled_cache(layouts[1], 4, 7, second, "cpu", seed=1, padding=4),
    ]
    q, sink = torch.randn(4, 3, 64), torch.tensor([0.5, -INF, INF])
    for chosen in (None, sink):
        got = sparse.sparse_attn_decode(
            q, caches[0], first, scale=0.2, layout=layouts[0], extra_cache=caches[1], extra_ragged=second,
            extra_layout=layouts[1], sink=chosen,
        )  # fmt: skip
        out, lse = slow_attention(q, *union(first, second, q, layouts, caches), 0.2, 64, chosen)
        torch.testing.assert_close(got.out.double(), out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.lse.double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [SMALL, SMALL_FNUZ, *ODD], ids=lambda layout: layout.name)
def test_reference_reads_planar_caches(layout):
    ragged = ragged_rows([9, 0, 20], 30)
    cache = filled_cache(layout, 6, 5, ragged, "cpu", padding=64)
    q = torch.randn(3, 2, layout.dim)
    got = sparse.sparse_attn_decode(q, cache, ragged, scale=0.2, layout=layout)
    out, lse = slow_attention(q, layout.decode(cache, torch.arange(30)), ragged, 0.2, layout.dim)
    torch.testing.assert_close(got.out.double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse.double(), lse, rtol=1e-5, atol=1e-5)


def test_a_key_of_both_caches_counts_twice():
    layout = PlainLayout("fp32", 2)
    cache = torch.tensor([[[0.0, 0.0], [3.0, 0.0]]])
    both, last = (
        Ragged(torch.tensor(ids, dtype=torch.int32), torch.tensor([0, len(ids)], dtype=torch.int32))
        for ids in ([0, 1], [1])
    )
    got = sparse.sparse_attn_decode(
        torch.zeros(1, 1, 2), cache, both, scale=1.0, layout=layout, extra_cache=cache, extra_ragged=last,
        extra_layout=layout,
    )  # fmt: skip
    torch.testing.assert_close(got.out[0, 0], torch.tensor([2.0, 0.0]))
    torch.testing.assert_close(got.lse, torch.full((1, 1), math.log(3)))


def two_caches(device="cpu"):
    """Arguments of the op: three tokens, a planar cache and a plain one."""
    first, second = ragged_rows([5, 0, 8], 20, device=device), ragged_rows([2, 0, 70], 21, seed=1, device=device)
    main = filled_cache(SMALL, 4, 5, first, device)
    extra = filled_cache(LAYOUTS["plain bf16"], 3, 7, second, device)
    q, sink = torch.randn(3, 2, 64, device=device), torch.randn(2, device=device)
    return q, main, *first, 0.3, SMALL.name, extra, *second, LAYOUTS["plain bf16"].name, sink, False


def test_opcheck_reference():
    opcheck("sparse_attn_decode", *two_caches(), "reference")


def test_compiles_once_for_all_sizes():
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def step(q, main, first, extra, second, sink):
        return sparse.sparse_attn_decode(
            q, main, first, scale=0.3, layout=SMALL, extra_cache=extra, extra_ragged=second,
            extra_layout=PlainLayout("bf16", 64), sink=sink,
        )  # fmt: skip

    for tokens, blocks, extra_blocks in ((3, 11, 6), (5, 9, 17), (9, 30, 13)):
        with torch.compiler.set_stance("fail_on_recompile" if tokens > 3 else "default"):
            first, second = ragged_rows([4] * tokens, 20), ragged_rows([tokens] * tokens, 20, seed=1)
            main = filled_cache(SMALL, blocks, 5, first, "cpu")
            extra = filled_cache(PlainLayout("bf16", 64), extra_blocks, 7, second, "cpu")
            q, sink = torch.randn(tokens, 2, 64), torch.randn(2)
            got = step(q, main, first, extra, second, sink)
            want = reference.sparse_attn_decode(
                q, main, *first, 0.3, SMALL.name, extra, *second, "plain/bf16/64+0", sink
            )
            assert torch.equal(got.out, want[0]) and torch.equal(got.lse, want[1])


RAGGED = Ragged(torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
GOOD = dict(
    q=torch.zeros(2, 4, 64), cache=torch.zeros(2, 3, 64), ragged=RAGGED, scale=1.0, layout=PlainLayout("fp32", 64),
    extra_cache=allocate_cache(SMALL, 2, 5, "cpu"), extra_ragged=RAGGED, extra_layout=SMALL,
)  # fmt: skip


@pytest.mark.parametrize(
    "change,name,kind",
    [
        (dict(extra_cache=None), "extra_cache", ValueError),
        (dict(extra_ragged=None), "extra_ragged", ValueError),
        (dict(extra_layout=None), "extra_layout", ValueError),
        (dict(extra_cache="text"), "extra_cache", TypeError),
        (dict(extra_cache=torch.zeros(2, 5, 80)), "extra_cache", TypeError),
        (dict(extra_cache=torch.zeros(2, 5, 81, dtype=torch.uint8)), "extra_cache", ValueError),
        (dict(extra_cache=torch.zeros(2, 0, 88, dtype=torch.uint8)), "extra_cache", ValueError),
        (dict(extra_ragged=(1, 2)), "extra_ragged", TypeError),
        (dict(extra_ragged=Ragged(torch.zeros(4), RAGGED.indptr)), "extra_ragged.indices", TypeError),
        (dict(extra_ragged=Ragged(RAGGED.indices, RAGGED.indices)), "extra_ragged.indptr", ValueError),
        (dict(extra_layout="planar"), "extra_layout", ValueError),
        (dict(extra_layout=IndexFp8Layout(64)), "extra_layout", ValueError),
        (dict(extra_layout=PlainLayout("fp32", 48, 16), extra_cache=torch.zeros(2, 5, 64)), "extra_layout", ValueError),
        (dict(extra_layout=PlainLayout("fp32", 32), extra_cache=torch.zeros(2, 5, 32)), "extra_layout", ValueError),
    ],
)
def test_errors_name_the_argument(change, name, kind):
    sparse.sparse_attn_decode(**GOOD)
    with pytest.raises(kind, match=rf"^{name}: got"):
        sparse.sparse_attn_decode(**(GOOD | change))


def test_splits_count_the_keys_of_both_caches():
    def splits(main, extra):
        return config.plan(packed_decode(4, 64, V4, 4 * (main + extra), extra=V4), H200).splits

    assert splits(128, 0) == 2 and splits(0, 512) == 8 and splits(128, 512) == 10


CASES = [
    *(
        Case(
            4, 1 + at % 3, (SMALL, 1 + 130 // size, size, 16 * at, [9, 40]),
            (SMALL_FNUZ, 2, other, 4 * at, [70, 0]), 0.4,
        )
        for at, (size, other) in enumerate(zip(BLOCK_SIZES, BLOCK_SIZES[3:] + BLOCK_SIZES[:3]))
    ),
    Case(2, 1, (V4, 3, 5, 8, [30, 0, 3]), (V4_FNUZ, 2, 64, 576, [5, 70, 0]), -INF),
    Case(2, 1, (V4_FNUZ, 3, 69, 0, [90]), None, INF),
    Case(17, 2, (SMALL, 6, 5, 0, [20, 0]), (SMALL, 9, 7, 4, [0, 0]), INF, torch.float32),
    Case(3, 2, (SMALL, 6, 5, 0, [20, 9]), (SMALL_FNUZ, 9, 7, 4, [90, 3]), 0.1, torch.float16),
    Case(3, 3, (SMALL, 6, 5, 0, [20, 70]), (SMALL_FNUZ, 9, 7, 4, [90, 3]), 0.1, invalid=True),
    Case(3, 1, (SMALL, 6, 5, 0, [0, 0]), (SMALL, 9, 7, 4, [0, 0]), INF),
    Case(5, 1, (ODD[0], 6, 5, 0, [20, 9]), (ODD[1], 9, 7, 4, [90, 3]), -INF),
    Case(5, 1, (ODD[1], 6, 5, 12, [20, 9]), None, dtype=torch.float32),
    Case(5, 1, (LatentFp8Layout(64, 16, 32), 6, 5, 4, [20, 9]), (PlainLayout("bf16", 64, 16), 9, 7, 8, [90, 3]), 0.0),
    Case(5, 1, (PlainLayout("bf16", 48, 16), 6, 5, 8, [66]), (LatentFp8Layout(48, 16, 48, "e4m3fnuz"), 9, 7, 0, [90])),
    *(
        Case(2, 1, (one, 6, 5, 16, [20, 9]), (other, 9, 7, 16, [70, 3]), 0.3)
        for one, other in itertools.pairwise([*LAYOUTS.values(), SMALL])
    ),
    # One token, whose tiles are shared out: all in the first cache, all in the second, in both.
    *(
        Case(2, 1, (SMALL, 9, 61, 0, [first]), (SMALL, 9, 64, 0, [second]), 0.2)
        for first, second in ((300, 0), (0, 300), (130, 200), (1, 260), (260, 1), (64, 192))
    ),
]  # fmt: skip


def flashmla_cases():
    """The sizes of FlashMLA's suite, each with each; every combination of what makes a kernel of its own would compile
    for minutes, so formats, heads and sinks take turns."""
    sizes = [(512, 64, 2), (512, 64, 64), (512, 64, 69), (1024, 576, 2), (1024, 576, 61), (2046, 2048, 2),
             (2046, 2048, 64), (2046, 2048, 576), (650, 576, 53), (4096, 512, 256)]  # fmt: skip
    plain = PlainLayout("bf16", 512)
    layouts = [(V4, V4), (V4, V4_FNUZ), (V4_FNUZ, plain), (plain, V4)]
    for at, (first, second) in enumerate(itertools.product(sizes, [*sizes, None])):
        requests = (4, 74, 1, 321)[at // 4 % 4]
        halves = []
        for part, layout in zip((first, second), layouts[at % 4]):
            if part is None:
                halves.append(None)
                continue
            keys, top_k, block_size = part
            padding = -block_size * layout.row % 576 if isinstance(layout, PlanarFp8Layout) else 0
            lengths = ([top_k, 0, max(1, top_k - at), top_k // 3] * 81)[:requests]
            halves.append((layout, -(-keys // block_size), block_size, padding, lengths))
        heads = 16 if at % 20 == 0 else (64, 128)[at // 4 % 2]
        sink = None if at % 7 == 0 else (0.5, INF, -INF)[at % 3]
        yield Case(heads, 1 + at % 3, *halves, sink, invalid=at % 11 == 5)
    for heads, extra, block_size in itertools.product((64, 128), (512, 1024), (64, 2)):  # V4's shapes
        entries = (V4, 19200 // block_size, block_size, 560, [extra] * 64)
        yield Case(heads, 2, (V4, 300, 64, 64, [128] * 64), entries, 0.3)


@pytest.mark.kernel
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_kernel(case, device, dirty_workspace):
    check_case(case, CASES.index(case), device)


PARTS = 12  # for that many processes


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_kernel_at_flashmla_sizes(part, device):
    for at, case in enumerate(flashmla_cases() if big(device) else ()):
        if at % PARTS == part:
            check_case(case, at, device)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", [V4, V4_FNUZ, SMALL, ODD[0]], ids=lambda layout: layout.name)
def test_kernel_dequantises_every_code_and_scale(layout, device):
    """A row's only key comes out as it is stored."""
    generator = torch.Generator().manual_seed(0)
    cache = allocate_cache(layout, 4, 9, device)
    slots = 36
    plane = 9 * layout.token_bytes
    rest = torch.randn(4, 9, layout.rope, generator=generator).bfloat16().view(torch.uint8)
    codes = torch.randint(0, 256, (4, 9, layout.latent), generator=generator, dtype=torch.uint8)
    nan = codes == 0x80 if layout.flavour == "e4m3fnuz" else (codes & 0x7F) == 0x7F
    codes[nan] = 1
    scales = torch.arange(slots * layout.scale_bytes).mul(5).remainder(241).view(4, 9, -1)  # finite values only
    scales[..., layout.groups :] = 255
    cache.flatten(1)[:, :plane] = torch.cat([codes, rest], 2).flatten(1).to(device)
    cache.flatten(1)[:, plane:] = scales.to(torch.uint8).flatten(1).to(device)
    ids = torch.arange(slots, dtype=torch.int32, device=device)
    ragged = Ragged(ids, torch.arange(slots + 1, dtype=torch.int32, device=device))
    q = torch.zeros(slots, 1, layout.dim, device=device)
    got = sparse.sparse_attn_decode(q, cache, ragged, scale=1.0, layout=layout, impl="triton")
    want = layout.decode(cache, ids)
    torch.testing.assert_close(got.out[:, 0], want, rtol=1e-6, atol=torch.finfo(torch.float32).tiny)


@pytest.mark.kernel
def test_opcheck_kernel(device):
    opcheck("sparse_attn_decode", *two_caches(device), "triton")


@pytest.mark.kernel
def test_kernel_with_an_empty_cache(device):
    """A cache of no blocks, indices of no capacity, no tokens at all."""
    one = ragged_rows([3, 2], 10, device=device, wild=False)
    none = Ragged(torch.zeros(0, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int32, device=device))
    main = filled_cache(SMALL, 2, 5, one, device)
    q = torch.randn(2, 3, 64, device=device)
    alone = sparse.sparse_attn_decode(q, main, one, scale=0.3, layout=SMALL, impl="triton")
    for cache, ragged in ((main[:0], one), (main, none)):
        for swapped in (False, True):
            first, second = ((main, one), (cache, ragged))[:: -1 if swapped else 1]
            got = sparse.sparse_attn_decode(
                q, *first, scale=0.3, layout=SMALL, extra_cache=second[0], extra_ragged=second[1], extra_layout=SMALL,
                impl="triton",
            )  # fmt: skip
            torch.testing.assert_close(got, alone)
    empty = Ragged(none.indices, none.indptr[:1])
    got = sparse.sparse_attn_decode(
        q[:0], main, empty, scale=0.3, layout=SMALL, extra_cache=main, extra_ragged=empty, extra_layout=SMALL,
        impl="triton",
    )  # fmt: skip
    assert got.out.shape == (0, 3, 64) and got.lse.shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [2, 64, 3_700_000])
def test_offsets_beyond_2_31_bytes(block_size):
    blocks = max(2, 3_800_000 // block_size) if block_size < 100_000 else 1
    cache = allocate_cache(V4, blocks, block_size, "cuda")
    slots = torch.tensor([blocks * block_size - 1 - 3 * at for at in range(5)], device="cuda")
    V4.encode(cache, slots, torch.randn(5, 512, device="cuda") / 10)
    ragged = Ragged(slots.int(), torch.tensor([0, 5], dtype=torch.int32, device="cuda"))
    q = torch.randn(1, 64, 512, device="cuda", dtype=torch.bfloat16)
    got = sparse.sparse_attn_decode(
        q, cache, ragged, scale=0.05, layout=V4, extra_cache=cache, extra_ragged=ragged, extra_layout=V4
    )
    others = (cache, *ragged, V4.name)
    want = reference.sparse_attn_decode(q, cache, *ragged, 0.05, V4.name, *others, None)
    compare.assert_close(got.out, want[0], compare.DECODE_OUT)
    compare.assert_close(got.lse, want[1], compare.DECODE_LSE)


@pytest.mark.aot
def test_kernel_on_hopper():
    """64 heads, one row, two caches."""
    compiled, *_ = compiled_case("sparse_attn_decode: deepseek_v4, batch 1, 64 heads", kernel="portable")
    few = 32 if VERSION < (3, 9) else 112
    assert compiled.spill_bytes <= few, "a few scalars may spill; a tile that does takes hundreds"
    assert compiled.shared_memory <= H200.shared_memory
    assert compiled.count("HGMMA")
    assert compiled.count(r"LDGSTS\.E\.BYPASS\.128") >= 9, "a token's nine parts are copied in 16-byte pieces"
