"""Rope: tables against transformers, rotation against complex numbers in float64."""

from __future__ import annotations

import math

import pytest
import torch
from expecttest import assert_expected_inline
from support.extremes import INT_MAX, INT_MIN

from sparse_attn.ops.layers.rope import Yarn, apply_rope, inverse_frequencies, rope_table
from sparse_attn.testing.ops import opcheck, schema

DEEPSEEK = Yarn(factor=40, original_max_position=4096)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def complex_rope(x, positions, inv_freq, start, interleaved, sign):
    """Independent oracle: pairs as complex numbers times e^(i * position * frequency), in float64."""
    out = x.double().clone()
    half = len(inv_freq)
    for token, position in enumerate(positions.tolist()):
        turn = torch.exp(1j * sign * position * inv_freq.double())
        for i in range(half):
            at = (start + 2 * i, start + 2 * i + 1) if interleaved else (start + i, start + i + half)
            z = torch.complex(x[token, ..., at[0]].double(), x[token, ..., at[1]].double()) * turn[i]
            out[token, ..., at[0]], out[token, ..., at[1]] = z.real, z.imag
    return out


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("start", [0, 3, 8])
def test_rotation_matches_complex_numbers(start, interleaved, inverse, rank):
    x = torch.randn(5, 3, 32)[..., ::2] if rank == 3 else torch.randn(5, 32)[:, ::2]  # dim 16, not contiguous
    positions = torch.tensor([0, 1, 7, 62, 63])
    got = apply_rope(x, positions, rope_table(64, 8, 1e4), start=start, interleaved=interleaved, inverse=inverse)
    want = complex_rope(x, positions, inverse_frequencies(8, 1e4, None), start, interleaved, -1 if inverse else 1)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-5)
    keep = [i for i in range(16) if not start <= i < start + 8]
    assert torch.equal(got[..., keep], x[..., keep])


def test_rotation_happens_in_fp32_and_is_cast_back():
    x, positions, table = torch.randn(4, 2, 8).bfloat16(), torch.arange(4), rope_table(4, 8, 1e4)
    got = apply_rope(x, positions, table, start=0, interleaved=True)
    want = apply_rope(x.float(), positions, table, start=0, interleaved=True)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want.bfloat16())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_outside_the_table_give_zero_even_for_nan(dtype):
    positions = torch.tensor([INT_MIN, -1, 4, INT_MAX, 3], dtype=dtype)
    x = torch.ones(5, 2, 8)
    x[:4, :, 2:6] = float("nan")
    got = apply_rope(x, positions, rope_table(4, 4, 1e4), start=2, interleaved=False)
    assert not got[:4, :, 2:6].any() and (got[..., :2] == 1).all() and (got[..., 6:] == 1).all()
    assert got[4].isfinite().all() and got[4, :, 2:6].all()


def test_empty_and_fresh():
    table = rope_table(4, 4, 1e4)
    empty = apply_rope(torch.empty(0, 2, 8), torch.empty(0, dtype=torch.int32), table, start=0, interleaved=True)
    assert empty.shape == (0, 2, 8)
    x = torch.randn(2, 8)
    before = x.clone()
    got = apply_rope(x, torch.tensor([0, 1]), table, start=0, interleaved=True)
    got.fill_(7)
    assert torch.equal(x, before)


def hf_table(count, yarn):
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32RotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    if yarn:
        parameters |= dict(
            rope_type="yarn", factor=40.0, original_max_position_embeddings=yarn.original_max_position, beta_fast=32,
            beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
        )  # fmt: skip
    config = DeepseekV32Config(rope_parameters=parameters, max_position_embeddings=163840)
    config.head_dim = config.qk_rope_head_dim = 64
    rotary = DeepseekV32RotaryEmbedding(config)
    assert rotary.attention_scaling == 1.0
    cos, sin = rotary(torch.zeros(1), torch.arange(count).unsqueeze(0))
    return torch.cat([cos[0, :, :32], sin[0, :, :32]], dim=1)


@pytest.mark.parametrize("yarn", [None, DEEPSEEK, Yarn(40.0, 2**17)])  # the last ramps beyond the slowest dimension
def test_table_equals_transformers(yarn):
    pytest.importorskip("transformers")
    assert torch.equal(rope_table(5000, 64, 10000.0, yarn=yarn), hf_table(5000, yarn))


def test_table_golden():
    plain, yarn = inverse_frequencies(64, 1e4, None), inverse_frequencies(64, 1e4, DEEPSEEK)
    ratio = (plain / yarn).tolist()
    assert_expected_inline(
        "\n".join([
            f"plain {[f'{value:.4g}' for value in plain[::8].tolist()]}",
            f"ratio {[f'{value:.3f}' for value in ratio[8:26:2]]}",
            f"row 3 {[f'{value:.5f}' for value in rope_table(4, 4, 100.0)[3].tolist()]}",
        ]),
        """\
plain ['1', '0.1', '0.01', '0.001']
ratio ['1.000', '1.000', '1.176', '1.429', '1.818', '2.500', '4.000', '10.000', '40.000']
row 3 ['-0.98999', '0.95534', '0.14112', '0.29552']""",
    )  # fmt: skip
    assert all(r == 1 for r in ratio[:10]) and all(math.isclose(r, 40, rel_tol=1e-6) for r in ratio[24:])


def test_attention_factor_scales_the_table():
    scaled = rope_table(8, 8, 1e4, yarn=Yarn(16, 64, attention_factor=1.5))
    torch.testing.assert_close(scaled, rope_table(8, 8, 1e4, yarn=Yarn(16, 64)) * 1.5, atol=0, rtol=0)


