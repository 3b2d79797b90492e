#!/usr/bin/env python
"""Measure suites of scripts/benchmarks on this machine's GPU: bench.py SUITE... (none: lists them; all: every one).

With PEERS_DIR set (see benchmarks/peers.py) the peers' kernels are checked and timed beside ours, in the same process.
Exits with 1 where a suite failed; the others are measured all the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from benchmarks import peers  # noqa: E402
from benchmarks.registry import all_suites  # noqa: E402
from benchmarks.run import Run  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records")
    parser.add_argument("--dry", action="store_true", help="tiny inputs on the CPU, nothing timed: do the suites run?")
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
    if not options.dry and not torch.cuda.is_available():
        parser.error("no GPU here; the suites measure one (--dry: only run through them)")
    run = Run("cpu", dry=True) if options.dry else Run(peers=peers.load())
    records, failed = measure(names, run, options.json)
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def measure(names: list[str], run: Run, written: Path | None = None) -> tuple[list[dict[str, object]], list[str]]:
    """Run the suites and print a row per case as it comes: the records, and the suites that failed. After each suite
    the records so far are ``written``."""
    known = all_suites()
    print(f"{'dry run' if run.dry else torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        f"{'suite':<20} {'case':<52} {'us':>10} {'floor':>9} {'of floor':>8}  {'peer':<26} {'peer us':>10} {'ratio':>6}"
    )
    records: list[dict[str, object]] = []
    failed = []
    for name in names:
        began = time.perf_counter()
        torch.manual_seed(0)
        gc.collect()  # freeing a captured graph during a capture invalidates the capture
        try:
            for record in known[name](run):
                records.append(record.as_dict(name))
                print(shown(records[-1]), flush=True)
        except Exception:
            failed.append(name)
            traceback.print_exc()
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        if written:
            written.write_text(json.dumps(records, indent=1) + "\n")
        if not run.dry:
            torch.cuda.empty_cache()
    return records, failed


def shown(record: dict) -> str:
    floor, peer_us = record["floor_us"], record["peer_us"]
    return (
        f"{record['suite']:<20} {record['case']:<52} {record['us']:>10.1f} "
        f"{'' if floor is None else format(floor, '.1f'):>9} "
        f"{'' if floor is None else format(floor / record['us'], '.0%'):>8}  "
        f"{record['peer'] or '':<26} {'' if peer_us is None else format(peer_us, '.1f'):>10} "
        f"{'' if record['ratio'] is None else format(record['ratio'], '.2f'):>6}"
    )


if __name__ == "__main__":
    sys.exit(main())
