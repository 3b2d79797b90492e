"""DeepSeek-V3.2 and GLM-5 at their real dimensions, one layer at a time, on a GPU; see support/real_dims.py."""

from dataclasses import replace

import pytest
import torch
from support.real_dims import check_layer

from sparse_attn import pipeline
from sparse_attn.layout import PlainLayout
from sparse_attn.pipeline import select
from sparse_attn.spec import deepseek_v32, glm5, tiny_glm5, tiny_v32


def one_layer(spec, routed, **changes):
    """``spec`` cut to one layer. What is cut beside (vocabulary, experts, width of a dense MLP) touches no kernel."""
    return replace(spec, num_layers=1, moe_layers=(routed,), index_layers=(True,), **changes)


REAL = {
    "deepseek_v32 dense": one_layer(deepseek_v32(), False, vocab_size=512, dense_intermediate_size=2048),
    # More experts than moe.DENSE_MAX_EXPERTS, so that they run as they do in the whole model.
    "deepseek_v32 moe": one_layer(
        deepseek_v32(), True, vocab_size=512, moe=replace(deepseek_v32().moe, num_experts=32)
    ),
    "glm5 dense": one_layer(glm5(), False, vocab_size=512, dense_intermediate_size=2048),
    "glm5 moe": one_layer(glm5(), True, vocab_size=512, moe=replace(glm5().moe, num_experts=32)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_real_layer(name, device):
    torch.cuda.reset_peak_memory_stats()
    check_layer(REAL[name], device, (3000, 2300))
    assert torch.cuda.max_memory_allocated() < 20e9


@pytest.mark.few(1)
@pytest.mark.kernel
@pytest.mark.parametrize(
    "make,routed,kind", [(tiny_v32, True, "fp8"), (tiny_glm5, False, "fp8"), (tiny_glm5, True, "bf16")]
)
def test_tiny_layer(make, routed, kind, device):
    """The same harness at tiny dimensions."""
    spec = make()
    spec = one_layer(spec, routed, num_heads=2, index=replace(spec.index, top_k=7))
    check_layer(spec, device, (17, 11), kind=kind, decode_steps=2)


@pytest.mark.kernel
def test_harness_sees_faults(device, monkeypatch):
    """A selection of the worst keys instead of the best, and a tenth more weight on what was attended to."""
    spec = one_layer(tiny_glm5(), False, num_heads=2, index=replace(tiny_glm5().index, top_k=7))
    prefill, attend = select.index_topk_prefill, pipeline.attend

    def worst(q, weights, *arguments, impl, **keywords):
        return prefill(q, -weights if impl != "reference" else weights, *arguments, impl=impl, **keywords)

    monkeypatch.setattr(select, "index_topk_prefill", worst)
    with pytest.raises(AssertionError, match="index_topk_prefill"):
        check_layer(spec, device, (11,), decode_steps=1)
    monkeypatch.setattr(select, "index_topk_prefill", prefill)

    def louder(*arguments, impl, **keywords):
        got = attend(*arguments, impl=impl, **keywords)
        return got if impl == "reference" else got._replace(out=got.out * 1.1)

    monkeypatch.setattr(pipeline, "attend", louder)
    with pytest.raises(AssertionError, match="logits off"):
        check_layer(spec, device, (11,), decode_steps=1)


def test_layouts_are_the_fields_own():
    """656 and 132 bytes a token."""
    for spec in REAL.values():
        layouts = pipeline.cache_layouts(spec, "fp8")
        assert (layouts.kv.row, layouts.index.row) == (656, 132)
        assert not isinstance(layouts.index, PlainLayout)
