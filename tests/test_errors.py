"""Bad input to any public operator is refused by name, before an implementation is looked for."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import torch

import sparse_attn
from sparse_attn import registration
from sparse_attn.layout import PlainLayout
from sparse_attn.ops import attention, index_logits, index_topk, ragged

OPS = Path(sparse_attn.__file__).parent / "ops"
FUNCTIONS = [
    function
    for package in sorted(path.parent.name for path in OPS.glob("*/__init__.py"))
    for name, function in vars(importlib.import_module(f"sparse_attn.ops.{package}")).items()
    if inspect.isfunction(function) and name in sparse_attn.__all__ and "impl" in inspect.signature(function).parameters
]


@pytest.fixture(autouse=True)
def no_implementation(monkeypatch):
    """Fails the test where an implementation would be imported."""

    def refuse(name):
        raise AssertionError(f"{name} was asked for")

    monkeypatch.setattr(registration.importlib, "import_module", refuse)


def test_the_operators_are_here():
    assert len(FUNCTIONS) >= 18
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
        (index_logits.bf16_mqa_logits, BF16, dict(k=torch.zeros(5, 16, dtype=torch.bfloat16)), "k"),
        (index_logits.bf16_mqa_logits, BF16, dict(q=torch.zeros(2, 3, 16, dtype=torch.uint8)), "q"),
        (index_logits.bf16_mqa_logits, BF16, dict(weights=torch.ones(3, 3)), "weights"),
        (index_logits.bf16_paged_mqa_logits, PAGED, dict(q=torch.zeros(2, 1, 3, 16).half()), "q"),
        (index_logits.bf16_paged_mqa_logits, PAGED, dict(cache=torch.zeros(2, 4, 17)), "cache"),
        (index_logits.bf16_paged_mqa_logits, PAGED, dict(max_context_len=-1), "max_context_len"),
        (attention.merge_attn_states, MERGE, dict(outs=torch.zeros(3, 4, 8)), "outs"),
        (attention.merge_attn_states, MERGE, dict(lses=torch.zeros(2, 4, 3)), "lses"),
        (attention.merge_attn_states, MERGE, dict(sink=torch.zeros(2)), "sink"),
        (
            attention.merge_attn_states,
            MERGE,
            dict(outs=torch.zeros(0, 3, 4, 8), lses=torch.zeros(0, 3, 4)),
            "outs states",
        ),
        (attention.merge_attn_states, MERGE, dict(outs=torch.zeros(2, 3, 4, 0)), "outs d_v"),
        (attention.sparse_attn_prefill, ROWS, dict(q=torch.zeros(2, 0, 16)), "q"),
        (attention.sparse_attn_prefill, ROWS, dict(q=torch.zeros(2, 129, 16)), "q"),
        (attention.sparse_attn_prefill, ROWS, dict(d_v=0), "d_v"),
        (attention.sparse_attn_prefill, ROWS, dict(d_v=17), "d_v"),
        (index_topk.index_topk_decode, SELECT, dict(q=torch.zeros(2, 1, 0, 16), weights=torch.ones(2, 0)), "q"),
        (index_topk.index_topk_decode, SELECT, dict(q=torch.zeros(2, 1, 129, 16), weights=torch.ones(2, 129)), "q"),
        (ragged.build_ragged_indices_from_dense, {}, dict(indices=WIDE), "indices"),
    ],
)
def test_errors_name_the_argument(function, good, change, name):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: got"):
        function(**(good | change))


@pytest.mark.parametrize(
    "function,good,change",
    [
        (attention.sparse_attn_prefill, ROWS, dict(q=torch.zeros(2, 128, 16))),
        (attention.sparse_attn_prefill, ROWS, dict(d_v=1)),
        (attention.sparse_attn_prefill, ROWS, dict(kv=torch.zeros(5, 1, 16))),
        (attention.merge_attn_states, MERGE, dict(outs=torch.zeros(1, 3, 4, 1), lses=torch.zeros(1, 3, 4))),
        (index_topk.index_topk_decode, SELECT, dict(q=torch.zeros(2, 1, 128, 16), weights=torch.ones(2, 128))),
        (ragged.build_ragged_indices_from_dense, {}, dict(indices=WIDE[1:])),
    ],
)
def test_what_is_just_allowed_reaches_an_implementation(function, good, change):
    with pytest.raises(AssertionError, match="was asked for$"):
        function(**(good | change))
