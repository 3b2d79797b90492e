"""One table an operator: which kernel runs, why not those before it, and how to force another."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline
from support.topk import ranges, scores

from sparse_attn.framework import dispatch
from sparse_attn.framework.dispatch import YES, Choice, Kernel, no, slower
from sparse_attn.framework.target import CPU, H200, Target, target_of
from sparse_attn.ops.topk.select import dispatch as topk
from sparse_attn.ops.topk.select import reference, top_k_per_row
from sparse_attn.ops.topk.select.plan import Problem
from sparse_attn.testing.launches import TARGETS
from sparse_attn.workspace import Scratch


def table_of(*supports):
    def kernel(number, support):
        return Kernel(f"kernel{number}", lambda problem, target: support, lambda problem, target: problem + 1, table_of)

    return tuple(kernel(number, support) for number, support in enumerate(supports))


def test_the_first_kernel_that_supports_the_problem_is_taken():
    kernels = table_of(no("k: got 7, allowed: at most 6"), slower("rows: got 1, faster from 2"), YES, YES)
    choice = dispatch.choose(kernels, 7, CPU)
    assert (choice.kernel.name, choice.plan) == ("kernel2", 8)
    assert choice.passed_over == (
        ("kernel0", "k: got 7, allowed: at most 6"),
        ("kernel1", "rows: got 1, faster from 2"),
    )
    with pytest.raises(ValueError, match="^kernel0: k: got 7, allowed: at most 6; kernel1: rows: got 1"):
        dispatch.choose(kernels[:2], 7, CPU)


def test_a_kernel_is_forced_wherever_it_is_able():
    kernels = table_of(no("k: got 7, allowed: at most 6"), slower("rows: got 1, faster from 2"), YES, YES)
    for name in ("kernel1", "kernel2", "kernel3"):
        choice = dispatch.choose(kernels, 7, CPU, name)
        assert (choice.kernel.name, choice.plan, choice.passed_over) == (name, 8, ())
    made = Choice(kernels[0], 0)
    assert dispatch.choose(kernels, 7, CPU, made) is made
    with pytest.raises(ValueError, match=r"^k: got 7, allowed: at most 6 \(impl='kernel0'\)$"):
        dispatch.choose(kernels, 7, CPU, "kernel0")
    with pytest.raises(ValueError, match="^impl: got 'kernel4', allowed: kernel0, kernel1, kernel2, kernel3$"):
        dispatch.choose(kernels, 7, CPU, "kernel4")


def test_a_launcher_is_imported_when_it_is_taken():
    taken = []
    one = Kernel("one", table_of, table_of, lambda: taken.append("imported") or reference.top_k_per_row)
    assert not taken
    assert one.launcher is one.launcher is reference.top_k_per_row and taken == ["imported"]
    for kernel in topk.KERNELS:
        assert callable(kernel.launcher), kernel.name
    assert len({kernel.name for kernel in topk.KERNELS}) == len(topk.KERNELS)


def test_impl_names_a_kernel_of_the_op():
    x = scores("normal", 2, 40)
    names = "auto, reference, triton, hopper.cluster, group_maxima, .*streaming"
    with pytest.raises(ValueError, match=f"^impl: got 'cuda', allowed: {names}$"):
        top_k_per_row(x, 3, impl="cuda")
    if target_of(torch.device("cpu")) is CPU:
        with pytest.raises(ValueError, match="^impl: 'single_cta' needs a CUDA or HIP tensor"):
            top_k_per_row(x, 3, impl="single_cta")


def test_the_interpreter_refuses_what_it_cannot_run():
    """A kernel in Gluon, at widths where it is chosen on sm_90 and where it is not."""
    interpreted = Target("cpu", "", 4, 1 << 20, interpreted=True)
    for width in (5000, 9000):
        with pytest.raises(ValueError, match=r"^target: got cpu, allowed: sm_90 \(impl='hopper.cluster'\)$"):
            topk.choose(Problem(2, width, 5), interpreted, "hopper.cluster")


WHY = (
    ("sm_90", Problem(64, 8192, 2048)),
    ("sm_90", Problem(64, 131072, 2048)),
    ("sm_90", Problem(64, 131072, 2048, group_maxima=True)),
    ("sm_90", Problem(64, 131072, 4097, group_maxima=True)),
    ("sm_90", Problem(1, 1 << 20, 7000, group_maxima=True)),
    ("sm_100", Problem(4096, 131072, 512, group_maxima=True)),
    ("gfx942", Problem(4096, 131072, 7000)),
)


PAGE = [[cell.strip() for cell in line.split("|")] for line in topk.__doc__.splitlines() if re.match(r" *\d+ \|", line)]
SMS = H200.num_sms


def test_the_page_of_selections_lists_all_in_the_order_of_their_numbers():
    assert sorted(line[0] for line in PAGE) == sorted(str(number + 1) for number in range(len(topk.KERNELS)))
    assert [topk.KERNELS[int(number) - 1].name for number, *_ in PAGE] == [name for _, name, *_ in PAGE]


@pytest.mark.parametrize("line", PAGE, ids=lambda line: line[1])
def test_a_selection_takes_what_the_page_says(line):
    """Each limit, one beyond it, and the least size that is not slower."""
    _, name, on, columns, rows, k = line
    supports = topk.dispatch.find(topk.KERNELS, name).supports
    rows = rows.replace("to 1 an SM", f"to {SMS}").replace("above 2 an SM", f"from {2 * SMS + 1}")
    width = re.search(r"to (\d+)", columns)
    fits = Problem({"appended": 32, "multi_pass": 1000}.get(name, 2), int(width[1]) if width else 1 << 20, 512, True)
    for target, facts in TARGETS.items():
        fitting = {"any": True, "NVIDIA": target.startswith("sm_"), "sm_90": target == "sm_90"}[on]
        assert supports(fits, facts).able == fitting
    assert supports(fits, H200).ok
    for field, text in (("width", columns), ("rows", rows), ("k", k)):
        for word, beyond in ((r"(\d+) to", -1), (r"to (\d+)", 1)):
            for size in re.findall(word, text):
                assert supports(fits._replace(**{field: int(size)}), H200).able
                assert not supports(fits._replace(**{field: int(size) + beyond}), H200).able
        for size in re.findall(r"faster from (\d+)", text):
            assert supports(fits._replace(**{field: int(size)}), H200).ok
            slow = supports(fits._replace(**{field: int(size) - 1}), H200)
            assert slow.able and not slow.ok


def test_why_other_selections_are_passed_over():
    lines = []
    for name, problem in WHY:
        choice = topk.choose(problem, TARGETS[name])
        maxima = ", group maxima" if problem.group_maxima else ""
        lines.append(f"{name}, {problem.rows} x {problem.width}, k {problem.k}{maxima}: {choice.kernel.name}")
        lines += [f"  {kernel}: {reason}" for kernel, reason in choice.passed_over]
    assert_expected_inline(
        "\n".join(lines),
        """\
