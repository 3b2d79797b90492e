#!/usr/bin/env python
"""Run the tests and the benchmarks on this machine's GPU and write scripts/results/<gpu>.json.

Exits with 1 where a test failed or was skipped, or none ran. Arguments behind -- go to pytest.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# Ahead-of-time tests need no GPU, and CPU-only checks of the command line and imports run in scripts/test.sh.
DEFAULT_TESTS = ["tests", "-m", "kernel or gpu"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", action="append", metavar="NAME", help="a suite of scripts/bench.py; default: all of them")
    parser.add_argument("--no-bench", action="store_true", help="tests only")
    parser.add_argument("--commit", help="where there is no git: the commit that is tested")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("pytest", nargs="*", help=f"default: {' '.join(DEFAULT_TESTS)}")
    options = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        parser.error("no GPU here")
    commit, dirty = revision(options.commit)
    gpu = torch.cuda.get_device_name()
    tests, reports, code = run_tests(options.pytest or DEFAULT_TESTS)
    result = {
        "commit": commit,
        "dirty": dirty,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": metadata.version("triton"),
            "cuda": torch.version.cuda or torch.version.hip,
        },
        "gpu": gpu,
        "tests": tests,
        "reports": reports,
        "records": [],
    }
    good = code == 0 and tests["passed"] > 0 and tests["failed"] == 0 and tests["skipped"] == 0
    written = [HERE / "results" / f"{slug(gpu)}.json", *([options.out] if options.out else [])]
    write(result, written)
    if not options.no_bench:
        result["records"], bench_code = run_benchmarks(options.suite or ["all"])
        good = good and bench_code == 0
        write(result, written)
    print(f"{gpu}: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped; "
          f"{len(result['records'])} records in {', '.join(map(str, written))}: {'good' if good else 'NOT GOOD'}")  # fmt: skip
    return 0 if good else 1


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def revision(given: str | None) -> tuple[str | None, bool | None]:
    """(commit, whether files differ from it); None for what cannot be known: of a copy that somebody made, what differs."""
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


def run_tests(arguments: list[str]) -> tuple[dict[str, int], dict[str, dict[str, str]], int]:
    """pytest in a process of its own: counts, what tests report, and its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT).returncode
        return counts(report), properties(report), code


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
    found = {case.get("name"): {item.get("name"): item.get("value") for item in case.iter("property")} for case in cases}
    return {name: recorded for name, recorded in found.items() if recorded}


def run_benchmarks(suites: list[str]) -> tuple[list[dict], int]:
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records.json"
        code = subprocess.run([sys.executable, str(HERE / "bench.py"), *suites, "--json", str(records)], cwd=ROOT).returncode
        return (json.loads(records.read_text()) if records.exists() else []), code


def write(result: dict, paths: list[Path]) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
