"""The tables of the index scores: which kernel runs, why not the one before it, and how to force one."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline
from support.index_logits import (
    U8,
    meta,
    paged_arguments,
    paged_problem,
    paged_problem_of,
    prefill_arguments,
    prefill_problem,
    prefill_problem_of,
)

from sparse_attn import fp8_mqa_logits, fp8_paged_mqa_logits
from sparse_attn.framework.target import CPU, target_of
from sparse_attn.layout import IndexFp8Layout
from sparse_attn.ops.indexer.scores import dispatch, reference
from sparse_attn.testing.launches import TARGETS

PLAIN = dict(flavour="none", dtype=torch.bfloat16)
FNUZ = dict(flavour="e4m3fnuz")
SM_90 = TARGETS["sm_90"]


def prefill_of(**others):
    """Of a call in which some arguments are others."""
    names = ("q", "k", "k_scale", "weights", "kv_start", "kv_end", "flavour")
    return prefill_problem_of(**dict(zip(names, prefill_arguments())) | others)


def paged_of(**others):
    names = ("q", "cache", "weights", "context_lens", "block_table", "max_context_len", "layout")
    return paged_problem_of(**dict(zip(names, paged_arguments())) | others)


def behind_a_line(memory):
    return memory._replace(offset=4)


WHY = (
    ("fnuz codes", prefill_problem(**FNUZ), paged_problem(**FNUZ)),
    ("bf16", prefill_problem(**PLAIN), paged_problem(**PLAIN)),
    ("48 heads", prefill_problem(heads=48), paged_problem(heads=48)),
    ("256 values", prefill_problem(dim=256), paged_problem(dim=256)),
    ("rows of q apart", prefill_of(q=meta(100, 65, 128, dtype=U8)[:, :64]), paged_of(q=meta(3, 3, 64, 128, dtype=U8)[:, :2])),
    ("q anywhere", prefill_problem()._replace(q=behind_a_line(prefill_problem().q)),
     paged_problem()._replace(q=behind_a_line(paged_problem().q))),
    ("lines of k apart", prefill_of(k=meta(5000, 132, dtype=U8)[:, :128]), None),
    ("k anywhere", prefill_problem()._replace(k=behind_a_line(prefill_problem().k)), None),
    ("every second scale", prefill_of(k_scale=meta(10000)[::2]), None),
    ("weights between lines", prefill_of(weights=meta(100, 66)[:, :64]), None),
    ("weights turned", prefill_of(weights=meta(64, 100).t()), None),
    ("one row's weights", prefill_of(weights=meta(1, 64).expand(100, 64)), None),
    ("no blocks", None, paged_problem(blocks=0)),
    ("blocks of 32", None, paged_problem(block_size=32)),
    ("blocks between lines", None, paged_of(cache=meta(700, 64 * 132 + 4, dtype=U8)[:, : 64 * 132].unflatten(1, (64, 132)))),
    ("cache anywhere", None, paged_problem()._replace(cache=behind_a_line(paged_problem().cache))),
)  # fmt: skip


def test_why_hopper_kernels_are_passed_over():
    lines = []
    for name, *problems in WHY:
        lines.append(name)
        for choose, problem in zip((dispatch.choose_prefill, dispatch.choose_paged), problems):
            if problem is not None:
                choice = choose(problem, SM_90)
                assert choice.kernel.name == "portable"
                lines += [f"  {kernel}: {reason}" for kernel, reason in choice.passed_over]
    assert_expected_inline(
        "\n".join(lines),
        """\
fnuz codes
  hopper.prefill: flavour: got e4m3fnuz, allowed: e4m3fn
  hopper.prefill_mxfp4: flavour: got e4m3fnuz, allowed: mxfp4
  hopper.paged: flavour: got e4m3fnuz, allowed: e4m3fn
  hopper.paged_mxfp4: flavour: got e4m3fnuz, allowed: mxfp4
bf16
  hopper.prefill: flavour: got none, allowed: e4m3fn
  hopper.prefill_mxfp4: flavour: got none, allowed: mxfp4
  hopper.paged: flavour: got none, allowed: e4m3fn
  hopper.paged_mxfp4: flavour: got none, allowed: mxfp4
