#!/usr/bin/env python
"""Measure suites of scripts/benchmarks on this machine's GPU: bench.py SUITE... (none: lists them; all: every one)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402

from benchmarks.registry import all_suites  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records")
    options = parser.parse_args()
    known = all_suites()
    if not options.suites:
        for name, suite in known.items():
            print(f"{name:<24} {suite.__doc__}")
        return 0
    names = list(known) if options.suites == ["all"] else options.suites
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"suite: got {', '.join(unknown)}, allowed: all, {', '.join(known)}")
    if not torch.cuda.is_available():
        parser.error("no GPU here; the suites measure one")
    records = measure(names)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    return 0


def measure(names: list[str]) -> list[dict[str, object]]:
    """Run the suites, print a row per case as it comes, and return the records."""
    known = all_suites()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'suite':<20} {'case':<52} {'us':>10} {'floor':>9} {'of floor':>8}  {'peer':<22} {'peer us':>10} {'ratio':>6}")
    records = []
    for name in names:
        for record in known[name]():
            records.append(record.as_dict(name))
            print(_row(records[-1]), flush=True)
    return records


def _row(record: dict) -> str:
    floor, peer_us = record["floor_us"], record["peer_us"]
    return (
        f"{record['suite']:<20} {record['case']:<52} {record['us']:>10.1f} "
        f"{'' if floor is None else format(floor, '.1f'):>9} "
        f"{'' if floor is None else format(floor / record['us'], '.0%'):>8}  "
        f"{record['peer'] or '':<22} {'' if peer_us is None else format(peer_us, '.1f'):>10} "
        f"{'' if peer_us is None else format(record['ratio'], '.2f'):>6}"
    )


if __name__ == "__main__":
    sys.exit(main())
