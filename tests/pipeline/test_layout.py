"""Cache bytes, by offset."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from support.caches import poisoned_cache

from sparse_attn.cache import allocate_cache, check_cache
from sparse_attn.fp8 import FP8_MAX, FP8_NAN, ceil_pow2, exponent_of, fp8_decode, fp8_encode, fp8_quantise, power_of
from sparse_attn.framework.torch_private import is_view
from sparse_attn.layout import IndexFp8Layout, LatentFp8Layout, PlainLayout, PlanarFp8Layout, parse_layout


def test_names_round_trip():
    layouts = [PlainLayout("fp32", 64, 16), IndexFp8Layout(128, "e4m3fnuz", "raw"), LatentFp8Layout(512, 64)]
    layouts += [PlanarFp8Layout(448, 64), LatentFp8Layout(512, 64, scale_rule="pow2", scale_floor=2.0**-126)]
    assert [parse_layout(layout.name) for layout in layouts] == layouts
    assert_expected_inline(
        "\n".join(f"{layout.name}: {layout.row} elements a token" for layout in layouts),
        """\
plain/fp32/64+16: 80 elements a token
index_fp8/128/e4m3fnuz/raw: 132 elements a token
latent_fp8/512+64/128/e4m3fn/raw: 656 elements a token
planar_fp8/448+64/64/e4m3fn: 584 elements a token
latent_fp8/512+64/128/e4m3fn/pow2/1.1754943508222875e-38: 656 elements a token""",
    )


@pytest.mark.parametrize(
    "name",
    ["planar/3", "planar_fp8/448+64/60/e4m3fn", "planar_fp8/15+2/5/e4m3fn", "plain/fp64/3+0", "plain/bf16/3",
     "index_fp8/128/e5m2/raw", "index_fp8/128/e4m3fn/pow3", "latent_fp8/512+64/96/e4m3fn/raw"],
)  # fmt: skip
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match=f"^layout: got '{name.replace('+', '.')}'"):
        parse_layout(name)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: PlainLayout("fp64", 8), "dtype_name: got 'fp64', allowed: 'bf16', 'fp16', 'fp32'"),
        (lambda: PlainLayout("bf16", 0), "latent: got 0, allowed: at least 1"),
        (lambda: PlainLayout("bf16", 8, -1), "rope: got -1, allowed: at least 0"),
        (lambda: IndexFp8Layout(0), "dim: got 0, allowed: at least 1"),
        (lambda: IndexFp8Layout(8, "e5m2"), "flavour: got 'e5m2', allowed: 'e4m3fn', 'e4m3fnuz'"),
        (lambda: IndexFp8Layout(8, scale_rule="up"), "scale_rule: got 'up', allowed: 'raw', 'pow2'"),
        (lambda: LatentFp8Layout(100, 8, 64), "latent: got 100, allowed: multiples of the scale group 64"),
        (lambda: LatentFp8Layout(64, 8, 0), "group: got 0, allowed: at least 1"),
        (lambda: LatentFp8Layout(6, 2, 2), "latent: got 6, allowed: multiples of 4, fp32 scales stand behind it"),
        (lambda: LatentFp8Layout(8, 1, 4), "rope: got 1, allowed: even numbers, fp32 scales stand in the next record"),
        (
            lambda: LatentFp8Layout(64, 8, 64, scale_floor=0.0),
            "scale_floor: got 0.0, allowed: 1.1754943508222875e-38 to 1",
        ),
        (
            lambda: LatentFp8Layout(64, 8, 64, scale_floor=math.nan),
            "scale_floor: got nan, allowed: 1.1754943508222875e-38 to 1",
        ),
        (lambda: PlanarFp8Layout(15, 2, 5), "latent: got 15, allowed: even numbers, bf16 values stand behind it"),
    ],
)
def test_what_no_layout_can_be_is_refused(make, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()
    with pytest.raises(TypeError, match="^layout: got int, allowed: a name$"):
        parse_layout(5)


@pytest.mark.parametrize("block_size,padding", [(1, 0), (1, 12), (2, 4), (64, 0), (64, 480), (69, 8)])
@pytest.mark.parametrize("rule", ["raw", "pow2"])
def test_index_bytes_are_planar(block_size, padding, rule):
    layout = IndexFp8Layout(128, scale_rule=rule)
    cache, memory = poisoned_cache(layout, 3, block_size, padding=padding)
    values = torch.randn(2, 128) * torch.tensor([[3.0], [0.01]])
    slots = torch.tensor([2 * block_size + block_size - 1, block_size // 2])
    layout.encode(cache, slots, values)
    codes, scales = fp8_quantise(values, "e4m3fn", rule, 1e-4)
    touched = torch.zeros_like(memory, dtype=torch.bool)
    for slot, code, scale in zip(slots.tolist(), codes, scales.tolist()):
        block, token = divmod(slot, block_size)
        assert torch.equal(memory[block, token * 128 : (token + 1) * 128], code)
        at = block_size * 128 + 4 * token
        assert bytes(memory[block, at : at + 4].tolist()) == struct.pack("<f", scale)
        touched[block, token * 128 : (token + 1) * 128] = True
        touched[block, at : at + 4] = True
    assert (memory[~touched] == 0xFF).all()
    torch.testing.assert_close(layout.decode(cache, slots), codes.view(torch.float8_e4m3fn).float() * scales[:, None])


@pytest.mark.parametrize("block_size,padding", [(1, 0), (2, 12), (64, 0), (69, 64)])
@pytest.mark.parametrize("rule", ["raw", "pow2"])
def test_latent_bytes_are_interleaved(block_size, padding, rule):
    layout = LatentFp8Layout(512, 64, scale_rule=rule)
    cache, memory = poisoned_cache(layout, 2, block_size, padding=padding)
    values = torch.randn(1, 576) * 2
    slot = block_size + block_size - 1
    layout.encode(cache, torch.tensor([slot]), values)
    codes, scales = fp8_quantise(values[:, :512].reshape(1, 4, 128), "e4m3fn", rule, 1e-30)
    record = memory[1, (block_size - 1) * 656 : block_size * 656]
    assert torch.equal(record[:512], codes.flatten())
    assert bytes(record[512:528].tolist()) == struct.pack("<4f", *scales.flatten().tolist())
    assert torch.equal(record[528:].view(torch.bfloat16), values[0, 512:].bfloat16())
    memory[1, (block_size - 1) * 656 : block_size * 656] = 0xFF
    assert (memory == 0xFF).all()


def test_small_record_golden():
    layout = LatentFp8Layout(4, 2, group=2, scale_rule="pow2")
    cache = allocate_cache(layout, 1, 1, "cpu")
    layout.encode(cache, torch.tensor([0]), torch.tensor([[448.0, -1.0, 0.0, 0.5, 1.0, -2.0]]))
    record = cache.flatten().tolist()
    assert_expected_inline(
        f"codes {record[:4]}\nscales {[record[4:8], record[8:12]]}\nrope {record[12:]}",
        """\
