import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_attn.generation.blocks import BlockPool, BlockTables, Span, blocks_for, prefill_chunks, slots_of


def test_pool_hands_every_block_out_once_and_takes_it_back():
    pool = BlockPool(5)
    first = pool.take(3)
    assert first == [0, 1, 2] and len(pool) == 2
    with pytest.raises(RuntimeError, match="3 blocks wanted, 2 of 5 are free"):
        pool.take(3)
    assert len(pool) == 2
    pool.give_back([1])
    assert sorted(pool.take(3)) == [1, 3, 4]


@pytest.mark.parametrize("returned", ([7], [0, 0]))
def test_pool_refuses_what_is_not_taken(returned):
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(ValueError, match="blocks: got"):
        pool.give_back(returned)


def test_tables_grow_in_place_and_release():
    pool = BlockPool(4)
    tables = BlockTables(pool, max_requests=2, max_blocks=3, block_size=4)
    tables.reserve(0, 5)
    before = tables.table[0, :2].tolist()
    tables.reserve(1, 1)
    tables.reserve(0, 9)
    assert tables.table[0, :2].tolist() == before
    assert len(pool) == 0 and len(set(tables.table[0].tolist()) | {int(tables.table[1, 0])}) == 4
    tables.reserve(0, 3)  # less than it has: nothing happens
    with pytest.raises(ValueError, match="tokens: got 13, allowed: at most 12"):
        tables.reserve(0, 13)
    tables.release(0)
    assert len(pool) == 3 and tables.table[0].tolist() == [-1, -1, -1]


def test_slots_follow_the_table():
    table = torch.tensor([[3, 0, -1], [5, -1, -1]], dtype=torch.int32)
    requests = torch.tensor([0, 0, 0, 1, 1, 0])
    positions = torch.tensor([0, 4, 7, 2, -1, 9])
    assert slots_of(table, requests, positions, 4).tolist() == [12, 0, 3, 22, -1, -1]


def test_slots_of_a_ring_come_round():
    table, positions = torch.tensor([[3, 0]], dtype=torch.int32), torch.tensor([7, 8, 12, 16, 23])
    assert slots_of(table, positions * 0, positions, 4).tolist() == [3, 12, 0, 12, 3]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 50))
def test_chunks_cover_every_prompt_in_order(lengths, budget):
    chunks = list(prefill_chunks(lengths, budget))
    assert all(sum(span.stop - span.start for span in spans) == budget for spans in chunks[:-1])
    flat = [(span.request, position) for spans in chunks for span in spans for position in range(span.start, span.stop)]
    assert flat == [(request, position) for request, length in enumerate(lengths) for position in range(length)]


def test_chunks_example_and_error():
    assert list(prefill_chunks([5, 2], 4)) == [[Span(0, 0, 4)], [Span(0, 4, 5), Span(1, 0, 2)]]
    with pytest.raises(ValueError, match="budget: got 0"):
        list(prefill_chunks([1], 0))


def test_no_slot_is_shared():
    """Random growth of several requests: live positions never share a slot."""
    draw = random.Random(0)
    pool = BlockPool(30)
    tables = BlockTables(pool, 4, 20, 3)
    lengths = [0] * 4
    for _ in range(200):
        request = draw.randrange(4)
        wanted = lengths[request] + draw.randrange(1, 6)
        if blocks_for(wanted, 3) > 20 or blocks_for(wanted, 3) - blocks_for(lengths[request], 3) > len(pool):
            tables.release(request)
            lengths[request] = 0
            continue
        tables.reserve(request, wanted)
        lengths[request] = wanted
        slots = [
            slot
            for other, length in enumerate(lengths)
            for slot in slots_of(tables.table, torch.full((length,), other), torch.arange(length), 3).tolist()
        ]
        assert min(slots) >= 0 and len(set(slots)) == len(slots) == sum(lengths)
