"""Index scores: the reference against a plain loop, the kernels against the reference at DeepGEMM's level."""

from __future__ import annotations

import pytest
import torch
from conftest import big
from expecttest import assert_expected_inline
from support.caches import poisoned_cache
from support.extremes import INT_MAX, INT_MIN
from support.index_logits import check_highest, paged_problem_of
from support.index_topk import mxfp4_query

from sparse_attn.fp8 import fp8_decode, fp8_quantise
from sparse_attn.framework.target import target_of
from sparse_attn.layout import INDEX_AMAX_FLOOR, IndexFp8Layout, IndexMxfp4Layout, LatentFp8Layout, PlainLayout
from sparse_attn.mxfp4 import mxfp4_quantise
from sparse_attn.ops.indexer import scores
from sparse_attn.ops.indexer.scores import reference
from sparse_attn.testing import compare
from sparse_attn.testing.ops import opcheck, schema

INF = float("inf")


def quantised(shape, flavour, device="cpu"):
    return tuple(x.to(device) for x in fp8_quantise(torch.randn(shape), flavour, "raw", INDEX_AMAX_FLOOR))


def ranges(rows, keys, device="cpu"):
    """Causal ranges, with some empty, wild and inverted ones in front."""
    start = torch.zeros(rows, dtype=torch.int32)
    end = torch.arange(1, rows + 1, dtype=torch.int32) * keys // max(rows, 1)
    for place, (a, b) in enumerate([(3, 3), (INT_MIN, INT_MAX), (5, 2), (-7, 4), (keys - 1, keys + 100)][:rows]):
        start[place], end[place] = a, b
    return start.to(device), end.to(device)


def slow_logits(q, k, weights, start, end):
    """float64, one key at a time, from dequantised q and k."""
    out = torch.full((q.shape[0], k.shape[0]), -INF, dtype=torch.float64)
    for m in range(q.shape[0]):
        for n in range(max(int(start[m]), 0), min(int(end[m]), k.shape[0])):
            out[m, n] = ((q[m].double() @ k[n].double()).relu() * weights[m].double()).sum()
    return out


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=pytest.mark.kernel)])
def test_keys_of_none_have_any_strides(impl, device):
    device = device if impl == "triton" else "cpu"
    (q, _), start = quantised((3, 2, 16), "e4m3fn", device), torch.zeros(3, dtype=torch.int32, device=device)
    codes, scale = torch.zeros(1, dtype=torch.uint8, device=device), torch.ones(1, device=device)
    for k in (codes.expand(0, 16), torch.as_strided(codes, (0, 16), (16, 3))):
        got = scores.fp8_mqa_logits(q, k, scale.expand(0), torch.ones(3, 2, device=device), start, start, impl=impl)
        assert got.shape == (3, 0)


@pytest.mark.parametrize("flavour", ["e4m3fn", "e4m3fnuz"])
def test_reference_matches_loop(flavour):
    torch.manual_seed(0)
    (q, q_scale), (k, k_scale) = quantised((7, 3, 16), flavour), quantised((20, 16), flavour)
    weights = torch.randn(7, 3) * q_scale
    start, end = ranges(7, 20)
    got = scores.fp8_mqa_logits(q, k, k_scale, weights, start, end, flavour=flavour)
    want = slow_logits(fp8_decode(q, flavour), fp8_decode(k, flavour) * k_scale.unsqueeze(1), weights, start, end)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_reference_in_pieces(monkeypatch):
    torch.manual_seed(0)
    q, k, weights, bounds = torch.randn(7, 3, 16), torch.randn(20, 16), torch.randn(7, 3), ranges(7, 20)
    whole = reference.mqa_logits(q, k, None, weights, *bounds, "none")
    monkeypatch.setattr(reference, "PRODUCT_ELEMENTS", 2 * 3 * 20)  # two rows at a time
    pieces = reference.mqa_logits(q, k, None, weights, *bounds, "none")
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)


