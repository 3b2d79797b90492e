"""What was saved before modules were moved loads, and gives what it gave: golden/819938d.tar.xz holds a pickled Model
of one layer, an exported decode step and what both gave, by torch 2.11 on a CPU."""

from __future__ import annotations

import io
import pickle
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from sparse_attn import Model, build_step_plan
from sparse_attn.framework.torch_private import leaves
from sparse_attn.generation.steps import Decode

SAVED = Path(__file__).parents[1] / "golden" / "819938d.tar.xz"


def read(name):
    with tarfile.open(SAVED) as files:
        return io.BytesIO(files.extractfile(name).read())


@pytest.fixture(scope="module")
def expected():
    return torch.load(read("expected.pt"))


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def zeroed(caches):
    for cache in leaves(caches):
        cache.zero_()
    return caches


def test_a_pickled_model(expected, monkeypatch):
    monkeypatch.delitem(sys.modules, "sparse_attn.runtime.model", raising=False)  # another test may have imported it
    with pytest.warns(DeprecationWarning, match="sparse_attn.runtime.model is sparse_attn.generation.model now"):
        model = pickle.load(read("model.pkl"))
    assert type(model) is Model
    plan = build_step_plan(
        ints(0, 5), ints(5), ints(0, 1, 2, 3).view(1, 4), torch.arange(5), kv_capacity=5, max_context=256
    )
    caches = zeroed(model.allocate_caches(4, 64, requests=1, step_rows=90))
    torch.testing.assert_close(model(expected["tokens"], caches, plan), expected["logits"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_exported_step(expected):
    step = torch.export.load(read("step.pt2")).module()
    model = pickle.load(read("model.pkl"))
    caches = zeroed(model.allocate_caches(8, 64, requests=2, step_rows=90))
    state = Decode(
        torch.arange(2) + 5, ints(3, 1), torch.arange(8, dtype=torch.int32).view(2, 4), ints(0, 1, 2),
        torch.tensor([3]), None, torch.arange(2),
    )  # fmt: skip
    (got,) = (value for value in leaves(step(caches, state)) if isinstance(value, torch.Tensor))
    torch.testing.assert_close(got, expected["state"][0])
