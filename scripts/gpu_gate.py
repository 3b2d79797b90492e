#!/usr/bin/env python
"""Run the tests and the benchmarks on this machine's GPU and write scripts/results/<gpu>.json.

    python scripts/gpu_gate.py                                 # everything
    python scripts/gpu_gate.py --part tests:1/2                # or in parts, merged into one result of one commit:
    python scripts/gpu_gate.py --part tests:2/2 --part suites:1/1    # what is missing stands under `unfinished`
    python scripts/gpu_gate.py --merge a.json b.json           # parts that ran elsewhere with --out; needs no GPU

The first part of a new commit needs --fresh. Exits with 1 where, in what this call ran, a test failed or was skipped,
none ran, or a suite failed. Tests that need more GPUs than there are stand under `deselected`. Tests run every case
(SPARSE_ATTN_LONG). Arguments behind -- go to pytest; what they or --suite select is no part of a result, and goes to
--out alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from gate_parts import Part, good, merge, part, result_of, room_for  # noqa: E402

# Ahead-of-time tests need no GPU, and CPU-only checks of the command line and imports run in scripts/test.sh.
MARKS = ["-m", "kernel or gpu"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", type=checked_part, metavar="PART", help="tests:I/N or suites:I/N")
    parser.add_argument("--fresh", action="store_true", help="begin a new result: do not add to the one there is")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="make one result of these")
    parser.add_argument("--suite", action="append", metavar="NAME", help="a suite of scripts/bench.py, and no tests")
    parser.add_argument("--commit", help="where there is no git: the commit that is tested")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("pytest", nargs="*", help="pytest's arguments, and no suites")
    options = parser.parse_args(arguments)
    selected = bool(options.suite or options.pytest)
    if selected + bool(options.part) + bool(options.merge) > 1:
        parser.error("--part, --merge, and a selection of tests or suites: got several, allowed: one of them")
    try:
        if options.merge:
            return finish(merge(json.loads(path.read_text()) for path in options.merge), options.out)
        about = about_this(parser, options.commit)
        if selected:
            run = {}
            if options.pytest:
                run["tests"] = run_tests(options.pytest)
            if options.suite:
                run["suites"] = run_suites(options.suite)
            if options.out:
                write({**about, "selected": run}, [options.out])
            return 0 if all(map(good, run.values())) else 1
        wanted = options.part or [Part("tests", 1, 1), Part("suites", 1, 1)]
        result = None if options.fresh or not options.part else result_there(about["gpu"])
        try:
            room_for(wanted, about, result)
        except ValueError as error:
            parser.error(f"{error}; --fresh begins a new result")
        code = 0
        for one in wanted:
            ran = run_part(one)
            result = merge([*([result] if result else []), result_of(about, {str(one): ran})])
            code |= finish(result, options.out, ran)
        return code
    except ValueError as error:
        parser.error(str(error))


def checked_part(text: str) -> Part:
    try:
        return part(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def about_this(parser: argparse.ArgumentParser, commit: str | None) -> dict:
    """What the parts of one result agree in."""
    import torch

    if not torch.cuda.is_available():
        parser.error("no GPU here")
    commit, dirty = revision(commit)
    return {
        "commit": commit,
        "dirty": dirty,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": metadata.version("triton"),
            "cuda": torch.version.cuda or torch.version.hip,
        },
        "gpu": torch.cuda.get_device_name(),
    }


def path_of(gpu: str) -> Path:
    return HERE / "results" / f"{slug(gpu)}.json"


def result_there(gpu: str) -> dict | None:
    path = path_of(gpu)
    return json.loads(path.read_text()) if path.exists() else None


def run_part(one: Part) -> dict:
    if one.kind == "tests":
        paths = {path.name: str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
        return run_tests([*(paths[name] for name in one.take(paths)), *MARKS])
    from benchmarks.registry import all_suites

    return run_suites(one.take(all_suites()))


def finish(result: dict, out: Path | None, part: dict | None = None) -> int:
    """Write a result and say how it stands: 0 where the part, or else all of it, is good."""
    written = [path_of(result["gpu"]), *([out] if out else [])]
    write(result, written)
    tests, missing = result["tests"], result["unfinished"]
    state = f"unfinished: {', '.join(missing)}" if missing else "good" if result["good"] else "NOT GOOD"
    counts = f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
    print(f"{result['gpu']}, {result['commit']}: {counts}; in {', '.join(map(str, written))}: {state}")
    for name, why in result["deselected"].items():
        print(f"deselected: {why}: {name}")
    bad = [name for name, one in result["parts"].items() if not good(one)]
    if bad:
        print(f"NOT GOOD: {', '.join(bad)}")
    return 0 if (result["good"] if part is None else good(part)) else 1


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def revision(given: str | None) -> tuple[str | None, bool | None]:
    """(commit, whether files differ from it); None for what cannot be known: of a copy that somebody made, what
    differs."""
    if given:
        return given, None
    try:
        commit = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--", ".", ":!scripts/results")
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return commit, bool(changed)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run_tests(arguments: list[str]) -> dict:
    """pytest in a process of its own: counts, what tests report, the seconds of each file, and its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        report, left_out, begun = Path(folder) / "junit.xml", Path(folder) / "deselected.json", time.perf_counter()
        written = [f"--junitxml={report}", "-p", "gate_gpus", f"--deselected={left_out}"]
        paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"SPARSE_ATTN_LONG": "1", "PYTHONPATH": paths}
        code = subprocess.run(
            [sys.executable, "-m", "pytest", *written, *arguments], cwd=ROOT, env=environment
        ).returncode
        return {
            "tests": counts(report), "code": code, "seconds": round(time.perf_counter() - begun, 1),
            "deselected": json.loads(left_out.read_text()) if left_out.exists() else {},
            "seconds_of": seconds(report), "reports": properties(report),
        }  # fmt: skip


def counts(report: Path) -> dict[str, int]:
    """passed, failed (errors count) and skipped of a junit report; all 0 where there is none."""
    if not report.exists():
        return {"passed": 0, "failed": 0, "skipped": 0}
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    return {"passed": total - failures - errors - skipped, "failed": failures + errors, "skipped": skipped}


def properties(report: Path) -> dict[str, dict[str, str]]:
    """What tests recorded with pytest's record_property, by test."""
    if not report.exists():
        return {}
    cases = ElementTree.parse(report).getroot().iter("testcase")
    found = {
        case.get("name"): {item.get("name"): item.get("value") for item in case.iter("property")} for case in cases
    }
    return {name: recorded for name, recorded in found.items() if recorded}


def seconds(report: Path) -> dict[str, float]:
    """By file, those of more than a second."""
    taken: dict[str, float] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ():
        name = next(part for part in case.get("classname", "").split(".") if part.startswith("test_")) + ".py"
        taken[name] = taken.get(name, 0.0) + float(case.get("time", 0))
    return {name: round(value, 1) for name, value in sorted(taken.items(), key=lambda item: -item[1]) if value >= 1}


def run_suites(suites: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        records, begun = Path(folder) / "records.json", time.perf_counter()
        command = [sys.executable, str(HERE / "bench.py"), *suites, "--json", str(records)]
        code = subprocess.run(command, cwd=ROOT).returncode
        found = json.loads(records.read_text()) if records.exists() else []
        return {"code": code, "seconds": round(time.perf_counter() - begun, 1), "records": found}


def write(result: dict, paths: list[Path]) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
