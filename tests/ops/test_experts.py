"""Experts whose weights stay packed: reference and kernels against fp64, by bounds of every rounding between."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import long
from expecttest import assert_expected_inline
from support.products import EPSILON, rows_of
from support.weights import random_weight

from sparse_attn.fp8 import fp8_quantise
from sparse_attn.framework.target import H200, TARGETS
from sparse_attn.ops.layers.products import dispatch, packed_experts
from sparse_attn.ops.layers.products.problem import ExpertsProblem, Problem, experts_problem
from sparse_attn.testing.ops import opcheck, schema
from sparse_attn.weight_layout import PackedWeight, WeightLayout, dequantise, weight_rows

V32 = WeightLayout("e4m3", (128, 128), "fp32")
V4 = WeightLayout("e4m3", (128, 128), "e8m0")
SMALL = WeightLayout("e4m3", (32, 32), "e8m0")
MXFP4 = WeightLayout("e2m1", (1, 32), "e8m0")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EXPERTS, HIDDEN, INTERMEDIATE, K = 5, 256, 256, 3


def weights_of(layout, device="cpu", hidden=HIDDEN, intermediate=INTERMEDIATE, experts=EXPERTS):
    pair = (
        random_weight(layout, experts, 2 * intermediate, hidden, moderate=True),
        random_weight(layout, experts, hidden, intermediate, moderate=True, seed=7),
    )
    return tuple(PackedWeight(one.codes.to(device), one.scales.to(device), one.layout) for one in pair)


def routes(tokens, device="cpu", experts=EXPERTS, k=K):
    """(weights, ids) in views; experts 3 is nobody's, some ids are of no expert, expert 0 has most rows."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(0, experts, (tokens, 2 * k), generator=generator, dtype=torch.int32)
    drawn = torch.where(drawn == 3, 0, drawn)
    if tokens > 2:
        drawn[1, 2], drawn[2, 0] = -1, experts
    weights = torch.rand(tokens, 2 * k, generator=generator)
    return weights.to(device)[:, ::2], drawn.to(device)[:, ::2]


def quantised(values, activations, together=128):
    """What values may be off by where they are quantised: 2**-4 of themselves, or 2**-10 of a scale, at most 2 / 448 of
    the greatest of those that have it ``together``; twice that where they are off already."""
    if activations == "exact":
        return 0.0
    blocks = F.pad(values.abs(), (0, -values.shape[0] % together)).view(-1, together)
    least = (blocks.amax(-1, keepdim=True) * (2 / 448 * 2.0**-10)).expand_as(blocks).flatten()[: values.shape[0]]
    return torch.maximum(values.abs() * 2.0**-4, 2 * least)


def exact(x, weights, ids, gate_up, down, clamp, activations="exact", together=128):
    """(fp64 result, what it may be off by) on the CPU. together: see quantised. A sum of n products in fp32 loses
    n * 2**-24 of their magnitudes, and on a GPU's matrix units 2**-21 more; silu is 1.1-Lipschitz and taken in fp32.
    fp8 units lose 2**-13 of a block's products."""
    units = 2.0**-21 if activations == "exact" else 2.0**-13
    dtype, x, weights, ids = x.dtype, x.cpu().double(), weights.cpu().double(), ids.cpu()
    first, second = (dequantise(one).cpu().double() for one in (gate_up, down))
    out = torch.zeros_like(x)
    error = out.clone()
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token].tolist()):
            if not 0 <= expert < first.shape[0]:
                continue
            both = first[expert] @ x[token]
            beside = quantised(x[token], activations, together)
            slack = (first[expert].abs() @ (x[token].abs() + beside)) * (x.shape[1] * 2.0**-24 + units)
            slack += first[expert].abs() @ (0 * x[token] + beside)
            gate, up = both.chunk(2)
            off_gate, off_up = slack.chunk(2)
            if clamp is not None:
                gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
            if dtype != FP32:  # a product that is rounded before it is gated, as "grouped" does
                off_gate, off_up = off_gate + gate.abs() * EPSILON[dtype], off_up + up.abs() * EPSILON[dtype]
            inner = F.silu(gate) * up
            off = 1.1 * (up.abs() + off_up) * off_gate + F.silu(gate).abs() * off_up
            off += inner.abs() * (EPSILON[dtype] + 2.0**-20)
            here = second[expert] @ inner
            off += quantised(inner.abs() + off, activations, together)
            slack = (second[expert].abs() @ (inner.abs() + off)) * (inner.shape[0] * 2.0**-24 + units)
            slack += second[expert].abs() @ off + here.abs() * EPSILON[dtype]
            out[token] += weight * here
            error[token] += weight * slack
    return out, error * 1.001 + out.abs() * EPSILON[dtype]


