"""Arguments that several commands of the command line take."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from sparse_attn.cli.plot import check_picture
from sparse_attn.files import check_output, write_output
from sparse_attn.ops.layers.products import ACTIVATIONS
from sparse_attn.spec import CompressedSpec, Spec, preset

Group = argparse._ActionsContainer  # a parser, or a group of its arguments
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OUTPUTS = {"json": "--json", "dump_logits": "--dump-logits", "plot": "--plot", "out": "--out"}
INPUTS = {"prompts": "--prompts", "prompt_file": "--prompt-file", "chat": "--chat"}


class Parser(argparse.ArgumentParser):
    """Errors take one line. That of an option which there is none of names the nearest one."""

    def parse_known_args(self, args=None, namespace=None):
        found, unknown = super().parse_known_args(args, namespace)
        options = {option.lstrip("-"): option for option in self._option_string_actions}
        for name in (given.split("=")[0] for given in unknown if given.startswith("-")):
            near = difflib.get_close_matches(name.lstrip("-"), options, 1)
            self.error(f"{name}: did you mean {options[near[0]]}?" if near else f"{name}: there is no such option")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def device_of(name: str | None) -> torch.device:
    """ "cpu", "cuda", or None for cuda where there is one."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("--device: got 'cuda', which torch finds none of here, allowed: 'cpu'")
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def add_expand_weights(parser: Group) -> None:
    parser.add_argument("--expand-weights", action=argparse.BooleanOptionalAction, default=False,
                        help="hold quantised weights in --dtype; by default they stay as the files have them"
                        )  # fmt: skip


def add_prefill_activations(parser: Group) -> None:
    parser.add_argument("--prefill-activations", choices=ACTIVATIONS, default="exact",
                        help="fp8: quantise what steps with prompts multiply by packed weights (default: %(default)s)"
                        )  # fmt: skip


def check_prefill_activations(options: argparse.Namespace, packed: bool) -> None:
    """ValueError for quantised activations where no weight stays packed."""
    if options.prefill_activations != "exact" and not packed:
        raise ValueError(
            f"--prefill-activations: got {options.prefill_activations!r}, allowed: 'exact', no weight stays packed"
        )


def check_outputs(options: argparse.Namespace) -> None:
    """ValueError where a command's output file cannot be written, or is one that it reads. Called before the command
    runs."""
    inputs = list(_inputs(options))
    taken: dict[str, str] = {}
    for key, name in OUTPUTS.items():
        path = getattr(options, key, None)
        if path is None:
            continue
        check_output(name, path, regular=name == "--out")
        for source, read in inputs:
            if path.exists() and read.exists() and path.samefile(read):
                raise ValueError(f"{name}: got {str(path)!r}, the file of {source}, allowed: one that is not read")
        if name == "--plot":
            check_picture(path)
        place = os.path.realpath(path)
        if place in taken and (not os.path.exists(place) or os.path.isfile(place)):
            raise ValueError(f"{name}: got {str(path)!r}, which {taken[place]} writes")
        taken[place] = name


def _inputs(options: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """The files that a command reads, and what names them."""
    for key, name in INPUTS.items():
        if (path := getattr(options, key, None)) is not None:
            yield name, path
    folder = Path(getattr(options, "model", None) or "")
    for path in folder.iterdir() if folder.name and folder.is_dir() else ():
        if path.name in ("config.json", "tokenizer.json") or ".safetensors" in path.suffixes:
            yield "--model", path


def write_json(path: Path, value: Any) -> None:
    write_output(path, (json.dumps(value, indent=2) + "\n").encode())


def positive(given: str) -> int:
    """An integer of at least 1."""
    value = int(given) if given.isdecimal() else 0
    if value < 1:
        refuse(f"got {given!r}, allowed: an integer of at least 1")
    return value


def spec_of_preset(name: str) -> Spec | CompressedSpec:
    """The preset of a name, whose words are parted by - or _."""
    try:
        return preset(name)
    except ValueError as error:
        refuse(str(error))


def refuse(message: str) -> NoReturn:
    raise argparse.ArgumentTypeError(message)