48 heads
  hopper.prefill: heads: got 48, allowed: 32, 64, 128
  hopper.prefill_mxfp4: flavour: got e4m3fn, allowed: mxfp4
  hopper.paged: heads: got 48, allowed: 32, 64, 128
  hopper.paged_mxfp4: flavour: got e4m3fn, allowed: mxfp4
256 values
  hopper.prefill: dim: got 256, allowed: 128
  hopper.prefill_mxfp4: flavour: got e4m3fn, allowed: mxfp4
  hopper.paged: dim: got 256, allowed: 128
  hopper.paged_mxfp4: flavour: got e4m3fn, allowed: mxfp4
rows of q apart
  hopper.prefill: q: got strides [8320, 128, 1], allowed: contiguous
  hopper.prefill_mxfp4: flavour: got e4m3fn, allowed: mxfp4
  hopper.paged: q: got strides [24576, 8192, 128, 1], allowed: contiguous
  hopper.paged_mxfp4: flavour: got e4m3fn, allowed: mxfp4
q anywhere
  hopper.prefill: q address: got 4 bytes behind a multiple of 16, allowed: 0
  hopper.prefill_mxfp4: flavour: got e4m3fn, allowed: mxfp4
  hopper.paged: q address: got 4 bytes behind a multiple of 16, allowed: 0
  hopper.paged_mxfp4: flavour: got e4m3fn, allowed: mxfp4
lines of k apart
  hopper.prefill: k row stride: got 132, allowed: a multiple of 16, at least 128
  hopper.prefill_mxfp4: flavour: got e4m3fn, allowed: mxfp4
k anywhere
  hopper.prefill: k address: got 4 bytes behind a multiple of 16, allowed: 0
  hopper.prefill_mxfp4: flavour: got e4m3fn, allowed: mxfp4
every second scale
  hopper.prefill: k_scale: got strides [2], allowed: a contiguous last dimension
  hopper.prefill_mxfp4: flavour: got e4m3fn, allowed: mxfp4
weights between lines
  hopper.prefill: weights row stride: got 66, allowed: a multiple of 4, at least 64
  hopper.prefill_mxfp4: flavour: got e4m3fn, allowed: mxfp4
weights turned
  hopper.prefill: weights: got strides [1, 100], allowed: a contiguous last dimension
  hopper.prefill_mxfp4: flavour: got e4m3fn, allowed: mxfp4
one row's weights
  hopper.prefill: weights row stride: got 0, allowed: a multiple of 4, at least 64
  hopper.prefill_mxfp4: flavour: got e4m3fn, allowed: mxfp4
no blocks
  hopper.paged: cache blocks: got 0, allowed: at least 1
  hopper.paged_mxfp4: flavour: got e4m3fn, allowed: mxfp4
blocks of 32
  hopper.paged: block_size: got 32, allowed: 64
  hopper.paged_mxfp4: flavour: got e4m3fn, allowed: mxfp4
blocks between lines
  hopper.paged: cache block stride: got 8452, allowed: a multiple of 16, at least 8448
  hopper.paged_mxfp4: flavour: got e4m3fn, allowed: mxfp4
