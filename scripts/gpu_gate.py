#!/usr/bin/env python
"""Run the tests and the benchmarks on this machine's GPU and write scripts/results/<gpu>.json.

    python scripts/gpu_gate.py                                 # everything
    python scripts/gpu_gate.py --part tests:1/2                # or in parts, merged into one result of one commit:
    python scripts/gpu_gate.py --part tests:2/2 --part suites:1/1    # what is missing stands under `unfinished`
    python scripts/gpu_gate.py --merge a.json b.json           # parts that ran elsewhere with --out; needs no GPU
    python scripts/gpu_gate.py --all-gpus FOLDER --commit COMMIT     # in parts on every GPU of this machine at once

The first part of a new commit needs --fresh. Exits with 1 where, in what this call ran, a test failed or was skipped,
none ran, or a suite failed. Tests that need more GPUs than there are stand under `deselected`. Tests run every case
(SPARSE_ATTN_LONG). Arguments behind -- go to pytest; what they or --suite select is no part of a result, and goes to
--out alone.

--all-gpus first looks for what tests and suites need, and runs nothing where something is missing (exit code 2). A GPU
has a copy of the repository of its own. FOLDER gets a result and a log of each part, and merged.json. Parts that are
left (exit code 3) run in a second call.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

# Ahead-of-time tests need no GPU, and CPU-only checks of the command line and imports run in scripts/test.sh.
MARKS = ["-m", "kernel or gpu"]
SAME = ("commit", "dirty", "versions", "gpu")  # what the parts of one result agree in
KINDS = ("tests", "suites")
DURATIONS = HERE / "results" / "durations.json"  # of the last whole result; parts are the same until the next one
ALL = {"tests": 4, "suites": 8}  # parts of --all-gpus
BESIDE = 2  # parts of tests that share a GPU: one ends in a few long tests, which leave processors idle
NEEDED = ("pytest", "xdist", "expecttest", "safetensors", "tokenizers")


class Part(NamedTuple):
    """Part ``number`` of ``of``, from 1 on."""

    kind: str
    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}/{self.of}"

    def take(self, names: Iterable[str]) -> list[str]:
        """This part's share of the names, the longest first: no other part's, and all parts together take all. Each
        goes to the part that has the least to do."""
        known = durations()
        shares: list[list[str]] = [[] for _ in range(self.of)]
        for name in sorted(names, key=lambda name: (-known.get(name, 1), name)):
            min(shares, key=lambda share: sum(known.get(name, 1) for name in share)).append(name)
        return shares[self.number - 1]


def durations() -> dict[str, float]:
    """By file of tests and by suite, in seconds; those that are not in it take about one."""
    return json.loads(DURATIONS.read_text())["seconds"] if DURATIONS.exists() else {}


class NoPart(argparse.ArgumentTypeError, ValueError):
    """What argparse shows as it stands."""


def part(text: str) -> Part:
    found = re.fullmatch(rf"({'|'.join(KINDS)}):(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        raise NoPart(f"part: got {text!r}, allowed: tests:I/N or suites:I/N, I from 1 to N")
    return Part(found[1], int(found[2]), int(found[3]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", type=part, metavar="PART", help="tests:I/N or suites:I/N")
    parser.add_argument("--fresh", action="store_true", help="begin a new result: do not add to the one there is")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="make one result of these")
    parser.add_argument("--all-gpus", type=Path, metavar="FOLDER", help="run what FOLDER lacks on every GPU")
    parser.add_argument("--begin", type=float, metavar="SECONDS", help="--all-gpus: no part begins later")
    parser.add_argument("--workers", type=int, default=12, metavar="N", help="--all-gpus: test processes a GPU (12)")
    parser.add_argument("--suite", action="append", metavar="NAME", help="a suite of scripts/bench.py, and no tests")
    parser.add_argument("--commit", help="where there is no git: the commit that is tested")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("pytest", nargs="*", help="pytest's arguments, and no suites")
    options = parser.parse_args(arguments)
    selected = bool(options.suite or options.pytest)
    if selected + sum(map(bool, (options.part, options.merge, options.all_gpus))) > 1:
        parser.error("--part, --merge, --all-gpus, and a selection: got several, allowed: one of them")
    if options.all_gpus and not options.commit:
        parser.error("--all-gpus: --commit is needed, as copies of the repository have no git")
    try:
        if options.all_gpus:
            latest = None if options.begin is None else time.monotonic() + options.begin
            return run_all(options.all_gpus.resolve(), options.commit, latest, options.workers)
        if options.merge:
            return finish(merge(json.loads(path.read_text()) for path in options.merge), options.out)
        about = about_this(parser, options.commit)
        if selected:
            run = {"tests": run_tests(options.pytest)} if options.pytest else {}
            run |= {"suites": run_suites(options.suite)} if options.suite else {}
            if options.out:
                write({**about, "selected": run}, [options.out])
            return 0 if all(map(good, run.values())) else 1
        wanted = options.part or [Part(kind, 1, 1) for kind in KINDS]
        there = path_of(about["gpu"])
        result = json.loads(there.read_text()) if options.part and not options.fresh and there.exists() else None
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


def about_this(parser: argparse.ArgumentParser, commit: str | None) -> dict:
    """What the parts of one result agree in."""
    import torch

    if not torch.cuda.is_available():
        parser.error("no GPU here")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": metadata.version("triton")}
    versions["cuda"] = torch.version.cuda or torch.version.hip
    return {**dict(zip(SAME, revision(commit))), "versions": versions, "gpu": torch.cuda.get_device_name()}


def path_of(gpu: str) -> Path:
    return HERE / "results" / f"{slug(gpu)}.json"


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


def names_of(kind: str) -> dict[str, str]:
    """What parts of a kind share, by the name that durations have: files of tests, or suites."""
    if kind == "tests":
        return {path.name: str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    from benchmarks.registry import all_suites

    return {name: name for name in all_suites()}


def run_part(one: Part) -> dict:
    names = names_of(one.kind)
    taken = [names[name] for name in one.take(names)]
    return run_tests([*taken, *MARKS]) if one.kind == "tests" else run_suites(taken)


def run_tests(arguments: list[str]) -> dict:
    """pytest in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        report, begun = Path(folder) / "junit.xml", time.perf_counter()
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT, env=os.environ | {"SPARSE_ATTN_LONG": "1"}).returncode
        return {"code": code, "seconds": round(time.perf_counter() - begun, 1), **read_junit(report)}


