#!/usr/bin/env python
"""Seed the bugs of mutations/*.diff, one at a time into a copy of the repository, and show that the tests catch them.

A bug is caught where the tests it names pass without it and fail with it. Exits with 1 where one survives. By default
those that need no GPU; --gpu: those of kernels for Hopper, on such a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from gpu_gate import revision

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 600  # seconds a run of pytest may take
VERDICT = re.compile(r"^(tests/\S+?::.*) (?:FAILED|ERROR) +\[ *\d+%\]$", re.MULTILINE)
RUNNING = re.compile(r"^(tests/\S+?::.*?) *(?:(?:PASSED|FAILED|Fatal Python error).*)?$", re.MULTILINE)
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)  # what wild addresses end in
# A test that fails because the mutated source is not Python or Triton shows nothing.
BROKEN = re.compile(r"\b(NameError|UnboundLocalError|ImportError|ModuleNotFoundError|SyntaxError|IndentationError)\b")


class Mutation(NamedTuple):
    """what: the bug in words. old: a text that occurs once in ``file``. new: what stands there instead. tests: pytest
    node ids, one of which must fail. on: "interpreter" where Triton's runs them, "gpu" where only a Hopper GPU does."""

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    on: str = ""

    def applied(self, source: str) -> str:
        """``source`` with the bug in it; ValueError unless ``old`` occurs exactly once."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"mutation {self.name}: {self.old!r} occurs {count} times in {self.file}, allowed: once")
        return source.replace(self.old, self.new)


def mutations() -> list[Mutation]:
    """The records of mutations/*.diff, an empty line between two."""
    files = sorted((ROOT / "scripts/mutations").glob("*.diff"))
    return [mutation(record) for path in files for record in path.read_text().rstrip("\n").split("\n\n")]


def mutation(record: str) -> Mutation:
    """Of a line ``name: what``, lines ``file ...``, ``test ...`` and ``on ...``, and those of ``old`` behind - and of
    ``new`` behind +."""
    head, *lines = record.split("\n")
    name, _, what = head.partition(": ")
    old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
    said = [line.split(" ", 1) for line in lines if line[0] not in "-+"]
    if unknown := {word for word, _ in said} - {"file", "test", "on"}:
        raise ValueError(f"mutation {name}: got {', '.join(unknown)}, allowed: file, test, on, - and +")
    values = dict(said)
    tests = tuple(value for word, value in said if word == "test")
    return Mutation(name, what, values["file"], old, new, tests, values.get("on", ""))


@dataclass
class Outcome:
    """caught_by: the test that failed, None where none did. how: what it said, or why nothing was caught."""

    mutation: Mutation
    caught_by: str | None
    how: str
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations to run; default: all of either kind")
    parser.add_argument(
        "--gpu", action="store_true", help="bugs of kernels that only a GPU runs; without it, all others"
    )
    parser.add_argument("--list", action="store_true", help="name the mutations and end")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutations at a time")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report there, as JSON")
    options = parser.parse_args()
    bugs = mutations()
    known = {bug.name: bug for bug in bugs}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; --list names what there is")
    chosen = [known[name] for name in options.names] or [bug for bug in bugs if (bug.on == "gpu") == options.gpu]
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name:<34} {mutation.file:<46} {mutation.what}")
        return 0
    if any(mutation.on == "gpu" for mutation in chosen) and not hopper_here():
        parser.error("--gpu: got no Hopper GPU here, allowed: one, for bugs that only it shows")
    for mutation in chosen:
        mutation.applied((ROOT / mutation.file).read_text())

    start = time.monotonic()
    baseline(chosen)
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = []
        for outcome in pool.map(run, chosen):
            print(row(outcome), flush=True)
            outcomes.append(outcome)
    caught = sum(outcome.caught_by is not None for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} caught in {time.monotonic() - start:.0f} s")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report(outcomes), indent=1) + "\n")
    return 0 if caught == len(outcomes) else 1


def hopper_here() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def baseline(chosen: list[Mutation]) -> None:
    """SystemExit unless every named test is there, runs and passes in the source as it is."""
    for interpreted in (False, True):
        these = [mutation for mutation in chosen if (mutation.on == "interpreter") == interpreted]
        tests = dict.fromkeys(test for mutation in these for test in mutation.tests)
        if not tests:
            continue
        with tempfile.TemporaryDirectory() as folder:
            copy(Path(folder))
            code, output = pytest(Path(folder), tuple(tests), interpreted)
        if code or re.search(r"\d+ skipped", output.splitlines()[-1]):
            raise SystemExit(f"without a bug the named tests must pass, none skipped:\n{output[-4000:]}")


def run(mutation: Mutation) -> Outcome:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy(folder)
        path = folder / mutation.file
        path.write_text(mutation.applied(path.read_text()))
        code, output = pytest(folder, mutation.tests, mutation.on == "interpreter")
    caught_by, how = verdict(code, output)
    return Outcome(mutation, caught_by, how, time.monotonic() - start)


def verdict(code: int, output: str) -> tuple[str | None, str]:
    """(the test that caught a bug, what it said), or (None, why it does not count) of a run of pytest -x -v."""
    if -code in CRASHES and (running := RUNNING.findall(output)):
        return running[-1], signal.Signals(-code).name
    if code != 1:
        return None, {0: "survived", 124: f"no end within {LIMIT} s"}.get(code, f"pytest exit code {code}")
    if (failed := VERDICT.search(output)) is None:
        return None, "pytest names no test that failed"
    said = re.search(rf"^(?:FAILED|ERROR) {re.escape(failed[1])} - (.*)$", output, re.MULTILINE)
    how = said[1] if said else ""
    return (None, f"the source is broken: {how}") if BROKEN.search(how) else (failed[1], how)


def copy(folder: Path) -> None:
    """The files git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (source := ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def pytest(folder: Path, tests: tuple[str, ...], interpreted: bool) -> tuple[int, str]:
    """(exit code, output) of the tests in ``folder``; 124 where they do not end."""
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "COLUMNS": "400", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["SPARSE_ATTN_LONG"] = "1"  # every case can be named
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=no", "--color=no", "-p", "no:cacheprovider", *tests]
    if interpreted:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        command += ["-m", "kernel"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return 124, ""
    return done.returncode, done.stdout


def row(outcome: Outcome) -> str:
    caught_by = outcome.caught_by or f"NOT CAUGHT: {outcome.how}"
    return f"{outcome.mutation.name:<34} {outcome.mutation.file:<46} {outcome.seconds:5.0f} s  {caught_by}"


def report(outcomes: list[Outcome]) -> dict:
    caught = sum(outcome.caught_by is not None for outcome in outcomes)
    return {
        "summary": f"{caught} of {len(outcomes)}",
        "commit": revision(None)[0],
        "versions": {name: metadata.version(name) for name in ("torch", "triton")},
        "mutations": [
            {
                "name": outcome.mutation.name,
                "file": outcome.mutation.file,
                "what": outcome.mutation.what,
                "caught_by": outcome.caught_by,
                "how": outcome.how,
            }
            for outcome in outcomes
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