sm_90, 64 x 8192, k 2048: single_cta
  hopper.cluster: rows: got 64, allowed: at most 8
  group_maxima: group maxima: got none, allowed: of every 8 scores, as index_topk_decode computes them
  single_cta_bf16: k: got 2048, faster up to 1024 (at most 132 rows of at most 8192 columns)
sm_90, 64 x 131072, k 2048: appended
  hopper.cluster: rows: got 64, allowed: at most 8
  group_maxima: group maxima: got none, allowed: of every 8 scores, as index_topk_decode computes them
  single_cta_bf16: width: got 131072, allowed: 4097 to 32768
  single_cta: width: got 131072, allowed: at most 32768
  multi_cta: rows: got 64, allowed: at most 16 (131072 columns take 8 CTAs a row)
  multi_pass: rows: got 64, faster from 265
sm_90, 64 x 131072, k 2048, group maxima: group_maxima
  hopper.cluster: rows: got 64, allowed: at most 8
sm_90, 64 x 131072, k 4097, group maxima: sampled
  hopper.cluster: rows: got 64, allowed: at most 8
  group_maxima: k: got 4097, allowed: at most 4096
  single_cta_bf16: width: got 131072, allowed: 4097 to 32768
  single_cta: width: got 131072, allowed: at most 32768
  multi_cta: k: got 4097, allowed: at most 4096
  multi_pass: rows: got 64, faster from 265
  appended: k: got 4097, allowed: at most 4096
