"""`python -m sparse_attn explain`: which kernel a call of given sizes takes on a target, and why."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from sparse_attn import explanation
from sparse_attn.runtime.arguments import DTYPES, check_outputs, positive, write_json
from sparse_attn.runtime.text import say
from sparse_attn.spec import preset
from sparse_attn.target import TARGETS

MODEL = preset("deepseek_v32")  # whose sizes are the defaults
META = torch.device("meta")
PRINT = Path("-")


class Command(NamedTuple):
    """op: the public function that is called. arguments: what it is called with, from the options that ``defaults``
    names: positional ones, and by name."""

    op: str
    arguments: Callable[..., tuple[tuple, dict]]
    defaults: dict[str, object]


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Which kernel a call takes, how it is launched, the microseconds below which nothing gets on the target, and "
        "why the kernels before it do not run. Sizes are DeepSeek-V3.2's unless given; no GPU is needed."
    )
    parser.add_argument("op", choices=COMMANDS, metavar="OP", help=", ".join(COMMANDS))
    parser.add_argument("--target", choices=TARGETS, help="default: this machine's GPU, or sm_90 where there is none")
    for name, (kind, text) in OPTIONS.items():
        choices = tuple(DTYPES) if name == "dtype" else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, choices=choices,
                            metavar=None if choices else "NAME" if kind is str else "N", help=text)  # fmt: skip
    parser.add_argument(
        "--impl", default="auto", metavar="NAME", help="a kernel's name takes that one wherever it is able"
    )
    parser.add_argument("--json", nargs="?", type=Path, const=PRINT, metavar="FILE",
                        help="write it as JSON; without FILE print that instead")  # fmt: skip
    parser.set_defaults(run=run)


OPTIONS: dict[str, tuple[Callable, str]] = {
    "tokens": (positive, "rows of queries"),
    "top_k": (positive, "keys a row selects"),
    "width": (positive, "scores a row selects among"),
}


def run(options: argparse.Namespace) -> int:
    printed = options.json == PRINT
    if printed:
        options.json = None
    check_outputs(options)
    command = COMMANDS[options.op]
    sizes = dict(command.defaults)
    for name in OPTIONS:
        if (value := getattr(options, name)) is None:
            continue
        if name not in sizes:
            allowed = ", ".join(f"--{other.replace('_', '-')}" for other in sizes)
            raise ValueError(f"--{name.replace('_', '-')}: got {value} for {options.op}, allowed: {allowed}")
        sizes[name] = value
    args, kwargs = command.arguments(**sizes)
    found = explanation.explain(command.op, *args, target=options.target, impl=options.impl, **kwargs)
    found = dataclasses.replace(found, op=options.op)
    if options.json:
        write_json(options.json, found.as_dict())
    say(json.dumps(found.as_dict(), indent=2) if printed else str(found))
    return 0


def _topk(tokens: int, width: int, top_k: int) -> tuple[tuple, dict]:
    return (torch.empty(tokens, width, dtype=torch.float32, device=META), top_k), {}


COMMANDS: dict[str, Command] = {
    "topk": Command("top_k_per_row", _topk, {"tokens": 128, "width": MODEL.max_positions, "top_k": MODEL.index.top_k}),
}
