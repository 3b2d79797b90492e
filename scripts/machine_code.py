#!/usr/bin/env python
"""Hash the machine code of every form that scripts/aot.py compiles for a target, so that two commits can be compared.

A form is a kernel as a case of scripts/aot_cases launches it. Addresses, labels and names are stripped from its
disassembly, so that a file or a kernel may be renamed; instructions, registers and constant-bank offsets are not.
Machine code depends on the version of Triton, which is written beside the hashes: compare those of one version.

    python scripts/machine_code.py --json before.json       # on the old commit
    python scripts/machine_code.py --against before.json    # on the new one; exits with 1 where a form differs
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import aot  # noqa: E402
from aot_cases import all_cases  # noqa: E402
from gpu_gate import revision  # noqa: E402

from sparse_attn.testing.launches import TARGETS, Launch, compile_launch, recording  # noqa: E402

Forms = dict[str, list[str]]  # a case -> a hash for each of its launches, in their order


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=[name for name in TARGETS if name.startswith("sm_")], default="sm_90")
    parser.add_argument("--case", default="", metavar="TEXT", help="cases whose name contains TEXT (default: all)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the hashes there")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with the hashes written there")
    options = parser.parse_args(arguments)
    import triton

    forms = hashes(options.target, options.case, options.jobs)
    print(
        f"{options.target}, triton {triton.__version__}: {sum(map(len, forms.values()))} launches of {len(forms)} cases"
    )
    if options.json:
        about = {"commit": revision(None)[0], "target": options.target, "triton": triton.__version__}
        options.json.write_text(json.dumps({**about, "forms": forms}, indent=1) + "\n")
    if not options.against:
        return 0 if forms else 1
    before = json.loads(options.against.read_text())
    if (before["target"], before["triton"]) != (options.target, triton.__version__):
        parser.error(
            f"--against: got {before['target']} by triton {before['triton']}, allowed: this run's target and triton"
        )
    expected = {case: found for case, found in before["forms"].items() if options.case in case}
    differing = differences(expected, forms)
    print("\n".join(differing) or "no difference")
    return 1 if differing or not forms else 0


def hashes(target: str, text: str, jobs: int) -> Forms:
    """The machine code of every case of ``target`` whose name contains ``text``."""
    launches: dict[str, list[Launch]] = {}
    for case in all_cases():
        name = f"{case.op}: {case.name}"
        if text in name:
            with recording(target) as noted:
                case.launcher(*case.arguments)
            launches.setdefault(name, []).extend(noted)
    distinct = list(dict.fromkeys(launch for noted in launches.values() for launch in noted))
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        code = dict(zip(distinct, pool.map(machine_code_hash, distinct)))
    return {name: [code[launch] for launch in noted] for name, noted in launches.items()}


def machine_code_hash(launch: Launch) -> str:
    """Of a launch's instructions; what the compiler prints of a failure goes nowhere, its error is raised."""
    with open(os.devnull, "w") as nowhere, aot.stderr_into(nowhere):
        return hashlib.sha256(instructions(compile_launch(launch).sass).encode()).hexdigest()[:16]


def instructions(sass: str) -> str:
    """A disassembly without addresses, section headers and the names of kernels; labels are numbered anew."""
    lines = [re.sub(r"/\*.*?\*/", "", line).strip() for line in sass.splitlines()]
    kept = [line for line in lines if line and (line.endswith(";") or re.fullmatch(r"\.L_\w+:", line))]
    labels: dict[str, str] = {}
    numbered = re.sub(r"\.L_\w+", lambda found: labels.setdefault(found[0], f".L{len(labels)}"), "\n".join(kept))
    relocated = re.sub(r"@(lo|hi)?\(\w[\w$.]*\)", r"@\1(symbol)", numbered)
    return re.sub(r"`\(\w[\w$.]*\)", "`(symbol)", relocated)  # a return from a function names the kernel


def differences(before: Forms, after: Forms) -> list[str]:
    """A line for every case whose launches or their machine code are not the same."""
    lines = [f"gone: {name}" for name in before.keys() - after.keys()]
    lines += [f"new: {name}" for name in after.keys() - before.keys()]
    for name in before.keys() & after.keys():
        if before[name] != after[name]:
            same = len(before[name]) == len(after[name])
            which = [str(n) for n, (old, new) in enumerate(zip(before[name], after[name])) if old != new]
            what = (
                f"launch {', '.join(which)}" if same else f"{len(before[name])} launches before, {len(after[name])} now"
            )
            lines.append(f"differs: {name}: {what}")
    return sorted(lines)


if __name__ == "__main__":
    sys.exit(main())
