"""top_k_per_row: the reference against a brute force, the kernels against the reference, on every path."""

import dataclasses
import math

import pytest
import torch
from conftest import sampled
import torch._dynamo.testing

from sparse_attn.ops.topk import config, reference, table, top_k_per_row
from sparse_attn.target import H200, Target
from sparse_attn.testing.ops import opcheck, schema
from sparse_attn.workspace import size_of

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
INF, NAN = math.inf, math.nan


MI300 = Target("amd", "gfx942", 304, 65536, 64)
AMPERE = dataclasses.replace(H200, arch=80)  # its programs


def brute_force(logits, starts, ends, k):
    """One row at a time with Python's own sort."""
    rows, width = logits.shape
    out = torch.full((rows, k), -1, dtype=torch.int32)
    for row in range(rows):
        start = 0 if starts is None else min(max(int(starts[row]), 0), width)
        end = width if ends is None else min(max(int(ends[row]), 0), width)
        values = logits[row].tolist()
        choice = [c for c in range(start, end) if not math.isnan(values[c]) and values[c] != -INF]
        choice = sorted(sorted(choice, key=lambda c: -values[c])[:k])  # Python's sort is stable and has -0.0 == 0.0
        out[row, : len(choice)] = torch.tensor([c - start for c in choice], dtype=torch.int32)
    return out


