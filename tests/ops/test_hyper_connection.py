"""Hyper-connections against transformers' own modules, and the kernels against the reference."""

import pytest
import torch
from conftest import big
from expecttest import assert_expected_inline
from support.launched import compiled_case

from sparse_attn.ops.layers.hyper_connection import hyper_head, hyper_merge, hyper_mix
from sparse_attn.testing.ops import opcheck, schema

SETTINGS = dict(eps=1e-6, norm_eps=1e-5)
BOTH = ("triton", "reference")
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
    post, comb, collapsed = connection(streams.contiguous().unsqueeze(0))
    mix = hyper_mix(streams, fn, base, scale, iterations=iterations, **SETTINGS)
    for got, want in zip(mix, (collapsed, post, comb)):
        torch.testing.assert_close(got, want[0], rtol=1e-5, atol=1e-5)
    want = post[0].unsqueeze(-1) * out.unsqueeze(1) + comb[0].mT @ streams
    torch.testing.assert_close(hyper_merge(out, streams, mix.post, mix.comb), want, rtol=1e-5, atol=1e-5)

    head.hc_fn.data, head.hc_base.data, head.hc_scale.data = fn[:count], base[:count], scale[:1]
    got = hyper_head(streams, fn[:count], base[:count], scale[:1], **SETTINGS)
    torch.testing.assert_close(got, head(streams.contiguous().unsqueeze(0))[0], rtol=1e-5, atol=1e-5)


