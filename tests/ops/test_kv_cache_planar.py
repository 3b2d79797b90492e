"""The planar fp8 cache and rings through write and gather: bytes by offset, both flavours, what must stay untouched."""

import math
import struct

import pytest
import torch
from conftest import big
from support.caches import poisoned_cache
from support.extremes import INT_MAX, INT_MIN

from sparse_attn.fp8 import FP8_MAX, fp8_decode
from sparse_attn.layout import PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.kv_cache import gather_kv_cache, write_kv_cache

FLAVOURS = tuple(FP8_MAX)


def rows(layout, count, dtype=torch.bfloat16, seed=0):
    """Values of many magnitudes, with zeros and a group of zeros, as parts of a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, layout.dim + 1, generator=generator) * 10.0 ** torch.linspace(-6, 3, count).unsqueeze(1)
    values[:, 3] = 0
    values[0, : layout.group] = 0
    return values.to(dtype)[:, : layout.latent], values.to(dtype)[:, layout.latent : layout.dim]


def nearest_codes(values, flavour):
    """Codes of fp32 ``values`` by looking at every code: the nearest within the writers' range, the even one of two."""
    every = fp8_decode(torch.arange(256, dtype=torch.uint8), flavour)
    far = (every.abs() <= FP8_MAX[flavour]).logical_not()  # NaN codes too
    distance = (values.unsqueeze(-1) - every.where(~far, 0.0)).abs().masked_fill(far, math.inf)
    nearest = distance == distance.amin(-1, keepdim=True)
    wrong_sign = (torch.arange(256) >= 128) != values.signbit().unsqueeze(-1)
    if flavour == "e4m3fnuz":
        wrong_sign[..., 0] = False  # there is one zero
    odd = torch.arange(256) % 2
    return (nearest * 4 - 2 * wrong_sign.int() - odd).argmax(-1).to(torch.uint8)


def check_bytes(device, impl, flavour, block_size, padding):
    layout = PlanarFp8Layout(448, 64, flavour=flavour)
    cache, memory = poisoned_cache(layout, 3, block_size, device, padding)
    latent, rope = rows(layout, 5)
    slots = [2 * block_size + block_size - 1, -1, block_size // 2, 3 * block_size, INT_MIN]
    write_kv_cache(latent.to(device), rope.to(device), cache, torch.tensor(slots).to(device), layout, impl=impl)
    memory = memory.cpu()
    touched = torch.zeros_like(memory, dtype=torch.bool)
    for row in (0, 2):
        block, token = divmod(slots[row], block_size)
        scales = memory[block, block_size * 576 + 8 * token :][:8].tolist()
        assert scales[7] == 0
        for group in range(7):
            part = latent[row, 64 * group : 64 * group + 64].float()
            exponent = math.ceil(math.log2(max(float(part.abs().max()), 1e-4) / FP8_MAX[flavour]))
            assert scales[group] == exponent + 127
            codes = memory[block, 576 * token + 64 * group :][:64]
            assert torch.equal(codes, nearest_codes(part * 2.0**-exponent, flavour))
        stored = struct.unpack("<64H", bytes(memory[block, 576 * token + 448 :][:128].tolist()))
        assert list(stored) == [bits & 0xFFFF for bits in rope[row].view(torch.int16).tolist()]
        touched[block, 576 * token : 576 * token + 576] = True
        touched[block, block_size * 576 + 8 * token :][:8] = True
    assert (memory[~touched] == 0xFF).all()


BLOCKS = [(1, 0), (1, 568), (2, 560), (64, 64), (69, 12)]


@pytest.mark.parametrize("block_size, padding", BLOCKS)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_bytes_by_offset(flavour, block_size, padding):
    check_bytes("cpu", "reference", flavour, block_size, padding)


@pytest.mark.kernel
@pytest.mark.parametrize("block_size, padding", BLOCKS)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_bytes_by_offset_kernel(device, flavour, block_size, padding):
    check_bytes(device, "triton", flavour, block_size, padding)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "layout", [PlanarFp8Layout(448, 64), PlanarFp8Layout(48, 16, 16, "e4m3fnuz"), PlanarFp8Layout(36, 8, 12)]
)
def test_kernel_writes_the_reference_bytes(device, layout, dtype):
    count = 2000 if big(device) else 12
    latent, rope = (part.clamp(-6e4, 6e4) for part in rows(layout, count, dtype))
    slots = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    both = []
    for impl, where in (("reference", "cpu"), ("triton", device)):
        cache, memory = poisoned_cache(layout, count // 4 + 1, 4, where, 36)
        write_kv_cache(latent.to(where), rope.to(where), cache, slots.to(where), layout, impl=impl)
        both.append(memory.cpu())
    assert torch.equal(*both)


def check_every_code(device, impl, flavour):
    """All 256 codes under four scales, NaN codes included."""
    layout = PlanarFp8Layout(256, 0, group=64, flavour=flavour)
    cache, memory = poisoned_cache(layout, 1, 1, device)
    memory[0, :256] = torch.arange(256)
    for byte in (0, 105, 127, 254):
        memory[0, 256:264] = byte
        indptr = torch.tensor([0, 1], dtype=torch.int32, device=device)
        table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        got = gather_kv_cache(cache, table, indptr, 1, layout, dtype=torch.float32, impl=impl)[0].cpu()
        codes = torch.arange(256).to(torch.uint8).view(getattr(torch, f"float8_{flavour}"))
        exact = codes.float() * 2.0 ** (byte - 127)
        assert torch.equal(got.isnan(), exact.isnan()) and torch.equal(got.nan_to_num(0.5), exact.nan_to_num(0.5))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_code_reads_back(flavour):
    check_every_code("cpu", "reference", flavour)


@pytest.mark.kernel
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_code_reads_back_kernel(device, flavour):
    check_every_code(device, "triton", flavour)


def check_gather(device, impl, layout, block_size):
    """Ordinary tables and rings against slot arithmetic; rows that are not asked for hold NaN."""
    blocks = 7
    if layout.dtype == torch.uint8:
        cache = poisoned_cache(layout, blocks, block_size, padding=36)[0]
    else:
        cache = torch.full((blocks, block_size, layout.row), math.nan, dtype=layout.dtype)
    generator = torch.Generator().manual_seed(block_size)
    values = torch.randn(blocks * block_size, layout.dim, generator=generator)
    table = torch.tensor([[4, 2], [0, -1], [6, 5]], dtype=torch.int32)
    for starts, lengths in ((None, (3, 5, 2 * block_size)), ((9, 2 * block_size - 1, 40), (3, 2, 2 * block_size - 1))):
        indptr = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
        slots = []
        for b, length in enumerate(lengths):
            for n in range(length):
                p = n + (starts[b] if starts else 0)
                column = p // block_size % 2 if starts else p // block_size
                block = int(table[b, column]) if column < 2 else -1
                slots.append(block * block_size + p % block_size if block >= 0 else -1)
        live = sorted({slot for slot in slots if slot >= 0})
        write = values[live][:, : layout.latent], values[live][:, layout.latent :]
        write_kv_cache(*write, cache, torch.tensor(live), layout, impl="reference")
        stored = layout.decode(cache, torch.tensor(live))
        capacity = len(slots) + 3
        begin = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)
        held = cache.untyped_storage().nbytes() // cache.element_size()
        moved = torch.as_strided(torch.as_strided(cache, (held,), (1,)).to(device), cache.shape, cache.stride())
        got = gather_kv_cache(
            moved, table.to(device), indptr.to(device), capacity, layout, starts=begin, dtype=torch.float32, impl=impl
        ).cpu()
        for row in range(capacity):
            slot = slots[row] if row < len(slots) else -1
            want = stored[live.index(slot)] if slot >= 0 else torch.zeros(layout.dim)
            assert torch.equal(got[row], want), (starts, row)


