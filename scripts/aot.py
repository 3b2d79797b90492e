#!/usr/bin/env python
"""Compile every kernel for every target ahead of time, on any machine, and check what the compiler made of it.

The launchers themselves say what is compiled: they are called as on that target, with tensors that have no memory, and
what they launch is noted. Without --all, a target compiles what published models launch and what stands for the rest.
Exits with 1 on any failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from aot_cases import all_cases  # noqa: E402
from aot_cases.verdict import failures  # noqa: E402

from sparse_attn.testing.aot import Compiled  # noqa: E402
from sparse_attn.testing.launches import TARGETS, Launch, compile_launch, recording  # noqa: E402


@dataclass
class Result:
    """One compilation: what it came to, and what is wrong with it."""

    target: str
    kernel: str
    cases: list[str]
    shared_memory: int = 0
    registers: int = 0
    spill_bytes: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all of them")
    parser.add_argument("--kernel", action="append", metavar="NAME", help="kernels whose name contains NAME")
    parser.add_argument("--all", action="store_true", help="every case: about half an hour of one core")
    parser.add_argument(
        "--sample", action="store_true", help="of each kernel and target one compilation, always the same"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every compilation there")
    options = parser.parse_args(arguments)
    work, left_out = gather(options.target or list(TARGETS), options.kernel or [""], options.all)
    if options.sample:
        work = sample(work)
    results = list(compile_all(work, options.jobs))
    report(results, left_out)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return 1 if not results or any(result.failures for result in results) else 0


def gather(targets: list[str], kernels: list[str], everything: bool) -> tuple[dict[Launch, list[str]], int]:
    """What to compile, each with the cases that launch it, and how many compilations are left to --all."""
    work: dict[Launch, list[str]] = {}
    rest: set[Launch] = set()
    for target in targets:
        for case in all_cases():
            with recording(target) as launches:
                case.launcher(*case.arguments)
            for launch in launches:
                if not any(name in kernel_name(launch) for name in kernels):
                    continue
                wanted = case.where and case.where in f"{target} {launch.module}"
                if case.more and not (everything or wanted):
                    rest.add(launch)
                else:
                    work.setdefault(launch, []).append(f"{case.op}: {case.name}")
    return work, len(rest - work.keys())


def sample(work: dict[Launch, list[str]]) -> dict[Launch, list[str]]:
    """Of each kernel and target one launch, drawn by their names."""
    groups: dict[tuple[str, str], list[Launch]] = {}
    for launch in work:
        groups.setdefault((launch.target, kernel_name(launch)), []).append(launch)
    drawn = [random.Random("/".join(names)).choice(group) for names, group in groups.items()]
    return {launch: work[launch] for launch in drawn}


def compile_all(work: dict[Launch, list[str]], jobs: int) -> Iterator[Result]:
    if jobs <= 1:
        yield from map(compile_one, work, work.values())
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        yield from pool.map(compile_one, work, work.values())


def compile_one(launch: Launch, cases: list[str]) -> Result:
    result = Result(launch.target, kernel_name(launch), cases)
    start = time.perf_counter()
    compiled, trouble = attempt(launch)
    if compiled is None:
        result.failures.append(trouble)
    else:
        result.shared_memory, result.registers = compiled.shared_memory, compiled.registers
        result.spill_bytes = compiled.spill_bytes
        result.failures += failures(launch.target, result.kernel, TARGETS[launch.target], compiled)
    result.seconds = time.perf_counter() - start
    return result


def attempt(launch: Launch) -> tuple[Compiled | None, str]:
    """What was compiled, or what the compiler says, which prints its findings, and the whole program, on stderr."""
    with tempfile.TemporaryFile("w+", errors="replace") as noise, stderr_into(noise):
        try:
            return compile_launch(launch), ""
        except Exception as error:  # whatever it raises is the finding
            noise.seek(0)
            said = [line.strip() for line in noise if "error:" in line or "Assertion" in line]
            return None, "; ".join([f"{type(error).__name__}: {error}", *said[:3]])


@contextlib.contextmanager
def stderr_into(file) -> Iterator[None]:
    """stderr of this process, of its C++ parts too, goes to ``file``."""
    sys.stderr.flush()
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def kernel_name(launch: Launch) -> str:
    """Where it lies under ops/, but for files called kernels: attention.portable.combine,
    attention.hopper.swap_ab.attend."""
    return launch.module.removeprefix("sparse_attn.ops.").replace(".kernels", "") + "." + launch.kernel


def report(results: list[Result], left_out: int) -> None:
    line = "{:8} {:42} {:>7} {:>17} {:>9} {:>7} {:>8}".format
    print(line("target", "kernel", "configs", "shared / limit", "registers", "spilled", "seconds"))
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.target, result.kernel), []).append(result)
    for (target, kernel), group in sorted(
        groups.items(), key=lambda item: (list(TARGETS).index(item[0][0]), item[0][1])
    ):
        shared, registers, spilled = (
            max(getattr(result, name) for result in group) for name in ("shared_memory", "registers", "spill_bytes")
        )
        limit = TARGETS[target].shared_memory
        seconds = sum(result.seconds for result in group)
        print(line(target, kernel, len(group), f"{shared} / {limit}", registers, spilled, f"{seconds:.1f}"))
    for target in TARGETS:
        seconds = [result.seconds for result in results if result.target == target]
        if seconds:
            print(f"{target}: {len(seconds)} compilations, {sum(seconds):.0f} seconds")
    failed = [result for result in results if result.failures]
    for result in failed:
        print(f"FAILED {result.target} {result.kernel} ({'; '.join(result.cases)}): {'; '.join(result.failures)}")
    if left_out:
        print(f"left out: {left_out} compilations of further shapes and formats; --all takes them too")
    kernels = {result.kernel for result in results}
    print(f"{len(kernels)} kernels, {len(results)} compilations, {len(failed)} failures")


if __name__ == "__main__":
    sys.exit(main())
