"""Which attention kernel runs, and why a faster one does not: every fact of a call that a kernel refuses."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch
from expecttest import assert_expected_inline

from sparse_attn.framework import dispatch as tables
from sparse_attn.framework.target import H200
from sparse_attn.layout import LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.sparse import dispatch
from sparse_attn.ops.attention.sparse.problem import packed_decode, packed_prefill
from sparse_attn.testing.launches import TARGETS

BF16 = torch.bfloat16
LATENT, PLANAR = LatentFp8Layout(512, 64), PlanarFp8Layout(448, 64)
ROWS, NARROW_ROWS = PlainLayout("bf16", 512, 64), PlainLayout("bf16", 512)


def meta(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def apart(tensor, elements):
    """``tensor`` with so many elements more from each of its first dimension to the next."""
    wide = meta(tensor.shape[0], tensor[0].numel() + elements, dtype=tensor.dtype)
    return wide[:, : tensor[0].numel()].unflatten(1, tensor.shape[1:])


def behind(tensor, elements):
    """``tensor`` so many elements behind the start of its memory."""
    return torch.empty_like(tensor).new_empty(tensor.numel() + elements)[elements:].view(tensor.shape)


class Decode(NamedTuple):
    """Arguments of sparse_attn_decode."""

    heads: int = 128
    layout: object = LATENT
    tokens: int = 64
    dtype: torch.dtype = BF16
    scale: float = 0.1
    blocks: int = 9
    extra: object = None
    q: object = lambda q: q  # what is done to it
    cache: object = lambda cache: cache

    def problem(self):
        def caches(layout):
            return self.cache(meta(self.blocks, 64, layout.row, dtype=layout.dtype)), meta(self.tokens * 2048), meta(65)

        q = self.q(meta(self.tokens, self.heads, self.layout.dim, dtype=self.dtype))
        more = () if self.extra is None else (*caches(self.extra), self.extra.name)
        more = more or (None, None, None, "")
        return dispatch.decode_problem(q, self.scale, False, *caches(self.layout), self.layout.name, *more)


class Prefill(NamedTuple):
    """Arguments of sparse_attn_prefill."""

    heads: int = 128
    tokens: int = 64
    dtype: torch.dtype = BF16
    d_v: int = 512
    rope: int = 64
    kv: object = lambda kv: kv

    def problem(self):
        q = meta(self.tokens, self.heads, self.d_v + self.rope, dtype=self.dtype)
        kv = self.kv(meta(900, self.d_v + self.rope, dtype=self.dtype))
        return dispatch.prefill_problem(q, kv, meta(self.tokens * 2048), meta(65), 0.1, self.d_v)


FAR = 2**31 // 63 // 16 * 16 + 16


def far_heads(q):
    return meta(1, dtype=q.dtype).as_strided(q.shape, (16, FAR, 1))


HUGE = 2**33 // 656 + 1


def huge_block(cache):
    return meta(1, dtype=cache.dtype).as_strided((1, HUGE, 656), (656 * HUGE, 656, 1))


SWAP_AB, DECODE_FP8, PREFILL_BF16 = "hopper.swap_ab", "hopper.decode_fp8", "hopper.prefill_bf16"
# What is in a call's way to the kernel beside it, on sm_90 but for the first.
CLIFFS = {
    "target": (DECODE_FP8, Decode()),
    "dtype": (DECODE_FP8, Decode(dtype=torch.float16)),
    "scale": (DECODE_FP8, Decode(scale=0.0)),
    "d_v": (PREFILL_BF16, Prefill(d_v=256)),
    "d_qk": (PREFILL_BF16, Prefill(rope=128)),
    "latent": (DECODE_FP8, Decode(layout=LatentFp8Layout(256, 64))),
    "rope": (SWAP_AB, Decode(16, layout=PlanarFp8Layout(480, 32, group=32))),
    "fp8 flavour": (DECODE_FP8, Decode(layout=LatentFp8Layout(512, 64, flavour="e4m3fnuz"))),
    "scale group": (DECODE_FP8, Decode(layout=LatentFp8Layout(512, 64, group=256))),
    "query address": (SWAP_AB, Decode(16, q=lambda q: behind(q, 4))),
    "query strides": (PREFILL_BF16, Decode(layout=ROWS, q=lambda q: apart(q, 8))),
    "query heads that span 2^31": (DECODE_FP8, Decode(64, q=far_heads)),
    "two caches, not planar": (DECODE_FP8, Decode(extra=LATENT)),
    "two caches, not alike": (SWAP_AB, Decode(16, PLANAR, extra=PlanarFp8Layout(448, 64, flavour="e4m3fnuz"))),
    "plain cache with a second one": (PREFILL_BF16, Decode(layout=NARROW_ROWS, extra=NARROW_ROWS)),
    "plain cache, not contiguous": (PREFILL_BF16, Decode(layout=ROWS, cache=lambda cache: apart(cache, 576))),
    "cache of another dtype": (SWAP_AB, Decode(16, PlainLayout("fp32", 512, 64))),
    "empty cache": (DECODE_FP8, Decode(blocks=0)),
    "cache address": (DECODE_FP8, Decode(cache=lambda cache: behind(cache, 4))),
    "block stride": (SWAP_AB, Decode(16, cache=lambda cache: apart(cache, 4))),
    "block over 8 GiB": (DECODE_FP8, Decode(cache=huge_block)),
    "kv address": (PREFILL_BF16, Prefill(kv=lambda kv: behind(kv, 1))),
    "kv stride": (PREFILL_BF16, Prefill(kv=lambda kv: apart(kv, 4))),
    "kv stride of few heads": (SWAP_AB, Prefill(16, kv=lambda kv: apart(kv, 1))),
    "fewer than 44 row-blocks": (PREFILL_BF16, Prefill(tokens=21)),
}


def test_nothing_in_the_way():
    """Every kernel is somebody's choice, and none before it is."""
    for kernel, call in (
        (SWAP_AB, Decode(16)), (SWAP_AB, Decode(32, PLANAR, extra=PLANAR)), (SWAP_AB, Prefill(1)), (SWAP_AB, Decode(8, ROWS)),
        (DECODE_FP8, Decode()), (DECODE_FP8, Decode(64, PLANAR, extra=PLANAR)), (PREFILL_BF16, Prefill()),
        (PREFILL_BF16, Decode(layout=NARROW_ROWS)), (SWAP_AB, Decode(48)), (SWAP_AB, Prefill(96)),
    ):  # fmt: skip
        choice = dispatch.choose(call.problem(), H200)
        assert choice.kernel.name == kernel
        before = dispatch.KERNELS[: dispatch.KERNELS.index(choice.kernel)]
        assert not any(other.supports(call.problem(), H200).ok for other in before)
    assert dispatch.choose(Decode().problem(), TARGETS["gfx942"]).kernel.name == "portable"


