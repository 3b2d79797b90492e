"""MXFP4 keys that are decoded once a call: when, to which bytes, in how much scratch; on a GPU the bits of the kernel
that decodes them in registers."""

from __future__ import annotations

import math

import pytest
import torch
from support.extremes import INT_MAX, INT_MIN
from support.index_logits import prefill_arguments, prefill_problem, prefill_problem_of
from support.index_topk import mxfp4_query

from sparse_attn import workspace
from sparse_attn.framework.target import H200
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout
from sparse_attn.mxfp4 import GROUP, NAN_SCALE, mxfp4_decode, mxfp4_quantise
from sparse_attn.ops.indexer.scores import dispatch, reference
from sparse_attn.ops.indexer.scores.plan import HopperDecodedPlan, Prefill
from sparse_attn.testing.launches import TARGETS

MXFP4 = IndexMxfp4Layout(128)
NAME = "hopper.prefill_mxfp4"


def plan_of(rows, keys, heads=64, target=H200, flavour="mxfp4"):
    return dispatch.choose_prefill(prefill_problem(rows, keys, heads=heads, flavour=flavour), target).plan


def test_when_keys_are_decoded_once():
    for rows, keys, decoded in (
        (256, 32768, True), (255, 1 << 20, False), (256, 32767, False), (2048, 8192, True), (2048, 4095, False), (1, 1 << 24, False),
    ):  # fmt: skip
        assert isinstance(plan_of(rows, keys), HopperDecodedPlan) == decoded
    assert isinstance(plan_of(4096, 8192, 128), HopperDecodedPlan)
    assert not isinstance(plan_of(4096, 8192, 32), HopperDecodedPlan)
    assert not isinstance(plan_of(4096, 8192, flavour="e4m3fn"), HopperDecodedPlan)
    assert plan_of(4096, 8192, target=TARGETS["sm_100"]).scratch.buffers == ()


def test_scratch():
    """132 bytes a key, and flags; what a plan of gathered keys takes is what a call's plan takes."""
    plan = plan_of(2048, 8193)
    assert plan.tiles == 129 and plan.ctas == H200.num_sms
    assert [buffer.nbytes for buffer in plan.scratch.buffers] == [8193 * 128, 8193 * 4, (129 + plan.ctas) * 4]
    for rows, keys, heads in ((2048, 8193, 64), (255, 8193, 64), (0, 5, 64), (3, 0, 64), (2048, 8193, 48)):
        found = dispatch.prefill_scratch(rows, keys, heads, MXFP4, H200)
        assert found == (plan_of(rows, keys, heads).scratch if rows and keys else workspace.Scratch())
    assert dispatch.prefill_scratch(2048, 8193, 64, IndexFp8Layout(128), H200) == workspace.Scratch()


@pytest.mark.aot
def test_four_launches():
    from sparse_attn.ops.indexer.scores import launch
    from sparse_attn.testing.launches import recording

    for rows, count in ((2048, 4), (100, 2)):
        with recording("sm_90") as launches:
            launch.mqa_logits(*prefill_arguments(rows, 8192, flavour="mxfp4"))
        assert len(launches) == count


@pytest.mark.aot
def test_scored_and_selected():
    """The scratch of scoring lies behind that of selecting."""
    from sparse_attn.ops.topk.fused import launch
    from sparse_attn.testing.launches import recording

    q, k, k_scale, weights, start, end, flavour = prefill_arguments(2048, 8192, flavour="mxfp4")
    with recording("sm_90") as launches:
        launch.index_topk_prefill(q, weights, k, k_scale, start, end, 512, flavour, 1 << 28)
    assert [one.kernel for one in launches[:3]] == ["decode_keys", "mqa_logits", "mqa_logits"]


def spread(keys):
    """Codes and scales of every kind: near, wide, far, zero and NaN groups, scales that are subnormal and the highest."""
    codes = torch.randint(0, 256, (keys, 64), dtype=torch.uint8)
    scales = torch.randint(100, 127, (keys, 4), dtype=torch.uint8)
    for key, some in enumerate(
        (
            (0, 0, 0, 0),
            (0, 26, 3, 1),
            (254, 253, 252, 228),
            (120, 5, NAN_SCALE, 99),
            (0, 27, 1, 2),
            (0, 0, 0, NAN_SCALE),
        )
    ):
        scales[key * 30 + 1] = torch.tensor(some, dtype=torch.uint8)
    return codes, scales


