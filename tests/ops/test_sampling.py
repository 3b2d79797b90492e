"""Sampling: greedy and Gumbel-max against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from expecttest import assert_expected_inline

from sparse_attn import Sampling
from sparse_attn.generation.steps import Decode, advance
from sparse_attn.ops.layers.sampling import row_seeds, sample

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


def slow_seed(seed: int, row: int) -> int:
    low, high, key = seed & WORD, seed >> 32 & WORD, row
    for _ in range(2):
        high ^= slow_mix(low ^ (key := slow_mix(key)))
        low ^= slow_mix(high ^ (key := slow_mix(key)))
    return seed if row == 0 else int.from_bytes((high << 32 | low).to_bytes(8), signed=True)


SEEDS = [0, 1, -1, 2**40 + 5, -(2**63), 2**63 - 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_row_seeds_match_python(seed):
    got = row_seeds(seed, 50)
    assert got.dtype == torch.int64 and got.tolist() == [slow_seed(seed, row) for row in range(50)]


def test_row_seeds_golden():
    assert_expected_inline(str(row_seeds(2026, 3).tolist()), """[2026, -3414586455913946183, -374848649576377337]""")


def test_no_two_of_many_pairs_of_seed_and_row_share_a_stream():
    """Seeds that follow each other, that differ in one bit, and the streams of rows taken for seeds again."""
    seeds = {*range(-300, 300), *(1 << bit for bit in range(63)), *row_seeds(0, 300).tolist()}
    streams = [stream for seed in seeds for stream in row_seeds(seed, 300).tolist()[1:]]
    assert len(set(streams)) == len(streams) and not set(streams[299:]) & (seeds - {*row_seeds(0, 300).tolist()})


def test_rows_draw_independently():
    """By chance 1/64 of the draws agree: of neighbouring rows, and of a row with the next seed's."""
    logits, seeds = torch.zeros(2000, 64), row_seeds(5, 2000)
    same_place = torch.zeros(2000, dtype=torch.int64)
    one = sample(logits, same_place, temperature=1.0, seed=seeds)
    other = sample(logits, same_place, temperature=1.0, seed=row_seeds(6, 2000))
    for a, b in ((one[1:], one[:-1]), (one, other), (one[1:], other[:-1])):
        assert (a == b).float().mean() < 0.04
    assert (torch.bincount(one, minlength=64) - 2000 / 64).abs().max() < 25


def test_a_row_draws_what_its_seed_draws_alone():
    logits, positions, seeds = torch.randn(6, 50), torch.tensor([3, 9, 3, 4, 0, 9]), torch.tensor(SEEDS)
    whole = sample(logits, positions, temperature=1.0, seed=seeds)
    alone = [sample(logits[i : i + 1], positions[i : i + 1], temperature=1.0, seed=SEEDS[i]).item() for i in range(6)]
    assert whole.tolist() == alone


def test_a_state_without_seeds_draws_from_the_streams_of_its_rows():
    logits, starts = torch.zeros(8, 500), torch.arange(9, dtype=torch.int32)
    drawn = []
    for seeds in (None, row_seeds(3, 8)):
        lens = torch.full((8,), 5, dtype=torch.int32)
        state = Decode(torch.zeros(8).long(), lens, starts.view(1, 9), starts, torch.empty(0).long(), seeds=seeds)
        advance(state, logits, Sampling(temperature=1.0, seed=3), max_context=10)
        drawn.append(state.tokens.tolist())
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 4


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-308, 1e-300, 1e-60, 2.0**-161])
def test_a_tiny_temperature_is_greedy(temperature):
    tiny = 2.0**-149
    rows = [[1, 3, 3, 2], [0, -3e38, 0, -1], [0, tiny, tiny, -1], [3e38, 3.1e38, 1, 0], [-INF, NAN, -1, -1], [NAN] * 4]
    logits, positions = torch.tensor(rows), torch.arange(6)
    for seed in range(20):
        assert sample(logits, positions, temperature=temperature, seed=seed).tolist() == [1, 0, 1, 1, 2, 0]


