"""Indexer queries: the reference against scalar arithmetic and a table of fp8 values, the kernel against it by bits."""

from __future__ import annotations

import math
import struct

import numpy
import pytest
import torch
from expecttest import assert_expected_inline
from support.extremes import INT_MAX, INT_MIN

from sparse_attn.fp8 import fp8_decode
from sparse_attn.layout import INDEX_AMAX_FLOOR, IndexFp8Layout, PlainLayout
from sparse_attn.ops.indexer.queries import hadamard_transform, indexer_q_rope_quant, reference
from sparse_attn.ops.layers.rope import rope_table
from sparse_attn.testing.ops import opcheck, schema

NAN = float("nan")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WILD = [3, -1, 0, INT_MAX, INT_MIN, 15, 16]  # a table of 16 rows: positions 3, 0 and 15 are real
FP8 = [IndexFp8Layout(16, flavour, rule) for flavour in ("e4m3fn", "e4m3fnuz") for rule in ("pow2", "raw")]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def inputs(tokens, heads, dim, width, *, dtype=torch.bfloat16, rows=16, device="cpu", seed=0, positions=None):
    """(q, weights, positions, cos_sin), none contiguous; magnitudes over many powers of two, one vector of zeros."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, 2 * dim, generator=generator)
    q = q * 2.0 ** torch.randint(-12, 9, (tokens, heads, 1), generator=generator)
    q[tokens // 2, 0] = 0
    weights = torch.randn(heads, tokens, generator=generator)
    if positions is None:
        positions = torch.randint(0, rows, (tokens,), generator=generator, dtype=torch.int32)
    else:
        positions = torch.tensor(positions, dtype=torch.int32)
    wide = torch.stack([positions, torch.full_like(positions, -7)], 1).to(device)
    table = torch.cat([rope_table(rows, width, 1e4), torch.full((rows, 3), NAN)], 1).to(device)
    return q.to(dtype).to(device)[..., ::2], weights.to(device).T, wide[:, 0], table[:, :width]


def code_table(flavour):
    """fp8 values by the format's definition: sign, 4 exponent bits, 3 mantissa bits."""
    bias = 7 if flavour == "e4m3fn" else 8
    values = []
    for code in range(128):
        exponent, mantissa = code >> 3, code & 7
        values.append(math.ldexp(mantissa + 8 * (exponent > 0), max(exponent, 1) - 3 - bias))
    return values[:127] if flavour == "e4m3fn" else values


def slow_encode(value, flavour, table):
    limit = 448.0 if flavour == "e4m3fn" else 224.0
    size = min(abs(value), limit)
    code = min(range(len(table)), key=lambda c: (abs(table[c] - size), c % 2))
    negative = math.copysign(1, value) < 0
    return code | (128 if negative and (code or flavour == "e4m3fn") else 0)


def slow_query(q, weights, positions, cos_sin, start, interleaved, hadamard, weight_scale, layout):
    """Scalar fp32 arithmetic, one element at a time."""
    f = numpy.float32
    tokens, heads, dim = q.shape
    width = cos_sin.shape[1]
    half = width // 2
    table = code_table(layout.flavour)
    codes, folded = numpy.zeros((tokens, heads, dim), numpy.uint8), numpy.zeros((tokens, heads), f)

    def rounded(vector):
        return torch.tensor(numpy.array(vector, f)).to(q.dtype).float().numpy()

    for t, position in enumerate(positions.tolist()):
        if not 0 <= position < len(cos_sin):
            continue
        cos, sin = cos_sin[position, :half].numpy(), cos_sin[position, half:].numpy()
        for h in range(heads):
            vector = list(q[t, h].float().numpy())
            for i in range(half):
                a, b = (start + 2 * i, start + 2 * i + 1) if interleaved else (start + i, start + half + i)
                x, y = vector[a], vector[b]
                vector[a], vector[b] = f(x * cos[i]) - f(y * sin[i]), f(y * cos[i]) + f(x * sin[i])
            vector = rounded(vector)
            if hadamard:
                vector = rounded(slow_hadamard(list(vector)))
            scale = f(f(max(max(abs(vector)), f(INDEX_AMAX_FLOOR))) / f(448 if layout.flavour == "e4m3fn" else 224))
            if layout.scale_rule == "pow2":
                mantissa, exponent = math.frexp(float(scale))
                scale = f(math.ldexp(1, exponent - 1 if mantissa == 0.5 else exponent))
            codes[t, h] = [slow_encode(float(f(v) / scale), layout.flavour, table) for v in vector]
            folded[t, h] = f(f(weights[t, h].float().numpy()) * f(weight_scale)) * scale
    return torch.from_numpy(codes), torch.from_numpy(folded)


