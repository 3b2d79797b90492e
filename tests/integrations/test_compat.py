"""Call sites of FlashMLA, DeepGEMM and vLLM over our operators, against their conventions in float64."""

import math
import re
from pathlib import Path

import pytest
import torch
from support.field_formats import (
    attention,
    close,
    close_scores,
    first,
    fp8,
    latent_bytes,
    planar_blocks,
    within_rounding,
)

from sparse_attn import integrations
from sparse_attn.integrations import deep_gemm, flash_mla, rows, vllm_ops

INF, NAN = math.inf, math.nan
WILD = (-1, -(2**31), 2**31 - 1, 10**6)
README = Path(integrations.__file__).parent / "README.md"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("d_qk", (576, 512))
@pytest.mark.parametrize("lengths", (None, (0, 3, 9, 40, 7)))
@pytest.mark.parametrize("heads", (1, 5))
def test_sparse_fwd(d_qk, lengths, heads):
    tokens, keys, width = 5, 9, 7
    q = torch.randn(tokens, heads + 1, d_qk).bfloat16()[:, :heads]
    kv = torch.randn(keys, 1, d_qk).bfloat16()
    indices = torch.randint(0, keys - 1, (tokens, 1, width), dtype=torch.int32)
    kv[keys - 1] = NAN  # no index names it
    indices[0, 0] = torch.tensor([*WILD, keys, -2, -7])
    indices[1:, 0, 2] = torch.tensor(WILD)
    sink = torch.tensor([0.5, -INF, INF, 0.0, -2.0])[:heads]
    length = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    out = torch.full((tokens, 2 * heads, 512), NAN).bfloat16()[:, ::2]
    got = flash_mla.flash_mla_sparse_fwd(
        q, kv, indices, 0.1, attn_sink=sink, topk_length=length, out=out, return_max_logits=True
    )
    assert got[0] is out
    expected = attention(q, [(kv[:, 0], first(indices[:, 0], lengths))], 0.1, 512, sink)
    close(got[0], expected)
    close_scores(got[1], expected[1])
    close_scores(got[2], expected[2])
    assert got[2][0].isposinf().all() and got[1][0].isneginf().all() and not got[0][0].any()
    plain = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1, 512, sink, length, return_max_logits=False)
    assert plain[1] is None and torch.equal(plain[0], out) and torch.equal(plain[2], got[2])


def test_sparse_fwd_without_keys_or_columns():
    q, kv = torch.randn(2, 3, 576).bfloat16(), torch.randn(4, 1, 576).bfloat16()
    for some_kv, width in ((kv, 0), (kv[:0], 3)):
        indices = torch.zeros(2, 1, width, dtype=torch.int32)
        out, largest, lse = flash_mla.flash_mla_sparse_fwd(q, some_kv, indices, 1.0, return_max_logits=True)
        assert not out.any() and largest.isneginf().all() and lse.isposinf().all()


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int8, torch.float8_e4m3fn))
@pytest.mark.parametrize(("s_q", "lengths"), ((1, None), (1, (4, 0, 99)), (2, (2, 5, 0))))
def test_kvcache_of_656_bytes(dtype, s_q, lengths):
    batch, heads, blocks, block_size, width = 3, 5, 3, 4, 5
    records, meant = latent_bytes(torch.randn(blocks * block_size, 576))
    cache = records.view(blocks, block_size, 1, 656).view(dtype)
    q = torch.randn(batch, s_q, heads, 576).bfloat16()
    indices = torch.randint(0, blocks * block_size, (batch, s_q, width), dtype=torch.int32)
    indices[0, :, 1], indices[2, -1] = -1, torch.tensor([*WILD, blocks * block_size])
    length = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    meta, none = flash_mla.get_mla_metadata(1, 2, anything=3)
    assert none is None and isinstance(meta, flash_mla.FlashMLASchedMeta)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, meta, is_fp8_kvcache=True, indices=indices, topk_length=length
    )
    per_token = None if lengths is None else [n for n in lengths for _ in range(s_q)]
    expected = attention(q.flatten(0, 1), [(meant, first(indices.flatten(0, 1), per_token))], 576**-0.5, 512)
    assert out.shape == (batch, s_q, heads, 512) and lse.shape == (batch, heads, s_q)
    close(out.flatten(0, 1), expected)
    close_scores(lse.transpose(1, 2).flatten(0, 1), expected[2])
    assert lse[2, :, -1].isposinf().all()


