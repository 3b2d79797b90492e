"""Which way tokens go through the experts, and where that waits for the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.second_device import second_device

from sparse_attn.models import moe as experts
from sparse_attn.models.moe import grouped_waits, moe, takes_grouped
from sparse_attn.runtime import graph
from sparse_attn.spec import preset
from sparse_attn.testing.launches import TARGETS

MANY = replace(preset("tiny_v32").moe, num_experts=32, num_groups=1, top_groups=1, intermediate_size=64, num_shared=0)


def params_of(spec, hidden, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    count, inner = spec.num_experts, spec.intermediate_size
    shapes = dict(gate=(count, hidden), bias=(count,), gate_up=(count, 2 * inner, hidden), down=(count, hidden, inner))
    params = {name: (torch.randn(shape, generator=generator) * 0.1).to(device) for name, shape in shapes.items()}
    return {name: value if name in ("gate", "bias") else value.bfloat16() for name, value in params.items()}


CASES = [
    # hidden, intermediate, experts, dtype, grouped
    (64, 64, 32, torch.bfloat16, True),
    (8, 8, 17, torch.bfloat16, True),
    (64, 64, 16, torch.bfloat16, False),
    (64, 64, 32, torch.float32, False),
    (64, 64, 32, torch.float16, False),
    (60, 64, 32, torch.bfloat16, False),
    (64, 60, 32, torch.bfloat16, False),
    (65, 63, 32, torch.bfloat16, False),
]


@pytest.mark.parametrize("hidden,inner,count,dtype,grouped", CASES)
def test_the_grouped_product_takes_what_it_can(hidden, inner, count, dtype, grouped, monkeypatch):
    """moe itself, of tensors that say they lie on a GPU."""
    spec = replace(MANY, num_experts=count, intermediate_size=inner)
    params = {name: value.to(dtype) for name, value in params_of(spec, hidden).items()} | {
        name: value for name, value in params_of(spec, hidden).items() if name in ("gate", "bias")
    }
    taken = []
    monkeypatch.setattr(experts, "experts_grouped", lambda x, *_: taken.append("grouped") or x)
    monkeypatch.setattr(experts, "experts_dense", lambda x, *_: taken.append("dense") or x)
    with second_device():
        moe(torch.randn(3, hidden).to(dtype), params, "", spec, impl="reference")
    assert taken == ["grouped" if grouped else "dense"]
    assert takes_grouped(spec, hidden, dtype, on_gpu=True) == grouped
    assert not takes_grouped(spec, hidden, dtype, on_gpu=False)


@pytest.mark.parametrize("name", TARGETS)
def test_where_the_grouped_product_waits(name):
    assert grouped_waits(TARGETS[name]) == (name not in ("sm_90", "sm_100"))
    assert TARGETS[name].name == name


def reason(name, monkeypatch, spec, dtype, impl="auto"):
    monkeypatch.setattr(graph, "target_of", lambda device: TARGETS[name])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    return graph.uncapturable(torch.device("cuda", 1), impl, spec, dtype)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4_flash"])
def test_a_step_that_would_wait_is_not_captured(name, monkeypatch):
    spec = preset(name)
    for target in ("sm_80", "sm_89", "sm_120", "gfx942"):
        assert reason(target, monkeypatch, spec, torch.bfloat16) == (
            f"{spec.moe.num_experts} bf16 experts on NVIDIA L40S ({target}), where torch's grouped matrix product waits "
            "for the host, allowed: sm_90 and sm_10x, or at most 16 experts, or fp16 or fp32"
        )
        assert reason(target, monkeypatch, spec, torch.float16) is None
    for target in ("sm_90", "sm_100"):
        assert reason(target, monkeypatch, spec, torch.bfloat16) is None
    assert reason("sm_90", monkeypatch, spec, torch.bfloat16, "reference").startswith("impl 'reference'")


def test_a_step_without_that_product_is_captured_anywhere(monkeypatch):
    few, dense = preset("tiny_v32"), replace(preset("deepseek_v32"), moe_layers=(False,) * 61)
    odd = replace(preset("deepseek_v32"), moe=replace(preset("deepseek_v32").moe, intermediate_size=2044))
    for spec in (few, dense, odd):
        assert reason("sm_80", monkeypatch, spec, torch.bfloat16) is None


def test_a_refusal_is_a_value_error_that_names_graph(monkeypatch):
    monkeypatch.setattr(graph, "uncapturable", lambda *_: "something, allowed: another")
    with pytest.raises(ValueError, match="^graph: got something, allowed: another$"):
        graph.check_capturable(torch.device("cuda"), "auto", preset("tiny_v32"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden,inner", [(64, 64), (60, 64), (64, 60), (65, 63)])
def test_experts_of_any_width_on_a_gpu(hidden, inner):
    spec = replace(MANY, intermediate_size=inner)
    x, params = torch.randn(9, hidden).cuda().bfloat16(), params_of(spec, hidden, "cuda")
    got = moe(x, params, "", spec, impl="auto")
    want = moe(x.float(), {name: value.float() for name, value in params.items()}, "", spec, impl="auto")
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


@pytest.mark.gpu
def test_the_predicate_knows_this_gpu():
    """Whether a captured grouped product fails is what grouped_waits says of it."""
    from sparse_attn.target import target_of

    spec, hidden = MANY, 64
    x, params = torch.randn(9, hidden, device="cuda").bfloat16(), params_of(spec, hidden, "cuda")
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        moe(x, params, "", spec, impl="auto")
        stream.synchronize()
        try:
            with torch.cuda.graph(captured, stream=stream):
                moe(x, params, "", spec, impl="auto")
            failed = False
        except RuntimeError:
            failed = True
    assert failed == grouped_waits(target_of(x.device))
