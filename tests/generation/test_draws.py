"""Sampling of each row through the generation loop: batches, penalties, stop ids, captured steps."""

from __future__ import annotations

import pytest
import torch

from sparse_attn import DecodeGraph, Model, Sampling, generate
from sparse_attn.generation.inputs import checked_sampling
from sparse_attn.generation.sampling import draws_of
from sparse_attn.generation.steps import Decode, advance, decode_step
from sparse_attn.generation.text import shipped_text
from sparse_attn.models.params import random_params
from sparse_attn.ops.layers.sampling import penalise_logits, row_seeds, sample, token_logprobs
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import preset

TEXT = list(shipped_text().encode())
PROMPTS = [TEXT[:90], TEXT[200:207], TEXT[300:371], TEXT[200:207]]
EACH = [
    Sampling(temperature=1.5, seed=4, top_k=20, repetition=1.3), Sampling(temperature=2.0, seed=-1, top_p=0.8),
    Sampling(), Sampling(temperature=1.0, seed=7, min_p=0.2, presence=0.5, frequency=0.25),
]  # fmt: skip


def model_of(name, device="cpu"):
    spec = preset(name)
    return Model(spec, random_params(spec, 1, device), cache_layouts(spec, "fp32"))


@pytest.fixture(scope="module", params=("tiny_v32", "tiny_v4"))
def model(request):
    return model_of(request.param)


def test_each_prompt_draws_by_its_own_sampling_as_it_does_alone(model):
    common = dict(max_new_tokens=9, prefill_tokens=40)
    together = generate(model, PROMPTS, sampling=EACH, **common).tokens
    for place, (prompt, own) in enumerate(zip(PROMPTS, EACH)):
        seed = row_seeds(own.seed, len(PROMPTS))[place].item()
        assert generate(model, [prompt], sampling=own, seeds=[seed], **common).tokens[0] == together[place]
    assert together[2] == generate(model, [PROMPTS[2]], **common).tokens[0] and together[1] != together[3]


def test_penalties_count_the_prompt_and_what_was_drawn(model):
    """Every token is drawn again from the logits, with counts kept by hand."""
    found = generate(model, PROMPTS, max_new_tokens=9, prefill_tokens=40, sampling=EACH, keep_logits=True)
    for place, (prompt, tokens, logits, own) in enumerate(zip(PROMPTS, found.tokens, found.logits, EACH)):
        seed, vocab = row_seeds(own.seed, len(PROMPTS))[place].item(), logits.shape[1]
        for step, token in enumerate(tokens):
            fed = len(prompt) - 1 + step
            counts = torch.bincount(torch.tensor(tokens[:step], dtype=torch.int64), minlength=vocab).unsqueeze(0)
            prompted = torch.bincount(torch.tensor(prompt), minlength=vocab).unsqueeze(0) > 0
            row = penalise_logits(
                logits[fed : fed + 1], counts, prompted=prompted, repetition=own.repetition, presence=own.presence,
                frequency=own.frequency,
            )  # fmt: skip
            filters = dict(top_k=own.top_k, top_p=own.top_p, min_p=own.min_p)
            drawn = sample(row, torch.tensor([fed]), temperature=own.temperature, seed=seed, **filters)
            assert drawn.item() == token, (place, step)


def test_one_sampling_for_all_is_the_same_for_each(model):
    """Filters as numbers, which no tensor holds, and as tensors."""
    one = Sampling(temperature=1.5, seed=3, top_k=30, top_p=0.9, min_p=0.01)
    common = dict(max_new_tokens=6)
    alike = generate(model, PROMPTS, sampling=one, **common).tokens
    assert alike == generate(model, PROMPTS, sampling=[one] * 4, **common).tokens
    assert alike == generate(model, PROMPTS, sampling=[one] * 3 + [one._replace(stop_ids=(256,))], **common).tokens
    plain = generate(model, PROMPTS, sampling=one._replace(top_k=0, top_p=1.0, min_p=0.0), **common).tokens
    assert plain == generate(model, PROMPTS, sampling=Sampling(1.5, 3), **common).tokens != alike


def test_a_great_penalty_leaves_no_token_twice(model):
    for penalty in (dict(repetition=1e9), dict(presence=1e9), dict(frequency=1e9)):
        found = generate(model, PROMPTS, max_new_tokens=20, sampling=Sampling(**penalty)).tokens
        assert all(len(set(tokens)) == 20 for tokens in found)
        again = any(set(tokens) & set(prompt) for tokens, prompt in zip(found, PROMPTS))
        assert "repetition" not in penalty or not again


