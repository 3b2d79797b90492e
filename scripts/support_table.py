#!/usr/bin/env python3
"""The table of kernels: where each runs and what it takes, asked of the tables that choose them.

Nothing is written down here. Calls of many sizes, and those of sparse_attn/testing/slow_paths.py, are put to every
kernel of every target; what it refuses, in its own words, is what it takes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sparse_attn import explanation, ops  # noqa: E402
from sparse_attn.cli.explain_calls import CALLS  # noqa: E402
from sparse_attn.explanation import Question  # noqa: E402
from sparse_attn.framework.dispatch import Kernel  # noqa: E402
from sparse_attn.framework.target import TARGETS, Target  # noqa: E402
from sparse_attn.testing import slow_paths  # noqa: E402
from sparse_attn.testing.slow_paths import Call  # noqa: E402

BEGIN, END = "<!-- scripts/support_table.py --write -->", "<!-- end -->"


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(table())
    return 0


def written(text: str, table: str) -> str:
    """``text`` with ``table`` between the marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"text: lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


# --- calls


def attention() -> Iterator[Question]:
    bases = {(case.call.op, repr(case.call.sizes)): case.call for case in slow_paths.ATTENTION.values()}
    few = [
        slow_paths.TWO._replace(sizes=slow_paths.TWO.sizes | {"heads": 16}),
        Call("attention_decode", {"heads": 16, "layout": "bf16"}),
    ]
    prefill = [Call("attention_prefill", {"heads": heads}) for heads in (16, 64)]
    yield from _asked([*bases.values(), *few, *prefill], slow_paths.ATTENTION)
    yield from _asked([Call("attention_prefill", {"d_qk": 4096, "d_v": 4096})], {})


def prefill_scores() -> Iterator[Question]:
    yield from _asked([slow_paths.SCORES, Call("prefill_scores", {"layout": "mxfp4"})], slow_paths.INDEX)


def paged_scores() -> Iterator[Question]:
    yield from _asked([slow_paths.PAGED, Call("paged_scores", {"layout": "mxfp4"})], slow_paths.INDEX)


def selection() -> Iterator[Question]:
    for rows, width, k in itertools.product(
        (1, 8, 64, 512, 4096), (2048, 8192, 32768, 49152, 65536, 262144, 1 << 20), (512, 2048, 4096, 8192)
    ):
        yield _question(Call("topk", {"tokens": rows, "width": width, "top_k": k}))
        yield _question(Call("index_topk_decode", {"tokens": rows, "context": width, "top_k": k}))


def products() -> Iterator[Question]:
    for tokens, outputs in itertools.product((1, 8192, 1 << 17), (4096, 1 << 22)):
        yield _question(Call("grouped_linear", {"tokens": tokens, "outputs": outputs}))
        yield _question(Call("grouped_linear", {"tokens": tokens, "outputs": outputs, "groups": 1}))


def quantised_products() -> Iterator[Question]:
    changes = {}, {"dtype": "fp32"}, {"layout": "e2m1/1x32/e8m0"}, {"columns": 256}, {"batch_invariant": True}
    for groups, change in itertools.product((1, 256), changes):
        yield _question(Call("grouped_linear", {"tokens": 4096, "activations": "fp8", "groups": groups, **change}))


FP8_ROWS = {"layout": "e2m1/1x32/e8m0", "activations": "fp8"}


def routed() -> Iterator[Question]:
    for tokens, changes in itertools.product((1, 100, 4096), ({}, {"dtype": "fp32"}, {"groups": 8}, FP8_ROWS)):
        yield _question(Call("packed_experts", {"tokens": tokens, **changes}))


def _asked(calls: list[Call], cases: dict[str, slow_paths.Case]) -> Iterator[Question]:
    """Every call as it is, and with every change that it can have."""
    for call in calls:
        yield _question(call)
        for case in cases.values():
            if case.call.op == call.op or not (case.change or case.sizes.keys() - CALLS[call.op].defaults):
                with contextlib.suppress(ValueError):  # what no kernel takes
                    yield _question(call, case.change, **case.sizes)


def _question(call: Call, change: slow_paths.Change | None = None, **sizes: object) -> Question:
    op, args, kwargs = call.arguments(change, **sizes)
    name, (*arguments, _) = explanation.reach(op, *args, **kwargs)
    return explanation.ask(name, arguments)


TABLES = {
    "`attention.sparse`": attention,
    "`indexer.scores`, contiguous keys": prefill_scores,
    "`indexer.scores`, paged keys": paged_scores,
    "`topk.select`, `topk.fused`": selection,
    "`layers.products`, linears": products,
    "`layers.products`, linears of fp8 rows": quantised_products,
    "`layers.products`, experts": routed,
}

