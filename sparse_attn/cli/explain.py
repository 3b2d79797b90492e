"""`python -m sparse_attn explain`: which kernel a call of given sizes takes on a target, and why."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sparse_attn.cli.arguments import DTYPES, check_outputs, positive, refuse, write_json
from sparse_attn.cli.explain_calls import CALLS, FUNCTIONS
from sparse_attn.explanation import explain
from sparse_attn.framework.target import TARGETS
from sparse_attn.generation.text import say
from sparse_attn.ops.layers.products import ACTIVATIONS
from sparse_attn.pipeline import CACHE_KINDS
from sparse_attn.roofline import CARDS

PRINT = Path("-")


class Option(NamedTuple):
    """kind: what reads its value; None: a flag."""

    help: str
    kind: Callable[[str], object] | None
    metavar: str | None = None


def _number(given: str) -> float:
    try:
        return float(given)
    except ValueError:
        refuse(f"got {given!r}, allowed: a number")


def _activations(given: str) -> str:
    return given if given in ACTIVATIONS else refuse(f"got {given!r}, allowed: {', '.join(ACTIVATIONS)}")


def _dtype(given: str) -> str:
    return given if given in DTYPES else refuse(f"got {given!r}, allowed: {', '.join(DTYPES)}")


OPTIONS: dict[str, Option] = {
    "tokens": Option("rows of queries, or those of all groups", positive, "N"),
    "heads": Option("of a query; of the indexer for scores", positive, "N"),
    "layout": Option(
        f"of the cache: {', '.join(CACHE_KINDS)}, mxfp4 of index keys, or a layout's own name; a weight's",
        str,
        "NAME",
    ),
    "top_k": Option("keys that a row selects or attends to", positive, "N"),
    "width": Option("scores that a row selects among", positive, "N"),
    "context": Option("keys of a request, or those gathered", positive, "N"),
    "groups": Option("of rows, each with a weight of its own, such as experts", positive, "N"),
    "outputs": Option("rows of a weight", positive, "N"),
    "experts_per_token": Option("experts of a token", positive, "N"),
    "hidden": Option("values of a token", positive, "N"),
    "intermediate": Option("values between an expert's products", positive, "N"),
    "columns": Option("of a weight", positive, "N"),
    "dtype": Option("of queries, or of rows", _dtype, "|".join(DTYPES)),
    "activations": Option("what rows are multiplied as", _activations, "|".join(ACTIVATIONS)),
    "d_qk": Option("values of a key", positive, "N"),
    "d_v": Option("leading values of a key that are its value", positive, "N"),
    "scale": Option("of a score (default: d_qk ** -0.5)", _number, "X"),
    "next_n": Option("rows of a request", positive, "N"),
    "block_size": Option("keys of a block of the cache", positive, "N"),
    "extra_layout": Option("of a second cache", str, "NAME"),
    "extra_top_k": Option("keys of the second cache that a row attends to", positive, "N"),
    "batch_invariant": Option("a row's bits depend on no other row", None),
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example: explain sparse_attn_decode --heads 16 --target h100"
    parser.description = (
        "Which kernel a call takes, how it is launched, the microseconds below which nothing gets on the target, and "
        "why the kernels before it do not run. Sizes are DeepSeek-V3.2's unless given. No GPU is needed."
    )
    parser.add_argument(
        "op", choices=(*CALLS, *FUNCTIONS), metavar="OP", help=f"{', '.join(CALLS)}, or a function's own name"
    )
    parser.add_argument(
        "--target", type=str.lower, choices=(*TARGETS, *CARDS), metavar="NAME",
        help=f"{', '.join((*TARGETS, *CARDS))} (default: this machine's GPU, or sm_90 where there is none)",
    )  # fmt: skip
    for name, (text, kind, metavar) in OPTIONS.items():
        how: dict[str, Any] = {"action": "store_true"} if kind is None else {"type": kind, "metavar": metavar}
        parser.add_argument(_spelled(name), help=text, **how)
    parser.add_argument("--impl", default="auto", metavar="NAME", help="a kernel, taken wherever it is able")
    parser.add_argument(
        "--json", nargs="?", type=Path, const=PRINT, metavar="FILE", help="write JSON; without FILE print it instead"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    printed = options.json == PRINT
    if printed:
        options.json = None
    check_outputs(options)
    name, fixed = FUNCTIONS.get(options.op, (options.op, {}))
    call = CALLS[name]
    given = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None and value is not False}
    for name, value in given.items():
        if name not in call.defaults or name in fixed:
            allowed = ", ".join(_spelled(other) for other in OPTIONS if other in call.defaults and other not in fixed)
            raise ValueError(f"{_spelled(name)}: got {value} for {options.op}, allowed: {allowed}")
    op, args, kwargs = call.arguments(**call.defaults | fixed | given)
    found = explain(op, *args, target=options.target, impl=options.impl, **kwargs)
    found = dataclasses.replace(found, op=options.op)
    if options.json:
        write_json(options.json, found.as_dict())
    say(json.dumps(found.as_dict(), indent=2) if printed else str(found))
    return 0


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"