def test_each_prompt_has_its_own_stop_ids(model):
    whole = generate(model, PROMPTS, max_new_tokens=8).tokens
    stops = [(), (whole[1][3],), (whole[2][5], whole[2][2]), (whole[1][0],)]
    found = generate(model, PROMPTS, max_new_tokens=8, sampling=[Sampling(stop_ids=own) for own in stops]).tokens
    for got, row, own in zip(found, whole, stops):
        ends = [place for place, token in enumerate(row) if token in own]
        assert got == (row[: ends[0] + 1] if ends else row)
    assert found[0] == whole[0] and len(found[3]) == 1


def test_padding_is_not_counted_and_rows_stop_by_their_ids():
    """Of four rows: one goes on, one is padding, one draws its own stop id, one draws another row's."""
    draws = draws_of([Sampling(frequency=0.1, stop_ids=own) for own in ((), (2,), (2, 3), (2,))], 4)
    starts = torch.arange(5, dtype=torch.int32)
    lens = torch.tensor([3, 0, 5, 5], dtype=torch.int32)
    state = Decode(torch.zeros(4).long(), lens, starts.view(1, 5), starts, torch.empty(0).long(), draws=draws)
    drawn = torch.tensor([2, 2, 3, 3])
    advance(state, torch.nn.functional.one_hot(drawn, 4).float(), Sampling(), max_context=10)
    assert torch.equal(state.tokens, drawn) and state.seq_lens.tolist() == [4, 0, 0, 6]
    assert draws.counts.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1]]


def test_what_no_row_uses_takes_no_tensor():
    plain = draws_of([Sampling(), Sampling(temperature=2.0)], 9)
    assert [name for name, value in plain._asdict().items() if value is not None] == ["temperature"]
    penalised = draws_of([Sampling(), Sampling(presence=1.0)], 9, prompts=[[1, 1], [8]])
    assert penalised.prompted.int().sum(1).tolist() == [1, 1] and penalised.counts.shape == (2, 9)
    assert penalised.rows(slice(1, 2)).presence.tolist() == [1.0] and penalised.top_k is None


def test_logprobs_are_the_models_own(model):
    """Of the tokens that were drawn, from the logits of what was fed before; in another batch the same bits."""
    common = dict(max_new_tokens=6, prefill_tokens=40, logprobs=3)
    found = generate(model, PROMPTS, sampling=EACH, keep_logits=True, **common)
    for prompt, tokens, logits, logprobs in zip(PROMPTS, found.tokens, found.logits, found.logprobs):
        want = token_logprobs(logits[len(prompt) - 1 :], torch.tensor(tokens), best=3)
        assert all(torch.equal(got, value) for got, value in zip(logprobs, want))
        assert logprobs.ids.shape == logprobs.values.shape == (6, 3)
    greedy = generate(model, PROMPTS, **common | dict(logprobs=1))
    for tokens, logprobs in zip(greedy.tokens, greedy.logprobs):
        assert logprobs.ids.flatten().tolist() == tokens and torch.equal(logprobs.values.flatten(), logprobs.drawn)
    assert generate(model, [[1]], max_new_tokens=1).logprobs is None
    for number, message in ((-1, "at least 0"), (258, "0 to 257, the tokens there are"), (1.0, "an integer")):
        with pytest.raises((TypeError, ValueError), match=f"^logprobs: got {number}, allowed: {message}"):
            generate(model, [[1]], max_new_tokens=1, logprobs=number)


