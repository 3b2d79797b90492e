"""The warp-specialised index scores of MXFP4 keys: where they apply, what they compile to, and on a GPU their scores
against the reference."""

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
    prefill_problem,
    prefill_problem_of,
)
from support.index_topk import mxfp4_query

from sparse_attn import IndexMxfp4Layout
from sparse_attn.framework.target import H200
from sparse_attn.mxfp4 import GROUP, mxfp4_decode, mxfp4_quantise
from sparse_attn.ops.indexer.scores import dispatch, reference
from sparse_attn.ops.indexer.scores.plan import Paged, Prefill
from sparse_attn.testing.compare import assert_same_diff
from sparse_attn.testing.launches import TARGETS

LAYOUT = IndexMxfp4Layout(128)
NAME, PREFILL = "hopper.paged_mxfp4", "hopper.prefill_mxfp4"
DIRT = 7.25


def test_where_they_apply():
    def paged(target=H200, kernel=None, **others):
        return dispatch.choose_paged(paged_problem(flavour="mxfp4", **others), target, kernel)

    def prefill(target=H200, kernel=None, **others):
        return dispatch.choose_prefill(prefill_problem(flavour="mxfp4", **others), target, kernel)

    rows = [paged(next_n=n, heads=heads).plan.block_q for n in (1, 2, 3, 9) for heads in (32, 64, 128)]
    assert rows == [1, 1, 1, 2, 2, 2, 4, 4, 2, 4, 4, 2]
    assert [prefill(heads=heads).plan.block_q * heads for heads in (32, 64, 128)] == [256] * 3
    for requests, next_n, stages in ((8, 1, 8), (9, 1, 16), (64, 2, 8)):
        assert paged(requests=requests, next_n=next_n, max_context_len=1 << 16).plan.stages == stages
    for choose, name in ((paged, NAME), (prefill, PREFILL)):
        assert choose().kernel.name == name
        for target in (TARGETS["sm_100"], TARGETS["gfx950"]):
            assert choose(target).kernel.name == "portable"
            with pytest.raises(ValueError, match="^target: got "):
                choose(target, name)
        for other in (dict(heads=48), dict(dim=64)):
            assert choose(**other).kernel.name == "portable"
            with pytest.raises(ValueError, match="^(heads|dim): got "):
                choose(kernel=name, **other)
    for other in (dict(block_size=32), dict(blocks=0)):
        assert paged(**other).kernel.name == "portable"
        with pytest.raises(ValueError, match="^(block_size|cache blocks): got "):
            paged(kernel=NAME, **other)


def behind_a_line(memory):
    return memory._replace(offset=4)


WRONG = (
    (paged_problem(flavour="mxfp4"), "q", behind_a_line, "q address: got 4 bytes behind a multiple of 16"),
    (paged_problem(flavour="mxfp4"), "q", lambda q: q._replace(strides=(8712, 4356, 68, 1)), "q strides: got "),
    (paged_problem(flavour="mxfp4"), "cache", behind_a_line, "cache address: got 4 bytes"),
    (paged_problem(flavour="mxfp4"), "cache", lambda c: c._replace(strides=(4356, 68, 1)), "cache block stride: got "),
    (prefill_problem(flavour="mxfp4"), "q", behind_a_line, "q address: got 4 bytes"),
    (prefill_problem(flavour="mxfp4"), "q", lambda q: q._replace(strides=(4360, 68, 1)), "q row stride: got 4360"),
    (prefill_problem(flavour="mxfp4"), "k", behind_a_line, "k address: got 4 bytes"),
    (prefill_problem(flavour="mxfp4"), "k", lambda k: k._replace(strides=(72, 1)), "k row stride: got 72"),
    (prefill_problem(flavour="mxfp4"), "k_scale", behind_a_line, "k_scale address: got 4 bytes"),
    (prefill_problem(flavour="mxfp4"), "k_scale", lambda k: k._replace(strides=(8, 1), contiguous=False), "k_scale: got "),
)  # fmt: skip


@pytest.mark.parametrize(("problem", "name", "change", "reason"), WRONG)
def test_why_they_refuse(problem, name, change, reason):
    wrong = problem._replace(**{name: change(getattr(problem, name))})
    paged = hasattr(problem, "cache")
    choose, kernel = (dispatch.choose_paged, NAME) if paged else (dispatch.choose_prefill, PREFILL)
    assert choose(problem, H200, kernel).kernel.name == kernel
    with pytest.raises(ValueError, match=f"^{reason}.*, allowed: "):
        choose(wrong, H200, kernel)


