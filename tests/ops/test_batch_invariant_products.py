"""Products that are batch-invariant: a row's bits are those of the row alone, whatever rows there are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.products import check, rows_of
from support.weights import random_weight

from sparse_attn.framework.target import TARGETS
from sparse_attn.models.moe import moe
from sparse_attn.models.norms import linear_fp32
from sparse_attn.models.params import random_params
from sparse_attn.ops.layers.products import dispatch, grouped_linear, linear, packed_experts
from sparse_attn.ops.layers.products.portable import config as portable
from sparse_attn.ops.layers.products.problem import ExpertsProblem, Problem
from sparse_attn.ops.layers.products.swap_ab import config
from sparse_attn.pipeline.options import Options
from sparse_attn.spec import preset
from sparse_attn.weight_layout import PackedWeight, WeightLayout
from sparse_attn.workspace import Scratch

FP8, MXFP4 = WeightLayout("e4m3", (128, 128), "fp32"), WeightLayout("e2m1", (1, 32), "e8m0")
SMALL = WeightLayout("e4m3", (32, 32), "e8m0")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = "plain"
CASES = [(FP8, BF16, "exact"), (MXFP4, BF16, "exact"), (SMALL, FP16, "exact"), (MXFP4, BF16, "fp8"), (PLAIN, FP32, "exact"),
         (PLAIN, BF16, "exact")]  # fmt: skip


INVARIANT = Options(batch_invariant=True)


def weight_of(layout, dtype, device, *shape):
    if layout == PLAIN:
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    return PackedWeight(*(
        part.to(device) if isinstance(part, torch.Tensor) else part
        for part in random_weight(layout, *shape, moderate=True)
    ))  # fmt: skip


def entry(weight):
    """The first group's."""
    return weight[0] if isinstance(weight, torch.Tensor) else PackedWeight(weight[0][0], weight[1][0], weight[2])


def check_rows(product, count, sizes):
    """``product`` of the last rows, however many, and of rows in another order, against them among all."""
    whole = product(torch.arange(count))
    for size in sizes:
        assert torch.equal(product(torch.arange(count - size, count)), whole[count - size :])
    order = torch.arange(count).flip(0)
    assert torch.equal(product(order), whole[order])


def check_linear(layout, dtype, activations, device, count, sizes, impl="auto", outputs=70, columns=512):
    x = rows_of(count, columns, dtype, device)
    weight = entry(weight_of(layout, dtype, device, 1, outputs, columns))
    options = dict(batch_invariant=True, activations=activations, impl=impl)
    check_rows(lambda some: linear(x[some.to(device)], weight, **options), count, sizes)


@pytest.mark.parametrize("layout, dtype, activations", CASES, ids=str)
def test_reference(layout, dtype, activations):
    check_linear(layout, dtype, activations, "cpu", 19, (1, 2, 7))


def test_right_as_well():
    rows, weight = rows_of(9, 256, BF16, "cpu"), weight_of(FP8, BF16, "cpu", 3, 70, 256)
    ends = torch.tensor([2, 2, 8], dtype=torch.int32)
    check(grouped_linear(rows, ends, weight, batch_invariant=True), rows, ends.tolist(), weight)


@pytest.mark.kernel
@pytest.mark.few(2)
@pytest.mark.parametrize("layout, dtype, activations", CASES, ids=str)
def test_kernels(layout, dtype, activations, device):
    gpu = device.type == "cuda"
    count, sizes = (300, (1, 2, 9, 17, 40, 129)) if gpu else (5, (1, 2))
    check_linear(layout, dtype, activations, device, count, sizes, "triton", *((1000, 4096) if gpu else ()))


@pytest.mark.gpu
@pytest.mark.parametrize("outputs, columns", [(24576, 1536), (7168, 16384), (7168, 2048)])
def test_gpu_published_sizes(outputs, columns):
    """Splits, and more rows than partials are held of at once."""
    check_linear(FP8, BF16, "exact", "cuda", 700, (1, 8, 33, 128, 513), outputs=outputs, columns=columns)


