"""Top-k by a cluster of CTAs without a GPU: its PTX, executed on the CPU, whose CTAs send each other what takes a while.
Triton's interpreter knows no clusters."""

from __future__ import annotations

import pytest
import torch
from support.ptx.run import execute

from sparse_attn.ops.topk.select.algorithms.launch import cluster
from sparse_attn.ops.topk.select.plan import Cluster, Selection, Slots
from sparse_attn.ops.topk.select.reference import top_k_per_row

pytestmark = pytest.mark.aot
SMALL = Cluster(1024, 8, 8, 14)
WIDTH = 8 * 1024
INF, NAN = float("inf"), float("nan")
DIRT = -77


def selected(logits, k, ends=None, starts=None, plan=SMALL, seed=0):
    """int32 [rows, k] of the kernel; nothing is written beside."""
    from sparse_attn.ops.topk.select.hopper import kernels

    memory = torch.full((len(logits) + 2, k), DIRT, dtype=torch.int32)
    selection = Selection(logits, starts, ends, memory[1:-1], [], torch.zeros(0, dtype=torch.int64))
    execute(kernels, "select_cluster", lambda: cluster(selection, plan), seed)
    assert (memory[[0, -1]] == DIRT).all()
    return memory[1:-1]


def packed(logits, k, ends, table, block_size, next_n=1):
    """(cache slots, indptr) of the kernel."""
    from sparse_attn.ops.topk.select.hopper import kernels

    rows = len(logits)
    memory = torch.full((rows * k + 2,), DIRT, dtype=torch.int32)
    indptr = torch.full((rows + 1,), DIRT, dtype=torch.int32)
    states = torch.zeros(rows, dtype=torch.int64)
    slots = Slots(indptr, states, table, block_size, next_n)
    selection = Selection(logits, None, ends, memory[1:-1], [], torch.zeros(0, dtype=torch.int64), slots)
    execute(kernels, "select_cluster", lambda: cluster(selection, SMALL))
    assert (memory[[0, -1]] == DIRT).all() and not states.any()
    return memory[1:-1], indptr


def some(kind):
    """(scores [1, WIDTH], k): of any distribution, and of those for which a search goes another way."""
    place, normal = torch.arange(WIDTH, dtype=torch.float32)[None], torch.randn(1, WIDTH)
    match kind:
        case "normal":
            return normal, 700
        case "k is 1, zeros of both signs":
            return torch.where(place % 2 > 0, 0.0, -0.0), 1
        case "k is the width":
            return normal, WIDTH
        case "all equal":
            return torch.zeros(1, WIDTH), 700
        case "a plateau that the k-th lies on":
            return normal.abs() * (normal.abs() > 1.2), 3000
        case "fewer than k that can be selected":
            return torch.where(place % 97 == 5, normal, NAN), 700
        case "none":
            return torch.full((1, WIDTH), -INF), 700
        case "one far above all others":
            return torch.where(place == 100, 1e30, normal), 700
        case "many infinite":
            return torch.where(place % 3 == 0, INF, normal), 2900
        case "negative":
            return -normal.abs(), 2000
        case "the k-th in the second window":
            return torch.where(place < 200, 64 + normal.abs(), 1 + normal.abs()), 700
        case "of the least that are not zero":
            return torch.rand(1, WIDTH) * 1e-38, 2000
        case "forty values":
            return torch.randint(0, 40, (1, WIDTH)).float(), 1000
        case "one bin, no two equal":
            return 1 + place.flip(1) * 2.0**-23, 1500
        case "some equal":
            return (normal * 64).round() / 64, 700
        case "ascending":
            return place, 700
    raise ValueError(kind)


KINDS = (
    "normal", "k is 1, zeros of both signs", "k is the width", "all equal", "a plateau that the k-th lies on",
    "fewer than k that can be selected", "none", "one far above all others", "many infinite", "negative",
    "the k-th in the second window", "of the least that are not zero", "forty values", "one bin, no two equal",
    "some equal", "ascending",
)  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_the_scores(kind):
    logits, k = some(kind)
    ends = torch.tensor([WIDTH - 37], dtype=torch.int32)
    assert torch.equal(selected(logits, k, ends), top_k_per_row(logits, None, ends, k))


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", [Cluster(2048, 8, 8, 14), Cluster(4096, 16, 8, 13), Cluster(1024, 8, 16, 15)])
def test_other_forms(plan):
    logits = torch.randn(1, plan.slots * plan.ctas_per_row - 5)
    ends = torch.tensor([logits.shape[1] - 1000], dtype=torch.int32)
    assert torch.equal(selected(logits, 900, ends, plan=plan), top_k_per_row(logits, None, ends, 900))


@pytest.mark.few(0)
def test_rows_apart_with_starts():
    """Rows of a wider tensor that no four columns begin with, poison between them, a row of none and one of a few."""
    memory = torch.full((4, WIDTH + 11), NAN)
    logits = memory[:, 3 : WIDTH - 2]
    logits[:] = torch.randn_like(logits)
    starts = torch.tensor([0, 777, 4000, 6000], dtype=torch.int32)
    ends = torch.tensor([8000, WIDTH - 5, 4000, 6100], dtype=torch.int32)
    assert torch.equal(selected(logits, 600, ends, starts), top_k_per_row(logits, starts, ends, 600))


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_in_any_order_of_what_comes(seed):
    logits, k = some("a plateau that the k-th lies on")
    assert torch.equal(selected(logits, k, seed=seed), top_k_per_row(logits, None, None, k))


@pytest.mark.few(0)
def test_cache_slots():
    """Of two rows a request: packed behind each other, and -1 behind them."""
    k, block_size = 300, 32
    logits, ends = torch.randn(4, WIDTH), torch.tensor([WIDTH, 100, 0, 5000], dtype=torch.int32)
    table = torch.randperm(2 * WIDTH // block_size).int().view(2, -1)
    slots, indptr = packed(logits, k, ends, table, block_size, next_n=2)
    columns = [one[one >= 0].long() for one in top_k_per_row(logits, None, ends, k)]
    want = [table[row // 2][one // block_size] * block_size + one % block_size for row, one in enumerate(columns)]
    assert torch.equal(slots[: indptr[-1]], torch.cat(want)) and (slots[indptr[-1] :] == -1).all()
    assert indptr.tolist() == [sum(map(len, want[:row])) for row in range(5)]