def read_junit(report: Path) -> dict:
    """tests: how many passed, failed (errors count) and were skipped. deselected: why, of those that need more GPUs
    than there are, which the others do not count. seconds_of: by file, those of a second or more. reports: what tests
    recorded with pytest's record_property, by test."""
    tests, deselected, seconds, reports = dict.fromkeys(("passed", "failed", "skipped"), 0), {}, {}, {}
    for case in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ():
        name = case.get("name", "")
        *folders, file = re.match(r"(?:\w+\.)*?test_\w+|", case.get("classname") or name)[0].split(".")
        seconds[f"{file}.py"] = seconds.get(f"{file}.py", 0.0) + float(case.get("time", 0))
        if recorded := {item.get("name"): item.get("value") for item in case.iter("property")}:
            reports[name] = recorded
        skipped = case.find("skipped")
        if skipped is not None and re.fullmatch(r"needs \d+ GPUs", skipped.get("message", "")):
            deselected["/".join([*folders, f"{file}.py::{name}"])] = skipped.get("message")
        else:
            failed = case.find("failure") is not None or case.find("error") is not None
            tests["failed" if failed else "passed" if skipped is None else "skipped"] += 1
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    seconds = {name: round(value, 1) for name, value in longest if value >= 1}
    return {"tests": tests, "deselected": deselected, "seconds_of": seconds, "reports": reports}