codes [126, 184, 0, 120]
scales [[0, 0, 128, 63], [0, 0, 0, 59]]
rope [128, 63, 0, 192]""",
    )


def test_small_index_block_golden():
    lines = []
    for flavour, rule in (("e4m3fn", "pow2"), ("e4m3fnuz", "raw")):
        layout = IndexFp8Layout(4, flavour, rule)
        cache, memory = poisoned_cache(layout, 1, 2, padding=4)
        layout.encode(cache, torch.tensor([1, 0]), torch.tensor([[448.0, -1.0, 0.0, 3.0], [0.0, 0.0, -0.0, 0.0]]))
        block = memory[0].tolist()
        lines.append(f"{flavour} codes {[block[:4], block[4:8]]}")
        lines.append(f"scales {[block[8:12], block[12:16]]} behind {block[16:]}")
    assert_expected_inline(
        "\n".join(lines),
        """\
e4m3fn codes [[0, 0, 128, 0], [126, 184, 0, 68]]
scales [[0, 0, 128, 52], [0, 0, 128, 63]] behind [255, 255, 255, 255]
e4m3fnuz codes [[0, 0, 0, 0], [126, 184, 0, 68]]
scales [[173, 172, 239, 52], [0, 0, 0, 64]] behind [255, 255, 255, 255]""",
    )


def test_planar_blocks_hold_every_token():
    layout = IndexFp8Layout(32, "e4m3fnuz", "raw")
    for block_size in (1, 2, 64, 69):
        cache, _ = poisoned_cache(layout, 2, block_size, padding=4 * block_size)
        values = torch.randn(2 * block_size, 32)
        slots = torch.randperm(2 * block_size)
        layout.encode(cache, slots, values)
        codes, scales = fp8_quantise(values, "e4m3fnuz", "raw", 1e-4)
        got = layout.decode_parts(cache, slots)
        assert torch.equal(got[0], codes) and torch.equal(got[1], scales)


@pytest.mark.parametrize("flavour", list(FP8_MAX))
def test_every_code_round_trips(flavour):
    codes = torch.arange(256, dtype=torch.uint8)
    values = fp8_decode(codes, flavour)
    writable = values.abs() <= FP8_MAX[flavour]
    again = fp8_encode(values, flavour)
    assert torch.equal(again[writable], codes[writable])
    nan = [0x7F, 0xFF] if flavour == "e4m3fn" else [0x80]
    assert codes[values.isnan()].tolist() == nan


def test_fnuz_bytes_are_those_of_fn_and_the_scale_doubles():
    values = torch.randn(5, 128)
    fn, fnuz = fp8_quantise(values, "e4m3fn", "raw", 1e-4), fp8_quantise(values, "e4m3fnuz", "raw", 1e-4)
    zero = (fn[0] & 0x7F) == 0
    assert torch.equal(fn[0][~zero], fnuz[0][~zero])
    assert torch.equal(fnuz[1], 2 * fn[1])


def test_zero_vectors_have_the_floor_as_their_scale():
    codes, scales = fp8_quantise(torch.zeros(1, 128), "e4m3fn", "pow2", 1e-4)
    assert codes.abs().max() == 0 and scales.item() == 2.0**-22
    layout = LatentFp8Layout(8, 2, group=4)
    cache = allocate_cache(layout, 1, 1, "cpu")
    layout.encode(cache, torch.tensor([0]), torch.zeros(1, 10))
    assert cache.flatten().tolist() == [0] * 8 + 2 * list(struct.pack("<f", 2.0**-126)) + [0] * 4
    assert not layout.decode(cache, torch.tensor([0])).any()


def test_a_floor_named_or_not_is_the_same_layout():
    for rule, floor in (("raw", 2.0**-126), ("pow2", 1e-4)):
        assert LatentFp8Layout(512, 64, scale_rule=rule) == LatentFp8Layout(512, 64, scale_rule=rule, scale_floor=floor)
        assert parse_layout(f"latent_fp8/512+64/128/e4m3fn/{rule}").amax_floor == 448 * floor
        assert (
            parse_layout(f"latent_fp8/512+64/128/e4m3fn/{rule}/{floor}").name == f"latent_fp8/512+64/128/e4m3fn/{rule}"
        )
    assert replace(LatentFp8Layout(512, 64), scale_rule="pow2") == LatentFp8Layout(512, 64, scale_rule="pow2")
    with pytest.raises(ValueError, match="^layout: got 'latent_fp8/8.0/4/e4m3fn/raw/much': could not convert"):
        parse_layout("latent_fp8/8+0/4/e4m3fn/raw/much")


# Largest magnitudes of a group: on either side of 0.0448 (448 times 1e-4) and of 448 times 2**-13, where the scale that
# is the floor rounded up ends, and of 448 times 2**-14; small ones; the smallest number, whose quotient by FP8_MAX is
# none.
AMAX = [0.0, 2.0**-149, 2.0**-126, 1e-30, 0.02734, 0.02735, 0.0447, 0.0449, 0.0546, 0.0547, 1.0]


def scales_of(layout, amax=AMAX):
    """Of one group with each of these, by the bytes that its record has."""
    cache = allocate_cache(layout, 1, len(amax), "cpu")
    values = torch.tensor(amax).unsqueeze(1) * torch.tensor([0.5, -1.0, 0.25, 0.0])
    layout.encode(cache, torch.arange(len(amax)), values)
    return [struct.unpack("<f", bytes(record[4:8]))[0] for record in cache[0].tolist()]


def test_scale_floors_golden():
    """In powers of two: of today's peers' rule, of its predecessor's, and of the rule that rounds nothing."""
    layouts = [LatentFp8Layout(4, 0, 4, scale_rule="pow2", scale_floor=floor) for floor in (None, 2.0**-126)]
    layouts.append(LatentFp8Layout(4, 0, 4))
    columns = [[math.log2(scale) for scale in scales_of(layout)] for layout in layouts]
    lines = (f"{amax:.4g}: {now:g} {old:g} {raw:.2f}" for amax, now, old, raw in zip(AMAX, *columns))
    assert_expected_inline(
        "\n".join(lines),
        """\
0: -13 -126 -126.00
1.401e-45: -13 -126 -126.00
1.175e-38: -13 -126 -126.00
1e-30: -13 -108 -108.47
0.02734: -13 -14 -14.00
0.02735: -13 -13 -14.00
0.0447: -13 -13 -13.29
0.0449: -13 -13 -13.28
0.0546: -13 -13 -13.00
0.0547: -12 -12 -13.00
1: -8 -8 -8.81""",
    )


