"""Models that quantise activations of prefill steps: which products do, what that changes, and the scratch it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.requests import Requests

from sparse_attn import Model, generate
from sparse_attn.checkpoints.formats import first_layers
from sparse_attn.checkpoints.random_packed import random_packed_params
from sparse_attn.framework import torch_private
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import Bounds, cache_layouts
from sparse_attn.spec import preset, tiny_glm5, tiny_v4, tiny_v32
from sparse_attn.weight_layout import PackedWeight

SPECS = {spec.name: spec for spec in (tiny_v32(), tiny_glm5(), tiny_v4())}
TEXT = [[(7 * at + r) % 250 for at in range(40)] for r in range(2)]


class Products(torch_private.EagerDispatchMode):
    """The weights that products multiply by, by address of their codes, of rows that are quantised and others."""

    def __init__(self):
        super().__init__()
        self.quantised: list[int] = []
        self.exact: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("sparse_attn::")
        given = dict(zip((argument.name for argument in torch_private.schema(func).arguments), args))
        if name == "packed_experts":
            into = self.quantised if given["activations"] == "fp8" else self.exact
            into += [given["gate_up"].data_ptr(), given["down"].data_ptr()]
        elif name in ("grouped_linear", "grouped_linear_fp8") and given["layout"] != "plain":
            (self.exact if name == "grouped_linear" else self.quantised).append(given["codes"].data_ptr())
        return func(*args, **(kwargs or {}))


def requests_of(name, prefill_activations):
    spec = SPECS[name]
    requests = Requests(spec, random_packed_params(spec, 0, dtype=torch.float32), cache_layouts(spec, "fp8"), 2, 48)
    model = requests.model
    requests.model = Model(
        spec, model.params, model.layouts, model.impl, model.logits_bytes, prefill_activations=prefill_activations
    )
    return requests


def multiplied(requests, **step):
    with Products() as seen:
        logits = requests.step(**step)
    return seen, torch.cat(logits)


@pytest.mark.parametrize("name", SPECS)
def test_products_of_steps_with_prefill_rows_are_quantised(name):
    exact, fp8 = requests_of(name, "exact"), requests_of(name, "fp8")
    packed = [value.codes.data_ptr() for value in fp8.model.params.values() if isinstance(value, PackedWeight)]
    prompt, mixed = dict(prefill=[(0, TEXT[0][:20])]), dict(decode=[(0, [5])], prefill=[(1, TEXT[1][:9])])
    for step in (prompt, mixed):
        wanted, plain = multiplied(exact, **step)
        assert not wanted.quantised
        seen, logits = multiplied(fp8, **step)
        assert sorted(seen.quantised) == sorted(packed) and not seen.exact
        off = (logits - plain).norm() / plain.norm()  # 1.4 where they have nothing in common
        assert 1e-4 < off < 0.7, off
    decode = dict(decode=[(0, [3]), (1, [4])])
    for cache, other in zip(sum(fp8.caches, ()), sum(exact.caches, ())):
        if cache is not None:
            cache.copy_(other)
    wanted, plain = multiplied(exact, **decode)
    seen, logits = multiplied(fp8, **decode)
    assert sorted(seen.exact) == sorted(packed) and not seen.quantised and not wanted.quantised
    assert torch.equal(logits, plain)


def test_plain_weights_among_packed_ones_are_multiplied_exactly():
    spec = tiny_v32()
    params = random_packed_params(spec, 0, dtype=torch.float32)
    name = "layers.0.attn.q_a"
    params[name] = random_params(spec, 0, dtype=torch.float32)[name]
    requests = requests_of(spec.name, "fp8")
    model = requests.model
    requests.model = Model(spec, params, model.layouts, prefill_activations="fp8")
    seen, _ = multiplied(requests, prefill=[(0, TEXT[0][:20])])
    packed = [value for value in params.values() if isinstance(value, PackedWeight)]
    assert len(seen.quantised) == len(packed) and not seen.exact


@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_drafting_layer(name):
    spec = SPECS[name]
    model = Model(
        spec, random_packed_params(spec, 0, dtype=torch.float32, mtp=True), cache_layouts(spec, "fp8"),
        prefill_activations="fp8",
    )  # fmt: skip
    packed = [value.codes.data_ptr() for value in model.params.values() if isinstance(value, PackedWeight)]
    with Products() as seen:
        generate(model, TEXT[:1], max_new_tokens=1, speculate=1)
    assert sorted(seen.quantised) == sorted(packed) and not seen.exact


def test_compiled():
    spec = tiny_v32()
    model = Model(
        spec, random_packed_params(spec, 0, dtype=torch.float32), cache_layouts(spec, "fp8"), prefill_activations="fp8"
    )
    eager, compiled = (
        generate(model, TEXT, max_new_tokens=4, prefill_tokens=24, keep_logits=True, compile=compile)
        for compile in (False, True)
    )
    assert eager.tokens == compiled.tokens
    for one, other in zip(eager.logits, compiled.logits):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * one.abs().max().item())


def test_errors():
    spec = tiny_v32()
    params, packed = random_params(spec, 0), random_packed_params(spec, 0)
    layouts = cache_layouts(spec, "fp8")
    with pytest.raises(ValueError, match="prefill_activations: got 'fp8' and no packed weight, allowed: 'exact'"):
        Model(spec, params, layouts, prefill_activations="fp8")
    for made in (lambda given: Model(spec, packed, layouts, prefill_activations=given),
                 lambda given: Bounds(1, 1, 1, prefill_activations=given)):  # fmt: skip
        with pytest.raises(ValueError, match="prefill_activations: got 'fp16', allowed: 'exact', 'fp8'"):
            made("fp16")
    assert Model(spec, packed, layouts, prefill_activations="fp8").invariant().prefill_activations == "fp8"


@pytest.mark.gpu
@pytest.mark.parametrize("length", [129, 1040])
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4_flash"])
def test_gpu_real_dimensions(name, length):
    """A few layers and experts. Prompts change no more than rounding and what it selects do, and the locked workspace
    suffices for them and for a captured step behind them."""
    spec = first_layers(preset(name), 4)
    spec = replace(spec, vocab_size=1024, moe=replace(spec.moe, num_experts=16))
    params = random_packed_params(spec, 0, "cuda")
    prompt = torch.randint(1024, (length,), generator=torch.Generator().manual_seed(3))
    exact, fp8 = (
        generate(
            Model(spec, params, cache_layouts(spec, "fp8"), prefill_activations=activations), [prompt],
            max_new_tokens=4, keep_logits=True, graph=True,
        ).logits[0][:length]
        for activations in ("exact", "fp8")
    )  # fmt: skip
    off = (fp8 - exact).norm() / exact.norm()
    assert 1e-3 < off < 0.7, off
