"""A row's bits are those of the row alone: whole models, in steps of any size, among rows that come and go."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import long
from support.batching import NAMES, batching_of, ids, model_of
from support.requests import Requests

from sparse_attn import Sampling, generate

OPTIONS = dict(batch_invariant=True, logprobs=True, num_blocks=9)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def invariant_model(name, device, layers=3):
    return model_of(name, device, "fp8" if device == "cuda" else "fp32", layers).invariant()


@pytest.mark.parametrize("name", NAMES)
def test_a_request_among_others_that_come_and_go(name):
    check_company(name, "eager", "cpu")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_request_among_others_compiled(name):
    check_company(name, "compiled", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("way", ("eager", "compiled", "captured"))
@pytest.mark.parametrize("name", NAMES)
def test_a_request_among_others_on_a_gpu(name, way):
    check_company(name, way, "cuda")


def check_company(name, way, device):
    """Tokens and log-probabilities, whoever comes, leaves, is cancelled or preempted beside it, and wherever its prompt
    is cut."""
    model = invariant_model(name, device, 3 if way == "captured" or long() else 2)
    options = OPTIONS | dict(compile=way == "compiled", graph=way == "captured")
    batching, prompt, draws = batching_of(model, share=False, **options), ids(21, 9), Sampling(temperature=1.0)
    alone = batching.submit(prompt, max_new_tokens=12, sampling=draws)
    (want,) = batching.drain()
    assert want.request == alone and len(want.tokens) == 12
    for seed in range(10 if long() else 2):
        draw = random.Random(seed)
        for other in range(3):
            batching.submit(ids(draw.randint(1, 40), other), max_new_tokens=draw.randint(1, 20))
        batching.step()
        number = batching.submit(prompt, max_new_tokens=12, sampling=draws)
        others = [batching.submit(ids(draw.randint(1, 30), n), max_new_tokens=draw.randint(1, 20)) for n in range(3)]
        found = []
        while not batching.idle:
            found += batching.step()
            if draw.random() < 0.1:
                batching.cancel(draw.choice(others))
        (mine,) = [one for one in found if one.request == number]
        assert (mine.tokens, mine.logprobs) == (want.tokens, want.logprobs)
    assert batching.occupancy().preempted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_of_a_batch(name, device):
    """generate: alone, and as one of several; prompts are computed in steps of other sizes."""
    model, prompts = (
        model_of(name, device, "fp8" if device == "cuda" else "fp32", layers=2),
        [ids(21, 9), ids(3), ids(40, 2), ids(17, 3)],
    )
    options = dict(max_new_tokens=6, batch_invariant=True, logprobs=2)
    together = generate(model, prompts, prefill_tokens=50, **options)
    for number in (0, 2):
        alone = generate(model, [prompts[number]], prefill_tokens=50, **options)
        assert alone.tokens[0] == together.tokens[number]
        for mine, theirs in zip(alone.logprobs[0], together.logprobs[number]):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_steps_of_any_size(name, device):
    """Logits of a prompt's rows and of a decode row: in steps with others, in another order, in parts."""
    given = invariant_model(name, device)
    prompts = [ids(length, length) for length in (19, 5, 33, 1)]

    def steps(*parts):
        """The logits of each request's rows; a part is the requests of a step, and how many tokens of each."""
        requests = Requests(given.spec, given.params, given.layouts, 4, 64, block_size=16)
        requests.model = given
        found, done = [[] for _ in prompts], [0] * len(prompts)
        for part in parts:
            pairs = [(one, prompts[one][done[one] : done[one] + count]) for one, count in part]
            for (one, tokens), logits in zip(pairs, requests.step(prefill=pairs)):
                found[one].append(logits)
                done[one] += len(tokens)
        decode = [(one, [7]) for one in range(4) if done[one] == len(prompts[one])]
        for (one, _), logits in zip(decode, requests.step(decode=decode, padding=1)):
            found[one].append(logits)
        return [torch.cat(logits) if logits else None for logits in found]

    together = steps([(0, 19), (1, 5), (2, 33), (3, 1)])
    for apart in (
        steps([(0, 19)], [(1, 5)], [(2, 33)], [(3, 1)]),
        steps([(2, 8)], [(2, 25), (1, 5)], [(0, 10), (3, 1)], [(0, 9)]),
        steps([(0, 19)]), steps([(2, 33)]), steps([(3, 1)]),
    ):  # fmt: skip
        for one, logits in enumerate(apart):
            if logits is not None:
                assert torch.equal(logits, together[one]), one
