"""Under torch.autocast everything computes what it computes without."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from sparse_attn import Model, Sampling, generate
from sparse_attn.framework.torch_private import dynamo_counts
from sparse_attn.generation.text import shipped_text
from sparse_attn.models import moe
from sparse_attn.models.norms import layer_norm, linear_fp32
from sparse_attn.models.params import random_params
from sparse_attn.ops.indexer.scores import bf16_mqa_logits
from sparse_attn.ops.layers.hyper_connection import hyper_head, hyper_mix
from sparse_attn.pipeline import cache_layouts
from sparse_attn.pipeline.options import Options
from sparse_attn.spec import preset

TEXT = list(shipped_text().encode())
PROMPTS = [TEXT[:90], TEXT[200:207]]
NAMES = ("tiny_v32", "tiny_glm5", "tiny_v4")


def model_of(name: str, device="cpu") -> Model:
    spec = preset(name)
    return Model(spec, random_params(spec, seed=1, device=device), cache_layouts(spec, "fp8"))


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_generation(model, **options):
    common = dict(max_new_tokens=5, sampling=Sampling(temperature=0.7, seed=3), keep_logits=True, **options)
    want = generate(model, PROMPTS, **common)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(model.device.type, dtype=dtype):
            found = generate(model, PROMPTS, **common)
        assert found.tokens == want.tokens
        assert all(torch.equal(got, logits) for got, logits in zip(found.logits, want.logits))


@pytest.mark.parametrize("name", NAMES)
def test_a_generation_is_the_one_without(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # turning off what this machine lacks is no reason to warn
        check_generation(model_of(name))


def test_a_compiled_generation_is_the_one_without_and_compiles_nothing_more(monkeypatch):
    torch.compiler.reset()
    spec = replace(preset("tiny_v32"), num_layers=2, moe_layers=(False, True), index_layers=(True, True))
    model = Model(spec, random_params(spec, seed=1), cache_layouts(spec, "fp8"))
    monkeypatch.setattr(torch, "compile", lambda run, _compile=torch.compile, **_: _compile(run, backend="aot_eager"))
    generate(model, PROMPTS, max_new_tokens=5, compile=True)
    before = dynamo_counts()
    check_generation(model, compile=True)
    assert dynamo_counts() == before


@pytest.mark.gpu
@pytest.mark.parametrize("compile", (False, True))
@pytest.mark.parametrize("name", NAMES)
def test_a_generation_on_a_gpu_is_the_one_without(name, compile):
    torch.compiler.reset()
    check_generation(model_of(name, "cuda"), compile=compile)
    check_generation(model_of(name, "cuda"), compile=compile, graph=True)


def test_a_compiled_forward_is_the_one_without():
    """Autocast turned on around a compiled model, and inside of what is compiled."""
    torch.compiler.reset()
    hidden, weight = randn(5, 32), randn(16, 32, seed=1)

    def inside():
        with torch.autocast("cpu"):
            return linear_fp32(hidden, weight)

    want = F.linear(hidden, weight)
    assert torch.equal(torch.compile(inside, fullgraph=True, backend="aot_eager")(), want)
    with torch.autocast("cpu"):
        assert torch.equal(torch.compile(linear_fp32, fullgraph=True, backend="aot_eager")(hidden, weight), want)


def scores():
    """What the reference of an operator computes: torch's dispatcher leaves autocast on inside of it."""
    keys, ends = randn(40, 32), torch.full((6,), 40, dtype=torch.int32)
    return bf16_mqa_logits(randn(6, 4, 32, seed=1), keys, randn(6, 4, seed=2), torch.zeros_like(ends), ends)


def mixes():
    streams, fn, base, scale = randn(5, 4, 32), randn(24, 128, seed=1), randn(24, seed=2), randn(3, seed=3)
    head = hyper_head(streams, fn[:4], base[:4], scale[:1], eps=1e-6, norm_eps=1e-6)
    return torch.cat([hyper_mix(streams, fn, base, scale, iterations=3, eps=1e-6, norm_eps=1e-6).collapsed, head])


def experts():
    spec = preset("tiny_v32")
    weights = {name.removeprefix("layers.1."): value for name, value in random_params(spec, seed=0).items()}
    return moe.moe(randn(7, spec.hidden_size), weights, "moe.", spec.moe, options=Options())


def norms():
    return layer_norm(linear_fp32(randn(5, 32), randn(16, 32, seed=1)), randn(16), randn(16, seed=1), 1e-6)


@pytest.mark.parametrize("part", (scores, mixes, experts, norms))
def test_a_part_called_alone_is_the_one_without(part):
    want = part()
    with torch.autocast("cpu"):
        got = part()
    assert got.dtype == want.dtype and torch.equal(got, want)
