"""`python -m sparse_attn write-checkpoint`: random weights in a form that is published."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparse_attn.models.published import FORMS, first_layers, write_published
from sparse_attn.runtime.arguments import positive, refuse
from sparse_attn.runtime.bars import add_progress, byte_bar
from sparse_attn.spec import PRESETS, preset


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write random weights in exactly the form of a published checkpoint."
    parser.add_argument("--preset", required=True, type=_preset, metavar="|".join(PRESETS))
    parser.add_argument("--layers", type=positive, metavar="N", help="the first N of the model (default: all)")
    parser.add_argument(
        "--format", choices=FORMS, default="published",
        help="published: as DeepSeek and Zhipu have them; flash-base: fp8 experts and fp32 scales in DeepSeek-V4; "
             "fp8-e8m0: fp8 with e8m0 scales; fused: as transformers writes them (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new or an empty folder")
    parser.add_argument("--seed", type=_seed, default=0, help="of the weights (default: %(default)s)")
    add_progress(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    spec = options.preset if options.layers is None else first_layers(options.preset, options.layers)
    with byte_bar("weights", options.progress) as progress:
        total = write_published(options.out, spec, options.format, options.seed, progress)
    print(f"{options.out}: {spec.num_layers} layers of {spec.name}, {options.format}, {total:,} bytes of weights")
    return 0


def _preset(name: str):
    try:
        return preset(name)
    except ValueError as error:
        refuse(str(error))


def _seed(given: str) -> int:
    value = int(given) if given.isdecimal() else -1
    return value if 0 <= value < 2**31 else refuse(f"got {given!r}, allowed: an integer from 0 to {2**31 - 1}")
