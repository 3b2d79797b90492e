"""The experts' products of fp8 and bf16 rows on Hopper without a GPU: their PTX, executed on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from support import products
from support.ptx.run import execute
from support.weights import random_weight

from sparse_attn.framework.target import H200
from sparse_attn.ops.layers.products.hopper import config
from sparse_attn.ops.layers.products.problem import experts_problem
from sparse_attn.weight_layout import PackedWeight, WeightLayout, dequantise

pytestmark = pytest.mark.aot
MXFP4 = WeightLayout("e2m1", (1, 32), "e8m0")
EXPERTS, DIRT = 4, 7.0
APART = 11  # powers of two between groups of a row, up to which both count
FEW_SMS = dataclasses.replace(H200, num_sms=3)  # so that CTAs have several tiles


def weight_of(outputs: int, columns: int) -> PackedWeight:
    """Whose codes begin at a multiple of 16 bytes."""
    weight = random_weight(MXFP4, EXPERTS, outputs, columns, moderate=True)
    codes = weight.codes.view(torch.uint8)
    return weight._replace(codes=torch.empty(codes.shape, dtype=codes.dtype).copy_(codes))


def dealt(ids: torch.Tensor, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, spans) as order_rows makes them; behind the last sorted row anything."""
    rows, first = ids.flatten(), 0
    order = torch.full((rows.numel(),), 2**30, dtype=torch.int32)
    spans = torch.full((EXPERTS + rows.numel() // block_m, 3), -1, dtype=torch.int32)
    for expert in range(EXPERTS):
        mine = (rows == expert).nonzero().flatten()
        end, tile = first + len(mine), expert + first // block_m
        order[first:end] = mine.int()
        last = len(spans) if expert == EXPERTS - 1 else expert + 1 + end // block_m
        for n, row in zip(range(tile, last), range(first, 1 << 30, block_m)):
            spans[n] = torch.tensor([expert if row < end else -1, row, end])
        first = end
    return order[:first], spans


def placed(codes: torch.Tensor) -> torch.Tensor:
    """In the order of device/mxfp4_operand.py."""
    return codes.unflatten(1, (-1, 4, 4, 2, 4)).permute(0, 1, 3, 4, 2, 5).reshape(codes.shape).contiguous()


def placed_exact(values: torch.Tensor) -> torch.Tensor:
    """In that of bf16."""
    return values.unflatten(1, (-1, 4, 8, 2, 2)).permute(0, 1, 3, 4, 2, 5).reshape(values.shape).contiguous()


def rows_of(n: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, a scale a row, values fp64)."""
    generator = torch.Generator().manual_seed(4)
    codes = (torch.randn(n, columns, generator=generator) * 50).to(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(-4, 4, (n,), generator=generator)
    return codes, scales, codes.double() * scales.double().unsqueeze(1)


def product(ids, hidden, intermediate, *, gated, activations="fp8", weight=None, clamp=0.5, target=FEW_SMS):
    """(what it gives, what it should, whose product may have lost 2^-13 of its magnitudes)."""
    from sparse_attn.ops.layers.products.hopper import experts, launch

    columns, outputs = (hidden, intermediate) if gated else (intermediate, hidden)
    weight = weight or weight_of(outputs * (2 if gated else 1), columns)
    pair = (weight_of(2 * intermediate, hidden), weight_of(hidden, intermediate))
    x = torch.zeros(ids.shape[0], hidden, dtype=torch.bfloat16)
    problem = experts_problem(x, ids, *pair, len(pair[0].codes), activations, False)
    assert config.supports_experts(problem, H200).able
    plan = config.plan_experts(problem, H200)
    order, spans = dealt(ids, plan.block_m)
    held = spans[spans[:, 0] >= 0]
    spans, count = torch.cat([held, torch.full_like(spans[len(held) :], 2**30)]), torch.tensor([len(held)]).int()
    if activations == "fp8":
        codes, scales, values = rows_of(ids.numel(), columns)
        rows = placed(codes.view(torch.uint8))
    else:
        values = products.rows_of(ids.numel(), columns, torch.bfloat16)
        rows, scales, values = placed_exact(values), None, values.double()
    weights = torch.rand(ids.numel(), generator=torch.Generator().manual_seed(1))
    memory = torch.full((ids.numel() + 1, outputs), DIRT, dtype=torch.bfloat16)
    full_order = torch.cat([order, torch.full((ids.numel() - len(order),), 2**30, dtype=torch.int32)])
    execute(experts, "multiply", lambda: launch._multiply(
        rows, scales, weight, (spans, count), full_order, weights, memory[:-1], plan, target,
        clamp if gated else None, gated=gated,
    ))  # fmt: skip
    want, all_values = torch.full(memory.shape, DIRT).double(), dequantise(weight).double()
    for place, row in enumerate(order.tolist()):
        sums = all_values[int(ids.flatten()[row])] @ values[place]
        if gated:
            gate, up = sums.chunk(2)
            if clamp is not None:
                gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
            want[place] = F.silu(gate) * up
            if activations == "exact":
                want[place] = placed_exact(want[place].unsqueeze(0))
        else:
            want[row] = sums * weights[row].double()
    return memory.double(), want


def ids_of(tokens: int, k: int) -> torch.Tensor:
    """Nobody's expert is 2, the first has most rows, some ids are of no expert."""
    ids = torch.randint(0, EXPERTS, (tokens, k), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    ids = torch.where(ids == 2, 0, ids)
    ids[0, 0], ids[-1, -1] = -1, EXPERTS
    return ids


@pytest.mark.few(2)
@pytest.mark.parametrize("activations", ["fp8", "exact"])
@pytest.mark.parametrize("gated", [True, False], ids=["gate and up", "down"])
@pytest.mark.parametrize("tokens, k, hidden, intermediate", [(40, 3, 256, 256), (7, 2, 512, 256), (160, 3, 1280, 256)])
def test_product(tokens, k, hidden, intermediate, gated, activations):
    """Tiles of 64, 32 and 128 rows, of several tiles an expert; rings that are filled more than once in a tile or over
    several. Dirt lies in rows of no expert."""
    got, want = product(ids_of(tokens, k), hidden, intermediate, gated=gated, activations=activations)
    torch.testing.assert_close(got, want, rtol=2**-8, atol=2**-11)


@pytest.mark.few(0)
@pytest.mark.parametrize("activations", ["fp8", "exact"])
def test_without_a_clamp(activations):
    got, want = product(ids_of(40, 3), 256, 256, gated=True, activations=activations, clamp=None)
    bounded, _ = product(ids_of(40, 3), 256, 256, gated=True, activations=activations)
    torch.testing.assert_close(got, want, rtol=2**-8, atol=2**-9)
    assert (got - bounded).abs().max() > 0.5


@pytest.mark.few(0)
@pytest.mark.parametrize("activations", ["fp8", "exact"])
def test_least_and_greatest_scales(activations):
    """Outputs 3, 4 and 5 have scales of 2^-127, 2^-126, and 2^127 or what fp8 rows leave of it; 6 has a NaN,
    beside which expert 0's first row has products of one sign."""
    weight = weight_of(256, 256)
    codes, scales = weight.codes.clone(), weight.scales.clone()
    codes[:, 5] = 0
    codes[:, 5, 70] = 1  # 0.5
    for output, scale in ((3, 0), (4, 1), (5, 254 if activations == "exact" else 240)):
        scales[:, output] = scale
    scales[:, 6, 1] = 255
    x = products.rows_of(40, 256, torch.bfloat16) if activations == "exact" else rows_of(40, 256)[2]
    signed = torch.where(x[0, 32:64] < 0, 10, 2).view(16, 2)  # -1 and 1
    codes[0, 6, 16:32] = (signed[:, 0] | signed[:, 1] << 4).to(codes.dtype)
    weight = weight_of(256, 256)._replace(codes=torch.empty_like(weight.codes).copy_(codes), scales=scales)
    ids = ids_of(20, 2)
    got, want = product(ids, 256, 256, gated=False, activations=activations, weight=weight)
    rows = ((ids >= 0) & (ids < EXPERTS)).flatten().nonzero().flatten()
    got, want = got[rows], want[rows]
    assert got[:, 6].isnan().all()
    for output, least in ((3, 2.0**-133), (4, 2.0**-133), (5, 2.0**100)):
        assert want[:, output].abs().max() > 64 * least
        torch.testing.assert_close(got[:, output], want[:, output], rtol=2**-6, atol=least)


@pytest.mark.few(0)
@pytest.mark.parametrize("activations", ["fp8", "exact"])
def test_nobodys_rows(activations):
    """No span has rows, and what lies there is nobody's."""
    got, want = product(torch.full((40, 3), -1, dtype=torch.int32), 256, 256, gated=False, activations=activations)
    assert torch.equal(got, want)


@pytest.mark.few(0)
def test_scales_that_lie_apart():
    """Up to 2^11 below the highest of 256 columns exact, beyond that 0; NaN of a group makes its output NaN."""
    weight = weight_of(256, 512)
    scales = torch.randint(110, 124, weight.scales.shape, generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    near = torch.cat([part.amax(2, keepdim=True) - part <= APART for part in scales.split(8, 2)], 2)
    assert not near.all()
    kept = PackedWeight(weight.codes, torch.where(near, scales, 0), weight.layout)
    ids = ids_of(20, 2)
    got, _ = product(ids, 256, 512, gated=False, weight=PackedWeight(weight.codes, scales, weight.layout))
    same, want = product(ids, 256, 512, gated=False, weight=kept)
    assert torch.equal(got, same)
    torch.testing.assert_close(got, want, rtol=2**-8, atol=2**-11)
    scales[:, 5, 1], scales[:, 30, 9] = 255, 255
    got, _ = product(ids, 256, 512, gated=False, weight=PackedWeight(weight.codes, scales, weight.layout))
    of_experts = ((ids >= 0) & (ids < EXPERTS)).flatten()
    assert got[:-1][of_experts].isnan().any(0).nonzero().flatten().tolist() == [5, 30]
    assert got[:-1][of_experts][:, [5, 30]].isnan().all() and not got[:-1][~of_experts].isnan().any()
