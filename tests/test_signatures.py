"""Signatures that can grow: options are keywords, and what is asked for at the top arrives where it is done."""

import ast
import configparser
import inspect
from pathlib import Path

import pytest
import torch

import sparse_attn as sa
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import latent, windowed
from sparse_attn.runtime.generate import Model, generate
from sparse_attn.torch_private import TorchDispatchMode, schema

INPUTS = {
    ("build_ragged_indices_from_dense", "lengths"), ("top_k_per_row", "row_starts"), ("top_k_per_row", "row_ends"),
    ("workspace_size", "layouts"), ("row_seeds", "device"), ("count_digits", "state"), ("count_digits", "sums"),
    ("pack_candidates", "row_starts"), ("count_digits", "row_starts"), ("count_digits", "row_ends"), ("count_ties", "row_starts"),
    ("count_ties", "row_ends"), ("take_winners", "row_starts"), ("take_winners", "row_ends"),
}  # fmt: skip


ROOT = Path(__file__).parent.parent
LAUNCHERS = sorted((ROOT / "sparse_attn" / "ops").rglob("launch.py"))


def functions():
    for module in (sa, sa.pipeline, latent, windowed):
        for name, value in vars(module).items():
            if inspect.isfunction(value) and not name.startswith("_") and value.__module__.startswith("sparse_attn"):
                yield name, value


def test_options_are_keywords():
    """So that another one can stand anywhere among them."""
    found = set()
    for name, function in functions():
        for parameter in inspect.signature(function).parameters.values():
            if parameter.default is not parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY:
                found.add((name, parameter.name))
    assert found == INPUTS


def test_public_functions_are_typed():
    public = [value for name in sa.__all__ if inspect.isfunction(value := getattr(sa, name))]
    assert len(public) > 40
    for function in public:
        signature = inspect.signature(function)
        untyped = [name for name, one in signature.parameters.items() if one.annotation is one.empty]
        assert not untyped and signature.return_annotation is not signature.empty, f"{function.__name__}: {untyped}"


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.parent.name)
def test_launchers_are_typed(path):
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    assert functions
    for function in functions:
        given = function.args
        parameters = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        untyped = [one.arg for one in parameters if one is not None and one.annotation is None and one.arg != "self"]
        assert not untyped and function.returns is not None, f"{function.name}: {untyped}"


def test_types_ship():
    """A checker reads annotations of a package that says it has them."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options.package_data"]["sparse_attn"] == "py.typed" and (ROOT / "sparse_attn" / "py.typed").exists()


def test_attention_gives_a_pair():
    """Callers unpack it; what more there may be to ask for comes by a keyword, in a type of its own."""
    assert sa.AttentionOutput._fields == ("out", "lse")


PRODUCTS = {
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "dot", "mv", "_grouped_mm", "_scaled_mm")
}


class Asked(TorchDispatchMode):
    """Keeps what every op was given as batch_invariant, by op, and which matrix products torch was asked for."""

    def __init__(self):
        super().__init__()
        self.values, self.products = {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sparse_attn":
            names = [argument.name for argument in schema(func).arguments]
            if "batch_invariant" in names:
                self.values.setdefault(schema(func).name, set()).add(args[names.index("batch_invariant")])
        elif func.overloadpacket in PRODUCTS:
            self.products.add(func.overloadpacket)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_batch_invariance_asked_of_a_model_reaches_every_product(name, invariant):
    spec = sa.preset(name)
    model = Model(spec, random_params(spec, seed=1), sa.cache_layouts(spec, "fp8"), batch_invariant=invariant)
    with Asked() as asked:
        generate(model, [list(range(40)), [7, 5]], max_new_tokens=2)
    ops = [f"sparse_attn::sparse_attn_{step}" for step in ("prefill", "decode")] + invariant * [
        "sparse_attn::grouped_linear"
    ]
    assert asked.values == dict.fromkeys(ops, {invariant}) and bool(asked.products) == (not invariant)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_batch_invariant_models_generate_within_their_workspace(name, graph):
    spec = sa.preset(name)
    params = random_params(spec, seed=1, device="cuda", dtype=torch.bfloat16)
    model = Model(spec, params, sa.cache_layouts(spec, "fp8"), batch_invariant=True)
    prompts = [[n * 7 % 250 for n in range(length)] for length in (300, 2, 40)]
    generate(model, prompts, max_new_tokens=5, prefill_tokens=128, graph=graph)
