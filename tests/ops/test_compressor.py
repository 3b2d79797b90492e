"""The compressor: pooling against plain Python and transformers, every way to cut a sequence, and the kernels."""

import math

import pytest
import torch
from conftest import big
from expecttest import assert_expected_inline
from support.caches import check_nans, nans
from support.compressor import FORMS, INT_MAX, INT_MIN, LAYOUTS, PLAIN, World

from sparse_attn.cache import allocate_cache
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.compressor import compress_and_cache
from sparse_attn.ops.layers.rope import rope_table
from sparse_attn.testing.ops import opcheck, schema

KERNEL = pytest.param("triton", marks=(pytest.mark.kernel, pytest.mark.sampled(4)))
BOTH = pytest.mark.parametrize("impl", ["reference", KERNEL])
EACH_FORM = pytest.mark.parametrize("ratio, overlap", FORMS)
EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


@pytest.fixture
def where(impl, device):
    """Options of a World: which implementation, and on what."""
    return dict(impl=impl, device=device if impl == "triton" else "cpu")


@BOTH
@EACH_LAYOUT
@EACH_FORM
def test_entries(where, ratio, overlap, layout):
    world = World(ratio, overlap, layout, lengths=(21, 9, 3), cache_block=3, **where)
    world.step([(r, 0, len(kv)) for r, kv in enumerate(world.kv)], padding=(1, 2))
    for request in range(2):
        world.check(request)
    world.check_state()
    world.check_canaries()


def check_same(whole, parts):
    """Entries of two worlds bit for bit; the state of the second."""
    for request in range(len(whole.kv)):
        assert torch.equal(whole.entries(request), parts.entries(request))
    parts.check_state()
    parts.check_canaries()


@BOTH
@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (5, 1), (7, 2, 9)])
@EACH_FORM
def test_steps_make_no_difference(where, ratio, overlap, sizes):
    """With rings as short as allowed."""
    options = where | dict(lengths=(17, 9, 4))
    check_same(World(ratio, overlap, **options).cut((64,)), World(ratio, overlap, **options).cut(sizes))


BORDERS = [
    (4, True, range(1, 14)), (8, False, range(1, 18)), (128, False, [*range(1, 4), *range(124, 132), *range(252, 260)]),
]  # fmt: skip


@pytest.mark.parametrize("ratio, overlap, borders", BORDERS)
def test_borders_make_no_difference(ratio, overlap, borders):
    """Two steps, wherever the first one ends."""
    options = dict(layout=PlainLayout("fp32", 16), lengths=(max(borders) + 5,))
    whole = World(ratio, overlap, **options).cut((512,))
    for border in borders:
        check_same(whole, World(ratio, overlap, **options).cut((border, 512)))


@pytest.mark.kernel
@pytest.mark.parametrize("ratio, overlap, borders", BORDERS)
def test_borders_make_no_difference_to_kernels(device, ratio, overlap, borders):
    borders = borders if big(device) else range(ratio - 1, ratio + 2)
    options = dict(layout=PlainLayout("fp32", 16), lengths=(max(borders) + 3,), device=device, impl="triton")
    whole = World(ratio, overlap, **options).cut((512,))
    for border in borders:
        check_same(whole, World(ratio, overlap, **options).cut((border, 512)))


@BOTH
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@EACH_FORM
def test_rejected_tokens_are_overwritten(where, ratio, overlap, next_n):
    options = where | dict(lengths=(17, 9, 3), slack=next_n - 1)
    check_same(World(ratio, overlap, **options).cut((64,)), World(ratio, overlap, **options).speculate(next_n))


@BOTH
@pytest.mark.parametrize("ring", [(4, 2), (3, 4), (1, 9), (4, 5)])
@EACH_FORM
def test_rings_of_several_blocks(where, ratio, overlap, ring):
    """The last one is as wide as the sequences: an ordinary paged cache."""
    options = where | dict(lengths=(20, 9))
    check_same(World(ratio, overlap, **options).cut((64,)), World(ratio, overlap, ring=ring, **options).cut((5, 1, 9)))


