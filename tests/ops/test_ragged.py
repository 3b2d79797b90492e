"""Ragged builders: the reference against plain Python, the kernel against the reference."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import big
from expecttest import assert_expected_inline
from support.extremes import INT_MAX, INT_MIN

import sparse_attn.ops.ragged.lists as ragged
from sparse_attn.ops.ragged.lists import reference
from sparse_attn.testing.ops import opcheck, schema

WILD = [-1, -2, INT_MIN, INT_MAX]


def dense_rows(tokens: int, width: int, high: int, device="cpu", seed: int = 0) -> torch.Tensor:
    """Random indices with a third of wild ones, in a non-contiguous view."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, high, (tokens, 2 * width), generator=generator, dtype=torch.int32)
    wild = torch.tensor(WILD, dtype=torch.int32)[torch.randint(0, 4, rows.shape, generator=generator)]
    rows = torch.where(torch.rand(rows.shape, generator=generator) < 0.33, wild, rows)
    return rows.to(device)[:, ::2]


def slow_build(indices, lengths, row_offsets, num_rows):
    packed, indptr = [], [0]
    for t, row in enumerate(indices.tolist()):
        for i in row[: max(0, lengths[t]) if lengths else None]:
            value = i + (row_offsets[t] if row_offsets else 0)
            if i >= 0 and 0 <= value < num_rows:
                packed.append(value)
        indptr.append(len(packed))
    return packed + [-1] * (indices.numel() - len(packed)), indptr


