#!/usr/bin/env python
"""Run public tests, unmodified, over sparse_attn.integrations, and count their cases: passed, failed, refused, skipped.

    public_suites.py flash_mla FOLDER    # of deepseek-ai/FlashMLA 9241ae3: sparse prefill, sparse decode
    public_suites.py deep_gemm FOLDER    # of deepseek-ai/DeepGEMM 54e2261: index scores, ragged and paged
    public_suites.py vllm FOLDER         # of vLLM 0.33's source: tests/kernels/test_top_k_per_row.py

FOLDER holds the project's source. Nothing of it is built: its tests import our functions in the place of its own.
Refused: a ValueError or TypeError of ours that says what is allowed. Skipped: by the test itself. Nothing is timed.
DeepGEMM's cases run one by one; FlashMLA's script of decoding ends at a failure, and so does every script at an error:
then cases were not run. Exits with 1 where a case failed, was refused or was not run.

A part runs every N-th case, with the seed that it has in a whole run, and counts its own. FlashMLA's script of prefill
makes its cases where it runs them: all of them belong to the first part.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import os
import re
import runpy
import sys
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from sparse_attn.integrations import deep_gemm, flash_mla, vllm_ops  # noqa: E402

COUNTED = ("passed", "failed", "refused", "skipped", "not run")
OPS = ("top_k_per_row_prefill", "top_k_per_row_decode")
COUNTER = "_counter"  # of seeds, as FlashMLA's scripts name it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of every N cases; not of vllm")
    options = parser.parse_args()
    part = re.fullmatch(r"(\d+)/(\d+)", options.part)
    if part is None or not 1 <= int(part[1]) <= int(part[2]):
        parser.error(f"part: got {options.part!r}, allowed: I/N, I from 1 to N")
    if int(part[2]) > 1 and options.suite == "vllm":
        parser.error(f"part: got {options.part!r}, allowed: of flash_mla and deep_gemm")
    if not (options.folder / "tests").is_dir():
        parser.error(f"folder: got {options.folder}, which has no tests, allowed: the source of {options.suite}")
    if not torch.cuda.is_available():
        parser.error("no GPU here; the tests ask for one")
    counts: Counter[str] = Counter()
    for name, found in SUITES[options.suite](options.folder.resolve(), int(part[1]), int(part[2])):
        print(f"{name}: {', '.join(f'{found[what]} {what}' for what in COUNTED)}")
        counts += found
    return 1 if not counts["passed"] or any(counts[what] for what in ("failed", "refused", "not run")) else 0


def outcome(work: Callable[[], object]) -> str:
    """Of one case. What went wrong is printed."""
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        return "refused" if isinstance(error, (ValueError, TypeError)) and "allowed: " in str(error) else "failed"
    return "passed"


# DeepGEMM


def deep_gemm_suite(folder: Path, part: int, of: int) -> Iterator[tuple[str, Counter[str]]]:
    """The functions of its test_attention.py that test scores ask ``sample_mqa_cases`` which cases to run."""
    package: Any = types.ModuleType("deep_gemm")
    package.__path__ = [str(folder / "deep_gemm")]
    compiled: Any = types.ModuleType("deep_gemm._C")
    compiled.__getattr__ = absent  # its helpers import names of the compiled part that these tests do not call
    package.__dict__.update(public(deep_gemm), _C=compiled)
    environment = {"DG_USE_NVIDIA_TOOLS": "1"}  # nothing is timed
    modules = {"deep_gemm": package, "deep_gemm._C": compiled}
    with mock.patch.dict(os.environ, environment), stand_ins(modules, folder / "tests"):
        tests: Any = importlib.import_module("test_attention")
        for name in ("test_mqa_logits", "test_paged_mqa_logits"):
            cases: list[tuple[object, ...]] = []

            def none_of(_: str, known: list[tuple[object, ...]], cases: list[Any] = cases) -> list[tuple[object, ...]]:
                cases += known
                return []

            with mock.patch.object(tests, "sample_mqa_cases", none_of):
                getattr(tests, name)()
            counts: Counter[str] = Counter()
            for number, case in itertools.islice(enumerate(cases), part - 1, None, of):
                torch.manual_seed(number)
                with mock.patch.object(tests, "sample_mqa_cases", lambda *_, one=case: [one]):
                    counts[outcome(getattr(tests, name))] += 1
            yield name, counts


def absent(name: str) -> Callable[..., object]:
    def call(*_: object, **__: object) -> object:
        raise NotImplementedError(f"deep_gemm._C.{name} is not here")

    return call


# FlashMLA


def flash_mla_suite(folder: Path, part: int, of: int) -> Iterator[tuple[str, Counter[str]]]:
    package: Any = types.ModuleType("flash_mla")
    package.__dict__.update(public(flash_mla))
    environment = {"NO_COOLDOWN": "1", "NSYS_PROFILING_SESSION_ID": "0"}  # nothing is timed
    prefill, decoding = "test_flash_mla_sparse_prefill", "test_flash_mla_sparse_decoding"
    scripts: dict[str, Callable[[], object]] = {}
    if part == 1:
        scripts[prefill] = lambda: runpy.run_path(str(folder / "tests" / f"{prefill}.py"), run_name="__main__")
    scripts[decoding] = lambda: run_part(decoding, part, of)
    for name, run in scripts.items():
        printed = Printed()
        with (
            mock.patch.dict(os.environ, environment),
            stand_ins({"flash_mla": package}, folder / "tests"),
            contextlib.redirect_stdout(printed),
        ):
            ended = outcome(lambda name=name, run=run: to_its_end(name, run))
        yield name, counts_of(printed.getvalue(), ended)


def run_part(name: str, part: int, of: int) -> None:
    """The script ``name``, which asks its ``gen_testcase`` for cases and its counter for each one's seed."""
    script: Any = importlib.import_module(name)
    all_cases, all_seeds = script.gen_testcase, iter(getattr(script, COUNTER).next, None)
    seeds = itertools.islice(all_seeds, part - 1, None, of)
    counter = types.SimpleNamespace(next=lambda: next(seeds))
    with mock.patch.multiple(script, **{"gen_testcase": lambda: all_cases()[part - 1 :: of], COUNTER: counter}):
        script.main()


