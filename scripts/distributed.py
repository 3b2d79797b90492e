#!/usr/bin/env python
"""Measure models over the GPUs of this host and write scripts/results/<count>x-<gpu>.json.

    torchrun --nproc-per-node N scripts/distributed.py [SUITE...]         # none: every one
    torchrun --nproc-per-node N scripts/distributed.py --dry              # tiny, gloo on a CPU, nothing timed

A case's time is the slowest process's. Records are written as they come, those of other suites in the file stay where
the commit is the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bench import shown  # noqa: E402
from benchmarks.distributed import SUITES  # noqa: E402
from benchmarks.run import Run  # noqa: E402
from gpu_gate import about_this, slug  # noqa: E402

from sparse_attn.cli.torchrun import joined, rank, world_size  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--commit", help="where there is no git: the commit that is measured")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there instead")
    parser.add_argument("--dry", action="store_true", help="tiny inputs on the CPU, nothing timed or written")
    parser.set_defaults(tensor_parallel=None, context_parallel=None, data_parallel=None, expert_parallel=None)
    options = parser.parse_args()
    options.device = "cpu" if options.dry else "cuda"
    names = options.suites or list(SUITES)
    if unknown := [name for name in names if name not in SUITES]:
        parser.error(f"suite: got {', '.join(unknown)}, allowed: {', '.join(SUITES)}")
    if world_size() < 2:
        parser.error("got one process, allowed: torchrun --nproc-per-node with 2 or more")
    about = {} if options.dry else about_this(parser, options.commit) | {"gpus": world_size()}
    with joined(options):
        records = [] if options.dry else earlier(about, path_of(about, options.out), names)
        for name in names:
            for record in measured(name, Run(options.device, dry=options.dry)):
                records.append(record)
                if not (options.dry or rank()):
                    path_of(about, options.out).write_text(json.dumps({**about, "records": records}, indent=1) + "\n")
    return 0


def path_of(about: dict, out: Path | None) -> Path:
    return out or HERE / "results" / f"{about['gpus']}x-{slug(about['gpu'])}.json"


def earlier(about: dict, path: Path, names: list[str]) -> list[dict]:
    """Records of other suites that the file holds of the same commit, machine and versions."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    records = found.pop("records")
    return [record for record in records if record["suite"] not in names] if found == about else []


def measured(name: str, run: Run) -> Iterator[dict]:
    """A suite's records, which the first process prints as they come."""
    began = time.perf_counter()
    torch.manual_seed(0)
    for record in SUITES[name](run):
        found = record.as_dict(name)
        if not rank():
            print(shown(found), flush=True)
        yield found
    dist.barrier()
    if not rank():
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
