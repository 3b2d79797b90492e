"""Attention into given tensors: lengths, lse inf of rows without keys, and rows' largest scores, by every kernel."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import big
from expecttest import assert_expected_inline
from support.caches import filled_cache
from support.extremes import INF, INT_MAX, NAN

from sparse_attn import LatentFp8Layout, PlainLayout, PlanarFp8Layout, Ragged, sparse_attn_decode
from sparse_attn.framework.target import target_of
from sparse_attn.ops.attention.sparse import dispatch, sparse_attn_into
from sparse_attn.ops.attention.sparse.problem import kv_caches, problem_of
from sparse_attn.testing import compare
from sparse_attn.testing.ops import opcheck, schema

LATENT, PLANAR = LatentFp8Layout(512, 64), PlanarFp8Layout(448, 64)
ROWS, NARROW, SLIM = PlainLayout("bf16", 512, 64), PlainLayout("bf16", 512, 0), PlainLayout("bf16", 256, 64)
SMALL = {
    "fp8": LatentFp8Layout(64, 16, 32),
    "planar": PlanarFp8Layout(50, 2, 2),
    "fp32": PlainLayout("fp32", 48, 0),
}


def dense(tokens, width, slots, device):
    """Rows of equal width, with wild slots in them, and lengths that leave some of each out."""
    indices = torch.randint(0, slots, (tokens, width), dtype=torch.int32, device=device)
    wild = torch.tensor([-1, INT_MAX, slots], dtype=torch.int32, device=device)
    indices[:, 2::7] = wild[torch.arange(len(range(2, width, 7)), device=device) % 3]
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=device) * width
    lengths = torch.randint(0, width + 1, (tokens,), dtype=torch.int32, device=device)
    for row, length in zip((0, 1, 2, 3), (width, INT_MAX, 0, -5)):
        if row < tokens:
            lengths[row] = length
    return Ragged(indices.flatten(), starts), lengths


def shorter(ragged, lengths):
    """The same rows without what lies behind their lengths."""
    width = int(ragged.indptr[1])
    dense = ragged.indices.view(-1, width)
    length = lengths.clamp(0, width)
    indptr = torch.nn.functional.pad(length.cumsum(0, dtype=torch.int32), (1, 0))
    return Ragged(dense[torch.arange(width, device=dense.device) < length.unsqueeze(1)], indptr)


def into(q, cache, ragged, layout, *, with_max=False, **options):
    tokens, heads, _ = q.shape
    out = torch.full((tokens, heads, layout.value_dim), NAN, dtype=q.dtype, device=q.device)
    lse = torch.full((tokens, heads), NAN, device=q.device)
    largest = torch.full((tokens, heads), NAN, device=q.device) if with_max else None
    sparse_attn_into(q, cache, ragged, out, lse, layout=layout, max_logits=largest, **options)
    return out, lse, largest


def slow_max(q, values, ragged, lengths, scale):
    """float64 [tokens, heads], of plain ``values`` [slots, dim]."""
    found = torch.full(q.shape[:2], -INF, dtype=torch.float64)
    width = int(ragged.indptr[1])
    for token, row in enumerate(ragged.indices.view(-1, width).tolist()):
        length = width if lengths is None else min(max(int(lengths[token]), 0), width)
        named = [slot for slot in row[:length] if 0 <= slot < len(values)]
        if named:
            found[token] = (values[named].double().cpu() @ q[token].double().cpu().T).mul(scale).amax(0)
    return found


def test_schema():
    assert_expected_inline(
        schema("sparse_attn_into"),
        """sparse_attn::sparse_attn_into(Tensor q, Tensor cache, Tensor indices, Tensor indptr, Tensor? lengths, float scale, str layout, Tensor? extra_cache, Tensor? extra_indices, Tensor? extra_indptr, Tensor? extra_lengths, str extra_layout, Tensor? sink, bool batch_invariant, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? max_logits, bool inf_lse, str impl) -> ()""",
    )


def check_small(name, impl, device):
    torch.manual_seed(0)
    layout, tokens, heads = SMALL[name], 5, 3
    ragged, lengths = dense(tokens, 9, 20, device)
    cache = filled_cache(layout, 4, 5, ragged, device)
    q = torch.randn(tokens, heads, layout.dim, device=device)
    sink = torch.tensor([0.3, -INF, INF], device=device)
    extra = dict(extra_cache=cache, extra_layout=layout, scale=0.2, sink=sink)
    for given in (None, lengths):
        some = ragged if given is None else shorter(ragged, given)
        out, lse, largest = into(q, cache, ragged, layout, lengths=given, with_max=True, inf_lse=True, extra_ragged=ragged,
                                 extra_lengths=given, impl=impl, **extra)  # fmt: skip
        want = sparse_attn_decode(q, cache, some, layout=layout, extra_ragged=some, impl="reference", **extra)
        torch.testing.assert_close(out, want.out, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse, torch.where(want.lse.isneginf(), INF, want.lse), rtol=1e-4, atol=1e-4)
        values = layout.decode(cache, torch.arange(20, device=device))
        expected = slow_max(q, values.nan_to_num(0), ragged, given, 0.2)
        torch.testing.assert_close(largest.double().cpu(), expected, rtol=1e-4, atol=1e-4)
        plain = into(
            q, cache, ragged, layout, lengths=given, extra_ragged=ragged, extra_lengths=given, impl=impl, **extra
        )
        assert torch.equal(plain[0], out) and plain[2] is None
        assert torch.equal(torch.where(plain[1].isneginf(), INF, plain[1]), lse)


@pytest.mark.parametrize("name", SMALL)
def test_reference(name):
    check_small(name, "reference", "cpu")


@pytest.mark.kernel
@pytest.mark.parametrize("name", SMALL)
def test_portable_kernel(name, device):
    check_small(name, "triton", device)


def check_opcheck(impl, device):
    layout = SMALL["fp32"]
    ragged, lengths = dense(3, 9, 20, device)
    cache = filled_cache(layout, 4, 5, ragged, device)
    q = torch.randn(3, 2, 48, device=device)
    written = torch.empty(3, 2, 48, device=device), torch.empty(3, 2, device=device), torch.empty(3, 2, device=device)
    opcheck("sparse_attn_into", q, cache, *ragged, lengths, 0.3, layout.name, None, None, None, None, "", None, False,
            *written, True, impl)  # fmt: skip


def test_opcheck_reference():
    check_opcheck("reference", "cpu")


@pytest.mark.kernel
def test_opcheck_kernel(device):
    check_opcheck("triton", device)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (dict(lengths=torch.zeros(2, dtype=torch.int64)), TypeError, "lengths: got dtype int64"),
        (dict(lengths=torch.zeros(3, dtype=torch.int32)), ValueError, "lengths: got shape"),
        (dict(lengths=torch.zeros(4, dtype=torch.int32)[::2]), ValueError, "lengths: got stride 2"),
        (dict(extra_lengths=torch.zeros(2, dtype=torch.int32)), ValueError, "extra_lengths: got a tensor"),
        (dict(out=torch.zeros(2, 3, 47)), ValueError, "out: got shape"),
        (dict(out=torch.zeros(2, 3, 48).half()), TypeError, "out: got dtype"),
        (dict(out=torch.zeros(2, 3, 96)[..., ::2]), ValueError, "out: got strides"),
        (dict(lse=torch.zeros(3, 2).T), ValueError, "lse: got strides"),
        (dict(max_logits=torch.zeros(3, 3)), ValueError, "max_logits: got shape"),
        (dict(cache=torch.zeros(20, 47)), ValueError, "cache: got shape"),
        (dict(cache=torch.zeros(20, 48).half()), TypeError, "cache: got dtype"),
    ],
)
def test_refusals(change, error, says):
    ragged, _ = dense(2, 4, 20, "cpu")
    good = dict(
        q=torch.zeros(2, 3, 48), cache=torch.zeros(20, 48), ragged=ragged, out=torch.zeros(2, 3, 48),
        lse=torch.zeros(2, 3), scale=1.0, layout=SMALL["fp32"],
    )  # fmt: skip
    sparse_attn_into(**good)
    with pytest.raises(error, match=f"^{says}"):
        sparse_attn_into(**(good | change))


FORMS = {  # kernel, layout, heads, tokens, indices of a row, whether max_logits are wanted
    "whole rows": ("hopper.decode_fp8", LATENT, 128, 150, 300, False),
    "split rows": ("hopper.decode_fp8", LATENT, 128, 3, 1000, False),
    "whole and split": ("hopper.decode_fp8", LATENT, 128, 67, 2048, False),
    "two parts": ("hopper.decode_fp8", LATENT, 128, 34, 2048, False),
    "planar": ("hopper.decode_fp8", PLANAR, 64, 5, 700, False),
    "few heads": ("hopper.swap_ab", LATENT, 16, 150, 300, False),
    "few heads, split": ("hopper.swap_ab", PLANAR, 9, 3, 1000, False),
    "few heads, largest": ("hopper.swap_ab", ROWS, 16, 300, 260, True),
    "few heads, largest, split": ("hopper.swap_ab", ROWS, 32, 3, 1500, True),
    "few heads, largest, two parts": ("hopper.swap_ab", ROWS, 7, 67, 2048, True),
    "prefill": ("hopper.prefill_bf16", ROWS, 128, 300, 500, True),
    "prefill without rope": ("hopper.prefill_bf16", NARROW, 64, 200, 130, True),
    "prefill without maximum": ("hopper.prefill_bf16", ROWS, 64, 200, 130, False),
    "blocks of heads": ("hopper.swap_ab", ROWS, 80, 300, 200, True),
    "blocks of heads, split": ("hopper.swap_ab", LATENT, 128, 7, 900, True),
    "portable": ("portable", SLIM, 80, 300, 200, True),
    "portable, split": ("portable", NARROW, 128, 3, 900, True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("sink", (False, True))
@pytest.mark.parametrize("with_lengths", (False, True))
@pytest.mark.parametrize("form", FORMS)
def test_every_kernel(form, with_lengths, sink, device):
    """Bits are those of the operator that returns them, over rows without what lies behind their lengths."""
    if not target_of(torch.device("cuda")).is_hopper:
        pytest.skip("kernels for sm_90")
    torch.manual_seed(0)
    kernel, layout, heads, tokens, width, with_max = FORMS[form]
    slots = 64 * 40
    ragged, lengths = dense(tokens, width, slots, device)
    plain = isinstance(layout, PlainLayout)
    cache = filled_cache(layout, 40, 64, ragged, device)
    q = torch.randn(tokens, heads, layout.dim, device=device).bfloat16()
    some_sink = torch.randn(heads, device=device) if sink else None
    second = not plain and layout is PLANAR
    extra = dict(extra_cache=cache, extra_layout=layout) if second else {}
    given = lengths if with_lengths else None
    options = dict(scale=0.05, sink=some_sink, layout=layout, **extra)
    if second:
        options |= dict(extra_ragged=ragged)
    names = (cache.flatten(0, 1) if plain else cache), *ragged, layout.name
    others = (cache, *ragged, layout.name) if second else (None, None, None, "")
    problem = problem_of(q, *kv_caches(*names, *others), 0.05, None, with_max)
    assert dispatch.choose(problem, target_of(q.device)).kernel.name == kernel
    rows = cache.flatten(0, 1) if plain else cache
    asked = dict(lengths=given, inf_lse=True, with_max=with_max)
    if second:
        asked |= dict(extra_lengths=given)
    out, lse, largest = into(q, rows, ragged, **asked, **options)
    again = into(q, rows, ragged, **asked, **options)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    want = into(q, rows, ragged, **asked, **options, impl="reference")
    compare.assert_close(out, want[0], compare.DECODE_OUT)
    compare.assert_close(lse, want[1], compare.DECODE_LSE)
    if with_max:
        compare.assert_close(largest, want[2], (1e-6, 2.01 / 65536, 1.0), "max_logits")
        assert torch.equal(largest, again[2])
        without = into(q, rows, ragged, **(asked | dict(with_max=False)), **options)
        compare.assert_close(out, without[0], compare.DECODE_OUT)
    elif not with_lengths:
        same = sparse_attn_decode(q, cache, ragged, **options)
        assert torch.equal(same.out, out) and torch.equal(torch.where(same.lse.isneginf(), math.inf, same.lse), lse)


@pytest.mark.gpu
def test_scores_of_every_size(device):
    """The largest is that of all scores: NaN left out, -inf where there is none, whatever the lagged maximum is."""
    torch.manual_seed(1)
    for heads in (16, 64, 80) if big(device) else (16,):
        q = torch.randn(200, heads, 576, device=device).bfloat16()
        kv = (torch.randn(500, 576, device=device) * torch.logspace(-3, 2, 500, device=device)[:, None]).bfloat16()
        kv[7] = NAN
        ragged, lengths = dense(200, 300, 500, device)
        options = dict(scale=0.3, layout=ROWS, lengths=lengths, with_max=True)
        low, high = largest_within(q, kv, ragged, lengths, 0.3)
        for impl in ("auto", "reference"):
            got = into(q, kv, ragged, **options, impl=impl)[2].double()
            rounding = 2.01 / 65536 * torch.where(got.isfinite(), got.abs(), 0.0)
            assert bool(((low - rounding <= got) & (got <= high + rounding)).all()), f"{heads} heads, {impl}"


def largest_within(q, kv, ragged, lengths, scale):
    """fp64 [rows, heads] twice: what a row's largest score is at least and at most where each of the sums over 16
    columns that a score consists of is rounded once to fp32."""
    width = int(ragged.indptr[1])
    slots, columns = ragged.indices.view(-1, width).long(), torch.arange(width, device=q.device)
    seen = (slots >= 0) & (slots < len(kv)) & (columns < lengths.unsqueeze(1))
    keys = kv.double()[slots.clamp(0, len(kv) - 1)]  # [rows, width, columns]
    scores = scale * torch.bmm(q.double(), keys.transpose(1, 2))
    off = scale * (q.shape[-1] // 16) * 2.0**-24 * torch.bmm(q.double().abs(), keys.abs().transpose(1, 2))
    seen = seen.unsqueeze(1) & ~scores.isnan()
    return tuple(torch.where(seen, bound, -math.inf).amax(-1) for bound in (scores - off, scores + off))
