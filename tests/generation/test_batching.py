"""Requests that come and go: who runs when, that nobody is lost, and that company changes nothing."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import torch
from conftest import long
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batching import BLOCK, NAMES, batching_of, ids, model_of
from support.hashing import alone, half_right, hashing_model
from support.ledger import check_ledger

from sparse_attn import Sampling, generate
from sparse_attn.framework.torch_private import EagerDispatchMode
from sparse_attn.generation import loop, scheduler, stream
from sparse_attn.generation.cache_rows import Rows, ringed
from sparse_attn.pipeline import latent


@pytest.fixture(scope="module")
def models():
    return {}


@pytest.fixture
def model(request, models):
    """One of a preset, made once."""
    name = request.param
    return models[name] if name in models else models.setdefault(name, model_of(name, layers=3 if long() else 2))


def on(*names):
    """For some presets in CI, all where every case is asked for."""
    return pytest.mark.parametrize("model", NAMES if long() else names, indirect=True)


@on("tiny_v32")
def test_requests_of_all_kinds_draw_what_they_draw_alone(model):
    """Sampling, seeds, penalties and stop ids of their own; more of them than rows."""
    batching = batching_of(model, penalties=True, logprobs=True, stop_ids=100)
    kinds = [
        (ids(20), 9, Sampling(), 0),
        (ids(3, 1), 12, Sampling(temperature=0.9, top_k=20), 5),
        (ids(17, 2), 1, Sampling(temperature=1.0, top_p=0.8), 6),
        (ids(8, 3), 10, Sampling(temperature=0.7, repetition=1.5, frequency=0.3), 7),
        (ids(40, 4), 6, Sampling(temperature=1.0, stop_ids=tuple(range(100))), 8),
        (ids(16, 5), 12, Sampling(temperature=1.0, min_p=0.1, stop_ids=tuple(range(0, 256, 40))), 9),
    ]
    heard: dict[int, list[int]] = {}
    numbers = [
        batching.submit(
            prompt, max_new_tokens=most, sampling=sampling, seed=seed,
            on_token=lambda number, token: heard.setdefault(number, []).append(token),
        )
        for prompt, most, sampling, seed in kinds
    ]  # fmt: skip
    done = {one.request: one for one in batching.drain()}
    assert batching.idle and sorted(done) == numbers and heard == {one: done[one].tokens for one in done}
    for number, (prompt, most, sampling, seed) in zip(numbers, kinds):
        want = generate(
            model, [prompt], max_new_tokens=most, sampling=sampling, seeds=[seed], block_size=BLOCK, logprobs=0
        )
        assert done[number].tokens == want.tokens[0], number
        torch.testing.assert_close(torch.tensor(done[number].logprobs), want.logprobs[0].drawn, atol=1e-4, rtol=1e-4)
        assert done[number].reason == ("stop" if want.tokens[0][-1] in sampling.stop_ids else "length")
    check_ledger(batching)
    assert batching.occupancy().free == batching.pool.num_blocks


@on("tiny_v4")
def test_the_youngest_gives_way_and_goes_on_with_the_same_tokens(model):
    """Blocks for one request and a bit: the second is preempted, more than once, and draws what it draws alone."""
    batching = batching_of(model, num_blocks=6, penalties=True)
    kinds = [(ids(17), 22, Sampling()), (ids(9, 1), 22, Sampling(temperature=1.0, presence=0.5))]
    for prompt, most, sampling in kinds:
        batching.submit(prompt, max_new_tokens=most, sampling=sampling)
    done = {}
    while not batching.idle:
        done |= {one.request: one.tokens for one in batching.step()}
        check_ledger(batching)
    assert batching.occupancy().preempted >= 1 and list(done) == [0, 1]
    for number, (prompt, most, sampling) in enumerate(kinds):
        assert (
            done[number]
            == generate(model, [prompt], max_new_tokens=most, sampling=sampling, block_size=BLOCK).tokens[0]
        )


def drawn(batching, prompt, most=5):
    batching.submit(prompt, max_new_tokens=most, sampling=Sampling(temperature=1.0))
    (done,) = batching.drain()
    return done.tokens, done.logprobs


@on("tiny_v32", "tiny_v4")
def test_a_request_alone_and_among_others_is_the_same_to_the_bit(model):
    """Batch-invariant: tokens and log-probabilities, whoever comes, leaves, is cancelled or preempted beside it, and
    wherever its prompt is cut."""
    options = dict(batch_invariant=True, logprobs=True, num_blocks=12)
    prompt = ids(21, 9)
    want = drawn(batching_of(model, **options), prompt, most=12)
    for seed in range(10 if long() else 1):
        batching, draw = batching_of(model, **options), random.Random(seed)
        for other in range(3):
            batching.submit(ids(draw.randint(1, 40), other), max_new_tokens=draw.randint(1, 20))
        batching.step()
        number = batching.submit(prompt, max_new_tokens=12, sampling=Sampling(temperature=1.0))
        others = [
            batching.submit(ids(draw.randint(1, 30), n), max_new_tokens=draw.randint(1, 20)) for n in range(7, 10)
        ]
        found = []
        while not batching.idle:
            found += batching.step()
            if draw.random() < 0.1:
                batching.cancel(draw.choice(others))
        (mine,) = [one for one in found if one.request == number]
        assert (mine.tokens, mine.logprobs) == want


@on("tiny_v32", "tiny_v4")
def test_a_prefix_computed_by_another_is_the_same_to_the_bit(model):
    """Two prompts with 24 tokens in common; the second begins with the first one's blocks, for V4 with its rings too,
    and a third with what the second left where it branched off."""
    options = dict(batch_invariant=True, logprobs=True, snapshots=6)
    common = ids(3 * BLOCK, 3)
    prompts = [common + ids(11, 4), common + ids(15, 5), common + ids(2, 6)]
    fresh = [drawn(batching_of(model, share=False, **options), prompt) for prompt in prompts]
    batching = batching_of(model, **options)
    assert [drawn(batching, prompt) for prompt in prompts] == fresh
    shared = batching.occupancy().reused
    assert shared == (40 if model.has_rings else 48)  # V4: 16, where the first was cut, and 24, where the second left
    assert drawn(batching, prompts[0]) == fresh[0] and batching.occupancy().reused == shared + 32  # its last border
    check_ledger(batching)


def test_a_prompt_that_is_cancelled_leaves_what_it_computed():
    model = model_of("tiny_v32")
    batching = batching_of(model)
    number = batching.submit(ids(40), max_new_tokens=5)
    batching.step()
    assert batching.cancel(number) and not batching.cancel(number)
    assert [(one.request, one.reason, one.tokens) for one in batching.step()] == [(number, "cancelled", [])]
    assert batching.idle and batching.occupancy().free == 24 and not batching.cancel(number)
    batching.submit(ids(40), max_new_tokens=1)
    batching.drain()
    assert batching.occupancy().reused == 16


def test_nobody_overtakes_and_newcomers_do_not_stop_the_others():
    """The first decodes while the long prompt of the second is computed piece by piece; the third, which would fit,
    waits for the fourth place of the queue to come."""
    model = model_of("tiny_v32")
    batching = batching_of(model, rows=2, share=False)
    times: dict[int, list[int]] = {}
    now = 0
    for length, most in ((4, 20), (60, 3), (2, 2), (2, 2)):
        batching.submit(
            ids(length), max_new_tokens=most, on_token=lambda number, _: times.setdefault(number, []).append(now)
        )
    while not batching.idle:
        now += 1
        batching.step()
        check_ledger(batching)
    assert times[0][0] == 1 and times[1][0] == 4  # 60 tokens in steps of 16, after 4 of the other one
    assert [times[0].count(step) for step in range(1, 5)] == [3, 2, 2, 2]
    assert times[2][0] > times[1][-1] - 1 and times[3][0] >= times[2][0]


FREE = {"lift_fresh", "empty", "select", "slice", "view", "unsqueeze", "squeeze", "split_with_sizes", "expand"}


class Counted(EagerDispatchMode):
    """Counts what would be launched or copied; views and allocations are free."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.found += [name] * (name not in FREE)
        return out

    def without(self, function):
        """``function``, uncounted."""

        def quiet(*arguments, **options):
            kept, result = len(self.found), function(*arguments, **options)
            del self.found[kept:]
            return result

        return quiet