@pytest.mark.parametrize("flavour", FP8_MAX)
def test_the_scale_is_clamped_before_it_is_rounded_up(flavour):
    """By the peers' formula, 2^ceil(log2(max(amax / FP8_MAX, 1e-4)))."""
    layout = LatentFp8Layout(4, 0, 4, flavour, "pow2")
    want = [2.0 ** math.ceil(math.log2(max(amax / FP8_MAX[flavour], 1e-4))) for amax in AMAX]
    assert scales_of(layout) == want and min(want) == 2.0**-13


NOT_FINITE = [math.nan, -math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("rule", ["raw", "pow2"])
@pytest.mark.parametrize("flavour", FP8_MAX)
def test_what_is_not_finite_becomes_nan_and_touches_nothing_else(flavour, rule):
    values = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)) * 3
    want_codes, want_scales = fp8_quantise(values.clone().index_fill_(1, torch.tensor([5]), 0.0), flavour, rule, 1e-4)
    values[:, 5] = torch.tensor(NOT_FINITE)
    codes, scales = fp8_quantise(values, flavour, rule, 1e-4)
    assert codes[:, 5].tolist() == [FP8_NAN[flavour]] * 4 and fp8_decode(codes, flavour)[:, 5].isnan().all()
    want_codes[:, 5] = FP8_NAN[flavour]
    assert torch.equal(codes, want_codes) and torch.equal(scales, want_scales)
    codes, scales = fp8_quantise(torch.tensor(NOT_FINITE).unsqueeze(0), flavour, rule, 1e-4)
    assert codes.tolist() == [[FP8_NAN[flavour]] * 4] and scales.item() < 1e-6


