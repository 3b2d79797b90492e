"""Eager calls that look like one that passed are not checked again; every other call is."""

import gc
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch

from sparse_attn import LatentFp8Layout, PlainLayout, Ragged, apply_rope, rope_table, sparse_attn_decode
from sparse_attn.framework import checks
from sparse_attn.framework.torch_private import fake_mode

X = torch.zeros(6, 8)


@dataclass(frozen=True)
class Holding:
    """Frozen, and without a hash."""

    values: dict


def guard_of(*arguments):
    guard = checks.Guard()
    guard.passed(guard.new(*arguments))
    return guard


@pytest.mark.parametrize(
    "other",
    [
        (X.half(), 1), (X[:5], 1), (X.T, 1), (X[:, :6], 1), (X.t().contiguous().t(), 1), (torch.zeros(7, 8)[1:], 1),
        (X.to("meta"), 1), (torch.nn.Parameter(X), 1), (X, 2), (X, True), (X, 1.0), (X, None), (X, "1"), (X, (1,)), (X,),
    ],
    ids=str,
)  # fmt: skip
def test_a_call_that_looks_another_way_is_checked(other):
    guard = guard_of(X, 1)
    assert guard.new(torch.ones(6, 8), 1) is None
    assert guard.new(*other)


def test_tensors_in_tuples_are_looked_at():
    ragged = Ragged(torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    guard = guard_of(ragged, PlainLayout("bf16", 16))
    assert guard.new(Ragged(*(one.clone() for one in ragged)), PlainLayout("bf16", 16)) is None
    assert guard.new(ragged._replace(indptr=ragged.indptr.long()), PlainLayout("bf16", 16))
    assert guard.new(tuple(ragged), PlainLayout("bf16", 16))
    assert guard.new(ragged, PlainLayout("bf16", 32))


@pytest.mark.parametrize("value", [[X], {"x": X}, X.numpy(), object()], ids=lambda value: type(value).__name__)
def test_what_may_change_is_always_checked(value):
    guard = guard_of(value)
    assert guard.new(value)


def test_sparse_tensors_and_values_without_a_hash_are_always_checked():
    for value in (X.to_sparse(), Holding({"x": 1})):
        guard = guard_of(value)
        assert guard.new(value)
    with pytest.raises(TypeError, match="^x: got dtype int8"):
        apply_rope(X.to_sparse().to(torch.int8), torch.arange(6), rope_table(8, 4, 10000.0), start=0, interleaved=True)


def test_grad_mode_and_tracing_are_checked():
    guard = guard_of(X)
    with torch.no_grad():
        assert guard.new(X)
    with fake_mode():
        assert guard.new(X)
    assert guard.new(X) is None


def test_it_holds_no_tensor_and_forgets_what_is_too_much():
    guard = checks.Guard()
    tensor = torch.zeros(3)
    seen = weakref.ref(tensor)
    guard.passed(guard.new(tensor))
    del tensor
    gc.collect()
    assert seen() is None
    for size in range(3 * guard.MOST):
        guard.passed(guard.new(torch.zeros(size)))
        assert guard.new(torch.zeros(size)) is None and len(guard._passed) <= guard.MOST


def test_threads_share_it():
    guard, failed = checks.Guard(), []

    def work(n):
        for _ in range(300):
            if new := guard.new(torch.zeros(n), n):
                guard.passed(new)
            if guard.new(torch.zeros(n), n + 1):
                continue
            failed.append(n)

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(1, 5)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed


def test_a_good_call_lets_no_bad_one_pass():
    layout = LatentFp8Layout(512, 64)
    cache = torch.zeros(2, 64, layout.row, dtype=torch.uint8)
    q, ragged = (
        torch.zeros(2, 4, 576),
        Ragged(torch.arange(4, dtype=torch.int32), torch.tensor([0, 2, 4], dtype=torch.int32)),
    )
    good = dict(q=q, cache=cache, ragged=ragged, scale=1.0, layout=layout, sink=torch.zeros(4))
    for _ in range(2):
        sparse_attn_decode(**good)
    bad = dict(
        q=q.double(), cache=cache[:, :, :-1], ragged=Ragged(ragged.indices, ragged.indptr[:2]), scale="1",
        layout=PlainLayout("bf16", 512), sink=torch.zeros(3), impl="none", batch_invariant=1,
    )  # fmt: skip
    for name, value in bad.items():
        with pytest.raises((ValueError, TypeError)):
            sparse_attn_decode(**good | {name: value})
    sparse_attn_decode(**good)


def test_checks_are_spared(monkeypatch):
    table, positions = rope_table(8, 4, 10000.0), torch.arange(6)
    first = apply_rope(X, positions, table, start=0, interleaved=True)
    monkeypatch.setattr(checks, "check_tensor", None)  # what every check of a tensor calls
    assert apply_rope(X + 0, positions, table, start=0, interleaved=True).equal(first)
    with pytest.raises(TypeError, match="NoneType"):
        apply_rope(X, positions, table, start=2, interleaved=True)
