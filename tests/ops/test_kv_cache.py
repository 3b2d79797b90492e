"""The KV cache: reference against the layout, kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from support.caches import check_nans, nans, poison, poisoned_cache, same
from support.extremes import INT_MAX, INT_MIN
from support.launched import compiled_case

from sparse_attn.layout import IndexFp8Layout, LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.kv_cache import gather_kv_cache, reference, write_kv_cache
from sparse_attn.testing.ops import opcheck, schema

LAYOUTS = [
    LatentFp8Layout(512, 64),
    LatentFp8Layout(64, 16, 64, scale_rule="pow2"),
    LatentFp8Layout(96, 8, 32, flavour="e4m3fnuz"),
    PlainLayout("bf16", 64, 16),
    PlainLayout("fp32", 48, 0),
    PlainLayout("fp16", 40, 8),
    PlanarFp8Layout(48, 16, 16),
    PlanarFp8Layout(36, 4, 4, "e4m3fnuz"),
    PlanarFp8Layout(50, 2, 2),  # records of 54 bytes
]


def test_round_trip_within_quantisation():
    values = torch.randn(6, 576)
    for rule in ("raw", "pow2"):
        layout = LatentFp8Layout(512, 64, scale_rule=rule)
        cache, memory = poisoned_cache(layout, 3, 2, padding=16)
        slots = torch.tensor([5, -1, 0, 6, 3])
        write_kv_cache(values[:, :512], values[:, 512:], cache, slots, layout)
        table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
        rows = gather_kv_cache(cache, table, torch.tensor([0, 6], dtype=torch.int32), 6, layout, dtype=torch.float32)
        for token, slot in ((0, 5), (2, 0), (4, 3)):
            # half a step of e4m3 (3 mantissa bits), or of its smallest values
            bound = values[token].abs() / 16 + values[token].abs().max() * 2.0**-16
            assert ((rows[slot] - values[token]).abs() <= bound).all()
        assert (memory[:, 2 * 656 :] == 0xFF).all() and (cache[2, 0] == 0xFF).all()


def test_schemas():
    assert_expected_inline(
        "\n".join(schema(name) for name in ("write_kv_cache", "gather_kv_cache")),
        """\