def test_ceil_pow2():
    values = torch.tensor([1.0, 1.0000001, 0.75, 2.0**-22, 3.0])
    assert ceil_pow2(values).tolist() == [1.0, 2.0, 1.0, 2.0**-22, 4.0]


@pytest.mark.parametrize(
    "cache,kind",
    [
        (torch.zeros(2, 3, 132), TypeError),
        (torch.zeros(2, 3, 131, dtype=torch.uint8), ValueError),
        (torch.zeros(2, 0, 132, dtype=torch.uint8), ValueError),
        (torch.zeros(2, 3, 264, dtype=torch.uint8)[:, :, ::2], ValueError),
        (torch.zeros(2, 6, 132, dtype=torch.uint8)[:, ::2], ValueError),
        (torch.zeros(396, 2, dtype=torch.uint8).t().unflatten(1, (3, 132)), ValueError),
        (None, TypeError),
    ],
)
def test_check_cache_names_the_cache(cache, kind):
    with pytest.raises(kind, match="^cache: got"):
        check_cache("cache", cache, IndexFp8Layout(128))


def test_misaligned_fp8_blocks_are_refused():
    memory = torch.zeros(2, 3 * 132 + 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="^cache: got"):
        check_cache("cache", memory[:, :396].unflatten(1, (3, 132)), IndexFp8Layout(128))