def slow_hadamard(values):
    """The fast transform, nearest neighbours first: the order of the sums decides the bits."""
    f, dim, half = numpy.float32, len(values), 1
    while half < dim:
        for i in range(dim):
            if not i & half:
                a, b = values[i], values[i | half]
                values[i], values[i | half] = f(a + b), f(a - b)
        half *= 2
    return [f(v * f(dim**-0.5)) for v in values]


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("start", [0, 8])
@pytest.mark.parametrize("layout", FP8, ids=lambda layout: layout.name)
def test_reference_matches_scalars(layout, start, interleaved, hadamard):
    for dtype in DTYPES:
        arguments = inputs(7, 3, 16, 8, dtype=dtype, positions=WILD)
        got = indexer_q_rope_quant(
            *arguments, start=start, interleaved=interleaved, hadamard=hadamard, weight_scale=0.37, layout=layout
        )
        query, weights = slow_query(*arguments, start, interleaved, hadamard, 0.37, layout)
        assert torch.equal(got.query, query) and torch.equal(got.weights, weights)


def test_hadamard_is_orthonormal_and_matches_its_matrix():
    matrix = torch.ones(1, 1)
    for _ in range(7):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    x = torch.randn(5, 128)
    torch.testing.assert_close(hadamard_transform(x), x @ matrix / 128**0.5)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x)), x)
    assert hadamard_transform(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"x: got shape \[2, 12\]"):
        hadamard_transform(torch.zeros(2, 12))


def test_dequantised_scores_equal_plain_scores():
    """What it is for: relu(q . k) * w with codes and folded weights, against the same without quantisation."""
    q, weights, positions, table = inputs(6, 4, 128, 64, dtype=torch.float32)
    arguments = dict(start=0, interleaved=False, weight_scale=0.25)
    fp8 = indexer_q_rope_quant(q, weights, positions, table, layout=IndexFp8Layout(128), **arguments)
    plain = indexer_q_rope_quant(q, weights, positions, table, layout=PlainLayout("fp32", 128), **arguments)
    assert torch.equal(plain.weights, weights * 0.25)
    keys = torch.randn(9, 128)
    score = lambda out, values: ((values @ keys.T).relu() * out.weights.unsqueeze(2)).sum(1)  # noqa: E731
    got, want = score(fp8, fp8_decode(fp8.query, "e4m3fn")), score(plain, plain.query)
    assert (got - want).norm() < 0.08 * want.norm()


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_plain_layout_rounds_to_its_dtype(name):
    layout = PlainLayout(name, 16)
    for dtype in DTYPES:
        q, weights, positions, table = inputs(7, 2, 16, 8, dtype=dtype, positions=WILD)
        got = indexer_q_rope_quant(
            q, weights, positions, table, start=8, interleaved=True, weight_scale=2.0, layout=layout
        )
        live = torch.tensor([0, 2, 5])
        rotated = reference.apply_rope(q, positions, table, 8, True, False)
        assert got.query.dtype == layout.dtype and torch.equal(got.query[live], rotated[live].to(layout.dtype))
        assert torch.equal(got.weights[live], weights[live] * 2)
        dead = torch.tensor([1, 3, 4, 6])
        assert not got.query[dead].any() and not got.weights[dead].any()


def poisoned(device="cpu", **options):
    """Padded rows hold NaN everywhere."""
    q, weights, positions, table = inputs(7, 3, 16, 8, positions=WILD, device=device, **options)
    dead = [1, 3, 4, 6]
    q[dead], weights[dead] = NAN, NAN
    return q, weights, positions, table


@pytest.mark.parametrize("layout", [FP8[0], FP8[3], PlainLayout("bf16", 16)], ids=lambda layout: layout.name)
def test_reference_padding_ignores_nan(layout):
    out = indexer_q_rope_quant(*poisoned(), start=0, interleaved=True, weight_scale=1.0, layout=layout)
    assert not out.query[[1, 3, 4, 6]].any() and not out.weights[[1, 3, 4, 6]].any()
    assert out.weights.isfinite().all() and out.weights[[0, 2, 5]].all()


