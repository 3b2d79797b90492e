"""Nothing depends on torch's default dtype or default device: every tensor that is made says both.

SPARSE_ATTN_OTHER_DEFAULTS runs other tests under other defaults (support/other_defaults.py); here is what once depended on
them.
"""

import ast
import contextlib
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from support.other_defaults import DTYPES

import sparse_attn as sa
from sparse_attn import Model, Sampling, generate
from sparse_attn.generation.plan_cache import HostPlanner
from sparse_attn.models import deepseek_v4
from sparse_attn.models.params import random_params
from sparse_attn.ops.indexer.scores import bf16_mqa_logits, bf16_paged_mqa_logits

ROOT = Path(__file__).parents[2]
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace",
    "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
}  # fmt: skip
# What gives integers whatever the default dtype is, as long as no argument is a float.
INTEGERS = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}
DEFAULTS = {
    "FloatTensor", "Tensor", "get_default_dtype", "set_default_device", "set_default_dtype", "set_default_tensor_type",
}  # fmt: skip


def sources():
    return sorted(path for folder in ("sparse_attn", "scripts") for path in (ROOT / folder).rglob("*.py"))


def left_to_defaults(source: str) -> list[str]:
    """What of ``source`` asks torch for a default: "line: why"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            names = {alias.name for alias in node.names} & (FACTORIES | DEFAULTS)
            found += [f"{node.lineno}: {name} without torch in front" for name in sorted(names)]
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        if name in DEFAULTS:
            found.append(f"{node.lineno}: torch.{name}")
        if name in FACTORIES:
            integers = name in INTEGERS and not any(map(may_be_float, node.args))
            wanted = {"device"} if integers else {"dtype", "device"}
            missing = set() if None in given else wanted - given  # None: **options, which hold them
            found += [f"{node.lineno}: torch.{name} without {what}=" for what in sorted(missing)]
        if name == "where" and len(node.args) == 3 and all(map(is_number, node.args[1:])):
            found.append(f"{node.lineno}: torch.where of two numbers")
    return found


def is_number(node: ast.AST) -> bool:
    return all(isinstance(part, (ast.Constant, ast.UnaryOp, ast.USub)) for part in ast.walk(node))


def may_be_float(node: ast.AST) -> bool:
    parts = list(ast.walk(node))
    floats = any(isinstance(part, ast.Constant) and isinstance(part.value, float) for part in parts)
    return floats or any(isinstance(part, ast.Div) for part in parts)


@pytest.mark.parametrize(
    "line, allowed",
    [
        ("torch.zeros(3, device=x.device)", False),
        ("torch.zeros(3, dtype=torch.int32)", False),
        ("torch.zeros(3, dtype=torch.int32, device=x.device)", True),
        ("torch.arange(n, device=x.device)", True),
        ("torch.arange(n)", False),
        ("torch.arange(n / 2, device=x.device)", False),
        ("torch.tensor(ids, device=x.device)", False),
        ("torch.where(keep, 1.0, 0.0)", False),
        ("torch.where(keep, x, 0.0)", True),
        ("torch.set_default_device('cuda')", False),
        ("from torch import zeros", False),
    ],
)
def test_the_reader_tells_what_is_left_to_defaults(line, allowed):
    assert bool(left_to_defaults(line)) != allowed


def test_no_factory_call_leaves_dtype_or_device_to_torch():
    found = [f"{path.relative_to(ROOT)}:{what}" for path in sources() for what in left_to_defaults(path.read_text())]
    assert not found, "\n".join(found)


@contextlib.contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def assert_same_under_every_default(function):
    """``function`` gives tensors of the same bits and dtypes whatever torch's defaults are. A tensor made on the
    default device would have no memory."""
    with default(torch.float32), torch.device("cpu"):
        wanted = function()
    for dtype in DTYPES:
        with default(dtype), torch.device("meta"):
            got = function()
        assert len(got) == len(wanted)
        for mine, other in zip(got, wanted):
            assert mine.dtype == other.dtype and mine.device == other.device and mine.equal(other)


def drawn(*shape, dtype=torch.float32):
    generator = torch.Generator("cpu").manual_seed(3)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def cached(layout):
    cache = sa.allocate_cache(layout, 2, 8, "cpu")
    layout.encode(cache, torch.arange(16, device="cpu"), drawn(16, layout.dim))
    return cache


ROWS = sa.Ragged(ints(0, 3, 5, 9, 15), ints(0, 2, 2, 5))
TABLE = ints(1, 0).view(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_on_a_cpu_is_the_same(dtype):
    q, kv, layout = drawn(3, 4, 20, dtype=dtype), drawn(16, 20, dtype=dtype), sa.LatentFp8Layout(16, 4, 16)
    cache = cached(layout)
    assert_same_under_every_default(lambda: sa.sparse_attn_prefill(q, kv, ROWS, scale=0.2, d_v=16))
    assert_same_under_every_default(lambda: sa.sparse_attn_decode(q, cache, ROWS, scale=0.2, layout=layout))
    assert_same_under_every_default(lambda: sa.merge_attn_states(drawn(2, 3, 4, 16), drawn(2, 3, 4)))


@pytest.mark.parametrize("layout", [sa.PlainLayout("bf16", 16), sa.IndexFp8Layout(16)], ids=lambda layout: layout.name)
def test_index_scores_and_what_they_select_are_the_same(layout):
    cache, weights, plain = cached(layout), drawn(2, 4), isinstance(layout, sa.PlainLayout)
    q = drawn(1, 2, 4, 16).to(torch.bfloat16 if plain else torch.float8_e4m3fn)
    scored = bf16_paged_mqa_logits if plain else sa.fp8_paged_mqa_logits
    paged = (ints(13, 14).view(1, 2), TABLE)
    ranges = ints(0, 2), ints(13, 14)

    def gathered():
        keys = sa.gather_indexer_k(cache, TABLE, ints(0, 14), 16, layout)
        return keys[:1] if plain else keys

    def over_gathered():
        if plain:
            return [bf16_mqa_logits(q[0], gathered()[0], weights, *ranges)]
        return [sa.fp8_mqa_logits(q[0], *gathered(), weights, *ranges)]

    assert_same_under_every_default(gathered)
    assert_same_under_every_default(over_gathered)
    assert_same_under_every_default(lambda: [scored(q, cache, weights, *paged, 16, layout)])
    assert_same_under_every_default(lambda: [sa.index_topk_decode(q, weights, cache, *paged, 5, 16, layout)])


@pytest.mark.parametrize("name", ["tiny_v32", "tiny_glm5", "tiny_v4"])
def test_random_weights_are_the_same(name):
    assert_same_under_every_default(lambda: list(random_params(sa.preset(name), seed=1).values()))


def test_compressor_state_is_fp32():
    spec = sa.preset("tiny_v4")

    def caches():
        made = deepseek_v4.allocate_caches(spec, sa.cache_layouts(spec, "fp8"), 2, 256, "cpu", requests=1, step_rows=4)
        return [cache for layers in made for cache in layers if cache is not None]

    assert_same_under_every_default(caches)


@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_generate_is_the_same(name):
    spec = sa.preset(name)
    model = Model(spec, random_params(spec, seed=1), sa.cache_layouts(spec, "fp8"))

    def generated():
        result = generate(
            model, [list(range(40)), numpy.array([7, 5])], max_new_tokens=3, prefill_tokens=24, keep_logits=True,
            sampling=Sampling(temperature=0.5, seed=2),
        )  # fmt: skip
        return [*result.logits, *(ints(*row) for row in result.tokens)]

    assert_same_under_every_default(generated)


SMALL = {
    "tiny_v32": dict(num_layers=1, moe_layers=(True,), index_layers=(True,)),
    "tiny_v4": dict(num_layers=1, layer_kinds=("indexed",), hash_layers=(False,)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SMALL)
def test_a_compiled_step_is_the_same(name):
    """Under a default device Dynamo traces torch's own mode too, which up to 2.13 keeps it from some tensor methods."""
    spec = replace(sa.preset(name), **SMALL[name])
    model = Model(spec, random_params(spec, seed=1), sa.cache_layouts(spec, "fp8"))

    def step(run, tokens=20):
        plan = sa.build_step_plan(
            ints(0, tokens), ints(tokens), ints(0).view(1, 1), torch.arange(tokens, device="cpu"),
            kv_capacity=tokens, max_context=256,
        )._replace(ring_table=ints(0).view(1, 1) if model.has_rings else None)  # fmt: skip
        caches = model.allocate_caches(1, 256, requests=1, step_rows=tokens)
        return run(torch.arange(tokens, device="cpu"), caches, plan)

    wanted = step(model)
    with default(torch.bfloat16), torch.device("meta"):
        got = step(torch.compile(model, fullgraph=True, dynamic=True, backend="eager"))
    assert got.dtype == torch.float32 and got.equal(wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_generate_under_a_cuda_default_is_the_same(name, graph):
    spec = sa.preset(name)
    model = Model(spec, random_params(spec, seed=1, device="cuda"), sa.cache_layouts(spec, "fp8"))
    prompts = [list(range(40)), [7, 5]]
    wanted = generate(model, prompts, max_new_tokens=9, graph=graph).tokens
    for dtype in DTYPES:
        with default(dtype), torch.device("cuda"):
            assert generate(model, prompts, max_new_tokens=9, graph=graph).tokens == wanted


@pytest.mark.gpu
def test_plans_from_the_host_under_a_cuda_default_are_the_same():
    def planned():
        planner = HostPlanner(max_requests=2, max_tokens=4, max_blocks=2, max_context=64, kv_capacity=9)
        table, slots = ints(0, 1, -1, -1).view(2, 2).cuda(), torch.arange(3, device="cuda")
        return [part.cpu() for part in planner.plan(ints(0, 1, 3), ints(9, 2), table, slots, num_decodes=1)[:9]]

    wanted = planned()
    with torch.device("cuda"):
        assert all(mine.equal(other) for mine, other in zip(planned(), wanted))
