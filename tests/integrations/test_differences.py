"""call-sites.md's "Differences from vLLM, FlashMLA, DeepGEMM": what it says of this library, a test per row."""

import math
import re
from pathlib import Path

import pytest
import torch
from support.extremes import INF, INT_MAX, INT_MIN, NAN

import sparse_attn as sa
from sparse_attn.ops.attention.sparse import lse_to_base2, lse_to_flashmla, sparse_attn_into
from sparse_attn.ops.indexer.scores import bf16_mqa_logits
from sparse_attn.ops.layers.router import biased_grouped_topk

PAGE = (Path(__file__).parents[2] / "scripts" / "docs" / "pages" / "call-sites.md").read_text()
ROWS = {}


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.kernel)])
def impl(request):
    return request.param


def row(title):
    def note(test):
        ROWS.setdefault(title, []).append(test)
        return test

    return note


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def select(scores, k, device, impl):
    scores = torch.tensor([scores], dtype=torch.float32, device=device)
    return sa.top_k_per_row(scores, k, impl=impl)[0].tolist()


@row("top-k: order, ties")
def test_selected_columns_ascend_and_the_lowest_of_equal_ones_win(device, impl):
    assert select([1.0, 5.0, 3.0, 3.0, 3.0, -0.0, 9.0], 4, device, impl) == [1, 2, 3, 6]


@row("top-k: fewer than k finite scores")
def test_what_is_not_finite_is_not_selected(device, impl):
    assert select([-INF, 2.0, NAN, -INF, INF, -NAN], 4, device, impl) == [1, 4, -1, -1]


@row("scores outside a row's range")
def test_scores_outside_of_a_rows_range_are_minus_infinity(device, impl):
    q, k = torch.ones(2, 1, 16, device=device), torch.full((5, 16), NAN, device=device)
    k[1:4] = 1.0
    weights, ranges = torch.ones(2, 1, device=device), (ints(device, 1, 3), ints(device, 3, 3))
    logits = bf16_mqa_logits(q, k, weights, *ranges, impl=impl)
    assert logits.tolist() == [[-INF, 16.0, 16.0, -INF, -INF], [-INF] * 5]


@row("dtype of scores")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_fp32(device, impl, dtype):
    """256 and 1/256, of which neither bf16 nor fp16 holds the sum."""
    q, k = torch.ones(1, 1, 16, device=device, dtype=dtype), torch.zeros(1, 16, device=device, dtype=dtype)
    k[0, :2] = torch.tensor([256, 2.0**-8])
    logits = bf16_mqa_logits(q, k, torch.ones(1, 1, device=device), ints(device, 0), ints(device, 1), impl=impl)
    assert logits.tolist() == [[256 + 2.0**-8]] and logits.dtype == torch.float32


@row("lengths of decode rows")
def test_every_decode_row_has_a_length_of_its_own(device, impl):
    plan = sa.build_step_plan(
        ints(device, 0, 2, 4, 6), ints(device, 9, 1, 0), torch.zeros(3, 2, dtype=torch.int32, device=device),
        torch.arange(6, device=device), num_decodes=3, next_n=2, max_context=16, impl=impl,
    )  # fmt: skip
    assert plan.context_lens.tolist() == [[8, 9], [0, 1], [0, 0]]


@row("lists of keys")
def test_dense_lists_and_their_lengths_become_ragged(device, impl):
    topk = ints(device, [[4, -1, 2]], [[7, 1, 0]])
    rows = sa.build_ragged_indices_from_dense(topk.squeeze(1), ints(device, 3, 2), num_rows=8, impl=impl)
    assert rows.indptr.tolist() == [0, 2, 4] and rows.indices.tolist() == [4, 2, 7, 1, -1, -1]


@row("lists of keys")
def test_an_offset_is_never_added_to_none(device, impl):
    topk = ints(device, [-1, 0], [INT_MIN, 1])
    rows = sa.build_ragged_indices_from_dense(topk, num_rows=30, row_offsets=ints(device, 10, 20), impl=impl)
    assert rows.indptr.tolist() == [0, 1, 2] and rows.indices.tolist()[:2] == [10, 21]