def test_the_smallest_temperature_with_noise_tells_the_smallest_difference():
    logits = torch.tensor([[0.0, 2.0**-149, -(2.0**-149)], [0, 0, -(2.0**-149)]])
    drawn = [sample(logits, torch.zeros(2).long(), temperature=2.0**-160, seed=seed) for seed in range(40)]
    first, tied = torch.stack(drawn).T
    assert set(first.tolist()) == {1} and set(tied.tolist()) == {0, 1}


@pytest.mark.parametrize("temperature", [1e300, 1.7e308])
def test_a_huge_temperature_draws_uniformly(temperature):
    logits = torch.tensor([[3e38, -3e38, 0.0, 1.0, -INF]]).expand(4000, 5)
    share = torch.bincount(sample(logits, torch.arange(4000), temperature=temperature, seed=1), minlength=5) / 4000
    assert (share - torch.tensor([0.25] * 4 + [0])).abs().max() < 0.03


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
        (dict(temperature="1"), TypeError, "temperature: got '1', allowed: a number"),
        (dict(temperature=True), TypeError, "temperature: got True"),
        (dict(seed=2**63), ValueError, "seed: got"),
        (dict(seed=1.0), TypeError, "seed: got 1.0, allowed: an integer"),
        (dict(seed=True), TypeError, "seed: got True, allowed: an integer"),
        (dict(seed=P.int()), TypeError, "seed: got dtype int32, allowed: int64"),
        (dict(seed=P[:2]), ValueError, "seed: got shape"),
        (dict(seed=P.to("meta")), ValueError, "seed: got device"),
    ],
)
def test_errors(change, error, message):
    arguments = dict(logits=L, positions=P, temperature=1.0, seed=0) | change
    with pytest.raises(error, match=message):
        sample(arguments.pop("logits"), arguments.pop("positions"), **arguments)


def test_traces_without_breaks_or_recompiles():
    """The streams are compiled with it."""

    def draw(logits, positions, temperature, seed):
        return sample(logits, positions, temperature=temperature, seed=row_seeds(seed, logits.shape[0]))

    compiled = torch.compile(draw, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5, 9):
        logits, positions = torch.randn(rows, 33), torch.arange(rows)
        with torch.compiler.set_stance("default" if rows < 9 else "fail_on_recompile"):
            got = compiled(logits, positions, temperature=0.8, seed=12)
        assert torch.equal(got, draw(logits, positions, temperature=0.8, seed=12))


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1e-310, 1.0, 1e300])
def test_same_draws_on_the_gpu(temperature):
    logits, positions = torch.randn(32, 5000), torch.arange(32)
    for seed in SEEDS:
        seeds = row_seeds(seed, 32)
        assert torch.equal(seeds, row_seeds(seed, 32, "cuda").cpu())
        for mine in (seed, seeds):
            here = sample(logits, positions, temperature=temperature, seed=mine)
            there = mine.cuda() if isinstance(mine, torch.Tensor) else mine
            there = sample(logits.cuda(), positions.cuda(), temperature=temperature, seed=there)
            assert torch.equal(here, there.cpu())


@pytest.mark.gpu
def test_compiled_and_captured_draws_are_the_eager_ones():
    logits, positions, seeds = torch.randn(8, 3000).cuda(), torch.arange(8).cuda(), row_seeds(-9, 8, "cuda")
    draw = torch.compile(sample, fullgraph=True, dynamic=True)
    want = sample(logits, positions, temperature=0.9, seed=seeds)
    assert torch.equal(draw(logits, positions, temperature=0.9, seed=seeds), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sample(logits, positions, temperature=0.9, seed=seeds)
    seeds.copy_(row_seeds(4, 8))
    graph.replay()
    assert torch.equal(got, sample(logits, positions, temperature=0.9, seed=seeds)) and not torch.equal(got, want)
