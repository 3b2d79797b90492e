"""Rows of a decode loop that join and leave between steps: the others draw what they draw anyway."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest
import torch
from support.steps import BLOCK, MAX_CONTEXT, WIDTH, filled_caches, model_of

from sparse_attn import DecodeGraph, Sampling
from sparse_attn.framework.torch_private import occupy
from sparse_attn.generation import row_settings
from sparse_attn.generation.loop import EagerDecode, LoopSettings
from sparse_attn.generation.sampling import Draws
from sparse_attn.generation.stream import TokenStream

ROWS = 4
OPTIONS = dict(max_context=MAX_CONTEXT, max_blocks=WIDTH, buckets=(2, ROWS), keep_logprobs=True)


def rows_of(kind, model, caches, **options):
    given = OPTIONS | options
    return EagerDecode(model, caches, LoopSettings(**given)) if kind is EagerDecode else kind(model, caches, **given)


def given(model, row, seq_len, token=7):
    """What ``join`` takes for one row."""
    device = model.device
    table = torch.arange(row * WIDTH, (row + 1) * WIDTH, dtype=torch.int32, device=device).unsqueeze(0)
    rings = torch.tensor([[row]], dtype=torch.int32, device=device) if model.has_rings else None
    lens = torch.tensor([seq_len], dtype=torch.int32, device=device)
    return torch.tensor([token + row], device=device), lens, table, rings, torch.tensor([40 + row], device=device)


def check_freed_at_once(kind, name, device):
    """A loop, and the caches that only it holds, go with their last name: no cycle waits for the garbage collector."""
    model = model_of(name, "fp8", device)
    caches = filled_caches(model, ROWS)
    loop = rows_of(kind, model, caches, sampling=Sampling(stop_ids=(3,)))
    loop.prepare(1, seed=2, rings=[1] if model.has_rings else None, blocks=[4])
    loop.start([1], [1])
    loop.run(2).wait()
    gone = weakref.ref(loop), weakref.ref(caches.kv[0])
    gc.disable()
    try:
        del loop, caches
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_a_loop_is_freed_at_once(name):
    check_freed_at_once(EagerDecode, name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_a_captured_loop_is_freed_at_once(name):
    check_freed_at_once(DecodeGraph, name, "cuda")


def check_comings_and_goings(kind, name, device):
    """Row 3 joins while row 1 decodes, row 1 leaves and comes back as somebody else. Each draws what it draws alone in
    its row, with the same log-probabilities to the bit."""
    model = model_of(name, "fp32", device)
    model.batch_invariant = True
    options = dict(sampling=Sampling(temperature=1.5), batch_invariant=True)
    loop = rows_of(kind, model, filled_caches(model, ROWS), **options)
    loop.join([1], *given(model, 1, 5))
    first = loop.run(3)
    loop.join([3], *given(model, 3, 17))
    both = loop.run(4)
    loop.leave([1])
    rest = loop.run(2)
    loop.join([1], *given(model, 1, 1, token=60))
    back = loop.run(3)
    streams = first, both, rest, back
    assert [stream.wait().shape for stream in streams] == [(3, 2), (4, 4), (2, 4), (3, 4)]
    assert [stream.arrived() for stream in streams] == [3, 4, 2, 3] and loop.live == {1, 3}

    def column(row, *parts):
        pairs = [stream.step(number) for stream in parts for number in range(len(stream))]
        return torch.stack([tokens[row] for tokens, _ in pairs]), torch.stack([scores[row] for _, scores in pairs])

    rows = (1, 5, 7, (first, both)), (3, 17, 7, (both, rest, back)), (1, 1, 60, (back,))
    for row, length, token, parts in rows:
        alone = rows_of(kind, model, filled_caches(model, ROWS), **options)
        alone.join([row], *given(model, row, length, token))
        stream = alone.run(sum(map(len, parts)))
        stream.wait()
        stream.arrived()
        tokens, scores = column(row, *parts)
        want, wanted_scores = column(row, stream)
        assert torch.equal(tokens, want) and torch.equal(scores, wanted_scores) and len(set(tokens.tolist())) > 1
        assert bool((scores < 0).all())


@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_rows_come_and_go_and_the_others_draw_what_they_draw_alone(name):
    check_comings_and_goings(EagerDecode, name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_captured_rows_come_and_go(name):
    check_comings_and_goings(DecodeGraph, name, "cuda")


@pytest.mark.gpu
def test_joining_and_leaving_do_not_wait():
    model = model_of("tiny_v4", "fp8", "cuda")
    loop = rows_of(DecodeGraph, model, filled_caches(model, ROWS))
    rows = [given(model, row, 5) for row in range(ROWS)]
    loop.join([0], *rows[0])

    def change():
        loop.join([3], *rows[3])
        loop.prepare(2, seed=3, rings=[2])
        loop.start([2], [4], torch.tensor([[2, 3]], dtype=torch.int32))
        loop.set_blocks(2, [2, 3, 4])
        loop.leave([0])
        assert loop.state.tokens.shape == (ROWS,)  # before a look at which all this is written

    change()  # a kernel's first launch loads it, and loading waits for what runs
    loop.leave([2, 3])
    loop.join([0], *rows[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        occupy(4_000_000_000)  # two seconds: whoever waits would be seen, however slow the host is
        stream = loop.run(2)
        change()
        assert stream.arrived() == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stream.wait().shape == (2, 1) and stream.arrived() == 2


def test_a_prepared_row_starts_with_the_token_that_lies_there():
    model = model_of("tiny_v32", "fp32")
    loop = rows_of(EagerDecode, model, filled_caches(model, ROWS), sampling=Sampling(stop_ids=(8,)))
    joined = rows_of(EagerDecode, model, filled_caches(model, ROWS))
    tokens, lens, table, _, seeds = given(model, 2, 5)
    for row, token in ((2, int(tokens)), (0, 8)):
        loop.prepare(row, seed=int(seeds))
        loop.state.tokens[row] = token
        loop.start([row], [5], table)
    joined.join([2], tokens, lens, table, None, seeds)
    assert torch.equal(loop.run(4).wait()[:, 2], joined.run(4).wait()[:, 2])
    assert loop.state.seq_lens.tolist() == [0, 0, 9, 0]  # the other one began with its stop id


def test_what_is_set_between_steps_is_written_once_and_last():
    model = model_of("tiny_v32", "fp32")
    loop = rows_of(EagerDecode, model, filled_caches(model, ROWS))
    loop.join([0, 3], *(torch.cat(parts) for parts in zip(given(model, 0, 5)[:3], given(model, 3, 6)[:3])))
    loop.leave([3])
    loop.prepare(3, seed=4, blocks=[7, 8])
    loop.prepare(1, seed=5, blocks=[1])
    loop.leave([0])
    loop.prepare(3, seed=6, blocks=[9])
    loop.start([3], [2])
    with mock.patch.object(row_settings, "copy_all", side_effect=row_settings.copy_all) as copies:
        state = loop.state
        assert loop.state is state and copies.call_count == 1
    assert state.seq_lens.tolist() == [0, 0, 0, 2] and state.seeds[1].item() == 5 and state.seeds[3].item() == 6
    assert state.block_table[[1, 3], :2].tolist() == [[1, -1], [9, -1]] and loop.live == {3}
    with pytest.raises(ValueError, match=f"^blocks: got {WIDTH + 1} blocks, allowed: at most {WIDTH}"):
        loop.prepare(2, blocks=range(WIDTH + 1))


def test_a_row_that_grows_writes_into_its_new_block():
    model = model_of("tiny_v32", "fp32")
    caches = filled_caches(model, ROWS)
    loop = rows_of(EagerDecode, model, caches)
    tokens, lens, table, _, _ = given(model, 1, BLOCK)
    loop.join([1], tokens, lens, table[:, :1])
    loop.set_blocks(1, table[0, :2])
    before = caches.kv[0][WIDTH + 1, 0].clone()
    loop.run(2)
    assert not torch.equal(caches.kv[0][WIDTH + 1, 0], before)
    assert loop.state.block_table[1].tolist() == table[0, :2].tolist() + [-1] * (WIDTH - 2)


def test_what_a_batch_invariant_loop_runs():
    model = model_of("tiny_v32", "fp32")
    with pytest.raises(ValueError, match="^batch_invariant: got True, allowed: with a step that is"):
        rows_of(EagerDecode, model, filled_caches(model, ROWS), batch_invariant=True)
    model.batch_invariant, seen = True, []
    model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape[0]))
    loop = rows_of(EagerDecode, model, filled_caches(model, ROWS), batch_invariant=True)
    loop.join([0], *given(model, 0, 3))
    loop.run(1)
    assert seen == [ROWS] and loop.buckets == (ROWS,)


def test_errors_name_the_argument_and_change_nothing():
    model = model_of("tiny_v32", "fp32")
    loop = rows_of(EagerDecode, model, filled_caches(model, ROWS))
    tokens, lens, table, _, _ = given(model, 0, 5)
    with pytest.raises(RuntimeError, match="^run: nothing is loaded"):
        loop.run(1)
    loop.join([0], tokens, lens, table)
    before = [value.clone() for value in loop.state if isinstance(value, torch.Tensor)]
    row = (tokens, lens, table)
    for call, error, message in (
        (lambda: loop.join([0], *row), ValueError, r"rows\[0\]: got 0, a live row, allowed: others"),
        (lambda: loop.join([ROWS], *row), ValueError, r"rows\[0\]: got 4, allowed: 0 to 3"),
        (lambda: loop.join([1.5], *row), TypeError, r"rows\[0\]: got 1.5"),
        (lambda: loop.join([1, 2], *row), ValueError, "tokens: got 1 rows, allowed: 2"),
        (lambda: loop.join([1, 1], None, lens.repeat(2), table.repeat(2, 1)), ValueError, "rows: got .1, 1., allowed"),
        (lambda: loop.join([1], tokens, lens, table.repeat(1, 2)), ValueError, "block_table: got width 40"),
        (lambda: loop.join([1], *row, lens.view(1, 1)), ValueError, "ring_table: got a tensor, allowed: None"),
        (lambda: loop.join([1], *row, draws=Draws(lens.double())), ValueError, "draws: got a Draws, allowed: None"),
        (lambda: loop.leave([1]), ValueError, r"rows\[0\]: got 1, no live row, allowed: live ones"),
        (lambda: loop.prepare(0), ValueError, r"rows\[0\]: got 0, a live row"),
        (lambda: loop.prepare(1, seed=1.5), TypeError, "seed: got"),
        (lambda: loop.prepare(1, rings=[1]), ValueError, r"rings: got .1., allowed: the row's where"),
        (lambda: loop.prepare(1, sampling=Sampling()), ValueError, "sampling: got one of a row, allowed: None"),
        (lambda: loop.start([1], [5, 6], table), ValueError, "seq_lens: got 2 rows, allowed: 1"),
        (lambda: loop.start([1], [5], table[0]), ValueError, "block_table: got"),
        (lambda: loop.start([0], [5], table), ValueError, r"rows.0.: got 0, a live row"),
        (lambda: loop.run(-1), ValueError, "steps: got -1"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            call()
    assert loop.live == {0}
    assert all(map(torch.equal, before, (value for value in loop.state if isinstance(value, torch.Tensor))))
    with pytest.raises(ValueError, match="^number: got 0, allowed: below 0"):
        TokenStream(tokens.unsqueeze(0), [None]).step(0)
