"""Decode loops on a GPU that is none: which device everything lies on, and that steps ask nothing of the host."""

from __future__ import annotations

import random

import pytest
import torch
from support.pretended_gpu import DEVICE, pretended_gpu
from support.speculation import SAMPLINGS, last_ones, predicting_model

from sparse_attn import Batching, Sampling, generate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
MODELS = ("tiny_v32", "tiny_glm5", "tiny_v4")
BLOCK = 16


def prompts_of(*lengths: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(7) for _ in range(length)] for length in lengths]


def test_the_pretence():
    with pretended_gpu() as gpu:
        there, here = torch.zeros(3, device=DEVICE), torch.ones(3, device="cpu")
        assert there.device == DEVICE and here.device.type == (there + 1).cpu().device.type == "cpu"
        assert there[1:].is_cuda and there.copy_(here) is there and here.to(DEVICE).is_cuda
        for mixed in (lambda: there + here, lambda: torch.stack([there, here]), lambda: there[here.long()]):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                mixed()
        gpu.stepping = True
        for asked in (there.sum().item, there.tolist, there.cpu, lambda: there.copy_(here), lambda: here.to(DEVICE)):
            with pytest.raises(RuntimeError, match="a step reads the device, or takes a tensor from the host"):
                asked()


WAYS = {
    "greedy": dict(),
    "penalised": dict(sampling=[*SAMPLINGS.values()][1:], logprobs=2, keep_logits=True),
    "watched": dict(sampling=Sampling(temperature=1.0, stop_ids=(2,)), on_token=lambda row, token: token == 5),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafter", (None, last_ones))
@pytest.mark.parametrize("name", MODELS)
def test_generations(name, drafter, way):
    """With what speculation may meet: penalties, log-probabilities, logits, stop ids and a watcher."""
    prompts, options = prompts_of(20, 3), WAYS[way] | dict(max_new_tokens=6, prefill_tokens=14)
    expected = generate(predicting_model(name, 7), prompts, **options)
    with pretended_gpu():
        model = predicting_model(name, 7, device=DEVICE)
        for graph in (False, True):
            found = generate(model, prompts, speculate=2, drafter=drafter, graph=graph, **options)
            assert found.tokens == expected.tokens and found.graph_captures == graph
            assert found.drafter == ("function" if drafter else "mtp")


@pytest.mark.few(2)
@pytest.mark.parametrize("graph", (False, True))
@pytest.mark.parametrize("drafter", (None, last_ones))
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_scheduled_requests(name, drafter, graph):
    """Requests that share a prefix and are preempted."""
    model, common = predicting_model(name, 7), prompts_of(BLOCK)[0]
    asked = [(common + prompt, Sampling(temperature=1.0, seed=len(prompt))) for prompt in prompts_of(3, 1, 30)]
    expected = [generate(model, [prompt], max_new_tokens=12, sampling=one).tokens[0] for prompt, one in asked]
    with pretended_gpu():
        batching = Batching(
            predicting_model(name, 7, device=DEVICE), rows=2, num_blocks=9, max_context=96, block_size=BLOCK, prefill_tokens=24, piece=2,
            snapshots=3, penalties=True, logprobs=True, speculate=2, drafter=drafter, graph=graph,
        )  # fmt: skip
        for prompt, one in asked:
            batching.submit(prompt, max_new_tokens=12, sampling=one)
        found = {}
        while not batching.idle:
            found |= {one.request: one.tokens for one in batching.step()}
            if not batching.occupancy().preempted and (
                out := [one for one in batching.admission.running if one.decoding]
            ):
                batching.admission.preempt(out[-1])
    assert [found[number] for number in range(len(asked))] == expected
    counts = batching.occupancy()
    assert counts.preempted and counts.reused