def run_suites(suites: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        records, begun = Path(folder) / "records.json", time.perf_counter()
        command = [sys.executable, str(HERE / "bench.py"), *suites, "--json", str(records)]
        seconds = {}
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr or ():
                print(line, end="", file=sys.stderr, flush=True)
                if found := re.fullmatch(r"(\w+): ([\d.]+) s\n", line):
                    seconds[found[1]] = float(found[2])
        found = json.loads(records.read_text()) if records.exists() else []
        taken = round(time.perf_counter() - begun, 1)
        return {"code": process.returncode, "seconds": taken, "seconds_of": seconds, "records": found}


def finish(result: dict, out: Path | None, part: dict | None = None) -> int:
    """Write a result and say how it stands: 0 where the part, or else all of it, is good."""
    written = [path_of(result["gpu"]), *([out] if out else [])]
    write(result, written)
    tests, missing = result["tests"], result["unfinished"]
    if not missing:
        taken = {name: took for one in result["parts"].values() for name, took in one.get("seconds_of", {}).items()}
        write({**{key: result[key] for key in SAME}, "seconds": taken}, [DURATIONS])
    state = f"unfinished: {', '.join(missing)}" if missing else "good" if result["good"] else "NOT GOOD"
    counts = f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
    print(f"{result['gpu']}, {result['commit']}: {counts}; in {', '.join(map(str, written))}: {state}")
    for name, why in result["deselected"].items():
        print(f"deselected: {why}: {name}")
    bad = [name for name, one in result["parts"].items() if not good(one)]
    if bad:
        print(f"NOT GOOD: {', '.join(bad)}")
    return 0 if (result["good"] if part is None else good(part)) else 1


def write(result: dict, paths: list[Path]) -> None:
    """Whole or not at all."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".written")
        beside.write_text(json.dumps(result, indent=1) + "\n")
        beside.replace(path)


def result_of(about: dict, parts: dict[str, dict]) -> dict:
    """The result of these parts. unfinished: those that are missing. good: none is, each was good, and no file differed
    from the commit. deselected: tests that need more GPUs than there were."""
    names = [part(text) for text in parts]
    unfinished = []
    for kind in KINDS:
        counts = {one.of for one in names if one.kind == kind}
        if len(counts) > 1:
            got = " and of ".join(map(str, sorted(counts)))
            raise ValueError(f"{kind}: got parts of {got}, allowed: of one number")
        of = counts.pop() if counts else 1
        unfinished += [str(one) for one in (Part(kind, number, of) for number in range(1, of + 1)) if one not in names]
    ordered = {str(one): parts[str(one)] for one in sorted(names, key=lambda one: (KINDS.index(one.kind), one.number))}
    counted = [one["tests"] for one in ordered.values() if "tests" in one]
    tests = {key: sum(counts[key] for counts in counted) for key in ("passed", "failed", "skipped")}
    deselected = {name: why for one in ordered.values() for name, why in one.get("deselected", {}).items()}
    return {
        **{key: about[key] for key in SAME},
        "good": not unfinished and not about["dirty"] and all(map(good, ordered.values())),
        "unfinished": unfinished,
        "tests": tests,
        "deselected": deselected,
        "parts": ordered,
    }


def good(one: dict) -> bool:
    """Whether a part ran something and nothing in it failed or was skipped."""
    if (tests := one.get("tests")) is None:
        return one["code"] == 0 and bool(one.get("records"))
    return one["code"] == 0 and tests["passed"] > 0 and tests["failed"] == tests["skipped"] == 0


def room_for(wanted: list[Part], about: dict, before: dict | None) -> None:
    """ValueError where the result ``before`` cannot take these parts: said before anything runs."""
    planned = {str(one): {"code": 1} for one in wanted}
    if before is not None:
        if there := before.get("parts", {}).keys() & planned.keys():
            raise ValueError(f"{', '.join(sorted(there))}: in the result already")
        merge([before, result_of(about, planned)])
    result_of(about, planned)


def merge(results: Iterable[dict]) -> dict:
    """One result of all parts. ValueError where they are not of one commit, GPU and set of versions, or two differ
    about a part."""
    about, parts = None, {}
    for result in results:
        if "parts" not in result:
            raise ValueError(f"result of {result.get('commit')}: it has no parts")
        about = about or result
        for key in SAME:
            if result[key] != about[key]:
                raise ValueError(f"{key}: got {about[key]!r} and {result[key]!r}, allowed: parts of one")
        for name, one in result["parts"].items():
            if parts.setdefault(name, one) != one:
                raise ValueError(f"{name}: got two different results, allowed: one")
    if about is None:
        raise ValueError("results: got none")
    return result_of(about, parts)


def records_of(result: dict | list) -> list[dict]:
    """The records of a gate's result, or of what bench.py --json wrote."""
    if isinstance(result, list):
        return result
    if "parts" not in result:
        return result["records"]
    return [record for one in result["parts"].values() for record in one.get("records", ())]


def cards_here() -> list[str]:
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]


