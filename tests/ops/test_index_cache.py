"""The index cache: reference against the layout, kernels against the reference, byte for byte."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from support.caches import check_nans, nans, poisoned_cache, same
from support.extremes import INT_MAX, INT_MIN
from support.launched import compiled_case

from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, LatentFp8Layout, PlainLayout
from sparse_attn.ops.indexer.keys import gather_indexer_k, indexer_k_quant_and_cache, reference
from sparse_attn.testing.ops import opcheck, schema

LAYOUTS = [
    IndexFp8Layout(128),
    IndexFp8Layout(32, scale_rule="raw"),
    IndexFp8Layout(24, "e4m3fnuz"),
    PlainLayout("bf16", 32),
    IndexMxfp4Layout(96),
    PlainLayout("fp32", 20),
    PlainLayout("fp16", 24),
]


def test_slots_and_padding():
    layout = PlainLayout("fp32", 4)
    cache, memory = poisoned_cache(layout, 2, 3, padding=5)
    k = torch.arange(20.0).reshape(5, 4)
    indexer_k_quant_and_cache(k, cache, torch.tensor([4, -1, 6, 0]), layout)  # 6 lies beyond the cache
    assert torch.equal(cache[1, 1], k[0]) and torch.equal(cache[0, 0], k[3])
    assert int(memory.isnan().sum()) == memory.numel() - 8


def test_gather_reads_the_layout():
    layout = IndexFp8Layout(8)
    cache, _ = poisoned_cache(layout, 3, 2)
    indexer_k_quant_and_cache(torch.randn(6, 8), cache, torch.arange(6), layout)
    table = torch.tensor([[2, 0], [1, INT_MAX], [0, 0]], dtype=torch.int32)
    got = gather_indexer_k(cache, table, torch.tensor([0, 3, 6, 6], dtype=torch.int32), 8, layout)
    codes, scales = layout.decode_parts(cache, torch.tensor([4, 5, 0, 2, 3]))
    assert torch.equal(got.keys[:5], codes) and torch.equal(got.scales[:5], scales)
    assert got.keys[5:].abs().max() == 0 and got.scales[5:].tolist() == [0.0] * 3


def test_schemas():
    assert_expected_inline(
        "\n".join(schema(name) for name in ("indexer_k_quant_and_cache", "gather_indexer_k")),
        """\