X, P, CS = torch.zeros(3, 2, 8), torch.zeros(3, dtype=torch.int32), torch.zeros(5, 4)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(x=X.long()), TypeError, "x: got dtype int64"),
        (dict(x=torch.zeros(8)), ValueError, "x: got 1 dimensions"),
        (dict(positions=P.float()), TypeError, "positions: got dtype float32"),
        (dict(positions=P[:2]), ValueError, "positions: got shape"),
        (dict(cos_sin=CS.bfloat16()), TypeError, "cos_sin: got dtype bfloat16"),
        (dict(cos_sin=CS[:, :3]), ValueError, "cos_sin: got shape"),
        (dict(cos_sin=CS[:0]), ValueError, "cos_sin: got shape"),
        (dict(start=5), ValueError, "start: got 5, allowed: 0 to 4"),
        (dict(start=-1), ValueError, "start: got -1"),
        (dict(positions=P.to("meta")), ValueError, "positions: got device meta"),
    ],
)
def test_apply_errors(change, error, message):
    arguments = dict(x=X, positions=P, cos_sin=CS, start=0) | change
    with pytest.raises(error, match=message):
        apply_rope(
            arguments["x"], arguments["positions"], arguments["cos_sin"], start=arguments["start"], interleaved=True
        )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 4, 1e4, None), "positions_count: got 0"),
        ((4, 5, 1e4, None), "dim: got 5"),
        ((4, 0, 1e4, None), "dim: got 0"),
        ((4, 4, 1.0, None), "theta: got 1.0"),
        ((4, 4, 1e4, Yarn(0, 64)), "yarn: got Yarn"),
        ((4, 4, 1e4, Yarn(2, 64, 1, 32)), "yarn: got Yarn"),
    ],
)
def test_table_errors(arguments, message):
    *positional, yarn = arguments
    with pytest.raises(ValueError, match=message):
        rope_table(*positional, yarn=yarn)


def test_traces_without_breaks_or_recompiles():
    table = rope_table(16, 8, 1e4)
    compiled = torch.compile(apply_rope, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5, 9):
        x, positions = torch.randn(tokens, 2, 12), torch.arange(tokens) - 1
        with torch.compiler.set_stance("default" if tokens < 9 else "fail_on_recompile"):
            got = compiled(x, positions, table, start=4, interleaved=False)
        assert torch.equal(got, apply_rope(x, positions, table, start=4, interleaved=False))


def test_schema():
    assert_expected_inline(
        schema("apply_rope").replace(", ", ",\n"),
        """\
sparse_attn::apply_rope(Tensor x,
Tensor positions,
Tensor cos_sin,
int start,
bool interleaved,
bool inverse,
str impl) -> Tensor""",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_opcheck(dtype):
    table, positions = rope_table(9, 8, 1e4), torch.tensor([8, -1, 3])
    wide = torch.randn(3, 5, 24).to(dtype)
    for x in (wide[..., ::2], wide.transpose(1, 2).contiguous().transpose(1, 2), wide[:, 0]):
        opcheck("apply_rope", x, positions, table, 3, True, False, "auto")
    opcheck("apply_rope", wide[:0], positions[:0].int(), table, 0, False, True, "reference")


def test_a_gradient_is_that_of_the_plain_rotation():
    x, positions, table = torch.randn(3, 2, 12, requires_grad=True), torch.tensor([0, 7, -1]), rope_table(9, 8, 1e4)
    weights = torch.randn(3, 2, 12)
    (apply_rope(x, positions, table, start=2, interleaved=True) * weights).sum().backward()
    back = apply_rope(weights, positions, table, start=2, interleaved=True, inverse=True)
    torch.testing.assert_close(x.grad, back)


def same_bits(got, want):
    whole = {2: torch.int16, 4: torch.int32}[want.element_size()]
    return torch.equal(got.cpu().view(whole), want.view(whole))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "heads, dim, start, width", [(0, 128, 0, 64), (3, 64, 0, 64), (33, 40, 5, 6), (7, 512, 448, 64)]
)
def test_kernel_gives_the_bits_of_the_reference(device, heads, dim, start, width, interleaved, inverse, dtype):
    """Signed zeros, infinities, NaN where a position has no row, rows of a wider tensor, both dtypes of positions."""
    tokens = 5
    x = torch.randn(tokens, max(heads, 1), dim + 3).to(dtype)
    x[0, :, start : start + width : 3], x[1, :, start + 1], x[2, :, start] = -0.0, float("inf"), float("nan")
    x = x[..., 2:-1] if heads else x[:, 0, 2:-1]
    table = rope_table(70, width, 1e4)
    for positions in (torch.tensor([0, 69, -1, 70, 17]), torch.tensor([3, 3, INT_MIN, INT_MAX, 68], dtype=torch.int32)):
        arguments = dict(start=start, interleaved=interleaved, inverse=inverse)
        want = apply_rope(x, positions, table, impl="reference", **arguments)
        got = apply_rope(x.to(device), positions.to(device), table.to(device), impl="triton", **arguments)
        assert same_bits(torch.nan_to_num(got, 7.0, 9.0, -9.0), torch.nan_to_num(want, 7.0, 9.0, -9.0))
        assert torch.equal(got.isnan().cpu(), want.isnan())
    assert (
        apply_rope(x[:0].to(device), positions[:0].to(device), table.to(device), impl="triton", **arguments).numel()
        == 0
    )