cache anywhere
  hopper.paged: cache address: got 4 bytes behind a multiple of 16, allowed: 0
  hopper.paged_mxfp4: flavour: got e4m3fn, allowed: mxfp4""",
    )


def test_forms_that_tma_copies():
    """Strides and gaps that lie between lines are seen; these do not."""
    line = prefill_of(weights=meta(100, 68)[:, :64], k=meta(5000, 144, dtype=U8)[:, :128])
    assert dispatch.choose_prefill(line, SM_90).kernel.name == "hopper.prefill"
    gap = meta(700, 64 * 132 + 16, dtype=U8)[:, : 64 * 132].unflatten(1, (64, 132))
    assert dispatch.choose_paged(paged_of(cache=gap), SM_90).kernel.name == "hopper.paged"


@pytest.mark.parametrize("target", TARGETS)
def test_every_refusal_is_worded_as_an_error(target):
    seen = set()
    for kernels, place in ((dispatch.PREFILL_KERNELS, 1), (dispatch.PAGED_KERNELS, 2)):
        for case in WHY:
            for kernel in kernels if case[place] is not None else ():
                support = kernel.supports(case[place], TARGETS[target])
                assert support.ok == support.able == (not support.reason)
                assert support.ok or re.fullmatch(r"[a-z_ ]+: got .+, allowed: .+", support.reason), support.reason
                seen.add(kernel.name)
    assert len(seen) == 5


def test_kernels_have_their_launchers():
    for kernels in (dispatch.PREFILL_KERNELS, dispatch.PAGED_KERNELS):
        assert all(callable(kernel.launcher) for kernel in kernels)
        assert len({kernel.name for kernel in kernels}) == len(kernels)


def test_rows_scored_at_a_time_are_what_is_launched():
    """A fused op takes some of a call's rows at once."""
    whole, some = prefill_problem(4096, 131072), prefill_problem_of(*prefill_arguments(4096, 131072), rows=8)
    assert whole._replace(rows=8) == some
    target = TARGETS["sm_80"]
    assert [dispatch.choose_prefill(problem, target).plan.block_q for problem in (whole, some)] == [64, 8]
    whole, some = paged_problem(64), paged_problem_of(*paged_arguments(64), requests=1)
    assert whole._replace(requests=1) == some
    assert dispatch.choose_paged(some, target).plan.ctas_per_block == 79  # as many as there are tiles


def case(device):
    torch.manual_seed(0)
    layout = IndexFp8Layout(32)
    # Small whole numbers: their products are exact in every matrix unit.
    q, k, keys = (
        torch.randint(0, 8, shape, device=device).to(torch.float8_e4m3fn).view(U8)
        for shape in ((3, 4, 32), (70, 32), (5, 16 * 32))
    )
    ends = torch.tensor([70, 0, 33], dtype=torch.int32, device=device)
    cache = torch.zeros(5, 16, layout.row, dtype=U8, device=device)
    cache.view(5, -1)[:, : 16 * 32] = keys
    cache.view(5, -1)[:, 16 * 32 :].view(torch.float32).uniform_(0.5, 1.5)
    table = torch.tensor([[4, 0, -1, 2, 1]] * 3, dtype=torch.int32, device=device)
    weights, scale = torch.randn(3, 4, device=device), torch.rand(70, device=device)
    prefill = (q, k, scale, weights, torch.zeros_like(ends), ends)
    return prefill, (q[:, None].contiguous(), cache, weights, ends[:, None].contiguous(), table, 70, layout)


@pytest.mark.kernel
def test_kernel_forced(device):
    """The portable kernels wherever they are named; the others say why they are not able."""
    prefill, paged = case(device)
    for run, arguments, want in (
        (fp8_mqa_logits, prefill, reference.mqa_logits(*prefill, "e4m3fn")),
        (fp8_paged_mqa_logits, paged, reference.paged_mqa_logits(*paged[:-1], paged[-1].name)),
    ):
        forced = run(*arguments, impl="portable")
        assert torch.equal(forced, run(*arguments, impl="triton"))
        torch.testing.assert_close(forced, want, rtol=1e-5, atol=1e-5)
        name = "hopper.prefill" if run is fp8_mqa_logits else "hopper.paged"
        wrong = "heads: got 4" if target_of(device) == SM_90 else "target: got "
        with pytest.raises(ValueError, match=rf"^{wrong}.*, allowed: .* \(impl='{name}'\)$"):
            run(*arguments, impl=name)


def test_impl_names_a_kernel_of_the_op():
    prefill, paged = case("cpu")
    for run, arguments, name in (
        (fp8_mqa_logits, prefill, "prefill, hopper.prefill_mxfp4"),
        (fp8_paged_mqa_logits, paged, "paged, hopper.paged_mxfp4"),
    ):
        with pytest.raises(ValueError, match=f"^impl: got 'cuda', allowed: auto, .*, hopper.{name}, portable$"):
            run(*arguments, impl="cuda")
        if target_of(torch.device("cpu")) is CPU:
            with pytest.raises(ValueError, match="^impl: 'portable' needs a CUDA or HIP tensor"):
                run(*arguments, impl="portable")
