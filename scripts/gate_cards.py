#!/usr/bin/env python
"""Run the GPU gate in parts on all GPUs of this machine at once, and merge what they came to.

    python scripts/gate_cards.py FOLDER --commit COMMIT                    # everything
    python scripts/gate_cards.py FOLDER --commit COMMIT --begin 450        # no part begins later than that, in seconds
    python scripts/gate_cards.py FOLDER --commit COMMIT                    # again: what FOLDER lacks

First it looks for what tests and suites would miss, which takes seconds, and runs nothing where something is missing.
Tests share a GPU (--workers). A GPU has a copy of the repository of its own. FOLDER gets a result and a log of each
part and merged.json. Exits with 1 where a part is not good, 2 where something was missing, 3 where parts are left.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from gate_parts import LONG, Part, merge  # noqa: E402

TESTS, SUITES = 4, 16  # parts
NEEDED = ("pytest", "xdist", "expecttest", "safetensors", "tokenizers")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", required=True, help="what is tested")
    parser.add_argument("--begin", type=float, metavar="SECONDS", help="no part begins later; without: all do")
    parser.add_argument("--workers", type=int, default=12, metavar="N", help="processes of tests a GPU (12)")
    options = parser.parse_args(arguments)
    cards = cards_here()
    problems = missing() if cards else ["no GPU here"]
    if problems:
        print("\n".join(f"missing: {problem}" for problem in problems))
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    for path in options.folder.glob("*-of-*.json"):
        if (commit := json.loads(path.read_text())["commit"]) != options.commit:
            parser.error(f"{path}: got a part of {commit}, allowed: of {options.commit}")
    latest = None if options.begin is None else time.monotonic() + options.begin
    return run(options.folder.resolve(), options.commit, cards, latest, options.workers)


def cards_here() -> list[str]:
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]


def missing() -> list[str]:
    """What tests would skip for, or suites fail for, a line each."""
    from benchmarks import peers

    problems = []
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            problems.append(f"{name}: {error}")
    try:
        from sparse_attn.integrations.transformers import families

        families.register()
    except ImportError as error:
        problems.append(str(error))
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


def parts_by_length() -> list[Part]:
    """The longest first, so that GPUs end together."""
    from benchmarks.registry import all_suites

    names = {"tests": [path.name for path in (ROOT / "tests").rglob("test_*.py")], "suites": list(all_suites())}
    parts = [Part(kind, n + 1, of) for kind, of in (("tests", TESTS), ("suites", SUITES)) for n in range(of)]
    return sorted(parts, key=lambda one: -sum(LONG.get(name, 1) for name in one.take(names[one.kind])))


def run(folder: Path, commit: str, cards: list[str], latest: float | None, workers: int) -> int:
    """latest: when the last part may begin, by time.monotonic(). Returns main's exit code."""
    paths = {one: folder / (str(one).replace(":", "-").replace("/", "-of-") + ".json") for one in parts_by_length()}
    waiting: queue.SimpleQueue[Part] = queue.SimpleQueue()
    for one, path in paths.items():
        if not path.exists():
            waiting.put(one)
    with tempfile.TemporaryDirectory() as copies, ThreadPoolExecutor(len(cards)) as pool:
        served = [
            pool.submit(_serve, card, Path(copies) / f"card-{card}", waiting, paths, commit, latest, workers)
            for card in cards
        ]
        for one in served:
            one.result()  # raises what stopped a GPU
    found = [json.loads(path.read_text()) for path in paths.values() if path.exists()]
    left = [str(one) for one, path in paths.items() if not path.exists()]
    if found:
        (folder / "merged.json").write_text(json.dumps(result := merge(found), indent=1) + "\n")
        print(f"{len(found)} of {len(paths)} parts: {result['tests']}, good: {result['good']}")
        if left:
            print(f"left: {', '.join(left)}")
    return 3 if left else 0 if found and result["good"] else 1


def _serve(
    card: str,
    copy: Path,
    waiting: queue.SimpleQueue[Part],
    paths: dict[Part, Path],
    commit: str,
    latest: float | None,
    workers: int,
) -> None:
    """A GPU's parts, one after the other."""
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": card, "PYTEST_ADDOPTS": f"-n {workers} --dist worksteal"}
    while latest is None or time.monotonic() < latest:
        try:
            one = waiting.get_nowait()
        except queue.Empty:
            return
        begun, written = time.monotonic(), paths[one].with_suffix(".written")
        command = [sys.executable, str(copy / "scripts/gpu_gate.py"), "--fresh", "--commit", commit]
        with open(paths[one].with_suffix(".log"), "w") as log:
            done = subprocess.run(
                [*command, "--part", str(one), "--out", str(written)], cwd=copy, env=environment, stdout=log, stderr=log
            )
        if written.exists():
            written.replace(paths[one])  # whole or not at all
        print(f"GPU {card}: {one}: exit code {done.returncode}, {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