def check_experts(layout, device, tokens, sizes, impl="auto", experts=5, hidden=256, inner=256, k=3):
    pair = (
        weight_of(layout, BF16, device, experts, 2 * inner, hidden),
        weight_of(layout, BF16, device, experts, hidden, inner),
    )
    x, generator = rows_of(tokens, hidden, BF16, device), torch.Generator().manual_seed(2)
    ids = torch.randint(-1, experts, (tokens, k), generator=generator, dtype=torch.int32).to(device)
    weights = torch.rand(tokens, k, generator=generator).to(device)
    options = dict(clamp=10.0, batch_invariant=True, impl=impl)

    def product(some):
        some = some.to(device)
        return packed_experts(x[some], weights[some], ids[some], *pair, **options)

    check_rows(product, tokens, sizes)


@pytest.mark.parametrize("layout", [FP8, MXFP4, SMALL], ids=lambda layout: layout.name)
def test_reference_of_experts(layout):
    check_experts(layout, "cpu", 11, (1, 2, 7), "reference")


@pytest.mark.kernel
@pytest.mark.few(0)
@pytest.mark.parametrize("impl", ["swap_ab", "grouped"])
def test_kernels_of_experts(impl, device, monkeypatch):
    """A few tokens at a time."""
    monkeypatch.setattr("sparse_attn.ops.layers.products.swap_ab.config.MOST_IDS", 7)
    check_experts(MXFP4, device, 5, (1, 3), impl)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [FP8, MXFP4, SMALL], ids=lambda layout: layout.name)
def test_gpu_experts(layout):
    check_experts(layout, "cuda", 500, (1, 8, 64, 200, 400), experts=32, hidden=1024, inner=512, k=6)


@pytest.mark.parametrize("name", TARGETS)
def test_neither_kernel_nor_splits_follow_from_rows(name):
    target = TARGETS[name]
    for codes, scale, block, dtype in (
        ("e4m3", "fp32", (128, 128), BF16), ("e2m1", "e8m0", (1, 32), BF16), ("plain", "none", (1, 1), BF16),
        ("plain", "none", (1, 1), FP32), ("e4m3", "e8m0", (32, 32), FP16),
    ):  # fmt: skip
        for groups in (1, 256):
            chosen, quantised = set(), set()
            for rows in (1, 3, 8, 64, 200, 1024, 5000, 40000):
                facts = dict(codes=codes, scale=scale, block=block, dtype=dtype, ends=groups > 1, batch_invariant=True)
                problem = Problem(rows, groups, 4096, 7168, **facts)
                choice = dispatch.choose(problem, target)
                assert choice.kernel.name != "swap_ab" or choice.plan.block_m in (*config.ROWS, config.WIDE_ROWS)
                parts = choice.plan.splits, choice.plan.block_k  # a tile of any rows gives the same bits
                whole = dataclasses.replace(choice.plan, tiles=0, scratch=Scratch())
                chosen.add((choice.kernel.name, parts if choice.kernel.name == "swap_ab" else whole))
                quantised.add(dataclasses.replace(portable.plan_fp8(problem, target), tiles=0, scratch=Scratch()))
            assert len(chosen) == len(quantised) == 1
    for rows in (1, 200, 5000):
        product = Problem(8 * rows, 256, 4096, 7168, BF16, True, "e4m3", "fp32", (128, 128), batch_invariant=True)
        routed = ExpertsProblem(
            rows, 8, product, product._replace(outputs=7168, columns=2048), 256, batch_invariant=True
        )
        few = "grouped" if target.vendor == "amd" else "swap_ab"
        assert dispatch.choose_experts(routed, target).kernel.name == few


@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_a_layer_of_experts(name):
    spec = preset(name)
    params = random_params(spec, seed=1)
    prefix = next(key for key in reversed(params) if key.endswith(".gate")).removesuffix("gate")
    x = torch.randn(21, spec.hidden_size, generator=torch.Generator().manual_seed(3))
    tokens = torch.arange(21) * 5 if prefix + "table" in params else None

    def product(some):
        given = None if tokens is None else tokens[some]
        return moe(x[some], params, prefix, spec.moe, given, options=INVARIANT)

    check_rows(product, 21, (1, 4, 10))
    torch.testing.assert_close(product(torch.arange(21)), moe(x, params, prefix, spec.moe, tokens, options=Options()))
    assert torch.equal(
        linear_fp32(x[4:5], params[prefix + "gate"], INVARIANT),
        linear_fp32(x, params[prefix + "gate"], INVARIANT)[4:5],
    )


def test_what_it_does_not_take():
    with pytest.raises(TypeError, match="rows: got dtype float64"):
        linear(torch.zeros(2, 4).double(), torch.zeros(3, 4).double(), batch_invariant=True)
