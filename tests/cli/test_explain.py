"""explain: the kernel a call takes, how it is launched, its floors, and why the kernels before it do not run."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from expecttest import assert_expected_inline

from sparse_attn import explanation, roofline
from sparse_attn.cli import report
from sparse_attn.cli.explain_calls import CALLS
from sparse_attn.cli.main import main
from sparse_attn.explanation import explain
from sparse_attn.framework.dispatch import Kernel
from sparse_attn.framework.registration import OPERATORS
from sparse_attn.framework.target import H200, TARGETS, target_of
from sparse_attn.framework.torch_private import map_leaves
from sparse_attn.ops.topk.select import dispatch as selection
from sparse_attn.ops.topk.select.plan import Problem
from sparse_attn.testing.ops import public_functions
from sparse_attn.types import Ragged


def logits(rows, width, device="meta"):
    return torch.empty(rows, width, dtype=torch.float32, device=device)


def explained(call, **sizes):
    op, args, kwargs = CALLS[call].arguments(**CALLS[call].defaults | sizes)
    return str(explain(op, *args, target="sm_90", **kwargs))


def test_a_selection_is_explained():
    assert_expected_inline(
        str(explain("top_k_per_row", logits(64, 131072), 2048, target="sm_90")),
        """\
top_k_per_row on sm_90: appended
  plan: slots 8192, num_warps 16, ctas_per_row 2, rows 64, width 131072, tile 8192, chunk 4096, bound (candidates 4096, samples 4096, run 8), reserved_ctas 264, ctas 128, aligned true, waves 0.97
  scratch: 8,652,032 bytes, 64 counters
    candidates int32 [264, 8192]
    counts int32 [264]
  floors on NVIDIA H200: bytes 7.9 us, operations 0.0 us (measured: a large copy, large matrix products)
  passed over:
    hopper.cluster: rows: got 64, allowed: at most 8
    group_maxima: group maxima: got none, allowed: of every 8 scores, as index_topk_decode computes them
    single_cta_bf16: width: got 131072, allowed: 4097 to 32768
    single_cta: width: got 131072, allowed: at most 32768
    multi_cta: rows: got 64, allowed: at most 16 (131072 columns take 8 CTAs a row)
    multi_pass: rows: got 64, faster from 265""",
    )


def test_attention_is_explained():
    assert_expected_inline(
        explained("attention_decode", tokens=150),
        """\
sparse_attn_decode on sm_90: hopper.decode_fp8
  plan: blocks 2, waves [(first 0, rows 132, splits 1), (first 132, rows 18, splits 3)], combine (block_s 4, lanes 1, block_m 2, pairs 2304, grid [64, 18]), launch_dependents true, consumer_registers 192, producer_registers 64, num_warps 4
  scratch: 7,160,832 bytes, 0 counters
    out_partial float16 [3, 18, 128, 512]
    lse_partial float32 [3, 18, 128]
    scale_partial float32 [3, 18, 128, 2]
  floors on NVIDIA H200: bytes 57.4 us, operations 106.3 us (measured: a large copy, large matrix products)
  passed over:
    hopper.swap_ab: heads: got 128, faster up to 32""",
    )


def test_a_fused_operator_is_explained_with_its_scores():
    assert_expected_inline(
        explained("index_topk_decode", tokens=8, next_n=2, context=131072),
        """\