def attend(indices, indptr, device, impl, kv=None, scale=1.0, **options):
    """Two heads; the second scores nothing."""
    kv = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, NAN]], device=device) if kv is None else kv
    q = torch.tensor([[1.0, 0.0], [0.0, 0.0]], device=device).repeat(len(indptr) - 1, 1, 1)
    rows = sa.Ragged(ints(device, *indices), ints(device, *indptr))
    return sa.sparse_attn_prefill(q, kv, rows, scale=scale, d_v=1, impl=impl, **options)


@row("invalid indices")
def test_indices_outside_of_the_rows_are_none(device, impl):
    plain = attend([0, 1], [0, 2], device, impl)
    wild = attend([0, -1, 3, INT_MAX, INT_MIN, 1], [0, 6], device, impl)
    torch.testing.assert_close(wild, plain)


@row("NaN in a key that is named")
@pytest.mark.parametrize(
    "layout", [sa.LatentFp8Layout(32, 16, 32), sa.PlanarFp8Layout(32, 16, 32), sa.PlainLayout("bf16", 48)]
)
def test_nan_reaches_the_rows_that_name_it_and_no_other(device, impl, layout):
    check_nan(layout, 2, device, impl)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize(
    "layout", [sa.LatentFp8Layout(512, 64), sa.PlanarFp8Layout(448, 64), sa.PlainLayout("bf16", 512, 64)]
)
@pytest.mark.parametrize("tokens", [2, 200])
def test_nan_does_so_in_every_kernel(heads, layout, tokens):
    check_nan(layout, heads, "cuda", "triton", tokens)


def check_nan(layout, heads, device, impl, tokens=2):
    cache = sa.allocate_cache(layout, 2, 4, device)
    values = torch.ones(8, layout.dim, device=device)
    values[5:] = NAN
    layout.encode(cache, torch.arange(8, device=device), values)
    q = torch.ones(tokens, heads, layout.dim, device=device, dtype=torch.bfloat16)
    names = torch.full((tokens, 300), 1, dtype=torch.int32, device=device)
    names[1::2, 150] = 5
    rows = sa.build_ragged_indices_from_dense(names)
    out, lse = sa.sparse_attn_decode(q, cache, rows, scale=0.01, layout=layout, impl=impl)
    assert out[::2].isfinite().all() and lse[::2].isfinite().all()
    assert out[1::2].isnan().all() and lse[1::2].isnan().all()


@row("lse")
def test_lse_is_natural_by_token_and_minus_infinity_for_none(device, impl):
    out, lse = attend([0, 1], [0, 2, 2], device, impl, sink=torch.zeros(2, device=device))
    want = torch.tensor([[math.log(math.e + math.e**3), math.log(2)], [-INF, -INF]], device=device)
    torch.testing.assert_close(lse, want)
    assert not out[1].any()
    assert lse_to_flashmla(lse)[1].tolist() == [INF, INF]
    torch.testing.assert_close(lse_to_base2(lse)[0], torch.log2(torch.exp(want[0])))


@row("max_logits")
def test_attention_returns_out_and_lse(device, impl):
    assert attend([0], [0, 1], device, impl)._fields == ("out", "lse")
    q, kv = torch.full((1, 1, 16), 2.0, device=device), torch.tensor([[1.0], [3.0]], device=device).expand(2, 16)
    out, lse, largest = (torch.empty(*shape, device=device) for shape in ((1, 1, 16), (1, 1), (1, 1)))
    rows = sa.Ragged(ints(device, 0, 1), ints(device, 0, 2))
    layout = sa.PlainLayout("fp32", 16)
    sparse_attn_into(
        q, kv.contiguous(), rows, out, lse, scale=0.1, layout=layout, max_logits=largest, inf_lse=True, impl=impl
    )
    torch.testing.assert_close(largest.item(), 9.6, rtol=1e-5, atol=1e-5)


@row("scale")
def test_scale_has_no_default(device, impl):
    rows = sa.Ragged(ints(device, 0), ints(device, 0, 1))
    with pytest.raises(TypeError, match="scale"):
        sa.sparse_attn_prefill(torch.ones(1, 1, 16), torch.ones(1, 16), rows, d_v=16, impl=impl)
    torch.testing.assert_close(attend([0], [0, 1], device, impl, scale=0.5).lse[0, 0].item(), 0.5)


