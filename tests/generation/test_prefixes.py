"""Which prefix a prompt begins from, who holds its blocks, and what is let go of."""

from array import array

import pytest
from conftest import long
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_attn.generation.blocks import BlockPool, BlockTables
from sparse_attn.generation.prefixes import Prefixes

BLOCK = 2


def kept(prefixes, tokens):
    """Computes ``tokens`` in fresh blocks, keeps them and leaves."""
    blocks = prefixes.pool.take(-(-len(tokens) // BLOCK))
    prefixes.keep(tokens, blocks)
    prefixes.pool.give_back(blocks)
    return blocks


def test_a_prompt_begins_with_the_longest_prefix_and_computes_at_least_one_token():
    prefixes = Prefixes(BlockPool(8), BLOCK)
    blocks = kept(prefixes, [1, 2, 3, 4, 5])
    assert len(prefixes) == 2 and prefixes.blocks == blocks[1::-1] and len(prefixes.pool) == 6
    assert prefixes.begin([1, 2, 3, 4, 5]) == (blocks[:2], None, 2)
    assert prefixes.begin([1, 2, 3, 4]) == (blocks[:1], None, 1)  # its last block is computed again, for its logits
    assert prefixes.begin([1, 2, 9, 4, 5]) == (blocks[:1], None, 1)
    assert prefixes.begin([3, 4, 5, 6]) == ([], None, 0)  # the same tokens after others are something else
    assert [prefixes.pool.holders(block) for block in blocks] == [4, 2, 0]
    keys = prefixes.keys([1, 2, 9, 4, 5])
    assert len(keys) == len({*keys, *prefixes.keys([9, 4])}) - 1 == 2
    assert prefixes.begin([1, 2, 9, 4, 5], keys=keys) == (blocks[:1], None, 1)


def test_words_of_32_bits_have_the_keys_of_their_tokens():
    prefixes, tokens = Prefixes(BlockPool(1), BLOCK), [1, 2, 3, 2**32 - 1, 5]
    assert prefixes.keys(array("I", tokens)) == prefixes.keys(tokens) and len(prefixes.keys(tokens)) == 2
    with pytest.raises(OverflowError):
        prefixes.keys([1, 2**32])


def test_the_same_tokens_are_kept_once():
    prefixes = Prefixes(BlockPool(8), BLOCK)
    first = kept(prefixes, [1, 2, 3, 4])
    blocks = prefixes.pool.take(3)
    prefixes.keep([1, 2, 3, 4, 5, 6], blocks)
    assert sorted(prefixes.blocks) == sorted([*first, blocks[2]])
    assert [prefixes.pool.holders(block) for block in blocks] == [1, 1, 2]


def test_what_nobody_holds_is_let_go_of_from_the_end_and_the_oldest_first():
    prefixes = Prefixes(BlockPool(4), BLOCK)
    old, new = kept(prefixes, [1, 2, 3, 4]), kept(prefixes, [5, 6, 7, 8])
    held, _, _ = prefixes.begin([5, 6, 0])
    assert held == new[:1] and len(prefixes.pool) == 0 and prefixes.room() == 3
    assert not prefixes.make_room(4) and len(prefixes) == 4
    assert prefixes.make_room(1) and prefixes.blocks == [old[0], new[1], new[0]]
    assert prefixes.begin([1, 2, 0])[0] == old[:1]  # the first block, used again
    assert prefixes.make_room(2) and sorted(prefixes.blocks) == sorted([old[0], new[0]])
    assert not prefixes.make_room(3)
    prefixes.clear()
    assert prefixes.pool.holders(new[0]) == 1 and len(prefixes.pool) == 2


def test_with_rings_a_prompt_begins_where_they_were_kept():
    prefixes = Prefixes(BlockPool(9), BLOCK, rings=[7])
    blocks = kept(prefixes, [1, 2, 3, 4, 5, 6])
    assert prefixes.begin([1, 2, 3, 4, 5]) == ([], None, 2)
    assert prefixes.ring_for([1, 2, 3, 4]) == 7 and prefixes.ring_for([1, 2, 3, 4]) is None
    assert prefixes.begin([1, 2, 3, 4, 5, 6, 7]) == (blocks[:2], 7, 3)
    assert prefixes.begin([1, 2, 3]) == ([], None, 1)
    assert prefixes.ring_for([9, 9]) is None  # not kept
    other = kept(prefixes, [8, 8])
    assert prefixes.ring_for([8, 8]) == 7 and prefixes.rings == [7]  # taken from the older border
    assert prefixes.begin([8, 8, 8]) == (other, 7, 1) and prefixes.begin([1, 2, 3, 4, 5]) == ([], None, 2)
    prefixes.pool.give_back([*other, *blocks[:2]])
    prefixes.clear()
    assert prefixes.rings == [] and len(prefixes.pool) == 9


def test_a_request_that_holds_blocks_begins_nowhere_else():
    tables = BlockTables(BlockPool(4), 1, 4, BLOCK)
    shared = tables.pool.take(2)
    tables.begin(0, shared, 5)
    assert tables.blocks(0) == [0, 1, 2] and tables.table[0].tolist() == [0, 1, 2, -1]
    assert tables.missing(0, 7) == 1 and tables.missing(0, 2) == 0
    with pytest.raises(ValueError, match="^request: got 0, which holds blocks"):
        tables.begin(0, shared, 5)


def test_only_what_is_held_is_shared():
    pool = BlockPool(3)
    mine = pool.take(1)
    with pytest.raises(ValueError, match="^blocks: got 2"):
        pool.share([*mine, 2])
    assert pool.holders(mine[0]) == 1
    prefixes = Prefixes(pool, BLOCK)
    with pytest.raises(ValueError, match="^blocks: got 2"):
        prefixes.keep([1, 2, 3, 4], [*mine, 2])
    assert pool.holders(mine[0]) == 1 and len(prefixes) == 0
    pool.share(mine)
    pool.give_back(mine)
    assert pool.holders(mine[0]) == 1 and len(pool) == 2
    pool.give_back(mine)
    assert pool.holders(mine[0]) == 0 and len(pool) == 3


@settings(deadline=None, max_examples=2000 if long() else 60)
@given(st.lists(st.tuples(st.sampled_from(("come", "leave", "room")), st.integers(0, 15)), max_size=40), st.booleans())
def test_holders_are_counted_whoever_comes_and_leaves(events, with_rings):
    """Every block has as many holders as requests and the cache say, and the free ones are the rest."""
    pool = BlockPool(6)
    prefixes = Prefixes(pool, BLOCK, rings=[0, 1] if with_rings else None)
    requests: list[list[int]] = []
    for what, number in events:
        if what == "come":
            tokens = [number >> bit & 1 for bit in range(4)] + [0]
            blocks, ring, known = prefixes.begin(tokens)
            assert (ring is not None) == (with_rings and bool(blocks)) and known >= len(blocks)
            if prefixes.make_room(3 - len(blocks)):
                blocks = blocks + pool.take(3 - len(blocks))
                prefixes.keep(tokens, blocks)
                prefixes.ring_for(tokens[: BLOCK * (1 + number % 2)])
                requests.append(blocks)
            else:
                pool.give_back(blocks)
        elif what == "leave" and requests:
            pool.give_back(requests.pop(number % len(requests)))
        elif what == "room":
            assert prefixes.make_room(number % 7) == (len(pool) >= number % 7)
        held = [block for blocks in (*requests, prefixes.blocks) for block in blocks]
        assert [pool.holders(block) for block in range(6)] == [held.count(block) for block in range(6)]
        assert len(pool) == 6 - len(set(held)) and len(set(prefixes.blocks)) == len(prefixes)
        assert len(set(prefixes.rings)) == len(prefixes.rings) <= 2