def test_relu_comes_before_the_weight():
    q, k = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[2.0], [-3.0]])
    whole = torch.zeros(1, dtype=torch.int32), torch.full((1,), 2, dtype=torch.int32)
    got = scores.bf16_mqa_logits(q, k, torch.tensor([[-1.0, 10.0]]), *whole)
    assert got.tolist() == [[-2.0, 30.0]]


LAYOUTS = {
    "fp8": IndexFp8Layout(16),
    "fp8 128": IndexFp8Layout(128),
    "fnuz": IndexFp8Layout(32, "e4m3fnuz", "raw"),
    "fp8 odd": IndexFp8Layout(24),
    "bf16": PlainLayout("bf16", 16),
    "bf16 256": PlainLayout("bf16", 256),
    "fp32": PlainLayout("fp32", 20),
    "mxfp4": IndexMxfp4Layout(32),
    "mxfp4 odd": IndexMxfp4Layout(96),
    "mxfp4 128": IndexMxfp4Layout(128),
}


def paged_inputs(layout, lens, heads, block_size, device="cpu", padding=0, poison=True, num_blocks=None):
    """A cache whose unread slots are NaN, a block table with wild entries, and queries."""
    requests, next_n = len(lens), len(lens[0])
    context_lens = torch.tensor(lens, dtype=torch.int32)
    longest = max(1, int(context_lens.clamp(0, 10000).max()))
    per_request = -(-longest // block_size)
    num_blocks = num_blocks or requests * per_request + 2
    table = torch.randperm(num_blocks, dtype=torch.int32)[: requests * per_request].reshape(requests, per_request)
    cache, memory = poisoned_cache(layout, num_blocks, block_size, padding=padding)
    for b in range(requests):
        count = int(context_lens[b].clamp(0, longest).max())
        position = torch.arange(count)
        slots = table[b, position // block_size].long() * block_size + position % block_size
        layout.encode(cache, slots, torch.randn(count, layout.dim))
    if per_request > 1:
        table[0, -1] = INT_MAX
        table[-1, 0] = INT_MIN
    if isinstance(layout, IndexFp8Layout):
        q, scale = quantised((requests, next_n, heads, layout.dim), layout.flavour)
        weights = torch.randn(requests * next_n, heads) * scale.flatten(0, 1)
    elif isinstance(layout, IndexMxfp4Layout):
        q = mxfp4_query(torch.randn(requests * next_n, heads, layout.dim)).unflatten(0, (requests, next_n))
        weights = torch.randn(requests * next_n, heads)
    else:
        q = torch.randn(requests, next_n, heads, layout.dim).to(layout.dtype)
        weights = torch.randn(requests * next_n, heads)
    cache = memory.to(device).as_strided(cache.shape, cache.stride())
    return q.to(device), cache, weights.to(device), context_lens.to(device), table.to(device)


def run_paged(inputs, max_context_len, layout, impl):
    form = {IndexFp8Layout: "fp8", IndexMxfp4Layout: "mxfp4", PlainLayout: "bf16"}[type(layout)]
    return getattr(scores, f"{form}_paged_mqa_logits")(*inputs, max_context_len, layout, impl=impl)


@pytest.mark.parametrize("name", LAYOUTS)
def test_reference_paged_equals_contiguous(name):
    torch.manual_seed(1)
    layout = LAYOUTS[name]
    inputs = paged_inputs(layout, [[9, 10], [0, -4], [INT_MAX, 13]], 3, 4, padding=8)
    q, cache, weights, context_lens, table = inputs
    got = run_paged(inputs, 15, layout, "reference")
    rows = layout.decode(cache, torch.arange(cache.shape[0] * 4))
    if isinstance(layout, IndexMxfp4Layout):
        values = layout.decode(q.flatten(0, 1), torch.arange(18)).view(3, 2, 3, layout.dim)
    else:
        values = fp8_decode(q, layout.flavour) if isinstance(layout, IndexFp8Layout) else q.float()
    for b in range(3):
        keys = torch.zeros(15, layout.dim)
        known = torch.zeros(15, dtype=torch.bool)
        for n in range(15):
            block = int(table[b, n // 4]) if n // 4 < table.shape[1] else -1
            if 0 <= block < cache.shape[0]:
                keys[n], known[n] = rows[block * 4 + n % 4], True
        want = slow_logits(values[b], keys, weights[2 * b : 2 * b + 2], torch.zeros(2), context_lens[b])
        want[:, ~known] = -INF
        torch.testing.assert_close(got[2 * b : 2 * b + 2].double(), want, rtol=1e-5, atol=1e-5)


def test_schemas():
    assert_expected_inline(
        "\n".join(schema(name) for name in ("mqa_logits", "paged_mqa_logits")),
        """\
sparse_attn::mqa_logits(Tensor q, Tensor k, Tensor? k_scale, Tensor weights, Tensor kv_start, Tensor kv_end, str flavour, str impl) -> Tensor
sparse_attn::paged_mqa_logits(Tensor q, Tensor cache, Tensor weights, Tensor context_lens, Tensor block_table, SymInt max_context_len, str layout, str impl) -> Tensor""",
    )


def check_opcheck(impl, device):
    (q, _), (k, k_scale) = quantised((5, 3, 16), "e4m3fn", device), quantised((20, 16), "e4m3fn", device)
    start, end = ranges(5, 20, device)
    opcheck("mqa_logits", q, k, k_scale, torch.randn(5, 3, device=device), start, end, "e4m3fn", impl)
    for name in ("fp8", "mxfp4"):
        inputs = paged_inputs(LAYOUTS[name], [[9, 10]], 3, 4, device)
        opcheck("paged_mqa_logits", *inputs, 12, LAYOUTS[name].name, impl)


def test_opcheck_reference():
    check_opcheck("reference", "cpu")


GOOD = dict(
    q=torch.zeros(2, 3, 16, dtype=torch.uint8),
    k=torch.zeros(5, 16, dtype=torch.uint8),
    k_scale=torch.ones(5),
    weights=torch.ones(2, 3),
    kv_start=torch.zeros(2, dtype=torch.int32),
    kv_end=torch.ones(2, dtype=torch.int32),
)


@pytest.mark.parametrize(
    "change,name,kind",
    [
        (dict(q=torch.zeros(2, 3, 16)), "q", TypeError),
        (dict(q=torch.zeros(2, 3, 16, dtype=torch.float8_e4m3fnuz)), "q", TypeError),
        (dict(q=torch.zeros(2, 129, 16, dtype=torch.uint8)), "q", ValueError),
        (dict(k=torch.zeros(5, 8, dtype=torch.uint8)), "k", ValueError),
        (dict(k_scale=torch.ones(4)), "k_scale", ValueError),
        (dict(weights=torch.ones(2, 4)), "weights", ValueError),
        (dict(weights=torch.ones(2, 3, dtype=torch.bfloat16)), "weights", TypeError),
        (dict(kv_start=torch.zeros(3, dtype=torch.int32)), "kv_start", ValueError),
        (dict(kv_end=torch.zeros(2, dtype=torch.int64)), "kv_end", TypeError),
        (dict(flavour="e5m2"), "flavour", ValueError),
    ],
)
def test_errors_name_the_argument(change, name, kind):
    with pytest.raises(kind, match=rf"^{name}: got"):
        scores.fp8_mqa_logits(**(GOOD | change))


@pytest.mark.parametrize(
    "change,name,kind",
    [
        (dict(cache=torch.zeros(2, 4, 16, dtype=torch.uint8)), "cache", ValueError),
        (dict(cache=torch.zeros(2, 4, 20)), "cache", TypeError),
        (dict(q=torch.zeros(2, 3, 16, dtype=torch.uint8)), "q", ValueError),
        (dict(context_lens=torch.zeros(2, dtype=torch.int32)), "context_lens", ValueError),
        (dict(block_table=torch.zeros(3, 4, dtype=torch.int32)), "block_table", ValueError),
        (dict(max_context_len=-1), "max_context_len", ValueError),
        (dict(layout=LatentFp8Layout(512, 64)), "layout", ValueError),
    ],
)
def test_paged_errors_name_the_argument(change, name, kind):
    arguments = dict(
        q=torch.zeros(2, 1, 3, 16, dtype=torch.uint8),
        cache=torch.zeros(2, 4, 20, dtype=torch.uint8),
        weights=torch.ones(2, 3),
        context_lens=torch.zeros(2, 1, dtype=torch.int32),
        block_table=torch.zeros(2, 4, dtype=torch.int32),
        max_context_len=8,
        layout=LAYOUTS["fp8"],
    )
    with pytest.raises(kind, match=rf"^{name}: got"):
        scores.fp8_paged_mqa_logits(**(arguments | change))


@pytest.mark.parametrize("rows,keys", [(0, 4), (3, 0)])
def test_empty(rows, keys):
    q, k = torch.zeros(rows, 2, 8), torch.zeros(keys, 8)
    bounds = torch.zeros(rows, dtype=torch.int32)
    assert scores.bf16_mqa_logits(q, k, torch.zeros(rows, 2), bounds, bounds).shape == (rows, keys)


@pytest.mark.kernel
def test_no_rows_of_a_request(device):
    q, cache, weights, lens, table = paged_inputs(LAYOUTS["fp8"], [[9], [10]], 3, 4, device)
    inputs = q[:, :0], cache, weights[:0], lens[:, :0], table
    for impl in ("reference", "triton"):
        assert run_paged(inputs, 12, LAYOUTS["fp8"], impl).shape == (0, 12)


MQA_CASES = [  # rows, keys, heads, dim, flavour
    (19, 100, 3, 16, "e4m3fn"),
    (5, 70, 20, 24, "e4m3fnuz"),
    (6, 65, 4, 32, torch.bfloat16),
    (6, 40, 1, 20, torch.float32),
    (19, 100, 3, 32, "mxfp4"),
    (5, 70, 20, 96, "mxfp4"),
]
GPU_MQA_CASES = [
    (300, 3000, 64, 128, "e4m3fn"),
    (2100, 2049, 32, 128, "e4m3fn"),
    (70, 999, 128, 128, "e4m3fn"),
    (70, 999, 64, 128, "e4m3fnuz"),
    (300, 3000, 64, 128, torch.bfloat16),
    (300, 3000, 64, 128, "mxfp4"),
    (2100, 2049, 32, 128, "mxfp4"),
    (70, 999, 8, 64, torch.float16),
]


@pytest.mark.kernel
def test_mqa_kernel(device):
    for case, (rows, keys, heads, dim, kind) in enumerate(MQA_CASES + (GPU_MQA_CASES if big(device) else [])):
        torch.manual_seed(case)
        start, end = ranges(rows, keys, device)
        weights = torch.randn(heads, rows, device=device).t()
        if kind == "mxfp4":
            q, (k, k_scale) = (
                mxfp4_query(torch.randn(rows, heads, dim)).to(device),
                mxfp4_quantise(torch.randn(keys, dim)),
            )
            k, k_scale = (torch.cat([x, x], 1).to(device)[:, : x.shape[1]] for x in (k, k_scale))
            got = scores.mxfp4_mqa_logits(q, k, k_scale, weights, start, end, impl="triton")
            want = reference.mqa_logits(q, k, k_scale, weights, start, end, kind)
        elif isinstance(kind, str):
            (q, _), (k, k_scale) = quantised((rows, heads, dim), kind, device), quantised((keys, dim), kind, device)
            got = scores.fp8_mqa_logits(q, k, k_scale, weights, start, end, flavour=kind, impl="triton")
            want = reference.mqa_logits(q, k, k_scale, weights, start, end, kind)
        else:
            q = torch.randn(rows, heads, 2 * dim, device=device).to(kind)[..., :dim]
            k = torch.randn(keys, dim, device=device).to(kind)
            got = scores.bf16_mqa_logits(q, k, weights, start, end, impl="triton")
            want = reference.mqa_logits(q, k, None, weights, start, end, "none")
        compare.assert_same_diff(got, want)


PAGED_CASES = [  # layout, lens, heads, block size, padding
    ("fp8", [[70, 71], [0, -4], [INT_MAX, 150], [3, INT_MIN]], 3, 16, 0),
    ("fp8 odd", [[40]], 5, 7, 4),
    ("fnuz", [[33, 34, 35], [1, 2, 0]], 16, 64, 64),
    ("fp8", [[150, 129], [INT_MAX, 128], [0, 5]], 3, 128, 32),  # a tile of keys lies in one block
    ("fp8", [[70, 155, 64]] + [[0, 0, 3]] * 8, 30, 64, 0),  # the same, of half as many keys, tile after tile
    ("bf16", [[130], [5]], 4, 16, 16),
    ("fp32", [[50, 51]], 2, 8, 0),
    ("fp8", [[9, 70, 33], [0, 0, 66]], 80, 16, 0),  # rows of a request in programs of their own
    ("bf16", [[5, 9, 0, -3, 40]], 40, 8, 0),  # two rows to a program, the last one alone
    ("bf16", [[INT_MIN], [-(2**30)]], 4, 16, 0),
    ("mxfp4", [[70, 71], [0, -4], [INT_MAX, 150], [3, INT_MIN]], 3, 16, 1),
    ("mxfp4 odd", [[40]], 5, 7, 3),
    ("mxfp4", [[150, 129], [INT_MAX, 128], [0, 5]], 3, 128, 32),  # a tile of keys lies in one block
    ("mxfp4 128", [[9, 70, 33], [0, 0, 66]], 80, 16, 0),  # rows of a request in programs of their own
]
GPU_PAGED_CASES = [
    ("fp8 128", [[3000]], 64, 64, 0),
    ("fp8 128", [[2999, 3000]] * 9 + [[0, 0], [17, 18]], 64, 64, 576),
    ("fp8 128", [[100, 101, 102], [4096, 4097, 4098]], 32, 1, 4),
    ("fp8 128", [[100], [1500]], 128, 256, 0),
    ("fp8 128", [[700 + j for j in range(16)], [INT_MIN] * 16], 128, 64, 0),
    ("mxfp4 128", [[2999, 3000]] * 9 + [[0, 0], [17, 18]], 64, 64, 68),
    ("mxfp4 128", [[3000]], 64, 64, 0),
    ("mxfp4 128", [[100, 101, 102, 103], [4096, 4097, 4098, 1]], 32, 32, 0),
    ("bf16 256", [[300, 301, 302, 303]], 128, 64, 0),  # all rows at once would not fit shared memory
]


@pytest.mark.kernel
def test_paged_kernel(device):
    for case, (name, lens, heads, block_size, padding) in enumerate(
        PAGED_CASES + (GPU_PAGED_CASES if big(device) else [])
    ):
        torch.manual_seed(case)
        layout = LAYOUTS[name]
        inputs = paged_inputs(layout, lens, heads, block_size, device, padding)
        for width in (200, 8200) if big(device) else (155,):
            got = run_paged(inputs, width, layout, "triton")
            want = reference.paged_mqa_logits(*inputs, width, layout.name)
            compare.assert_same_diff(got, want)


@pytest.mark.kernel
def test_paged_kernel_gives_the_highest_of_groups(device):
    from sparse_attn.ops.indexer.scores import dispatch
    from sparse_attn.ops.indexer.scores.plan import Paged

    for case, (name, lens, heads, block_size, padding) in enumerate(PAGED_CASES):
        torch.manual_seed(case)
        layout = LAYOUTS[name]
        q, cache, weights, limits, table = paged_inputs(layout, lens, heads, block_size, device, padding)
        flavour = dispatch.flavour_of(layout.name)
        if flavour != "none":
            q = q.view(torch.uint8)
        for width in (155, 64):
            arguments = (q, cache, weights, limits, table, width)
            problem = paged_problem_of(*arguments, layout.name)
            kernel, plan, _ = dispatch.choose_paged(problem, target_of(torch.device(device)))

            def launch(out, maxima, group):
                kernel.launcher(Paged(*arguments, flavour, out, False, maxima=maxima, group=group), plan)

            check_highest(launch, len(weights), width, limits, device)


@pytest.mark.kernel
def test_a_row_has_the_same_bits_alone(device):
    torch.manual_seed(0)
    (q, _), (k, k_scale) = quantised((40, 4, 32), "e4m3fn", device), quantised((300, 32), "e4m3fn", device)
    weights = torch.randn(40, 4, device=device)
    start, end = ranges(40, 300, device)
    whole = scores.fp8_mqa_logits(q, k, k_scale, weights, start, end, impl="triton")
    for row in (0, 1, 17, 39):
        some = slice(row, row + 1)
        alone = scores.fp8_mqa_logits(q[some], k, k_scale, weights[some], start[some], end[some], impl="triton")
        assert torch.equal(alone[0], whole[row])


@pytest.mark.kernel
def test_a_request_has_the_same_bits_alone(device):
    torch.manual_seed(0)
    layout = LAYOUTS["fp8"]
    q, cache, weights, lens, table = paged_inputs(layout, [[90, 91, 92], [7, 8, 0], [150, 3, 151]], 80, 16, device)
    whole = run_paged((q, cache, weights, lens, table), 155, layout, "triton").unflatten(0, (3, 3))
    for b in range(3):
        some, rows = slice(b, b + 1), slice(3 * b, 3 * b + 3)
        alone = run_paged((q[some], cache, weights[rows], lens[some], table[some]), 155, layout, "triton")
        assert torch.equal(alone, whole[b])


@pytest.mark.kernel
def test_a_nan_key_scores_nan_and_so_is_never_selected(device):
    (q, _), (k, k_scale) = quantised((3, 4, 32), "e4m3fn", device), quantised((9, 32), "e4m3fn", device)
    k[4, 7] = 0x7F
    whole = torch.zeros(3, dtype=torch.int32, device=device), torch.full((3,), 9, dtype=torch.int32, device=device)
    got = scores.fp8_mqa_logits(q, k, k_scale, torch.ones(3, 4, device=device), *whole, impl="triton")
    assert got.isnan().nonzero()[:, 1].tolist() == [4] * 3


@pytest.mark.kernel
def test_an_infinite_key_has_a_score_beside_padded_heads(device):
    """Three heads leave lanes of zeros, and zero times infinity is NaN."""
    q, weights = torch.ones(2, 3, 16, device=device), torch.tensor([[1.0, 2.0, 3.0]] * 2, device=device)
    k = torch.ones(4, 16, device=device)
    k[2] = INF
    bounds = torch.zeros(2, dtype=torch.int32, device=device), torch.full((2,), 4, dtype=torch.int32, device=device)
    want = [[96.0, 96.0, INF, 96.0]] * 2
    assert scores.bf16_mqa_logits(q, k, weights, *bounds, impl="triton").tolist() == want
    lens, table = bounds[1][:, None], torch.zeros(2, 1, dtype=torch.int32, device=device)
    layout = PlainLayout("fp32", 16)
    got = scores.bf16_paged_mqa_logits(q[:, None], k[None], weights, lens, table, 4, layout, impl="triton")
    assert got.tolist() == want


@pytest.mark.kernel
def test_opcheck_kernel(device):
    check_opcheck("triton", device)
