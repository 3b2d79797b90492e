"""Top-k, top-p, min-p, penalties and log-probabilities against plain Python in float64, and against chi-square."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import long

from sparse_attn.ops.layers.sampling import (
    count_tokens,
    filter_logits,
    penalise_logits,
    row_seeds,
    sample,
    token_logprobs,
)
from sparse_attn.ops.layers.sampling.filters import SCANNED

NAN, INF = float("nan"), float("inf")
DRAWS = 100_000 if long() else 5_000


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def slow_weights(row: list[float], temperature: float) -> list[float]:
    """Probabilities over that of the largest."""
    row, t = [-INF if math.isnan(x) else x for x in row], temperature or 1.0
    return [1.0 if x == max(row) else math.exp((x - max(row)) / t) for x in row]


def slow_kept(row: list[float], temperature: float, k: int = 0, p: float = 1.0, least: float = 0.0) -> set[int]:
    row = [-INF if math.isnan(x) else x for x in row]
    weights = slow_weights(row, temperature)
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))[: k or len(row)]
    if p < 1:
        total = math.fsum(weights[i] for i in ranked)
        sums = [math.fsum(weights[i] for i in ranked[:n]) for n in range(len(ranked))]
        ranked = [i for n, i in enumerate(ranked) if n == 0 or sums[n] < p * total]
    return {i for i in ranked if weights[i] >= least and row[i] > -INF}


def kept(filtered: torch.Tensor) -> list[set[int]]:
    return [{i for i, x in enumerate(row) if x > -INF} for row in filtered.tolist()]


def column(values: list, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


SETTINGS = [
    dict(top_k=1), dict(top_k=7), dict(top_k=0), dict(top_k=1000), dict(top_p=0.0), dict(top_p=0.3), dict(top_p=0.95),
    dict(top_p=1.0), dict(min_p=0.0), dict(min_p=0.1), dict(min_p=1.0), dict(top_k=9, top_p=0.8),
    dict(top_p=0.9, min_p=0.05), dict(top_k=20, top_p=0.9, min_p=0.02), dict(top_k=1, top_p=0.0, min_p=1.0),
]  # fmt: skip
SPELT = {"top_k": "k", "top_p": "p", "min_p": "least"}


def slow_spelling(setting: dict) -> dict:
    return {SPELT[name]: value for name, value in setting.items()}


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_kept_tokens_are_the_oracles(setting, temperature):
    """Of spread logits and of a few values with many ties, in a view whose columns lie apart."""
    spread = torch.randn(6, 120)[:, ::2] * 3
    tied = torch.randint(-2, 3, (6, 60)).float() / 2
    for logits in (spread, tied, tied.bfloat16()):
        got = filter_logits(logits, temperature=temperature, **setting)
        assert got.dtype == torch.float32
        for row, found, values in zip(logits.tolist(), kept(got), got.tolist()):
            assert found == slow_kept(row, temperature, **slow_spelling(setting))
            assert all(values[i] == row[i] for i in found)


@pytest.mark.parametrize("vocab", [SCANNED - 1, SCANNED, SCANNED + 1, 2 * SCANNED + 5])
def test_top_p_counts_across_the_pieces_of_a_scan(vocab):
    """Nearly even probabilities, so that the border lies pieces away from the first token."""
    logits = torch.randn(2, vocab) / 100
    for p in (0.2, 0.999):
        for row, found in zip(logits.tolist(), kept(filter_logits(logits, top_p=p))):
            assert found == slow_kept(row, 1.0, p=p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_row_has_its_own_parameters(dtype):
    """A row's set and draw are those it has alone with the same numbers; int32 takes what int64 takes."""
    rows = len(SETTINGS)
    logits, positions, seeds = torch.randn(rows, 60) * 2, torch.arange(rows), row_seeds(3, rows)
    ks = [setting.get("top_k", 0) for setting in SETTINGS]
    ps, least = ([setting.get(name, off) for setting in SETTINGS] for name, off in (("top_p", 1.0), ("min_p", 0.0)))
    warm = [0.0, 0.7, 1.0, 3.0] * 4
    own = dict(temperature=column(warm[:rows], dtype), top_p=column(ps, dtype), min_p=column(least, dtype))
    for integers in (torch.int32, torch.int64):
        options = own | dict(top_k=column(ks, integers))
        got, drawn = filter_logits(logits, **options), sample(logits, positions, seed=seeds, **options)
        for n in range(rows):
            alone = {name: value[n].item() for name, value in options.items()}
            row = logits[n : n + 1]
            assert torch.equal(got[n : n + 1], filter_logits(row, **alone))
            assert drawn[n].item() == sample(row, positions[n : n + 1], seed=seeds[n].item(), **alone).item()


