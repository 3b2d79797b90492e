"""Few rows scored and selected in one launch: the columns that two launches give, whatever the scores."""

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from support.index_topk import LAYOUTS, decode_case, to

from sparse_attn.layout import IndexFp8Layout
from sparse_attn.ops import index_logits
from sparse_attn.ops.index_logits import dispatch
from sparse_attn.ops.index_logits.plan import Memory, PagedProblem
from sparse_attn.ops.index_topk import index_topk_decode, index_topk_decode_slots
from sparse_attn.ops.index_topk.one_launch import config
from sparse_attn.ops.index_topk.one_launch.config import NAME, OneLaunchPlan
from sparse_attn.ops.topk import top_k_per_row
from sparse_attn.ops.topk.launch import Slots
from sparse_attn.target import H200, target_of

LAYOUT = IndexFp8Layout(64)
INTERPRETED = 16, 32, 8, 1  # parts of a row, keys of a part, scores it offers, warps
ON_A_GPU = 16, 256, 128, 16


def selected(case, k, block, how):
    """(columns, packed slots, bounds) by one launch, on memory that holds anything."""
    from sparse_attn.ops.index_topk.one_launch import launch

    q, weights, cache, lens, table = case
    rows, next_n = lens.numel(), q.shape[1]
    scratch = how.scratch
    views = [torch.full(one.shape, -7, dtype=one.dtype, device=q.device) for one in scratch.buffers]
    views[0].fill_(float("nan"))
    counters = torch.zeros(scratch.counters + rows, dtype=torch.int64, device=q.device)
    out = torch.full((rows, k), -9, dtype=torch.int32, device=q.device)
    launch.one_launch(*case, k, out, views, counters, how)
    packed, indptr = (torch.full((size,), -9, dtype=torch.int32, device=q.device) for size in (rows * k, rows + 1))
    slots = Slots(indptr, counters[scratch.counters :], table, block, next_n)
    launch.one_launch(*case, k, packed, views, counters, how, slots)
    assert not counters.any()
    return out, packed, indptr


def plan_of(device, rows, width, ctas):
    parts, resident, most, warps = INTERPRETED if device.type == "cpu" else ON_A_GPU
    assert width <= parts * resident
    return OneLaunchPlan(rows, width, parts, ctas, resident, most, warps, 16)


def assert_selected(case, k, block, context, ctas=16):
    """Of scores as the two launches' kernel computes them."""
    q, weights, cache, lens, table = case
    got = selected(case, k, block, plan_of(q.device, lens.numel(), context, ctas))
    logits = index_logits.fp8_paged_mqa_logits(q, cache, weights, lens, table, context, LAYOUT, impl="triton")
    want = top_k_per_row(logits, k, row_ends=lens.reshape(-1), impl="reference")
    assert torch.equal(got[0], want)
    packed = index_topk_decode_slots(*case, k, context, LAYOUT, impl="triton")
    assert torch.equal(got[1], packed.indices) and torch.equal(got[2], packed.indptr)


def _part(columns, device):
    """Which of a row's parts holds them."""
    count, resident, _, _ = INTERPRETED if device.type == "cpu" else ON_A_GPU
    turn = torch.arange(resident, device=device)
    parts = torch.empty(count * resident, dtype=torch.int64, device=device)
    for part in range(count):
        parts[turn * count + ((part ^ turn ^ (turn >> 4) ^ (turn >> 8)) & (count - 1))] = part
    return parts[columns]


@pytest.fixture
def width(device):
    """Of which some are left out of every offer."""
    return 500 if device.type == "cpu" else 4001


@pytest.mark.kernel
@pytest.mark.parametrize("requests, next_n, k, ctas", ((1, 1, 20, 16), (3, 1, 1, 4), (2, 2, 33, 1), (2, 1, 50, 8)))
def test_kernel(requests, next_n, k, ctas, width, device):
    """Rows of any length, with keys in blocks that are none. A CTA scores one part, or several."""
    case = to(device, decode_case(LAYOUT, requests, next_n, width, block=32, seed=k))
    assert_selected(case, k, 32, width, ctas)