GATHERED = [PlanarFp8Layout(48, 16, 16), PlanarFp8Layout(36, 8, 12, "e4m3fnuz"), PlainLayout("fp32", 24)]


@pytest.mark.parametrize("block_size", [1, 8, 69])
@pytest.mark.parametrize("layout", GATHERED, ids=lambda layout: layout.name)
def test_gather(layout, block_size):
    check_gather("cpu", "reference", layout, block_size)


@pytest.mark.kernel
@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("layout", GATHERED, ids=lambda layout: layout.name)
def test_gather_kernel(device, layout, block_size):
    check_gather(device, "triton", layout, block_size)


def check_extreme_starts(device, impl):
    """Positions below 0 or beyond int32 are none, whatever the ring would make of them."""
    layout = PlainLayout("fp32", 1)
    cache = torch.arange(1.0, 9.0, device=device).reshape(2, 4, 1)
    table = torch.tensor([[1, 0]] * 4, dtype=torch.int32, device=device)
    indptr = torch.tensor([0, 3, 6, 9, 12], dtype=torch.int32, device=device)
    starts = torch.tensor([INT_MAX - 1, INT_MAX, -2, INT_MIN], dtype=torch.int32, device=device)
    got = gather_kv_cache(cache, table, indptr, 13, layout, starts=starts, dtype=torch.float32, impl=impl)
    assert got.flatten().tolist() == [3, 4, 0, 4, 0, 0, 0, 0, 5, 0, 0, 0, 0]


def test_extreme_starts():
    check_extreme_starts("cpu", "reference")


@pytest.mark.kernel
def test_extreme_starts_kernel(device):
    check_extreme_starts(device, "triton")


def test_starts_are_checked():
    layout = PlainLayout("fp32", 8)
    cache, table = torch.zeros(2, 4, 8), torch.zeros(3, 2, dtype=torch.int32)
    indptr = torch.zeros(4, dtype=torch.int32)
    for starts, error in ((torch.zeros(3), TypeError), (torch.zeros(2, dtype=torch.int32), ValueError)):
        with pytest.raises(error, match="starts: got"):
            gather_kv_cache(cache, table, indptr, 4, layout, starts=starts)
    with pytest.raises(ValueError, match="allowed: LatentFp8Layout, PlanarFp8Layout, PlainLayout"):
        gather_kv_cache(cache, table, indptr, 4, "planar")
