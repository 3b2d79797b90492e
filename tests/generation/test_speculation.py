"""Speculative decoding: the tokens are those without drafts, whoever drafts, and drafts save steps."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.speculation import KINDS, SAMPLINGS
from support.steps import model_of

from sparse_attn import Model, Sampling, generate
from sparse_attn.framework.torch_private import TorchDispatchMode
from sparse_attn.generation.loop import EagerDecode, LoopSettings
from sparse_attn.generation.sampling import draws_of
from sparse_attn.generation.text import shipped_text
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import preset
from sparse_attn.types import Caches

TEXT = list(shipped_text().encode())
PROMPTS = [TEXT[:90], TEXT[200:207], TEXT[300:371]]
NEW = 13  # one token of the prefill, 12 of steps


@pytest.fixture(scope="module", params=("tiny_v32", "tiny_glm5", "tiny_v4"))
def model(request):
    spec = preset(request.param)
    return Model(spec, random_params(spec, seed=1), cache_layouts(spec, "fp32"))


@pytest.fixture(scope="module")
def plain(model):
    """Generations without speculation, by sampling."""
    return {
        name: generate(model, PROMPTS, max_new_tokens=NEW, sampling=one, keep_logits=True, logprobs=2)
        for name, one in SAMPLINGS.items()
    }


@pytest.mark.few(4)
@pytest.mark.parametrize("drafts", (1, 2, 3))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tokens_are_those_without_drafts(model, plain, sampling, kind, drafts):
    """So are the logits and log-probabilities of every token, but for what rounding another number of rows does."""
    before = plain[sampling]
    found = generate(
        model, PROMPTS, max_new_tokens=NEW, sampling=SAMPLINGS[sampling], speculate=drafts, keep_logits=True,
        logprobs=2, drafter=KINDS[kind](PROMPTS, before.tokens, drafts),
    )  # fmt: skip
    assert found.tokens == before.tokens
    for mine, own, scores, owns in zip(found.logits, before.logits, found.logprobs, before.logprobs):
        torch.testing.assert_close(mine, own, atol=1e-4, rtol=0)
        torch.testing.assert_close(scores.drawn, owns.drawn, atol=1e-4, rtol=0)
        assert torch.equal(scores.ids, owns.ids)
    expected = {"perfect": drafts + 1, "wild": 1}.get(kind)
    if expected is None:
        assert 1 < found.accepted_per_step < drafts + 1
    else:
        assert found.accepted_per_step == expected


def test_rings_hold_what_rejected_drafts_write_over():
    """Prompts of one token, which need the shortest rings: the drafts of a step need longer ones."""
    model, prompts = model_of("tiny_v4", "fp32", layers=3), [[5], [77], [130]]
    expected = generate(model, prompts, max_new_tokens=24)
    for kind in ("drafted", "wild"):
        drafter = KINDS[kind](prompts, expected.tokens, 3)
        found = generate(model, prompts, max_new_tokens=24, speculate=3, drafter=drafter)
        assert found.tokens == expected.tokens


@pytest.mark.few(1)
def test_a_stop_id_among_accepted_drafts_ends_a_row(model, plain):
    tokens = plain["greedy"].tokens
    stops = (tokens[0][2], tokens[2][5])
    expected = generate(model, PROMPTS, max_new_tokens=NEW, sampling=Sampling(stop_ids=stops))
    drafter = KINDS["perfect"](PROMPTS, tokens, 3)
    found = generate(
        model, PROMPTS, max_new_tokens=NEW, sampling=Sampling(stop_ids=stops), speculate=3, drafter=drafter
    )
    assert found.tokens == expected.tokens and len(found.tokens[0]) < NEW


@pytest.mark.few(1)
def test_on_token_sees_each_token_once_and_ends_a_row(model, plain):
    tokens, seen = plain["greedy"].tokens, [[], [], []]

    def watch(row, token):
        seen[row].append(token)
        return row == 1 and len(seen[1]) == 3

    drafter = KINDS["perfect"](PROMPTS, tokens, 3)
    found = generate(model, PROMPTS, max_new_tokens=NEW, speculate=3, drafter=drafter, on_token=watch)
    assert found.tokens == seen == [tokens[0], tokens[1][:3], tokens[2]]


@pytest.mark.few(1)
def test_rows_end_where_the_model_knows_no_further_position(model):
    """Drafts would stand behind the last position of the longest row, and behind the blocks of the others."""
    spec = replace(model.spec, max_positions=128)
    model = Model(spec, random_params(spec, seed=1), model.layouts)
    prompts = [TEXT[:124], TEXT[:9]]
    expected = generate(model, prompts, max_new_tokens=5)
    drafter = KINDS["perfect"](prompts, expected.tokens, 3)
    found = generate(model, prompts, max_new_tokens=5, speculate=3, drafter=drafter)
    assert found.tokens == expected.tokens and found.accepted_per_step == 4


@pytest.mark.few(0)
@pytest.mark.parametrize("name, drafts", (("tiny_v32", 2), ("tiny_v4", 1), ("tiny_glm5", 3)))
def test_compiled_once_whatever_is_accepted(monkeypatch, name, drafts):
    """One graph for prefill, one for steps of several rows a request."""
    torch.compiler.reset()
    model, counts, whole = model_of(name, "fp32"), [], torch.compile

    def counted(graph, inputs, **options):
        counts.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda run, options, **kinds: whole(run, backend=counted, **kinds))
    common = dict(max_new_tokens=NEW, sampling=SAMPLINGS["sampled"])
    expected = generate(model, PROMPTS, **common).tokens
    for kind in KINDS.values():
        drafter = kind(PROMPTS, expected, drafts)
        found = generate(model, PROMPTS, speculate=drafts, drafter=drafter, compile=True, **common)
        assert found.tokens == expected
    assert len(counts) == 2
    torch.compiler.reset()


@pytest.mark.parametrize(
    "options,error,message",
    [
        (dict(speculate=-1), ValueError, "speculate: got -1"),
        (dict(speculate=1.5), TypeError, "speculate: got 1.5"),
        (dict(speculate=2, drafter=3), TypeError, "drafter: got int"),
        (dict(drafter=max), ValueError, "speculate: got 0, allowed: at least 1 with a drafter"),
        (dict(speculate=2), ValueError, "drafter: got None"),
        (dict(speculate=2, drafter=lambda known, lens: known[:, :2].int()), TypeError, "drafter: drafts: got .*int32"),
        (dict(speculate=2, drafter=lambda known, lens: known[:, :3]), ValueError, "drafter: drafts: got shape"),
    ],
)
def test_what_cannot_be_drafted_is_refused(options, error, message):
    spec = preset("tiny_v32")
    model = Model(spec, random_params(spec, seed=1), cache_layouts(spec, "fp32"))
    with pytest.raises(error, match=message):
        generate(model, [[1, 2, 3]], max_new_tokens=4, **options)


class Waits(TorchDispatchMode):
    """Raises where an operator reads a value of the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name().removeprefix("aten::") not in READS, func
        return func(*args, **(kwargs or {}))


READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}


class Random(Model):
    """Logits and hidden states that come from nowhere, of the model and of its layer of multi-token prediction."""

    def __init__(self, vocab):
        spec = replace(preset("tiny_v32"), vocab_size=vocab)
        super().__init__(spec, {"embed": torch.zeros(1), "mtp.0.norm": torch.zeros(1)}, cache_layouts(spec, "fp32"))
        del self.forward
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, tokens, caches, plan, keep_hidden=False):
        logits = torch.rand(len(tokens), self.spec.vocab_size, generator=self.generator)
        return (logits, torch.zeros(len(tokens), 4)) if keep_hidden else logits

    def predictor(self):
        return SimpleNamespace(logits=lambda hidden: self(hidden, None, None))


@pytest.mark.parametrize("penalised", (False, True))
@pytest.mark.parametrize("drafter", (None, lambda known, seq_lens: known[:, 1:3]))
def test_no_step_waits_for_the_host(penalised, drafter):
    """Plan, acceptance, penalties, filters and drafts, around a model that is none."""
    rows, vocab = 3, 7
    sampling = Sampling(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, repetition=1.2 if penalised else 1.0)
    table, ids = torch.arange(rows * 4, dtype=torch.int32).view(rows, 4), torch.randint(0, vocab, (rows,))
    caches, draws = Caches((torch.zeros(12, 8, 4),), (None,)), draws_of([sampling] * rows, vocab, prompts=[[1]] * rows)
    loop = EagerDecode(
        Random(vocab), caches, LoopSettings(
            32, 4, (rows,), speculate=2, drafter=drafter, draws=draws, keep_logprobs=True,
            predict=lambda tokens, hidden, caches, plan: hidden,
        ),
    )  # fmt: skip
    lens = torch.tensor([5, 31, 0], dtype=torch.int32)
    known = torch.randint(0, vocab, (rows, 30)) if drafter else None
    loop.load(ids, lens, table, draws=draws, known=known, ends=lens + 9)
    with Waits():
        for _ in range(4):
            loop._decode(rows)
    assert loop.state.seq_lens[0] > 5 and loop.state.seq_lens[1:].tolist() == [0, 0]
    drafts = loop._speculator._held.drafts
    assert drafts.shape == (rows, 2) and (drafts >= 0).all()
