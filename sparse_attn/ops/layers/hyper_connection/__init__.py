"""Hyper-connections: a few residual streams, mixed by weights that follow from the streams themselves.

Source: manifold-constrained hyper-connections as transformers 5.17 computes them for DeepSeek-V4. There, intermediate
results are rounded to the streams' dtype; here everything between input and output is fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from sparse_attn.framework import checks
from sparse_attn.framework.autocast import no_autocast
from sparse_attn.framework.registration import define_op
from sparse_attn.ops.layers.hyper_connection import fake, reference
from sparse_attn.types import HyperMix

STREAM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_STREAMS = 16
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_MIX, _MERGE, _HEAD = checks.Guard(), checks.Guard(), checks.Guard()


def _launchers():
    from sparse_attn.ops.layers.hyper_connection import launch

    return launch


_hyper_mix = define_op(
    "hyper_mix",
    "(Tensor streams, Tensor raw, Tensor base, Tensor scale, int iterations, float eps, float norm_eps, str impl)"
    " -> (Tensor collapsed, Tensor post, Tensor comb)",
    fake=fake.hyper_mix,
    reference=reference.hyper_mix,
    rules=reference.rules_of_hyper_mix,
    launch=lambda: _launchers().hyper_mix,
)
_hyper_merge = define_op(
    "hyper_merge",
    "(Tensor out, Tensor streams, Tensor post, Tensor comb, str impl) -> Tensor",
    fake=fake.hyper_merge,
    reference=reference.hyper_merge,
    rules=reference.rules_of_hyper_merge,
    launch=lambda: _launchers().hyper_merge,
)


@no_autocast
def hyper_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    product: Product = F.linear,
    impl: str = "auto",
) -> HyperMix:
    """Collapse the streams into a sublayer's input, and say how its output and the streams are mixed afterwards.

    With x the flattened streams over the root of their mean square plus norm_eps, and (a, b, c) = fn x in parts of N, N
    and N * N values:

        pre = sigmoid(a * scale[0] + base) + eps,   post = 2 * sigmoid(b * scale[1] + base),
        comb = softmax of each row of (c * scale[2] + base) + eps, then columns normalised, then ``iterations`` - 1
        times rows and columns normalised, each by its sum plus eps.

    Args:
        streams: bf16, fp16 or fp32 [tokens, N, hidden], 1 to 16 streams.
        fn: fp32 [(2 + N) * N, N * hidden].
        base: fp32 [(2 + N) * N].
        scale: fp32 [3].
        iterations: at least 1.
        eps: added to pre and comb, and to the sums.
        norm_eps: added to the mean square.
        product: a function of x and fn. The default is an fp32 product of torch: in TF32 if
            torch.set_float32_matmul_precision allows it.
        impl: "auto", "reference" or "triton".

    Returns:
        HyperMix(collapsed [tokens, hidden] = sum_n pre[n] * streams[n] in the dtype of streams, post fp32 [tokens, N],
        comb fp32 [tokens, N, N]).

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _MIX.new(streams, fn, base, scale, iterations):
        count, hidden = _check_streams(streams)
        mixes = (2 + count) * count
        _check_weights(streams, fn, base, scale, mixes, count * hidden, 3)
        checks.check_at_least("iterations", iterations, 1)
        _MIX.passed(new)
    raw = product(streams.flatten(1).float(), fn)
    return HyperMix(*_hyper_mix(streams, raw, base, scale, iterations, eps, norm_eps, impl))


def hyper_merge(
    out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *, impl: str = "auto"
) -> torch.Tensor:
    """The streams behind a sublayer: new[k] = post[k] * out + sum_j comb[j, k] * streams[j].

    Args:
        out: [tokens, hidden], dtype of streams.
        streams: bf16, fp16 or fp32 [tokens, N, hidden], 1 to 16 streams.
        post: fp32 [tokens, N].
        comb: fp32 [tokens, N, N].
        impl: "auto", "reference" or "triton".

    Returns:
        [tokens, N, hidden] in that dtype.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _MERGE.new(out, streams, post, comb):
        count, hidden = _check_streams(streams)
        tokens = streams.shape[0]
        checks.check_dtype("out", out, (streams.dtype,))
        checks.check_shape("out", out, (tokens, hidden), "[tokens, hidden]")
        checks.check_unit_stride("out", out)
        checks.check_dtype("post", post, (torch.float32,))
        checks.check_shape("post", post, (tokens, count), "[tokens, streams]")
        checks.check_dtype("comb", comb, (torch.float32,))
        checks.check_shape("comb", comb, (tokens, count, count), "[tokens, streams, streams]")
        checks.check_same_device(out=out, streams=streams, post=post, comb=comb)
        _MERGE.passed(new)
    return _hyper_merge(out, streams, post.contiguous(), comb.contiguous(), impl)


@no_autocast
def hyper_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    eps: float,
    norm_eps: float,
    product: Product = F.linear,
    impl: str = "auto",
) -> torch.Tensor:
    """Collapse the streams for the last time: sum_n (sigmoid(fn x * scale + base) + eps)[n] * streams[n], x as in
    hyper_mix.

    It is hyper_mix's first output, with zeros for the inputs of the other two.

    Args:
        streams: bf16, fp16 or fp32 [tokens, N, hidden], 1 to 16 streams.
        fn: fp32 [N, N * hidden].
        base: fp32 [N].
        scale: fp32 [1].
        eps: see hyper_mix.
        norm_eps: see hyper_mix.
        product: see hyper_mix.
        impl: "auto", "reference" or "triton".

    Returns:
        [tokens, hidden] in the dtype of streams.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _HEAD.new(streams, fn, base, scale):
        count, hidden = _check_streams(streams)
        _check_weights(streams, fn, base, scale, count, count * hidden, 1)
        _HEAD.passed(new)
    unread = (1 + streams.shape[1]) * streams.shape[1]
    raw = F.pad(product(streams.flatten(1).float(), fn), (0, unread))
    base, scale = F.pad(base, (0, unread)), F.pad(scale, (0, 2))
    return _hyper_mix(streams, raw, base, scale, 1, eps, norm_eps, impl)[0]


def _check_streams(streams: torch.Tensor) -> tuple[int, int]:
    checks.check_dtype("streams", streams, STREAM_DTYPES)
    checks.check_rank("streams", streams, 3)
    checks.check_unit_stride("streams", streams)
    count, hidden = streams.shape[1:]
    if not 1 <= count <= MAX_STREAMS:
        raise ValueError(f"streams: got {count} streams, allowed: 1 to {MAX_STREAMS}")
    checks.check_at_least("streams hidden", hidden, 1)
    return count, hidden


def _check_weights(streams, fn, base, scale, mixes: int, width: int, scales: int) -> None:
    for name, value in (("fn", fn), ("base", base), ("scale", scale)):
        checks.check_dtype(name, value, (torch.float32,))
        checks.check_unit_stride(name, value)
    checks.check_shape("fn", fn, (mixes, width), "[mixes, streams * hidden]")
    checks.check_shape("base", base, (mixes,), "[mixes]")
    checks.check_shape("scale", scale, (scales,), f"[{scales}]")
    checks.check_same_device(streams=streams, fn=fn, base=base, scale=scale)