ERRORS = {
    "sampling: got 2, allowed: one for all, or 1, one a prompt": [Sampling()] * 2,
    "sampling[0]: got int, allowed: a Sampling": [3],
    "sampling[0].top_p: got 2.0, allowed: 0 to 1": [Sampling(top_p=2.0)],
    "sampling[0].stop_ids: got id 257, allowed: 0 to 256": [Sampling(stop_ids=(257,))],
    "top_k: got -1, allowed: at least 0": Sampling(top_k=-1),
    "top_k: got 2.0, allowed: an integer": Sampling(top_k=2.0),
    "min_p: got nan, allowed: 0 to 1": Sampling(min_p=float("nan")),
    "repetition: got 0, allowed: positive fp32 numbers": Sampling(repetition=0),
    "frequency: got None, allowed: a number": Sampling(frequency=None),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument(model, message):
    with pytest.raises((TypeError, ValueError)) as error:
        generate(model, [[1]], max_new_tokens=1, sampling=ERRORS[message])
    assert str(error.value).startswith(message)


def test_stop_ids_of_an_unknown_vocabulary_may_be_long():
    assert checked_sampling(Sampling(stop_ids=(2**32 + 5, 1, 2**63 - 1))).stop_ids == (2**32 + 5, 1, 2**63 - 1)
    for token in (-1, 2**63):
        with pytest.raises(ValueError, match=f"^stop_ids: got id {token}, allowed: 0 to {2**63 - 1}"):
            checked_sampling(Sampling(stop_ids=(2**40, token)))


def test_penalties_without_counts_are_refused():
    starts = torch.arange(2, dtype=torch.int32)
    state = Decode(torch.zeros(1).long(), starts[1:], starts.view(1, 2), starts, torch.empty(0).long())
    with pytest.raises(ValueError, match="^sampling: got penalties, allowed: with draws"):
        advance(state, torch.zeros(1, 4), Sampling(presence=1.0), max_context=4)
    with pytest.raises(ValueError, match="^sampling: got penalties, allowed: with draws"):  # before the model runs
        decode_step(None, None, state, Sampling(repetition=1.1), 4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_the_gpu_eager_captured_and_compiled_draws_what_the_cpu_does(name):
    torch.compiler.reset()
    common = dict(max_new_tokens=80, sampling=EACH, prefill_tokens=60)
    host, gpu = model_of(name), model_of(name, "cuda")
    want = generate(host, PROMPTS, logprobs=2, **common)
    for ways in ({}, dict(graph=True), dict(graph=True, compile=True)):
        assert generate(gpu, PROMPTS, **common, **ways).tokens == want.tokens, ways
        seen = [[] for _ in PROMPTS]
        found = generate(gpu, PROMPTS, logprobs=2, on_token=lambda n, token: seen[n].append(token), **common, **ways)
        assert found.tokens == want.tokens == seen, ways
        for got, logprobs in zip(found.logprobs, want.logprobs):
            torch.testing.assert_close(got.drawn, logprobs.drawn, atol=1e-3, rtol=1e-3)
            assert got.drawn.shape == (80,) and got.ids.shape == (80, 2)


@pytest.mark.gpu
def test_one_capture_serves_rows_of_any_sampling():
    """Rows are loaded with other parameters, counts and stop ids, and fewer of them, between replays."""
    model, vocab, steps = model_of("tiny_v32", "cuda"), 257, 12
    caches = model.allocate_caches(16, 64, requests=4, step_rows=1)
    table = torch.arange(16, dtype=torch.int32).view(4, 4)
    each = [own._replace(stop_ids=(n, 256)) for n, own in enumerate(EACH)]
    graph = DecodeGraph(
        model, caches, max_context=256, max_blocks=4, buckets=(2, 4),
        draws=draws_of([own._replace(top_k=1, top_p=0.5, min_p=0.1) for own in each[:1]], vocab),
    )  # fmt: skip
    full = Sampling(top_k=5, top_p=0.5, min_p=0.5, presence=1.0, stop_ids=(255, 256))  # a tensor of every kind
    for rows in (4, 2, 3):
        samplings = [*each[-rows:], full]
        loaded = draws_of(samplings, vocab, prompts=[[9]] * (rows + 1)).rows(slice(rows))
        tokens, lens, seeds = torch.full((rows,), 9), torch.ones(rows, dtype=torch.int32), row_seeds(5, rows)
        graph.load(tokens, lens, table[:rows], seeds=seeds, draws=loaded)
        got = graph.run(steps).wait()
        state = Decode(
            tokens.cuda(), lens.cuda(), table[:rows].cuda(), torch.arange(rows + 1, dtype=torch.int32).cuda(),
            torch.zeros(0, dtype=torch.int64).cuda(), seeds=seeds.cuda(), draws=loaded.map(lambda value: value.cuda()),
        )  # fmt: skip
        mine = model.allocate_caches(16, 64, requests=4, step_rows=1)
        live = torch.ones(rows, dtype=torch.bool)
        for step in range(steps):
            decode_step(model, mine, state, Sampling(), 256)
            assert torch.equal(got[step][live], state.tokens.cpu()[live])
            live = state.seq_lens.cpu() > 0
    with pytest.raises(ValueError, match="^draws: got None, allowed: a Draws, the loop has one"):
        graph.load(tokens, lens, table[:3])
    with pytest.raises(ValueError, match="^draws.top_k: got None, allowed: a tensor"):
        graph.load(tokens, lens, table[:3], draws=loaded._replace(top_k=None))
    with pytest.raises(TypeError, match="^draws.top_p: got dtype float32, allowed: float64"):
        graph.load(tokens, lens, table[:3], draws=loaded._replace(top_p=loaded.top_p.float()))
    with pytest.raises(ValueError, match="^draws.temperature: got shape"):
        graph.load(tokens, lens, table[:3], draws=loaded._replace(temperature=loaded.temperature[:2]))
    plain = DecodeGraph(model, caches, max_context=256, max_blocks=4, buckets=(4,))
    with pytest.raises(ValueError, match="^draws: got a Draws, allowed: None"):
        plain.load(tokens, lens, table[:3], draws=loaded)
