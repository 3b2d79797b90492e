"""The warp-specialised index scores: where they apply, what they compile to, and on a GPU their bits against the
reference."""

import math

import pytest
import torch
from support.caches import poisoned_cache
from support.extremes import INT_MAX, INT_MIN
from support.index_logits import (
    check_graph_replays,
    check_highest,
    paged_arguments,
    paged_problem,
    paged_problem_of,
    prefill_arguments,
    prefill_problem,
    prefill_problem_of,
)

from sparse_attn import IndexFp8Layout
from sparse_attn.device.triton_private import VERSION
from sparse_attn.fp8 import fp8_encode
from sparse_attn.framework.target import H200
from sparse_attn.ops.indexer.scores import dispatch, reference
from sparse_attn.ops.indexer.scores.plan import Paged, Prefill
from sparse_attn.testing.compare import assert_same_diff
from sparse_attn.testing.launches import TARGETS

LAYOUT = IndexFp8Layout(128)
DIRT = 7.25


def test_where_they_apply():
    def prefill(target=H200, **others):
        return dispatch.choose_prefill(prefill_problem(**others), target)

    def paged(target=H200, **others):
        return dispatch.choose_paged(paged_problem(**others), target)

    assert prefill().kernel.name == "hopper.prefill" and prefill().plan.block_q == 4
    rows = [paged(next_n=n, heads=heads).plan.block_q for n in (1, 2, 3, 9) for heads in (32, 64, 128)]
    assert rows == [1, 1, 1, 2, 2, 2, 4, 4, 2, 4, 4, 2]
    assert all(paged(next_n=n).kernel.name == "hopper.paged" for n in (1, 2, 3, 9))
    plain = dict(flavour="none", dtype=torch.bfloat16)
    for other in (dict(heads=48), dict(dim=64), dict(flavour="e4m3fnuz"), plain):
        assert prefill(**other).kernel.name == paged(**other).kernel.name == "portable", other
    for target in (TARGETS["sm_100"], TARGETS["gfx950"]):
        assert prefill(target).kernel.name == paged(target).kernel.name == "portable"


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_the_number_of_rows_chooses_no_kernel(rows):
    """A row's score has the same bits whatever else is in the call."""
    few, many = (dispatch.choose_prefill(prefill_problem(n, 70), H200) for n in (rows, 5000))
    assert few == many and few.kernel.name == "hopper.prefill"
    few, many = (dispatch.choose_paged(paged_problem(n, 1), H200) for n in (rows, 5000))
    assert few == many and few.kernel.name == "hopper.paged"


@pytest.mark.parametrize("columns", [32, 128, 256])
def test_stages_keep_their_consumers(columns):
    """Tiles of query blocks of any length are taken by one consumer each, a ring's stage by the same one every time.
    Another could wait for a tile while the one before is on its way, and take the phase before that for its own."""
    from sparse_attn.ops.indexer.scores.hopper import common

    turns = common.CONSUMERS.value // common.products(columns)
    stages = dispatch.choose_prefill(prefill_problem(), H200).plan.stages
    owners, done = {}, 0
    for some in (1, 2, 3, 5, 31, 4, 7, 1, 1, 64, 6):
        taken = [
            (done + i, turn) for turn in range(turns) for i in range(common.own_tile.fn(turn, done, turns), some, turns)
        ]
        assert sorted(tile for tile, _ in taken) == list(range(done, done + some))
        for tile, turn in taken:
            assert owners.setdefault(tile % stages, turn) == turn
        done += some


@pytest.mark.aot
@pytest.mark.parametrize("next_n", [0, 1, 2, 4])
def test_compiles_for_hopper(next_n):
    from sparse_attn.ops.indexer.scores import launch
    from sparse_attn.testing.launches import compile_launch, recording

    with recording("sm_90") as launches:
        if next_n:
            launch.paged_mqa_logits(*paged_arguments(90, next_n, max_context_len=900), kernel="hopper.paged")
        else:
            launch.mqa_logits(*prefill_arguments(90, 700), kernel="hopper.prefill")
    compiled = compile_launch(launches[0])
    # Scalars of a query block, in 112 registers; Triton 3.8 spills those of one consumer.
    assert compiled.spill_bytes <= (16 if VERSION < (3, 8) else 80)
    assert compiled.shared_memory <= H200.shared_memory
    # Four consumers, a product of four steps in each and one wait for it: ptxas, which waits for every step where it
    # cannot tell what is in flight, has not taken them apart.
    assert compiled.count("QGMMA") == 16 and compiled.count(r"WARPGROUP\.DEPBAR") == 4


def prefill(call):
    from sparse_attn.ops.indexer.scores.hopper import launch

    launch.prefill(call, dispatch.choose_prefill(prefill_problem_of(*call[:7]), H200, "hopper.prefill").plan)


def paged(call):
    from sparse_attn.ops.indexer.scores.hopper import launch

    problem = paged_problem_of(*call[:6], LAYOUT.name)
    launch.paged(call, dispatch.choose_paged(problem, H200, "hopper.paged").plan)