def scores(kind, rows, width, seed=0):
    """fp32 [rows, width] of one of several shapes of distribution."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    if kind == "relu":  # a plateau of exact zeros, both signs of zero, above and below it
        x = torch.where(x.abs() < 0.8, torch.where(x > 0, 0.0, -0.0), x)
    elif kind == "grid":
        x = (x * 2).round() / 2
    elif kind == "equal":
        x = torch.full_like(x, 1.5)
    elif kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    elif kind == "ascending":
        x = x.sort(1).values
    elif kind == "descending":
        x = x.sort(1, descending=True).values
    elif kind == "special":
        pick = torch.randint(0, 8, x.shape, generator=generator)
        for code, value in enumerate((NAN, -INF, INF, 0.0, -0.0, torch.finfo(torch.float32).min)):
            x[pick == code] = value
    elif kind == "nothing":
        x = torch.where(x > 0, -INF, NAN)
    elif kind == "few":
        x[:, 3:] = torch.where(x[:, 3:] > 1.5, x[:, 3:], -INF)
    elif kind == "denormal":
        x = (x * 8).round() * 1e-45
    elif kind == "clustered":
        x[:, width // 2 : width // 2 + width // 8] += 10
    elif kind == "tailed":  # one score is octaves above all others
        x[:, 7] = 12
    elif kind == "narrow":  # hundreds of scores share a digit
        x = 1 + x / 100
    elif kind == "huge":
        x = x * 1e38
    else:
        assert kind == "normal"
    return x


KINDS = (
    "normal relu grid equal zeros ascending descending special nothing few denormal clustered tailed narrow huge".split()
)  # fmt: skip


def ranges(rows, width, seed=0):
    """Row limits with all that may come: empty, reversed, far outside."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(-3, width + 3, (rows,), generator=generator, dtype=torch.int32) // 3
    ends = torch.randint(0, width + 9, (rows,), generator=generator, dtype=torch.int32)
    odd = [(INT_MIN, INT_MAX), (0, 0), (INT_MAX, INT_MIN), (5, 5), (width - 1, INT_MAX), (-7, width // 2), (3, width)]
    for row, (start, end) in enumerate(odd[:rows]):
        starts[row], ends[row] = start, end
    return starts, ends


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
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    options = {"fullgraph": True, "dynamic": True, "backend": counter}
    compiled = torch.compile(lambda x, e: top_k_per_row(x, 3, row_ends=e), **options)
    for rows, width in ((4, 20), (6, 33), (9, 17)):
        x, (_, ends) = scores("grid", rows, width), ranges(rows, width)
        assert torch.equal(compiled(x, ends), top_k_per_row(x, 3, row_ends=ends))
    assert counter.frame_count == 1


@pytest.mark.parametrize("target", [H200, MI300])
def test_config_stays_within_its_means(target):
    for rows in (1, 2, 8, 32, 64, 128, 512, 4096):
        for width in (1, 100, 4096, 8192, 8193, 32768, 131072, 1 << 20):
            for k in (1, 512, 2048, 4096, 20000):
                launch = config.config(rows, width, k, target)
                assert launch.slots & (launch.slots - 1) == 0 and launch.slots <= 1 << 15
                assert launch.digits == (target.vendor == "nvidia")
                if launch.digits:  # every thread counts
                    counted = {launch.slots, launch.chunk, launch.samples} - {0}
                    assert min(counted) >= 32 * launch.num_warps and 4 * 32 * launch.num_warps <= table.BINS.value
                if launch.halves:
                    assert launch.slots % launch.halves == 0 and launch.halves >= 4 * 32 * launch.num_warps
                    assert launch.slots // 32 >= 32 * launch.num_warps  # a word of marks a thread: none is held twice
                if launch.held:
                    assert width <= launch.held * launch.programs and k <= launch.slots
                    assert launch.keep <= launch.slots // launch.programs and launch.programs >= 4
                elif launch.sampled:
                    assert launch.span % launch.chunk == 0 and launch.span <= (1 << 16 if launch.digits else launch.chunk)
                if launch.staged:
                    assert launch.span * launch.programs >= width and launch.span <= 1 << 16
                    assert launch.keep > k and launch.slots > launch.keep + 32 * launch.programs
                assert width <= launch.slots if launch.short else launch.groups <= rows
                assert launch.programs == 1 or launch.groups == rows or launch.staged
                size = sum(buffer.nbytes for buffer in config.scratch(rows, width, k, target).buffers)
                assert size <= (66 if launch.staged else 40) << 20


def test_programs_spread_evenly():
    """By their registers: of rows of 1025 to 4096 scores, up to three a multiprocessor, no more fit one than must."""
    for rows in range(1, 400):
        for width in (1024, 1025, 3000, 4096):
            launch = config.config(rows, width, 1024, H200)
            claimed = launch.claimed_registers
            assert launch.spread == (claimed > 0) == (width > 1024 and rows <= 3 * 132)
            if claimed:
                assert claimed % 8 == 0 and 65536 // (32 * launch.num_warps * claimed) == -(-rows // 132)
    assert config.config(8, 8192, 1024, H200).claimed_registers == 136  # more than half of a multiprocessor's
    assert config.config(8, 8192, 2048, H200).claimed_registers == config.config(500, 8192, 1024, H200).claimed_registers == 0
    assert not config.config(8, 4096, 1024, dataclasses.replace(H200, arch=100)).spread


@pytest.mark.aot
def test_claimed_registers_are_given():
    from sparse_attn.ops.topk import launch
    from sparse_attn.testing.launches import compile_launch, recording

    with recording("sm_90") as launches:
        for rows in (132, 133, 396):
            launch.top_k_per_row(torch.empty(rows, 4096, device="meta"), None, None, 1024)
        launch.top_k_per_row(torch.empty(8, 20000, device="meta"), None, None, 1024)
    assert [compile_launch(launch).registers for launch in launches] == [136, 88, 72, 128]


@pytest.mark.parametrize("target", [H200, MI300])
def test_scratch_never_shrinks(target):
    for k in (1, 2048, 4096):
        for width in (1, 8192, 8193, 20000, 32768, 32769, 131072, 1 << 20):
            sizes = [size_of(config.scratch(rows, width, k, target)) for rows in range(1, 1200)]
            assert all(a.nbytes <= b.nbytes and a.counters <= b.counters for a, b in zip(sizes, sizes[1:]))
        for rows in (1, 5, 64, 300):
            sizes = [size_of(config.scratch(rows, width, k, target)) for width in range(1, 200000, 777)]
            assert all(a.nbytes <= b.nbytes and a.counters <= b.counters for a, b in zip(sizes, sizes[1:]))


# --- kernels

SHORT = config.TopkConfig(True, 256, 2)
LONG = config.TopkConfig(
    False, 64, 2, sampled=True, programs=1, groups=2, chunk=64, span=64, keep=40, samples=32, run=4
)  # fmt: skip
SHARED = dataclasses.replace(LONG, programs=4, slots=128)
SEARCHED = config.TopkConfig(False, 64, 2, groups=2, chunk=64)
SIZES = {"short": (SHORT, 250), "long": (LONG, 150), "shared": (SHARED, 260), "searched": (SEARCHED, 110)}
SIZES |= {f"{path} by digits": (dataclasses.replace(launch, digits=True), width) for path, (launch, width) in SIZES.items()}
DIGITS = [dataclasses.replace(launch, digits=True) for launch in (LONG, SHARED)]
SIZES["windowed"] = (config.TopkConfig(True, 512, 2, digits=True, window=config.WINDOW), 500)
SIZES["dealt by digits"] = (
    config.TopkConfig(
        False, 256, 2, sampled=True, programs=4, groups=2, chunk=256, keep=16, digits=True, held=128, window=config.WINDOW
    ),
    420,
)
SIZES["lines by digits"] = (config.TopkConfig(True, 512, 2, digits=True, lines=True), 500)
SIZES["staged"] = (
    config.TopkConfig(
        False, 128, 2, sampled=True, programs=4, groups=2, chunk=64, span=128, keep=60, samples=64, run=4, digits=True,
        staged=True, reserve=8,
    ),
    420,
)  # fmt: skip
HALVES = config.TopkConfig(True, 2048, 2, digits=True, halves=512)
SIZES |= {"halves": (HALVES, 2000), "halves by lines": (dataclasses.replace(HALVES, lines=True), 1500)}
SIZES["halves of few rows"] = (dataclasses.replace(HALVES, spread=True), 2000)
SIZES["spans by digits"] = (dataclasses.replace(LONG, digits=True, span=128), 420)


def run(x, starts, ends, k, launch, device):
    from sparse_attn.ops.topk.launch import top_k_per_row as launched

    if launch is not None and launch.programs > 1 and not launch.staged:
        launch = dataclasses.replace(launch, groups=x.shape[0])
    moved = [None if limit is None else limit.to(device) for limit in (starts, ends)]
    return launched(x.to(device), *moved, k, launch).cpu()


# fmt: off
CASES = [
    (path, kind)
    for path in (
        "short", "shared", "short by digits", "lines by digits", "windowed", "searched by digits", "dealt by digits", "staged",
        "halves", "halves of few rows",
    )
    for kind in KINDS
] + [("shared by digits", kind) for kind in ("normal", "equal", "zeros", "special", "few")]  # slowly interpreted
# fmt: on


@pytest.mark.sampled(36)
@pytest.mark.kernel
@pytest.mark.parametrize("path, kind", CASES)
def test_kernel(path, kind, device, dirty_workspace):
    launch, width = SIZES[path]
    x = scores(kind, 2, width)
    starts, ends = torch.tensor([0, 17], dtype=torch.int32), torch.tensor([width, width - 2], dtype=torch.int32)
    want = reference.top_k_per_row(x, starts, ends, 24)
    assert torch.equal(run(x, starts, ends, 24, launch, device), want)


@pytest.mark.kernel
@pytest.mark.parametrize("path", SIZES)
def test_kernel_ranges_and_strides(path, device, dirty_workspace):
    launch, width = SIZES[path]
    cases = (7, 0, width, (True, True)), (2, 5, width - 7, (False, True)), (2, 4, width // 4 * 4, (True, False))
    for rows, offset, size, bounded in sampled(cases, 2, seed=path):
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
        assert torch.equal(run(x, *limits, 30, launch, device), want), (offset, size)


@pytest.mark.sampled(16)
@pytest.mark.kernel
@pytest.mark.parametrize("path", SIZES)
@pytest.mark.parametrize("k", [1, 64, 1100])
def test_kernel_any_k(path, k, device, dirty_workspace):
    launch, width = SIZES[path]
    x = scores("relu", 1, width)
    want = reference.top_k_per_row(x, None, None, k)
    assert torch.equal(run(x, None, None, k, launch, device), want)


@pytest.mark.kernel
@pytest.mark.parametrize("kind", ["normal", "relu"])
def test_kernel_wrong_bound(kind, device, dirty_workspace):
    """Sampled positions that say nothing about the rest: too few candidates, and too many."""
    x = scores(kind, 1, 200)
    for keep in (1, 2000):
        for launch in (LONG, SHARED, *DIGITS, SIZES["staged"][0]):
            launch = dataclasses.replace(launch, keep=keep)
            want = reference.top_k_per_row(x, None, None, 50)
            assert torch.equal(run(x, None, None, 50, launch, device), want)


@pytest.mark.kernel
def test_kernel_more_lines_than_the_table_has_room_for(device, dirty_workspace):
    x = scores("grid", 2, 4096)
    starts, ends = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([4096, 4000], dtype=torch.int32)
    for k in (3080, 3081, 4096):
        want = reference.top_k_per_row(x, starts, ends, k)
        assert torch.equal(run(x, starts, ends, k, config.config(4000, 4096, k, H200), device), want)


@pytest.mark.kernel
@pytest.mark.parametrize("keep", [1, 16])
def test_kernel_dealt_unevenly(keep, device, dirty_workspace):
    """The highest scores in sectors that one program holds: it may offer fewer than are selected, or ties may fill it."""
    launch, width = SIZES["dealt by digits"]
    rounds = torch.arange(8)
    columns = ((rounds * 4 + rounds % 4) * 8)[:, None] + torch.arange(8)
    for high in (2.0 ** torch.arange(1, 65), torch.full((64,), 3.0), torch.full((64,), 3.0).index_fill(0, torch.arange(9), 5.0)):
        x = scores("normal", 1, width)
        x[:, columns.flatten()] = high
        want = reference.top_k_per_row(x, None, None, 24)
        assert torch.equal(run(x, None, None, 24, dataclasses.replace(launch, keep=keep), device), want)


@pytest.mark.sampled(3)
@pytest.mark.kernel
@pytest.mark.parametrize("path", ["halves", "halves of few rows"])
@pytest.mark.parametrize("k", [3, 200, 700])
def test_kernel_scores_that_share_a_half(path, k, device, dirty_workspace):
    """As many as threads or more share the half of the k-th: zeros and what is as small, equal ones, those that differ little."""
    launch, width = SIZES[path]
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
    assert torch.equal(run(x, starts, ends, k, launch, device), want)


@pytest.mark.kernel
@pytest.mark.parametrize("k", [63, 64, 65, 200, 256, 257])
def test_kernel_highest_scores_dealt_to_all_threads(k, device, dirty_workspace):
    """Each of the 64 threads holds one score far above all others: what lies behind the least of those is counted after all."""
    launch, width = SIZES["halves of few rows"]
    x = scores("normal", 2, width)
    x[0, : 4 * 64 : 4] = 1000 + torch.arange(64.0)
    x[1, 3 : 4 * 64 : 4] = 1000.0
    want = reference.top_k_per_row(x, None, None, k)
    assert torch.equal(run(x, None, None, k, launch, device), want)


@pytest.mark.kernel
def test_kernel_far_shorter_rows(device, dirty_workspace):
    """Rows of which a quarter of the slots, and rows of which more, hold what competes."""
    launch = config.TopkConfig(True, 16384, 16, digits=True, window=config.WINDOW)
    x = scores("normal", 4, 9001)
    starts, ends = (torch.tensor(limit, dtype=torch.int32) for limit in ([0, 4003, 17, 5], [9001, 8098, 4114, 5]))
    want = reference.top_k_per_row(x, starts, ends, 300)
    assert torch.equal(run(x, starts, ends, 300, launch, device), want)


@pytest.mark.kernel
def test_kernel_chosen_config(device, dirty_workspace):
    for rows, width, k in ((3, 100, 7), (2, 1000, 64), (1, 9000, 64)):
        x = scores("normal", rows, width)
        got = top_k_per_row(x.to(device), k, impl="triton").cpu()
        assert torch.equal(got, reference.top_k_per_row(x, None, None, k))


@pytest.mark.kernel
@pytest.mark.parametrize("rows, width, target", [(2, 20000, H200), (2, 20000, AMPERE), (1, 40000, H200)])
def test_kernel_chosen_on_nvidia(rows, width, target, device, dirty_workspace):
    """By digits, a held row, by halves and whole scores, and one that many programs share, as launched there."""
    for kind in ("normal", "relu", "tailed", "narrow"):
        x = scores(kind, rows, width)
        want = reference.top_k_per_row(x, None, None, 512)
        assert torch.equal(run(x, None, None, 512, config.config(rows, width, 512, target), device), want)


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