@BOTH
def test_nowhere_to_go(where):
    """Slots outside the cache store nothing and keep the state; blocks outside the state keep nothing."""
    world = World(4, True, lengths=(8,), **where)
    kv, gate = world.kv[0], world.gate[0]
    untouched, _ = world.bits()
    for slot in (-1, INT_MIN, world.cache.shape[0], 2**40):
        world.call(kv[:4], gate[:4], [0, 1, 2, 3], [0] * 4, [-1, -1, -1, slot])
    cache, kept = world.bits()
    assert torch.equal(cache, untouched) and not world.state[0, :4].isnan().any()
    entries = []
    for block in (-1, 5, INT_MAX, INT_MIN):  # the window before cannot be found: the entry pools its own four tokens
        world.state_table = torch.tensor([[block]], dtype=torch.int32)
        world.call(kv[4:], gate[4:], [4, 5, 6, 7], [0] * 4, [-1, -1, -1, 2])
        entries.append(world.cache[2].clone())
    assert not entries[0].isnan().any() and all(torch.equal(entry, entries[0]) for entry in entries)
    assert torch.equal(world.bits()[1], kept)


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_entries_of_what_is_not_finite_are_nan(where, bad):
    """One value spoils its entry, whose norm it enters, and no other."""
    for layout in (PlanarFp8Layout(48, 16, 16), IndexFp8Layout(64)):
        world = World(4, False, layout=layout, lengths=(12,), **where)
        world.kv[0][5, 7] = bad
        world.cut((12,))
        entries = torch.stack([world.entries(0)[entry] for entry in range(3)]).isnan()
        assert entries[1, 7] and not entries[[0, 2]].any()
        assert entries[1].all() if math.isnan(bad) else entries[1].sum() == 1


@BOTH
@EACH_LAYOUT
def test_an_entry_of_nan_has_the_same_bytes_everywhere(where, layout):
    """Of NaN of many bits, which pooling, norm and rotation carry on as they please."""
    found = []
    for place in (dict(impl="reference", device="cpu"), where):
        world = World(4, True, layout=layout, lengths=(12,), **place)
        world.kv[0] = nans(torch.float32, *world.kv[0].shape)
        world.cut((12,))
        found.append(world.cache_memory.cpu().contiguous().view(torch.uint8))
        entries = world.entries(0)
        assert entries.isnan().all()
        if isinstance(layout, PlainLayout):
            check_nans(entries, world.cache.cpu()[world.slots[:3], 0])
    assert torch.equal(*found)


@BOTH
def test_padding_replaces_nothing(where):
    """A row is replaced by one that comes a ring later; where that is padding, the row is kept."""
    world = World(4, True, lengths=(8,), **where)
    kv, gate = (torch.cat([values[0], torch.full_like(values[0], math.nan)]) for values in (world.kv, world.gate))
    world.call(kv, gate, [*range(8), *[-1] * 8], [0] * 16, [world.slot(0, p) for p in range(8)] + [0] * 8)
    world.check_state()
    world.check_canaries()


@pytest.mark.kernel
@pytest.mark.parametrize("tokens, kept", [(17, False), (16, True), (9, True)])
def test_replaced_rows_are_not_written(device, tokens, kept):
    """The program of the first token alone: programs run in any order, so it must leave its row to one a ring later."""
    from sparse_attn.ops.attention.compressor import kernels

    width = 32
    kv, bias = torch.randn(tokens, width, device=device), torch.randn(8, width, device=device)
    positions, requests = torch.arange(tokens, device=device).int() + 40, torch.zeros(tokens, device=device).int()
    state, table = torch.full((3, 8, 2 * width), math.nan, device=device), torch.tensor([[2, 0]], device=device).int()
    kernels.keep[(1, 1)](
        kv, kv, bias, positions, requests, state, table, tokens, 1, 2, 3, 8, width, width, width, 1, 1,
        state.stride(0), 2, WIDTH=width, RATIO=8, COLUMNS=width, PDL=False,
    )  # fmt: skip
    want = torch.full_like(state, math.nan)
    if kept:  # position 40 of a ring of 16
        want[0, 0] = torch.cat([kv[0], kv[0] + bias[0]])
    torch.testing.assert_close(state, want, rtol=0, atol=0, equal_nan=True)


@BOTH
def test_empty(where):
    world = World(4, True, lengths=(4,), **where)
    before = world.bits()
    world.call(world.kv[0][:0], world.gate[0][:0], [], [], [])
    world.state_table = world.state_table[:0]
    world.step([(0, 0, 4)])
    assert all(map(torch.equal, world.bits(), before))
    for name in ("state", "cache"):  # without blocks of one, the other is written all the same
        world = World(4, True, lengths=(4,), **where)
        whole = getattr(world, name)
        setattr(world, name, whole[:0])
        world.step([(0, 0, 4)])
        setattr(world, name, whole)
        assert whole.isnan().all()
        world.check(0) if name == "state" else world.check_state()


