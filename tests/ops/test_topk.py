"""top_k_per_row: the reference against a brute force, the kernels against the reference, on every path."""

import dataclasses
import itertools
import math

import pytest
import torch
from conftest import sampled
from support.topk import INF, KINDS, NAN, PLANS, brute_force, chosen, planned, ranges, scores

from sparse_attn.device import histogram
from sparse_attn.framework.dispatch import Choice
from sparse_attn.framework.target import H200, Target
from sparse_attn.framework.torch_private import dynamo_counts
from sparse_attn.ops.topk.select import dispatch, reference, top_k_per_row
from sparse_attn.ops.topk.select.plan import (
    RADIX,
    THRESHOLDS,
    Appended,
    Cluster,
    MultiCta,
    MultiPass,
    Problem,
    Sampled,
    SingleCta,
    SingleCtaBf16,
    Streaming,
)
from sparse_attn.testing.ops import opcheck, schema
from sparse_attn.workspace import size_of

MI300 = Target("amd", "gfx942", 304, 65536, 64)
AMPERE = dataclasses.replace(H200, arch=80)  # its programs
NARROW = (100, 256, 257, 512, 1000, 1024)


# --- reference


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 5, 40, 64])
def test_reference_is_the_brute_force(kind, k):
    x = scores(kind, 9, 37)
    assert torch.equal(top_k_per_row(x, k), brute_force(x, None, None, k))
    starts, ends = ranges(9, 37)
    assert torch.equal(top_k_per_row(x, k, starts, ends), brute_force(x, starts, ends, k))
    assert torch.equal(top_k_per_row(x, k, row_ends=ends), brute_force(x, None, ends, k))


def test_reference_in_pieces(monkeypatch):
    monkeypatch.setattr(reference, "SORTED_AT_ONCE", 80)
    x = scores("grid", 9, 37)
    starts, ends = ranges(9, 37)
    assert torch.equal(top_k_per_row(x, 11, starts, ends), brute_force(x, starts, ends, 11))


