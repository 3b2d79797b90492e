"""Products of many rows, before which codes are expanded: against fp64, and when they are taken."""

from __future__ import annotations

import functools

import pytest
import torch
from support.products import check, check_replays, drawn_ends, in_line, problem, rows_of, tensor_of
from support.weights import random_weight

from sparse_attn.framework.target import H200, TARGETS
from sparse_attn.ops.layers.products import dispatch, grouped_linear
from sparse_attn.ops.layers.products.portable import config
from sparse_attn.weight_layout import PackedWeight, WeightLayout, weight_rows
from sparse_attn.workspace import Workspace, size_of, use

BF16 = torch.bfloat16
V32 = WeightLayout("e4m3", (128, 128), "fp32")
V4 = WeightLayout("e4m3", (128, 128), "e8m0")
SMALL = WeightLayout("e4m3", (32, 32), "e8m0")
ODD = WeightLayout("e4m3", (24, 256), "fp32")
MXFP4 = WeightLayout("e2m1", (1, 32), "e8m0")
LAYOUTS = (V32, V4, SMALL, ODD, MXFP4)
# Of 37 rows and four groups, and what the interpreter takes: tiles of 16 rows.
ENDS = ([37, 37, 37, 37], [0, 0, 0, 37], [5, 21, 21, 33], [0, 16, 32, 37], [0, 0, 0, 0])


def rows_in_line(n, columns, device):
    """Rows at multiples of 16 bytes, NaN between them and behind the last."""
    memory = torch.full((n + 3, columns + 8), float("nan"), dtype=BF16, device=device)
    memory[:n, :columns] = rows_of(n, columns, BF16, device)
    return memory[:n, :columns]


def weight_of(layout, groups, outputs, columns, device):
    codes, scales, name = random_weight(layout, groups, outputs, columns, moderate=True)
    return PackedWeight(in_line(codes).to(device), scales.to(device), name)


@pytest.fixture
def few_bytes(monkeypatch):
    """Room for ``outputs`` of a group, at least."""

    def allow(groups, columns, outputs=config.EXPANDED_TILE.outputs):
        dispatch.choose.cache_clear()
        monkeypatch.setattr(config, "EXPANDED_BYTES", 2 * groups * columns * outputs)

    yield allow
    dispatch.choose.cache_clear()


@pytest.mark.kernel
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_kernel(layout, device, few_bytes):
    """All outputs at once, and in three parts, the last of which is not whole."""
    weight, rows = weight_of(layout, 4, 300, 320, device), rows_in_line(37, 320, device)
    for ends in ENDS:
        check(grouped_linear(rows, tensor_of(ends, device), weight, impl="expanded"), rows, ends, weight)
    few_bytes(4, 320)
    check(grouped_linear(rows, tensor_of(ENDS[2], device), weight, impl="expanded"), rows, ENDS[2], weight)


@pytest.mark.kernel
@pytest.mark.few(3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_kernel_of_a_cut_weight(layout, device, few_bytes):
    """Parts begin within scale blocks, and end there."""
    whole, rows = weight_of(layout, 1, 400, 256, device), rows_in_line(20, 256, device)
    few_bytes(1, 256)
    for start, stop in ((5, 399), (127, 129), (130, 390)):
        cut = weight_rows(whole, start, stop)
        check(grouped_linear(rows, None, cut, impl="expanded"), rows, None, cut)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", [V32, MXFP4], ids=lambda layout: layout.name)
def test_kernel_gives_nan_where_a_scale_a_code_or_a_row_is_one_and_nowhere_else(layout, device):
    rows, weight = rows_in_line(20, 256, device).clone(), weight_of(layout, 1, 140, 256, "cpu")
    rows[1, 7] = float("nan")
    codes, scales = weight.codes.clone(), weight.scales.clone()
    want = torch.zeros(20, 140, dtype=torch.bool)
    want[1] = True
    if layout is V32:
        codes.view(torch.uint8)[0, 3, 127], scales[0, 1, 0] = 0xFF, float("nan")
        want[:, 3], want[:, 128:] = True, True
    else:
        scales[0, 77, 7] = 255
        want[:, 77] = True
    weight = PackedWeight(codes.to(device), scales.to(device), weight.layout)
    assert torch.equal(grouped_linear(rows, None, weight, impl="expanded").isnan().cpu(), want)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", [V32, MXFP4], ids=lambda layout: layout.name)
def test_kernel_of_every_code(layout, device):
    count, columns = (256, 128) if layout is V32 else (16, 256)
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 128)
    weight = weight_of(layout, 1, 256, columns, device)
    weight = weight._replace(codes=codes.to(device).view(weight.codes.dtype))
    rows = torch.zeros(20, columns, dtype=BF16, device=device)
    rows[torch.arange(3), torch.tensor([0, 77, columns - 2])] = 1
    got, want = (grouped_linear(rows, None, weight, impl=impl) for impl in ("expanded", "reference"))
    assert got[:, :count].isnan().sum() == (40 if layout is V32 else 0)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.kernel