@BOTH
def test_many_scale_groups(where):
    world = World(4, True, PlanarFp8Layout(40, 8, group=2), lengths=(9,), cache_block=2, **where).cut((3,))
    world.check(0)
    slot = int(world.slots[1])
    assert not world.cache[slot // 2].flatten()[2 * 56 + slot % 2 * 24 :][20:24].any()
    world.check_canaries()


@BOTH
@pytest.mark.parametrize("dim", [8, 32])
def test_hadamard_keeps_scores(where, dim):
    options = where | dict(layout=PlainLayout("fp32", dim), lengths=(16,))
    plain = World(4, True, **options).cut((16,)).entries(0)
    rotated = World(4, True, hadamard=True, **options).cut((16,)).entries(0)
    torch.testing.assert_close(plain @ plain.T, rotated @ rotated.T)
    torch.testing.assert_close(rotated.sum(1), plain[:, 0] * dim**0.5, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain, rotated)


@pytest.fixture
def theirs():
    """(modules of transformers, a config of theirs): hidden size 24, entries of 32 values, index keys of 16."""
    import transformers
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modules

    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}
    config = transformers.DeepseekV4Config(
        hidden_size=24, head_dim=32, index_head_dim=16, index_n_heads=2, index_topk=4, q_lora_rank=8, rms_norm_eps=1e-5,
        compress_rates=rates, rope_parameters={"main": rope, "compress": rope}, sliding_window=16,
    )  # fmt: skip
    return modules, config


@pytest.mark.parametrize("sizes", [(29,), (1,), (9, 3, 6)])
@pytest.mark.parametrize("kind", ["HCA", "CSA"])
def test_transformers_modules(theirs, kind, sizes):
    """Every entry and index key of transformers' own compressors, fed by the same steps."""
    modules, config = theirs
    torch.manual_seed(0)
    module = getattr(modules, f"DeepseekV4{kind}Compressor")(config)
    for value in module.parameters():
        value.data = torch.randn(value.shape) * (1 if value.dim() == 1 else 0.5)
    layer = getattr(modules, f"DeepseekV4{kind}Cache")(config)
    length, start, number = 29, 0, 0
    hidden, latent = torch.randn(1, length, 24), torch.randn(1, length, 8)
    past = type("Past", (), dict(layers=[layer]))
    parts = dict(compressor=module) | (dict(indexer=module.indexer) if kind == "CSA" else {})
    ratio, overlap = module.compress_rate, kind == "CSA"
    worlds = {}
    for name, part in parts.items():
        dim = part.kv_norm.weight.shape[0]
        world = worlds[name] = World(ratio, overlap, PlainLayout("fp32", dim), lengths=(length,))
        world.kv, world.gate = ([linear(hidden)[0].detach()] for linear in (part.kv_proj, part.gate_proj))
        world.bias, world.norm = part.position_bias.data, part.kv_norm.weight.data
        cos, sin = part.rotary_emb(hidden, torch.arange(length).unsqueeze(0), layer_type="compress")
        world.table = torch.cat([cos[0], sin[0]], dim=1)
        world.options["rope_start"] = dim - world.table.shape[1]
    with torch.no_grad():
        while start < length:
            stop = min(start + sizes[number % len(sizes)], length)
            module(hidden[:, start:stop], latent[:, start:stop], torch.arange(start, stop).unsqueeze(0), past, 0)
            for world in worlds.values():
                world.step([(0, start, stop)])
            start, number = stop, number + 1
    for name, world in worlds.items():
        torch.testing.assert_close(world.entries(0), layer.compressed_kv[name][0], rtol=1e-5, atol=1e-5)


def test_schema():
    assert_expected_inline(
        schema("compress_and_cache").replace(", ", ",\n"),
        """\
sparse_attn::compress_and_cache(Tensor kv,
Tensor gate,
Tensor position_bias,
Tensor norm_weight,
Tensor positions,
Tensor request_ids,
Tensor(a!) state,
Tensor state_table,
Tensor(b!) cache,
Tensor slot_mapping,
Tensor cos_sin,
int ratio,
bool overlap,
float eps,
int rope_start,
bool hadamard,
str layout,
str impl) -> ()""",
    )