sparse_attn::indexer_k_quant_and_cache(Tensor k, Tensor(a!) cache, Tensor slot_mapping, str layout, str impl) -> ()
sparse_attn::gather_indexer_k(Tensor cache, Tensor block_table, Tensor kv_indptr, SymInt capacity, str layout, str impl) -> (Tensor keys, Tensor scales)""",
    )


def check_padded_rows(impl, device):
    layout = PlainLayout("bf16", 24)
    memory = torch.full((3, 5, 40), torch.nan, dtype=torch.bfloat16, device=device)
    cache, want = memory[..., :24], torch.full((3, 5, 24), torch.nan, dtype=torch.bfloat16, device=device)
    k, slots = torch.randn(4, 24, device=device), torch.tensor([14, 0, -1, 6], device=device)
    table, indptr = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2, 0], [1, 9]], [0, 7, 12]))
    for x in (cache, want):
        indexer_k_quant_and_cache(k, x, slots, layout, impl=impl)
    assert same(cache, want) and memory[..., 24:].isnan().all()
    assert same(*(gather_indexer_k(x, table, indptr, 14, layout, impl=impl).keys for x in (cache, want)))


def test_rows_that_lie_apart_reference():
    check_padded_rows("reference", "cpu")


@pytest.mark.kernel
def test_rows_that_lie_apart_kernel(device):
    check_padded_rows("triton", device)


def check_opcheck(impl, device):
    for layout in (LAYOUTS[0], LAYOUTS[3], LAYOUTS[4]):
        cache = torch.zeros(3, 4, layout.row, dtype=layout.dtype, device=device)
        slots = torch.tensor([1, -1, 7], device=device)
        k = torch.randn(4, layout.dim, device=device).bfloat16()
        opcheck("indexer_k_quant_and_cache", k, cache, slots, layout.name, impl)
        table = torch.tensor([[2, 0], [1, 9]], dtype=torch.int32, device=device)
        indptr = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
        opcheck("gather_indexer_k", cache, table, indptr, 10, layout.name, impl)


def test_opcheck_reference():
    check_opcheck("reference", "cpu")


@pytest.mark.parametrize(
    "change,name,kind",
    [
        (dict(k=torch.zeros(3, 128, dtype=torch.int32)), "k", TypeError),
        (dict(k=torch.zeros(3, 64)), "k", ValueError),
        (dict(k=torch.zeros(128, 3).t()), "k", ValueError),
        (dict(cache=torch.zeros(2, 4, 128, dtype=torch.uint8)), "cache", ValueError),
        (dict(slot_mapping=torch.zeros(4, dtype=torch.int64)), "slot_mapping", ValueError),
        (dict(slot_mapping=torch.zeros(2, dtype=torch.int16)), "slot_mapping", TypeError),
        (dict(layout=LatentFp8Layout(512, 64)), "layout", ValueError),
    ],
)
def test_insert_errors_name_the_argument(change, name, kind):
    arguments = dict(
        k=torch.zeros(3, 128),
        cache=torch.zeros(2, 4, 132, dtype=torch.uint8),
        slot_mapping=torch.zeros(3, dtype=torch.int64),
        layout=LAYOUTS[0],
    )
    with pytest.raises(kind, match=rf"^{name}: got"):
        indexer_k_quant_and_cache(**(arguments | change))


@pytest.mark.parametrize(
    "change,name,kind",
    [
        (dict(block_table=torch.zeros(2, dtype=torch.int32)), "block_table", ValueError),
        (dict(kv_indptr=torch.zeros(2, dtype=torch.int32)), "kv_indptr", ValueError),
        (dict(kv_indptr=torch.zeros(3)), "kv_indptr", TypeError),
        (dict(capacity=-1), "capacity", ValueError),
    ],
)
def test_gather_errors_name_the_argument(change, name, kind):
    arguments = dict(
        cache=torch.zeros(2, 4, 132, dtype=torch.uint8),
        block_table=torch.zeros(2, 3, dtype=torch.int32),
        kv_indptr=torch.zeros(3, dtype=torch.int32),
        capacity=4,
        layout=LAYOUTS[0],
    )
    with pytest.raises(kind, match=rf"^{name}: got"):
        gather_indexer_k(**(arguments | change))


@pytest.mark.kernel
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_insert_kernel_writes_the_same_bytes(device, layout):
    torch.manual_seed(0)
    tokens = 5000 if device.type == "cuda" else 40
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        k = (torch.randn(tokens, 2 * layout.dim) * torch.rand(tokens, 1) * 4).to(dtype)[:, : layout.dim]
        k[3] = 0
        blocks, block_size = tokens // 4, 7
        slots = torch.randperm(blocks * block_size)[: tokens - 3]
        slots[:3] = torch.tensor([-1, INT_MIN, blocks * block_size])
        cache, memory = poisoned_cache(layout, blocks, block_size, device, 12)
        want, want_memory = poisoned_cache(layout, blocks, block_size, "cpu", 12)
        if dtype == torch.float16:
            slots = slots.clamp_min(-7).int()
        strided = torch.stack([slots, torch.zeros_like(slots)], 1).to(device)[:, 0]
        indexer_k_quant_and_cache(k.to(device), cache, strided, layout, impl="triton")
        indexer_k_quant_and_cache(k, want, slots, layout, impl="reference")
        assert same(memory, want_memory)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_gather_kernel_equals_reference(device, layout):
    torch.manual_seed(0)
    cache, _ = poisoned_cache(layout, 9, 5, padding=8)
    layout.encode(cache, torch.arange(45), torch.randn(45, layout.dim))
    table = torch.randint(0, 9, (5, 4), dtype=torch.int32)
    table[0, 1], table[3, 0], table[3, 1] = -1, INT_MAX, INT_MIN
    for indptr in ([0, 12, 12, 12, 25, 44], [0, 0, 0, 0, 0, 0], [0, 3, 30, 31, 32, 70]):
        indptr = torch.tensor(indptr, dtype=torch.int32)
        for capacity in (0, 1, 50, 75):
            want = reference.gather_indexer_k(cache, table, indptr, capacity, layout.name)
            got = torch.ops.sparse_attn.gather_indexer_k(
                cache.to(device), table.to(device), indptr.to(device), capacity, layout.name, "triton"
            )
            assert same(got[0], want[0]) and same(got[1], want[1])


def check_empty(impl, device):
    for layout in LAYOUTS:
        cache, memory = poisoned_cache(layout, 2, 3, device)
        nothing = torch.zeros(0, layout.dim, device=device)
        some = torch.zeros(2, layout.dim, device=device)
        no_slots, slots = torch.zeros(0, dtype=torch.int64, device=device), torch.tensor([0, 1], device=device)
        before = memory.clone()
        indexer_k_quant_and_cache(nothing, cache, no_slots, layout, impl=impl)
        indexer_k_quant_and_cache(some, cache, no_slots, layout, impl=impl)
        indexer_k_quant_and_cache(some, cache[:0], slots, layout, impl=impl)
        assert same(memory, before)
        for blocks, requests, width in ((2, 0, 3), (2, 1, 0), (0, 1, 3)):
            table = torch.zeros(requests, width, dtype=torch.int32, device=device)
            indptr = torch.tensor([0] + [4] * requests, dtype=torch.int32, device=device)
            for capacity in (0, 5):
                got = gather_indexer_k(cache[:blocks], table, indptr, capacity, layout, impl=impl)
                mxfp4 = isinstance(layout, IndexMxfp4Layout)
                assert got.keys.shape == (capacity, layout.dim // 2 if mxfp4 else layout.dim) and not got.keys.any()
                if isinstance(layout, IndexFp8Layout):
                    assert got.scales.shape == (capacity,) and not got.scales.any()
                elif mxfp4:
                    assert got.scales.shape == (capacity, 3) and not got.scales.any()
                else:
                    assert got.scales is None


def test_empty_reference():
    check_empty("reference", "cpu")


@pytest.mark.kernel
def test_empty_kernel(device):
    check_empty("triton", device)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [64, 17_000_000])
def test_offsets_beyond_int32(block_size):
    layout = IndexFp8Layout(128)
    blocks = 17_000_000 // block_size
    cache = torch.empty(blocks, block_size, layout.row, dtype=torch.uint8, device="cuda")
    slots = torch.arange(blocks * block_size - 7, blocks * block_size, device="cuda")
    k = torch.randn(7, 128, device="cuda")
    indexer_k_quant_and_cache(k, cache, slots, layout)
    codes, scales = layout.decode_parts(cache, slots)
    want, _ = poisoned_cache(layout, 1, 7, "cuda")
    layout.encode(want, torch.arange(7, device="cuda"), k)
    assert torch.equal(codes, want.flatten()[: 7 * 128].unflatten(0, (7, 128)))
    length = block_size if blocks == 1 else 64
    table = torch.tensor([[blocks - 1]], dtype=torch.int32, device="cuda")
    indptr = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    got = gather_indexer_k(cache, table, indptr, length, layout)
    assert torch.equal(got.keys[-7:], codes) and torch.equal(got.scales[-7:], scales)


@pytest.mark.kernel
@pytest.mark.parametrize("flavour", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("rule", ["pow2", "raw"])
def test_insert_kernel_at_the_edges(device, rule, flavour):
    layout = IndexFp8Layout(24, flavour, rule)
    k = torch.randn(12, 24, generator=torch.Generator().manual_seed(2))
    special = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])
    k[:4, 3], k[4:8] = special, special.unsqueeze(1)
    k[8, ::3], k[9], k[10], k[11] = torch.nan, 0, 1e-30, 3e38
    (cache, memory), (want, want_memory) = (poisoned_cache(layout, 3, 4, where) for where in (device, "cpu"))
    indexer_k_quant_and_cache(k.to(device), cache, torch.arange(12, device=device), layout, impl="triton")
    indexer_k_quant_and_cache(k, want, torch.arange(12), layout, impl="reference")
    assert same(memory, want_memory)
    assert torch.equal(layout.decode(cache.cpu(), torch.arange(12)).isnan(), ~k.isfinite())


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=pytest.mark.kernel)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_nan_of_any_bits_is_written_as_one(layout, impl, device):
    device = device if impl == "triton" else "cpu"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        k = nans(dtype, 20, layout.dim)
        (cache, memory), (want, want_memory) = (poisoned_cache(layout, 5, 4, where, 8) for where in (device, "cpu"))
        indexer_k_quant_and_cache(k.to(device), cache, torch.arange(20, device=device), layout, impl=impl)
        layout.encode(want, torch.arange(20), k)
        assert same(memory, want_memory), dtype
        if isinstance(layout, PlainLayout):
            check_nans(k, want.flatten(0, 1))


@pytest.mark.kernel
def test_opcheck_kernel(device):
    check_opcheck("triton", device)


@pytest.mark.aot
def test_kernels_on_hopper():
    (gather,), (insert,) = (compiled_case(f"{name}: fp8") for name in ("gather_indexer_k", "indexer_k_quant_and_cache"))
    assert gather.spill_bytes == insert.spill_bytes == 0
    assert gather.count(r"LDG\.E\.128") and gather.count(r"STG\.E\.128")
    assert "div.rn.f32" in insert.assembly["ptx"] and "div.full" not in insert.assembly["ptx"]