@row("sink")
def test_sinks_are_natural_unscaled_and_cut_to_the_heads(device, impl):
    plain = attend([0, 1], [0, 2], device, impl, scale=0.5)
    sinks = torch.tensor([-INF, INF, NAN], device=device)
    out, lse = attend([0, 1], [0, 2], device, impl, scale=0.5, sink=sinks)
    torch.testing.assert_close(out[0, 0], plain.out[0, 0])
    assert out[0, 1] == 0
    torch.testing.assert_close(lse, plain.lse)
    halved = attend([0, 1], [0, 2], device, impl, scale=0.5, sink=plain.lse[0])
    torch.testing.assert_close(halved.out, plain.out / 2)


@row("heads, keys, blocks")
@pytest.mark.parametrize("heads, keys, block_size", [(1, 1, 1), (5, 3, 7), (128, 65, 2)])
def test_any_number_of_heads_keys_and_slots_of_a_block(device, impl, heads, keys, block_size):
    layout = sa.PlainLayout("fp32", 16)
    cache = torch.ones(keys, block_size, 16, device=device)
    rows = sa.build_ragged_indices_from_dense(ints(device, list(range(keys))))
    out, lse = sa.sparse_attn_decode(
        torch.zeros(1, heads, 16, device=device), cache, rows, scale=1.0, layout=layout, impl=impl
    )
    torch.testing.assert_close(out, torch.ones_like(out))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(keys)))


def gathered(cache, layout, impl):
    """The row of slot 0, fp32."""
    one = ints(cache.device, [0]), ints(cache.device, 0, 1)
    return sa.gather_kv_cache(cache, *one, 1, layout, dtype=torch.float32, impl=impl)


@row("scales of 656-byte rows")
@pytest.mark.parametrize("scale", [2.0**-126, 1e-6, 0.3, 2.0**60])
def test_a_scale_is_read_as_it_is_stored(device, impl, scale):
    layout = sa.LatentFp8Layout(16, 0, 16)
    cache = sa.allocate_cache(layout, 1, 1, device)
    cache[0, 0, :16] = 0x38  # 1.0
    cache[0, 0, 16:20] = torch.tensor([scale]).view(torch.uint8).to(device)
    rows = gathered(cache, layout, impl)
    assert rows[0].tolist() == [torch.tensor(scale).item()] * 16


@row("scales of 656-byte rows")
@pytest.mark.parametrize("rule, value, stored", [
    ("raw", 3.0, 3 / 448), ("raw", 2.0**-20, 2.0**-20 / 448), ("pow2", 3.0, 2.0**-7), ("pow2", 2.0**-20, 2.0**-13),
])  # fmt: skip
def test_a_scale_is_written_as_its_layout_says(device, impl, rule, value, stored):
    layout = sa.LatentFp8Layout(16, 0, 16, scale_rule=rule)
    cache = sa.allocate_cache(layout, 1, 1, device)
    latent = torch.full((1, 16), value, device=device)
    sa.write_kv_cache(latent, latent[:, :0], cache, torch.zeros(1, dtype=torch.int64, device=device), layout, impl=impl)
    assert cache[0, 0, 16:20].contiguous().view(torch.float32).item() == torch.tensor(stored).item()


@row("fp8 flavour")
def test_a_flavour_is_the_caches_own(device, impl):
    """The same bytes are half as much in e4m3fnuz; both in one launch."""
    layouts = [sa.LatentFp8Layout(16, 0, 16, flavour) for flavour in ("e4m3fn", "e4m3fnuz")]
    found = []
    for layout in layouts:
        cache = sa.allocate_cache(layout, 1, 1, device)
        cache[0, 0, :16] = 0x38
        cache[0, 0, 16:20] = torch.tensor([1.0]).view(torch.uint8).to(device)
        rows = gathered(cache, layout, impl)
        found.append(rows[0, 0].item())
    assert found == [1.0, 0.5]


@row("router: logits that are not finite")
def test_nan_logits_are_chosen_last_and_infinite_ones_score_one(device, impl):
    logits = torch.tensor([[NAN, INF, 0.0, NAN]], device=device)
    weights, ids = biased_grouped_topk(
        logits, torch.zeros(4, device=device), top_k=3, num_groups=1, top_groups=1, renormalise=False, impl=impl
    )
    assert ids.tolist() == [[1, 2, 0]] and weights.tolist() == [[1.0, 0.5, 0.0]]


def test_every_row_of_the_page_is_held_here():
    table = PAGE.split("## Differences from vLLM, FlashMLA, DeepGEMM")[1].split("\n## ")[0]
    assert re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE) == list(ROWS)