def arguments(layout, tokens, device="cpu"):
    width = 2 * layout.dim
    cache = allocate_cache(layout, 3, 2, device)
    return [
        torch.randn(tokens, width, device=device), torch.randn(tokens, width, device=device),
        torch.randn(4, width, device=device), torch.ones(layout.dim, device=device),
        torch.arange(tokens, dtype=torch.int32, device=device), torch.zeros(tokens, dtype=torch.int32, device=device),
        torch.zeros(2, 8, 2 * width, device=device), torch.tensor([[1]], dtype=torch.int32, device=device), cache,
        torch.tensor([p // 4 if p % 4 == 3 else -1 for p in range(tokens)], dtype=torch.int64, device=device),
        rope_table(16, 8, 1e2, device=device),
    ]  # fmt: skip


@BOTH
def test_opcheck(where):
    for layout in (PLAIN, PlanarFp8Layout(24, 8, group=8), IndexFp8Layout(32)):
        for tokens in (0, 9):
            given = arguments(layout, tokens, where["device"])
            opcheck("compress_and_cache", *given, 4, True, 1e-5, 24, False, layout.name, where["impl"])


def test_compiles_once_for_all_sizes():
    def step(*given):
        compress_and_cache(*given, ratio=4, overlap=True, eps=1e-5, rope_start=24, layout=PLAIN)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (9, 5, 11):
        with torch.compiler.set_stance("fail_on_recompile" if tokens != 9 else "default"):
            given = arguments(PLAIN, tokens)
            eager = [value.clone() for value in given]
            compiled(*given)
            step(*eager)
            assert all(map(torch.equal, given, eager)) and given[6].any() and given[8].any()


NAMES = ("kv", "gate", "position_bias", "norm_weight", "positions", "request_ids", "state", "state_table", "cache",
         "slot_mapping", "cos_sin")  # fmt: skip


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(kv=lambda x: x.bfloat16()), TypeError, "kv: got dtype bfloat16"),
        (dict(kv=lambda x: x[0]), ValueError, "kv: got 1 dimensions"),
        (dict(kv=lambda x: x[:, :40].contiguous()), ValueError, r"kv: got width 40, allowed: 2 \* 32"),
        (dict(kv=lambda x: x.T.contiguous().T), ValueError, "kv: got stride"),
        (dict(gate=lambda x: x.half()), TypeError, "gate: got dtype float16"),
        (dict(gate=lambda x: x[:3]), ValueError, "gate: got shape"),
        (dict(gate=lambda x: x.T.contiguous().T), ValueError, "gate: got stride"),
        (dict(position_bias=lambda x: x[:3]), ValueError, "position_bias: got shape"),
        (dict(norm_weight=lambda x: x[:3]), ValueError, "norm_weight: got shape"),
        (dict(norm_weight=lambda x: x.long()), TypeError, "norm_weight: got dtype int64"),
        (dict(positions=lambda x: x.long()), TypeError, "positions: got dtype int64"),
        (dict(request_ids=lambda x: x[:3]), ValueError, "request_ids: got shape"),
        (dict(slot_mapping=lambda x: x.int()), TypeError, "slot_mapping: got dtype int32"),
        (dict(state=lambda x: x.half()), TypeError, "state: got dtype float16"),
        (dict(state=lambda x: x[..., :8]), ValueError, "state: got shape"),
        (dict(state=lambda x: x[:, :4]), ValueError, r"state_table: got rings of 1 \* 4 rows, allowed: at least the 8"),
        (dict(state=lambda x: x[:, ::2]), ValueError, "state: got shape .* and strides"),
        (dict(state=lambda x: x[:, :0]), ValueError, "state: got shape .* contiguous blocks of at least one row"),
        (dict(state=lambda x: x[:1].expand(2, -1, -1)), ValueError, r"state: got shape .* and strides \(0, 128, 1\)"),
        (dict(state_table=lambda x: x[0]), ValueError, "state_table: got 1 dimensions"),
        (dict(state_table=lambda x: x[:, :0]), ValueError, r"state_table: got rings of 0 \* 8 rows"),
        (dict(state_table=lambda x: x.long()), TypeError, "state_table: got dtype int64"),
        (dict(cache=lambda x: x[..., :8]), ValueError, "cache: got shape"),
        (dict(cache=lambda x: x.half()), TypeError, "cache: got dtype torch.float16"),
        (dict(cos_sin=lambda x: x.to("meta")), ValueError, "cos_sin: got device meta"),
        (dict(cos_sin=lambda x: x[:0]), ValueError, r"cos_sin: got shape \[0, 8\], allowed: \[at least 1"),
        (dict(cos_sin=lambda x: x[:, :7]), ValueError, "rope_start: got 24 for 7 rotated values"),
        (dict(rope_start=25), ValueError, "rope_start: got 25 for 8 rotated values"),
        (dict(rope_start=-2), ValueError, "rope_start: got -2"),
        (dict(rope_start=26), ValueError, "rope_start: got 26 for 8 rotated values"),
        (dict(ratio=0), ValueError, "ratio: got 0"),
        (dict(layout="plain"), ValueError, "layout: got 'plain'"),
        (dict(layout=LatentFp8Layout(24, 8, 8)), ValueError, "layout: got LatentFp8Layout"),
        (dict(layout=PlanarFp8Layout(24, 8, 12)), ValueError, "layout: got scale groups of 12, allowed: powers of two"),
        (dict(impl="cuda"), ValueError, "impl: got 'cuda'"),
    ],
)
def test_errors(change, error, message):
    check_error(PLAIN, change, error, message)