def test_what_filters_nothing_changes_no_draw():
    logits, positions = torch.randn(50, 300), torch.arange(50)
    logits[3, 5], logits[4] = NAN, -INF
    for temperature in (0.0, 1e-300, 0.7, 1e300):
        plain = sample(logits, positions, temperature=temperature, seed=9)
        rows = torch.full((50,), temperature, dtype=torch.float64)
        assert torch.equal(plain, sample(logits, positions, temperature=rows, seed=9))
        for off in (dict(top_k=0, top_p=1.0, min_p=0.0), dict(top_k=300), dict(top_k=2**40)):
            assert torch.equal(plain, sample(logits, positions, temperature=temperature, seed=9, **off))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperatures_of_rows_that_are_no_temperatures(dtype):
    """0, negative and NaN are greedy, infinity is the largest number."""
    logits = torch.tensor([[0.0, 3.0, 3.0, -INF, NAN]]).expand(400, 5)
    draw = lambda value: set(
        sample(logits, torch.arange(400), temperature=torch.full((400,), value, dtype=dtype), seed=1).tolist()
    )
    assert draw(0.0) == draw(-1.0) == draw(NAN) == draw(-INF) == {1}
    assert draw(INF) == {0, 1, 2}


def test_parameters_of_rows_outside_their_range():
    """Values in tensors are not read by the host: each means what the docstring says."""
    row = torch.tensor([[1.0, 3.0, 2.0, 2.0, -1.0]])
    for name, values in (
        ("top_k", {-1: 5, -(2**63): 5, 0: 5, 6: 5, 2**62: 5, 2: 2}),
        ("top_p", {-1.0: 1, NAN: 1, -INF: 1, 2.0: 5, INF: 5, 0.7: 2}),
        ("min_p", {-1.0: 5, NAN: 5, -INF: 5, 2.0: 1, INF: 1, 0.3: 3}),
    ):
        for value, count in values.items():
            own = torch.tensor([value], dtype=torch.int64 if name == "top_k" else torch.float64)
            assert len(kept(filter_logits(row, **{name: own}))[0]) == count, (name, value)


def test_ties_at_the_border_go_to_the_lowest_ids():
    row = torch.tensor([[0.0, 5.0, -0.0, 0.0, 5.0, 0.0]])
    assert [kept(filter_logits(row, top_k=k))[0] for k in range(1, 5)] == [{1}, {1, 4}, {0, 1, 4}, {0, 1, 2, 4}]
    flat = torch.zeros(1, 129280)
    for p, count in ((0.5, 64640), (0.25, 32320), (1 / 129280, 1), (1e-9, 1)):
        assert kept(filter_logits(flat, top_p=p))[0] == set(range(count))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_what_is_no_number_is_never_drawn_and_infinity_always(setting):
    rows = [
        [NAN] * 4, [-INF] * 4, [-INF, NAN, -100.0, NAN], [INF, 0.0, INF, 3e38], [3e38, -3e38, -INF, INF],
        [-3e38, -3e38, NAN, -INF], [3e38, 3e38, -3e38, 0.0],
    ]  # fmt: skip
    logits = torch.tensor(rows)
    for temperature in (0.0, 1.0, 1e300):
        drawn = sample(logits, torch.arange(7), temperature=temperature, seed=5, **setting).tolist()
        assert drawn[:3] == [0, 0, 2] and drawn[3] in ((0,) if temperature == 0 else (0, 2)) and drawn[4] == 3
        assert drawn[5] in (0, 1) and (temperature == 1e300 or drawn[6] in (0, 1))
    assert not filter_logits(logits, **setting).isnan().any()


def test_no_rows():
    empty, none = torch.empty(0, 5), torch.empty(0, dtype=torch.int64)
    assert filter_logits(empty, top_k=2, top_p=0.5, min_p=0.1).shape == (0, 5)
    assert sample(empty, none, temperature=1.0, seed=0, top_k=2, top_p=0.5, min_p=0.1).shape == (0,)
    assert penalise_logits(empty, empty.long(), prompted=empty.bool()).shape == (0, 5)
    assert token_logprobs(empty, none, best=2).ids.shape == (0, 2)