def test_golden():
    x = torch.tensor([[2.0, NAN, -0.0, 7.0, 0.0, -INF, INF, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert top_k_per_row(x, 4).tolist() == [[0, 2, 3, 6], [0, 1, 2, 3]]
    limits = torch.tensor([1, 6], dtype=torch.int32), torch.tensor([7, 99], dtype=torch.int32)
    assert top_k_per_row(x, 4, *limits).tolist() == [[1, 2, 3, 5], [0, 1, -1, -1]]


def test_zero_sizes_and_strides():
    assert top_k_per_row(torch.empty(0, 5), 3).shape == (0, 3)
    assert top_k_per_row(torch.empty(2, 0), 3).tolist() == [[-1] * 3] * 2
    wide = scores("normal", 4, 50)
    assert torch.equal(top_k_per_row(wide[::2, 3:40], 6), top_k_per_row(wide[::2, 3:40].contiguous(), 6))


# --- contract


def test_schema_and_opcheck():
    assert schema("top_k_per_row") == (
        "sparse_attn::top_k_per_row(Tensor logits, Tensor? row_starts, Tensor? row_ends, int k, str impl) -> Tensor"
    )
    starts, ends = ranges(3, 20)
    opcheck("top_k_per_row", scores("normal", 3, 20), starts, ends, 4, "auto")
    opcheck("top_k_per_row", scores("normal", 3, 20)[:, 1:], None, None, 4, "auto")


LOGITS = torch.zeros(3, 8)
ROWS = torch.zeros(3, dtype=torch.int32)
ERRORS = [
    (TypeError, "logits", (LOGITS.double(), 2)),
    (TypeError, "logits", (None, 2)),
    (ValueError, "logits", (LOGITS[0], 2)),
    (ValueError, "logits", (LOGITS.T, 2)),
    (ValueError, "k", (LOGITS, 0)),
    (TypeError, "row_starts", (LOGITS, 2, ROWS.long(), ROWS)),
    (ValueError, "row_starts", (LOGITS, 2, ROWS[:2], ROWS)),
    (TypeError, "row_ends", (LOGITS, 2, ROWS, ROWS.float())),
    (ValueError, "row_ends", (LOGITS, 2, None, ROWS[None])),
    (ValueError, "row_ends", (LOGITS, 2, None, ROWS.to("meta"))),
]


@pytest.mark.parametrize("error, name, args", ERRORS)
def test_errors_name_the_argument(error, name, args):
    with pytest.raises(error, match=f"^{name}: got .*allowed"):
        top_k_per_row(*args)
    with pytest.raises(ValueError, match="^impl: "):
        top_k_per_row(LOGITS, 2, impl="cuda")


def test_compiles_once_for_all_row_counts():
    torch.compiler.reset()
    options = {"fullgraph": True, "dynamic": True, "backend": "aot_eager"}
    compiled, before = torch.compile(lambda x, e: top_k_per_row(x, 3, row_ends=e), **options), dynamo_counts()[0]
    for rows, width in ((4, 20), (6, 33), (9, 17)):
        x, (_, ends) = scores("grid", rows, width), ranges(rows, width)
        assert torch.equal(compiled(x, ends), top_k_per_row(x, 3, row_ends=ends))
    assert dynamo_counts()[0] - before == 1


@pytest.mark.parametrize("target", [H200, AMPERE, MI300])
def test_plans_stay_within_their_means(target):
    for rows, width, k in itertools.product(
        (1, 2, 8, 32, 64, 128, 512, 4096),
        (1, 100, 4096, 8192, 8193, 32768, 131072, 1 << 20),
        (1, 512, 2048, 4096, 20000),
    ):
        plan = dispatch.choose(Problem(rows, width, k), target).plan
        search = getattr(plan, "search", RADIX)
        assert plan.slots & (plan.slots - 1) == 0 and plan.slots <= 1 << 15
        assert search == (RADIX if target.vendor == "nvidia" else THRESHOLDS)
        threads, bound = 32 * plan.num_warps, getattr(plan, "bound", None)
        if search == RADIX:  # every thread counts
            counted = (plan.slots, getattr(plan, "chunk", plan.slots), bound.samples if bound else plan.slots)
            assert min(counted) >= threads and 4 * threads <= histogram.BINS.value
        match plan:
            case SingleCta():
                assert width <= plan.slots
            case SingleCtaBf16():
                assert width <= plan.slots and plan.slots % plan.chunk == 0 and plan.chunk >= 4 * threads
                assert plan.slots // 32 >= threads  # a word of marks a thread: none is held twice
            case Cluster():
                threads = 32 * plan.num_warps
                assert width <= plan.slots * plan.ctas_per_row and plan.slots % (4 * threads) == 0
                assert 4 * threads <= histogram.BINS.value and threads * plan.ctas_per_row >= histogram.BINS.value
                assert plan.slots <= 32 * threads  # of a thread's columns, a bit each
            case MultiCta():
                assert width <= plan.resident * plan.ctas_per_row and k <= plan.slots and plan.rows == rows
                assert plan.candidates <= plan.slots // plan.ctas_per_row and plan.ctas_per_row >= 4
            case MultiPass():
                assert plan.span * plan.ctas_per_row >= width and plan.span <= 1 << 16 and plan.span % plan.chunk == 0
                assert bound.candidates > k and plan.slots > bound.candidates + 32 * plan.ctas_per_row
                assert plan.rows_in_flight <= plan.bounded_rows <= rows
            case Sampled():
                assert plan.span % plan.chunk == 0 and plan.span <= (1 << 16 if search == RADIX else plan.chunk)
                assert plan.rows_in_flight <= rows and (plan.ctas_per_row == 1 or plan.rows_in_flight == rows)
            case Appended():
                assert 8192 < width <= 32 * plan.words and plan.rows == rows and 2 * k <= 8192
                assert plan.tile % (16 * threads) == 0
                assert rows * plan.ctas_per_row <= target.num_sms and bound.candidates > k
            case Streaming():
                assert plan.rows_in_flight <= rows
        size = sum(buffer.nbytes for buffer in plan.scratch.buffers)
        assert size <= (66 if isinstance(plan, MultiPass) else 40) << 20


def test_ctas_spread_evenly():
    """By their registers: of rows of 1025 to 4096 scores, up to three an SM, no more fit one than must. Shorter rows
    have an SM each or are left alone."""

    def claimed(rows, width, k=1024, target=H200):
        plan = dispatch.choose(Problem(rows, width, k), target).plan
        return plan.spread, plan.num_warps, plan.max_registers or 0

    for rows in range(1, 400):
        for width in (1, 100, 256, 257, 512, 1000, 1024, 1025, 3000, 4096):
            spread, warps, registers = claimed(rows, width)
            assert spread == (registers > 0) == (rows <= (3 * 132 if width > 1024 else 132))
            if spread:
                assert registers % 8 == 0 and 65536 // (32 * warps * registers) == -(-rows // 132)
    assert claimed(9, 8192) == (True, 8, 136)  # more than half of an SM's
    assert claimed(9, 8192, 2048) == (True, 8, 0) and claimed(500, 8192) == (False, 8, 64)
    assert claimed(133, 1024) == (False, 2, 0)
    assert not any(claimed(8, width, target=dataclasses.replace(H200, arch=100))[0] for width in (100, 1024, 4096))


@pytest.mark.aot
def test_claimed_registers_are_given():
    from sparse_attn.ops.topk.select import launch
    from sparse_attn.testing.launches import compile_launch, recording

    with recording("sm_90") as launches:
        for rows in (132, 133, 396):
            launch.top_k_per_row(torch.empty(rows, 4096, device="meta"), None, None, 1024)
        for width in (20000, 1000, 100):
            launch.top_k_per_row(torch.empty(9, width, device="meta"), None, None, 1024)
    assert [compile_launch(launch).registers for launch in launches] == [136, 88, 72, 128, 136, 136]


@pytest.mark.aot
@pytest.mark.parametrize("width", [256, 257, 1024])
def test_every_key_of_a_narrow_row_is_counted_once(width):
    """Triton may give an element to several threads, each of which would count it."""
    from sparse_attn.ops.topk.select import launch
    from sparse_attn.testing.launches import compile_launch, recording

    with recording("sm_90") as launches:
        for stride in (width + -width % 4, 4 * width + 1):
            logits = torch.empty(8, stride, device="meta")[:, :width]
            launch.top_k_per_row(logits, None, torch.empty(8, dtype=torch.int32, device="meta"), 64)
    slots = max(256, 1 << (width - 1).bit_length())
    for one in launches:
        compiled = compile_launch(one)
        digits = 2  # the leading one, and all others in a loop
        assert compiled.threads * compiled.assembly["ptx"].count("red.shared.add") == digits * slots
        assert compiled.spill_bytes == 0
    assert len(launches) == 2


@pytest.mark.parametrize("target", [H200, MI300])
def test_scratch_never_shrinks(target):
    def size(rows, width, k):
        return size_of(dispatch.choose(Problem(rows, width, k), target).plan.scratch)

    for k in (1, 2048, 4096):
        for width in (1, 8192, 8193, 20000, 32768, 32769, 131072, 1 << 20):
            sizes = [size(rows, width, k) for rows in range(1, 1200)]
            assert all(a.nbytes <= b.nbytes and a.counters <= b.counters for a, b in zip(sizes, sizes[1:]))
        for rows in (1, 5, 64, 300):
            sizes = [size(rows, width, k) for width in range(1, 200000, 777)]
            assert all(a.nbytes <= b.nbytes and a.counters <= b.counters for a, b in zip(sizes, sizes[1:]))


# --- kernels


def run(x, starts, ends, k, choice, device):
    from sparse_attn.ops.topk.select.launch import top_k_per_row as launched

    moved = [None if limit is None else limit.to(device) for limit in (starts, ends)]
    return launched(x.to(device), *moved, k, choice).cpu()


# fmt: off
CASES = [
    (form, kind)
    for form in (
        "thresholds.single_cta", "thresholds.sampled shared", "single_cta", "single_cta coalesced",
        "single_cta windowed", "streaming", "multi_cta", "multi_pass", "single_cta_bf16", "single_cta_bf16 spread",
        "appended shared",
    )
    for kind in KINDS
] + [("sampled shared", kind) for kind in ("normal", "equal", "zeros", "special", "few")]  # slowly interpreted
# fmt: on


@pytest.mark.sampled(36)
@pytest.mark.kernel
@pytest.mark.parametrize("form, kind", CASES)
def test_kernel(form, kind, device, dirty_workspace):
    width = PLANS[form][2]
    x = scores(kind, 2, width)
    starts, ends = torch.tensor([0, 17], dtype=torch.int32), torch.tensor([width, width - 2], dtype=torch.int32)
    want = reference.top_k_per_row(x, starts, ends, 24)
    assert torch.equal(run(x, starts, ends, 24, planned(form, 2), device), want)


@pytest.mark.kernel
@pytest.mark.parametrize("form", PLANS)
def test_kernel_ranges_and_strides(form, device, dirty_workspace):
    width = PLANS[form][2]
    cases = (7, 0, width, (True, True)), (2, 5, width - 7, (False, True)), (2, 4, width // 4 * 4, (True, False))
    for rows, offset, size, bounded in sampled(cases, 2, seed=form):
        limits = [limit if wanted else None for limit, wanted in zip(ranges(rows, width), bounded)]
        x = torch.full((rows, 4 * width), NAN)[:, offset : offset + size]
        column = torch.arange(size)
        outside = torch.zeros(rows, size, dtype=torch.bool)
        if limits[0] is not None:
            outside |= column < limits[0][:, None]
        if limits[1] is not None:
            outside |= column >= limits[1][:, None]
        x.copy_(torch.where(outside, INF, scores("grid", rows, size, seed=offset)))
        want = reference.top_k_per_row(x, *limits, 30)
        assert torch.equal(run(x, *limits, 30, planned(form, rows), device), want), (offset, size)


@pytest.mark.sampled(16)
@pytest.mark.kernel
@pytest.mark.parametrize("form", PLANS)
@pytest.mark.parametrize("k", [1, 64, 1100])
def test_kernel_any_k(form, k, device, dirty_workspace):
    width = PLANS[form][2]
    x = scores("relu", 1, width)
    want = reference.top_k_per_row(x, None, None, k)
    assert torch.equal(run(x, None, None, k, planned(form, 1), device), want)


@pytest.mark.few(1)
@pytest.mark.kernel
@pytest.mark.parametrize("kind", ["normal", "relu"])
def test_kernel_wrong_bound(kind, device, dirty_workspace):
    """Sampled positions that say nothing about the rest: too few candidates, and too many."""
    x = scores(kind, 1, 200)
    want = reference.top_k_per_row(x, None, None, 50)
    for candidates in (1, 2000):
        for form in ("thresholds.sampled", "thresholds.sampled shared", "sampled", "sampled shared", "multi_pass"):
            kernel, plan, _ = planned(form, 1)
            plan = dataclasses.replace(plan, bound=plan.bound._replace(candidates=candidates))
            assert torch.equal(run(x, None, None, 50, Choice(kernel, plan), device), want)


@pytest.mark.kernel
@pytest.mark.parametrize("form", ["appended", "appended shared"])
def test_kernel_sample_of_other_scores(form, device, dirty_workspace):
    """The sample sees none of the highest scores, or little else, or its bound is far off: lists overflow, or hold too
    few."""
    (kernel, plan, _), width = planned(form, 1), PLANS[form][2]
    x = scores("normal", 1, width)
    stratum, sectors = torch.arange(plan.bound.samples // 8), width // 8
    first, last = (number * sectors // len(stratum) for number in (stratum, stratum + 1))
    jitter = ((stratum * 1103515245 + 12345) >> 16) & 0x7FFF
    seen = ((first + jitter % (last - first)) * 8)[:, None] + torch.arange(8)
    for value in (-9.0, 9.0, math.nan):
        some = x.clone()
        some[:, seen.flatten()] = value
        want = reference.top_k_per_row(some, None, None, 70)
        assert torch.equal(run(some, None, None, 70, planned(form, 1), device), want), value
    want = reference.top_k_per_row(x, None, None, 70)
    for candidates in (1, 100, 500, width // 2):
        wrong = dataclasses.replace(plan, rows=1, bound=plan.bound._replace(candidates=candidates))
        assert torch.equal(run(x, None, None, 70, Choice(kernel, wrong), device), want), candidates


@pytest.mark.kernel
def test_kernel_more_columns_than_are_staged_at_once(device, dirty_workspace):
    x = scores("grid", 2, 4096)
    starts, ends = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([4096, 4000], dtype=torch.int32)
    for k in (3080, 3081, 4096):
        want = reference.top_k_per_row(x, starts, ends, k)
        assert torch.equal(run(x, starts, ends, k, dispatch.choose(Problem(4000, 4096, k), H200), device), want)


@pytest.mark.kernel
@pytest.mark.parametrize("candidates", [1, 16])
def test_kernel_highest_scores_in_one_cta(candidates, device, dirty_workspace):
    """It may offer fewer than are selected, or ties may fill what it offers."""
    kernel, plan, width = PLANS["multi_cta"]
    choice = chosen(kernel, dataclasses.replace(plan, rows=1, candidates=candidates))
    rounds = torch.arange(8)
    columns = ((rounds * 4 + rounds % 4) * 8)[:, None] + torch.arange(8)
    for high in (
        2.0 ** torch.arange(1, 65),
        torch.full((64,), 3.0),
        torch.full((64,), 3.0).index_fill(0, torch.arange(9), 5.0),
    ):
        x = scores("normal", 1, width)
        x[:, columns.flatten()] = high
        want = reference.top_k_per_row(x, None, None, 24)
        assert torch.equal(run(x, None, None, 24, choice, device), want)


@pytest.mark.sampled(3)
@pytest.mark.kernel
@pytest.mark.parametrize("form", ["single_cta_bf16", "single_cta_bf16 spread"])
@pytest.mark.parametrize("k", [3, 200, 700])
def test_kernel_scores_that_share_a_bf16(form, k, device, dirty_workspace):
    """As many as threads or more share the k-th's: zeros and what is as small, equal ones, those that differ little."""
    width = PLANS[form][2]
    generator = torch.Generator().manual_seed(k)
    x = torch.rand(9, width, generator=generator)
    x[0] = torch.where(x[0] < 0.9, 1.0, 1 + x[0])
    x[1] = 1 + x[1] / 200
    x[2] = torch.where(x[2] < 0.5, 0.0, (x[2] - 0.7) * 1e-41)
    x[3] = 1 + (x[3] * 3).floor() / 2**20
    x[4] = torch.where(x[4] < 0.8, 2.5, NAN).index_fill(0, torch.arange(5), -INF)
    x[5] = -1 - x[5] / 300
    x[6] = torch.where(x[6] < 0.2, 0.0, -1e-41)
    x[7] = torch.where(x[7] < 0.1, -3e38, torch.where(x[7] < 0.5, NAN, -INF))
    x[8, 17::50] = 5  # 40 of them
    starts = torch.tensor([0, 2, 7, 0, 1, 3, 0, 0, 0], dtype=torch.int32)
    ends = torch.tensor([2000, 1999, 1400, 777, 2000, 1501, 2000, 2000, 2000], dtype=torch.int32)
    want = reference.top_k_per_row(x, starts, ends, k)
    assert torch.equal(run(x, starts, ends, k, planned(form, 9), device), want)


@pytest.mark.kernel
@pytest.mark.parametrize("k", [63, 64, 65, 200, 256, 257])
def test_kernel_a_score_above_all_others_in_every_thread(k, device, dirty_workspace):
    """Each of the 64 threads holds one score far above all others: what lies behind the least of those is counted after
    all."""
    width = PLANS["single_cta_bf16 spread"][2]
    x = scores("normal", 2, width)
    x[0, : 4 * 64 : 4] = 1000 + torch.arange(64.0)
    x[1, 3 : 4 * 64 : 4] = 1000.0
    want = reference.top_k_per_row(x, None, None, k)
    assert torch.equal(run(x, None, None, k, planned("single_cta_bf16 spread", 2), device), want)


@pytest.mark.kernel
def test_kernel_far_shorter_rows(device, dirty_workspace):
    """Rows of which a quarter of the slots, and rows of which more, hold what competes."""
    choice = chosen("single_cta", SingleCta(16384, 16, window_shift=dispatch.WINDOW_SHIFT))
    x = scores("normal", 4, 9001)
    starts, ends = (torch.tensor(limit, dtype=torch.int32) for limit in ([0, 4003, 17, 5], [9001, 8098, 4114, 5]))
    want = reference.top_k_per_row(x, starts, ends, 300)
    assert torch.equal(run(x, starts, ends, 300, choice, device), want)


@pytest.mark.sampled(6)
@pytest.mark.kernel
@pytest.mark.parametrize("width", NARROW)
@pytest.mark.parametrize("k", [1, 24, 600])
def test_kernel_few_narrow_rows(width, k, device, dirty_workspace):
    """As launched on Hopper: a CTA of as many threads as a row has slots, or fewer. Rows start anywhere in memory."""
    kinds = ("normal", "relu", "equal", "special", "nothing", "few", "narrow")
    x = torch.cat([scores(kind, 1, width) for kind in kinds])
    choice = dispatch.choose(Problem(len(x), width, k), H200)
    slots = max(256, 1 << (width - 1).bit_length())
    assert choice.plan == SingleCta(slots, 8, spread=True, max_registers=136)
    for some in (x, torch.nn.functional.pad(x, (1, 0))[:, 1:]):
        for starts, ends in ((None, None), ranges(*x.shape)):
            want = reference.top_k_per_row(x, starts, ends, k)
            assert torch.equal(run(some, starts, ends, k, choice, device), want)


@pytest.mark.kernel
def test_kernel_chosen_config(device, dirty_workspace):
    for rows, width, k in ((3, 100, 7), (2, 1000, 64), (1, 9000, 64)):
        x = scores("normal", rows, width)
        got = top_k_per_row(x.to(device), k, impl="triton").cpu()
        assert torch.equal(got, reference.top_k_per_row(x, None, None, k))


@pytest.mark.kernel
@pytest.mark.parametrize("rows, width, target", [(9, 20000, H200), (2, 20000, AMPERE), (9, 40000, H200)])
def test_kernel_chosen_on_nvidia(rows, width, target, device, dirty_workspace):
    """A row held as bf16, one held as fp32, and one that many CTAs share, as launched there."""
    for kind in ("normal", "relu", "tailed", "narrow"):
        x = scores(kind, rows, width)
        want = reference.top_k_per_row(x, None, None, 512)
        assert torch.equal(run(x, None, None, 512, dispatch.choose(Problem(rows, width, 512), target), device), want)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_all_shapes(kind, device):
    short = (1, 4096), (5, 8191), (140, 16001), (64, 20001), (700, 9999), (600, 8000), (3200, 5000), (3, 32768)
    for rows, width in (*short, (1, 131072), (3, 131071), (64, 131072), (2, 1 << 20), (270, 33001)):
        x = scores(kind, rows, width).to(device)
        limits = [limit.to(device) for limit in ranges(rows, width)]
        for k in (1, 512, 2048, 4096, 10000):
            for starts, ends in ((None, None), limits):
                want = reference.top_k_per_row(x, starts, ends, k)
                assert torch.equal(top_k_per_row(x, k, starts, ends), want), (rows, width, k)


@pytest.mark.gpu
def test_gpu_same_bits_every_time(device):
    for rows, width in ((2, 131072), (64, 32768), (600, 8192), (600, 16384), (128, 131072), (280, 33000)):
        x = scores("relu", rows, width).to(device)
        first = top_k_per_row(x, 2048)
        assert all(torch.equal(top_k_per_row(x, 2048), first) for _ in range(20))
