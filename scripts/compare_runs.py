#!/usr/bin/env python
"""Compare the times of two runs of the suites, and exit with 1 where a suite is slower by more than 1%.

    python scripts/compare_runs.py OLD.json NEW.json        # of scripts/gpu_gate.py, or of scripts/bench.py --json
    python scripts/compare_runs.py --run CHECKOUT           # time CHECKOUT (old) and this one (new) suite by suite
    python scripts/compare_runs.py --run CHECKOUT --part suites:1/3

A suite is slower by the geometric mean of its cases' new / old. Suites that time the host are listed and exempt; so is
what one run alone has, but for a suite that the new run lost. What a case's name has in parentheses is measured, too,
and names no case.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from benchmarks.registry import HOST_TIMED  # noqa: E402
from gpu_gate import part, records_of  # noqa: E402

MOST = 1.01
# What times a checkout: its own package and suites. A line in is a suite; a line out is what it came to.
WORKER = """
import contextlib, json, sys
root, dry = sys.argv[1], sys.argv[2] == "dry"
sys.path[:0] = [f"{root}/scripts", root]
out, sys.stdout = sys.stdout, sys.stderr
import bench, sparse_attn
assert sparse_attn.__file__.startswith(root), sparse_attn.__file__
run = bench.Run("cpu", dry=True) if dry else bench.Run(peers=bench.peers.load())
for line in sys.stdin:
    name = line.strip()
    if not name:
        print(json.dumps(list(bench.all_suites())), file=out, flush=True)
        continue
    records, failed = bench.measure([name], run)
    print(json.dumps({"records": records, "failed": failed}), file=out, flush=True)
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="OLD.json NEW.json")
    parser.add_argument("--run", type=Path, metavar="CHECKOUT", help="where the old commit is")
    parser.add_argument("--part", type=part, metavar="suites:I/N", help="with --run: as scripts/gpu_gate.py parts them")
    parser.add_argument("--suite", action="append", metavar="NAME", help="with --run: this suite; default: all")
    parser.add_argument(
        "--rounds", type=int, default=2, metavar="N", help="with --run: runs of a suite; the best counts"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help='with --run: write {"old": records, "new": records}')
    parser.add_argument("--dry", action="store_true", help="with --run: tiny inputs on the CPU, nothing timed")
    options = parser.parse_args(arguments)
    if bool(options.run) == bool(options.files) or len(options.files) not in (0, 2):
        parser.error("got neither two files nor --run CHECKOUT alone, allowed: one of them")
    if options.files:
        old, new = (records_of(json.loads(path.read_text())) for path in options.files)
        return report(old, new)
    if not (options.run / "scripts/bench.py").is_file():
        parser.error(f"--run: got {options.run}, allowed: a checkout of this repository")
    with Checkout(options.run, options.dry) as before, Checkout(HERE.parent, options.dry) as after:
        names = options.suite or [name for name in before.suites if name in after.suites]
        names = options.part.take(names) if options.part else names
        old, new, failed = take_turns(names, before.measure, after.measure, options.rounds)
    if options.out:
        options.out.write_text(json.dumps({"old": old, "new": new}, indent=1) + "\n")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0 if options.dry else report(old, new)


class Checkout:
    """A process that times the suites of a checkout as they are asked for."""

    def __init__(self, root: Path, dry: bool):
        self.name = str(root.resolve())
        command = [sys.executable, "-c", WORKER, self.name, "dry" if dry else "gpu"]
        self.process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Checkout:
        self.suites = self.ask("")
        return self

    def __exit__(self, *_) -> None:
        self.process.stdin.close()
        self.process.wait()

    def measure(self, suite: str) -> tuple[list[dict], bool]:
        """(records, whether it failed)."""
        found = self.ask(suite)
        return found["records"], bool(found["failed"])

    def ask(self, line: str):
        print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name}: no answer, exit code {self.process.wait()}")
        return json.loads(answer)


Measure = Callable[[str], tuple[list[dict], bool]]


def take_turns(names: list[str], old: Measure, new: Measure, rounds: int) -> tuple[list[dict], list[dict], list[str]]:
    """The best of ``rounds`` of each suite, old and new in turn, each first every other time: (old, new, what
    failed)."""
    best: tuple[dict, dict] = ({}, {})
    failed = []
    for name in names:
        for number in range(rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                records, bad = (old, new)[which](name)
                if bad:
                    failed.append(f"{name} ({('old', 'new')[which]})")
                for record in records:
                    key = key_of(record)
                    if key not in best[which] or record["us"] < best[which][key]["us"]:
                        best[which][key] = record
    return list(best[0].values()), list(best[1].values()), failed


def key_of(record: dict) -> tuple[str, str]:
    return record["suite"], re.sub(r" \(.*?\)", "", record["case"])


def report(old: list[dict], new: list[dict]) -> int:
    """Print each suite's geometric mean of new / old; 1 where one is more than 1% slower, or is not in the new run, or
    no case is in both."""
    before, after = ({key_of(record): record["us"] for record in records} for records in (old, new))
    slower, compared = [], 0
    for suite in sorted({suite for suite, _ in [*before, *after]}):
        both = [key for key in before if key in after and key[0] == suite]
        alone = [f"{case} ({which} only)" for which, mine, other in (("old", before, after), ("new", after, before))
                 for name, case in mine if name == suite and (name, case) not in other]  # fmt: skip
        ratios = [after[key] / before[key] for key in both]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
        compared += len(both)
        bad = suite not in HOST_TIMED and (mean > MOST if ratios else any(name == suite for name, _ in before))
        note = "host time, exempt" if suite in HOST_TIMED else "SLOWER" if bad and ratios else "MISSING" if bad else ""
        worst = max(both, key=lambda key: after[key] / before[key], default=None)
        figures = f"{mean:6.3f}  worst {max(ratios):6.3f} {worst[1]}" if ratios else "     -"
        print(f"{suite:<20} {len(both):>3} cases {figures}  {note}".rstrip())
        for case in alone:
            print(f"{'':<20} {case}")
        slower += [suite] if bad else []
    if not compared:
        print("no case is in both runs")
    if slower:
        print(f"more than 1% slower, or missing: {', '.join(slower)}")
    return 1 if slower or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
