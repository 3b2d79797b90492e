"""Operators without a gradient, of which none is silent about it."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from support.arguments import GOOD
from support.steps import decode_state, filled_caches, fresh, layer_of, model_of, plan_of, prefill_plan

from sparse_attn import Model, generate, ops, sparse_attn_prefill, write_kv_cache
from sparse_attn.framework.registration import OPERATORS
from sparse_attn.framework.torch_private import TorchDispatchMode, schema
from sparse_attn.layout import PlainLayout
from sparse_attn.models.params import random_params
from sparse_attn.ops.ragged.lists import build_ragged_indices_from_dense

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WRITERS = {"indexer_k_quant_and_cache", "write_kv_cache", "compress_and_cache", "sparse_attn_into"}


def callables():
    """name -> what public functions call."""
    for package in ops.packages():
        importlib.import_module(f"sparse_attn.ops.{package}")
    return OPERATORS


CALLS = callables()


def arguments(name):
    """GOOD's, with every float tensor that is no cache requiring grad; and these."""
    made = GOOD[name]()
    written = {a.name for a in schema(CALLS[name].overload).arguments if a.alias_info and a.alias_info.is_write}
    followed = []
    for key, value in made.items():
        if isinstance(value, torch.Tensor) and value.dtype in FLOATS and key not in written:
            made[key] = value.clone().requires_grad_()
            followed.append(made[key])
    return (*made.values(), "auto"), followed


def tensors(outputs):
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs or ())


def floats(outputs):
    return [value for value in tensors(outputs) if value.is_floating_point()]


def compiled(call):
    fresh()
    return torch.compile(lambda *args: call(*args), fullgraph=True, backend="aot_eager")


def directly(call):
    return lambda *args: call.overload(*args)


def test_every_op_is_here():
    assert CALLS.keys() == GOOD.keys()
    assert {name for name, call in CALLS.items() if call.gradient} == {"sparse_attn_prefill", "merge_attn_states"}


REFUSING = [
    name for name, call in CALLS.items()
    if call.gradient is None and arguments(name)[1] and floats(call(*GOOD[name]().values(), "auto"))
]  # fmt: skip