index_topk_decode on sm_90: hopper.cluster
  plan: slots 16384, num_warps 16, ctas_per_row 8, window_shift 14, ctas 64, rows_at_once 8, waves 0.48
  scratch: 4,194,304 bytes, 0 counters
    logits float32 [8, 131072]
  floors on NVIDIA H200: bytes 16.3 us, operations 11.2 us (measured: a large copy, large matrix products)
  scores on sm_90: hopper.paged
    plan: block_q 2, ctas 132, stages 8, consumer_registers 112, producer_registers 32, waves 1.0
    scratch: 0 bytes, 0 counters
    floors on NVIDIA H200: bytes 17.2 us, operations 11.2 us (measured: a large copy, large matrix products)""",
    )


@pytest.mark.parametrize("name", TARGETS)
def test_it_is_the_choice_of_the_table(name):
    for rows, width, k in ((1, 4096, 2048), (64, 32768, 512), (4096, 131072, 2048), (3, 1 << 20, 7000)):
        found = explain("top_k_per_row", logits(rows, width), k, target=name)
        choice = selection.choose(Problem(rows, width, k), TARGETS[name])
        assert (found.kernel, found.plan, found.passed_over) == (choice.kernel.name, choice.plan, choice.passed_over)
        assert found.target is TARGETS[name] and dict(found.facts)["ctas"] == choice.plan.ctas(rows)


@pytest.mark.kernel
@pytest.mark.parametrize("call, sizes", [
    ("attention_decode", dict(tokens=3, heads=64, top_k=128, context=256)),
    ("attention_decode", dict(tokens=3, heads=24, top_k=64, context=256, layout="bf16")),
    ("attention_prefill", dict(tokens=50, heads=64, top_k=64, context=100)),
    ("attention_prefill", dict(tokens=50, heads=40, top_k=64, context=100)),
    ("paged_scores", dict(tokens=4, next_n=2, context=300)), ("paged_scores", dict(tokens=4, context=300, block_size=32)),
    ("prefill_scores", dict(tokens=9, context=300)), ("prefill_scores", dict(tokens=9, context=300, layout="fp32")),
    ("topk", dict(tokens=3, width=9000, top_k=64)), ("index_topk_prefill", dict(tokens=3, context=9000, top_k=64)),
    ("index_topk_decode", dict(tokens=4, context=9000, top_k=64)),
    ("grouped_linear", dict(tokens=7, groups=3, outputs=40, columns=256)),
    ("grouped_linear", dict(tokens=7, groups=3, outputs=40, columns=64, layout="e2m1/1x32/e8m0", dtype="fp32")),
    ("grouped_linear", dict(tokens=7, groups=3, outputs=40, columns=64, layout="plain")),
    ("grouped_linear", dict(tokens=7, groups=3, outputs=40, columns=256, activations="fp8")),
    ("packed_experts", dict(tokens=3, groups=5, experts_per_token=2, hidden=256, intermediate=128)),
    ("packed_experts", dict(tokens=3, groups=5, experts_per_token=2, hidden=64, intermediate=32, layout="e2m1/1x32/e8m0")),
])  # fmt: skip
def test_what_is_explained_is_launched(call, sizes, device, monkeypatch):
    """Launchers are noted, not run."""
    launched = []
    monkeypatch.setattr(Kernel, "launcher", property(lambda kernel: lambda *given: launched.append((kernel, given))))
    op, args, kwargs = CALLS[call].arguments(**CALLS[call].defaults | sizes)
    args = map_leaves(lambda one: torch.zeros_like(one, device=device) if isinstance(one, torch.Tensor) else one, args)
    explanation.FUNCTIONS[op](*args, **kwargs, impl="triton")
    found = explain(op, *args, **kwargs, impl="triton")
    want = [found] if found.scores is None else [found.scores, found]
    assert [kernel.name for kernel, _ in launched] == [one.kernel for one in want]
    for one, (_, given) in zip(want, launched):
        assert one.plan in given


def test_addresses_and_strides_of_real_tensors_count():
    q, kv = torch.zeros(200 * 64 * 576 + 1, dtype=torch.bfloat16), torch.zeros(8, 576, dtype=torch.bfloat16)
    rows = Ragged(torch.zeros(200, dtype=torch.int32), torch.zeros(201, dtype=torch.int32))
    for start, why in ((0, None), (1, "q address: got 2 bytes behind a multiple of 16, allowed: 0")):
        some = q[start : q.numel() - 1 + start].view(200, 64, 576)
        found = explain("sparse_attn_prefill", some, kv, rows, scale=1.0, d_v=512, target="sm_90")
        assert found.kernel == ("portable" if why else "hopper.prefill_bf16")
        assert dict(found.passed_over).get("hopper.prefill_bf16") == why
    for width, aligned in ((8, True), (9, False)):
        found = explain("top_k_per_row", torch.zeros(2, width)[:, :8], 3, target="sm_90")
        assert dict(found.facts)["aligned"] == aligned


def test_tensors_may_be_real_or_on_meta():
    real, row_ends = torch.full((3, 5000), math.nan), torch.tensor([1, -7, 1 << 30], dtype=torch.int32)
    real.requires_grad_()
    on_meta = explain("top_k_per_row", logits(3, 5000), 9, None, row_ends.to("meta"), target="sm_80")
    assert explain("top_k_per_row", real, 9, row_ends=row_ends, target=TARGETS["sm_80"]) == on_meta


def test_where_the_tensors_are_is_the_target_unless_one_is_given():
    here = explain("top_k_per_row", torch.zeros(2, 8), 3)
    assert here.target == target_of(torch.device("cpu")) and (here.kernel, here.plan) == ("reference", None)
    assert str(here) == "top_k_per_row on cpu: reference"
    if not torch.cuda.is_available():
        assert explain("top_k_per_row", logits(2, 8), 3).target == H200
    assert explain("top_k_per_row", torch.zeros(2, 8), 3, target="gfx942").kernel == "thresholds.single_cta"


def test_impl_is_heeded():
    forced = explain("top_k_per_row", logits(2, 8192), 3, impl="streaming", target="sm_90")
    assert (forced.kernel, forced.passed_over) == ("streaming", ())
    assert explain("top_k_per_row", logits(2, 8), 3, impl="reference", target="sm_90").kernel == "reference"
    with pytest.raises(ValueError, match=r"^width: got 40000, allowed: at most 32768 \(impl='single_cta'\)$"):
        explain("top_k_per_row", logits(2, 40000), 3, impl="single_cta", target="sm_90")
    with pytest.raises(
        ValueError, match="^impl: got 'cuda', allowed: auto, reference, triton, hopper.cluster, group_maxima"
    ):
        explain("top_k_per_row", logits(2, 8), 3, impl="cuda", target="sm_90")


@pytest.mark.parametrize("shape", ((0, 8), (8, 0)))
def test_nothing_to_compute_takes_no_kernel(shape):
    assert explain("top_k_per_row", logits(*shape), 3, target="sm_90").kernel == "none"


def test_what_is_wrong_raises_what_the_call_raises():
    for error, message, wrong in (
        (ValueError, "^op: got 'topk', allowed: sparse_attn_prefill, .*top_k_per_row", lambda: explain("topk", logits(2, 8), 3)),
        (ValueError, "^op: got 3, allowed: ", lambda: explain(3)),
        (ValueError, "^target: got 'sm_70', allowed: sm_80, ",
         lambda: explain("top_k_per_row", logits(2, 8), 3, target="sm_70")),
        (ValueError, "^k: got 0, allowed: at least 1$", lambda: explain("top_k_per_row", logits(2, 8), 0)),
        (TypeError, "^logits: got dtype int32", lambda: explain("top_k_per_row", torch.zeros(2, 8, dtype=torch.int32), 3)),
        (TypeError, "unexpected keyword argument 'top'", lambda: explain("top_k_per_row", logits(2, 8), 3, top=1)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            wrong()


def test_every_operator_with_a_table_is_explained():
    """And every call of the command reaches one of them."""
    tables = {name for name, operator in OPERATORS.items() if operator.kernels}
    assert tables == explanation.QUESTIONS.keys()
    calls = [call.arguments(**call.defaults) for call in CALLS.values()]
    calls.append(CALLS["grouped_linear"].arguments(**CALLS["grouped_linear"].defaults | dict(activations="fp8")))
    assert {explanation.reach(op, *args, **kwargs)[0] for op, args, kwargs in calls} == tables
    assert explanation.FUNCTIONS.items() <= public_functions().items()


# --- floors


def test_every_target_has_a_card():
    for name in TARGETS:
        assert roofline.gpu_of(name).target == name
    assert len({gpu.name for gpu in roofline.GPUS}) == len(roofline.GPUS)
    for gpu in roofline.GPUS:
        assert 0.5e12 < gpu.copy < gpu.bf16 <= gpu.fp8 and gpu.source and gpu.target in TARGETS


def test_floors_are_bytes_over_bandwidth_and_operations_over_rate():
    gpu = roofline.Gpu("card", "sm_90", copy=2e12, bf16=10e12, fp8=20e12, source="a test")
    # Two tokens of 4 heads name 8 keys each: queries of 6 and outputs of 5 values, keys, and indices of 4 bytes.
    work = roofline.attention((2, 4, 6), 5, pairs=16, key_bytes=1000)
    assert work == roofline.Work(2 * 2 * 4 * 11 + 1000 + 64, 2 * 16 * 4 * 11)
    assert roofline.attention((2, 4, 6), 5, 16, 1000, listed=False).nbytes == work.nbytes - 64
    assert roofline.floors(work, gpu)[1:3] == (pytest.approx(work.nbytes / 2e6), pytest.approx(work.operations / 1e7))
    # 3 rows of 4 heads of 8 codes and a weight each score 10 keys of 12 bytes each.
    work = roofline.scores((3, 4, 8), pairs=30, key_bytes=120)
    assert work == roofline.Work(3 * 4 * 8 + 4 * 3 * 4 + 120 + 4 * 30, 2 * 30 * 4 * 8, fp8=True)
    assert roofline.floors(work, gpu).operations_us == pytest.approx(work.operations / 2e7)
    assert roofline.selected_scores((3, 4, 8), 30, 120, indices=6).nbytes == work.nbytes - 4 * 30 + 4 * 6
    assert roofline.floors(roofline.selection(1000), gpu)[1:3] == (pytest.approx(4000 / 2e6), 0)
    # 3 rows of 8 bf16 values give 5 each, by weights of 70 bytes.
    assert roofline.product(3, 8, 5, weight_bytes=70) == roofline.Work(2 * 3 * 13 + 70, 2 * 3 * 8 * 5)


# --- the command line


def said(capsys, *arguments):
    assert main(["explain", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", CALLS)
def test_the_command_needs_no_gpu(op, target, tmp_path, capsys):
    file = tmp_path / "out.json"
    text = said(capsys, op, "--target", target, "--json", file)
    found = json.loads(file.read_text())
    assert [*found][:6] == ["op", "target", "kernel", "plan", "floors", "passed_over"]
    assert (found["op"], found["target"]) == (op, target)
    assert text.startswith(f"{op} on {target}: {found['kernel']}\n")
    assert "scratch" in found["plan"] and found["floors"]["bytes_us"] > 0
    for one in found["passed_over"]:
        assert one.keys() == {"kernel", "reason"} and f"    {one['kernel']}: {one['reason']}\n" in text
    assert json.loads(said(capsys, op, "--target", target, "--json")) == found


def test_sizes_are_options(capsys):
    text = said(capsys, "topk", "--target", "sm_90", "--tokens", 7, "--width", 4096, "--top-k", 512)
    assert text.splitlines()[0] == "topk on sm_90: single_cta"
    want = explain("top_k_per_row", logits(7, 4096), 512, target="sm_90")
    assert text.splitlines()[1:] == str(want).splitlines()[1:]


@pytest.mark.parametrize("arguments, message", [
    ("topk --tokens 0", "argument --tokens: got '0', allowed: an integer of at least 1"),
    ("topk --target sm_70", "argument --target: invalid choice: 'sm_70'"),
    ("top", "argument OP: invalid choice: 'top'"),
    ("topk --impl x", "error: impl: got 'x', allowed: auto"),
    ("topk --json /nonexistent/file", "error: --json: got '/nonexistent/file', allowed: a file in a folder"),
    ("topk --heads 4", "error: --heads: got 4 for topk, allowed: --tokens, --top-k, --width"),
    ("attention_prefill --dtype fp8", "argument --dtype: got 'fp8', allowed: fp32, bf16"),
    ("attention_decode --scale x", "argument --scale: got 'x', allowed: a number"),
    ("attention_decode --heads 129", "error: q: got 129 heads, allowed: 1 to 128"),
    ("attention_decode --layout fp4", "error: --layout: got 'fp4', allowed kinds: plain, index_fp8, index_mxfp4, latent_fp8, planar_fp8, or one of fp8, bf16, fp32"),
    ("attention_decode --layout index_fp8/128/e4m3fn/pow2", "error: --layout: got 'index_fp8/128/e4m3fn/pow2', allowed: a layout of keys"),
    ("attention_decode --layout plain/bf16/512+64 --d-v 256", "error: --d-v: got 256, allowed: 512 (that of plain/bf16/512+64)"),
    ("attention_decode --extra-layout fp8", "error: --extra-layout, --extra-top-k: got one of them, allowed: both or none"),
    ("paged_scores --next-n 3", "error: --tokens: got 128, allowed: multiples of --next-n, 3"),
    ("grouped_linear --layout fp4", "error: --layout: got 'fp4'"),
    ("grouped_linear --layout e2m1/1x32/e8m0 --columns 7", "error: --columns: got 7, allowed: whole bytes of e2m1"),
    ("prefill_scores --layout latent_fp8/512+64/128/e4m3fn/raw", "allowed: a layout of index keys"),
])  # fmt: skip
def test_what_is_wrong_ends_with_code_2_and_one_line(arguments, message, capsys):
    try:
        code = main(["explain", *arguments.split()])
    except SystemExit as exit:
        code = exit.code
    told = capsys.readouterr()
    assert code == 2 and not told.out
    assert message in told.err.splitlines()[-1]


def test_options_reach_the_call(capsys):
    """Each, of some command, changes what is explained."""
    for line in (
        "attention_decode --tokens 3", "attention_decode --heads 8", "attention_decode --layout bf16",
        "attention_decode --top-k 100", "attention_decode --context 2", "attention_decode --dtype fp32",
        "attention_decode --d-v 256", "attention_decode --d-qk 640", "attention_decode --scale 0",
        "attention_decode --block-size 14000000", "attention_decode --batch-invariant", "attention_decode --impl portable",
        "attention_decode --extra-layout fp8 --extra-top-k 64", "attention_prefill --d-qk 512", "attention_prefill --d-v 256",
        "attention_prefill --context 4", "paged_scores --next-n 4", "paged_scores --block-size 32", "paged_scores --context 64",
        "prefill_scores --layout fp32", "index_topk_decode --top-k 5000", "index_topk_prefill --tokens 40", "topk --width 400",
        "grouped_linear --tokens 3", "grouped_linear --groups 3", "grouped_linear --outputs 3", "grouped_linear --columns 3",
        "grouped_linear --layout e2m1/1x32/e8m0", "grouped_linear --layout plain", "grouped_linear --dtype fp32",
        "packed_experts --experts-per-token 1", "packed_experts --hidden 256", "packed_experts --intermediate 256",
        "packed_experts --activations fp8", "grouped_linear --activations fp8",
    ):  # fmt: skip
        op, *options = line.split()
        assert said(capsys, op, "--target", "sm_90", *options) != said(capsys, op, "--target", "sm_90"), line


def test_it_runs_without_triton():
    code = "import sys; from sparse_attn.cli.main import main; main(['explain', 'attention_decode', '--target', 'sm_90']); print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("attention_decode on sm_90: hopper.decode_fp8\n"), done.stderr
    assert done.stdout.endswith("\nFalse\n")


# --- info


def test_info_names_the_kernels_of_a_target(monkeypatch):
    """They are the table's, in its order."""
    monkeypatch.setattr(report, "target_of", lambda device: TARGETS["gfx942"])
    monkeypatch.setattr(report, "resolve_impl", lambda impl, device: "triton")
    rows = {name: impl for _, name, impl in report.implementations(torch.device("cpu"))}
    assert rows["top_k_per_row"] == "thresholds.single_cta, thresholds.sampled, thresholds.streaming"
    assert rows["sparse_attn_decode"] == "portable" and rows["index_topk_decode_slots"] == rows["top_k_per_row"]
    assert rows["write_kv_cache"] == "triton"
    for target in TARGETS.values():
        found = report.kernels(target)
        names = found["top_k_per_row"]
        assert names == tuple(kernel.name for kernel in selection.KERNELS if kernel.name in names)
        assert (
            ("group_maxima" in names)
            == (found["paged_mqa_logits"] == ("hopper.paged", "hopper.paged_mxfp4", "portable"))
            == (target == H200)
        )
