"""Products of fp8 rows and fp8 weights: reference and kernel against fp64, by the bounds of both quantisations."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import long
from support.products import check_quantised, check_replays, drawn_ends, rows_of, tensor_of
from support.weights import random_weight

from sparse_attn.fp8 import fp8_quantise
from sparse_attn.framework.target import TARGETS, target_of
from sparse_attn.ops.layers.products import dispatch, grouped_linear, linear
from sparse_attn.ops.layers.products.portable.launch import quantise
from sparse_attn.ops.layers.products.problem import problem_of
from sparse_attn.ops.layers.products.reference import quantised_rows
from sparse_attn.testing.ops import opcheck
from sparse_attn.weight_layout import PackedWeight, WeightLayout, weight_rows
from sparse_attn.workspace import Workspace, size_of, use

V32 = WeightLayout("e4m3", (128, 128), "fp32")
V4 = WeightLayout("e4m3", (128, 128), "e8m0")
WIDE = WeightLayout("e4m3", (24, 256), "fp32")
SMALL = WeightLayout("e4m3", (32, 32), "e8m0")
MXFP4 = WeightLayout("e2m1", (1, 32), "e8m0")
LAYOUTS = (V32, V4, WIDE, SMALL, MXFP4)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ENDS = ([5, 21, 21, 33], [0, 1, 17, 37], [37, 37, 37, 37])


def to(device, weight):
    return PackedWeight(weight.codes.to(device), weight.scales.to(device), weight.layout)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_reference(layout, dtype):
    weight, rows = random_weight(layout, 4, 70, 320, moderate=True), rows_of(37, 320, dtype)
    for ends in ENDS:
        check_quantised(
            grouped_linear(rows, tensor_of(ends), weight, activations="fp8", impl="reference"), rows, ends, weight
        )


def test_rows_are_quantised_a_group_at_a_time():
    """The greatest of 128 columns takes a code of 224 to 448; a small group beside a large one keeps its digits."""
    held = quantised_rows(torch.tensor([[1000.0] + [0.013] * 127 + [0.013] * 128]))
    assert held[0, 0].item() == 1024.0 and held[0, 1].item() == 2 * 2.0**-9 * 4
    assert (held[0, 128:] - 0.013).abs().max().item() <= 0.013 / 16
    assert quantised_rows(torch.full((1, 5), float("inf"))).isnan().all()
    assert not quantised_rows(torch.zeros(1, 5)).any()


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_kernel_quantises_as_the_reference_does(dtype, device):
    """Bit by bit, of rows at any stride, scales in either order: largest magnitudes of 448 times a power of two and
    beside it, zeros of both signs, small values, NaN and infinities; columns that fill no group."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(11, 1300, generator=generator) * torch.exp2(torch.randn(11, 1, generator=generator) * 20)
    rows[0, :6] = torch.tensor([448.0, -447.0, -0.0, 1.0, 2.0**-9, 2.0**-10])
    rows[1, :3], rows[2, 128:140], rows[3, 7], rows[4, 1299] = 3.5, 1e-38, float("nan"), float("-inf")
    rows[5], rows[6, 256:384], rows[7, :128] = 0.0, torch.linspace(-449, 449, 128), 7.0 * 2.0**-12
    rows = rows.to(dtype).to(device)
    for part in (rows, rows[1:, :1280], rows.t().contiguous().t(), rows[:, 3:400]):
        n, columns = part.shape
        groups = -(-columns // 128)
        blocks = torch.nn.functional.pad(part.float().cpu(), (0, -columns % 128)).view(n, groups, 128)
        want, want_scales = fp8_quantise(blocks, "e4m3fn", "pow2", 448 * 2.0**-126)
        codes = torch.empty(n, groups * 128, dtype=torch.uint8, device=device)
        for scales in (torch.empty(n, groups, device=device), torch.empty(groups, n, device=device).t()):
            quantise(part, codes, scales, target_of(codes.device))
            assert torch.equal(codes.cpu(), want.flatten(1)) and torch.equal(scales.cpu(), want_scales)


@pytest.mark.kernel
def test_kernel_of_every_e2m1_code(device):
    """A row of one 1 reads a column: what e4m3 makes of the code is the code's own value."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 64)
    weight = PackedWeight(codes.to(device), torch.full((1, 256, 4), 127, dtype=torch.uint8, device=device), MXFP4.name)
    rows = torch.zeros(2, 128, device=device)
    rows[0, 6], rows[1, 127] = 1, 1
    got = grouped_linear(rows, None, weight, activations="fp8", impl="triton")
    assert torch.equal(got, grouped_linear(rows, None, weight, impl="reference"))


@pytest.mark.kernel
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_kernel(layout, dtype, device):
    weight, rows = to(device, random_weight(layout, 4, 70, 320, moderate=True)), rows_of(37, 320, dtype, device)
    for ends in ENDS if long() else ENDS[:1]:
        got = grouped_linear(rows, tensor_of(ends, device), weight, activations="fp8", impl="triton")
        check_quantised(got, rows, ends, weight)
    part = weight_rows(weight, 5, 69)
    got = grouped_linear(rows, tensor_of([-9, 21, 21, 2**31 - 1], device), part, activations="fp8", impl="triton")
    check_quantised(got, rows, [0, 21, 21, 37], part)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", [V32, V4, MXFP4], ids=lambda layout: layout.name)
def test_kernel_of_a_cut_weight(layout, device):
    """Its tiles begin within scale blocks of the whole one, where those have as many rows."""
    weight, rows = to(device, random_weight(layout, 1, 300, 128, moderate=True)), rows_of(5, 128, BF16, device)
    for start, stop in ((5, 299), (127, 129), (130, 290)):
        cut = weight_rows(weight, start, stop)
        check_quantised(grouped_linear(rows, None, cut, activations="fp8", impl="fp8"), rows, None, cut)


@pytest.mark.kernel
def test_kernel_of_nan_and_of_codes_at_any_stride(device):
    rows = torch.randn(3, 130, device=device)
    rows[1, 7], rows[2, 129] = float("nan"), float("-inf")
    codes, scales, name = random_weight(V4, 1, 140, 130, moderate=True)
    codes = codes.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).clone()
    codes[0, 3, 127], scales[0, 1, 0] = 0x7F, 255
    weight = to(device, PackedWeight(codes.view(torch.float8_e4m3fn), scales, name))
    for impl in ("reference", "triton"):
        bad = grouped_linear(rows, None, weight, activations="fp8", impl=impl).isnan().cpu()
        want = torch.zeros(3, 140, dtype=torch.bool)
        want[1:], want[:, 3], want[:, 128:] = True, True, True
        assert torch.equal(bad, want)


def test_opcheck():
    codes, scales, name = random_weight(V32, 3, 17, 128, moderate=True)
    rows, ends = torch.randn(9, 128).bfloat16(), torch.tensor([2, 2, 8], dtype=torch.int32)
    opcheck("grouped_linear_fp8", rows, ends, codes.view(torch.uint8), scales, name, False, "auto")


def test_linear():
    weight = PackedWeight(*random_weight(V32, 33, 192, moderate=True))
    x = torch.randn(2, 3, 192)
    whole = PackedWeight(weight.codes[None], weight.scales[None], weight.layout)
    check_quantised(linear(x, weight, activations="fp8").flatten(0, 1), x.flatten(0, 1), None, whole)


@pytest.mark.parametrize("weight, activations, message", [
    (random_weight(WeightLayout("e4m3", (24, 48), "fp32"), 1, 5, 144), "fp8", "weight: got e4m3/24x48/fp32, allowed: scale"),
    (torch.zeros(1, 5, 144), "fp8", "weight: got plain, allowed: scale"),
    (random_weight(V32, 1, 5, 128), "fp16", "activations: got 'fp16', allowed: 'exact', 'fp8'"),
])  # fmt: skip
def test_errors(weight, activations, message):
    with pytest.raises(ValueError, match=message):
        grouped_linear(torch.zeros(3, 144 if activations == "fp8" else 128), None, weight, activations=activations)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 16, 100, 3000])
@pytest.mark.parametrize("layout, shape", [(V32, (8, 700, 2048)), (V4, (1, 2048, 1536))], ids=str)
def test_gpu_many_rows_and_captured(layout, shape, n):
    weight, rows = to("cuda", random_weight(layout, *shape, moderate=True)), rows_of(n, shape[2], BF16, "cuda")
    spread = drawn_ends(n, shape[0])
    spread[:, -1] = n
    given = spread[0].int().cuda()
    check_quantised(grouped_linear(rows, given, weight, activations="fp8"), rows, spread[0].tolist(), weight)
    multiply = functools.partial(grouped_linear, rows, given, weight, activations="fp8")
    check_replays(multiply, given, spread, lambda out, ends: check_quantised(out, rows, ends, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [V32, V4], ids=lambda layout: layout.name)
@pytest.mark.parametrize("rows", [1, 16, 17, 128, 1041])
def test_gpu_product_of_torch(rows, layout):
    """Where torch multiplies it gives what our kernel gives, but for the order of fp32 sums, whatever lies in the rows
    of its scratch that nobody asked for."""
    codes, scales, name = random_weight(layout, 1, 384, 1024, moderate=True)
    x, target = rows_of(rows, 1024, BF16, "cuda").contiguous(), target_of(torch.device("cuda"))
    weight = PackedWeight(codes.cuda(), scales.cuda(), name)
    scratch = dispatch.choose_fp8(problem_of(x, None, weight), target, "torch").plan.scratch
    owner = Workspace(size_of(scratch), torch.device("cuda"))
    owner.lock()
    with use(owner):
        owner._scratch.fill_(0x7F)  # NaN, in codes and scales
        got = grouped_linear(x, None, weight, activations="fp8", impl="torch")
    apart = torch.zeros(1, 3, 16, dtype=scales.dtype, device="cuda")[:, :, :8].copy_(scales)
    assert torch.equal(grouped_linear(x, None, weight._replace(scales=apart), activations="fp8", impl="torch"), got)
    same = grouped_linear(x, None, weight, activations="fp8", impl="fp8")
    assert got.is_contiguous() and got.shape == (rows, 384)
    torch.testing.assert_close(got.float(), same.float(), rtol=2**-7, atol=2**-9 * same.float().abs().max().item())
    assert torch.equal(grouped_linear(x, None, weight, activations="fp8"), got if target.is_hopper else same)
    check_quantised(got, x, None, weight)


@pytest.mark.parametrize("rows", [1, 17, 4096])
@pytest.mark.parametrize("layout", [V32, V4], ids=lambda layout: layout.name)
def test_which_product_torch_takes(layout, rows):
    """On Hopper all of whole blocks, of any number of rows, which it has room to round up."""
    whole = torch.empty(rows, 1024, dtype=BF16, device="meta"), None, random_weight(layout, 1, 384, 1024)
    choice = dispatch.choose_fp8(problem_of(*whole), TARGETS["sm_90"])
    held = -(-rows // 16) * 16
    wanted = {"rows": (held, 1024), "row_scales": (8, held)} | ({"scales": (3, 8)} if layout is V4 else {})
    assert choice.kernel.name == "torch" and {one.name: one.shape for one in choice.plan.scratch.buffers} == wanted
    problem = problem_of(*whole)
    for change, reason in (
        (dict(whole=False), "weight: got a scale block that was cut, allowed: whole ones"),
        (dict(outputs=576), "outputs, columns: got 576 and 1024, allowed: multiples of 128 and 512"),
        (dict(columns=256), "outputs, columns: got 384 and 256, allowed: multiples of 128 and 512"),
        (dict(dtype=FP32), "rows: got float32, allowed: bfloat16"),
        (dict(aligned=False), "codes: got any address and strides"),
        (dict(codes="e2m1", block=(1, 32)), "weight: got e2m1 of (1, 32), allowed: e4m3 of (128, 128)"),
        (dict(groups=2, ends=True), "ends: got some, allowed: none"),
        (dict(batch_invariant=True), "batch_invariant: got True"),
    ):
        other = dispatch.choose_fp8(problem._replace(**change), TARGETS["sm_90"])
        assert other.kernel.name == "fp8" and other.passed_over[0][1].startswith(reason)
    assert dispatch.choose_fp8(problem, TARGETS["sm_100"]).kernel.name == "fp8"