def slow_global(topk, request_ids, block_table, block_size):
    packed, indptr = [], [0]
    for row, request in zip(topk.tolist(), request_ids.tolist()):
        for i in row:
            if 0 <= request < len(block_table) and 0 <= i // block_size < block_table.shape[1]:
                block = int(block_table[request, i // block_size])
                if block >= 0:
                    packed.append(block * block_size + i % block_size)
        indptr.append(len(packed))
    return packed + [-1] * (topk.numel() - len(packed)), indptr


def test_reference_build_matches_python():
    indices = dense_rows(7, 9, 50)
    lengths = [9, 0, -3, 4, INT_MAX, INT_MIN, 9]
    offsets = [0, 5, 3, -20, 7, 1, 40]
    got = ragged.build_ragged_indices_from_dense(
        indices,
        torch.tensor(lengths, dtype=torch.int32),
        num_rows=48,
        row_offsets=torch.tensor(offsets, dtype=torch.int32),
    )
    assert (got.indices.tolist(), got.indptr.tolist()) == slow_build(indices, lengths, offsets, 48)


def test_reference_global_matches_python():
    topk = dense_rows(6, 8, 40)
    requests = torch.tensor([0, 1, -1, 2, INT_MAX, 1], dtype=torch.int32)
    table = torch.tensor([[3, -1, 7, 0], [2, 9, 1, 5]], dtype=torch.int32)
    got = ragged.compute_global_topk_ragged_indices_and_indptr(topk, requests, table, 8)
    assert (got.indices.tolist(), got.indptr.tolist()) == slow_global(topk, requests, table, 8)


def test_index_table_golden():
    topk = torch.tensor([[0, 5, -1, 9], [-1, 2, 3, 99], [1, 1, -1, -1]], dtype=torch.int32)
    table = torch.tensor([[4, 2, 8], [1, 0, 3]], dtype=torch.int32)
    got = ragged.compute_global_topk_ragged_indices_and_indptr(
        topk, torch.tensor([0, 1, 1], dtype=torch.int32), table, 4
    )
    assert_expected_inline(
        f"indices {got.indices.tolist()}\nindptr  {got.indptr.tolist()}",
        """\
indices [16, 9, 33, 6, 7, 5, 5, -1, -1, -1, -1, -1]
indptr  [0, 3, 5, 7]""",
    )


@pytest.mark.parametrize("tokens,width", [(0, 4), (3, 0), (0, 0), (1, 1)])
def test_empty(tokens, width):
    got = ragged.build_ragged_indices_from_dense(torch.full((tokens, width), -1, dtype=torch.int32))
    assert got.indices.tolist() == [-1] * (tokens * width)
    assert got.indptr.tolist() == [0] * (tokens + 1)


def test_schemas():
    assert_expected_inline(
        "\n".join(
            schema(name)
            for name in ("build_ragged_indices_from_dense", "compute_global_topk_ragged_indices_and_indptr")
        ),
        """\
sparse_attn::build_ragged_indices_from_dense(Tensor indices, Tensor? lengths, Tensor? row_offsets, SymInt num_rows, str impl) -> (Tensor, Tensor)
sparse_attn::compute_global_topk_ragged_indices_and_indptr(Tensor topk, Tensor request_ids, Tensor block_table, SymInt block_size, str impl) -> (Tensor, Tensor)""",
    )


def check_opcheck(impl, device):
    indices = dense_rows(5, 8, 30, device)
    lengths = torch.tensor([8, 0, 3, 8, 1], dtype=torch.int32, device=device)
    opcheck("build_ragged_indices_from_dense", indices, lengths, None, 25, impl)
    table = torch.arange(8, dtype=torch.int32, device=device).reshape(2, 4)
    requests = torch.tensor([0, 1, -1, 1, 0], dtype=torch.int32, device=device)
    opcheck("compute_global_topk_ragged_indices_and_indptr", indices, requests, table, 8, impl)


def test_opcheck_reference():
    check_opcheck("reference", "cpu")


ERRORS = {
    "indices": (TypeError, dict(indices=torch.zeros(2, 3, dtype=torch.int64))),
    "indices ": (ValueError, dict(indices=torch.zeros(3, dtype=torch.int32))),
    "lengths": (ValueError, dict(lengths=torch.zeros(5, dtype=torch.int32))),
    "row_offsets": (TypeError, dict(row_offsets=torch.zeros(2))),
    "num_rows": (ValueError, dict(num_rows=-4)),
    "num_rows ": (ValueError, dict(num_rows=2**31 + 1)),
    "impl": (ValueError, dict(impl="cuda")),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    kind, change = ERRORS[name]
    arguments = dict(indices=torch.zeros(2, 3, dtype=torch.int32)) | change
    with pytest.raises(kind, match=rf"^{name.strip()}: got"):
        ragged.build_ragged_indices_from_dense(**arguments)


@pytest.mark.parametrize(
    "change,name,kind",
    [
        (dict(topk=torch.zeros(2, 3)), "topk", TypeError),
        (dict(request_ids=torch.zeros(3, dtype=torch.int32)), "request_ids", ValueError),
        (dict(block_table=torch.zeros(2, dtype=torch.int32)), "block_table", ValueError),
        (dict(block_size=0), "block_size", ValueError),
    ],
)
def test_global_errors_name_the_argument(change, name, kind):
    arguments = dict(
        topk=torch.zeros(2, 3, dtype=torch.int32),
        request_ids=torch.zeros(2, dtype=torch.int32),
        block_table=torch.zeros(1, 4, dtype=torch.int32),
        block_size=4,
    )
    with pytest.raises(kind, match=rf"^{name}: got"):
        ragged.compute_global_topk_ragged_indices_and_indptr(**(arguments | change))


def test_triton_on_cpu_is_refused_when_not_interpreted():
    from sparse_attn.framework.target import interpreting

    assert not interpreting()
    with pytest.raises(ValueError, match="^impl: 'triton' needs"):
        ragged.build_ragged_indices_from_dense(torch.zeros(1, 1, dtype=torch.int32), impl="triton")


def sizes(device):
    small = [(1, 1), (4, 30), (5, 9), (40, 33)]
    return small + [(1, 2048), (128, 2048), (4096, 512), (3000, 2500)] if big(device) else small


@pytest.mark.kernel
def test_kernel_build_equals_reference(device, dirty_workspace):
    for tokens, width in sizes(device):
        indices = dense_rows(tokens, width, 1000, device, seed=tokens)
        lengths = torch.randint(-2, width + 3, (tokens,), dtype=torch.int32).to(device)
        offsets = torch.randint(-500, 500, (tokens,), dtype=torch.int32).to(device)
        unbounded = (None, None, INT_MAX), (lengths, None, INT_MAX), (None, offsets, INT_MAX)
        for chosen in (*unbounded, (lengths, offsets, 900)):
            got = torch.ops.sparse_attn.build_ragged_indices_from_dense(indices, *chosen, "triton")
            want = reference.build_ragged_indices_from_dense(indices, *chosen)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def check_highest_index(impl, device):
    """2147483647 is an int32 index like any other; one more is none."""
    ints = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    dense = ints([[INT_MAX, -1, INT_MAX - 1], [INT_MIN, INT_MAX, 0]])
    build = functools.partial(ragged.build_ragged_indices_from_dense, impl=impl)
    for num_rows in (None, 2**31):
        assert build(dense, num_rows=num_rows).indices.tolist() == [INT_MAX, INT_MAX - 1, INT_MAX, 0, -1, -1]
        shifted = build(dense, num_rows=num_rows, row_offsets=ints([1, -1]))
        assert shifted.indices.tolist() == [INT_MAX, INT_MAX - 1, -1, -1, -1, -1]
    assert build(dense, num_rows=INT_MAX).indices.tolist() == [INT_MAX - 1, 0, -1, -1, -1, -1]
    assert build(dense, num_rows=0).indptr.tolist() == [0, 0, 0]
    request, table, block = ints([0, 0]), ints([[2**27 - 1, 2**27, 2**27 - 2]]), 16
    near = ints([[15, 16, 14], [47, 0, 31]])
    slots = ragged.compute_global_topk_ragged_indices_and_indptr(near, request, table, block, impl=impl)
    assert slots.indices.tolist() == [INT_MAX, INT_MAX - 1, INT_MAX - 16, INT_MAX - 15, -1, -1]
    window = ragged.window_indices(ints([16, 15]), request, table, block, 2, impl=impl)
    assert window.indices.tolist() == [INT_MAX, INT_MAX - 1, INT_MAX, -1]
    entries = ragged.entry_indices(ints([16, 1]), request, table, block, 16, impl=impl)
    assert entries.indptr.tolist() == [0, 16, 17] and entries.indices[15] == INT_MAX
    combined = ragged.combine_topk_swa_indices_ragged(
        near[:, :1], ints([16, 48]), ints([0, 1]), ints([INT_MAX - 15, 0]), ints([INT_MAX, INT_MAX - 1]),
        window=2, max_entries=0, num_rows=2**31, impl=impl,
    )  # fmt: skip
    assert combined.indices.tolist() == [INT_MAX, INT_MAX, 47, INT_MAX - 1, INT_MAX, -1]


def test_highest_index_reference():
    check_highest_index("reference", "cpu")


def test_debug_mode_lets_the_highest_index_through():
    topk, request, table = (torch.tensor(x).int() for x in ([[15, -1]], [0], [[2**27 - 1]]))
    reference.rules_of_compute_global_topk_ragged_indices_and_indptr(topk, request, table, 16)
    with pytest.raises(ValueError, match="^block_table.*got 134217728, allowed: -1, or 0 to 134217727"):
        reference.rules_of_compute_global_topk_ragged_indices_and_indptr(topk, request, table + 1, 16)


@pytest.mark.kernel
def test_highest_index_kernel(device):
    check_highest_index("triton", device)


@pytest.mark.kernel
def test_kernel_global_equals_reference(device, dirty_workspace):
    for tokens, width in sizes(device):
        topk = dense_rows(tokens, width, 64 * 9, device, seed=tokens)
        table = torch.randint(-1, 40, (6, 18), dtype=torch.int32).to(device)[:, ::2].contiguous()
        requests = torch.randint(-2, 8, (tokens,), dtype=torch.int32).to(device)
        got = torch.ops.sparse_attn.compute_global_topk_ragged_indices_and_indptr(topk, requests, table, 64, "triton")
        want = reference.compute_global_topk_ragged_indices_and_indptr(topk, requests, table, 64)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.kernel
@pytest.mark.parametrize("known", [98, 67, 40, 0])
def test_kernel_adds_counts_up_to_the_nearest_total(device, known):
    """The program of the last row alone; of the rows before, only ``known`` knows its total yet. 32 are seen at a
    time."""
    from sparse_attn.ops.ragged.lists import kernels

    tokens, width = 100, 4
    counts = torch.arange(tokens) % 5
    states = (1 << 32) + counts
    states[known] = (2 << 32) + counts[: known + 1].sum()
    states[-1] = 0
    counters = torch.cat([torch.tensor([tokens - 1, 0]), states]).to(device)
    dense = torch.zeros(tokens, width, dtype=torch.int32, device=device)
    indices, indptr = torch.full((tokens * width,), 7).int().to(device), torch.full((tokens + 1,), -1).int().to(device)
    kernels.pack_rows[(1,)](
        dense, None, None, None, None, None, None, None, indices, indptr, counters, 0, tokens, width, 0, INT_MAX, 0, 1, 0,
        *dense.stride(), 0, 0, 0, 0, 0, 0, 0, BLOCK_SIZE=1, BLOCK=16, LOOKBACK=32, PDL=False,
    )  # fmt: skip
    before = int(counts[:-1].sum())
    assert indptr.tolist() == [-1] * (tokens - 1) + [before, before + width]
    assert (indices == 0).nonzero().flatten().tolist() == list(range(before, before + width))


@pytest.mark.kernel
def test_kernel_empty(device):
    for shape in ((0, 4), (3, 0)):
        got = ragged.build_ragged_indices_from_dense(
            torch.zeros(shape, dtype=torch.int32, device=device), impl="triton"
        )
        assert got.indices.numel() == 0 and got.indptr.tolist() == [0] * (shape[0] + 1)


@pytest.mark.kernel
def test_opcheck_kernel(device):
    check_opcheck("triton", device)