def check(got, x, weights, ids, gate_up, down, clamp, activations="exact", together=128):
    want, allowed = exact(x, weights, ids, gate_up, down, clamp, activations, together)
    assert got.dtype == x.dtype and got.shape == x.shape and got.is_contiguous()
    off = (got.cpu().double() - want).abs() - allowed
    assert off.max().item() <= 0 if off.numel() else True, f"{off.max()} beyond the bound of {allowed.max()}"


@pytest.mark.parametrize("layout, dtype", [(V32, BF16), (SMALL, FP16), (MXFP4, FP32), (MXFP4, BF16)], ids=str)
def test_reference(layout, dtype):
    pair, x = weights_of(layout, hidden=96, intermediate=64), rows_of(9, 96, dtype).contiguous()
    for clamp in (None, 0.5):
        check(packed_experts(x, *routes(9), *pair, clamp=clamp, impl="reference"), x, *routes(9), *pair, clamp)


@pytest.mark.kernel
@pytest.mark.few(1)
@pytest.mark.parametrize("impl", ["grouped", "reference"])
@pytest.mark.parametrize("layout", [MXFP4, V32], ids=lambda layout: layout.name)
def test_fp8_activations(layout, impl, device):
    pair, x = weights_of(layout, device, hidden=96, intermediate=64), rows_of(5, 96, BF16, device)
    more = dict(clamp=0.5, activations="fp8")
    got = packed_experts(x, *routes(5, device), *pair, impl=impl, **more)
    check(got, x, *routes(5, device), *pair, **more)
    assert not torch.equal(got, packed_experts(x, *routes(5, device), *pair, impl=impl, clamp=0.5))


def test_nothing_to_add():
    pair, x = weights_of(MXFP4), torch.randn(2, HIDDEN)
    weights, ids = routes(2)
    assert packed_experts(x[:0], weights[:0], ids[:0], *pair).shape == (0, HIDDEN)
    for empty in (packed_experts(x, weights[:, :0], ids[:, :0], *pair), packed_experts(x, weights, ids * 0 - 1, *pair)):
        assert torch.equal(empty, torch.zeros_like(x))


@pytest.mark.kernel
@pytest.mark.few(1)
@pytest.mark.parametrize("clamp", [None, 0.5])
@pytest.mark.parametrize("tokens", [1, 3, 12])
@pytest.mark.parametrize("layout", [V32, V4, MXFP4], ids=lambda layout: layout.name)
def test_kernel(layout, tokens, clamp, device):
    """12 tokens: more rows of an expert than a CTA multiplies."""
    width = 256 if layout is MXFP4 else 128  # the fewest columns that it takes
    pair, x = weights_of(layout, device, width, width), rows_of(tokens, width, BF16, device)
    got = packed_experts(x, *routes(tokens, device), *pair, clamp=clamp, impl="swap_ab")
    check(got, x, *routes(tokens, device), *pair, clamp)


@pytest.mark.kernel
@pytest.mark.few(1)
@pytest.mark.parametrize("clamp", [None, 0.5])
@pytest.mark.parametrize("tokens", [1, 7, 30])
@pytest.mark.parametrize("layout", [MXFP4, V32, V4], ids=lambda layout: layout.name)
def test_kernel_of_sorted_rows(layout, tokens, clamp, device):
    """30 tokens: an expert of several tiles, and one without rows between others."""
    pair, x = weights_of(layout, device), rows_of(tokens, HIDDEN, BF16, device)
    got = packed_experts(x, *routes(tokens, device), *pair, clamp=clamp, impl="sorted")
    check(got, x, *routes(tokens, device), *pair, clamp)


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, clamp", [(1, 0.5), (30, None), (60, 0.5), (400, 0.5)])
@pytest.mark.parametrize("activations", ["exact", "fp8"])
def test_gpu_streamed(activations, tokens, clamp, hopper):
    """Tiles of 32, 64 and 128 rows."""
    pair, x = weights_of(MXFP4, hopper, hidden=512), rows_of(tokens, 512, BF16, hopper)
    more = dict(clamp=clamp, activations=activations)
    got = packed_experts(x, *routes(tokens, hopper), *pair, impl="hopper", **more)
    check(got, x, *routes(tokens, hopper), *pair, **more, together=512)


