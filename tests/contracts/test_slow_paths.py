"""Every condition by which a call leaves the kernels made for its GPU for the one that every GPU has: explain names it,
and debug mode warns of it."""

from __future__ import annotations

import importlib.util

import pytest
from expecttest import assert_expected_inline

from sparse_attn import explain, explanation, ops
from sparse_attn.framework.target import TARGETS
from sparse_attn.testing.slow_paths import ATTENTION, INDEX


def explained(call, change=None, target="sm_90", **other):
    op, args, kwargs = call.arguments(change, **other)
    return explain(op, *args, target=target, **kwargs)


def warned(call, change=None, target="sm_90", **other):
    op, args, kwargs = call.arguments(change, **other)
    name, (*arguments, _) = explanation.reach(op, *args, **kwargs)
    question = explanation.ask(name, arguments)
    return "; ".join(question.choose(question.problem, TARGETS[target]).slow_path)


def walked(cases):
    """Each with the kernel that takes the call without the change, and why it does not take the call with it."""
    lines = []
    for what, (call, sizes, change, target) in cases.items():
        taken, found = explained(call), explained(call, change, target, **sizes)
        assert taken.kernel.startswith("hopper."), what
        assert found.kernel == "portable", what
        lines.append(f"{what}: {taken.kernel}: {dict(found.passed_over)[taken.kernel]}")
    return "\n".join(lines)


def test_attention_says_why_it_leaves_the_kernels_of_hopper():
    assert_expected_inline(
        walked(ATTENTION),
        """\
scale 0: hopper.decode_fp8: scale: got 0.0, allowed: above 0
scale below 0: hopper.swap_ab: scale: got -1.0, allowed: above 0
plain blocks apart: hopper.prefill_bf16: cache block stride: got 36880, allowed: 36864, plain blocks side by side
plain cache with a second: hopper.prefill_bf16: extra_cache: got one beside plain rows, allowed: beside planar_fp8/448+64 of the same layout
query address: hopper.decode_fp8: q address: got 2 bytes behind a multiple of 16, allowed: 0
query strides: hopper.prefill_bf16: q strides: got (74752, 584), allowed: multiples of 16
heads far apart: hopper.decode_fp8: q heads: got a span of 272730423296 values, allowed: at most 2147483647
kv address: hopper.prefill_bf16: kv address: got 2 bytes behind a multiple of 16, allowed: 0
kv row stride: hopper.prefill_bf16: kv row stride: got 580, allowed: a multiple of 16
kv dtype: hopper.prefill_bf16: cache dtype: got torch.float32, allowed: torch.bfloat16, as q has
two caches, not planar: hopper.decode_fp8: extra_cache: got one beside latent_fp8/512+64/128/e4m3fn/raw, allowed: beside planar_fp8/448+64 of the same layout
two caches, not alike: hopper.decode_fp8: extra_layout: got planar_fp8/448+64/64/e4m3fnuz, allowed: planar_fp8/448+64/64/e4m3fn, as the first cache has
empty cache: hopper.decode_fp8: cache slots: got 0, allowed: at least 1
cache address: hopper.decode_fp8: cache address: got 4 bytes behind a multiple of 16, allowed: 0
block stride: hopper.decode_fp8: cache block stride: got 41988 bytes, allowed: a multiple of 16
block over 8 GiB: hopper.decode_fp8: cache block: got 8589934928 bytes, allowed: at most 8589934592 bytes
another GPU: hopper.decode_fp8: target: got sm_100, allowed: sm_90
query dtype: hopper.decode_fp8: q dtype: got torch.float32, allowed: torch.bfloat16
d_v: hopper.prefill_bf16: d_v: got 256, allowed: 512
d_qk: hopper.prefill_bf16: d_qk: got 544, allowed: 512 or 576
few rows, plain: hopper.prefill_bf16: tokens: got 21, faster from 22
latent or rope: hopper.decode_fp8: layout: got latent_fp8/256+64/128/e4m3fn/raw, allowed: latent_fp8/512+64 or planar_fp8/448+64
flavour: hopper.decode_fp8: layout flavour: got e4m3fnuz, allowed: e4m3fn
group: hopper.decode_fp8: layout group: got 256, allowed: 64 or 128 of latent_fp8
group, planar: hopper.decode_fp8: layout group: got 32, allowed: 64 of planar_fp8""",
    )


