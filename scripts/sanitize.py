#!/usr/bin/env python
"""Run tests of kernels under compute-sanitizer on all GPUs of this machine, and record what each tool found.

    python scripts/sanitize.py                                # memcheck, synccheck and racecheck of Hopper's kernels
    python scripts/sanitize.py --tool initcheck -k fp8 tests/test_attention_decode_fp8.py

Tests take small cases (SPARSE_ATTN_SMALL), and tensors memory of their own, so that each has bounds. Tests that capture
a graph, for which memory has to be pooled, and those of the largest tensors are left out. scripts/results/
sanitizer-<gpu>.json gets the errors of each tool and the tests that passed, by file; a tool that is run again replaces
what stood there of it, another commit everything. Exits with 1 where a test failed, a tool found an error or ran over
its time.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import gpu_gate

TOOLS = ("memcheck", "synccheck", "racecheck", "initcheck")
# Where the kernels for Hopper are tested. What rank_topk and top-k run there is their portable tests' as well.
HOPPER = (
    "attention_decode_fp8", "attention_decode_fp8_latents", "attention_prefill_bf16", "attention_swap_ab",
    "attention_two_caches", "experts", "grouped_linear_expanded", "grouped_linear_fp8", "grouped_linear_hopper",
    "grouped_linear_swap_ab", "index_logits_decoded", "index_logits_hopper", "index_logits_mxfp4", "rank_topk", "topk",
    "topk_grouped", "topk_slots",
)  # fmt: skip
POOLED = "not beyond_2_31 and not seventy_thousand and not capture and not replay"
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
PLACE = re.compile(r"(?:access at|in kernel|at) ([A-Za-z_]\w*)(?:\(|\+0x)")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: the first three")
    parser.add_argument("-k", dest="only", metavar="EXPRESSION", help="of the tests, those that pytest's -k selects")
    parser.add_argument("--workers", type=int, default=14, metavar="N", help="processes a GPU (14)")
    parser.add_argument("--seconds", type=float, default=540, metavar="N", help="a tool's time (540)")
    parser.add_argument("--commit", help="where there is no git: the commit that is tested")
    parser.add_argument("--out", type=Path, metavar="FILE", help="instead of scripts/results/sanitizer-<gpu>.json")
    parser.add_argument("--logs", type=Path, default=Path("out/sanitize"), metavar="DIR", help="reports (out/sanitize)")
    parser.add_argument("files", nargs="*", metavar="TEST", help="instead of those of Hopper's kernels")
    options = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    about = gpu_gate.about_this(parser, options.commit)
    path = options.out or gpu_gate.HERE / "results" / f"sanitizer-{gpu_gate.slug(about['gpu'])}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    tools = before.get("tools", {}) if all(before.get(key) == value for key, value in about.items()) else {}
    code = 0
    for tool in options.tool or TOOLS[:3]:
        tools[tool] = found = run(tool, options)
        gpu_gate.write({**about, "tools": tools}, [path])
        print(f"{tool}: {sum(found['passed'].values())} tests passed, {len(found['failed'])} failed, {found['errors']} "
              f"errors in {found['seconds']} s{'' if found['finished'] else ', NOT FINISHED'}", flush=True)  # fmt: skip
        code |= bool(found["failed"] or found["errors"] or not found["finished"] or not found["passed"])
    return code


def run(tool: str, options: argparse.Namespace) -> dict:
    """What ``tool`` found: errors, the places its reports name, tests that passed by file, and those that failed."""
    import torch

    cards = torch.cuda.device_count()
    logs = (options.logs / tool).resolve()
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    files = options.files or [f"tests/test_{name}.py" for name in HOPPER]
    select = POOLED + (f" and ({options.only})" if options.only else "")
    command = [
        "compute-sanitizer", "--tool", tool, "--target-processes", "all", f"--log-file={logs}/%p.log",
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(options.workers * cards),
        "--dist", "worksteal", f"--junitxml={logs}/junit.xml", "-m", "kernel or gpu", "-k", select, *files,
    ]  # fmt: skip
    environment = os.environ | {
        "SPARSE_ATTN_SMALL": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "SPARSE_ATTN_TEST_GPUS": ",".join(map(str, range(cards))),
    }  # fmt: skip
    begun = time.monotonic()
    with open(logs / "pytest.log", "w") as log:
        process = subprocess.Popen(
            command, cwd=gpu_gate.ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait(options.seconds)
            finished = True
        except subprocess.TimeoutExpired:
            finished = False
            os.killpg(process.pid, signal.SIGINT)  # pytest writes what it has
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    passed, failed = outcomes(logs / "junit.xml")
    reports = "".join(path.read_text(errors="replace") for path in sorted(logs.glob("*.log")) if path.stem.isdigit())
    return {
        "finished": finished, "seconds": round(time.monotonic() - begun, 1),
        "errors": sum(int(found[1] or found[2]) for found in SUMMARY.finditer(reports)),
        "places": dict(collections.Counter(PLACE.findall(reports)).most_common(20)), "passed": passed, "failed": failed,
    }  # fmt: skip


def outcomes(report: Path) -> tuple[dict[str, int], list[str]]:
    """Tests that passed, by file, and those that failed, of a junit report. Skipped ones are neither."""
    passed: collections.Counter[str] = collections.Counter()
    failed = []
    for case in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ():
        name = case.get("classname", "").removeprefix("tests.").partition(".")[0] + ".py"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{name}::{case.get('name')}")
        elif case.find("skipped") is None:
            passed[name] += 1
    return dict(sorted(passed.items())), failed


if __name__ == "__main__":
    sys.exit(main())