sm_90, 1 x 1048576, k 7000, group maxima: streaming
  hopper.cluster: width: got 1048576, allowed: 4097 to 131072
  group_maxima: width: got 1048576, allowed: at most 262144
  single_cta_bf16: width: got 1048576, allowed: 4097 to 32768
  single_cta: width: got 1048576, allowed: at most 32768
  multi_cta: width: got 1048576, allowed: 32769 to 262144
  multi_pass: k: got 7000, allowed: at most 6553
  appended: width: got 1048576, allowed: 32769 to 262144
  sampled: k: got 7000, allowed: at most 6553
sm_100, 4096 x 131072, k 512, group maxima: multi_pass
  hopper.cluster: target: got sm_100, allowed: sm_90
  group_maxima: target: got sm_100, allowed: sm_90
  single_cta_bf16: target: got sm_100, allowed: sm_90
  single_cta: width: got 131072, allowed: at most 32768
  multi_cta: rows: got 4096, allowed: at most 18 (131072 columns take 8 CTAs a row)
gfx942, 4096 x 131072, k 7000: thresholds.streaming
  hopper.cluster: target: got gfx942, allowed: sm_90
  group_maxima: target: got gfx942, allowed: sm_90
  single_cta_bf16: target: got gfx942, allowed: sm_90
  single_cta: target: got gfx942, allowed: NVIDIA
  multi_cta: target: got gfx942, allowed: NVIDIA
  multi_pass: target: got gfx942, allowed: NVIDIA
  appended: target: got gfx942, allowed: sm_90
  sampled: target: got gfx942, allowed: NVIDIA
  streaming: target: got gfx942, allowed: NVIDIA
  thresholds.single_cta: width: got 131072, allowed: at most 8192
  thresholds.sampled: k: got 7000, allowed: at most 6553""",
    )


@pytest.mark.parametrize("target", TARGETS)
def test_every_refusal_is_worded_as_an_error(target):
    for rows in (1, 8, 200, 4096):
        for width in (1000, 8192, 32768, 131072, 1 << 20):
            for k in (512, 2048, 5000, 7000):
                for group_maxima in (False, True):
                    problem = Problem(rows, width, k, group_maxima)
                    for kernel in topk.KERNELS:
                        support = kernel.supports(problem, TARGETS[target])
                        assert support.ok == (not support.reason) and (support.able or not support.ok)
                        if not support.ok:
                            allowed = "faster" if support.able else "allowed:"
                            assert re.fullmatch(rf"[a-z ]+: got .+, {allowed} .+", support.reason), support.reason
                        if support.able:
                            assert isinstance(kernel.plan(problem, TARGETS[target]).scratch, Scratch)


@pytest.mark.kernel
@pytest.mark.parametrize("kernel", [kernel.name for kernel in topk.KERNELS])
def test_kernel_forced(kernel, device, dirty_workspace):
    """Every kernel selects the same wherever it is able, and says why where it is not."""
    x, k = scores("normal", 2, 5000), 100
    starts, ends = ranges(2, 5000)
    target, problem = target_of(device), Problem(2, 5000, k)
    support = topk.dispatch.find(topk.KERNELS, kernel).supports(problem, target)
    limits = starts.to(device), ends.to(device)
    if not support.able:
        assert kernel in ("hopper.cluster", "group_maxima", "multi_cta", "appended")
        with pytest.raises(ValueError, match=re.escape(f"{support.reason} (impl={kernel!r})")):
            top_k_per_row(x.to(device), k, *limits, impl=kernel)
    else:
        want = reference.top_k_per_row(x, starts, ends, k)
        assert torch.equal(top_k_per_row(x.to(device), k, *limits, impl=kernel).cpu(), want)