def codes(*shape):
    return fp8_encode(torch.randn(shape, device="cuda"), "e4m3fn")


def rows_case(rows, keys, heads, kind, clear, repeats=2):
    """Scores in the middle of dirt, against the reference."""
    torch.manual_seed(rows * 7 + keys)
    q, k = codes(rows, heads, 128), codes(keys, 128)
    k_scale, weights = torch.rand(keys, device="cuda") + 0.5, torch.randn(rows, heads, device="cuda")
    start = torch.zeros(rows, dtype=torch.int32, device="cuda")
    end = (torch.arange(1, rows + 1, device="cuda") * keys // rows).int()
    if kind == "ragged":
        start = torch.randint(0, keys, (rows,), device="cuda", dtype=torch.int32)
        end = start + torch.randint(-5, keys, (rows,), device="cuda", dtype=torch.int32)
    elif kind == "wild":
        wild = [
            (3, 3),
            (INT_MIN, INT_MAX),
            (5, 2),
            (-7, 4),
            (keys - 1, keys + 100),
            (keys + 3, keys + 9),
            (INT_MAX, INT_MIN),
        ]
        for place, bounds in enumerate(wild[:rows]):
            start[place], end[place] = bounds
    elif kind == "empty":
        end.zero_()
    elif kind == "poison":  # behind what any row sees
        end.clamp_(max=keys // 2)
        k[keys // 2 :], k_scale[keys // 2 :] = 0x7F, math.nan
    arguments = (q, k, k_scale, weights, start, end, "e4m3fn")
    results = []
    for _ in range(repeats):
        memory = torch.full((rows + 1, keys + 5), DIRT, device="cuda")
        out = memory[:rows, :keys]
        prefill(Prefill(*arguments, out, clear))
        results.append(memory)
    column = torch.arange(keys, device="cuda")
    check(results, reference.mqa_logits(*arguments), (column >= start[:, None]) & (column < end[:, None]), clear)


def paged_case(lens, heads, width, *, padding=0, table_width=None, clear=True, repeats=2):
    """NaN in slots that no row sees, wild blocks in every table."""
    torch.manual_seed(len(lens) + heads + width)
    requests, next_n = len(lens), len(lens[0])
    context_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    per = table_width or -(-width // 64)
    num_blocks = requests * per + 3
    cache, _ = poisoned_cache(LAYOUT, num_blocks, 64, "cuda", padding)
    table = (
        torch.randperm(num_blocks)[: requests * per].int().view(requests, per)
    )  # thousands of small steps: not on the GPU
    slots = []
    for request, limits in enumerate(lens):
        position = torch.arange(min(max(*limits, 0), per * 64, width))
        slots.append(table[request, position // 64].long() * 64 + position % 64)
        if per > 1:
            table[request, request * 5 % per] = (-1, INT_MIN, INT_MAX, num_blocks)[request % 4]
    slots, table = torch.cat(slots).cuda(), table.cuda()
    LAYOUT.encode(cache, slots, torch.randn(len(slots), 128, device="cuda"))
    q, weights = codes(requests, next_n, heads, 128), torch.randn(requests * next_n, heads, device="cuda")
    arguments = (q, cache, weights, context_lens, table, width)
    results = []
    for _ in range(repeats):
        memory = torch.full((requests * next_n + 1, width + 5), DIRT, device="cuda")
        out = memory[:-1, :width]
        paged(Paged(*arguments, "e4m3fn", out, clear))
        results.append(memory)
    known = (value.cpu() for value in (q, cache, weights, context_lens, table))  # thousands of small steps, again
    check(results, reference.paged_mqa_logits(*known, width, LAYOUT.name).cuda(),
          torch.arange(width, device="cuda") < context_lens.flatten()[:, None], clear)  # fmt: skip


def check(results, want, inside, clear):
    memory = results[0]
    for other in results[1:]:
        assert torch.equal(memory.view(torch.int32), other.view(torch.int32))
    got = memory[:-1, :-5]
    assert (memory[-1] == DIRT).all() and (memory[:, -5:] == DIRT).all()
    if not clear:
        assert (got[~inside] == DIRT).all()
        got = torch.where(inside, got, -math.inf)
    assert_same_diff(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("heads", [32, 64, 128])
@pytest.mark.parametrize("kind", ["causal", "ragged", "wild", "empty", "poison"])
def test_rows(kind, heads, clear):
    for rows, keys in ((1, 1), (3, 65), (37, 1001), (1030, 2049)):
        rows_case(rows, keys, heads, kind, clear)


@pytest.mark.gpu
def test_more_rows_than_are_counted_at_a_time():
    rows_case(9001, 300, 64, "ragged", True)


@pytest.mark.gpu
@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("heads", [32, 64, 128])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 5])
def test_paged(next_n, heads, clear):
    """One tile, many, none; more requests than are counted at a time; tables that end early; gaps between blocks."""
    after = range(next_n)
    paged_case([[64 - j for j in after]], heads, 64, clear=clear)
    lens = [[2999 + j for j in after], [17 * j for j in after], [INT_MIN] * next_n, [INT_MAX - j for j in after]]
    paged_case(lens, heads, 3333, clear=clear, padding=64 * 9)
    paged_case([[i * 7 % 300 + j for j in after] for i in range(300)], heads, 301, clear=clear)
    paged_case([[5000 + j for j in after], [200] * next_n], heads, 5005, clear=clear, table_width=9)


def random_cache():
    cache = torch.randint(0, 120, (300, 64, LAYOUT.row), dtype=torch.uint8, device="cuda")
    cache.view(300, -1)[:, 64 * 128 :].view(torch.float32).uniform_(0.5, 1.5)
    return cache


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [32, 64, 128])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 5])
def test_paged_gives_the_highest_of_groups(next_n, heads):
    torch.manual_seed(next_n)
    lens = [[2999 + j for j in range(next_n)], [17 * j for j in range(next_n)], [5] * next_n, [64 * 9] * next_n]
    lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    cache = random_cache()
    cache[7, 3, :] = 0x7F  # a key of NaN
    table = torch.randint(-1, 301, (4, 53), dtype=torch.int32, device="cuda")
    q, weights = codes(4, next_n, heads, 128), torch.randn(4 * next_n, heads, device="cuda")
    for width in (3333, 2999):

        def launch(out, maxima, group):
            paged(Paged(q, cache, weights, lens, table, width, "e4m3fn", out, False, maxima=maxima, group=group))

        check_highest(launch, 4 * next_n, width, lens, "cuda")


@pytest.mark.gpu
def test_more_scores_than_are_to_stay_in_the_l2():
    """With one request more there are; the others' scores have the same bits, and the highest of groups come with
    either."""
    from sparse_attn.ops.indexer.scores.hopper import requests as of_requests

    torch.manual_seed(0)
    width = 131072
    fewer = of_requests.L2_BYTES.value // (4 * width)
    cache = random_cache()
    table = torch.randint(0, 300, (fewer + 1, width // 64), dtype=torch.int32, device="cuda")
    q, weights = codes(fewer + 1, 1, 64, 128), torch.randn(fewer + 1, 64, device="cuda")
    lens = torch.full((fewer + 1, 1), width, dtype=torch.int32, device="cuda")
    scored = []
    for requests in (fewer, fewer + 1):

        def launch(out, maxima, group):
            some = (value[:requests] for value in (weights, lens, table))
            paged(Paged(q[:requests], cache, *some, width, "e4m3fn", out, False, maxima=maxima, group=group))
            scored.append(out[:fewer])

        check_highest(launch, requests, width, lens[:requests], "cuda")
    assert all(torch.equal(scored[0], other) for other in scored[1:])


@pytest.mark.gpu
def test_twenty_times_the_same_bits():
    rows_case(4500, 2000, 64, "causal", True, repeats=20)
    paged_case([[33000 - 770 * i, 33001 - 770 * i] for i in range(40)], 64, 33001, repeats=20)


@pytest.mark.gpu
def test_a_nan_key_scores_nan():
    q, k, ones = codes(9, 64, 128), codes(200, 128), torch.ones(200, device="cuda")
    k[77, 5] = 0x7F
    start, end = (
        torch.zeros(9, dtype=torch.int32, device="cuda"),
        torch.full((9,), 200, dtype=torch.int32, device="cuda"),
    )
    out = torch.empty(9, 200, device="cuda")
    prefill(Prefill(q, k, ones, ones[:64].expand(9, 64).contiguous(), start, end, "e4m3fn", out))
    assert out.isnan().nonzero()[:, 1].tolist() == [77] * 9


@pytest.mark.gpu
def test_graph_replays_at_other_lengths():
    cache = torch.randint(0, 120, (70, 64, LAYOUT.row), dtype=torch.uint8, device="cuda")
    cache.view(70, -1)[:, 64 * 128 :].view(torch.float32).fill_(0.5)
    check_graph_replays(paged, codes(2, 1, 64, 128), cache, LAYOUT)


@pytest.mark.gpu
def test_what_tma_cannot_copy_takes_the_portable_kernel():
    q, k, k_scale = codes(50, 64, 128), codes(300, 128), torch.rand(300, device="cuda")
    weights = torch.randn(50, 66, device="cuda")[:, :64]
    start, end = (
        torch.zeros(50, dtype=torch.int32, device="cuda"),
        torch.full((50,), 300, dtype=torch.int32, device="cuda"),
    )
    out = torch.empty(2, 50, 300, device="cuda")
    for name, some, to in zip(("portable", "hopper.prefill"), (weights, weights.contiguous()), out):
        arguments = (q, k, k_scale, some, start, end, "e4m3fn")
        kernel, plan, _ = dispatch.choose_prefill(prefill_problem_of(*arguments), H200)
        assert kernel.name == name
        kernel.launcher(Prefill(*arguments, to), plan)
    assert_same_diff(out[0], out[1])
