"""Sampling: greedy and Gumbel-max against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from expecttest import assert_expected_inline

from sparse_attn.ops.sampling import sample

NAN, INF = float("nan"), float("inf")
WORD = 0xFFFFFFFF


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def slow_mix(word: int) -> int:
    word = (word + 0x9E3779B9) & WORD
    word = ((word ^ word >> 16) * 0x85EBCA6B) & WORD
    word = ((word ^ word >> 13) * 0xC2B2AE35) & WORD
    return word ^ word >> 16


def slow_sample(row: list[float], position: int, temperature: float, seed: int) -> int:
    key = slow_mix(slow_mix(position & WORD) ^ (seed & WORD))
    key = slow_mix(slow_mix(key ^ (position >> 32 & WORD)) ^ (seed >> 32 & WORD))
    best, best_id = -INF, 0
    for i, logit in enumerate(row):
        uniform = (slow_mix(slow_mix(i) ^ key) + 0.5) / 2**32
        score = -INF if math.isnan(logit) else logit / temperature - math.log(-math.log(uniform))
        if score > best:
            best, best_id = score, i
    return best_id


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 5, -(2**63), 2**63 - 1])
def test_matches_python(seed, dtype):
    logits = torch.randn(12, 94)[:, ::2] * 3
    positions = torch.tensor([0, 1, 2, 3, 100, 163839, -1, -(2**31), 2**31 - 1, 7, 7, 8], dtype=dtype)
    got = sample(logits, positions, temperature=0.7, seed=seed)
    want = [slow_sample(row, p, 0.7, seed) for row, p in zip(logits.tolist(), positions.tolist())]
    assert got.dtype == torch.int64 and got.tolist() == want


def test_golden():
    got = sample(torch.zeros(8, 129280), torch.arange(8), temperature=1.0, seed=2026)
    assert_expected_inline(str(got.tolist()), """[115048, 101699, 98000, 804, 87291, 103186, 18258, 76241]""")


def test_depends_on_the_row_alone():
    logits, positions = torch.randn(6, 50), torch.tensor([3, 9, 3, 4, 0, 9])
    whole = sample(logits, positions, temperature=1.0, seed=1)
    alone = [int(sample(logits[i : i + 1], positions[i : i + 1], temperature=1.0, seed=1)) for i in range(6)]
    assert whole.tolist() == alone


def test_draws_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -INF, NAN, 3.0])
    draws = 40000
    for temperature in (0.5, 1.0, 2.0):
        got = sample(logits.expand(draws, 6), torch.arange(draws), temperature=temperature, seed=11)
        frequency = torch.bincount(got, minlength=6) / draws
        want = torch.softmax(logits.nan_to_num(nan=-INF, neginf=-INF) / temperature, 0)
        assert (frequency - want).abs().max() < 0.012, (temperature, frequency, want)
        assert frequency[3] == frequency[4] == 0


def test_seeds_and_positions_are_independent():
    logits = torch.zeros(2000, 64)
    one = sample(logits, torch.arange(2000), temperature=1.0, seed=1)
    other = sample(logits, torch.arange(2000), temperature=1.0, seed=2)
    shifted = sample(logits, torch.arange(2000) + 1, temperature=1.0, seed=1)
    assert torch.equal(one[1:], shifted[:-1])
    for a, b in ((one, other), (one[1:], one[:-1])):
        assert (a == b).float().mean() < 0.04  # 1/64 by chance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_the_largest(dtype):
    rows = [[1, 3, 3, 2], [NAN, -1, NAN, -1], [-INF, -INF, -INF, -INF], [NAN] * 4, [0, -0.0, 0, -1], [1, INF, 2, INF]]
    got = sample(torch.tensor(rows, dtype=dtype), torch.arange(6), temperature=0, seed=5)
    assert got.tolist() == [1, 1, 0, 0, 0, 1]


def test_rows_without_a_choice_and_infinities():
    rows = [[-INF, -INF, -INF], [NAN, NAN, NAN], [-INF, NAN, -100.0], [INF, 0.0, INF]]
    assert sample(torch.tensor(rows), torch.arange(4), temperature=1.0, seed=5).tolist() == [0, 0, 2, 0]


def test_empty_batch():
    got = sample(torch.empty(0, 5), torch.empty(0, dtype=torch.int64), temperature=1.0, seed=0)
    assert got.shape == (0,) and got.dtype == torch.int64


L, P = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(logits=L.long()), TypeError, "logits: got dtype int64"),
        (dict(logits=L[0]), ValueError, "logits: got 1 dimensions"),
        (dict(logits=L[:, :0]), ValueError, "logits: got shape"),
        (dict(positions=P.float()), TypeError, "positions: got dtype"),
        (dict(positions=P[:1]), ValueError, "positions: got shape"),
        (dict(positions=P.to("meta")), ValueError, "positions: got device"),
        (dict(temperature=-1.0), ValueError, "temperature: got -1"),
        (dict(temperature=INF), ValueError, "temperature: got inf"),
        (dict(temperature=NAN), ValueError, "temperature: got nan"),
        (dict(seed=2**63), ValueError, "seed: got"),
    ],
)
def test_errors(change, error, message):
    arguments = dict(logits=L, positions=P, temperature=1.0, seed=0) | change
    with pytest.raises(error, match=message):
        sample(arguments.pop("logits"), arguments.pop("positions"), **arguments)


def test_traces_without_breaks_or_recompiles():
    compiled = torch.compile(sample, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5, 9):
        logits, positions = torch.randn(rows, 33), torch.arange(rows)
        with torch.compiler.set_stance("default" if rows < 9 else "fail_on_recompile"):
            got = compiled(logits, positions, temperature=0.8, seed=12)
        assert torch.equal(got, sample(logits, positions, temperature=0.8, seed=12))


@pytest.mark.gpu
def test_same_draws_on_the_gpu():
    logits, positions = torch.randn(32, 5000), torch.arange(32)
    for temperature in (0.0, 1.0):
        here = sample(logits, positions, temperature=temperature, seed=9)
        there = sample(logits.cuda(), positions.cuda(), temperature=temperature, seed=9)
        assert torch.equal(here, there.cpu())
