#!/usr/bin/env python
"""Run tests of kernels under compute-sanitizer on all GPUs of this machine, and record what each tool found.

    python scripts/sanitize.py                                # memcheck, synccheck and racecheck of Hopper's kernels
    python scripts/sanitize.py --tool initcheck -k fp8 tests/ops/test_attention_decode_fp8.py

A tool takes a file of tests at a time, for --seconds at most, and several run side by side. Tests take small cases
(SPARSE_ATTN_SMALL), and tensors memory of their own, so that each has bounds. Tests that capture a graph, for which
memory has to be pooled, and those of the largest tensors are left out. scripts/results/sanitizer-<gpu>.json gets, by
tool and file, the tests that passed and the places that reports name; what is run again replaces what stood there,
another commit everything. Exits with 1 where a test failed, a tool reported anything, or a file did not end in time.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpu_gate

TOOLS = ("memcheck", "synccheck", "racecheck", "initcheck")
# Where the kernels for Hopper are tested. What rank_topk and top-k run there is their portable tests' as well.
HOPPER = """
    attention_decode_fp8 attention_decode_fp8_latents attention_prefill_bf16 attention_swap_ab attention_two_caches
    grouped_linear_expanded grouped_linear_fp8 grouped_linear_hopper grouped_linear_swap_ab index_logits_decoded
    index_logits_hopper index_logits_mxfp4 rank_topk topk topk_grouped topk_slots""".split()
EXPERTS = "tests/ops/test_experts.py", "streamed or every_e2m1 or spans"  # most of its tests are of other kernels
POOLED = "not beyond_2_31 and not seventy_thousand and not capture and not replay"
REPORT = re.compile(r"^========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|Target app)\w", re.MULTILINE)
PLACE = re.compile(r"\bat (\w+\+0x\w+ in \S+?:\d+)")
OUTCOME = re.compile(r"::\S.* (PASSED|FAILED|ERROR)\b")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: the first three")
    parser.add_argument("-k", dest="only", metavar="EXPRESSION", help="of the tests, those that pytest's -k selects")
    parser.add_argument("--jobs", type=int, default=15, metavar="N", help="side by side on a GPU (15)")
    parser.add_argument("--seconds", type=float, default=540, metavar="N", help="of a tool in a file (540)")
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
    options.logs.mkdir(parents=True, exist_ok=True)
    files = [(file, options.only) for file in options.files]
    files = files or [*((f"tests/ops/test_{name}.py", options.only) for name in HOPPER), EXPERTS]
    code = 0
    for tool, file, found in run_all(options, files):
        tools.setdefault(tool, {})[file] = found
        gpu_gate.write({**about, "tools": tools}, [path])
        ended = "" if found["finished"] else ", not finished"
        print(f"{tool} {file}: {found['passed']} passed, {found['failed']} failed, {found['reports']} reports{ended}")
        code |= bool(found["failed"] or found["reports"] or not (found["finished"] and found["passed"]))
    return code


def run_all(options: argparse.Namespace, files: list[tuple[str, str | None]]) -> Iterator[tuple[str, str, dict]]:
    """(tool, file, what was found) as they end."""
    import torch

    cards: queue.SimpleQueue[int] = queue.SimpleQueue()
    for _ in range(options.jobs):
        for card in range(torch.cuda.device_count()):
            cards.put(card)

    def one(tool: str, file: str, only: str | None) -> None:
        card = cards.get()
        done.put((tool, Path(file).name, run(tool, file, only, card, options)))
        cards.put(card)

    done: queue.SimpleQueue[tuple[str, str, dict]] = queue.SimpleQueue()
    wanted = [(tool, *file) for tool in options.tool or TOOLS[:3] for file in files]
    with ThreadPoolExecutor(options.jobs * torch.cuda.device_count()) as pool:
        running = [pool.submit(one, *slice) for slice in wanted]
        for _ in wanted:
            yield done.get()
        for each in running:
            each.result()


def run(tool: str, file: str, only: str | None, card: int, options: argparse.Namespace) -> dict:
    name = options.logs.resolve() / f"{tool}-{Path(file).stem}"
    for old in name.parent.glob(f"{name.name}.*"):
        old.unlink()
    select = POOLED + (f" and ({only})" if only else "")
    command = [
        "compute-sanitizer", "--tool", tool, "--target-processes", "all", f"--log-file={name}.%p.log", sys.executable,
        "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "kernel or gpu", "-k", select, file,
    ]  # fmt: skip
    environment = os.environ | {
        "SPARSE_ATTN_SMALL": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": str(card),
    }  # fmt: skip
    begun = time.monotonic()
    with open(f"{name}.txt", "w") as log:
        process = subprocess.Popen(
            command, cwd=gpu_gate.ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait(options.seconds)
            finished = True
        except subprocess.TimeoutExpired:
            finished = False
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {**read(name), "finished": finished, "seconds": round(time.monotonic() - begun, 1)}


def read(name: Path) -> dict:
    """What the output ``name``.txt and the logs ``name``.*.log say: tests that passed, reports, and what these name."""
    outcomes = collections.Counter(OUTCOME.findall(Path(f"{name}.txt").read_text(errors="replace")))
    logs = "".join(path.read_text(errors="replace") for path in sorted(name.parent.glob(f"{name.name}.*.log")))
    return {
        "passed": outcomes["PASSED"], "failed": outcomes["FAILED"] + outcomes["ERROR"],
        "reports": len(REPORT.findall(logs)), "places": sorted(set(PLACE.findall(logs))),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
