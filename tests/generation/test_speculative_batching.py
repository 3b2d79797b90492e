"""A scheduler whose decode steps verify drafts: requests draw what they draw alone, in fewer steps."""

import random

import pytest
import torch
from conftest import long
from support.hashing import alone, half_right, hashing_model
from support.ledger import check_ledger
from support.speculation import predicting_model

from sparse_attn import Batching, Sampling, generate
from sparse_attn.cli.main import main

BLOCK = 16
STEPS = 400


def batching_of(model, **options) -> Batching:
    common = dict(rows=3, num_blocks=12, max_context=96, block_size=BLOCK, prefill_tokens=24, piece=2, snapshots=3)
    return Batching(model, **(common | options))


@pytest.mark.few(1)
@pytest.mark.parametrize("drafts", (1, 3))
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_glm5", "tiny_v4"))
def test_by_multi_token_prediction(name, drafts):
    """Of all kinds, more than rows; some share a prefix, and some are preempted while they decode."""
    model, draw = predicting_model(name, vocab_size=7), random.Random(1)
    batching = batching_of(
        model, num_blocks=12, penalties=True, stop_ids=1, logprobs=True, speculate=drafts, batch_invariant=False
    )
    common, asked = [draw.randrange(7) for _ in range(2 * BLOCK)], []
    samplings = (
        Sampling(), Sampling(temperature=1.0, seed=3), Sampling(stop_ids=(2,)),
        Sampling(temperature=0.9, seed=4, top_p=0.9, repetition=1.2, frequency=0.1),
    )  # fmt: skip
    for number in range(8 if long() else 5):
        prompt = (common if number % 2 else []) + [draw.randrange(7) for _ in range(1 + 4 * number)]
        asked.append((prompt, 20 + 2 * number, samplings[number % 4]))
        batching.submit(prompt, max_new_tokens=asked[-1][1], sampling=asked[-1][2])
    done, steps = {}, 0
    while not batching.idle:
        done |= {one.request: one for one in batching.step()}
        steps += 1
        if steps % 7 == 0 and (decoding := [one for one in batching.admission.running if one.decoding]):
            batching.admission.preempt(decoding[-1])
        check_ledger(batching)
    for number, (prompt, most, sampling) in enumerate(asked):
        want = generate(model, [prompt], max_new_tokens=most, sampling=sampling, block_size=BLOCK, logprobs=0)
        assert done[number].tokens == want.tokens[0], number
        torch.testing.assert_close(torch.tensor(done[number].logprobs), want.logprobs[0].drawn, atol=1e-4, rtol=1e-4)
    counts = batching.occupancy()
    assert counts.preempted and counts.reused and counts.free == counts.blocks


@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_a_request_takes_fewer_steps(name):
    """By a drafter that is right twice in three times; preempted requests go on with the ids that they know."""
    model = hashing_model(name)
    taken, right = {}, half_right(model, 2)
    expected = [[n, 5] + alone(model, [n, 5], 40, Sampling()) for n in range(3)]

    def checked(known, seq_lens):
        for row, length in enumerate(seq_lens.tolist()):
            assert known[row, :length].tolist() in [ids[:length] for ids in expected]
        return right(known, seq_lens)

    for drafts in (0, 2):
        drafter = checked if drafts else None
        batching = batching_of(model, num_blocks=4, speculate=drafts, drafter=drafter, ahead=1, piece=1)
        for number in range(3):
            batching.submit([number, 5], max_new_tokens=40)
        found = {one.request: one.tokens for one in batching.drain()}
        assert [found[number] for number in range(3)] == [ids[2:] for ids in expected]
        taken[drafts] = batching.loop._taken
        assert batching.occupancy().preempted
    assert taken[2] < 0.6 * taken[0]


