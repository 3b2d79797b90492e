"""The Hopper kernels of index scores without a GPU: their PTX, executed on the CPU, gives the reference's scores."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.caches import poisoned_cache
from support.extremes import INT_MAX, INT_MIN
from support.index_logits import paged_problem_of, prefill_problem_of
from support.index_topk import mxfp4_query
from support.ptx.run import execute

from sparse_attn import IndexFp8Layout, IndexMxfp4Layout
from sparse_attn.fp8 import fp8_encode
from sparse_attn.framework.target import H200
from sparse_attn.mxfp4 import GROUP, mxfp4_quantise
from sparse_attn.ops.indexer.scores import dispatch, reference
from sparse_attn.ops.indexer.scores.plan import HopperDecodedPlan, Paged, Prefill

pytestmark = pytest.mark.aot
FP8, MXFP4 = IndexFp8Layout(128), IndexMxfp4Layout(128)
DIRT = 7.25
NOTHING = 50000  # instructions of two CTAs that have nothing to do


def magnitudes(q, k, k_scale, weights, inside):
    """Of the terms of every score."""
    terms = torch.einsum("mhn,mh->mn", q.double().abs() @ k.double().abs().t(), weights.double().abs()) * k_scale
    return torch.where(inside, terms.float(), -math.inf)


def check(out, score, inside, bound):
    """Rounding alone apart: 2^-21 of the magnitudes in fp32, for the products are summed exactly."""
    want = score()
    with mock.patch.object(reference, "_scores", magnitudes):
        scale = score()
    assert (out[~inside] == DIRT).all() and torch.equal(out[inside].isneginf(), want[inside].isneginf())
    finite = inside & ~want.isneginf()
    assert torch.equal(out[finite].isnan(), want[finite].isnan())
    finite &= ~want.isnan()
    assert ((out - want)[finite].abs() <= bound * scale[finite]).all() and finite.any()


def values(*shape, far=0.0):
    """fp32 [*shape, 128]; of some rows, groups whose powers of two lie far apart, and zero groups."""
    x = torch.randn(*shape, 4, GROUP)
    powers = torch.exp2(torch.randint(-40, 41, (*shape, 4, 1)).float()) * (torch.rand(*shape, 4, 1) > 0.2)
    return torch.where(torch.rand(*shape, 1, 1) < far, x * powers, x).flatten(-2)


def paged(layout, lens, heads, width, *, far=0.0, nan=False, ctas=2, seed=0):
    """Blocks apart, NaN in what no row sees, a wild block in every table."""
    from sparse_attn.ops.indexer.scores.hopper import launch, paged, paged_mxfp4

    torch.manual_seed(seed)
    requests, next_n, blocks = len(lens), len(lens[0]), -(-width // 64)
    cache, _ = poisoned_cache(layout, requests * blocks + 3, 64, padding=128)
    table = torch.randperm(len(cache))[: requests * blocks].int().view(requests, blocks)
    for request, limits in enumerate(lens):
        position = torch.arange(min(max(*limits, 0), width))
        keys = values(len(position), far=far)
        if nan:
            keys[::50, 3] = math.nan
        layout.encode(cache, table[request, position // 64].long() * 64 + position % 64, keys)
        table[request, request * 5 % blocks] = (-1, INT_MIN, INT_MAX, len(cache))[request % 4]
    q = values(requests * next_n, heads, far=far if requests > 1 else 0)
    mxfp4 = isinstance(layout, IndexMxfp4Layout)
    q = (mxfp4_query(q) if mxfp4 else fp8_encode(q, "e4m3fn").view(torch.uint8)).unflatten(0, (requests, next_n))
    weights, context_lens = torch.randn(requests * next_n, heads), torch.tensor(lens, dtype=torch.int32)
    memory = torch.full((requests * next_n + 1, width + 5), DIRT)
    call = Paged(
        q, cache, weights, context_lens, table, width, "mxfp4" if mxfp4 else "e4m3fn", memory[:-1, :width], False
    )
    module, start, name = (
        (paged_mxfp4, launch.score_paged_mxfp4, "hopper.paged_mxfp4")
        if mxfp4
        else (paged, launch.paged, "hopper.paged")
    )
    plan = dispatch.choose_paged(paged_problem_of(*call[:6], layout.name), H200, name).plan
    execute(module, "paged_mqa_logits", lambda: start(call, replace(plan, ctas=ctas)), seed)
    assert (memory[-1] == DIRT).all() and (memory[:, width:] == DIRT).all()
    inside = torch.arange(width) < context_lens.flatten()[:, None]
    check(call.out, lambda: reference.paged_mqa_logits(*call[:6], layout.name), inside, 2.0**-18 if mxfp4 else 2.0**-17)


@pytest.mark.few(0)
def test_paged_fp8():
    """A kernel that GPUs have run: what is wrong with the executed one is wrong with the execution."""
    paged(FP8, [[130], [70]], 64, 200)


def test_paged_mxfp4():
    paged(MXFP4, [[130], [70]], 64, 200, nan=True)


@pytest.mark.few(0)
@pytest.mark.parametrize("far", [0.0, 0.02])
@pytest.mark.parametrize(("next_n", "heads"), [(1, 64), (2, 64), (4, 64), (5, 32), (2, 128)])
def test_paged_mxfp4_of_many_forms(next_n, heads, far):
    """More requests than one; tiles of near groups and of far ones, and heads of either."""
    lens = [[130 + j for j in range(next_n)], [5] * next_n, [INT_MIN] * next_n, [INT_MAX - j for j in range(next_n)]]
    paged(MXFP4, lens, heads, 150, far=far, nan=far > 0, ctas=3, seed=next_n)


@pytest.mark.few(1)
@pytest.mark.parametrize("far", [0.0, 0.01])
def test_paged_mxfp4_of_more_tiles_than_stages(far):
    """Of one CTA, whose consumers fill every stage again, with near tiles behind far ones."""
    paged(MXFP4, [[1500], [700]], 64, 1600, far=far, ctas=1)


@pytest.mark.few(0)
def test_more_requests_than_are_counted_at_a_time():
    paged(MXFP4, [[i * 7 % 70] for i in range(140)], 32, 71, ctas=5)


@pytest.mark.few(0)
@pytest.mark.parametrize(("heads", "far"), [(64, 0.0), (64, 0.02), (32, 0.02), (128, 0.0)])
def test_rows_mxfp4(heads, far):
    rows_case(heads, far, False)


@pytest.mark.few(0)
@pytest.mark.parametrize(("heads", "far"), [(64, 0.0), (64, 0.02), (32, 0.02), (128, 0.0)])
def test_rows_mxfp4_decoded(heads, far):
    """Keys decoded by a launch of their own; another scores what has groups far apart, and has nothing to do otherwise.
    The bits are those of the kernel that decodes them in registers."""
    assert torch.equal(rows_case(heads, far, True).view(torch.int32), rows_case(heads, far, False).view(torch.int32))


def rows_case(heads, far, decoded):
    from sparse_attn.ops.indexer.scores.hopper import decode_mxfp4, launch, prefill_decoded, prefill_mxfp4

    torch.manual_seed(heads)
    rows, keys = 19, 200
    k, q = values(keys, far=far), values(rows, heads, far=far)
    start, end = torch.zeros(rows, dtype=torch.int32), (torch.arange(1, rows + 1) * 190 // rows).int()
    for row, ends in enumerate(((3, 3), (INT_MIN, INT_MAX), (5, 2), (-7, 4), (199, 300), (INT_MAX, INT_MIN))):
        start[row], end[row] = ends
    memory = torch.full((rows + 1, keys + 5), DIRT)
    inputs = mxfp4_query(q), *mxfp4_quantise(k), torch.randn(rows, heads), start, end
    call = Prefill(*inputs, "mxfp4", memory[:-1, :keys], False)
    plan = dispatch.choose_prefill(prefill_problem_of(*call[:7]), H200, "hopper.prefill_mxfp4").plan
    plan = HopperDecodedPlan(plan.block_q, 2, keys=keys) if decoded else replace(plan, ctas=2)
    call = call._replace(scratch=[torch.full(b.shape, 77, dtype=b.dtype) for b in plan.scratch.buffers])
    kernels = ((decode_mxfp4, "decode_keys"), (prefill_decoded, "mqa_logits"), (prefill_mxfp4, "mqa_logits"))
    for module, name in kernels if decoded else kernels[2:]:
        issued = execute(module, name, lambda: launch.score_prefill_mxfp4(call, plan))
    assert not decoded or (call.scratch[2].any() == (issued > NOTHING) == (far > 0))
    assert (memory[-1] == DIRT).all() and (memory[:, keys:] == DIRT).all()
    column = torch.arange(keys)
    inside = (column >= start[:, None]) & (column < end[:, None])
    check(call.out, lambda: reference.mqa_logits(*inputs, "mxfp4"), inside, 2.0**-18)
    return call.out
