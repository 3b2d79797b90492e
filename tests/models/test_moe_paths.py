"""Which way tokens go through the experts, and where that waits for the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.second_device import second_device

from sparse_attn.checkpoints.sharding import shard
from sparse_attn.generation import graph
from sparse_attn.mesh import planned_mesh
from sparse_attn.models import moe as experts
from sparse_attn.models.moe import grouped_waits, moe, takes_grouped
from sparse_attn.pipeline.options import Options
from sparse_attn.spec import preset
from sparse_attn.testing.launches import TARGETS
from sparse_attn.weight_layout import WeightLayout, quantise

MANY = replace(preset("tiny_v32").moe, num_experts=32, num_groups=1, top_groups=1, intermediate_size=64, num_shared=0)


def params_of(spec, hidden, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    count, inner = spec.num_experts, spec.intermediate_size
    shapes = dict(gate=(count, hidden), bias=(count,), gate_up=(count, 2 * inner, hidden), down=(count, hidden, inner))
    params = {name: (torch.randn(shape, generator=generator) * 0.1).to(device) for name, shape in shapes.items()}
    return {name: value if name in ("gate", "bias") else value.bfloat16() for name, value in params.items()}


CASES = [
    # hidden, intermediate, experts, dtype, grouped on a GPU, grouped on a CPU
    (64, 64, 32, torch.bfloat16, True, True),
    (8, 8, 17, torch.bfloat16, True, True),
    (64, 64, 16, torch.bfloat16, False, False),
    (64, 64, 32, torch.float32, False, True),
    (60, 4, 17, torch.float32, False, True),
    (64, 64, 32, torch.float16, False, True),
    (60, 64, 32, torch.bfloat16, False, False),
    (64, 60, 32, torch.bfloat16, False, False),
    (62, 64, 32, torch.float32, False, False),
    (65, 63, 32, torch.bfloat16, False, False),
]


@pytest.mark.parametrize("hidden,inner,count,dtype,on_gpu,on_cpu", CASES)
def test_the_grouped_product_takes_what_it_can(hidden, inner, count, dtype, on_gpu, on_cpu, monkeypatch):
    """moe itself, of tensors that lie on a CPU, and of tensors that say they lie on a GPU."""
    spec = replace(MANY, num_experts=count, intermediate_size=inner)
    params = {name: value.to(dtype) for name, value in params_of(spec, hidden).items()} | {
        name: value for name, value in params_of(spec, hidden).items() if name in ("gate", "bias")
    }
    taken = []
    monkeypatch.setattr(experts, "experts_grouped", lambda x, *_, **__: taken.append("grouped") or x)
    monkeypatch.setattr(experts, "experts_dense", lambda x, *_, **__: taken.append("dense") or x)
    moe(torch.randn(3, hidden).to(dtype), params, "", spec, options=Options("reference"))
    with second_device():
        moe(torch.randn(3, hidden).to(dtype), params, "", spec, options=Options("reference"))
    assert taken == ["grouped" if grouped else "dense" for grouped in (on_cpu, on_gpu)]
    assert takes_grouped(spec, hidden, dtype, on_gpu=True) == on_gpu
    assert takes_grouped(spec, hidden, dtype, on_gpu=False) == on_cpu


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize(
    "grid", (dict(expert=4, context=4), dict(tensor=4, expert=2), dict(tensor=2, expert=1)), ids=str
)
def test_parts_of_all_ranks_add_up(grid, packed, monkeypatch):
    """Products leave NaN in rows of other ranks' experts; by the grouped way and by the dense one. Packed ones are told
    how many experts all ranks have."""
    spec, hidden, tokens = replace(MANY, num_experts=128, num_shared=1), 64, 9
    params = dict(params_of(spec, hidden))
    generator = torch.Generator().manual_seed(3)
    for name, shape in (("shared_gate_up", (2 * 64, hidden)), ("shared_down", (hidden, 64))):
        params[name] = torch.randn(shape, generator=generator) * 0.1
    params = {name: value.float() for name, value in params.items()}
    if packed:
        layout = WeightLayout("e2m1", (1, 16), "fp32")
        params |= {name: quantise(params[name], layout) for name in ("gate_up", "down")}
    x = torch.randn(tokens, hidden, generator=generator)
    want = moe(x, params, "", spec, options=Options("reference"))
    product = experts._product

    def poisoned(rows, ends, weight, options):
        out = product(rows, ends, weight, options)
        return torch.where((torch.arange(len(out)) >= ends[-1]).unsqueeze(1), torch.nan, out)

    def told(*arguments, num_experts, **options):
        assert num_experts == spec.num_experts
        return packed_experts(*arguments, num_experts=num_experts, **options)

    packed_experts = experts.packed_experts
    monkeypatch.setattr(experts, "packed_experts", told)
    monkeypatch.setattr(experts, "_product", poisoned)
    monkeypatch.setattr(experts, "sum_over_ranks", lambda value, ranks: value)
    for dense in (False, *([] if packed else [True])):
        monkeypatch.setattr(experts, "DENSE_MAX_EXPERTS", 1000 if dense else 0)
        total = 0
        for place in range(max(grid.values())):
            mesh = planned_mesh(**grid, place=place)
            held = {name: shard(f"layers.0.moe.{name}", value, mesh) for name, value in params.items()}
            total = total + moe(x, held, "", spec, mesh=mesh, options=Options("reference"))
        torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("tokens", (1, 9))
def test_a_cpu_reads_the_chosen_experts_alone(tokens, dtype):
    """The others hold NaN, which an expert of no weight would carry into every sum. Values are those of an oracle in
    fp64, which goes token by token."""
    spec, hidden = replace(MANY, num_experts=19), 64
    params = params_of(spec, hidden)
    params = {name: params[name].to(dtype) for name in ("gate_up", "down")} | {
        "gate": params["gate"],
        "bias": params["bias"],
    }
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(2)).to(dtype)
    weights, ids = experts.route(x, params, "", spec, None, Options("reference"))
    want = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for weight, expert in zip(weights[token].double(), ids[token].tolist()):
            gate, up = (params["gate_up"][expert].double() @ x[token].double()).chunk(2)
            want[token] += weight * (params["down"][expert].double() @ (gate * torch.sigmoid(gate) * up))
    unread = sorted(set(range(19)) - set(ids.flatten().tolist()))
    assert unread
    for name in ("gate_up", "down"):
        params[name][unread] = torch.nan
    got = moe(x, params, "", spec, options=Options("reference"))
    worst = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    assert (got.double() - want).abs().max() < worst * want.abs().max()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_many_experts_compile_on_a_cpu_in_every_dtype(dtype):
    spec, hidden = replace(MANY, num_experts=19), 64
    params = {
        name: value if name in ("gate", "bias") else value.to(dtype) for name, value in params_of(spec, hidden).items()
    }
    x = torch.randn(9, hidden, generator=torch.Generator().manual_seed(2)).to(dtype)
    run = torch.compile(
        lambda x: moe(x, params, "", spec, options=Options("reference")), backend="eager", fullgraph=True, dynamic=True
    )
    want = moe(x, params, "", spec, options=Options("reference"))
    worst = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(run(x), want, rtol=0, atol=worst * want.abs().max().item())


def test_gradients_of_the_grouped_product_are_those_of_the_dense_one():
    spec, hidden = replace(MANY, num_experts=19), 64
    generator = torch.Generator().manual_seed(3)
    x, params = torch.randn(9, hidden, generator=generator), params_of(spec, hidden)
    weights, ids = experts.route(x, params, "", spec, None, Options("reference"))
    found = []
    for product in (experts.experts_dense, experts.experts_grouped):
        leaves = [one.detach().float().requires_grad_() for one in (x, weights, params["gate_up"], params["down"])]
        rows, shares, gate_up, down = leaves
        product(rows, shares, ids, gate_up, down).square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for dense, grouped in zip(*found):
        torch.testing.assert_close(grouped, dense, rtol=1e-4, atol=1e-5 * dense.abs().max().item())


@pytest.mark.parametrize("name", TARGETS)
def test_where_the_grouped_product_waits(name):
    assert grouped_waits(TARGETS[name]) == (name not in ("sm_90", "sm_100"))
    assert TARGETS[name].name == name


def reason(name, monkeypatch, spec, dtype, impl="auto", packed=False):
    monkeypatch.setattr(graph, "target_of", lambda device: TARGETS[name])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    return graph.uncapturable(torch.device("cuda", 1), impl, spec, dtype, packed=packed)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4_flash"])
def test_a_step_that_would_wait_is_not_captured(name, monkeypatch):
    spec = preset(name)
    for target in ("sm_80", "sm_89", "sm_120", "gfx942"):
        assert reason(target, monkeypatch, spec, torch.bfloat16) == (
            f"{spec.moe.num_experts} bf16 experts on NVIDIA L40S ({target}), where torch's grouped matrix product waits "
            "for the host, allowed: sm_90 and sm_10x, or at most 16 experts, or fp16 or fp32"
        )
        assert reason(target, monkeypatch, spec, torch.float16) is None
        assert reason(target, monkeypatch, spec, torch.bfloat16, packed=True) is None
    for target in ("sm_90", "sm_100"):
        assert reason(target, monkeypatch, spec, torch.bfloat16) is None
    assert reason("sm_90", monkeypatch, spec, torch.bfloat16, "reference").startswith("impl 'reference'")


def test_a_step_without_that_product_is_captured_anywhere(monkeypatch):
    few, dense = preset("tiny_v32"), replace(preset("deepseek_v32"), moe_layers=(False,) * 61)
    odd = replace(preset("deepseek_v32"), moe=replace(preset("deepseek_v32").moe, intermediate_size=2044))
    for spec in (few, dense, odd):
        assert reason("sm_80", monkeypatch, spec, torch.bfloat16) is None


def test_a_refusal_is_a_value_error_that_names_graph(monkeypatch):
    monkeypatch.setattr(graph, "uncapturable", lambda *_, **__: "something, allowed: another")
    with pytest.raises(ValueError, match="^graph: got something, allowed: another$"):
        graph.check_capturable(torch.device("cuda"), "auto", preset("tiny_v32"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden,inner", [(64, 64), (60, 64), (64, 60), (65, 63)])
def test_experts_of_any_width_on_a_gpu(hidden, inner):
    spec = replace(MANY, intermediate_size=inner)
    x, params = torch.randn(9, hidden).cuda().bfloat16(), params_of(spec, hidden, "cuda")
    got = moe(x, params, "", spec, options=Options())
    want = moe(x.float(), {name: value.float() for name, value in params.items()}, "", spec, options=Options())
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


@pytest.mark.gpu
def test_the_predicate_knows_this_gpu():
    """Whether a captured grouped product fails is what grouped_waits says of it."""
    from sparse_attn.framework.target import target_of

    spec, hidden = MANY, 64
    x, params = torch.randn(9, hidden, device="cuda").bfloat16(), params_of(spec, hidden, "cuda")
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        moe(x, params, "", spec, options=Options())
        stream.synchronize()
        try:
            with torch.cuda.graph(captured, stream=stream):
                moe(x, params, "", spec, options=Options())
            failed = False
        except RuntimeError:
            failed = True
    assert failed == grouped_waits(target_of(x.device))
