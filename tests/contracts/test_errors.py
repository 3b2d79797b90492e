"""Bad input to any public operator is refused by name, before an implementation is looked for."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch

import sparse_attn
from sparse_attn.framework import registration
from sparse_attn.framework.target import resolve_impl
from sparse_attn.framework.torch_private import schema
from sparse_attn.layout import PlainLayout
from sparse_attn.mesh import planned_mesh
from sparse_attn.ops.attention import sparse
from sparse_attn.ops.indexer import scores
from sparse_attn.ops.layers.router import biased_grouped_topk, hash_routed_experts
from sparse_attn.ops.ragged import lists
from sparse_attn.ops.topk import fused
from sparse_attn.pipeline.bounds import Bounds
from sparse_attn.pipeline.options import Options
from sparse_attn.testing.ops import public_functions

FUNCTIONS = [function for function in public_functions().values() if "impl" in inspect.signature(function).parameters]
OPERATORS = [*registration.OPERATORS.values()]


@pytest.fixture(autouse=True)
def no_implementation(monkeypatch):
    """Fails the test where an implementation would run."""

    def refuse(*args):
        raise AssertionError(f"{resolve_impl(*args)} was asked for")

    monkeypatch.setattr(registration, "resolve_impl", refuse)


def test_the_operators_are_here():
    assert len(FUNCTIONS) >= 35 and len(OPERATORS) >= 30
    assert {"top_k_per_row", "sparse_attn_decode", "write_kv_cache"} <= {function.__name__ for function in FUNCTIONS}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("bad", ["text", None, torch.zeros(2, dtype=torch.complex64)], ids=["str", "None", "complex"])
def test_nonsense_is_refused_by_name(function, bad):
    parameters = inspect.signature(function).parameters
    arguments = {name: bad for name, parameter in parameters.items() if parameter.default is parameter.empty}
    if "ragged" in arguments:
        arguments["ragged"] = sparse_attn.Ragged(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    with pytest.raises((TypeError, ValueError)) as error:
        function(**arguments)
    assert str(error.value).split(":")[0].split(".")[0] in parameters, error.value


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_each_number_flag_and_string_is_refused_by_name(operator):
    """Whatever a contract before it looks at."""
    types = {argument.name: str(argument.real_type) for argument in schema(operator.overload).arguments}
    good = {"int": 1, "float": 1.0, "bool": False, "str": "auto"}
    assert types["impl"] == "str"
    for name, kind in types.items():
        for bad in ((), None, 2.5, "text", torch.ones(1), 2):
            if kind not in good or isinstance(bad, {"int": int, "float": (int, float), "bool": bool, "str": str}[kind]):
                continue
            given = [bad if other == name else good.get(types[other]) for other in types]
            with pytest.raises(TypeError, match=rf"^{name}: got .*, allowed: "):
                operator(*given)


@pytest.mark.parametrize("bad", ["text", None, 1.5, (), True], ids=repr)
def test_integers_that_are_compared_are_integers(bad):
    table = sparse_attn.rope_table(4, 8, 10000.0)
    x, at = torch.zeros(2, 3, 16), torch.zeros(2, dtype=torch.int32)
    route = dict(logits=torch.zeros(2, 8), bias=torch.zeros(8), top_k=2, num_groups=2, top_groups=1,
                 renormalise=True, routed_scale=1.0, score="sigmoid")  # fmt: skip
    calls = {
        "d_v": lambda: sparse.sparse_attn_prefill(**ROWS | dict(d_v=bad)),
        "start": lambda: sparse_attn.apply_rope(x, at, table, start=bad, interleaved=False),
        "dim": lambda: sparse_attn.rope_table(4, bad, 10000.0),
        "num_rows": lambda: lists.build_ragged_indices_from_dense(torch.zeros(2, 3, dtype=torch.int32), num_rows=bad),
    } | {
        name: functools.partial(biased_grouped_topk, **route | {name: bad})
        for name in ("top_k", "num_groups", "top_groups")
    }
    for name, call in calls.items():
        if name == "num_rows" and bad is None:
            continue
        with pytest.raises(TypeError, match=rf"^{name}: got .*, allowed: an integer$"):
            call()


ROUTES = dict(
    logits=torch.zeros(2, 8), tokens=torch.zeros(2, dtype=torch.int32), table=torch.zeros(9, 2, dtype=torch.int32)
)


@pytest.mark.parametrize("call, error, message", [
    (lambda: hash_routed_experts(**ROUTES, renormalise="text"), TypeError, "renormalise: got 'text'"),
    (lambda: hash_routed_experts(**ROUTES, routed_scale=None), TypeError, "routed_scale: got None"),
    (lambda: sparse_attn.preset(None), TypeError, "preset: got None, allowed: a str"),
    (lambda: sparse_attn.cache_layouts("tiny_v32", "fp8"), TypeError, "spec: got 'tiny_v32', allowed: a Spec"),
    (lambda: sparse_attn.allocate_cache("fp8", 2, 64, "cpu"), TypeError, "layout: got 'fp8', allowed: a layout"),
    (lambda: sparse_attn.allocate_cache(PlainLayout("bf16", 8), -1, 64, "cpu"), ValueError, "num_blocks: got -1"),
    (lambda: sparse_attn.allocate_cache(PlainLayout("bf16", 8), None, 64, "cpu"), TypeError, "num_blocks: got None"),
    (lambda: sparse_attn.mark_cache([1]), TypeError, "cache: got list, allowed: a torch.Tensor"),
    (lambda: planned_mesh(tensor=-1), ValueError, "tensor: got -1, allowed: at least 1"),
    (lambda: planned_mesh(tensor=2, place=2), ValueError, "place: got 2, allowed: 0 to 1"),
    (lambda: planned_mesh(place=-1), ValueError, "place: got -1, allowed: 0 to 0"),
    (lambda: Bounds(2, 8, 64, dtype="bf16"), TypeError, "dtype: got 'bf16', allowed: a floating torch.dtype"),
    (lambda: Bounds(2, 8, 64, batch_invariant="text"), TypeError, "batch_invariant: got 'text', allowed: True or"),
    (lambda: Options(logits_bytes=-1), ValueError, "logits_bytes: got -1, allowed: at least 0"),
    (lambda: Options(batch_invariant=1), TypeError, "batch_invariant: got 1, allowed: True or False"),
    (lambda: Options(activations="fp16"), ValueError, "prefill_activations: got 'fp16', allowed: 'exact', 'fp8'"),
])  # fmt: skip
def test_helpers_name_the_argument(call, error, message):
    with pytest.raises(error, match=rf"^{message}"):
        call()


WEIGHTS = dict(weights=torch.ones(2, 3))
BF16 = dict(
    q=torch.zeros(2, 3, 16), k=torch.zeros(5, 16), kv_start=torch.zeros(2, dtype=torch.int32),
    kv_end=torch.ones(2, dtype=torch.int32), **WEIGHTS,
)  # fmt: skip
PAGED = dict(
    q=torch.zeros(2, 1, 3, 16), cache=torch.zeros(2, 4, 16), context_lens=torch.zeros(2, 1, dtype=torch.int32),
    block_table=torch.zeros(2, 4, dtype=torch.int32), max_context_len=8, layout=PlainLayout("fp32", 16), **WEIGHTS,
)  # fmt: skip
MERGE = dict(outs=torch.zeros(2, 3, 4, 8), lses=torch.zeros(2, 3, 4))
ROWS = dict(q=torch.zeros(2, 3, 16), kv=torch.zeros(5, 16), scale=1.0, d_v=16, ragged=sparse_attn.Ragged(
    torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)))  # fmt: skip
SELECT = PAGED | dict(top_k=2)
WIDE = torch.zeros(1, 1, dtype=torch.int32).expand(1 << 16, 1 << 15)  # 2^31 indices


@pytest.mark.parametrize(
    "function,good,change,name",
    [
        (scores.bf16_mqa_logits, BF16, dict(k=torch.zeros(5, 16, dtype=torch.bfloat16)), "k"),
        (scores.bf16_mqa_logits, BF16, dict(q=torch.zeros(2, 3, 16, dtype=torch.uint8)), "q"),
        (scores.bf16_mqa_logits, BF16, dict(weights=torch.ones(3, 3)), "weights"),
        (scores.bf16_paged_mqa_logits, PAGED, dict(q=torch.zeros(2, 1, 3, 16).half()), "q"),
        (scores.bf16_paged_mqa_logits, PAGED, dict(cache=torch.zeros(2, 4, 17)), "cache"),
        (scores.bf16_paged_mqa_logits, PAGED, dict(max_context_len=-1), "max_context_len"),
        (sparse.merge_attn_states, MERGE, dict(outs=torch.zeros(3, 4, 8)), "outs"),
        (sparse.merge_attn_states, MERGE, dict(lses=torch.zeros(2, 4, 3)), "lses"),
        (sparse.merge_attn_states, MERGE, dict(sink=torch.zeros(2)), "sink"),
        (
            sparse.merge_attn_states,
            MERGE,
            dict(outs=torch.zeros(0, 3, 4, 8), lses=torch.zeros(0, 3, 4)),
            "outs states",
        ),
        (sparse.merge_attn_states, MERGE, dict(outs=torch.zeros(2, 3, 4, 0)), "outs d_v"),
        (sparse.sparse_attn_prefill, ROWS, dict(q=torch.zeros(2, 0, 16)), "q"),
        (sparse.sparse_attn_prefill, ROWS, dict(q=torch.zeros(2, 129, 16)), "q"),
        (sparse.sparse_attn_prefill, ROWS, dict(d_v=0), "d_v"),
        (sparse.sparse_attn_prefill, ROWS, dict(d_v=17), "d_v"),
        (fused.index_topk_decode, SELECT, dict(q=torch.zeros(2, 1, 0, 16), weights=torch.ones(2, 0)), "q"),
        (fused.index_topk_decode, SELECT, dict(q=torch.zeros(2, 1, 129, 16), weights=torch.ones(2, 129)), "q"),
        (lists.build_ragged_indices_from_dense, {}, dict(indices=WIDE), "indices"),
    ],
)
def test_errors_name_the_argument(function, good, change, name):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: got"):
        function(**(good | change))


@pytest.mark.parametrize(
    "function,good,change",
    [
        (sparse.sparse_attn_prefill, ROWS, dict(q=torch.zeros(2, 128, 16))),
        (sparse.sparse_attn_prefill, ROWS, dict(d_v=1)),
        (sparse.sparse_attn_prefill, ROWS, dict(kv=torch.zeros(5, 1, 16))),
        (sparse.merge_attn_states, MERGE, dict(outs=torch.zeros(1, 3, 4, 1), lses=torch.zeros(1, 3, 4))),
        (fused.index_topk_decode, SELECT, dict(q=torch.zeros(2, 1, 128, 16), weights=torch.ones(2, 128))),
        (lists.build_ragged_indices_from_dense, {}, dict(indices=WIDE[1:])),
    ],
)
def test_what_is_just_allowed_reaches_an_implementation(function, good, change):
    with pytest.raises(AssertionError, match="was asked for$"):
        function(**(good | change))
