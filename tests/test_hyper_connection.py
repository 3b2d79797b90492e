"""Hyper-connections against transformers' own modules, and the kernels against the reference."""

import pytest
import torch
from conftest import big
from expecttest import assert_expected_inline

from sparse_attn.ops.hyper_connection import hyper_head, hyper_merge, hyper_mix
from sparse_attn.testing.ops import opcheck, schema

SETTINGS = dict(eps=1e-6, norm_eps=1e-5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs(tokens, count, hidden, *, dtype=torch.float32, device="cpu", seed=0):
    """Streams and output as parts of wider tensors whose other columns are NaN, and weights for a mix."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    wide = torch.full((tokens, count + 1, hidden + 3), float("nan"))
    wide[:, :count, :hidden] = draw(tokens, count, hidden) * 3
    wide_out = torch.full((tokens, hidden + 5), float("nan"))
    wide_out[:, :hidden] = draw(tokens, hidden)
    mixes = (2 + count) * count
    weights = draw(mixes, count * hidden) * 0.2, draw(mixes), draw(3)
    streams, out = wide.to(device, dtype)[:, :count, :hidden], wide_out.to(device, dtype)[:, :hidden]
    return streams, out, *(value.to(device) for value in weights)


def theirs(count, hidden, iterations):
    import transformers
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modules

    config = transformers.DeepseekV4Config(
        hc_mult=count, hidden_size=hidden, hc_sinkhorn_iters=iterations, hc_eps=1e-6, rms_norm_eps=1e-5
    )
    return modules.DeepseekV4HyperConnection(config), modules.DeepseekV4HyperHead(config)


@pytest.mark.parametrize("count, hidden, iterations", [(4, 48, 20), (2, 7, 1), (3, 16, 3), (1, 5, 2)])
def test_transformers_modules(count, hidden, iterations):
    streams, out, fn, base, scale = inputs(6, count, hidden)
    connection, head = theirs(count, hidden, iterations)
    connection.fn.data, connection.base.data, connection.scale.data = fn, base, scale
    post, comb, collapsed = connection(streams.unsqueeze(0))
    mix = hyper_mix(streams, fn, base, scale, iterations=iterations, **SETTINGS)
    for got, want in zip(mix, (collapsed, post, comb)):
        torch.testing.assert_close(got, want[0], rtol=1e-5, atol=1e-5)
    want = post[0].unsqueeze(-1) * out.unsqueeze(1) + comb[0].mT @ streams
    torch.testing.assert_close(hyper_merge(out, streams, mix.post, mix.comb), want, rtol=1e-5, atol=1e-5)

    head.hc_fn.data, head.hc_base.data, head.hc_scale.data = fn[:count], base[:count], scale[:1]
    got = hyper_head(streams, fn[:count], base[:count], scale[:1], **SETTINGS)
    torch.testing.assert_close(got, head(streams.unsqueeze(0))[0], rtol=1e-5, atol=1e-5)


def test_many_iterations_make_it_doubly_stochastic():
    streams, _, fn, base, scale = inputs(5, 4, 32)
    comb = hyper_mix(streams, fn, base, scale, iterations=200, **SETTINGS).comb
    assert (comb > 0).all()
    torch.testing.assert_close(comb.sum(1), torch.ones(5, 4), atol=1e-4, rtol=0)
    torch.testing.assert_close(comb.sum(2), torch.ones(5, 4), atol=1e-4, rtol=0)


def test_direction_of_the_merge():
    """comb[j, k] goes from stream j to stream k."""
    streams = torch.tensor([[[1.0], [10.0]]])
    comb = torch.tensor([[[0.0, 1.0], [0.0, 0.5]]])
    assert hyper_merge(torch.tensor([[100.0]]), streams, torch.tensor([[1.0, 0.0]]), comb).flatten().tolist() == [100, 6]


def test_schemas():
    assert_expected_inline(
        schema("hyper_mix"),
        """sparse_attn::hyper_mix(Tensor streams, Tensor raw, Tensor base, Tensor scale, int iterations, float eps, float norm_eps, str impl) -> (Tensor collapsed, Tensor post, Tensor comb)""",
    )
    assert_expected_inline(
        schema("hyper_merge"),
        """sparse_attn::hyper_merge(Tensor out, Tensor streams, Tensor post, Tensor comb, str impl) -> Tensor""",
    )


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(tokens, dtype):
    streams, out, _, base, scale = inputs(tokens, 3, 8, dtype=dtype)
    opcheck("hyper_mix", streams, torch.randn(tokens, 15), base, scale, 4, 1e-6, 1e-5, "auto")
    opcheck("hyper_merge", out, streams, torch.rand(tokens, 3), torch.rand(tokens, 3, 3), "auto")


def test_traces_without_breaks_or_recompiles():
    def step(streams, out, fn, base, scale):
        mix = hyper_mix(streams, fn, base, scale, iterations=3, **SETTINGS)
        merged = hyper_merge(out + mix.collapsed, streams, mix.post, mix.comb)
        return hyper_head(merged, fn[:4], base[:4], scale[:1], **SETTINGS)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5, 9):
        arguments = [value.contiguous() for value in inputs(tokens, 4, 16)]
        with torch.compiler.set_stance("default" if tokens < 9 else "fail_on_recompile"):
            got = compiled(*arguments)
        torch.testing.assert_close(got, step(*arguments))


STREAMS, OUT, FN, BASE, SCALE = inputs(2, 3, 4)
MIX = dict(streams=STREAMS, fn=FN, base=BASE, scale=SCALE, iterations=2, **SETTINGS)
MERGE = dict(out=OUT, streams=STREAMS, post=torch.rand(2, 3), comb=torch.rand(2, 3, 3))


@pytest.mark.parametrize(
    "function, change, error, message",
    [
        (hyper_mix, dict(streams=STREAMS.double()), TypeError, "streams: got dtype float64"),
        (hyper_mix, dict(streams=STREAMS[0]), ValueError, "streams: got 2 dimensions"),
        (hyper_mix, dict(streams=STREAMS.mT), ValueError, "streams: got stride"),
        (hyper_mix, dict(streams=torch.zeros(1, 17, 4)), ValueError, "streams: got 17 streams, allowed: 1 to 16"),
        (hyper_mix, dict(fn=FN.bfloat16()), TypeError, "fn: got dtype bfloat16"),
        (hyper_mix, dict(fn=FN[:3]), ValueError, r"fn: got shape \[3, 12\]"),
        (hyper_mix, dict(base=BASE[:4]), ValueError, "base: got shape"),
        (hyper_mix, dict(scale=SCALE[:1]), ValueError, "scale: got shape"),
        (hyper_mix, dict(scale=SCALE.to("meta")), ValueError, "scale: got device meta"),
        (hyper_mix, dict(iterations=0), ValueError, "iterations: got 0"),
        (hyper_mix, dict(impl="cuda"), ValueError, "impl: got 'cuda'"),
        (hyper_merge, dict(out=OUT.bfloat16()), TypeError, "out: got dtype bfloat16"),
        (hyper_merge, dict(out=OUT[:1]), ValueError, "out: got shape"),
        (hyper_merge, dict(post=torch.rand(2, 4)), ValueError, "post: got shape"),
        (hyper_merge, dict(comb=torch.rand(2, 3, 4)), ValueError, "comb: got shape"),
        (hyper_merge, dict(comb=torch.rand(2, 3, 3).half()), TypeError, "comb: got dtype float16"),
    ],
)
def test_errors(function, change, error, message):
    with pytest.raises(error, match=message):
        function(**(MIX if function is hyper_mix else MERGE) | change)


def check_kernels(tokens, count, hidden, iterations, dtype, device):
    streams, out, fn, base, scale = inputs(tokens, count, hidden, dtype=dtype, device=device)
    raw = torch.nn.functional.linear(streams.flatten(1).float(), fn)
    op = torch.ops.sparse_attn.hyper_mix
    got = op(streams, raw, base, scale, iterations, 1e-6, 1e-5, "triton")
    want = op(streams, raw, base, scale, iterations, 1e-6, 1e-5, "reference")
    ulp = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(got[0], want[0], rtol=ulp, atol=1e-5)
    for x, y in zip(got[1:], want[1:]):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=1e-6)
    merged = [hyper_merge(out, streams, *want[1:], impl=impl) for impl in ("triton", "reference")]
    torch.testing.assert_close(*merged, rtol=ulp, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count, hidden, iterations", [(4, 40, 20), (1, 5, 1), (3, 33, 2), (2, 4200, 1)])
def test_kernels_match_reference(device, count, hidden, iterations, dtype):
    check_kernels(3, count, hidden, iterations, dtype, device)
    if big(device):
        check_kernels(513, count, 7168, iterations, dtype, device)


@pytest.mark.kernel
def test_kernels_take_no_tokens(device):
    streams, out, fn, base, scale = inputs(0, 4, 8, device=device)
    mix = hyper_mix(streams, fn, base, scale, iterations=2, impl="triton", **SETTINGS)
    assert mix.collapsed.shape == (0, 8) and hyper_merge(out, streams, mix.post, mix.comb, impl="triton").shape == (0, 4, 8)