def chi_square_p(drawn: torch.Tensor, probabilities: list[float]) -> float:
    """The chance of a spread as wide. Tokens expected fewer than five times are one class."""
    want = torch.tensor(probabilities, dtype=torch.float64) * len(drawn)
    found = torch.bincount(drawn, minlength=len(want)).double()
    assert found[want == 0].sum() == 0
    rare = want < 5
    if rare.any():
        want, found = (torch.cat((part[~rare], part[rare].sum().unsqueeze(0))) for part in (want, found))
    want, found = want[want > 0], found[want > 0]
    if len(want) == 1:
        return 1.0
    spread = ((found - want) ** 2 / want).sum()
    return torch.special.gammaincc(torch.tensor((len(want) - 1) / 2).double(), spread / 2).item()


def test_chi_square_sees_a_wrong_distribution():
    fair = torch.randint(0, 10, (DRAWS,))
    assert chi_square_p(fair, [0.1] * 10) > 0.001
    assert chi_square_p(torch.where(fair < 2, fair.clamp(max=0), fair), [0.2, 0.0] + [0.1] * 8) > 0.001
    assert chi_square_p(fair, [0.15, 0.05] + [0.1] * 8) < 1e-6


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if len(setting) > 1 or 0.3 in setting.values()] + [
    dict(), dict(top_k=7), dict(top_p=0.95), dict(min_p=0.1),
], ids=str)  # fmt: skip
def test_draws_follow_the_oracles_distribution(setting, temperature):
    """Of penalised logits, each draw at a position of its own."""
    logits = (torch.randn(40) * 2).tolist()
    counts, prompted = torch.randint(0, 3, (40,)), torch.rand(40) < 0.3
    penalties = dict(repetition=1.3, presence=0.2, frequency=0.1)
    row = slow_penalised(logits, counts.tolist(), prompted.tolist(), **penalties)
    weights, allowed = slow_weights(row, temperature), slow_kept(row, temperature, **slow_spelling(setting))
    total = math.fsum(weights[i] for i in allowed)
    penalised = penalise_logits(
        torch.tensor([logits]), counts.unsqueeze(0), prompted=prompted.unsqueeze(0), **penalties
    )
    drawn = sample(
        penalised.expand(DRAWS, 40), torch.arange(DRAWS), temperature=temperature, seed=row_seeds(4, DRAWS), **setting
    )
    assert chi_square_p(drawn, [weights[i] / total if i in allowed else 0.0 for i in range(40)]) > 0.001


def slow_penalised(row, counts, prompted, repetition=1.0, presence=0.0, frequency=0.0) -> list[float]:
    repetition, presence, frequency = torch.tensor([repetition, presence, frequency]).tolist()  # as fp32
    out = []
    for x, count, was in zip(row, counts, prompted):
        x = -INF if math.isnan(x) else x
        if count or was:
            x = x / repetition if x > 0 else x * repetition
        out.append(x - (presence * (count > 0) + frequency * count))
    return torch.tensor(out, dtype=torch.float64).float().tolist()


PENALTIES = [
    dict(), dict(repetition=1.2), dict(repetition=0.5), dict(presence=0.7), dict(frequency=0.3),
    dict(repetition=1.9, presence=-0.4, frequency=1.1), dict(repetition=3.0, presence=1.0, frequency=-0.25),
]  # fmt: skip


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_are_the_oracles(penalties, integers):
    logits, counts, prompted = torch.randn(6, 50) * 4, torch.randint(0, 4, (6, 50)), torch.rand(6, 50) < 0.3
    logits[0, :6] = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 3e38])
    counts[:, 20:] = 0
    for was in (prompted, None):
        got = penalise_logits(logits, counts.to(integers), prompted=was, **penalties)
        for row, count, there, found in zip(logits, counts, prompted if was is not None else [None] * 6, got.tolist()):
            there = [False] * 50 if there is None else there.tolist()
            assert found == slow_penalised(row.tolist(), count.tolist(), there, **penalties)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_row_has_its_own_penalties(dtype):
    rows = len(PENALTIES)
    logits, counts, prompted = torch.randn(rows, 50), torch.randint(0, 3, (rows, 50)), torch.rand(rows, 50) < 0.3
    defaults = dict(repetition=1.0, presence=0.0, frequency=0.0)
    own = {name: column([each.get(name, off) for each in PENALTIES], dtype) for name, off in defaults.items()}
    got = penalise_logits(logits, counts, prompted=prompted, **own)
    for n, penalties in enumerate(PENALTIES):
        part = slice(n, n + 1)
        assert torch.equal(got[part], penalise_logits(logits[part], counts[part], prompted=prompted[part], **penalties))
    assert torch.equal(got[0], logits[0])