@pytest.mark.parametrize("given", ((False, False), (True, False), (False, True), (True, True)))
def test_kvcache_of_584_bytes_and_an_extra_one(given):
    batch, s_q, heads = 3, 1, 2
    cache, meant = planar_blocks(torch.randn(8, 512), 4)
    extra, extra_meant = planar_blocks(torch.randn(6, 512) * 2, 2)
    q = torch.randn(batch, s_q, heads, 512).bfloat16()
    indices = torch.randint(-2, 9, (batch, s_q, 6), dtype=torch.int32)
    extra_indices = torch.randint(-2, 7, (batch, s_q, 3), dtype=torch.int32)
    indices[1], extra_indices[1] = -1, 6
    sink = torch.tensor([0.3, INF])
    lengths = [n if use else None for n, use in zip(((5, 2, 0), (1, 3, 2)), given)]
    length, extra_length = (None if n is None else torch.tensor(n, dtype=torch.int32) for n in lengths)
    out = torch.full((batch, s_q, heads, 512), NAN).bfloat16()
    got, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, flash_mla.get_mla_metadata()[0], softmax_scale=0.05, is_fp8_kvcache=True,
        indices=indices, attn_sink=sink, extra_k_cache=extra, extra_indices_in_kvcache=extra_indices,
        topk_length=length, extra_topk_length=extra_length, out=out, enable_batch_invariant=True,
    )  # fmt: skip
    parts = [
        (meant, first(indices[:, 0], lengths[0])),
        (extra_meant, first(extra_indices[:, 0], lengths[1])),
    ]
    expected = attention(q[:, 0], parts, 0.05, 512, sink)
    assert got is out
    close(out[:, 0], expected)
    close_scores(lse[..., 0], expected[2])
    assert lse[1].isposinf().all() and not out[1].any()


def test_kvcache_of_bf16():
    cache, q = torch.randn(3, 4, 1, 576).bfloat16(), torch.randn(2, 1, 3, 576).bfloat16()
    indices = torch.tensor([[[11, 3, -1]], [[12, -5, 7]]], dtype=torch.int32)
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, indices=indices)
    expected = attention(q[:, 0], [(cache.view(12, 576), indices[:, 0].tolist())], 576**-0.5, 512)
    close(out[:, 0], expected)
    close_scores(lse[..., 0], expected[2])


def decode(**changed):
    given = dict(
        q=torch.zeros(1, 1, 2, 576).bfloat16(), k_cache=torch.zeros(2, 4, 1, 656, dtype=torch.uint8), block_table=None,
        cache_seqlens=None, head_dim_v=512, is_fp8_kvcache=True, indices=torch.zeros(1, 1, 3, dtype=torch.int32),
    )  # fmt: skip
    return flash_mla.flash_mla_with_kvcache(**{**given, **changed})


