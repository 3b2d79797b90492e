"""A Model is an nn.Module like any other: its weights are parameters, they are saved, loaded and moved."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from support.steps import BLOCK, STEP_ROWS, WIDTH, prefill_plan, small, tensors_of

from sparse_attn import Model, build_step_plan, generate
from sparse_attn.models import deepseek_v4, deepseek_v32, mtp
from sparse_attn.models.params import param_dtype, random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import preset

NAMES = ("tiny_v32", "tiny_v4")
PROMPT = [list(range(1, 40))]


def model_of(name, seed=0, **options):
    spec = preset(name)
    return Model(spec, random_params(spec, seed, **options), cache_layouts(spec, "fp32"))


def logits_of(model):
    return generate(model, PROMPT, max_new_tokens=1, keep_logits=True).logits[0]


@pytest.mark.parametrize("name", NAMES)
def test_its_weights_are_parameters_under_their_own_names(name):
    params = random_params(preset(name), seed=0)
    model = Model(preset(name), params, cache_layouts(preset(name), "fp32"))
    assert dict(model.named_parameters()).keys() == model.state_dict().keys() == model.params.keys() == params.keys()
    for key, value in params.items():
        assert model.params[key] is value and isinstance(value, torch.nn.Parameter) and not value.requires_grad
    with pytest.raises(TypeError):
        model.params["embed"] = params["norm"]


def test_plain_tensors_become_parameters_that_share_their_memory():
    params = {name: value.data for name, value in random_params(preset("tiny_v32"), seed=0).items()}
    model = Model(preset("tiny_v32"), params, cache_layouts(preset("tiny_v32"), "fp32"))
    assert all(model.params[name].data_ptr() == value.data_ptr() for name, value in params.items())
    assert all(isinstance(value, torch.nn.Parameter) for value in model.params.values())


@pytest.mark.parametrize("assign", (False, True))
@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_state_is_what_runs(name, assign):
    model, other = model_of(name, seed=1), model_of(name, seed=2)
    assert not torch.equal(logits_of(model), logits_of(other))
    memory = io.BytesIO()
    torch.save(model.state_dict(), memory)
    memory.seek(0)
    assert not any(other.load_state_dict(torch.load(memory), assign=assign))
    assert torch.equal(logits_of(other), logits_of(model))
    assert not other.load_state_dict(random_params(other.spec, seed=3), assign=assign).missing_keys
    assert torch.equal(logits_of(other), logits_of(model_of(name, seed=3)))


def test_a_state_that_lacks_a_weight_is_refused():
    model = model_of("tiny_v32")
    state = model.state_dict()
    del state["layers.1.moe.gate"]
    with pytest.raises(RuntimeError, match="layers.1.moe.gate"):
        model.load_state_dict(state)


@pytest.mark.parametrize("move", ("to", "half"))
@pytest.mark.parametrize("name", NAMES)
def test_another_dtype_reaches_the_weights_that_are_held_in_it(name, move):
    """Routing, selection and rope keep theirs, as if the model had been loaded in the new dtype."""
    dtype = torch.float16 if move == "half" else torch.bfloat16
    model = model_of(name).half() if move == "half" else model_of(name).to(dtype)
    want = model_of(name, dtype=dtype)
    for key, value in want.params.items():
        assert model.params[key].dtype == value.dtype, key
        assert key.startswith("rope") or value.dtype == param_dtype(key, dtype)
    assert torch.equal(logits_of(model), logits_of(want))


def test_everything_moves_to_another_device():
    model = model_of("tiny_v4").to("meta")
    assert {value.device.type for value in model.params.values()} == {"meta"} and model.device.type == "meta"
    assert {value.device.type for value in model.state_dict().values()} == {"meta"}
    model.to_empty(device="cpu").load_state_dict(random_params(model.spec, seed=0))
    assert torch.equal(logits_of(model), logits_of(model_of("tiny_v4")))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_it_moves_to_a_gpu_and_back(name):
    model, want = model_of(name), model_of(name)
    prompts = dict(max_new_tokens=8)
    found = generate(model.cuda(), PROMPT, **prompts)
    assert model.device.type == "cuda" and {value.device.type for value in model.params.values()} == {"cuda"}
    assert found.tokens == generate(want, PROMPT, **prompts).tokens
    assert torch.equal(logits_of(model.cpu()), logits_of(want))


@pytest.mark.parametrize("again", (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))))
def test_a_copy_has_weights_of_its_own(again):
    """And runs them: nothing in it still points to the model it was copied from."""
    model = model_of("tiny_v32")
    want = logits_of(model)
    other = again(model)
    assert torch.equal(logits_of(other), want)
    with torch.no_grad():
        other.embed.mul_(2)
    assert torch.equal(logits_of(model), want) and not torch.equal(logits_of(other), want)
    assert other.forward.__self__ is other
    assert other.forward.__func__.__code__ is not model.forward.__func__.__code__


def test_other_weights_can_be_swapped_in_for_a_call():
    model, other = model_of("tiny_v32"), model_of("tiny_v32", seed=4)
    caches = [model.allocate_caches(2, 64, requests=1, step_rows=1) for _ in range(2)]
    ints = dict(dtype=torch.int32)
    plan = build_step_plan(
        torch.tensor([0, 3], **ints), torch.tensor([3], **ints), torch.zeros(1, 1, **ints), torch.arange(3),
        kv_capacity=3, max_context=9,
    )  # fmt: skip
    tokens = torch.tensor([5, 6, 7])
    got = torch.func.functional_call(model, dict(other.params), (tokens, caches[0], plan))
    assert torch.equal(got, other(tokens, caches[1], plan))


MISSING = {
    "layers.1.attn.q_a": r"\(\[96, 128\], which files call model.layers.1.self_attn.q_a_proj.weight\), allowed: every name",
    "layers.1.moe.gate_up": "which files call model.layers.1.mlp.experts.0.gate_proj.weight",
    "rope": r"\(the table of cos and sin, which model_rope_tables\(spec\) gives\), allowed: .*param_shapes\(spec\), and rope",
}


def step_of(name):
    """(model of two layers with one of multi-token prediction, its zeroed caches, plan of a prompt of 3)."""
    spec = small(name, 2)
    model = Model(spec, random_params(spec, 0, mtp=True), cache_layouts(spec, "fp32"))
    caches = model.allocate_caches(WIDTH, BLOCK, requests=1, step_rows=STEP_ROWS)
    return model, caches, prefill_plan(model, [3], [0], 3)


def without(model, name):
    return {key: value for key, value in model.params.items() if key != name}


@pytest.mark.parametrize("lacks", MISSING)
@pytest.mark.parametrize("name", NAMES)
def test_weights_that_lack_one_are_refused_before_anything_runs(name, lacks):
    model, caches, plan = step_of(name)
    own = type(caches)(*(layers[: model.spec.num_layers] for layers in caches))
    forward = (deepseek_v4 if name == "tiny_v4" else deepseek_v32).forward
    match = f"^params: got no {lacks} .*" + (MISSING[lacks] if name == "tiny_v32" else "")
    for compile in (False, True):
        with pytest.raises(ValueError, match=match):
            generate(Model(model.spec, without(model, lacks), model.layouts), PROMPT, max_new_tokens=2, compile=compile)
    with pytest.raises(ValueError, match=match):
        forward(without(model, lacks), model.spec, torch.arange(3), own, plan, layouts=model.layouts)
    assert not any(cache.any() for cache in tensors_of(caches))
    with pytest.raises(ValueError, match=r"got no embed .* and \d+ more, allowed"):
        forward({}, model.spec, torch.arange(3), own, plan, layouts=model.layouts)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_of_multi_token_prediction_that_lacks_a_weight_is_refused(name):
    model, caches, plan = step_of(name)
    own, params = type(caches)(*(layers[2:] for layers in caches)), without(model, "mtp.0.enorm")
    match = (
        r"^params: got no mtp.0.enorm \(\[128\]\), allowed: every name of models.shapes.prediction_shapes\(spec, 1\)"
    )
    for compile in (False, True):
        with pytest.raises(ValueError, match=match):
            lacking = Model(model.spec, params, model.layouts)
            generate(lacking, PROMPT, max_new_tokens=3, compile=compile, speculate=1)
    with pytest.raises(ValueError, match=match):
        inputs = params, model.predictor().spec, torch.arange(3), torch.zeros(3, 128), own, plan
        mtp.predict(*inputs, model.layouts, model.options)
    assert not any(cache.any() for cache in tensors_of(caches))
