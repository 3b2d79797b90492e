"""`python -m sparse_attn write-checkpoint`: a checkpoint in a form that is published, of random weights or of
another's."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparse_attn.checkpoints.convert import convert
from sparse_attn.checkpoints.formats import FORMS, first_layers
from sparse_attn.checkpoints.published import write_published
from sparse_attn.cli.arguments import positive, refuse, spec_of_preset
from sparse_attn.cli.bars import add_progress, byte_bar
from sparse_attn.cli.shipped import folder_of, shipped_models
from sparse_attn.spec import PRESETS


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example: write-checkpoint --preset glm5 --layers 4 --out four"
    parser.description = (
        "Write random weights, or those of another checkpoint, in exactly the form of a published checkpoint. Weights "
        "in bf16 are quantised; those that are quantised already are never rounded again."
    )
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument(
        "--preset", type=spec_of_preset, metavar="|".join(PRESETS), help="random weights of this model"
    )
    weights.add_argument("--from", dest="source", metavar="NAME|DIR",
                         help="the weights of this checkpoint, or of a model that ships here: "
                         f"{', '.join(shipped_models())}")  # fmt: skip
    parser.add_argument("--layers", type=positive, metavar="N", help="the first N of --preset (default: all)")
    parser.add_argument(
        "--format", choices=FORMS, default="published",
        help="published: as DeepSeek and Zhipu have them; flash-base: fp8 experts and fp32 scales in DeepSeek-V4; "
             "fp8-e8m0: fp8 with e8m0 scales; fused: as transformers writes them (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new or an empty folder")
    parser.add_argument("--seed", type=_seed, help="of random weights (default: 0)")
    add_progress(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.source is not None:
        return _convert(options)
    spec = options.preset if options.layers is None else first_layers(options.preset, options.layers)
    with byte_bar("weights", options.progress) as progress:
        total = write_published(options.out, spec, options.format, options.seed or 0, progress)
    print(f"{options.out}: {spec.num_layers} layers of {spec.name}, {options.format}, {total:,} bytes of weights")
    return 0


def _convert(options: argparse.Namespace) -> int:
    if options.layers is not None or options.seed is not None:
        raise ValueError("--from: got it with --layers or --seed, allowed: neither, which are of random weights")
    with byte_bar("weights", options.progress) as progress:
        spec, total = convert(folder_of(options.source, "--from"), options.out, options.format, progress)
    print(f"{options.out}: {spec.num_layers} layers of {options.source}, {options.format}, {total:,} bytes of weights")
    return 0


def _seed(given: str) -> int:
    value = int(given) if given.isdecimal() else -1
    return value if 0 <= value < 2**31 else refuse(f"got {given!r}, allowed: an integer from 0 to {2**31 - 1}")