def records(width):
    return torch.zeros(2, 4, 1, width, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (dict(indices=None), "indices: got None"),
        (dict(causal=True), "causal: got True"),
        (dict(num_splits=torch.zeros(1)), "num_splits: got Tensor"),
        (dict(k_cache=records(352)), "k_cache: got NVFP4 records of 352 bytes"),
        (dict(k_cache=records(528)), "k_cache: got V4.1 fp8 records of 528 bytes"),
        (dict(k_cache=records(288)), "k_cache: got V4.1 FP4 records of 288 bytes"),
        (dict(k_cache=records(584)), "k_cache: got 584 bytes a token for 576 values"),
        (dict(head_dim_v=256), "head_dim_v: got 256"),
        (dict(k_cache=records(656).squeeze(2)), "k_cache: got 3 dimensions"),
        (dict(topk_length=torch.zeros(2, dtype=torch.int32)), "topk_length: got shape"),
        (dict(extra_k_cache=records(656)), "extra_k_cache: got one of"),
        (dict(out=torch.zeros(1, 1, 2, 576).bfloat16()), "out: got shape"),
        (dict(indices=torch.zeros(1, 2, 3, dtype=torch.int32)), "indices: got shape"),
    ],
)
def test_decode_refuses_by_name(changed, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        decode(**changed)
    decode()


def test_row_starts_are_kept_and_right():
    """Sizes around a power of two, whose starts are kept together, and the largest that int32 holds."""
    for tokens in (0, 1, 3, 4, 7, 8):
        dense = torch.zeros(tokens, 5, dtype=torch.int32)
        ragged = rows.ragged_rows("indices", dense)
        assert ragged.indptr.tolist() == [5 * t for t in range(tokens + 1)]
        assert ragged.indices.data_ptr() == dense.data_ptr()
        again = rows.ragged_rows("indices", dense)
        assert again.indptr.data_ptr() == ragged.indptr.data_ptr()
    wide = torch.zeros(1, 1, dtype=torch.int32).expand(3, 2**29)
    assert rows._starts(wide, 3, 2**29).tolist() == [0, 2**29, 2**30, 3 * 2**29]


def scores(q, k, k_scale, weights):
    """float64 [rows, keys] of every pair."""
    dots = torch.einsum("mhd,nd->mhn", q.double(), k.double())
    return (dots.relu() * weights.double().unsqueeze(2)).sum(1) * k_scale.double()


@pytest.mark.parametrize("heads", (1, 3))
@pytest.mark.parametrize("style", ("plain", "tuple", "compressed", "newer", "newer with a plan", "bf16"))
def test_mqa_logits(heads, style):
    tokens, keys, width = 6, 11, 5
    q, k, weights = fp8(tokens, heads, 128), fp8(keys, 128), torch.randn(tokens, heads)
    k_scale = torch.rand(keys) + 0.5
    start = torch.tensor([0, 3, 3, 10, 5, 11], dtype=torch.int32)
    end = torch.tensor([11, 3, 8, 11, 7, 11], dtype=torch.int32)
    common = (weights, start, end)
    expected = scores(q, k, k_scale, weights)
    column = torch.arange(keys)
    expected[(column < start.unsqueeze(1)) | (column >= end.unsqueeze(1))] = -INF
    if style in ("plain", "tuple", "bf16"):
        if style == "plain":
            got = deep_gemm.fp8_mqa_logits(q, (k, k_scale.unsqueeze(1)), *common, clean_logits=False)
        elif style == "tuple":
            got = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), *common, False)
        else:
            got = deep_gemm.fp8_mqa_logits(q, (k, k_scale), *common, logits_dtype=torch.bfloat16)
            assert got.dtype == torch.bfloat16
            return torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=1e-2)
        return close_scores(got, expected)
    packed = torch.full((tokens, width), -INF, dtype=torch.float64)
    for row in range(tokens):
        some = expected[row, int(start[row]) : int(end[row])][:width]
        packed[row, : len(some)] = some
    if style == "compressed":
        got = deep_gemm.fp8_mqa_logits(q, (k, k_scale), *common, clean_logits=False, max_seqlen_k=width)
    elif style == "newer":
        got = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), *common, width)
    else:
        got = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), *common, width, torch.zeros(3, 2))
    close_scores(got, packed)