def missing() -> list[str]:
    """What tests would skip for, or suites fail for, a line each."""
    from benchmarks import peers

    problems = []
    for name in (*NEEDED, "sparse_attn.integrations.transformers.families"):
        try:
            module = importlib.import_module(name)
            if name.startswith("sparse_attn"):
                module.register()
        except ImportError as error:
            problems.append(f"{name}: {error}")
    try:
        found = peers.load()
    except ValueError as error:
        return [*problems, str(error)]
    if found is None:
        return [*problems, f"{peers.VARIABLE}: not set, so nothing would be measured beside peers"]
    try:
        peers.compile_side_by_side(found.root)
    except RuntimeError as error:
        problems.append(f"{peers.VARIABLE}: DeepGEMM does not run: {str(error).strip().splitlines()[-1]}")
    return problems


def run_all(folder: Path, commit: str, latest: float | None, workers: int) -> int:
    """The parts that ``folder`` lacks, tests before suites, the longest first, so that GPUs end together. latest: when
    the last may begin, by time.monotonic(). Returns main's exit code."""
    cards, known = cards_here(), durations()
    if problems := missing() if cards else ["no GPU here"]:
        print("\n".join(f"missing: {problem}" for problem in problems))
        return 2
    for path in folder.glob("*-of-*.json"):
        if (found := json.loads(path.read_text())["commit"]) != commit:
            raise ValueError(f"{path}: got a part of {found}, allowed: of {commit}")
    parts = [Part(kind, n + 1, of) for kind, of in ALL.items() for n in range(of)]
    parts.sort(key=lambda one: -sum(known.get(name, 1) for name in one.take(names_of(one.kind))))
    paths = {one: folder / f"{one.kind}-{one.number}-of-{one.of}.json" for one in parts}
    waiting: dict[str, queue.SimpleQueue[Part]] = {kind: queue.SimpleQueue() for kind in KINDS}
    for one, path in paths.items():
        if not path.exists():
            waiting[one.kind].put(one)

    def serve(card: str, copies: Path) -> None:
        with ThreadPoolExecutor(BESIDE) as beside:
            ended = [beside.submit(run_kind, "tests", card, copies / f"card-{card}-{n}") for n in range(BESIDE)]
            for each in ended:
                each.result()
        run_kind("suites", card, copies / f"card-{card}")  # nothing beside what is timed

    def run_kind(kind: str, card: str, copy: Path) -> None:
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        addopts = f"-n {max(1, workers // BESIDE)} --dist worksteal"
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": card, "PYTEST_ADDOPTS": addopts}
        while latest is None or time.monotonic() < latest:
            try:
                one = waiting[kind].get_nowait()
            except queue.Empty:
                return
            command = [sys.executable, str(copy / "scripts/gpu_gate.py"), "--fresh", "--commit", commit]
            command += ["--part", str(one), "--out", str(paths[one])]
            begun = time.monotonic()
            with open(paths[one].with_suffix(".log"), "w") as log:
                done = subprocess.run(command, cwd=copy, env=environment, stdout=log, stderr=log)
            print(f"GPU {card}: {one}: exit code {done.returncode}, {time.monotonic() - begun:.0f} s", flush=True)

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as copies, ThreadPoolExecutor(len(cards)) as pool:
        served = [pool.submit(serve, card, Path(copies)) for card in cards]
        for each in served:
            each.result()  # raises what stopped a GPU
    found = [json.loads(path.read_text()) for path in paths.values() if path.exists()]
    left = [str(one) for one, path in paths.items() if not path.exists()]
    if found:
        write(result := merge(found), [folder / "merged.json"])
        print(f"{len(found)} of {len(paths)} parts: {result['tests']}, good: {result['good']}")
        if left:
            print(f"left: {', '.join(left)}")
    return 3 if left else 0 if found and result["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