@pytest.mark.gpu
def test_gpu_every_e2m1_code_and_scales_that_lie_apart_with_fp8_activations(hopper):
    """A token reads a column of down: codes are exact beside scales up to 2**11 apart, and 0 beyond."""
    hidden = inner = 256
    generator = torch.Generator().manual_seed(9)
    codes = torch.randint(0, 256, (1, hidden, inner // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 134, (1, hidden, inner // 32), generator=generator, dtype=torch.uint8)
    down = PackedWeight(codes, scales, MXFP4.name)
    eight = scales[0].view(hidden, -1, 8)  # of 256 columns
    near = (eight.amax(2, keepdim=True) - eight <= 11).flatten(1).repeat_interleave(32, 1)
    ones = torch.zeros(1, 2 * inner, hidden // 2, dtype=torch.uint8)  # gate and up c: column c alone
    for c in range(inner):
        ones[0, [c, inner + c], c // 2] = 2 << 4 * (c % 2)
    gate_up = PackedWeight(ones, torch.full((1, 2 * inner, hidden // 32), 127, dtype=torch.uint8), MXFP4.name)
    x = torch.eye(inner, dtype=BF16) * 32  # silu(32) * 32 is 1024
    pair = [PackedWeight(one.codes.to(hopper), one.scales.to(hopper), one.layout) for one in (gate_up, down)]
    ids, weights = torch.zeros(inner, 1, dtype=torch.int32, device=hopper), torch.ones(inner, 1, device=hopper)
    got = packed_experts(x.to(hopper), weights, ids, *pair, activations="fp8", impl="hopper")
    want = 1024 * torch.where(near, dequantise(down)[0].double(), 0.0).t()
    assert not near.all() and torch.equal(got.cpu().double(), want)


@pytest.mark.kernel
@pytest.mark.few(0)
@pytest.mark.parametrize("impl", ["sorted", "grouped"])
def test_kernel_of_ids_that_are_no_experts_alone(impl, device):
    """Nothing is sorted, and no tile has rows; then the last expert alone has some."""
    pair, x = weights_of(MXFP4, device), rows_of(4, HIDDEN, BF16, device)
    weights = torch.ones(4, 2, device=device)
    for ids in ([[-1, EXPERTS]] * 4, [[EXPERTS - 1, -7]] * 4):
        ids = torch.tensor(ids, dtype=torch.int32, device=device)
        check(packed_experts(x, weights, ids, *pair, impl=impl), x, weights, ids, *pair, None)


PLACES = [[5, 0, 2**30], [-1, 3, 1], [2, 4, 2**30]]  # of three tokens' rows; wild where there is no expert
IDS = [[1, 0, -1], [EXPERTS, 0, EXPERTS - 1], [0, 0, 2**30]]
TOKENS = [0, 1, 2, 1, 2, 0]  # of sorted rows


@pytest.mark.kernel
@pytest.mark.parametrize("columns", [128, 1024, 1152])
def test_rows_sorted_for_the_streamed_kernel(columns, device):
    """Of x at any stride, to each of a token's experts; another row stays as it is."""
    from sparse_attn.device import pdl
    from sparse_attn.framework.target import target_of
    from sparse_attn.ops.layers.products.portable.routed_rows import sort_rows

    x = torch.randn(6, 2 * columns, dtype=BF16, device=device)[::2, ::2]
    ids, place = (torch.tensor(one, dtype=torch.int32, device=device) for one in (IDS, PLACES))
    out = torch.full((7, columns), 7.0, dtype=BF16, device=device)
    sort_rows[(3, -(-columns // 1024))](
        x, ids, place, out, 3, EXPERTS, columns, *x.stride(), BLOCK=1024, num_warps=1,
        **pdl.launched(target_of(out.device)),
    )  # fmt: skip
    in_order = out.cpu().view(7, -1, 8, 2, 4, 2).permute(0, 1, 4, 2, 3, 5).reshape(7, columns)
    assert torch.equal(in_order[:6], x.cpu()[TOKENS]) and (in_order[6] == 7).all()


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("columns", [128, 1024, 1152])
def test_rows_quantised_for_the_streamed_kernel(columns, dtype, device):
    """Bit by bit as one block of the reference's, of rows at any stride: zeros, small values beside large ones,
    the least ones, NaN and infinities; to each of a token's experts, or as they are. Other rows stay."""
    from sparse_attn.device import pdl
    from sparse_attn.framework.target import target_of
    from sparse_attn.ops.layers.products.portable.routed_rows import quantise_rows

    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(9, columns, generator=generator) * torch.exp2(torch.randn(9, 1, generator=generator) * 20)
    rows[0, :6] = torch.tensor([448.0, -447.0, -0.0, 1.0, 2.0**-9, 2.0**-10])
    rows[1, -1], rows[2], rows[3, 7], rows[4, -1] = 1e9, 0.0, float("nan"), float("-inf")
    rows[5], rows[6], rows[7, 0] = 7.0 * 2.0**-12, 2e-38, 3.5 * 2.0**100
    x = torch.empty(18, 2 * columns, dtype=dtype, device=device)[::2, ::2].copy_(rows.to(dtype))
    want, want_scales = fp8_quantise(x.float().cpu().unsqueeze(1), "e4m3fn", "pow2", 448 * 2.0**-126)
    ids, place = (torch.tensor(one, dtype=torch.int32, device=device) for one in (IDS, PLACES))
    for sort, tokens, of in (((None, None), 9, list(range(9))), ((ids, place), 3, TOKENS)):
        codes = torch.full((len(of) + 1, columns), 99, dtype=torch.uint8, device=device)
        scales, target = torch.full((len(of) + 1,), -1.0, device=device), target_of(codes.device)
        quantise_rows[(tokens,)](
            x, *sort, codes, scales, 3, EXPERTS, columns, *x.stride(), BLOCK=1024, FP8_CAST=target.fp8_cast,
            num_warps=1, **pdl.launched(target),
        )  # fmt: skip
        in_order = codes.cpu().view(len(codes), -1, 4, 2, 4, 4).permute(0, 1, 4, 2, 3, 5).reshape(-1, columns)
        assert torch.equal(in_order[:-1], want[of, 0]) and torch.equal(scales.cpu()[:-1], want_scales[of, 0])
        assert (in_order[-1] == 99).all() and scales[-1] == -1


@pytest.mark.kernel
@pytest.mark.parametrize("rows, experts, block_m", [(1, 1, 16), (50, 7, 4), (333, 19, 8), (5000, 3, 16)])
def test_sorted_rows_and_their_tiles(rows, experts, block_m, device):
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(-2, experts + 2, (rows,), generator=generator, dtype=torch.int32)
    from sparse_attn.ops.layers.products.portable.routed_rows import order_rows

    tiles = experts + rows // block_m
    order, place = (torch.full((rows,), -9, dtype=torch.int32, device=device) for _ in range(2))
    spans = torch.full((tiles, 3), -9, dtype=torch.int32, device=device)
    ends = torch.full((experts,), -9, dtype=torch.int32, device=device)
    order_rows[(experts,)](
        ids.to(device), order, spans, place, ends, rows, experts, tiles, BLOCK=64, BLOCK_M=block_m, PDL=False
    )
    held = [[row for row in range(rows) if ids[row] == expert] for expert in range(experts)]
    flat = sum(held, [])
    assert order.tolist() == flat + [-9] * (rows - len(flat))
    assert [place[row].item() for row in flat] == list(range(len(flat)))
    want, first = [], 0
    for expert, some in enumerate(held):
        assert ends[expert] == first + len(some)
        want += [[expert, first + at, first + len(some)] for at in range(0, len(some), block_m)]
        first += len(some)
    assert [span for span in spans.tolist() if span[0] >= 0] == want
    assert all(span[0] == -1 for span in spans.tolist() if span not in want)
    from sparse_attn.ops.layers.products.portable.routed_rows import keep_spans

    kept, count = torch.full_like(spans, -9), torch.full((1,), -9, dtype=torch.int32, device=device)
    keep_spans[(1,)](spans, kept, count, tiles, BLOCK=16, PDL=False)
    assert count.tolist() == [len(want)]
    assert kept.tolist() == want + [[-9] * 3] * (tiles - len(want))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [BF16, FP32] if long() else [FP32], ids=str)
def test_kernel_of_many_rows(dtype, device):
    pair, x = weights_of(SMALL, device, hidden=96, intermediate=64), rows_of(9, 96, dtype, device)
    for clamp in (None, 0.5):
        got = packed_experts(x, *routes(9, device), *pair, clamp=clamp, impl="grouped")
        check(got, x, *routes(9, device), *pair, clamp)


@pytest.mark.kernel
@pytest.mark.few(0)
def test_kernel_of_a_part_of_outputs_and_of_cut_blocks(device):
    """Rows of down that begin inside of a scale block: what one of several GPUs may hold."""
    gate_up, down = weights_of(V4, device)
    part, x = weight_rows(down, 100, 228), rows_of(3, 128, BF16, device)
    gate_up = PackedWeight(gate_up.codes[..., :128], gate_up.scales[..., :1], gate_up.layout)
    got = packed_experts(x, *routes(3, device), gate_up, part, impl="swap_ab")
    check(got, x, *routes(3, device), gate_up, part, None)


@pytest.mark.kernel
@pytest.mark.few(0)
def test_kernel_of_a_row_does_not_depend_on_the_others(device):
    pair, x = weights_of(MXFP4, device), rows_of(6, HIDDEN, BF16, device)
    weights, ids = routes(6, device)
    whole = packed_experts(x, weights, ids, *pair, impl="swap_ab")
    for some in ([5], [4, 0]):
        assert torch.equal(packed_experts(x[some], weights[some], ids[some], *pair, impl="swap_ab"), whole[some])


@pytest.mark.kernel
@pytest.mark.few(0)
def test_kernel_of_more_rows_of_an_expert_than_a_tile_has(device):
    """One expert for 11 rows: two tiles, of which the second has no row of its own for every place."""
    pair, x = weights_of(MXFP4, device), rows_of(11, HIDDEN, BF16, device)
    weights, ids = torch.ones(11, 1, device=device), torch.full((11, 1), 4, dtype=torch.int32, device=device)
    check(packed_experts(x, weights, ids, *pair, impl="swap_ab"), x, weights, ids, *pair, None)


@pytest.mark.kernel
def test_kernel_of_ids_of_no_expert(device, monkeypatch):
    """Their terms are not written: what memory holds there is not added."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(3))
    pair, x = weights_of(V4, device), rows_of(1, HIDDEN, BF16, device)
    ids = torch.tensor([[EXPERTS, 2, -1]], dtype=torch.int32, device=device)
    weights = torch.ones(1, 3, device=device)
    check(packed_experts(x, weights, ids, *pair, impl="swap_ab"), x, weights, ids, *pair, None)


@pytest.mark.kernel
@pytest.mark.few(0)
def test_kernel_of_nan(device):
    """In a code of expert 1: in every token that it serves, and in no other."""
    gate_up, down = weights_of(V4, device)
    codes = down.codes.view(torch.uint8).clone()
    codes[1, 17, 200] = 0xFF
    x = rows_of(4, HIDDEN, BF16, device)
    weights, ids = routes(4, device)
    got = packed_experts(x, weights, ids, gate_up, down._replace(codes=codes.view(torch.float8_e4m3fn)), impl="swap_ab")
    served = (ids == 1).any(1)
    want = torch.zeros_like(got, dtype=torch.bool)
    want[served, 17] = True
    assert served.any() and not served.all() and torch.equal(got.isnan(), want)


def test_schema():
    assert_expected_inline(
        schema("packed_experts").replace(", ", ",\n"),
        """\
sparse_attn::packed_experts(Tensor x,
Tensor weights,
Tensor ids,
Tensor gate_up,
Tensor gate_up_scales,
str gate_up_layout,
Tensor down,
Tensor down_scales,
str down_layout,
float? clamp,
int num_experts,
str activations,
bool batch_invariant,
str impl) -> Tensor""",
    )


def test_opcheck():
    (codes, scales, name), (down, down_scales, _) = weights_of(MXFP4, hidden=64, intermediate=32)
    x, (weights, ids) = torch.randn(4, 64).bfloat16(), routes(4)
    opcheck(
        "packed_experts", x, weights, ids, codes, scales, name, down, down_scales, name, 2.0, 99, "exact", False, "auto"
    )
    opcheck(
        "packed_experts", x[:0], weights[:0], ids[:0], codes, scales, name, down, down_scales, name, None, 5, "fp8",
        True, "auto",
    )  # fmt: skip


@pytest.mark.parametrize("change, error, message", [
    (dict(x=torch.zeros(3, HIDDEN, dtype=torch.float64)), TypeError, "x: got dtype float64"),
    (dict(x=torch.zeros(4, HIDDEN)), ValueError, "x: got shape"),
    (dict(ids=torch.zeros(3, K, dtype=torch.int64)), TypeError, "ids: got dtype int64"),
    (dict(weights=torch.zeros(3, K + 1)), ValueError, "weights: got shape"),
    (dict(weights=torch.zeros(3, K, dtype=BF16)), TypeError, "weights: got dtype bfloat16"),
    (dict(down=torch.zeros(5, HIDDEN, INTERMEDIATE)), TypeError, "down: got Tensor, allowed: a PackedWeight"),
    (dict(clamp=-0.5), ValueError, "clamp: got -0.5, allowed: None, or 0 and more"),
    (dict(clamp=float("nan")), ValueError, "clamp: got nan, allowed"),
    (dict(clamp="1"), TypeError, "clamp: got '1', allowed: a number"),
    (dict(gate_up=weights_of(MXFP4)[1]), ValueError, r"gate_up: got shape \[5, 256, 256\], allowed: \[5, 512, 256\]"),
    (dict(gate_up=weights_of(WeightLayout("e4m3", (8, 24), "fp32"))[0]), ValueError, "gate_up: got scale blocks of 24"),
    (dict(activations="int8"), ValueError, "activations: got 'int8'"),
    (dict(impl="swap_ab"), ValueError, "impl: 'swap_ab' needs"),
    (dict(impl="marlin"), ValueError, "impl: got 'marlin'"),
    (dict(num_experts=4), ValueError, "num_experts: got 4, allowed: at least 5"),
    (dict(num_experts=8.0), TypeError, "num_experts: got 8.0"),
])  # fmt: skip
def test_errors(change, error, message):
    gate_up, down = weights_of(MXFP4)
    weights, ids = routes(3)
    given = dict(x=torch.zeros(3, HIDDEN), weights=weights, ids=ids, gate_up=gate_up, down=down) | change
    with pytest.raises(error, match=message):
        packed_experts(**given)


def problem(tokens, k=6, experts=256, **more):
    facts = dict(dtype=BF16, ends=True, codes="e2m1", scale="e8m0", block=(1, 32)) | more
    first, second = (Problem(tokens * k, experts, a, b, **facts) for a, b in ((4096, 4096), (4096, 2048)))
    return ExpertsProblem(tokens, k, first, second, experts)


@pytest.mark.parametrize("name", TARGETS)
def test_which_kernel_runs(name):
    amd = name.startswith("gfx")
    few, many = ("grouped", "grouped") if amd else ("swap_ab", "sorted")
    most = "hopper" if TARGETS[name].is_hopper else many
    chosen = [dispatch.choose_experts(problem(tokens), TARGETS[name]).kernel.name for tokens in (1, 8, 64, 512, 4096)]
    assert chosen == [few] * 2 + [many] + [most] * 2
    for tokens in (1, 512, 4096):
        fp8 = problem(tokens)._replace(activations="fp8")
        chosen = dispatch.choose_experts(fp8, TARGETS[name]).kernel.name
        assert chosen == ("hopper" if TARGETS[name].is_hopper else "grouped")
        assert dispatch.choose_experts(fp8._replace(batch_invariant=True), TARGETS[name]).kernel.name == "grouped"


@pytest.mark.parametrize("activations, tokens, tile", [
    ("fp8", 1, (32, 4)), ("fp8", 512, (32, 4)), ("fp8", 2048, (64, 6)), ("fp8", 4096, (128, 4)),
    ("exact", 512, (32, 3)), ("exact", 2048, (64, 4)), ("exact", 4096, (128, 2)), ("exact", 20000, (128, 2)),
])  # fmt: skip
def test_tiles_on_hopper(activations, tokens, tile):
    plan = dispatch.choose_experts(problem(tokens)._replace(activations=activations), H200).plan
    assert (plan.block_m, plan.num_stages) == tile


@pytest.mark.parametrize("activations, tokens, alone, among", [
    ("exact", 64, ("hopper", 32), ("sorted", 16)), ("exact", 512, ("hopper", 128), ("hopper", 32)),
    ("fp8", 512, ("hopper", 128), ("hopper", 32)), ("exact", 2, ("swap_ab", 8), ("swap_ab", 8)),
])  # fmt: skip
def test_a_rank_counts_the_ids_of_its_experts_alone(activations, tokens, alone, among):
    """32 of 256 experts take an eighth of the ids in the mean."""
    for num_experts, want in ((32, alone), (256, among)):
        asked = problem(tokens, experts=32)._replace(num_experts=num_experts, activations=activations)
        choice = dispatch.choose_experts(asked, H200)
        assert (choice.kernel.name, choice.plan.block_m) == want


def test_grouped_products_have_tiles_of_their_own_ids():
    """Of e4m3 experts for fp8 rows: what a rank has of 8192 rows decides, and there is room for all of them."""
    facts = dict(experts=32, k=8, codes="e4m3", scale="fp32", block=(128, 128))
    for num_experts, rows in ((32, 128), (256, 64), (1024, 16)):
        asked = problem(1024, **facts)._replace(num_experts=num_experts, activations="fp8")
        plans = [choice.plan for choice in dispatch.grouped_products(asked, H200)]
        assert dispatch.choose_experts(asked, H200).kernel.name == "grouped"
        assert all((plan.block_m, plan.tiles) == (rows, 33 + (8192 - 33) // rows) for plan in plans)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.kernel
def test_how_many_experts_there_are_changes_no_result(impl, device):
    pair, (weights, ids) = weights_of(MXFP4, device=device), routes(9, device=device)
    x = rows_of(9, HIDDEN, BF16, device)
    few, many = (packed_experts(x, weights, ids, *pair, num_experts=count, impl=impl) for count in (None, 4096))
    torch.testing.assert_close(few, many, rtol=2**-7, atol=2**-7 * few.abs().max().item())


@pytest.mark.parametrize("change, reason", [
    (dict(tokens=171), "ids: got 1026, allowed: at most 1024"),
    (dict(tokens=22), "ids: got 132, allowed: at most 0.5 an expert"),
    (dict(tokens=11, codes="e4m3", scale="fp32", block=(128, 128)), "ids: got 66, allowed: at most 0.25 an expert"),
    (dict(tokens=1, dtype=FP16), "gate_up: rows: got float16"),
    (dict(tokens=512, dtype=FP16), "gate_up: rows: got float16"),
    (dict(tokens=1, aligned=False), "gate_up: codes: got any address"),
])  # fmt: skip
def test_what_it_does_not_take(change, reason):
    choice = dispatch.choose_experts(problem(change.pop("tokens"), **change), H200)
    assert choice.kernel.name == ("sorted" if reason.startswith("ids") else "grouped")
    assert choice.passed_over[0][1].startswith(reason)


def test_scales_that_are_not_copied_by_words():
    """A problem knows of them; on Hopper others multiply, and a request is refused."""
    pair = weights_of(MXFP4)
    moved = pair[1]._replace(
        scales=torch.empty(pair[1].scales.numel() + 1, dtype=torch.uint8)[1:].view_as(pair[1].scales)
    )
    x, ids = torch.zeros(9, HIDDEN, dtype=BF16), torch.zeros(9, K, dtype=torch.int32)
    found = experts_problem(x, ids, pair[0], moved, EXPERTS, "exact", False)
    assert (found.gate_up.scales_aligned, found.down.scales_aligned) == (True, False)
    many = problem(4096, scales_aligned=False)
    choice = dispatch.choose_experts(many, H200)
    assert choice.kernel.name == "sorted"
    with pytest.raises(
        ValueError, match="gate_up: scales: got any address and strides, allowed: rows at multiples of 8"
    ):
        dispatch.choose_experts(many, H200, "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 300])
@pytest.mark.parametrize("layout, sizes", [(MXFP4, (32, 1024, 512)), (V32, (16, 1024, 768))], ids=str)
def test_gpu_compiled_and_captured(layout, sizes, tokens):
    experts, hidden, intermediate = sizes
    pair = weights_of(layout, "cuda", hidden, intermediate, experts)
    x, (weights, ids) = rows_of(tokens, hidden, BF16, "cuda"), routes(tokens, "cuda", experts)
    eager = packed_experts(x, weights, ids, *pair, clamp=10.0)
    check(eager, x, weights, ids, *pair, 10.0)
    compiled = torch.compile(packed_experts, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x, weights, ids, *pair, clamp=10.0), eager)
    held = ids.contiguous()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = packed_experts(x, weights, held, *pair, clamp=10.0)
    for shift in (0, 3):
        held.copy_((ids + shift) % experts)
        graph.replay()
        check(out, x, weights, held, *pair, 10.0)