def test_golden():
    q = torch.arange(1, 9).float().reshape(1, 1, 8).bfloat16()
    table = torch.tensor([[0.6, 0.8, 0.8, 0.6]])
    arguments = dict(start=0, interleaved=False, weight_scale=0.5)
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, 1)
    lines = []
    for layout in (IndexFp8Layout(8), IndexFp8Layout(8, "e4m3fnuz", "raw"), PlainLayout("bf16", 8)):
        query, weights = indexer_q_rope_quant(q, one, zero, table, layout=layout, **arguments)
        lines.append(f"{layout.name}: {query.flatten().tolist()} {weights.item():.6g}")
    assert_expected_inline(
        "\n".join(lines),
        """\
index_fp8/8/e4m3fn/pow2: [230, 221, 106, 113, 114, 116, 118, 120] 0.015625
index_fp8/8/e4m3fnuz/raw: [237, 227, 113, 119, 121, 122, 124, 126] 0.0178571
plain/bf16/8+0: [-1.796875, -0.80078125, 2.59375, 4.40625, 5.0, 6.0, 7.0, 8.0] 0.5""",
    )


def test_schema():
    assert_expected_inline(
        schema("indexer_q_rope_quant").replace(", ", ",\n"),
        """\
sparse_attn::indexer_q_rope_quant(Tensor q,
Tensor weights,
Tensor positions,
Tensor cos_sin,
int start,
bool interleaved,
bool hadamard,
float weight_scale,
str layout,
str impl) -> (Tensor,
Tensor)""",
    )


@pytest.mark.parametrize("layout", [FP8[0], PlainLayout("bf16", 16)], ids=lambda layout: layout.name)
def test_opcheck(layout):
    arguments = inputs(5, 3, 16, 8)
    opcheck("indexer_q_rope_quant", *arguments, 0, True, True, 0.5, layout.name, "auto")
    empty = [value[:0] for value in arguments[:3]]
    opcheck("indexer_q_rope_quant", *empty, arguments[3], 8, False, False, 0.5, layout.name, "reference")


def test_empty():
    q, weights, positions, table = inputs(3, 4, 16, 8)
    out = indexer_q_rope_quant(
        q[:0], weights[:0], positions[:0], table, start=0, interleaved=True, weight_scale=1.0, layout=FP8[0]
    )
    assert out.query.shape == (0, 4, 16) and out.weights.shape == (0, 4)


def test_traces_without_breaks_or_recompiles():
    def step(q, weights, positions, table):
        options = dict(start=0, interleaved=True, weight_scale=1.0, layout=FP8[0])
        return indexer_q_rope_quant(q, weights, positions, table, **options)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5, 9):
        arguments = [value.contiguous() for value in inputs(tokens, 3, 16, 8)]
        with torch.compiler.set_stance("default" if tokens < 9 else "fail_on_recompile"):
            got = compiled(*arguments)
        assert all(map(torch.equal, got, step(*arguments)))


Q, W, P, CS = torch.zeros(3, 2, 16), torch.zeros(3, 2), torch.zeros(3, dtype=torch.int32), torch.zeros(5, 8)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(q=Q.long()), TypeError, "q: got dtype int64"),
        (dict(q=Q[0]), ValueError, "q: got 2 dimensions"),
        (dict(weights=W.double()), TypeError, "weights: got dtype float64"),
        (dict(weights=W[:, :1]), ValueError, "weights: got shape"),
        (dict(weights=W.to("meta")), ValueError, "weights: got device"),
        (dict(positions=P.float()), TypeError, "positions: got dtype"),
        (dict(positions=P[:2]), ValueError, "positions: got shape"),
        (dict(cos_sin=CS.half()), TypeError, "cos_sin: got dtype"),
        (dict(cos_sin=CS[:, :5]), ValueError, "cos_sin: got shape"),
        (dict(start=9), ValueError, "start: got 9, allowed: 0 to 8"),
        (dict(layout="index_fp8/16/e4m3fn/pow2"), TypeError, "layout: got str"),
        (dict(layout=IndexFp8Layout(128)), ValueError, "layout: got dim 128"),
        (dict(q=Q[..., :12], layout=IndexFp8Layout(12), hadamard=True), ValueError, "hadamard: got True with dim 12"),
        (dict(impl="fast"), ValueError, "impl: got 'fast'"),
    ],
)
def test_errors(change, error, message):
    arguments = dict(q=Q, weights=W, positions=P, cos_sin=CS)
    arguments |= dict(start=0, interleaved=True, weight_scale=1.0, layout=FP8[0])
    with pytest.raises(error, match=message):
        indexer_q_rope_quant(**(arguments | change))


