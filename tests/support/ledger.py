"""The books of a scheduler: who holds which block and row, read off its parts and held against each other."""

from __future__ import annotations

from sparse_attn import Batching
from sparse_attn.generation.blocks import blocks_for


def check_ledger(batching: Batching) -> None:
    """Every block is free or held, as often as requests and the cache of prefixes say; rows and queue fit together."""
    admission, pool = batching.admission, batching.pool
    tables, prefixes = admission.tables, admission.prefixes
    rows = range(len(admission.slots))
    held = [block for row in rows for block in tables.blocks(row)] + prefixes.blocks
    assert [pool.holders(block) for block in range(pool.num_blocks)] == [
        held.count(block) for block in range(pool.num_blocks)
    ]
    assert len(pool) == pool.num_blocks - len(set(held))
    written: list[int] = []
    for row in rows:
        request, blocks = admission.slots[row], tables.blocks(row)
        assert tables.table[row].tolist() == blocks + [-1] * (tables.table.shape[1] - len(blocks))
        if request is None:
            assert not blocks and row not in batching.loop.live
            continue
        assert request.row == row and not request.preempted and (row in batching.loop.live) == request.decoding
        tokens = request.length - 1 if request.drawn else request.computed
        assert len(blocks) >= blocks_for(tokens, tables.block_size)
        whole = len(request.prompt) // tables.block_size
        written += blocks[whole:]  # what it may still write to belongs to nobody else
    assert len(set(written)) == len(written) and all(pool.holders(block) == 1 for block in written)
    numbers = [request.number for request in admission.waiting]
    assert numbers == sorted(set(numbers)) and len(numbers) <= batching.max_waiting + len(rows)
    assert all(request.row is None for request in admission.waiting)
    assert len(set(prefixes.rings)) == len(prefixes.rings)
    if batching.loop.live:
        table = batching.loop.state.block_table
        if table.device.type == "cpu":
            for row in batching.loop.live:
                assert table[row].tolist() == tables.table[row].tolist()