@pytest.mark.parametrize("way", [lambda call: call, compiled, directly], ids=["eager", "compiled", "direct"])
@pytest.mark.parametrize("name", REFUSING)
def test_forward_runs_and_backward_raises_with_the_name(name, way):
    args, followed = arguments(name)
    got, want = way(CALLS[name])(*args), CALLS[name](*GOOD[name]().values(), "auto")
    for mine, theirs in zip(tensors(got), tensors(want)):
        assert mine.requires_grad == mine.is_floating_point()
        assert torch.equal(mine.detach().view(torch.uint8), theirs.view(torch.uint8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of whoever calls an operator by its own name
        for output in floats(got):
            with pytest.raises(NotImplementedError, match=f"^sparse_attn::{name} has no backward"):
                torch.autograd.grad(output.float().sum(), followed, retain_graph=True, allow_unused=True)
        with pytest.raises(NotImplementedError, match=f"^sparse_attn::{name} has no backward"):
            sum(output.float().sum() for output in floats(got)).backward()
    assert all(value.grad is None for value in followed)


@pytest.mark.parametrize(
    "name", [name for name in GOOD if arguments(name)[1] and name not in REFUSING and not CALLS[name].gradient]
)
def test_indices_have_no_gradient(name):
    args, _ = arguments(name)
    if name in WRITERS:
        with pytest.warns(UserWarning, match=f"^sparse_attn::{name} writes values that require grad"):
            assert CALLS[name](*args) is None
    else:
        assert not any(value.requires_grad for value in tensors(CALLS[name](*args)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_added_where_no_gradient_is_wanted(mode):
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    for name in REFUSING:
        args, _ = arguments(name)
        names.clear()
        with mode(), Names():
            got = CALLS[name](*args)
        assert names == [f"sparse_attn.{name}.default"]
        assert not any(value.requires_grad for value in tensors(got))


def test_opcheck_of_the_refusal():
    like = torch.randn(2, 3)
    torch.library.opcheck(torch.ops.sparse_attn.no_backward.default, (torch.randn(4), [like], "sparse_attn::op"))
    with pytest.raises(NotImplementedError, match="^sparse_attn::op has no backward"):
        torch.ops.sparse_attn.refuse_backward(torch.randn(4), like, "sparse_attn::op")


def test_what_follows_the_operators_has_its_gradient():
    kv, weight = torch.randn(3, 4), torch.randn(4, 5, requires_grad=True)
    rows = build_ragged_indices_from_dense(torch.tensor([[1, -1, 0]], dtype=torch.int32))
    out = sparse_attn_prefill(torch.randn(1, 1, 4), kv, rows, scale=1.0, d_v=4).out
    (out[:, 0] @ weight).sum().backward()
    assert torch.equal(weight.grad, out[0].t().expand(4, 5))


def test_a_cache_takes_no_history():
    cache, latent = torch.zeros(1, 4, 6), torch.randn(2, 4, requires_grad=True)
    with pytest.warns(UserWarning, match="nothing that reads them"):
        write_kv_cache(latent, torch.randn(2, 2), cache, torch.tensor([1, 2]), PlainLayout("fp32", 4, 2))
    assert not cache.requires_grad and torch.equal(cache[0, 1:3, :4], latent.detach())


def step(name, prefill, trained, one_layer):
    """A model of which the weights that end with one of ``trained`` require grad ("": all), and a step of it."""
    model = model_of(name, "fp8", layers=1 if one_layer else 3 if name == "tiny_v4" else 2)
    if one_layer and model.has_rings:
        spec = layer_of("indexed")
        model = Model(spec, random_params(spec, seed=0), model.layouts)
    weights = [key for key, value in model.params.items() if value.is_floating_point() and key.endswith(trained)]
    assert weights
    for key in weights:
        model.params[key].requires_grad_()
    if prefill:
        return model, torch.arange(9), prefill_plan(model, [7, 2], [0, 30], 60), [model.params[key] for key in weights]
    state = decode_state(2, 9, rings=model.has_rings)
    return model, state.tokens, plan_of(model, state), [model.params[key] for key in weights]


EVERY = ("",)
# What reaches the logits through a cache alone, with a weight that has its whole gradient behind the last operator.
THROUGH_A_CACHE = [
    ("tiny_v32", ("kv_a", "lm_head")),
    ("tiny_v4", ("attn.kv", "lm_head")),
    ("tiny_v4", ("entry.norm", "lm_head")),
]


def check_model(name, trained, prefill, backend=None):
    model, tokens, plan, weights = step(name, prefill, trained, one_layer=bool(backend))
    with torch.no_grad():
        want = model(tokens, filled_caches(model, 2), plan)
    if backend:
        fresh()
    run = torch.compile(model, fullgraph=True, dynamic=True, backend=backend) if backend else model
    got = run(tokens, filled_caches(model, 2), plan)
    torch.testing.assert_close(got.detach(), want, rtol=1e-4, atol=1e-4)  # products in grad mode round otherwise
    with pytest.raises(NotImplementedError, match="^sparse_attn::.* has no backward"):
        torch.autograd.grad(got.sum(), weights, allow_unused=True)


@pytest.mark.filterwarnings("ignore:.*writes values that require grad")
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("name,trained", [("tiny_v32", EVERY), ("tiny_v4", EVERY), *THROUGH_A_CACHE])
def test_a_model_runs_forward_and_refuses_backward(name, trained, prefill):
    check_model(name, trained, prefill)


@pytest.mark.few(1)
@pytest.mark.parametrize("name,trained", [("tiny_v32", EVERY), THROUGH_A_CACHE[-1]])
def test_a_compiled_model_runs_forward_and_refuses_backward(name, trained):
    check_model(name, trained, prefill=False, backend="aot_eager")


@pytest.mark.filterwarnings("error:.*writes values that require grad")
def test_generating_wants_no_gradient():
    model = model_of("tiny_v32", "fp8")
    want = generate(model, [[1, 2, 3]], max_new_tokens=3, keep_logits=True)
    for value in model.params.values():
        value.requires_grad_(value.is_floating_point())
    got = generate(model, [[1, 2, 3]], max_new_tokens=3, keep_logits=True)
    assert got.tokens == want.tokens and torch.equal(got.logits[0], want.logits[0]) and not got.logits[0].requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_backward_raises_on_a_gpu(backend):
    fresh()
    model = model_of("tiny_v32", "fp8", "cuda")
    for value in model.params.values():
        value.requires_grad_(value.is_floating_point())
    state = decode_state(2, 9, "cuda")
    run = torch.compile(model, fullgraph=True, dynamic=True, backend=backend) if backend else model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = run(state.tokens, filled_caches(model, 2), plan_of(model, state))
        with pytest.raises(NotImplementedError, match="^sparse_attn::.* has no backward"):
            logits.sum().backward()
