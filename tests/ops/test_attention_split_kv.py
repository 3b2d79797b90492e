"""Split-KV on Hopper: which rows are launched as full waves and as a tail, how often they are split, what that is
expected to cost, and on a GPU that rows of both launches are right."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from support.attention import V4, Case, check_case
from support.extremes import INF
from support.hopper_attention import LATENT, check_latents, check_swap_ab, latent_case

from sparse_attn import PlainLayout, sparse_attn_decode, workspace
from sparse_attn.framework.target import H200, target_of
from sparse_attn.ops.attention.sparse import dispatch, reference
from sparse_attn.ops.attention.sparse.hopper.constants import BLOCK_M, BLOCK_N, SWAP_AB_HEADS
from sparse_attn.ops.attention.sparse.hopper.launch import combine
from sparse_attn.ops.attention.sparse.partials import Output, scratch
from sparse_attn.ops.attention.sparse.portable import config as portable
from sparse_attn.ops.attention.sparse.problem import packed_decode, packed_prefill
from sparse_attn.ops.attention.sparse.split_kv import PAIRS, TILES, Waves, combine_of, waves_of
from sparse_attn.pipeline import Bounds, cache_layouts, workspace_size
from sparse_attn.spec import preset
from sparse_attn.testing.compare import DECODE_LSE, DECODE_OUT, assert_close


class Shape(NamedTuple):
    heads: int
    keys: int
    layout: object = LATENT

    def waves(self, rows, indices=None, made=packed_decode, **options):
        """Of a step of ``rows``, each of ``keys`` keys, or of ``indices`` in all."""
        indices = rows * self.keys if indices is None else indices
        return dispatch.choose(made(rows, self.heads, self.layout, indices, **options), H200).plan.waves

    @property
    def kernel(self):
        """(cost model, CTAs of a row, units of keys)."""
        if self.heads <= SWAP_AB_HEADS:
            return TILES, 1, -(-self.keys // BLOCK_N)
        return PAIRS, self.heads // BLOCK_M, -(-self.keys // (2 * BLOCK_N))

    def cost(self, rows):
        model, blocks, units = self.kernel
        return model.cost(self.waves(rows), blocks, units, H200.num_sms)


WIDE, NARROW, PLANAR, FEW = Shape(128, 2048), Shape(64, 2048), Shape(128, 1152, V4), Shape(16, 2048)
SHAPES = (WIDE, NARROW, PLANAR, FEW)


@pytest.mark.parametrize("model, blocks", [(PAIRS, 1), (PAIRS, 2), (PAIRS, 3), (TILES, 1)])
@pytest.mark.parametrize("num_sms", [132, 114, 3, 1])
def test_waves_are_all_rows_and_no_split_is_empty(model, blocks, num_sms):
    for rows in range(1, 300):
        for units in (1, 2, 3, 5, 9, 16, 32, 800):
            waves = waves_of(model, rows, blocks, units, num_sms)
            assert [some.first for some in waves] == [0, *(some.first + some.rows for some in waves)][:-1]
            assert sum(some.rows for some in waves) == rows and all(some.rows > 0 for some in waves)
            for some in waves:
                longest = -(-units // some.splits)
                assert (some.splits - 1) * longest < units <= some.splits * longest


def test_full_waves_and_a_tail():
    """Rows that fill the SMs; then what is left, split as a step of as many rows would be."""
    assert WIDE.waves(34) == (Waves(0, 33, 2), Waves(33, 1, 16))
    assert WIDE.waves(67) == (Waves(0, 66, 1), Waves(66, 1, 16))
    assert NARROW.waves(67) == (Waves(0, 66, 2), Waves(66, 1, 16))
    assert NARROW.waves(140) == (Waves(0, 132, 1), Waves(132, 8, 16))
    assert PLANAR.waves(34) == (Waves(0, 33, 2), Waves(33, 1, 9))
    assert PLANAR.waves(133) == (Waves(0, 132, 1), Waves(132, 1, 9))
    assert FEW.waves(67) == (Waves(0, 66, 2), Waves(66, 1, 32))
    assert FEW.waves(72) == (Waves(0, 66, 2), Waves(66, 6, 16)), "one combine serves both"
    assert FEW.waves(133) == (Waves(0, 132, 1), Waves(132, 1, 32))
    for shape in SHAPES:
        model, blocks, units = shape.kernel
        for rows in range(1, 400):
            for tail in shape.waves(rows)[1:]:
                assert tail.splits == model.splits_of(tail.rows * blocks, units, H200.num_sms)


def test_one_launch_where_two_are_not_cheaper():
    for shape in SHAPES:
        for rows in (1, 8, 32, 64, 128, 131, 132, 264, 4096):
            assert len(shape.waves(rows)) == 1, (shape, rows)
        for rows in (0, 1, 100, 130, 133):
            assert len(shape.waves(133, rows * 20)) == 1, "hardly any keys"
    assert len(NARROW.waves(200)) == len(WIDE.waves(100)) == len(FEW.waves(100)) == len(PLANAR.waves(40)) == 1


@pytest.mark.aot
@pytest.mark.parametrize("sink", [False, True])
def test_full_waves_and_tail_are_one_kernel(sink):
    """Whole rows and split ones: two would not fit in the instruction caches."""
    from sparse_attn.ops.attention.sparse import launch
    from sparse_attn.testing.launches import recording

    def meta(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, cache = meta(67, 128, LATENT.dim, dtype=torch.bfloat16), meta(900, 64, LATENT.row, dtype=torch.uint8)
    ragged, none = (meta(67 * 2048), meta(68)), (None, None, None, "")
    with recording("sm_90") as launches:
        launch.sparse_attn_decode(
            q, cache, *ragged, 0.05, LATENT.name, *none, meta(128, dtype=torch.float32) if sink else None
        )
    first, second, combining = launches
    assert first == second
    assert (combining.module, combining.kernel) == ("sparse_attn.ops.attention.sparse.hopper.combine", "combine")


def test_batch_invariant_steps_have_one_launch():
    """Split as 32 rows of decode are, or as many rows of prefill: not at all."""
    for shape in SHAPES:
        for rows in (1, 34, 67, 133):
            (like_32,) = shape.waves(32)
            assert shape.waves(rows, batch_invariant=True) == (Waves(0, rows, like_32.splits),)
            assert shape.waves(rows, batch_invariant=True, made=packed_prefill) == (Waves(0, rows, 1),)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_row_more_never_costs_a_third_more(shape):
    """By the model that waves are chosen by."""
    for before, after in pairwise(range(1, 301)):
        assert shape.cost(after) <= 1.3 * shape.cost(before), (before, after)


def need(waves, heads):
    return workspace.size_of(scratch(waves, heads, 512, scaled=heads > SWAP_AB_HEADS))


def combine_all(outputs):
    rows, heads = sum(some.lse.shape[0] for some in outputs), outputs[0].lse.shape[1]
    splits = [some.out_partial.shape[0] for some in outputs]
    combine(outputs, combine_of(target_of(outputs[0].out.device), rows, heads, *splits))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "splits, tail_splits, heads",
    [(2, 16, 3), (3, 2, 3), (5, 40, 3), (9, None, 3), (70, None, 3), (2, None, 4), (2, 40, 360), (4, 16, 360)],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_combine(splits, tail_splits, heads, scaled, device):
    """One launch for full waves and tail, each of its own number of splits, some of which are empty."""
    torch.manual_seed(splits)

    def partials(number, tokens):
        lses = torch.randn(number, tokens, heads, device=device) * 20
        lses[torch.rand(lses.shape, device=device) < 0.3] = -INF
        lses[:, 0, 0] = -INF
        values = torch.randn(number, tokens, heads, 512, device=device)
        if not scaled:
            return values, [values, lses]
        values, scales = values.half(), torch.rand(number, tokens, heads, 2, device=device) + 0.5
        # Of 32 columns thread i of four holds the pairs i, 4 + i, 8 + i and 12 + i, and stores them side by side.
        stored = values.unflatten(3, (16, 4, 4, 2)).transpose(4, 5).flatten(3).contiguous()
        return values.unflatten(3, (2, 256)).float().mul(scales.unsqueeze(4)).flatten(3), [stored, lses, scales]

    sink = torch.tensor([0.3, -INF, INF], device=device).repeat(heads)[:heads].contiguous()
    out = torch.full((6, heads, 512), math.nan, device=device, dtype=torch.bfloat16)
    lse = torch.full((6, heads), math.nan, device=device)
    slices = (slice(0, 4), slice(4, 6)) if tail_splits else (slice(0, 6),)
    waves = [partials(number, len(lse[rows])) for number, rows in zip((splits, tail_splits), slices)]
    combine_all([Output(out[rows], lse[rows], sink, stored) for rows, (_, stored) in zip(slices, waves)])
    for rows, (outs, stored) in zip(slices, waves):
        want = reference.merge_attn_states(outs, stored[1] * math.log(2), sink)
        torch.testing.assert_close(out[rows].float(), want[0], rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(lse[rows], want[1], rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2**16 - 1, 2**16 + 1])
def test_combine_of_more_rows_than_a_grid_takes(tokens, device):
    """As a step of that many has, if it is batch invariant."""
    outs, lses = torch.randn(2, tokens, 2, 512, device=device), torch.randn(2, tokens, 2, device=device)
    out = torch.full((tokens + 1, 2, 512), math.nan, device=device, dtype=torch.bfloat16)
    lse = torch.full((tokens + 1, 2), math.nan, device=device)
    combine_all([Output(out[:-1], lse[:-1], None, [outs, lses])])
    want = reference.merge_attn_states(outs, lses * math.log(2), None)
    torch.testing.assert_close(out[:-1].float(), want[0], rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(lse[:-1], want[1], rtol=1e-5, atol=1e-6)
    assert out[-1].isnan().all() and lse[-1].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
def test_a_row_is_combined_alike_by_ctas_of_one_head_and_of_two(scaled, device):
    """As batch_invariant asks for: alone a row has too few heads for CTAs of two."""
    torch.manual_seed(0)
    tokens, heads, splits = 6, 360, 4
    assert [combine_of(H200, rows, heads, splits).block_m for rows in (1, tokens)] == [1, 2]
    each = splits, tokens, heads
    partials = [torch.randn(*each, 512, device=device), torch.randn(each, device=device)]
    if scaled:
        partials = [partials[0].half(), partials[1], torch.rand(*each, 2, device=device)]

    def combined(rows):
        out = torch.empty(len(range(tokens)[rows]), heads, 512, device=device, dtype=torch.bfloat16)
        lse = torch.empty(out.shape[:2], device=device)
        combine_all([Output(out, lse, None, [partial[:, rows].contiguous() for partial in partials])])
        return out, lse

    together, alone = combined(slice(None)), [combined(slice(row, row + 1)) for row in range(tokens)]
    assert all(torch.equal(whole, torch.cat(rows)) for whole, rows in zip(together, zip(*alone)))


def portable_need(rows, heads, keys, layout=LATENT):
    return workspace.size_of(portable.plan(packed_decode(rows, heads, layout, rows * keys), H200).scratch)


@pytest.mark.parametrize("heads", [16, 128])
def test_what_is_reserved_serves_every_launch(heads):
    """Of as many rows as a step may have or fewer, with as many keys each or fewer, by either kernel."""
    spec = replace(preset("deepseek_v32"), num_heads=heads)
    bounds = Bounds(140, 0, 4096, logits_bytes=0)
    reserved = workspace_size(spec, bounds, H200, cache_layouts(spec, "fp8"))
    needed = workspace.largest(
        size
        for rows in range(1, 141)
        for keys in range(64, spec.index.top_k + 1, 64)
        for size in (need(Shape(heads, keys).waves(rows), heads), portable_need(rows, heads, keys))
    )
    assert reserved.nbytes == needed.nbytes


@pytest.mark.parametrize("heads", [64, 128])
def test_what_is_reserved_serves_prefill_rows_in_place(heads):
    """Which are attended to as decode rows are, and beside them."""
    spec = replace(preset("deepseek_v4_flash"), num_heads=heads)
    bounds = Bounds(20, 120, 1 << 20, logits_bytes=0)
    gathered, in_place = (workspace_size(spec, replace(bounds, prefill_in_place=some), H200) for some in (False, True))
    most = spec.window + (1 << 20) // spec.full_ratio
    needed = workspace.largest(
        size
        for rows in range(1, 141)
        for keys in range(64, most + 1, 64)
        for size in (need(Shape(heads, keys, V4).waves(rows), heads), portable_need(rows, heads, keys, V4))
    )
    assert gathered.nbytes < in_place.nbytes == needed.nbytes


@contextlib.contextmanager
def room_for(waves, heads):
    """A locked workspace that full waves and a tail fill, of 0xFF bytes."""
    assert len(waves) == 2
    size = need(waves, heads)
    owner = workspace.Workspace(size, "cuda")
    owner._scratch.fill_(0xFF)
    owner.lock()
    with workspace.use(owner):
        yield
    assert owner.high_water == size


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["full", "gaps", "none"])
@pytest.mark.parametrize("heads, tokens", [(64, 67), (64, 133), (64, 140), (128, 34), (128, 67), (128, 90)])
def test_latents(heads, tokens, lengths):
    with room_for(Shape(heads, 2048).waves(tokens), heads):
        check_latents(*latent_case(tokens, heads, 64, 40, 2048, lengths=lengths, sink="random", gap=16))


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [None, 0.3])
@pytest.mark.parametrize("heads, tokens", [(64, 133), (128, 67), (128, 72), (128, 133)])
def test_two_planar_caches(heads, tokens, sink, device):
    lengths, more = ([128, 0, 65, 128] * tokens)[:tokens], ([1024, 0, 700, 1, 1024] * tokens)[:tokens]
    capacity = sum(lengths) + sum(more) + 14  # with what nobody may read
    with room_for(Shape(heads, 0, V4).waves(tokens, capacity), heads):
        check_case(Case(heads, 1, (V4, 40, 64, 64, lengths), (V4, 90, 61, 120, more), sink), tokens, device)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["full", "gaps", "none"])
@pytest.mark.parametrize("layout", [LATENT, V4, PlainLayout("bf16", 512, 64)], ids=lambda layout: layout.name)
def test_swap_ab(layout, lengths):
    for heads, tokens in ((16, 67), (16, 133), (5, 140), (32, 133)):
        with room_for(Shape(heads, 2048, layout).waves(tokens), heads):
            check_swap_ab(layout, heads, tokens, 2048, 40, 64, lengths=lengths, sink="random", seed=tokens)


@pytest.mark.gpu
def test_swap_ab_over_two_caches():
    with room_for(Shape(16, 1152, V4).waves(133), 16):
        check_swap_ab(V4, 16, 133, 128, 40, 64, lengths="gaps", sink="random", extra=1024)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
def test_captured(heads):
    """A replay attends what its rows hold by then, in both launches."""
    q, cache, ragged, sink = latent_case(133, heads, 64, 40, 2048, sink="random")
    other = latent_case(133, heads, 64, 40, 2048, lengths="gaps", seed=1)
    options = dict(scale=0.05, layout=LATENT, sink=sink)
    sparse_attn_decode(q, cache, ragged, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sparse_attn_decode(q, cache, ragged, **options)
    for kept, new in ((q, other[0]), (cache, other[1]), *zip(ragged, other[2])):
        kept.copy_(new)
    graph.replay()
    want = sparse_attn_decode(q, cache, ragged, **options, impl="reference")
    assert_close(got.out, want.out, DECODE_OUT)
    assert_close(got.lse, want.lse, DECODE_LSE)