@pytest.mark.parametrize("model", ["tiny_v32", "tiny_v4"], indirect=True)
def test_an_arrival_takes_few_launches_beside_its_prefill(model):
    """From its arrival to its end, of any number of layers, stop ids and filters, what its start writes included."""
    batching, counted = batching_of(model, stop_ids=4, snapshots=4), Counted()
    how = dict(max_new_tokens=3, sampling=Sampling(0.8, top_k=20, top_p=0.9, stop_ids=(255, 256)))
    batching.submit(ids(16) + ids(5, 1), **how)
    batching.drain()
    run, settle = counted.without(batching.loop.run), batching.loop._settle
    batching.loop.run = lambda steps: (settle(), run(steps))[1]
    with mock.patch.object(scheduler, "prefill_step", counted.without(scheduler.prefill_step)), counted:
        batching.submit(ids(16) + ids(4, 2), **how)
        batching.drain()
    assert batching.occupancy().reused == 16 and len(counted.found) <= 5 + model.has_rings, counted.found


@pytest.mark.parametrize(("cache", "launched"), [("fp8", ["copy_"]), ("fp32", ["_foreach_copy_"])])
def test_rings_of_all_layers_are_copied_at_once(cache, launched):
    """By one copy, if their layout lets them lie together; to the bit, and nobody else's."""
    batching, counted = batching_of(model_of("tiny_v4", cache=cache)), Counted()
    rings = ringed(batching.caches)
    for number, ring in enumerate(rings):
        ring[1] = number + 1
    loop = Rows(rings)
    with counted:
        loop.copy(1, 4)
    assert counted.found == launched
    for number, ring in enumerate(rings):
        assert [row.unique().tolist() for row in ring] == [[number + 1 if row in (1, 4) else 0] for row in range(6)]


