"""Selection where the highest score of every group comes with the rows: what the k groups hold, and nothing else is
read."""

import dataclasses
import math

import pytest
import torch
from conftest import long, sampled
from hypothesis import given, settings
from hypothesis import strategies as st
from support.topk import (
    EXACT,
    INT_MAX,
    INT_MIN,
    KINDS,
    ROOMY,
    brute_force,
    chosen,
    for_rows,
    group_maxima,
    scores,
)

from sparse_attn import workspace
from sparse_attn.framework.target import H200
from sparse_attn.ops.topk.select import dispatch, reference
from sparse_attn.ops.topk.select.fake import GROUP
from sparse_attn.ops.topk.select.plan import GroupMaxima, Problem
from sparse_attn.workspace import size_of

DIRT = 12345
WIDTH = 12000


def world(x, ends):
    """What scoring leaves: -inf up to the end of a row's last group, anything behind it, in scores and highest ones."""
    column = torch.arange(x.shape[1])
    ends = ends.clamp(0, x.shape[1])[:, None]
    x = torch.where(column < ends, x, torch.where(column < -(-ends // GROUP) * GROUP, -math.inf, math.inf))
    top = group_maxima(x)
    return x, torch.where(torch.arange(top.shape[1]) * GROUP < ends, top, math.inf)


def selected(x, top, ends, k, plan, device):
    """Where rows begin at multiples of 32 bytes, between canaries."""
    from sparse_attn.ops.topk.select.plan import Selection

    rows, width = x.shape
    kernel, plan, _ = chosen("group_maxima", for_rows(plan, rows))
    whole = -(-width // GROUP) * GROUP
    wide = torch.full((rows, whole + 24), math.inf, device=device)
    wide[:, :whole] = torch.nn.functional.pad(x, (0, whole - width), value=-math.inf)
    views, counters = workspace.take("test", plan.scratch, torch.device(device))
    views[0].fill_(math.inf)[:, : top.shape[1]] = top
    around = torch.full((rows + 2, k), DIRT, dtype=torch.int32, device=device)
    kernel.launcher(Selection(wide[:, :width], None, ends.to(device), around[1:-1], views, counters), plan)
    assert (around[0] == DIRT).all() and (around[-1] == DIRT).all()
    return around[1:-1].cpu()


def check(x, ends, ks, plan, device):
    x, top = world(x, ends)
    for k in ks:
        want = reference.top_k_per_row(x, None, ends, k)
        assert torch.equal(selected(x, top, ends, k, plan, device), want), k


@pytest.mark.kernel
@pytest.mark.parametrize("kind", KINDS)
def test_kernel(kind, device, dirty_workspace):
    """Rows of more groups than are held, and of fewer."""
    x = scores(kind, 3, WIDTH)
    cases = (x, [WIDTH - 3, 2049, INT_MAX], (256,), EXACT), (x[:2, 1:], [INT_MAX, 2041], (1, 200), ROOMY)
    for values, ends, ks, launch in sampled(cases, 1, seed=kind):
        check(values, torch.tensor(ends, dtype=torch.int32), ks, launch, device)


@pytest.mark.kernel
def test_kernel_ends(device, dirty_workspace):
    x = scores("grid", 8, 5000)
    ends = torch.tensor([0, INT_MIN, 1, 7, 2048, 2049, 2561, 4993], dtype=torch.int32)
    x, top = world(x, ends)
    got = selected(x, top, ends, 99, EXACT, device)
    assert torch.equal(got, brute_force(x, None, ends, 99))


@pytest.mark.kernel
@pytest.mark.parametrize("plan", [EXACT, ROOMY])
def test_kernel_reads_no_other_group(plan, device, dirty_workspace):
    """Scores of groups that are not among the k, of equal ones the first, could be anything; with room, those that
    share the k-th's bf16 are read, too."""
    k = 130
    x, ends = scores("relu", 2, WIDTH), torch.tensor([WIDTH, WIDTH - 77], dtype=torch.int32)
    x, top = world(x, ends)
    want = reference.top_k_per_row(x, None, ends, k)
    there = torch.arange(top.shape[1]) * GROUP < ends[:, None]
    chosen = reference.top_k_per_row(top.masked_fill(~there, -math.inf), None, None, k).long()
    poisoned = torch.full_like(x, math.inf).unflatten(1, (-1, GROUP))
    groups = x.unflatten(1, (-1, GROUP))
    for row in range(2):
        least = top[row, chosen[row]].min()
        read = (top[row].bfloat16() >= least.bfloat16() * 0.98) & there[row]
        poisoned[row, read] = groups[row, read]
    assert torch.equal(selected(poisoned.flatten(1), top, ends, k, plan, device), want)


@pytest.mark.kernel
@pytest.mark.parametrize("share", [3, 40, 700])
def test_kernel_groups_that_share_a_bf16(share, device, dirty_workspace):
    """More of them than there is room for: a few are told apart by a list, many by another search."""
    x = scores("narrow", 2, WIDTH) - 2
    x[:, : 8 * share] = 1 + torch.rand(2, 8 * share, generator=torch.Generator().manual_seed(0)) / 1000
    ends = torch.full((2,), WIDTH, dtype=torch.int32)
    for k in (share - 1, min(share + 50, 256)):
        check(x, ends, (min(k, 256),), EXACT, device)


@settings(max_examples=25 if long() else 8, derandomize=not long(), deadline=None)
@given(data=st.data())
def any_row(device, data):
    """Widths and bounds beside whole groups and what is held, some scores of one value."""
    plan = data.draw(st.sampled_from((EXACT, ROOMY)))
    width = data.draw(st.integers(plan.slots - 20, GROUP * plan.tile))
    bounds = st.one_of(st.just(width), st.integers(0, width), st.integers(plan.slots - 9, plan.slots + 9))
    ends = torch.tensor(data.draw(st.lists(bounds, min_size=1, max_size=2)), dtype=torch.int32)
    x = scores(data.draw(st.sampled_from(KINDS)), len(ends), width, seed=data.draw(st.integers(0, 999)))
    first, step = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 400))
    x[:, first::step] = data.draw(st.sampled_from((0.0, 1.0, math.inf, math.nan)))
    check(x, ends, (data.draw(st.integers(1, 256)),), plan, device)


@pytest.mark.kernel
def test_kernel_any_row(device):
    any_row(device)


def test_config():
    """What a program holds: the highest scores of a row, GROUP * k scores, a word of marks a thread."""
    for rows in (9, 132, 133, 4096):
        for width in (1, 8192, 16385, 32768, 32769, 65536, 131072, 163840, 262144, 262145):
            for k in (1, 512, 1024, 2048, 4096, 4097):
                plan = dispatch.choose(Problem(rows, width, k, group_maxima=True), H200).plan
                assert isinstance(plan, GroupMaxima) == (k <= 4096 and 32768 < width <= 262144)
                if isinstance(plan, GroupMaxima):
                    assert plan.slots >= GROUP * k and plan.tile * GROUP >= width and plan.rows == rows
                    assert plan.slots % plan.chunk == plan.tile % plan.chunk == 0
                    assert max(plan.slots, plan.tile) <= 1 << 15
                    assert min(plan.slots, plan.tile) // 32 >= 32 * plan.num_warps
                    assert plan.packs(rows, H200) == (rows <= 132) and plan.starts_early is False
                    assert size_of(plan.scratch).nbytes <= rows * (width / 2 + 16) + 256
    blackwell = dataclasses.replace(H200, arch=100)
    assert dispatch.choose(Problem(1, 131072, 2048, group_maxima=True), blackwell).kernel.name == "multi_cta"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gpu(kind, device):
    """Twenty times the same bits; what published models select, and the most."""
    for rows, width, k in ((3, 131072, 2048), (150, 40001, 512), (2, 262144, 4096), (5, 163840, 2047)):
        x = scores(kind, rows, width)
        ends = torch.randint(-5, width + 5, (rows,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
        ends[0] = width
        x, top = world(x, ends)
        want = reference.top_k_per_row(x, None, ends, k)
        choice = dispatch.choose(Problem(rows, width, k, group_maxima=True), H200, "group_maxima")
        for _ in range(20 if rows < 4 else 1):
            assert torch.equal(selected(x, top, ends, k, choice.plan, device), want), (rows, width)