def test_tokens_are_counted_where_rows_live():
    counts, tokens = torch.zeros(3, 4, dtype=torch.int32), torch.tensor([1, 1, 3])
    once = count_tokens(counts, tokens)
    twice = count_tokens(once, tokens, live=torch.tensor([True, False, True]))
    assert not counts.any() and once.dtype == torch.int32
    assert twice.tolist() == [[0, 2, 0, 0], [0, 1, 0, 0], [0, 0, 0, 2]]


def test_logprobs_are_those_of_the_softmax():
    logits = torch.randn(7, 5000) * 3
    tokens = torch.randint(0, 5000, (7,))
    got, want = token_logprobs(logits, tokens, best=20), logits.double().log_softmax(1)
    torch.testing.assert_close(got.drawn, want.gather(1, tokens.unsqueeze(1)).squeeze(1).float(), atol=2e-6, rtol=2e-7)
    values, ids = want.sort(dim=1, descending=True, stable=True)
    assert torch.equal(got.ids, ids[:, :20]) and got.ids.dtype == torch.int64
    torch.testing.assert_close(got.values, values[:, :20].float(), atol=2e-6, rtol=2e-7)
    alone = token_logprobs(logits[3:4], tokens[3:4], best=1)
    assert torch.equal(alone.drawn, got.drawn[3:4]) and torch.equal(alone.values, got.values[3:4, :1])


def test_logprobs_of_ties_and_of_what_is_no_number():
    rows = torch.tensor([[0.0, -0.0, NAN, 0.0], [-INF, NAN, -INF, NAN], [INF, 1.0, INF, -INF]])
    got = token_logprobs(rows, torch.tensor([2, 0, 1]), best=3)
    assert got.ids.tolist() == [[0, 1, 3], [0, 1, 2], [0, 2, 1]]
    third, half, quarter = (torch.tensor(x).double().log().float().item() for x in (1 / 3, 1 / 2, 1 / 4))
    assert got.drawn.tolist() == [-INF, quarter, -INF]
    assert got.values.tolist() == [[third] * 3, [quarter] * 3, [half, half, -INF]]