def test_a_request_begins_with_rings_that_lie_together():
    model = model_of("tiny_v4", cache="fp8")
    batching = batching_of(model, snapshots=6)
    for tail in (ids(11, 4), ids(15, 5)):
        prompt = ids(3 * BLOCK, 3) + tail
        how = dict(max_new_tokens=5, sampling=Sampling(temperature=1.0))
        batching.submit(prompt, **how)
        (done,) = batching.drain()
        assert done.tokens == generate(model, [prompt], block_size=BLOCK, **how).tokens[0]
    assert batching.occupancy().reused == 16


def test_a_prefill_that_fails_leaves_no_row_behind():
    """The length of a row is written before the step that computes its prompt."""
    batching = batching_of(model_of("tiny_v32", layers=1))
    number = batching.submit(ids(10), max_new_tokens=5)
    with mock.patch.object(scheduler, "prefill_step", side_effect=MemoryError), pytest.raises(MemoryError):
        batching.step()
    assert batching.cancel(number) and len(batching.drain()) == 1
    assert not batching.loop.state.seq_lens.any() and not batching.loop.live


def test_generate_asks_for_batch_invariant_attention():
    model, asked = model_of("tiny_v32", layers=1), []
    given, attend = latent.sparse_attn_decode, lambda *a, **o: (asked.append(o["batch_invariant"]), given(*a, **o))[1]
    for wanted in (False, True):
        with mock.patch.object(latent, "sparse_attn_decode", attend):
            generate(model, [[1, 2]], max_new_tokens=2, batch_invariant=wanted)
    assert asked == [False, True] and not model.batch_invariant and model.invariant().embed is model.embed


def test_callbacks_may_submit_cancel_end_and_raise():
    model = model_of("tiny_v32")
    batching = batching_of(model)

    def submits(number, token):
        if len(born) < 1:
            born.append(batching.submit(ids(3, 1), max_new_tokens=2))

    def raises(number, token):
        seen.append(token)
        if len(seen) == 2:
            raise KeyError("mine")

    born, seen = [], []
    first = batching.submit(ids(5), max_new_tokens=6, on_token=submits)
    second = batching.submit(ids(5, 2), max_new_tokens=6, on_token=lambda *_: True)
    third = batching.submit(ids(5, 3), max_new_tokens=6, on_token=raises)
    fourth = batching.submit(ids(5, 4), max_new_tokens=6, on_token=lambda *_: batching.cancel(fourth) and None)
    done, raised = {}, 0
    while not batching.idle:
        try:
            done |= {one.request: one for one in batching.step()}
        except KeyError:
            raised += 1
        check_ledger(batching)
    assert raised == 1 and seen == done[third].tokens and len(seen) == 6
    assert [done[n].reason for n in (first, second, third, fourth, *born)] == [
        "length",
        "ended",
        "length",
        "cancelled",
        "length",
    ]
    assert len(done[second].tokens) == len(done[fourth].tokens) == 1