def test_kernel_with_dirty_scratch(device):
    """Its last outputs do not fill it."""
    weight, rows = weight_of(V32, 1, 200, 128, device), rows_in_line(20, 128, device)
    scratch = config.plan_expanded(problem(20, 1, outputs=200, columns=128), H200).scratch
    owner = Workspace(size_of(scratch), device)
    owner.lock()
    with use(owner):
        owner._scratch.fill_(0x7F)  # NaN
        check(grouped_linear(rows, None, weight, impl="expanded"), rows, None, weight)


@pytest.mark.parametrize("change, reason", [
    (dict(dtype=torch.float16), "rows: got float16, allowed: bfloat16"),
    (dict(codes="plain", scale="none", block=(1, 1)), "weight: got a plain one, allowed: packed"),
    (dict(block=(32, 32)), "scale blocks: got 32 columns of fp32, allowed: multiples of 128"),
    (dict(columns=7172), "columns: got 7172, allowed: multiples of 8"),
    (dict(aligned=False), "rows, codes: got any address and strides"),
    (dict(rows_aligned=False), "rows, codes: got any address and strides"),
    (dict(rows=64000, groups=64), "weight: got 64 groups of 7168 columns, allowed: 128 outputs of each in 67108864 bytes"),
    (dict(rows=256, groups=2), "rows: got 128 a group, faster from 129"),
])  # fmt: skip
def test_what_it_does_not_take(change, reason):
    asked = problem(**dict(rows=4096, groups=1) | change)
    answer = config.supports_expanded(asked, H200)
    assert not answer.ok and answer.reason.startswith(reason)
    assert dispatch.choose(asked, H200).kernel.name == ("swap_ab" if asked.rows == 256 else "portable")


def test_where_it_runs():
    for name, target in TARGETS.items():
        for rows, groups in ((258, 2), (897, 1)):
            asked = problem(rows, groups), problem(rows, groups, batch_invariant=True)
            many, invariant = (dispatch.choose(one, target).kernel.name for one in asked)
            assert many == ("expanded" if name == "sm_90" else "portable") and invariant != "expanded"
    assert dispatch.choose(problem(896, 1), H200).kernel.name == "hopper.stream_k_wide"


def test_outputs_are_expanded_in_parts_with_the_fewest_waves():
    """Of tiles of 128 x 128; what fits at once stays whole."""
    for outputs, columns, groups, held in (
        (24576, 1536, 1, 21632), (7168, 16384, 1, 2048), (36864, 7168, 1, 4224), (576, 7168, 1, 576),
        (1024, 4096, 8, 1024), (1, 128, 1, 1), (8192, 7168, 1, 4608),
    ):  # fmt: skip
        plan = config.plan_expanded(problem(4096 * groups, groups, outputs=outputs, columns=columns), H200)
        assert plan.outputs_at_once == held


def test_scratch_does_not_depend_on_the_number_of_rows():
    """A workspace is sized for the most rows of a step, and steps of fewer take it, too."""
    for outputs, columns, groups, held in (
        (24576, 1536, 1, 21760), (7168, 16384, 1, 2048), (36864, 7168, 1, 4608), (576, 7168, 1, 576),
        (1024, 4096, 8, 1024), (1, 128, 1, 1),
    ):  # fmt: skip
        for rows in (129, 1024, 1025, 1500, 2048, 4096):
            plan = config.plan_expanded(problem(rows * groups, groups, outputs=outputs, columns=columns), H200)
            (buffer,) = plan.scratch.buffers
            assert buffer.shape == (groups, held, columns) and buffer.nbytes <= config.EXPANDED_BYTES
            assert 0 < plan.outputs_at_once <= held


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [129, 1000])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_gpu_many_rows_and_captured(layout, rows, few_bytes):
    """Both tiles, several groups, several parts; a captured product follows its ends."""
    weight = weight_of(layout, 3, 900, 1024, "cuda")
    ends, x = drawn_ends(3 * rows, 3), rows_in_line(3 * rows, 1024, "cuda")
    given = ends[0].int().cuda()
    for parts in (1, 3):
        if parts > 1:
            few_bytes(3, 1024, 384)
        check(grouped_linear(x, given, weight, impl="expanded"), x, ends[0].tolist(), weight)
    multiply = functools.partial(grouped_linear, x, given, weight, impl="expanded")
    check_replays(multiply, given, ends, lambda out, own: check(out, x, own, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("layout, outputs, columns", [(V32, 24576, 1536), (V32, 576, 7168), (V4, 4096, 8192)], ids=str)
def test_gpu_published_sizes(layout, outputs, columns):
    """Rows of all tiles, a few of them against fp64."""
    weight, x = weight_of(layout, 1, outputs, columns, "cuda"), rows_in_line(4095, columns, "cuda")
    got = grouped_linear(x, None, weight)
    some = torch.tensor([0, 127, 128, 2000, 4094], device="cuda")
    assert not got.isnan().any()
    check(got[some], x[some], None, weight)