@pytest.mark.few(0)
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_soak(name):
    """Arrivals, prefixes, preemption and drafts: no difference to requests alone; blocks and rows come back."""
    model, draw = predicting_model(name, vocab_size=7), random.Random(5)
    batching = batching_of(model, num_blocks=10, speculate=2, share=True)
    common, asked, done = [draw.randrange(7) for _ in range(BLOCK)], {}, {}
    while len(asked) < 30 or not batching.idle:
        if len(asked) < 30 and draw.random() < 0.3:
            prompt = (common if draw.random() < 0.5 else []) + [draw.randrange(7) for _ in range(draw.randint(1, 40))]
            one = prompt, draw.randint(1, 35), Sampling(temperature=draw.choice((0.0, 1.0)), seed=draw.randrange(9))
            asked[batching.submit(prompt, max_new_tokens=one[1], sampling=one[2])] = one
        done |= {one.request: one.tokens for one in batching.step()}
        check_ledger(batching)
    for number, (prompt, most, sampling) in asked.items():
        assert done[number] == generate(model, [prompt], max_new_tokens=most, sampling=sampling).tokens[0]
    counts = batching.occupancy()
    assert counts.preempted and counts.reused and not batching.loop.live and counts.free == counts.blocks


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_captured_soak(name):
    """Arrivals, prefixes, preemption and cancellations. Every 25th call the same calls are made of a scheduler that
    captures nothing, and both finish the same; some requests are run alone and without drafts. Nothing waits, and
    memory stays flat."""
    model, draw = predicting_model(name, 7, device="cuda"), random.Random(7)
    options = dict(rows=4, num_blocks=9, speculate=2, logprobs=True, penalties=True, stop_ids=1, batch_invariant=True)
    loops = [batching_of(model, graph=graph, **options) for graph in (True, False)]
    common, asked, found = [draw.randrange(7) for _ in range(2 * BLOCK)], {}, ({}, {})
    memory, moved, calls, compared = [], [], 0, 0
    while loops[0].loop._taken < STEPS:
        for _ in range(0 if loops[0].occupancy().waiting > 12 else draw.randint(0, 2)):
            prompt = common[: draw.choice((0, 1, 2)) * BLOCK] + [draw.randrange(7) for _ in range(draw.randint(1, 20))]
            sampling = Sampling(
                draw.choice((0.0, 1.0)), draw.randrange(9), stop_ids=draw.choice(((), (2,))),
                top_k=draw.choice((0, 4)), presence=draw.choice((0.0, 0.4)),
            )  # fmt: skip
            one = prompt, draw.randint(1, 44), sampling
            number, _ = (loop.submit(prompt, max_new_tokens=one[1], sampling=sampling) for loop in loops)
            asked[number] = one
            if draw.random() < 0.1:
                cancelled = [loop.cancel(number) for loop in loops]
                assert all(cancelled)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found[0].update({one.request: one for one in loops[0].step()})
        finally:
            torch.cuda.set_sync_debug_mode("default")
        calls += 1
        if calls % 8 == 0 and (decoding := [one for one in loops[0].admission.running if one.decoding]):
            loops[0].admission.preempt(decoding[-1])
        check_ledger(loops[0])
        if calls % 25 == 0:
            for loop, mine in zip(loops, found):
                mine.update({one.request: one for one in loop.drain()})
            for number in asked:
                mine, own = (each[number] for each in found)
                assert (mine.tokens, mine.reason) == (own.tokens, own.reason), (number, asked[number], mine, own)
                moved.append(max([0.0, *(abs(a - b) for a, b in zip(mine.logprobs, own.logprobs, strict=True))]))
            for number in [number for number in asked if number % 3 == 0 and found[0][number].reason != "cancelled"]:
                prompt, most, sampling = asked[number]
                want = generate(model, [prompt], max_new_tokens=most, sampling=sampling).tokens[0]
                assert found[0][number].tokens == want, (number, asked[number])
                compared += 1
            asked.clear()
            memory.append(torch.cuda.memory_allocated())
    counts = [loop.occupancy() for loop in loops]
    steps = loops[0].loop._taken
    print(f"{name}: {len(found[0])} requests, {compared} run alone, {steps} steps, {counts[0]}")
    print(f"{name}: log-probabilities differ by at most {max(moved):.1e}; bytes {memory}")
    assert counts[0].preempted and counts[0].reused and compared > 10 and len(found[0]) > 30
    assert max(moved) < 1e-3
    assert max(memory[len(memory) // 2 :]) <= max(memory[: len(memory) // 2]) + (1 << 20)


@pytest.mark.parametrize(
    "options,message", [(dict(speculate=2), "drafter: got None"), (dict(drafter=max), "speculate")]
)
def test_what_cannot_draft_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        batching_of(hashing_model("tiny_v32"), **options)


def test_prompts_of_a_file(tmp_path):
    """By the command line: the same lines with drafts and without."""
    asked, answers = tmp_path / "asked.jsonl", []
    asked.write_text("".join(f'{{"id": {n}, "prompt_ids": [{n}, 5, 9]}}\n' for n in range(3)))
    for drafts in (0, 2):
        out = tmp_path / f"{drafts}.jsonl"
        given = ["--preset", "tiny-v4", "--prompts", str(asked), "--out", str(out), "--max-new-tokens", "6"]
        assert main(["generate", *given, "--speculate", str(drafts), "--device", "cpu"]) == 0
        answers.append(sorted(out.read_text().splitlines()))
    assert answers[0] == answers[1]