@pytest.mark.parametrize("two_dims", (True, False))
@pytest.mark.parametrize("next_n", (1, 3))
def test_paged_mqa_logits(two_dims, next_n):
    batch, heads, blocks, block_size, width = 3, 5, 5, 4, 10
    cache = torch.empty(blocks, block_size * 132, dtype=torch.uint8)  # codes of all tokens, then their scales
    codes, k_scale = fp8(blocks * block_size, 128), torch.rand(blocks * block_size) + 0.5
    cache[:, : block_size * 128] = codes.view(torch.uint8).view(blocks, -1)
    cache[:, block_size * 128 :] = k_scale.view(blocks, block_size).view(torch.uint8)
    q, weights = fp8(batch, next_n, heads, 128), torch.randn(batch * next_n, heads)
    table = torch.tensor([[4, 2, 1], [0, 3, 9], [1, -1, 2]], dtype=torch.int32)
    last = torch.tensor([10, 2, 0], dtype=torch.int32)
    limits = last.unsqueeze(1) + torch.arange(1 - next_n, 1, dtype=torch.int32)
    plan = deep_gemm.get_paged_mqa_logits_metadata(limits, block_size, 7)
    assert plan.shape == (8, 2) and plan.dtype == torch.int32
    got = deep_gemm.fp8_fp4_paged_mqa_logits(
        (q, None), cache.view(blocks, block_size, 1, 132), weights, limits if two_dims else last, table, plan, width,
        clean_logits=False,
    )  # fmt: skip
    expected = torch.full((batch * next_n, width), -INF, dtype=torch.float64)
    for row in range(batch * next_n):
        request = row // next_n
        for position in range(max(0, int(limits[request, row % next_n]))):
            slot = int(table[request, position // block_size]) * block_size + position % block_size
            one = (q.flatten(0, 1)[row : row + 1], codes[slot : slot + 1], k_scale[slot : slot + 1])
            expected[row, position] = scores(*one, weights[row : row + 1]).item()
    close_scores(got, expected)


LEAST, MOST = -(2**31), 2**31 - 1
LENGTHS = [LEAST, LEAST + 1, LEAST + 2, -3, -1, 0, 1, 9, MOST]


def test_no_length_of_a_request_wraps():
    """Of its last row; the rows before see one fewer each."""
    lens, next_n, width, codes = torch.tensor(LENGTHS, dtype=torch.int32), 3, 8, fp8(4, 128)
    limits = [min(max(length - next_n + 1 + row, 0), width) for length in LENGTHS for row in range(next_n)]
    rows = len(limits)
    indices = torch.full((rows, width), -7, dtype=torch.int32)
    vllm_ops.top_k_per_row_decode(torch.randn(rows, width), next_n, lens, indices, rows, width, 1, width)
    assert (indices >= 0).sum(1).tolist() == limits
    cache = torch.zeros(1, width * 132, dtype=torch.uint8)
    cache[:, width * 128 :] = torch.ones(width).view(torch.uint8)
    got = deep_gemm.fp8_paged_mqa_logits(
        codes[0].expand(len(LENGTHS), next_n, 2, 128), cache.view(1, width, 1, 132), torch.ones(rows, 2), lens,
        torch.zeros(len(LENGTHS), 1, dtype=torch.int32), None, width,
    )  # fmt: skip
    assert (got > -INF).sum(1).tolist() == limits


def test_no_first_key_of_a_row_wraps():
    keys, width = 6, 4
    start = torch.tensor([MOST, MOST - 1, LEAST, keys, 4], dtype=torch.int32)
    end = torch.tensor([MOST, MOST, MOST, MOST, MOST], dtype=torch.int32)
    q, k, weights = fp8(5, 2, 128), fp8(keys, 128), torch.ones(5, 2)
    got = deep_gemm.fp8_mqa_logits(q, (k, torch.ones(keys)), weights, start, end, max_seqlen_k=width)
    assert (got > -INF).sum(1).tolist() == [0, 0, width, 0, 2]


def test_scores_refuse_by_name():
    q, k, weights = fp8(2, 3, 128), fp8(4, 128), torch.ones(2, 3)
    ends = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="q: got scales beside the values"):
        deep_gemm.fp8_fp4_mqa_logits((q, torch.ones(2, 3)), (k, torch.ones(4)), weights, ends, ends)
    with pytest.raises(TypeError, match="q: got dtype int8"):
        deep_gemm.fp8_mqa_logits(q.view(torch.int8), (k, torch.ones(4)), weights, ends, ends)
    cache, table = torch.zeros(1, 4, 1, 132, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int32)
    paged = (cache, weights, ends, table, None, 4)
    for more in (dict(indices=ends), dict(clean_logits=ends)):
        with pytest.raises(ValueError, match="indices: got a tensor"):
            deep_gemm.fp8_paged_mqa_logits(q.unsqueeze(1), *paged, **more)
    with pytest.raises(ValueError, match="kv_cache: got shape"):
        deep_gemm.fp8_paged_mqa_logits(q.unsqueeze(1), cache[..., :68], *paged[1:])


def chosen(values, k):
    """The k largest, NaN and -inf left out, as a set."""
    order = sorted((-v, i) for i, v in enumerate(values.tolist()) if v == v and v != -INF)
    return {i for _, i in order[:k]}


def check_rows(indices, ranges, logits, k):
    for row, (begin, end) in enumerate(ranges):
        expected = chosen(logits[row, begin : max(begin, end)], k)
        got = indices[row, :k].tolist()
        assert set(got[: len(expected)]) == expected and set(got[len(expected) :]) <= {-1}


def test_top_k_per_row_prefill():
    logits = torch.randn(6, 20)[:, :13]  # a row stride that is not the width
    logits[:, 5], logits[:, 7] = NAN, -INF
    starts = torch.tensor([0, 4, 5, 12, 6, 0], dtype=torch.int32)
    ends = torch.tensor([13, 9, 5, 13, 13, 3], dtype=torch.int32)
    indices = torch.full((6, 6), -7, dtype=torch.int32)
    vllm_ops.top_k_per_row_prefill(logits, starts, ends, indices, 5, *logits.stride(), 4)
    check_rows(indices, list(zip(starts.tolist(), ends.tolist()))[:5], logits, 4)
    assert (indices[5] == -7).all() and (indices[:, 4:] == -7).all()
    with pytest.raises(ValueError, match="stride0, stride1: got 13, 1"):
        vllm_ops.top_k_per_row_prefill(logits, starts, ends, indices, 5, 13, 1, 4)
    with pytest.raises(ValueError, match="indices: got shape"):
        vllm_ops.top_k_per_row_prefill(logits, starts, ends, indices, 6, *logits.stride(), 7)


@pytest.mark.parametrize(("next_n", "two_dims"), ((1, False), (3, False), (3, True)))
def test_top_k_per_row_decode(next_n, two_dims):
    logits = torch.randn(4 * next_n, 11)
    logits[:, 2] = -INF
    lens = torch.tensor([11, 1, 0, 6], dtype=torch.int32)
    limits = lens.unsqueeze(1) - next_n + 1 + torch.arange(next_n, dtype=torch.int32)
    indices = torch.full((4 * next_n, 4), -7, dtype=torch.int32)
    given = limits if two_dims else lens
    vllm_ops.top_k_per_row_decode(logits, next_n, given, indices, 4 * next_n, 11, 1, 4)
    check_rows(indices, [(0, max(0, n)) for n in limits.flatten().tolist()], logits, 4)


@pytest.mark.parametrize("rule", ("ue8m0", "auto"))
def test_index_keys_written_and_gathered(rule):
    blocks, block_size = 3, 4
    cache = torch.full((blocks, block_size, 132), 0x5A, dtype=torch.uint8)
    k = torch.randn(5, 128).bfloat16()
    k[3] = 0
    slots = torch.tensor([9, -1, 2, 11], dtype=torch.int64)  # shorter than k
    vllm_ops.indexer_k_quant_and_cache(k, cache, slots, 128, rule)
    flat = cache.view(blocks, -1)
    for token, slot in ((0, 9), (2, 2), (3, 11)):
        block, offset = divmod(slot, block_size)
        scale = max(float(k[token].abs().max()), 1e-4) / 448
        scale = 2.0 ** math.ceil(math.log2(scale)) if rule == "ue8m0" else scale
        at = block_size * 128 + 4 * offset
        torch.testing.assert_close(flat[block, at : at + 4].view(torch.float32), torch.tensor([scale]))
        codes = flat[block, offset * 128 : offset * 128 + 128].view(torch.float8_e4m3fn)
        torch.testing.assert_close(codes.double() * scale, k[token].double(), rtol=0.07, atol=scale)
    assert (flat[1] == 0x5A).all()  # the skipped token wrote nothing
    table, indptr = torch.tensor([[2, 0], [0, 9]], dtype=torch.int32), torch.tensor([0, 3, 6], dtype=torch.int32)
    for dst_k, dst_scale in (
        (torch.full((8, 128), 0xEE, dtype=torch.uint8), torch.full((8, 4), 0xEE, dtype=torch.uint8)),
        (torch.full((8, 128), 1.0).to(torch.float8_e4m3fn), torch.full((8, 1), NAN)),
    ):
        vllm_ops.cp_gather_indexer_k_quant_cache(cache, dst_k, dst_scale, table, indptr)
        raw, raw_scale = dst_k.view(torch.uint8), dst_scale.view(torch.uint8)
        for row, slot in enumerate((8, 9, 10, 0, 1, 2)):
            block, offset = divmod(slot, block_size)
            assert torch.equal(raw[row], flat[block, offset * 128 : offset * 128 + 128])
            at = block_size * 128 + 4 * offset
            assert torch.equal(raw_scale[row], flat[block, at : at + 4])
        assert not raw[6:].any() and not raw_scale[6:].any()
    with pytest.raises(ValueError, match="quant_block_size: got 64"):
        vllm_ops.indexer_k_quant_and_cache(k, cache, slots, 64, rule)


def test_positions_of_the_older_scores():
    """The ninth argument of fp8_paged_mqa_logits is indices, of fp8_fp4_paged_mqa_logits the dtype of the scores."""
    q, cache, weights = fp8(2, 1, 3, 128), torch.zeros(1, 4, 1, 132, dtype=torch.uint8), torch.ones(2, 3)
    lens, table = torch.ones(2, 1, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    given = cache, weights, lens, table, None, 4, False
    assert deep_gemm.fp8_paged_mqa_logits(q, *given, None).dtype == torch.float32
    with pytest.raises(ValueError, match="indices: got a tensor"):
        deep_gemm.fp8_paged_mqa_logits(q, *given, lens)
    assert deep_gemm.fp8_fp4_paged_mqa_logits((q, None), *given, torch.bfloat16).dtype == torch.bfloat16


def test_examples_of_the_page_run():
    """Each python block of README.md, top to bottom, in one namespace."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    names = {}
    for block in blocks:
        exec(block, names)


@pytest.mark.gpu
def test_prefill_on_a_gpu():
    q, kv = torch.randn(9, 64, 576).bfloat16(), torch.randn(200, 1, 576).bfloat16()
    indices = torch.randint(-1, 201, (9, 1, 128), dtype=torch.int32)
    lengths = [0, 1, 64, 128, 200, 3, 127, 100, 5]
    length = torch.tensor(lengths, dtype=torch.int32).cuda()
    got = flash_mla.flash_mla_sparse_fwd(
        q.cuda(), kv.cuda(), indices.cuda(), 0.05, topk_length=length, return_max_logits=True
    )
    expected = attention(q, [(kv[:, 0], first(indices[:, 0], lengths))], 0.05, 512)
    within_rounding(got[0].cpu(), expected)
    for part, wanted in zip(got[1:], expected[1:3]):
        torch.testing.assert_close(part.cpu().double(), wanted, rtol=1e-4, atol=1e-4)