def test_scores_say_why_they_leave_the_kernels_of_hopper():
    assert_expected_inline(
        walked(INDEX),
        """\
another GPU: hopper.paged: target: got sm_89, allowed: sm_90
heads: hopper.paged: heads: got 16, allowed: 32, 64, 128
dim: hopper.prefill: dim: got 64, allowed: 128
plain keys: hopper.paged: flavour: got none, allowed: e4m3fn
flavour: hopper.prefill: flavour: got e4m3fnuz, allowed: e4m3fn
block size: hopper.paged: block_size: got 32, allowed: 64
empty cache: hopper.paged: cache blocks: got 0, allowed: at least 1
cache address: hopper.paged: cache address: got 4 bytes behind a multiple of 16, allowed: 0
block stride: hopper.paged: cache block stride: got 8452, allowed: a multiple of 16, at least 8448
MXFP4 block size: hopper.paged_mxfp4: block_size: got 32, allowed: 64
MXFP4 empty cache: hopper.paged_mxfp4: cache blocks: got 0, allowed: at least 1
MXFP4 block stride: hopper.paged_mxfp4: cache block stride: got 4356, allowed: a multiple of 16, at least 4352
MXFP4 query strides: hopper.paged_mxfp4: q strides: got [4360, 4352, 68, 1], allowed: multiples of 16 of requests and rows
MXFP4 query address: hopper.paged_mxfp4: q address: got 4 bytes behind a multiple of 16, allowed: 0
MXFP4 query stride, contiguous keys: hopper.prefill_mxfp4: q row stride: got 4360, allowed: a multiple of 16
MXFP4 query address, contiguous keys: hopper.prefill_mxfp4: q address: got 4 bytes behind a multiple of 16, allowed: 0
MXFP4 key stride: hopper.prefill_mxfp4: k row stride: got 72, allowed: a multiple of 16, at least 64
MXFP4 key address: hopper.prefill_mxfp4: k address: got 8 bytes behind a multiple of 16, allowed: 0
MXFP4 scale stride: hopper.prefill_mxfp4: k_scale: got strides [8, 1], allowed: contiguous
MXFP4 scale address: hopper.prefill_mxfp4: k_scale address: got 4 bytes behind a multiple of 16, allowed: 0
query strides: hopper.paged: q: got strides [16384, 16384, 256, 1], allowed: contiguous
query strides, contiguous keys: hopper.prefill: q: got strides [16384, 256, 1], allowed: contiguous
query address: hopper.paged: q address: got 1 bytes behind a multiple of 16, allowed: 0
query address, contiguous keys: hopper.prefill: q address: got 1 bytes behind a multiple of 16, allowed: 0
key stride: hopper.prefill: k row stride: got 136, allowed: a multiple of 16, at least 128
key address: hopper.prefill: k address: got 8 bytes behind a multiple of 16, allowed: 0
scale address: hopper.prefill: k_scale address: got 4 bytes behind a multiple of 16, allowed: 0
scale stride: hopper.prefill: k_scale: got strides [2], allowed: a contiguous last dimension
weights address: hopper.prefill: weights address: got 4 bytes behind a multiple of 16, allowed: 0
weights stride: hopper.prefill: weights row stride: got 65, allowed: a multiple of 4, at least 64""",
    )


def test_kernels_made_for_one_gpu_are_asked_first():
    """So those that a choice has passed over are all of them."""
    for package in ops.packages():
        if importlib.util.find_spec(f"sparse_attn.ops.{package}.dispatch"):
            tables = vars(importlib.import_module(f"sparse_attn.ops.{package}.dispatch")).items()
            for table in [value for name, value in tables if name.endswith("KERNELS")]:
                made = [kernel.folder is not None for kernel in table]
                assert made == sorted(made, reverse=True), [kernel.name for kernel in table]


CASES = {
    f"{op}, {what}": case for op, cases in (("attention", ATTENTION), ("scores", INDEX)) for what, case in cases.items()
}


@pytest.mark.parametrize("what", CASES)
def test_debug_mode_would_warn_with_the_reason(what):
    """Unless the GPU has no faster kernel, or that would be slower here."""
    call, sizes, change, target = CASES[what]
    reasons = explained(call, change, target, **sizes).passed_over
    told = warned(call, change, target, **sizes)
    if target != "sm_90" or "faster from" in reasons[-1][1]:
        assert told == ""
    else:
        assert told == "; ".join(f"{kernel}: {reason}" for kernel, reason in reasons)
    assert warned(call) == ""