def test_transformers_decoder_layer():
    """Both sites of their layer, with its attention and experts replaced by something cheap."""
    import transformers
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modules

    class Attention(torch.nn.Module):
        def forward(self, x, **_):
            return x.roll(1, -1).tanh(), None

    class Experts(torch.nn.Module):
        def forward(self, x, **_):
            return x.flip(-1).sin()

    config = transformers.DeepseekV4Config(
        hc_mult=4, hidden_size=16, hc_sinkhorn_iters=5, hc_eps=1e-6, rms_norm_eps=1e-5, num_hidden_layers=1,
        layer_types=["sliding_attention"], mlp_layer_types=["moe"], num_attention_heads=1, head_dim=16, q_lora_rank=8,
        o_lora_rank=8, o_groups=1, n_routed_experts=2, moe_intermediate_size=8, num_experts_per_tok=1, vocab_size=4,
    )  # fmt: skip
    layer = modules.DeepseekV4DecoderLayer(config, 0).requires_grad_(False)
    layer.self_attn, layer.mlp = Attention(), Experts()
    for seed, site in enumerate((layer.attn_hc, layer.ffn_hc)):
        site.fn.data, site.base.data, site.scale.data = inputs(0, 4, 16, seed=seed)[2:]

    streams = inputs(7, 4, 16)[0]
    want = layer(streams.contiguous().unsqueeze(0))[0]
    for site in ("attention", "experts"):
        hyper = layer.attn_hc if site == "attention" else layer.ffn_hc
        mix = hyper_mix(streams, hyper.fn, hyper.base, hyper.scale, iterations=5, **SETTINGS)
        if site == "attention":
            out = layer.self_attn(layer.input_layernorm(mix.collapsed))[0]
        else:
            out = layer.mlp(layer.post_attention_layernorm(mix.collapsed))
        streams = hyper_merge(out, streams, mix.post, mix.comb)
    torch.testing.assert_close(streams, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, half_ulp", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_rounds_once(dtype, half_ulp):
    """Nearer to the exact sum than transformers, who round post, comb and every product to the streams' dtype."""
    streams, out, fn, base, scale = inputs(32, 4, 48, dtype=dtype)
    mix = hyper_mix(streams, fn, base, scale, iterations=20, **SETTINGS)
    exact = mix.post.double().unsqueeze(2) * out.double().unsqueeze(1) + mix.comb.double().mT @ streams.double()
    error = (hyper_merge(out, streams, mix.post, mix.comb).double() - exact).abs()
    assert (error <= exact.abs() * half_ulp + 1e-5).all()
    rounded = mix.post.to(dtype).unsqueeze(2) * out.unsqueeze(1) + mix.comb.to(dtype).mT @ streams
    assert error.mean() < (rounded.double() - exact).abs().mean()
    connection, _ = theirs(4, 48, 20)
    connection.fn.data, connection.base.data, connection.scale.data = fn, base, scale
    collapsed = connection(streams.contiguous().unsqueeze(0))[2][0]
    torch.testing.assert_close(mix.collapsed, collapsed, rtol=2 * half_ulp, atol=1e-5)


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
    assert hyper_merge(torch.tensor([[100.0]]), streams, torch.tensor([[1.0, 0.0]]), comb).flatten().tolist() == [
        100,
        6,
    ]


def test_schemas():
    assert_expected_inline(
        schema("hyper_mix"),
        """sparse_attn::hyper_mix(Tensor streams, Tensor raw, Tensor base, Tensor scale, int iterations, float eps, float norm_eps, str impl) -> (Tensor collapsed, Tensor post, Tensor comb)""",
    )
    assert_expected_inline(
        schema("hyper_merge"),
        """sparse_attn::hyper_merge(Tensor out, Tensor streams, Tensor post, Tensor comb, str impl) -> Tensor""",
    )


def check_opcheck(impl, device, tokens, dtype):
    streams, out, _, base, scale = inputs(tokens, 3, 8, dtype=dtype, device=device)
    raw, post, comb = (torch.rand(tokens, *shape, device=device) for shape in ((15,), (3,), (3, 3)))
    opcheck("hyper_mix", streams, raw, base, scale, 4, 1e-6, 1e-5, impl)
    opcheck("hyper_merge", out, streams, post, comb, impl)


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(tokens, dtype):
    check_opcheck("auto", "cpu", tokens, dtype)


@pytest.mark.kernel
@pytest.mark.parametrize("tokens", [0, 3])
def test_opcheck_kernel(device, tokens):
    check_opcheck("triton", device, tokens, torch.bfloat16)


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
    merged = [hyper_merge(out, streams, *want[1:], impl=impl) for impl in BOTH]
    torch.testing.assert_close(*merged, rtol=ulp, atol=1e-5)
    heads = [hyper_head(streams, fn[:count], base[:count], scale[:1], **SETTINGS, impl=impl) for impl in BOTH]
    torch.testing.assert_close(*heads, rtol=ulp, atol=1e-5)


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
    merged = hyper_merge(out, streams, mix.post, mix.comb, impl="triton")
    assert mix.collapsed.shape == (0, 8) and merged.shape == (0, 4, 8)
    assert hyper_head(streams, fn[:4], base[:4], scale[:1], impl="triton", **SETTINGS).shape == (0, 8)


@pytest.mark.kernel
def test_kernels_keep_to_their_tokens(device):
    """Streams that lie transposed, gates that lie strided, and a token of NaN and infinities."""
    streams, out, fn, base, scale = inputs(5, 4, 12, device=device)
    streams = streams.transpose(0, 1).contiguous().transpose(0, 1)
    streams[1], streams[3, 0, 0], out[2] = float("nan"), float("inf"), float("nan")
    mixes = [hyper_mix(streams, fn, base, scale, iterations=3, impl=impl, **SETTINGS) for impl in BOTH]
    for got, want in zip(*mixes):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-5, equal_nan=True)
        assert got[[0, 2, 4]].isfinite().all()
    post, comb = (torch.stack([value, value * float("nan")], -1)[..., 0] for value in mixes[1][1:])
    merged = [hyper_merge(out, streams, post, comb, impl=impl) for impl in BOTH]
    torch.testing.assert_close(*merged, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert merged[0][[0, 4]].isfinite().all()


@pytest.mark.gpu
def test_streams_far_apart():
    """A stream's offset beyond int32."""
    memory = torch.empty(2**31 + 16, dtype=torch.bfloat16, device="cuda")
    far = memory.as_strided((1, 3, 16), (16, 2**30, 1))
    near, out, fn, base, scale = inputs(1, 3, 16, dtype=torch.bfloat16, device="cuda")
    far.copy_(near)
    mixes = [hyper_mix(streams, fn, base, scale, iterations=3, **SETTINGS) for streams in (far, near)]
    assert all(map(torch.equal, *mixes))
    merged = [hyper_merge(out, streams, *mixes[0][1:]) for streams in (far, near)]
    assert torch.equal(*merged)


@pytest.mark.aot
def test_kernels_on_hopper():
    (mix,), (merge,) = (compiled_case(f"hyper_{name}: deepseek_v4_pro") for name in ("mix", "merge"))
    assert mix.spill_bytes == merge.spill_bytes == 0
    assert mix.count(r"LDG\.E\.(64|128)") and merge.count(r"STG\.E\.(64|128)")