def test_hadamard_error():
    check_error(PlainLayout("fp32", 24), dict(hadamard=True, rope_start=16), ValueError, "hadamard: got an entry of 24")


def check_error(layout, change, error, message):
    given = dict(zip(NAMES, arguments(layout, 9)))
    options = dict(ratio=4, overlap=True, eps=1e-5, rope_start=24, layout=layout)
    for name, value in change.items():
        if name in given:
            given[name] = value(given[name])
        else:
            options[name] = value
    with pytest.raises(error, match=message):
        compress_and_cache(*given.values(), **options)


@pytest.mark.sampled(12)
@pytest.mark.kernel
@pytest.mark.parametrize("norm_dtype, hadamard", [(torch.float32, False), (torch.bfloat16, True), (torch.half, False)])
@EACH_LAYOUT
@EACH_FORM
def test_kernels_write_the_bytes_of_the_reference(device, ratio, overlap, layout, norm_dtype, hadamard):
    hadamard = hadamard and layout.dim & (layout.dim - 1) == 0
    options = dict(ratio=ratio, overlap=overlap, layout=layout, hadamard=hadamard, lengths=(17, 5), cache_block=3)
    check_bytes(device, (5, 1, 9), norm_dtype, **options)


def check_bytes(device, sizes, norm_dtype, **options):
    """Where pooling is exact in any order, every byte of caches and rings."""
    want, ours = worlds = [World(exact=True, **options), World(exact=True, device=device, impl="triton", **options)]
    for world in worlds:
        world.norm = world.norm.to(norm_dtype)
        world.cut(sizes).check_canaries()
    assert all(map(torch.equal, want.bits(), ours.bits()))
    least = want.dim // (4 if isinstance(want.layout, IndexMxfp4Layout) else 2)  # of 15 values under a scale
    assert not want.entries(0).isnan().any() and len(want.entries(0).unique()) > least


def check_kernels(ratio, overlap, layout, device, sizes, **options):
    """Both implementations step by step: state bit for bit; entries within a step of what they are stored in."""
    ours = World(ratio, overlap, layout, device=device, impl="triton", **options).cut(sizes)
    want = World(ratio, overlap, layout, **options).cut(sizes)
    assert torch.equal(ours.bits()[1], want.bits()[1])
    ours.check_canaries()
    for request in range(len(want.kv)):
        if want.complete(request):
            got, wanted = ours.entries(request), want.entries(request)
            step = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.uint8: 2**-3}[ours.cache.dtype]
            loose = dict(rtol=step, atol=1e-5 if step < 0.1 else 2e-3)
            if isinstance(want.layout, IndexMxfp4Layout):
                loose = dict(rtol=0.5, atol=0.5)
            torch.testing.assert_close(got, wanted, **loose)
            assert (got != wanted).float().mean() < (1.0 if step < 1e-5 else 0.02)


@pytest.mark.sampled(6)
@pytest.mark.kernel
@EACH_LAYOUT
@EACH_FORM
def test_kernels_match_reference(device, ratio, overlap, layout):
    check_kernels(ratio, overlap, layout, device, (5, 1, 9), lengths=(21, 9, 3))


REAL = [
    (PlanarFp8Layout(448, 64), 4, True, False), (PlanarFp8Layout(448, 64), 128, False, False),
    (PlanarFp8Layout(448, 64, flavour="e4m3fnuz"), 4, True, False), (PlainLayout("bf16", 512), 128, False, False),
    (IndexFp8Layout(128), 4, True, True),
]  # fmt: skip


@pytest.mark.kernel
@pytest.mark.parametrize("layout, ratio, overlap, hadamard", REAL)
def test_real_dims(device, layout, ratio, overlap, hadamard):
    if big(device):
        options = dict(lengths=(520, 131), cache_block=256 // ratio, hadamard=hadamard)
        sizes = (300, 1, 1, 1, 130)
        check_kernels(ratio, overlap, layout, device, sizes, **options)
        check_bytes(device, sizes, torch.float32, ratio=ratio, overlap=overlap, layout=layout, **options)
        whole, singly = (World(ratio, overlap, layout, device=device, impl="triton", **options) for _ in range(2))
        check_same(whole.cut((1024,)), singly.cut((1,)))
    elif ratio == 4:
        check_kernels(ratio, overlap, layout, device, (6,), lengths=(9,), hadamard=hadamard)