@pytest.mark.kernel
@pytest.mark.parametrize("length", (0, 1, 31, 127, 128, 129, 400))
def test_kernel_at_lengths(length, width, device):
    """Up to as many columns as there are offers, and one more."""
    case = to(device, decode_case(LAYOUT, 1, 1, width, block=32))
    case[3].fill_(length)
    assert_selected(case, 30, 32, width, 8 if length % 2 else 16)


@pytest.mark.kernel
def test_kernel_of_more_than_there_are(width, device):
    case = to(device, decode_case(LAYOUT, 2, 1, width, block=32))
    case[3].fill_(width)
    assert_selected(case, width + 3, 32, width)


@pytest.mark.kernel
@pytest.mark.few(3)
@pytest.mark.parametrize(
    "scores", ("high in one part", "ties behind a full offer", "equal", "two values", "infinite", "nan")
)
def test_kernel_where_offers_do_not_suffice(scores, width, device):
    """Ties that fill the row, and a part that holds all of the highest: then the row is read once more."""
    case = to(device, decode_case(LAYOUT, 1, 1, width, block=32))
    q, weights, cache, lens, table = case
    lens.fill_(width)
    column = torch.arange(width, device=device)
    slots = table[0].long()[column // 32] * 32 + column % 32
    drawn = torch.randn(width, LAYOUT.dim, generator=torch.Generator().manual_seed(1)).to(device)
    if scores == "equal":
        weights.zero_()
    elif scores == "two values":
        drawn = drawn[column % 2]
    elif scores == "high in one part":
        weights.abs_()
        drawn[_part(column, device) != 3] *= 1e-3
    elif scores == "ties behind a full offer":
        weights.abs_()
        most = (INTERPRETED if device.type == "cpu" else ON_A_GPU)[2]
        drawn[:] = drawn[0]
        drawn[column[_part(column, device) == 3][most : 2 * most]] *= 2
    elif scores == "infinite":
        weights.fill_(float("inf"))
    else:
        drawn[::2, 5] = float("nan")
    there = table[0].long()[column // 32] >= 0
    LAYOUT.encode(cache, slots[there], drawn[there])
    assert_selected(case, 60 if device.type == "cpu" else 400, 32, width)


@pytest.mark.kernel
@pytest.mark.parametrize("k", (40, 2000))
def test_kernel_by_name(k, device, dirty_workspace):
    """The plans of 3000 columns: every part offers half of its keys, or the row is selected where it lies."""
    from sparse_attn.ops.index_topk import launch

    case = to(device, decode_case(LAYOUT, 1, 1, 3000, block=64 if device.type == "cuda" else 32))
    got = launch.index_topk_decode(*case, k, 3000, LAYOUT.name, 1 << 20, NAME)
    assert torch.equal(got, index_topk_decode(*case, k, 3000, LAYOUT, impl="triton"))
    packed = launch.index_topk_decode_slots(*case, k, 3000, LAYOUT.name, 1 << 20, NAME)
    for one, other in zip(packed, index_topk_decode_slots(*case, k, 3000, LAYOUT, impl="triton")):
        assert torch.equal(one, other)


@pytest.mark.kernel
def test_refuses_what_it_cannot_run(device):
    from sparse_attn.ops.index_topk import launch

    for layout in (LAYOUTS["bf16"], LAYOUTS["mxfp4"], LAYOUTS["fnuz"]):
        case = to(device, decode_case(layout, 1, 1, 90))
        with pytest.raises(ValueError, match="layout: got .*, allowed: e4m3fn"):
            launch.index_topk_decode(*case, 4, 90, layout.name, 1 << 20, NAME)
    case = to(device, decode_case(LAYOUT, 2, 1, 90))
    with pytest.raises(ValueError, match="logits_bytes: got 600, allowed: what the scores of 2 rows take"):
        launch.index_topk_decode(*case, 4, 90, LAYOUT.name, 600, NAME)
    with pytest.raises(ValueError, match="cache: got 48 blocks of 4 keys, allowed: blocks of whole 32 keys"):
        launch.index_topk_decode_slots(*case, 4, 90, LAYOUT.name, 1 << 20, NAME)


def test_plans():
    """Offers are more than k, and what a part offers is more than it has of the selected. Narrow rows offer nothing."""
    lines = []
    for rows, width, k in (
        (1, 1000, 512), (1, 4096, 2048), (8, 4096, 512), (1, 8192, 2048), (1, 32768, 512), (1, 32768, 2048),
        (2, 32768, 2048), (8, 32768, 2048), (1, 131072, 2048), (8, 131072, 512),
    ):  # fmt: skip
        problem = PagedProblem(rows, 1, 64, 128, width, 4096, 64, "e4m3fn", 1, *[Memory(0, (), True)] * 2)
        assert config.supports(problem, k, H200).able
        how = config.plan(problem, k, H200)
        assert how.rows * how.ctas_per_row <= H200.num_sms and how.parts * how.resident >= width
        assert how.slots > k and how.slots >= config.LEAST_SLOTS
        lines.append(f"{rows} x {width}, k {k}: {how.parts} parts, {how.ctas_per_row} CTAs a row, {how.most} offered")
    assert_expected_inline(
        "\n".join(lines),
        """\
1 x 1000, k 512: 16 parts, 16 CTAs a row, 128 offered
1 x 4096, k 2048: 16 parts, 16 CTAs a row, 256 offered
8 x 4096, k 512: 16 parts, 16 CTAs a row, 128 offered
1 x 8192, k 2048: 32 parts, 32 CTAs a row, 128 offered
1 x 32768, k 512: 128 parts, 128 CTAs a row, 16 offered
1 x 32768, k 2048: 128 parts, 128 CTAs a row, 64 offered
2 x 32768, k 2048: 128 parts, 64 CTAs a row, 64 offered
8 x 32768, k 2048: 128 parts, 16 CTAs a row, 64 offered
1 x 131072, k 2048: 512 parts, 128 CTAs a row, 16 offered
8 x 131072, k 512: 512 parts, 16 CTAs a row, 8 offered""",
    )
    for rows, width, k, said in ((9, 100, 4, "rows"), (1, 131073, 4, "max_context_len"), (1, 131072, 4096, "top_k")):
        support = config.supports_rows(rows, width, k, H200)
        assert not support.able and support.reason.startswith(f"{said}: got ")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", (32, 64))
@pytest.mark.parametrize(
    "requests, context, k",
    ((1, 32768, 2048), (1, 32768, 512), (2, 16000, 2048), (8, 4096, 512), (1, 131072, 2048), (8, 32768, 2048)),
)
def test_scores_have_the_bits_of_two_launches(requests, context, k, heads, device):
    """At the sizes of published models, where the Hopper kernel scores otherwise."""
    from sparse_attn.ops.index_topk.one_launch import launch

    layout = IndexFp8Layout(128)
    generator = torch.Generator(device).manual_seed(context)
    blocks = requests * -(-context // 64)
    drawn: dict[str, Any] = dict(generator=generator, device=device)
    cache = torch.empty(blocks, 64, layout.row, dtype=torch.uint8, device=device)
    layout.encode(cache, torch.arange(blocks * 64, device=device), torch.randn(blocks * 64, 128, **drawn))
    q = torch.randn(requests, 1, heads, 128, **drawn).to(torch.float8_e4m3fn).view(torch.uint8)
    weights = torch.randn(requests, heads, **drawn)
    lens = torch.full((requests, 1), context, dtype=torch.int32, device=device)
    table = torch.randperm(blocks, **drawn).view(requests, -1).int()
    case = q, weights, cache, lens, table
    problem = dispatch.paged_problem(*case, context, layout.name)
    how = config.plan(problem, k, target_of(device))
    views = [torch.empty(one.shape, dtype=one.dtype, device=device) for one in how.scratch.buffers]
    counters = torch.zeros(how.scratch.counters, dtype=torch.int64, device=device)
    out = torch.empty(requests, k, dtype=torch.int32, device=device)
    launch.one_launch(*case, k, out, views, counters, how)
    logits = index_logits.fp8_paged_mqa_logits(q, cache, weights, lens, table, context, layout)
    assert torch.equal(views[0][:, :context], logits)
    assert torch.equal(out, index_topk_decode(*case, k, context, layout))