# --- the table


class Row(NamedTuple):
    """A kernel. package: names the operators that choose it. takes: one condition each; none: everything."""

    package: str
    kernel: str
    targets: str
    takes: list[str]


def rows() -> Iterator[Row]:
    for package, calls in TABLES.items():
        questions = [question for question in calls() if question.problem is not None]
        for kernel in questions[0].kernels:
            targets = [at for at in TARGETS.values() if any(_taken(one, at) == kernel.name for one in questions)]
            targets = targets or [at for at in TARGETS.values() if any(_able(kernel, one, at) for one in questions)]
            takes = conditions(_refusals(kernel.name, questions, targets))
            yield Row(package, f"`{kernel.name}`", _names(targets), takes)
    one, none = [], []
    for name in ops.packages():
        if not any(f"`{name}`" in package for package in TABLES):
            (one if (Path(ops.__path__[0], *name.split(".")) / "launch.py").exists() else none).append(f"`{name}`")
    yield Row(", ".join(one), "one each", "NVIDIA, AMD", [])
    yield Row(", ".join(none), "PyTorch", "NVIDIA, AMD", [])


def table(*, fold: bool = False) -> str:
    """fold: show how many conditions there are, and themselves when they are asked for."""
    lines, last = ["| package | kernel | targets | takes |", "|---|---|---|---|"], ""
    for package, kernel, targets, takes in rows():
        shown, last = "" if package == last else package, package
        conditions = folded(takes) if fold and takes else "; ".join(takes)
        lines.append(f"| {shown} | {kernel} | {targets} | {conditions or 'everything'} |")
    return "\n".join(lines)


def folded(conditions: list[str]) -> str:
    count = f"{len(conditions)} condition{'s' * (len(conditions) > 1)}"
    return f"<details><summary>{count}</summary>{'<br>'.join(conditions)}</details>"


def _taken(question: Question, target: Target) -> str | None:
    try:
        return question.choose(question.problem, target).kernel.name
    except ValueError:
        return None


def _able(kernel: Kernel, question: Question, target: Target) -> bool:
    return kernel.supports(question.problem, target).able


def _refusals(name: str, questions: list[Question], targets: list[Target]) -> list[str]:
    """What the kernel answers to problems that it does not run, on targets where it runs others."""
    found = {}
    for question, target in itertools.product(questions, targets):
        kernel = next(kernel for kernel in question.kernels if kernel.name == name)
        support = kernel.supports(question.problem, target)
        if not support.ok:
            found[support.reason] = None
    return list(found)


def _names(targets: list[Target]) -> str:
    """A vendor's name for all of its targets."""
    names = []
    for vendor, name in (("nvidia", "NVIDIA"), ("amd", "AMD")):
        some = [target.name for target in targets if target.vendor == vendor]
        every = len(some) == sum(target.vendor == vendor for target in TARGETS.values())
        names += [name] if every else some
    return ", ".join(names)


def conditions(refusals: Iterable[str]) -> list[str]:
    """What is allowed, of "subject: got this, allowed: that": the subjects of one that. A number that differs from call
    to call is "5..47"."""
    by_subject: dict[str, dict[str, None]] = {}
    for refusal in refusals:
        subject, _, rest = refusal.partition(": got ")
        got, allowed = re.split(r", (?:allowed: |(?=faster ))", rest, maxsplit=1)
        if found := re.search(r"behind a (multiple of \d+)", got):
            allowed = f"a {found[1]}"
        allowed = re.sub(r"^\S+, (?=as |plain )", "", allowed)  # the number that this call would need
        by_subject.setdefault(subject, {})[allowed] = None
    by_allowed: dict[str, list[str]] = {}
    for subject, texts in by_subject.items():
        for text in _ranges(texts):
            by_allowed.setdefault(text, []).append(subject)
    return [f"{', '.join(subjects)}: {allowed}" for allowed, subjects in by_allowed.items()]


def _ranges(texts: dict[str, None]) -> list[str]:
    """Texts that differ in numbers alone as one, without what they say of these."""
    shapes: dict[str, list[str]] = {}
    for text in texts:
        shapes.setdefault(re.sub(r"\d+", "#", text), []).append(text)
    return [
        same[0] if len(same) == 1 else _range([re.sub(r" \(.*\)", "", text) for text in same])
        for same in shapes.values()
    ]


def _range(texts: list[str]) -> str:
    numbers = iter(zip(*(map(int, re.findall(r"\d+", text)) for text in texts)))

    def number(_: re.Match) -> str:
        some = next(numbers)
        return f"{min(some)}..{max(some)}" if len({*some}) > 1 else str(some[0])

    return re.sub(r"\d+", number, texts[0])


if __name__ == "__main__":
    sys.exit(main())