def test_every_cliff_has_its_reason():
    lines = []
    for name, (kernel, call) in CLIFFS.items():
        target, problem = TARGETS["sm_100" if name == "target" else "sm_90"], call.problem()
        choice = dispatch.choose(problem, target)
        assert choice.kernel.name == "portable", name
        lines.append(f"{name}: {dict(choice.passed_over)[kernel]}")
        if not tables.find(dispatch.KERNELS, kernel).supports(problem, target).able:
            with pytest.raises(ValueError, match=re.escape(dict(choice.passed_over)[kernel])):
                dispatch.choose(problem, target, kernel)
    assert_expected_inline(
        "\n".join(lines),
        """\
target: target: got sm_100, allowed: sm_90
dtype: q dtype: got torch.float16, allowed: torch.bfloat16
scale: scale: got 0.0, allowed: above 0
d_v: d_v: got 256, allowed: 512
d_qk: d_qk: got 640, allowed: 512 or 576
latent: layout: got latent_fp8/256+64/128/e4m3fn/raw, allowed: latent_fp8/512+64 or planar_fp8/448+64
rope: layout: got planar_fp8/480+32/32/e4m3fn, allowed: latent_fp8/512+64 or planar_fp8/448+64
fp8 flavour: layout flavour: got e4m3fnuz, allowed: e4m3fn
scale group: layout group: got 256, allowed: 64 or 128 of latent_fp8
query address: q address: got 8 bytes behind a multiple of 16, allowed: 0
query strides: q strides: got (73736, 576), allowed: multiples of 16
query heads that span 2^31: q heads: got a span of 2147484528 values, allowed: at most 2147483647
two caches, not planar: extra_cache: got one beside latent_fp8/512+64/128/e4m3fn/raw, allowed: beside planar_fp8/448+64 of the same layout
two caches, not alike: extra_layout: got planar_fp8/448+64/64/e4m3fnuz, allowed: planar_fp8/448+64/64/e4m3fn, as the first cache has
plain cache with a second one: extra_cache: got one beside plain rows, allowed: beside planar_fp8/448+64 of the same layout
plain cache, not contiguous: cache block stride: got 37440, allowed: 36864, plain blocks side by side
cache of another dtype: cache dtype: got torch.float32, allowed: torch.bfloat16, as q has
empty cache: cache slots: got 0, allowed: at least 1
cache address: cache address: got 4 bytes behind a multiple of 16, allowed: 0
block stride: cache block stride: got 41988 bytes, allowed: a multiple of 16
block over 8 GiB: cache block: got 8589934928 bytes, allowed: at most 8589934592 bytes
kv address: kv address: got 2 bytes behind a multiple of 16, allowed: 0
kv stride: kv row stride: got 580, allowed: a multiple of 16
kv stride of few heads: kv row stride: got 1154 bytes, allowed: a multiple of 16
fewer than 44 row-blocks: tokens: got 21, faster from 22""",
    )


def test_every_refusal_is_worded_as_an_error():
    for name, (_, call) in CLIFFS.items():
        for kernel in dispatch.KERNELS:
            support = kernel.supports(call.problem(), H200)
            assert support.ok == (not support.reason) and (support.able or not support.ok)
            if not support.ok:
                allowed = "faster (from|up to)" if support.able else "allowed:"
                assert re.fullmatch(rf"[a-z_0-9 ]+: got .+, {allowed} .+", support.reason), name
            if support.able:
                assert kernel.plan(call.problem(), H200).num_warps


def test_a_kernel_that_is_only_slower_can_be_forced():
    problem = Prefill(tokens=21).problem()
    choice = dispatch.choose(problem, H200, PREFILL_BF16)
    assert (choice.kernel.name, choice.plan.tiles) == (PREFILL_BF16, 42)


def test_batch_invariant_rows_are_passed_over_as_their_stand_ins_are():
    few = packed_decode(200, 64, ROWS, 200 * 2048, batch_invariant=True)
    assert dict(dispatch.choose(few, H200).passed_over)[PREFILL_BF16] == "tokens: got 32, faster from 44"
    alone = packed_prefill(1, 64, ROWS, 2048, batch_invariant=True)
    assert dispatch.choose(alone, H200).kernel.name == PREFILL_BF16