@pytest.mark.parametrize(
    "layout,block_size,padding,shift",
    [
        (IndexFp8Layout(30), 1, 2, 0),  # scales at byte 30
        (IndexFp8Layout(128), 3, 0, 1),
        (PlanarFp8Layout(8, 2, 4), 3, 2, 0),  # records of 12 bytes
        (PlanarFp8Layout(8, 1, 4), 3, 1, 0),  # of 10
        (PlanarFp8Layout(8, 1, 4), 2, 0, 1),
        (LatentFp8Layout(8, 2, 4), 2, 0, 2),
    ],
)
def test_misaligned_scales_are_refused(layout, block_size, padding, shift):
    size = block_size * layout.row
    memory = torch.zeros(4 * (size + padding) + shift, dtype=torch.uint8)[shift:].view(4, size + padding)
    with pytest.raises(ValueError, match="^cache: got"):
        check_cache("cache", memory[:, :size].unflatten(1, (block_size, layout.row)), layout)


@pytest.mark.parametrize("padded_rows", (False, True))
@pytest.mark.parametrize(
    "layout",
    [
        PlainLayout("bf16", 16),
        PlainLayout("fp32", 1),
        LatentFp8Layout(8, 2, 4),
        PlanarFp8Layout(8, 2, 4),
        IndexFp8Layout(8),
    ],
    ids=lambda layout: layout.name,
)
def test_strides_that_lead_nowhere_are_any(layout, padded_rows):
    """Of dims of one, and of a cache without blocks; torch calls those contiguous."""
    memory, row = torch.zeros(24 * layout.row, dtype=layout.dtype), layout.row
    for odd in (0, 1, 7, 10**6 + 1):
        for shape, strides in (
            ((6, 1, row), (row, odd, 1)),
            ((1, 6, row), (odd, row, 1)),
            ((0, 6, row), (odd, odd, odd)),
        ):
            last = odd if row == 1 else strides[2]
            cache = torch.as_strided(memory, shape, (*strides[:2], last))
            assert cache.is_contiguous()
            check_cache("cache", cache, layout, padded_rows=padded_rows)
    for shape, strides in (((2, 1, row), (row - 1, row, 1)), ((1, 2, row), (2 * row, row - 1, 1))):
        with pytest.raises(ValueError, match="^cache: got strides"):
            check_cache("cache", torch.as_strided(memory, shape, strides), layout, padded_rows=padded_rows)


def test_rows_may_lie_apart_only_where_a_caller_takes_them():
    layout = LatentFp8Layout(8, 2, 4)  # 20 bytes
    memory = torch.zeros(6, 5, 26, dtype=torch.uint8)
    apart = torch.as_strided(memory, (6, 5, 20), (130, 24, 1))
    with pytest.raises(ValueError, match=r"^cache: got strides \(130, 24, 1\), allowed: \(at least 100, 20, 1\)"):
        check_cache("cache", apart, layout)
    with pytest.raises(ValueError, match="^cache: got block stride 130"):
        check_cache("cache", apart, layout, padded_rows=True)
    check_cache("cache", torch.as_strided(memory, (6, 5, 20), (116, 24, 1)), layout, padded_rows=True)
    for strides, got in (((260, 26, 1), "row stride 26"), ((100, 16, 1), "strides"), ((112, 24, 1), "strides")):
        with pytest.raises(ValueError, match=f"^cache: got {got}"):
            check_cache("cache", torch.as_strided(memory, (2, 5, 20), strides), layout, padded_rows=True)
    planar = torch.zeros(2, 4, 40, dtype=torch.uint8)[..., :20]
    with pytest.raises(ValueError, match="^cache: got strides"):
        check_cache("cache", planar, IndexFp8Layout(16), padded_rows=True)