def bits(tensor):
    return tensor.cpu().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


def check_kernel(arguments, **options):
    """Every bit equal to the reference's on the CPU."""
    options = dict(start=0, interleaved=True, weight_scale=0.37) | options
    want = indexer_q_rope_quant(*(value.cpu() for value in arguments), impl="reference", **options)
    got = indexer_q_rope_quant(*arguments, impl="triton", **options)
    for field, a, b in zip(got._fields, got, want):
        assert torch.equal(bits(a), bits(b)), f"{field} differs at {(bits(a) != bits(b)).nonzero()[:4].tolist()}"


@pytest.mark.sampled(12)
@pytest.mark.kernel
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [*FP8, PlainLayout("bf16", 16), PlainLayout("fp32", 16)], ids=str)
def test_kernel_bits(device, layout, dtype, hadamard):
    for start, interleaved in ((0, False), (8, True), (3, True), (5, False)):
        arguments = inputs(5, 3, 16, 8, dtype=dtype, device=device, seed=start)
        check_kernel(arguments, layout=layout, hadamard=hadamard, start=start, interleaved=interleaved)
    check_kernel(poisoned(device, dtype=dtype), layout=layout, hadamard=hadamard)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", FP8, ids=lambda layout: layout.name)
def test_kernel_bits_of_what_is_not_finite(device, layout):
    q, *rest = inputs(7, 3, 16, 8, dtype=torch.float32, device=device)
    q[0, :, 12], q[1, :, 13], q[2], q[3, 0, ::3], q[4, 1, 15] = NAN, math.inf, -math.inf, NAN, -NAN
    check_kernel([q, *rest], layout=layout)
    got = indexer_q_rope_quant(q, *rest, start=0, interleaved=True, weight_scale=1.0, layout=layout, impl="triton")
    assert torch.equal(fp8_decode(got.query.cpu(), layout.flavour).isnan()[..., 8:], ~q.cpu().isfinite()[..., 8:])
    assert got.weights.isfinite().all()


@pytest.mark.kernel
@pytest.mark.parametrize("heads, dim, width", [(1, 2, 2), (5, 12, 6), (3, 24, 24), (20, 128, 64)])
def test_kernel_shapes(device, heads, dim, width):
    arguments = inputs(3, heads, dim, width, device=device)
    check_kernel(arguments, layout=IndexFp8Layout(dim))
    check_kernel([value[:0] for value in arguments[:3]] + [arguments[3]], layout=IndexFp8Layout(dim))
    q, weights, positions, table = arguments
    check_kernel([q, weights.half(), positions.long(), table], layout=IndexFp8Layout(dim), interleaved=False)
    check_kernel([q, weights.bfloat16(), positions, table], layout=PlainLayout("fp16", dim))


@pytest.mark.kernel
def test_kernel_rounding_edges(device):
    """Vectors whose largest value sits on, just below and just above the places where the scale steps."""
    edges = []
    for exponent in (-20, -13, -3, 0, 5):
        for base in (1.75, 1.0, 1.5):
            word = struct.unpack("<i", struct.pack("<f", base * 2.0**exponent))[0]
            edges += [struct.unpack("<f", struct.pack("<i", word + step))[0] for step in (-1, 0, 1)]
    edges += [1e-4, 0.9e-4, 1e-30, 1e-42]
    q = torch.randn(len(edges), 1, 16).clamp(-1, 1) * torch.tensor(edges).reshape(-1, 1, 1) / 2
    q[:, 0, 8] = torch.tensor(edges)
    count = len(edges)
    weights, positions = torch.randn(count, 1), torch.zeros(count, dtype=torch.int32)
    arguments = [value.to(device) for value in (q, weights, positions)]
    for layout in FP8:
        check_kernel([*arguments, rope_table(1, 8, 1e4, device=device)], layout=layout)


@pytest.mark.gpu
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_vectors_on_the_gpu(dtype, hadamard):
    """Millions of elements: a contracted product or an approximate quotient would show."""
    arguments = inputs(2000, 64, 128, 64, dtype=dtype, rows=4096, device="cuda")
    for interleaved, rule in ((False, "pow2"), (True, "raw")):
        layout = IndexFp8Layout(128, "e4m3fn", rule)
        check_kernel(arguments, layout=layout, hadamard=hadamard, interleaved=interleaved)