@pytest.mark.parametrize("next_n", [1, 4])
def test_stages_keep_their_consumers(next_n):
    """A ring's stage is taken by the same consumer every time."""
    from sparse_attn.ops.indexer.scores.hopper import common

    plan = dispatch.choose_paged(paged_problem(next_n=next_n, flavour="mxfp4"), H200, NAME).plan
    assert plan.stages % common.CONSUMERS.value == 0


@pytest.mark.aot
@pytest.mark.few(0)
@pytest.mark.parametrize("next_n", [1, 4])
def test_compiles_for_hopper(next_n):
    from sparse_attn.ops.indexer.scores import launch
    from sparse_attn.testing.launches import compile_launch, recording

    with recording("sm_90") as launches:
        launch.paged_mqa_logits(*paged_arguments(90, next_n, max_context_len=900, flavour="mxfp4"), kernel=NAME)
    compiled = compile_launch(launches[0])
    assert compiled.spill_bytes <= 64  # in the branch for far groups
    assert compiled.shared_memory <= H200.shared_memory
    # Four consumers: one or two products of four steps of decoded keys, and one of a group for every row, with a wait
    # each.
    waits = 4 * (1 + 1 if next_n == 1 else 2 + 4)
    assert compiled.count("QGMMA") == 4 * waits and compiled.count(r"WARPGROUP\.DEPBAR") == waits


@pytest.mark.aot
def test_compiles_with_the_highest_of_groups():
    """Triton 3.6 refuses a name that is of one layout before an ``if`` and of another in it."""
    from sparse_attn.testing.launches import compile_launch, recording

    arguments = paged_arguments(90, 2, max_context_len=900, flavour="mxfp4")
    with recording("sm_90") as launches:
        out, maxima = (torch.empty(180, width, device="meta") for width in (904, 113))
        paged(Paged(*arguments[:6], "mxfp4", out, False, maxima=maxima, group=8))
    assert compile_launch(launches[0]).spill_bytes <= 64


def paged(call):
    from sparse_attn.ops.indexer.scores.hopper import launch

    problem = paged_problem_of(*call[:6], LAYOUT.name)
    launch.score_paged_mxfp4(call, dispatch.choose_paged(problem, H200, NAME).plan)


def prefill(call):
    from sparse_attn.ops.indexer.scores.hopper import launch

    launch.score_prefill_mxfp4(call, dispatch.choose_prefill(prefill_problem_of(*call[:7]), H200, PREFILL).plan)


def values(kind, *shape):
    """fp32 [*shape, 128] of groups whose powers of two lie near each other, or far; some are zero."""
    x = torch.randn(*shape, 4, GROUP)
    apart = {"near": 0, "wide": 12, "apart": 40}[kind]
    if apart:
        x *= torch.exp2(torch.randint(-apart, apart + 1, (*shape, 4, 1)).float())
    if kind == "apart":
        x[torch.rand(*shape, 4) < 0.1] = 0
        x[torch.rand(*shape) < 0.7] *= 2.0**-40
    return x.flatten(-2)