def test_tokens_that_arrive_while_others_are_delivered_are_not_lost(monkeypatch):
    """An event is seen at its second query, so that each look at a stream finds one step more than the last."""

    class Late:
        queries = 0

        def query(self):
            self.queries += 1
            return self.queries > 1

    for module in (loop, stream):
        monkeypatch.setattr(module, "passed", lambda device: Late())
    model = hashing_model("tiny_v32")
    batching = batching_of(model, piece=4, ahead=2)
    prompts = [ids(5, n) for n in range(6)]
    prompts = [[token % model.spec.vocab_size for token in prompt] for prompt in prompts]
    numbers = [batching.submit(prompt, max_new_tokens=9 + n) for n, prompt in enumerate(prompts)]
    found = {}
    for _ in range(1000):
        found |= {one.request: one.tokens for one in batching.step()}
    assert batching.idle
    assert [found[number] for number in numbers] == [
        alone(model, prompt, 9 + n, Sampling()) for n, prompt in enumerate(prompts)
    ]


def test_what_can_never_run_is_refused_and_the_queue_is_bounded():
    model = model_of("tiny_v32")
    batching = batching_of(model, num_blocks=6, max_waiting=2, stop_ids=1)
    for call, error, message in (
        (lambda: batching.submit([], max_new_tokens=1), ValueError, "prompt: got no token"),
        (lambda: batching.submit([999999], max_new_tokens=1), ValueError, "prompt: got id 999999"),
        (lambda: batching.submit(ids(40), max_new_tokens=10), ValueError, "prompt: got 49 tokens .* allowed: 48"),
        (lambda: batching.submit([1], max_new_tokens=0), ValueError, "max_new_tokens: got 0"),
        (lambda: batching.submit([1], max_new_tokens=1, seed=2**64), ValueError, "seed: got 18446744073709551616"),
        (
            lambda: batching.submit([1], max_new_tokens=1, sampling=Sampling(presence=1.0)),
            ValueError,
            "sampling: got pen",
        ),
        (
            lambda: batching.submit([1], max_new_tokens=1, sampling=Sampling(stop_ids=(1, 2))),
            ValueError,
            "stop_ids: got 2",
        ),
        (lambda: batching_of(model, rows=0), ValueError, "rows: got 0"),
        (lambda: batching_of(model, snapshots=-1), ValueError, "snapshots: got -1"),
        (lambda: batching_of(model, max_context=10**9), ValueError, "max_context: got 1000000000"),
        (lambda: batching_of(model, graph=True), ValueError, "graph: got device cpu"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            call()
    for _ in range(2):
        batching.submit(ids(40), max_new_tokens=9)
    with pytest.raises(RuntimeError, match="^queue: 2 requests are waiting, allowed: 2"):
        batching.submit([1], max_new_tokens=1)
    assert len(batching.drain()) == 2


@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
@settings(deadline=None, max_examples=1000 if long() else 6, derandomize=not long())
@given(data=st.data())
def test_whatever_happens_every_request_ends_once(name, data):
    """Arrivals, cancellations and steps in any order, in few blocks, of a model that hashes what its blocks hold. The
    books are checked after every step, and every request draws what is reckoned for it alone, with drafts and without."""
    model, integers = hashing_model(name), st.integers
    drafts = data.draw(integers(0, 3))
    batching = batching_of(
        model, rows=data.draw(integers(1, 4)), num_blocks=data.draw(integers(6, 14)), piece=data.draw(integers(1, 4)),
        prefill_tokens=data.draw(integers(2, 20)), snapshots=data.draw(integers(0, 3)), ahead=data.draw(integers(1, 3)),
        max_context=48, speculate=drafts, drafter=half_right(model, drafts) if drafts else None,
    )  # fmt: skip
    base, asked, found = [n * n % 64 for n in range(32)], {}, {}

    def step():
        for one in batching.step():
            assert one.request not in found
            found[one.request] = one
        check_ledger(batching)

    for _ in range(data.draw(integers(1, 12))):
        for _ in range(data.draw(integers(0, 3))):
            prompt = base[: data.draw(integers(1, 28))] + data.draw(st.lists(integers(0, 63), max_size=3))
            most = data.draw(integers(1, 16))
            sampling = Sampling(data.draw(st.sampled_from((0.0, 1.0))), data.draw(integers(0, 1)), stop_ids=(3, 50))
            asked[batching.submit(prompt, max_new_tokens=most, sampling=sampling)] = prompt, most, sampling
        if asked and data.draw(st.booleans()):
            batching.cancel(data.draw(st.sampled_from(sorted(asked))))
        step()
    for _ in range(2000):
        if batching.idle:
            break
        step()
    assert batching.idle and sorted(found) == sorted(asked) and not batching.loop.live
    batching.admission.prefixes.clear()
    assert len(batching.pool) == batching.pool.num_blocks
    for number, one in found.items():
        want = alone(model, *asked[number])
        assert one.tokens == want[: len(one.tokens)] and (one.reason == "cancelled" or one.tokens == want)