@pytest.mark.kernel
def test_decoded_keys(device):
    """Every value exactly, where groups are near each other; a flag for each tile in which some are not."""
    from sparse_attn.device import pdl
    from sparse_attn.framework.target import target_of
    from sparse_attn.ops.indexer.scores.hopper import decode_mxfp4

    torch.manual_seed(0)
    keys, padding = 201, 2
    codes, scales = spread(keys)
    wide = torch.full((keys, 16 + padding), -1, dtype=torch.int32, device=device)
    wide[:, :16] = codes.view(torch.int32).to(device)
    operands = torch.full((keys + 1, 32), 77, dtype=torch.int32, device=device)
    factors = torch.full((keys + 1,), 7.0, device=device)
    far = torch.full((5,), 77, dtype=torch.int32, device=device)
    decode_mxfp4.decode_keys[(4,)](
        wide, scales.to(device).view(torch.int32), operands, factors, far, keys, 16 + padding, BLOCK_KV=64,
        **pdl.launched(target_of(device)),
    )  # fmt: skip
    assert (operands[keys] == 77).all() and factors[keys] == 7 and far[4] == 77
    spread_of_key = scales.int().amax(1) - scales.int().amin(1)
    nan = (scales == NAN_SCALE).any(1)
    apart = (spread_of_key > 26) & ~nan
    assert far[:4].tolist() == [int(apart[tile * 64 : tile * 64 + 64].any()) for tile in range(4)] == [0, 1, 0, 0]
    t, j, h, i = torch.meshgrid(*(torch.arange(n) for n in (4, 4, 2, 4)), indexing="ij")
    place = (32 * j + 16 * h + 4 * t + i).flatten()
    values = operands[:keys].cpu().view(torch.float8_e5m2).double()[:, place]
    found = values * factors[:keys].cpu().double().unsqueeze(1) * 2.0**-13
    want = mxfp4_decode(codes, scales).double()
    near = ~apart & ~nan & ~want.isinf().any(1)
    assert torch.equal(found[near], want[near]) and near.sum() > 190
    assert found[nan].isnan().all() and values[~nan].isfinite().all() and values[apart].isfinite().all()


def case(rows, keys, heads, kind, bounds):
    """Of CPU tensors."""
    torch.manual_seed(rows + keys + heads)
    k, q = torch.randn(keys, 4, GROUP), torch.randn(rows, heads, 4, GROUP)
    powers = torch.exp2(torch.randint(-40, 41, (keys, 4, 1)).float())
    if "far" in kind:
        k = torch.where(torch.rand(keys, 1, 1) < 0.003, k * powers, k)
        k[torch.rand(keys, 4) < 0.002] = 0
    if "heads" in kind:
        q[::50, ::7] *= torch.exp2(torch.randint(-40, 41, (*q[::50, ::7].shape[:2], 4, 1)).float())
    if "nan" in kind:
        k[::97, 2, 3], q[0, 2, 1, 5] = math.nan, math.inf
    start, end = torch.zeros(rows, dtype=torch.int32), (torch.arange(1, rows + 1) * keys // rows).int()
    if bounds == "ragged":
        start = torch.randint(0, keys, (rows,), dtype=torch.int32)
        end = start + torch.randint(-5, keys, (rows,), dtype=torch.int32)
    for row, ends in enumerate(
        ((3, 3), (INT_MIN, INT_MAX), (5, 2), (-7, 4), (keys - 1, keys + 100), (INT_MAX, INT_MIN))
    ):
        if row < rows and bounds == "wild":
            start[row], end[row] = ends
    return mxfp4_query(q.flatten(2)), *mxfp4_quantise(k.flatten(1)), torch.randn(rows, heads), start, end


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("bounds", ["causal", "ragged", "wild"])
def test_same_bits(bounds, heads):
    """As without scratch, whatever scratch holds; NaN where the reference has it."""
    from sparse_attn.ops.indexer.scores.hopper import launch

    for rows, keys in ((1, 1), (3, 65), (301, 3333), (1500, 2000)):
        for kind in ("near nan", "far", "far heads nan"):
            inputs = case(rows, keys, heads, kind, bounds)
            call = Prefill(*(x.cuda() for x in inputs), "mxfp4", torch.empty(0), rows != 301)
            plain = dispatch.choose_prefill(prefill_problem_of(*call[:7])._replace(rows=1), H200, NAME).plan
            decoded = HopperDecodedPlan(plain.block_q, plain.ctas, keys=keys)
            scratch = [torch.full(b.shape, 77, dtype=b.dtype, device="cuda") for b in decoded.scratch.buffers]
            outs = []
            for plan in (plain, decoded, decoded):
                out = torch.full((rows + 1, keys + 5), 7.25, device="cuda")
                launch.score_prefill_mxfp4(call._replace(out=out[:rows, :keys], scratch=scratch), plan)
                outs.append(out)
            assert all(torch.equal(out.view(torch.int32), outs[0].view(torch.int32)) for out in outs[1:])
            want = reference.mqa_logits(*inputs, "mxfp4")
            column = torch.arange(keys)
            inside = (column >= inputs[4][:, None]) & (column < inputs[5][:, None])
            assert torch.equal(outs[1][:rows, :keys].cpu().isnan() & inside, want.isnan() & inside)