def to_its_end(name: str, run: Callable[[], object]) -> None:
    try:
        run()
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{name} exits with {ended.code}") from None


def counts_of(text: str, ended: str) -> Counter[str]:
    """By what a script printed. ended: as ``outcome`` says; the last case has it, where no number of failures is
    printed. How many there are is not known of a script that ended too soon to say it."""
    ran = text.count("Running on ")
    failures = re.search(r"(\d+) / \d+ cases failed", text)
    bad = int(failures[1]) if failures else int(ended != "passed")
    total = re.search(r"(\d+) testcases to run", text)
    counts = Counter({"passed": max(ran - bad, 0), "not run": int(total[1]) - ran if total else 0})
    counts["failed" if failures else ended] += bad
    return counts


class Printed(io.StringIO):
    """Keeps what is printed, and prints it."""

    def write(self, text: str) -> int:
        if sys.__stdout__ is not None:
            sys.__stdout__.write(text)
        return super().write(text)


# vLLM


def vllm_suite(folder: Path, part: int, of: int) -> Iterator[tuple[str, Counter[str]]]:
    """The tests of its top-k per row; the same file tests other kernels of vLLM, which are deselected."""
    import pytest

    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    capability = 10 * major + minor
    platform = types.SimpleNamespace(
        is_cuda=lambda: torch.version.hip is None,
        is_rocm=lambda: torch.version.hip is not None,
        has_device_capability=lambda asked: capability >= asked,
        is_device_capability_family=lambda asked: capability // 10 == asked // 10,
    )
    names = "vllm", "vllm.platforms", "vllm.utils", "vllm.utils.torch_utils"
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    modules["vllm.platforms"].current_platform = platform
    modules["vllm.utils.torch_utils"].set_random_seed = torch.manual_seed
    kernels = types.SimpleNamespace(**{name: getattr(vllm_ops, name) for name in OPS})
    counted = Counted()
    with stand_ins(modules, folder / "tests"), mock.patch.object(torch.ops, "_C", kernels):
        file = folder / "tests" / "kernels" / "test_top_k_per_row.py"
        options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", os.devnull]
        pytest.main([*options, "--rootdir", str(folder), str(file)], plugins=[counted])
    yield "test_top_k_per_row", counted.counts


class Counted:
    """A plugin of pytest: which tests run, and how they end."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[Any], config: Any) -> None:
        ours = [item for item in items if item.originalname.startswith("test_top_k_per_row") or _named(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in ours])
        items[:] = ours

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is None:
            self.counts["passed"] += call.when == "call"
        elif call.excinfo.typename == "Skipped":
            self.counts["skipped"] += 1
        else:
            refused = call.excinfo.errisinstance((ValueError, TypeError)) and "allowed: " in str(call.excinfo.value)
            self.counts["refused" if refused else "failed"] += 1


def _named(item: Any) -> bool:
    return getattr(item, "callspec", None) is not None and item.callspec.params.get("backend") in OPS


# modules


def public(module: types.ModuleType) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


@contextlib.contextmanager
def stand_ins(modules: dict[str, Any], folder: Path) -> Iterator[None]:
    """Imported in the place of others, as scripts of ``folder`` are; by nobody afterwards."""
    hidden = {name: sys.modules.pop(name) for name in [path.stem for path in folder.iterdir()] if name in sys.modules}
    known = set(sys.modules)
    sys.modules.update(modules)
    try:
        with mock.patch.object(sys, "path", [str(folder), *sys.path]):
            yield
    finally:
        for name in set(sys.modules) - known:
            if name in modules or (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]
        sys.modules.update(hidden)


SUITES: dict[str, Callable[[Path, int, int], Iterator[tuple[str, Counter[str]]]]] = {
    "flash_mla": flash_mla_suite,
    "deep_gemm": deep_gemm_suite,
    "vllm": vllm_suite,
}

if __name__ == "__main__":
    sys.exit(main())