sparse_attn::write_kv_cache(Tensor latent, Tensor rope, Tensor(a!) cache, Tensor slot_mapping, str layout, str impl) -> ()
sparse_attn::gather_kv_cache(Tensor cache, Tensor block_table, Tensor kv_indptr, Tensor? starts, SymInt capacity, str layout, ScalarType dtype, str impl) -> Tensor""",
    )


def check_opcheck(impl, device):
    for layout in (LAYOUTS[1], LAYOUTS[3], LAYOUTS[4], LAYOUTS[6]):
        cache = torch.zeros(3, 4, layout.row, dtype=layout.dtype, device=device)
        values = torch.randn(4, layout.dim, device=device).bfloat16()
        slots = torch.tensor([1, -1, 7], device=device)
        latent, rope = values.split([layout.latent, layout.rope], 1)
        opcheck("write_kv_cache", latent, rope, cache, slots, layout.name, impl)
        table = torch.tensor([[2, 0], [1, 9]], dtype=torch.int32, device=device)
        indptr = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
        for starts in (None, torch.tensor([6, -1], dtype=torch.int32, device=device)):
            opcheck("gather_kv_cache", cache, table, indptr, starts, 10, layout.name, torch.bfloat16, impl)


def test_opcheck_reference():
    check_opcheck("reference", "cpu")


@pytest.mark.parametrize(
    "change,name,kind",
    [
        (dict(latent=torch.zeros(3, 512, dtype=torch.int32)), "latent", TypeError),
        (dict(latent=torch.zeros(3, 64)), "latent", ValueError),
        (dict(rope=torch.zeros(3, 32)), "rope", ValueError),
        (dict(rope=torch.zeros(3, 64, dtype=torch.bfloat16)), "rope", TypeError),
        (dict(cache=torch.zeros(2, 4, 128, dtype=torch.uint8)), "cache", ValueError),
        (dict(slot_mapping=torch.zeros(4, dtype=torch.int64)), "slot_mapping", ValueError),
        (dict(slot_mapping=torch.zeros(2, dtype=torch.int16)), "slot_mapping", TypeError),
        (dict(layout=IndexFp8Layout(512)), "layout", ValueError),
    ],
)
def test_write_errors_name_the_argument(change, name, kind):
    arguments = dict(
        latent=torch.zeros(3, 512),
        rope=torch.zeros(3, 64),
        cache=torch.zeros(2, 4, 656, dtype=torch.uint8),
        slot_mapping=torch.zeros(3, dtype=torch.int64),
        layout=LAYOUTS[0],
    )
    with pytest.raises(kind, match=rf"^{name}: got"):
        write_kv_cache(**(arguments | change))


@pytest.mark.parametrize(
    "change,name,kind",
    [
        (dict(block_table=torch.zeros(2, 3)), "block_table", TypeError),
        (dict(kv_indptr=torch.zeros(2, dtype=torch.int32)), "kv_indptr", ValueError),
        (dict(capacity=-1), "capacity", ValueError),
        (dict(dtype=torch.int8), "dtype", ValueError),
    ],
)
def test_gather_errors_name_the_argument(change, name, kind):
    arguments = dict(
        cache=torch.zeros(2, 4, 656, dtype=torch.uint8),
        block_table=torch.zeros(2, 3, dtype=torch.int32),
        kv_indptr=torch.zeros(3, dtype=torch.int32),
        capacity=4,
        layout=LAYOUTS[0],
    )
    with pytest.raises(kind, match=rf"^{name}: got"):
        gather_kv_cache(**(arguments | change))


@pytest.mark.kernel
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_write_kernel_writes_the_same_bytes(device, layout):
    torch.manual_seed(0)
    tokens = 3000 if device.type == "cuda" else 20
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        values = (torch.randn(tokens, 2 * layout.dim) * torch.rand(tokens, 1) * 4).to(dtype)[:, : layout.dim]
        values[3] = 0
        blocks, block_size = tokens // 4, 7
        slots = torch.randperm(blocks * block_size)[: tokens - 3]
        slots[:3] = torch.tensor([-1, INT_MIN, blocks * block_size])
        cache, memory = poisoned_cache(layout, blocks, block_size, device, 12)
        want, want_memory = poisoned_cache(layout, blocks, block_size, "cpu", 12)
        if dtype == torch.float16:
            slots = slots.clamp_min(-7).int()
        moved, strided = values.to(device), torch.stack([slots, torch.zeros_like(slots)], 1).to(device)[:, 0]
        write_kv_cache(moved[:, : layout.latent], moved[:, layout.latent :], cache, strided, layout, impl="triton")
        write_kv_cache(values[:, : layout.latent], values[:, layout.latent :], want, slots, layout, impl="reference")
        assert same(memory, want_memory)


EDGES = [
    *(LatentFp8Layout(16, 4, 8, flavour, rule) for flavour in ("e4m3fn", "e4m3fnuz") for rule in ("raw", "pow2")),
    LatentFp8Layout(16, 4, 8, scale_rule="pow2", scale_floor=2.0**-126),
    LatentFp8Layout(20, 4, 4, scale_rule="pow2", scale_floor=0.5),
    PlanarFp8Layout(16, 4, 8),
    PlanarFp8Layout(12, 4, 4, "e4m3fnuz"),
]


def edge_rows(layout, dtype):
    """Rows whose groups hold NaN and infinities beside numbers or alone, nothing, or numbers near where scales step."""
    rows = torch.randn(40, layout.dim, generator=torch.Generator().manual_seed(2)).double()
    special = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])
    rows[:4, 3], rows[4:8, : layout.group] = special, special.unsqueeze(1)
    rows[8, ::3], rows[9, 1 : layout.latent] = torch.nan, torch.inf
    rows[10], rows[11] = 0, 1e38
    steps = torch.tensor([2.0**-149, 2.0**-126, 1e-30, 0.02734, 0.02735, 0.0447, 0.0449, 0.0546875, 0.0547, 448, 3e38])
    rows[12:23] *= steps.unsqueeze(1) / rows[12:23].abs().amax(1, keepdim=True)
    if dtype == torch.bfloat16:
        rows[12:14] = 0  # Triton's interpreter reads subnormal bf16 as something else
    rows[:, layout.latent :] = special
    return rows.to(dtype)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", EDGES, ids=lambda layout: layout.name)
def test_write_kernel_at_the_edges(device, layout):
    for dtype in (torch.bfloat16, torch.float32):
        rows, slots = edge_rows(layout, dtype), torch.arange(40)
        (cache, memory), (want, want_memory) = (poisoned_cache(layout, 10, 4, where, 4) for where in (device, "cpu"))
        moved = rows.to(device)
        write_kv_cache(
            moved[:, : layout.latent], moved[:, layout.latent :], cache, slots.to(device), layout, impl="triton"
        )
        write_kv_cache(rows[:, : layout.latent], rows[:, layout.latent :], want, slots, layout, impl="reference")
        assert same(memory, want_memory)
        got = layout.decode(cache.cpu(), slots)[:, : layout.latent]
        written = (rows.bfloat16() if isinstance(layout, PlanarFp8Layout) else rows)[:, : layout.latent]
        assert torch.equal(got.isnan(), ~written.isfinite())


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=pytest.mark.kernel)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_nan_of_any_bits_is_written_as_one(layout, impl, device):
    device = device if impl == "triton" else "cpu"
    slots = torch.arange(20)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows = nans(dtype, 20, layout.dim)
        latent, rope = (part.to(device) for part in rows.split([layout.latent, layout.rope], 1))
        (cache, memory), (want, want_memory) = (poisoned_cache(layout, 5, 4, where, 8) for where in (device, "cpu"))
        write_kv_cache(latent, rope, cache, slots.to(device), layout, impl=impl)
        layout.encode(want, slots, rows)
        assert same(memory, want_memory), dtype
        if isinstance(layout, PlainLayout):
            check_nans(rows, want.flatten(0, 1))
        else:
            start, width = layout.rope_offset, 2 * layout.rope
            size = layout.token_bytes if isinstance(layout, PlanarFp8Layout) else layout.row
            stored = want_memory[:, : 4 * size].unflatten(1, (4, size))[..., start : start + width]
            check_nans(rows[:, layout.latent :], stored.flatten(0, 1).contiguous().view(torch.bfloat16))


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
        for capacity, dtype in ((1, torch.float16), (50, torch.float32), (75, torch.bfloat16)):
            want = reference.gather_kv_cache(cache, table, indptr, None, capacity, layout.name, dtype)
            got = torch.ops.sparse_attn.gather_kv_cache(
                cache.to(device), table.to(device), indptr.to(device), None, capacity, layout.name, dtype, "triton"
            )
            assert same(got, want)


APART = [LatentFp8Layout(64, 16, 64), PlainLayout("bf16", 64, 16), PlainLayout("fp16", 40, 8)]


def padded_rows(layout, device):
    """A cache of 3 blocks of 5 whose records have 12 elements between them, poison everywhere, and its memory."""
    memory = torch.full((3, 5, layout.row + 12), poison(layout.dtype), dtype=layout.dtype, device=device)
    return memory[..., : layout.row], memory


def check_padded_rows(impl, device, layout):
    generator = torch.Generator().manual_seed(3)
    latent, rope = (torch.randn(9, width, generator=generator).to(device) for width in (layout.latent, layout.rope))
    slots = torch.tensor([14, 0, -1, 5, 15, 3, 9, 1, 4], device=device)
    (cache, memory), want = padded_rows(layout, device), padded_rows(layout, device)[0].contiguous()
    write_kv_cache(latent, rope, cache, slots, layout, impl=impl)
    write_kv_cache(latent, rope, want, slots, layout, impl=impl)
    assert same(cache, want) and same(memory[..., layout.row :], padded_rows(layout, device)[1][..., layout.row :])
    table, indptr = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2, 0], [1, 9]], [0, 7, 15]))
    for starts in (None, indptr[1:]):
        rows = (gather_kv_cache(x, table, indptr, 17, layout, starts=starts, impl=impl) for x in (cache, want))
        assert same(*rows)


@pytest.mark.parametrize("layout", APART, ids=lambda layout: layout.name)
def test_rows_that_lie_apart_reference(layout):
    check_padded_rows("reference", "cpu", layout)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", APART, ids=lambda layout: layout.name)
def test_rows_that_lie_apart_kernel(device, layout):
    check_padded_rows("triton", device, layout)


def check_empty(impl, device):
    for layout in LAYOUTS:
        cache, memory = poisoned_cache(layout, 2, 3, device)
        latent, rope = torch.zeros(2, layout.dim, device=device).split([layout.latent, layout.rope], 1)
        no_slots, slots = torch.zeros(0, dtype=torch.int64, device=device), torch.tensor([0, 1], device=device)
        before = memory.clone()
        write_kv_cache(latent[:0], rope[:0], cache, no_slots, layout, impl=impl)
        write_kv_cache(latent, rope, cache, no_slots, layout, impl=impl)
        write_kv_cache(latent, rope, cache[:0], slots, layout, impl=impl)
        assert same(memory, before)
        for blocks, requests, width in ((2, 0, 3), (2, 1, 0), (0, 1, 3)):
            table = torch.zeros(requests, width, dtype=torch.int32, device=device)
            indptr = torch.tensor([0] + [4] * requests, dtype=torch.int32, device=device)
            for capacity in (0, 5):
                rows = gather_kv_cache(cache[:blocks], table, indptr, capacity, layout, impl=impl)
                assert rows.shape == (capacity, layout.dim) and not rows.any()


def test_empty_reference():
    check_empty("reference", "cpu")


@pytest.mark.kernel
def test_empty_kernel(device):
    check_empty("triton", device)


TRACED = PlanarFp8Layout(32, 8, 16)


def test_traces_without_breaks_or_recompiles():
    def step(latent, rope, cache, slots, table, indptr, starts):
        write_kv_cache(latent, rope, cache, slots, TRACED)
        capacity = 3 * latent.shape[0]
        pages = gather_kv_cache(cache, table, indptr, capacity, TRACED)
        return pages, gather_kv_cache(cache, table, indptr, capacity, TRACED, starts=starts)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5, 9):
        latent, rope = torch.randn(tokens, 32), torch.randn(tokens, 8)
        slots = torch.arange(tokens) * 2
        table = torch.arange(2 * tokens, dtype=torch.int32).reshape(2, tokens)
        indptr, starts = torch.tensor([0, 4, 2 * tokens]).int(), torch.tensor([1, 3 * tokens]).int()
        caches = [torch.zeros(2 * tokens, 4, TRACED.row, dtype=torch.uint8) for _ in range(2)]
        with torch.compiler.set_stance("default" if tokens < 9 else "fail_on_recompile"):
            got = compiled(latent, rope, caches[0], slots, table, indptr, starts)
        want = step(latent, rope, caches[1], slots, table, indptr, starts)
        assert torch.equal(*caches) and all(map(torch.equal, got, want))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [64, 3_400_000])
def test_offsets_beyond_int32(block_size):
    layout = LatentFp8Layout(512, 64)
    blocks = 3_400_000 // block_size
    cache = torch.empty(blocks, block_size, layout.row, dtype=torch.uint8, device="cuda")
    slots = torch.arange(blocks * block_size - 7, blocks * block_size, device="cuda")
    values = torch.randn(7, 576, device="cuda")
    write_kv_cache(values[:, :512], values[:, 512:], cache, slots, layout)
    want = torch.zeros(1, 7, layout.row, dtype=torch.uint8, device="cuda")
    layout.encode(want, torch.arange(7, device="cuda"), values)
    assert torch.equal(cache[-1, -7:], want[0])
    length = block_size if blocks == 1 else 64
    table = torch.tensor([[blocks - 1]], dtype=torch.int32, device="cuda")
    indptr = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    rows = gather_kv_cache(cache, table, indptr, length, layout, dtype=torch.float32)
    assert torch.equal(rows[-7:], layout.decode(cache, slots))


@pytest.mark.kernel
def test_opcheck_kernel(device):
    check_opcheck("triton", device)


@pytest.mark.aot
@pytest.mark.parametrize("form", ["deepseek_v32", "deepseek_v4", "deepseek_v4 bf16"])
def test_kernels_on_hopper(form):
    """They load and store 16 bytes at once, and divide as the reference does."""
    (gather,), (write,) = (compiled_case(f"{name}_kv_cache: {form}") for name in ("gather", "write"))
    assert gather.spill_bytes == write.spill_bytes == 0
    assert gather.count(r"LDG\.E\.128") and gather.count(r"STG\.E\.128")
    assert form == "deepseek_v4" or not gather.count(r"LDG\.E\.U8\b")  # ue8m0 scales are bytes
    assert not gather.count(r"LDG\.E\.U16\b|STG\.E\.U(8|16)\b")
    assert ("div.rn.f32" in write.assembly["ptx"]) == ("bf16" not in form) and "div.full" not in write.assembly["ptx"]