L, P, ROWS = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), torch.ones(3)
MANY = torch.empty(1, 2**20 + 1, device="meta")
REFUSED = {
    "top_k: got -1, allowed: at least 0": lambda: filter_logits(L, top_k=-1),
    "top_k: got 1.0, allowed: an integer": lambda: filter_logits(L, top_k=1.0),
    "top_k: got dtype float32, allowed: int32, int64": lambda: filter_logits(L, top_k=ROWS),
    "top_k: got shape [2], allowed: [rows] = [3]": lambda: filter_logits(L, top_k=P[:2]),
    "top_k: got device meta, allowed: cpu": lambda: filter_logits(L, top_k=P.to("meta")),
    "top_p: got 1.5, allowed: 0 to 1": lambda: sample(L, P, temperature=1.0, seed=0, top_p=1.5),
    "top_p: got nan, allowed: 0 to 1": lambda: filter_logits(L, top_p=NAN),
    "top_p: got True, allowed: a number": lambda: filter_logits(L, top_p=True),
    "min_p: got -0.1, allowed: 0 to 1": lambda: filter_logits(L, min_p=-0.1),
    "min_p: got dtype int64, allowed: float32, float64": lambda: filter_logits(L, min_p=P),
    "temperature: got dtype int64, allowed: float32, float64": lambda: sample(L, P, temperature=P, seed=0),
    "logits: got 1048577 tokens, allowed: at most 1048576": lambda: filter_logits(MANY, top_p=0.5),
    "counts: got shape [1, 4], allowed: [rows, vocab] = [3, 4]": lambda: penalise_logits(L, L[:1].long()),
    "counts: got dtype float32, allowed: int32, int64": lambda: penalise_logits(L, L),
    "prompted: got dtype int64, allowed: bool": lambda: penalise_logits(L, L.long(), prompted=L.long()),
    "repetition: got 0, allowed: positive fp32": lambda: penalise_logits(L, L.long(), repetition=0),
    "repetition: got inf, allowed: positive fp32": lambda: penalise_logits(L, L.long(), repetition=INF),
    "presence: got nan, allowed: finite fp32": lambda: penalise_logits(L, L.long(), presence=NAN),
    "frequency: got '1', allowed: a number": lambda: penalise_logits(L, L.long(), frequency="1"),
    "frequency: got shape [2], allowed: [rows] = [3]": lambda: penalise_logits(L, L.long(), frequency=ROWS[:2]),
    "tokens: got dtype int32, allowed: int64": lambda: count_tokens(L.long(), P.int()),
    "live: got dtype int64, allowed: bool": lambda: count_tokens(L.long(), P, live=P),
    "best: got 5, allowed: 0 to 4": lambda: token_logprobs(L, P, best=5),
    "best: got -1, allowed: at least 0": lambda: token_logprobs(L, P, best=-1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_errors(message):
    with pytest.raises((TypeError, ValueError)) as error:
        REFUSED[message]()
    assert str(error.value).startswith(message)


def whole_draw(logits, positions, seeds, counts, prompted, own):
    """Penalties, filters, draw, count, log-probabilities: one sampling step."""
    penalised = penalise_logits(logits, counts, prompted=prompted, **{name: own[name] for name in PENALTY_NAMES})
    tokens = sample(penalised, positions, seed=seeds, **{name: own[name] for name in own if name not in PENALTY_NAMES})
    return tokens, count_tokens(counts, tokens), token_logprobs(logits, tokens, best=3)


PENALTY_NAMES = ("repetition", "presence", "frequency")


def a_draw(rows, vocab, device="cpu"):
    own = dict(
        temperature=torch.rand(rows, dtype=torch.float64) * 2, top_k=torch.randint(0, vocab // 2, (rows,)),
        top_p=torch.rand(rows, dtype=torch.float64), min_p=torch.rand(rows, dtype=torch.float64) / 10,
        repetition=torch.rand(rows) + 0.5, presence=torch.rand(rows), frequency=torch.rand(rows),
    )  # fmt: skip
    own["temperature"][0], own["top_p"][1] = 0.0, 1.0
    counts, prompted = torch.randint(0, 2, (rows, vocab), dtype=torch.int32), torch.rand(rows, vocab) < 0.1
    logits, seeds = torch.randn(rows, vocab) * 3, row_seeds(7, rows)
    logits[:, ::7] = logits[:, ::7].round()
    given = logits, torch.arange(rows), seeds, counts, prompted
    return *(value.to(device) for value in given), {name: value.to(device) for name, value in own.items()}


def flat(result):
    tokens, counts, logprobs = result
    return tokens, counts, *logprobs


def test_traces_without_breaks_or_recompiles():
    compiled = torch.compile(whole_draw, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5, 9):
        given = a_draw(rows, 40)
        with torch.compiler.set_stance("default" if rows < 9 else "fail_on_recompile"):
            got = compiled(*given)
        for mine, want in zip(flat(got), flat(whole_draw(*given))):
            assert torch.equal(mine, want)


@pytest.mark.skipif(not long(), reason="compiling C++ takes a minute; GPUs compile it below")
def test_compiled_draws_are_the_eager_ones():
    torch.compiler.reset()
    given = a_draw(4, 200)
    compiled = torch.compile(whole_draw, fullgraph=True, dynamic=True)
    for mine, want in zip(flat(compiled(*given)), flat(whole_draw(*given))):
        assert torch.equal(mine, want)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [50, 5000, 129280])
def test_the_gpu_eager_compiled_and_captured_draws_what_the_cpu_does(vocab):
    """One captured graph serves the parameters its rows are given between replays."""
    torch.compiler.reset()
    here, other = a_draw(16, vocab), a_draw(16, vocab)
    there = (*(value.cuda() for value in here[:-1]), {name: value.cuda() for name, value in here[-1].items()})
    compiled = torch.compile(whole_draw, fullgraph=True, dynamic=True)
    compiled(*there)
    graphs = []
    for draw in (whole_draw, compiled):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = draw(*there)
        graphs.append((graph, out))
    for given in (here, other):
        for mine, value in zip(there[:-1], given[:-1]):
            mine.copy_(value)
        for name, value in given[-1].items():
            there[-1][name].copy_(value)
        want = flat(whole_draw(*given))
        results = [whole_draw(*there), compiled(*there)]
        for graph, out in graphs:
            graph.replay()
            results.append(out)
        for result in results:
            for mine, value in zip(flat(result), want):
                torch.testing.assert_close(mine.cpu(), value, atol=0 if mine.dtype != torch.float32 else 1e-6, rtol=0)