def paged_case(lens, heads, width, kind="near", *, padding=0, table_width=None, clear=True, repeats=2):
    """NaN in slots that no row sees, wild blocks in every table."""
    torch.manual_seed(len(lens) + heads + width)
    requests, next_n = len(lens), len(lens[0])
    context_lens = torch.tensor(lens, dtype=torch.int32)
    per = table_width or -(-width // 64)
    num_blocks = requests * per + 3
    cache, _ = poisoned_cache(LAYOUT, num_blocks, 64, "cpu", padding)
    table = torch.randperm(num_blocks)[: requests * per].int().view(requests, per)
    slots = []
    for request, limits in enumerate(lens):
        position = torch.arange(min(max(*limits, 0), per * 64, width))
        slots.append(table[request, position // 64].long() * 64 + position % 64)
        if per > 1:
            table[request, request * 5 % per] = (-1, INT_MIN, INT_MAX, num_blocks)[request % 4]
    slots = torch.cat(slots)
    keys = values("near" if kind == "apart" else kind, len(slots))
    if kind == "apart":  # in some tiles, and of some requests' queries
        some = torch.rand(len(slots)) < 0.004
        keys[some] = values(kind, int(some.sum()))
    LAYOUT.encode(cache, slots, keys)
    q = values("near" if kind == "apart" else kind, requests, next_n, heads)
    if kind == "apart":
        q[::3, :, ::7] = values(kind, *q[::3, :, ::7].shape[:3])
    q = mxfp4_query(q.flatten(0, 1)).unflatten(0, (requests, next_n))
    weights = torch.randn(requests * next_n, heads)
    known = (q, cache, weights, context_lens, table)
    memory = torch.full_like(cache.as_strided((cache.stride(0) * num_blocks,), (1,)), 0xFF, device="cuda")
    on_gpu = memory.as_strided(cache.shape, cache.stride())
    on_gpu.copy_(cache)
    arguments = (q.cuda(), on_gpu, weights.cuda(), context_lens.cuda(), table.cuda(), width)
    results = []
    for _ in range(repeats):
        out = torch.full((requests * next_n + 1, width + 5), DIRT, device="cuda")
        paged(Paged(*arguments, "mxfp4", out[:-1, :width], clear))
        results.append(out)
    inside = torch.arange(width) < context_lens.flatten()[:, None]
    check([result.cpu() for result in results], reference.paged_mqa_logits(*known, width, LAYOUT.name), inside, clear)


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
    for row, right in zip(got, want):  # rows of queries that are far smaller than others
        assert_same_diff(row, right, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [32, 64, 128])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 5])
def test_paged(next_n, heads):
    """One tile, many, none; more requests than are counted at a time; tables that end early; gaps between blocks."""
    after = range(next_n)
    paged_case([[64 - j for j in after]], heads, 64)
    lens = [[2999 + j for j in after], [17 * j for j in after], [INT_MIN] * next_n, [INT_MAX - j for j in after]]
    for kind in ("near", "wide", "apart"):
        paged_case(lens, heads, 3333, kind, padding=64 * 9, clear=kind == "near")
    paged_case([[i * 7 % 300 + j for j in after] for i in range(300)], heads, 301, "apart")
    paged_case([[5000 + j for j in after], [200] * next_n], heads, 5005, table_width=9, clear=False)


def rows_case(rows, keys, heads, kind, bounds="causal", clear=True, repeats=2):
    """Scores in the middle of dirt, against the reference; NaN behind what any row sees."""
    torch.manual_seed(rows * 7 + keys)
    k, q = values("near" if kind == "apart" else kind, keys), values("near" if kind == "apart" else kind, rows, heads)
    if kind == "apart":
        some = torch.rand(keys) < 0.004
        k[some], q[::50, ::7] = values(kind, int(some.sum())), values(kind, *q[::50, ::7].shape[:2])
    codes, scales = mxfp4_quantise(k)
    start, end = torch.zeros(rows, dtype=torch.int32), (torch.arange(1, rows + 1) * keys // rows).int()
    if bounds == "ragged":
        start = torch.randint(0, keys, (rows,), dtype=torch.int32)
        end = start + torch.randint(-5, keys, (rows,), dtype=torch.int32)
    elif bounds == "wild":
        wild = [(3, 3), (INT_MIN, INT_MAX), (5, 2), (-7, 4), (keys - 1, keys + 100), (INT_MAX, INT_MIN)]
        for place, (low, high) in enumerate(wild[:rows]):
            start[place], end[place] = low, high
    elif bounds == "poison":
        end.clamp_(max=keys // 2)
        codes[keys // 2 :], scales[keys // 2 :] = 0xFF, 0xFF
    arguments = (mxfp4_query(q), codes, scales, torch.randn(rows, heads), start, end)
    want = reference.mqa_logits(*arguments, "mxfp4")
    results = []
    for _ in range(repeats):
        out = torch.full((rows + 1, keys + 5), DIRT, device="cuda")
        prefill(Prefill(*(x.cuda() for x in arguments), "mxfp4", out[:rows, :keys], clear))
        results.append(out.cpu())
    column = torch.arange(keys)
    check(results, want, (column >= start[:, None]) & (column < end[:, None]), clear)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [32, 64, 128])
@pytest.mark.parametrize("bounds", ["causal", "ragged", "wild", "poison"])
def test_rows(bounds, heads):
    for rows, keys in ((1, 1), (3, 65), (37, 1001), (530, 1049)):
        for kind in ("near", "apart") if rows == 37 else ("wide",):
            rows_case(rows, keys, heads, kind, bounds, clear=rows != 37)


@pytest.mark.gpu
def test_more_rows_than_are_counted_at_a_time():
    rows_case(9001, 200, 32, "near", "ragged", repeats=1)


def one_request(q, k, weights, width=None):
    """(scores, those of fp64): of values q [heads, 128], k [keys, 128]."""
    keys = k.shape[0]
    blocks = -(-keys // 64)
    cache, _ = poisoned_cache(LAYOUT, blocks, 64)
    LAYOUT.encode(cache, torch.arange(keys), k)
    lens, table = torch.tensor([[keys]], dtype=torch.int32), torch.arange(blocks, dtype=torch.int32)[None]
    out = torch.empty(1, keys, device="cuda")
    query = mxfp4_query(q[None])[:, None]
    paged(Paged(*(x.cuda() for x in (query, cache, weights[None], lens, table)), keys, "mxfp4", out))
    exact_q, exact_k = (mxfp4_decode(*mxfp4_quantise(x)).double() for x in (q, k))
    return out[0].cpu(), (exact_q @ exact_k.T).relu().mul(weights.double()[:, None]).sum(0), exact_q, exact_k


@pytest.mark.gpu
def test_small_sums_are_exact():
    """Of codes up to 1 under one scale, with weights of one bit: every sum fits the matrix unit's."""
    torch.manual_seed(0)
    q, k = (torch.randint(-2, 3, (n, 128)).float() * 0.5 for n in (64, 700))
    q[:, ::32] = k[:, ::32] = 1.0  # the scale of every group
    weights = torch.exp2(torch.randint(-2, 3, (64,)).float())
    q, k = q * 6, k * 6 * torch.exp2(torch.randint(-60, 60, (700, 1)).float())  # 6 is a code, and so are 3 and 0
    got, want, _, _ = one_request(q, k, weights)
    assert torch.equal(got.double(), want) and (want > 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("apart", [0, 3, 13, 20, 60])
def test_scores_of_any_spread(apart):
    """Groups whose powers of two lie far apart, within a key and between keys, and groups of zeros."""
    torch.manual_seed(apart)
    heads = 64
    k, q = (
        (torch.randn(n, 4, GROUP) * torch.exp2(torch.randint(-apart, apart + 1, (n, 4, 1)).float())).flatten(1)
        for n in (300, heads)
    )
    k[3], k[4, :32], q[1] = 0, 0, 0
    weights = torch.randn(heads)
    got, want, exact_q, exact_k = one_request(q, k, weights)
    scale = (exact_q.abs() @ exact_k.abs().T).mul(weights.double().abs()[:, None]).sum(0)
    assert ((got.double() - want).abs() <= 2.0**-11 * scale).all() and got[3] == 0


@pytest.mark.gpu
def test_a_small_group_beside_a_large_one_that_meets_zeros():
    """The only products are of groups 2^50 below their keys' highest, and their heads'."""
    q, k = torch.zeros(64, 128), torch.zeros(130, 128)
    q[:, 0], q[:, 64:96] = 2.0**50, torch.randn(64, 32)
    k[:, 33], k[:, 64:96] = 2.0**50, torch.randn(130, 32)
    got, want, _, _ = one_request(q, k, torch.rand(64))
    torch.testing.assert_close(got.double(), want, rtol=2.0**-9, atol=0)


@pytest.mark.gpu
def test_nan():
    """A NaN in a group of a key makes its score NaN, and one in a query's head all scores; no other."""
    torch.manual_seed(0)
    for apart in (1.0, 2.0**60):
        q, k = torch.randn(64, 128), torch.randn(200, 128)
        k[77, 40], k[150, 3], k[100, :32] = math.inf, math.nan, k[100, :32] * apart
        got, *_ = one_request(q, k, torch.ones(64))
        assert got.isnan().nonzero().flatten().tolist() == [77, 150]
        q[5, 100] = math.nan
        assert one_request(q, k, torch.ones(64))[0].isnan().all()


def random_cache(blocks=300):
    cache = torch.randint(0, 256, (blocks, 64, LAYOUT.row), dtype=torch.uint8, device="cuda")
    cache.view(blocks, -1)[:, 64 * LAYOUT.code_bytes :].random_(120, 131)
    return cache


def random_query(*shape):
    return mxfp4_query(torch.randn(math.prod(shape[:-1]), shape[-1], 128)).view(*shape, -1).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [32, 64, 128])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 5])
def test_paged_gives_the_highest_of_groups(next_n, heads):
    torch.manual_seed(next_n)
    lens = [[2999 + j for j in range(next_n)], [17 * j for j in range(next_n)], [5] * next_n, [64 * 9] * next_n]
    lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    cache = random_cache()
    cache.view(300, -1)[7, 64 * 64 + 12] = 255  # a key of NaN
    table = torch.randint(-1, 301, (4, 53), dtype=torch.int32, device="cuda")
    q, weights = random_query(4, next_n, heads), torch.randn(4 * next_n, heads, device="cuda")
    for width in (3333, 2999):

        def launch(out, maxima, group):
            paged(Paged(q, cache, weights, lens, table, width, "mxfp4", out, False, maxima=maxima, group=group))

        check_highest(launch, 4 * next_n, width, lens, "cuda")


@pytest.mark.gpu
def test_twenty_times_the_same_bits():
    paged_case([[33000 - 770 * i, 33001 - 770 * i] for i in range(40)], 64, 33001, "apart", repeats=20)


@pytest.mark.gpu
def test_graph_replays_at_other_lengths():
    check_graph_replays(paged, random_query(2, 1, 64), random_cache(70), LAYOUT)