@pytest.mark.parametrize("block_size,padding", [(1, 0), (1, 568), (2, 560), (64, 64), (69, 12)])
@pytest.mark.parametrize("flavour", FP8_MAX)
def test_planar_bytes(block_size, padding, flavour):
    layout = PlanarFp8Layout(448, 64, flavour=flavour)
    cache, memory = poisoned_cache(layout, 3, block_size, padding=padding)
    values = torch.randn(2, 512, generator=torch.Generator().manual_seed(0)) * torch.tensor([[3.0], [0.01]])
    values[0, 64:128] = 0
    slots = torch.tensor([2 * block_size + block_size - 1, block_size // 2])
    layout.encode(cache, slots, values)
    touched = torch.zeros_like(memory, dtype=torch.bool)
    rounded = values.bfloat16()
    for slot, row in zip(slots.tolist(), rounded):
        block, token = divmod(slot, block_size)
        scales = memory[block, block_size * 576 + token * 8 :][:8].tolist()
        for group in range(7):
            part = row[group * 64 : (group + 1) * 64].float()
            amax = max(float(part.abs().max()), 1e-4)
            exponent = math.ceil(math.log2(amax / FP8_MAX[flavour]))
            assert scales[group] == exponent + 127
            codes = memory[block, token * 576 + group * 64 :][:64]
            assert torch.equal(codes, fp8_encode(part / 2.0**exponent, flavour))
        assert scales[7] == 0
        rope = struct.pack("<64H", *[bits & 0xFFFF for bits in row[448:].view(torch.int16).tolist()])
        assert bytes(memory[block, token * 576 + 448 :][:128].tolist()) == rope
        touched[block, token * 576 : (token + 1) * 576] = True
        touched[block, block_size * 576 + token * 8 :][:8] = True
    assert (memory[~touched] == 0xFF).all()
    got = layout.decode(cache, slots)
    torch.testing.assert_close(got[:, :448], rounded[:, :448].float(), rtol=2**-4, atol=1e-5)
    assert torch.equal(got[:, 448:], rounded[:, 448:].float())


def test_planar_blocks_stand_apart():
    layout = PlanarFp8Layout(448, 64)
    assert_expected_inline(
        "\n".join(f"{size}: {size * layout.row} -> {layout.block_stride(size)}" for size in (1, 2, 64, 69)),
        """\
1: 584 -> 1152
2: 1168 -> 1728
64: 37376 -> 37440
69: 40296 -> 40320""",
    )
    cache = allocate_cache(layout, 3, 2, "cpu")
    assert cache.shape == (3, 2, 584) and cache.stride() == (1728, 584, 1)
    assert bytes(cache.untyped_storage()) == bytes(3 * 1728)  # what pads them is there, and zero
    assert not is_view(cache)
    check_cache("cache", cache, layout)


@pytest.mark.parametrize("block_size", [1, 2, 3, 64, 77, 128])
def test_what_can_be_made_can_be_used_whatever_the_block_size(block_size):
    """Records of 2 more than a multiple of 4 bytes among them: such blocks, or every second one, start between
    words."""
    for latent in range(2, 54, 2):
        for rope in (0, 1, 2, 3, 16):
            layout = PlanarFp8Layout(latent, rope, 2)
            cache = allocate_cache(layout, 3, block_size, "cpu")
            check_cache("cache", cache, layout)
            slots, values = torch.arange(3 * block_size), torch.ones(3 * block_size, layout.dim)
            layout.encode(cache, slots, values)
            assert torch.equal(layout.decode(cache, slots), values)
    for layout in (LatentFp8Layout(52, 4, 4), IndexFp8Layout(52), PlainLayout("bf16", 5)):
        check_cache("cache", allocate_cache(layout, 3, block_size, "cpu"), layout)


def test_index_blocks_that_no_cache_can_have_are_not_made():
    for block_size in (1, 3, 2):
        if block_size * 30 % 4:
            with pytest.raises(
                ValueError, match=f"^block_size: got {block_size} x 30 code bytes before a block's fp32 scales"
            ):
                allocate_cache(IndexFp8Layout(30), 3, block_size, "cpu")
        else:
            check_cache("cache", allocate_cache(IndexFp8Layout(30), 3, block_size, "cpu"), IndexFp8Layout(30))
    with pytest.raises(ValueError, match="^block_size: got 0, allowed: at least 1"):
        allocate_cache(PlainLayout("bf16", 4), 3, 0, "cpu")


def test_every_exponent_byte_is_its_power_of_two():
    powers = power_of(torch.arange(256, dtype=torch.int64).to(torch.uint8)).double()
    assert torch.equal(powers[:255], 2.0 ** (torch.arange(255).double() - 127)) and powers[255] == math.inf
    assert torch.equal(exponent_of(powers[1:255].float()), torch.arange(1, 255).to(torch.uint8))
