"""`python -m sparse_attn quality`: the table of cli.quality for a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path

from sparse_attn.checkpoints.formats import form_said_by
from sparse_attn.checkpoints.load import load, read_config
from sparse_attn.cli import report, torchrun
from sparse_attn.cli.arguments import (
    DTYPES,
    add_expand_weights,
    add_prefill_activations,
    check_outputs,
    check_prefill_activations,
    device_of,
    positive,
    refuse,
    write_json,
)
from sparse_attn.cli.bars import add_progress, byte_bar
from sparse_attn.cli.documents import LEAST_BYTES, retrieval_documents, text_documents
from sparse_attn.cli.quality import MEANING, WAYS, Quality, encode, measure
from sparse_attn.cli.shipped import folder_of, shipped_models, tokenizer_of
from sparse_attn.cli.sources import identity_of
from sparse_attn.generation import processes
from sparse_attn.generation.graph import uncapturable
from sparse_attn.generation.text import say
from sparse_attn.mesh import ONE_RANK, Mesh, show_mesh

DEFAULT_CONTEXT = 1024


def add(parser: argparse.ArgumentParser) -> None:
    names = tuple(shipped_models())
    parser.epilog = "example: quality --model reader-v32 --documents 4"
    parser.description = (
        "Bits per byte of held-out text and retrieval of values by their keys, by every way to run a checkpoint. "
        + " ".join(f"{name}: {meaning}." for name, meaning in MEANING.items())
    )
    parser.add_argument("--model", default=names[0] if names else None, required=not names, metavar="NAME|DIR",
                        help="a checkpoint folder, or a model that ships here (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--ways", type=_ways, metavar="NAME,NAME", help=f"of {', '.join(WAYS)} (default: all the machine can)"
    )
    parser.add_argument("--context", type=positive, metavar="BYTES", help=f"of a document (default: {DEFAULT_CONTEXT})")
    parser.add_argument(
        "--documents", type=positive, default=16, metavar="N", help="of each kind (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the keys and values (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights; default: bf16 on cuda, else fp32")
    add_expand_weights(parser)
    add_prefill_activations(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    torchrun.add(parser)
    add_progress(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if (data := options.data_parallel or 1) > 1:
        raise ValueError(f"--data-parallel: got {data}, allowed: 1, all ranks read the same documents")
    with torchrun.joined(options) as mesh, contextlib.ExitStack() as stack:
        if torchrun.rank():
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            options.progress = False
        return _run(options, mesh)


def _run(options: argparse.Namespace, mesh: Mesh) -> int:
    check_outputs(options)
    device, folder = device_of(options.device), folder_of(options.model)
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    config, known = read_config(folder)
    if mesh != ONE_RANK:
        processes.check_same_everywhere(**identity_of(folder))
    packed = form_said_by(config, known) != "bf16" and not options.expand_weights
    check_prefill_activations(options, packed)
    waits = uncapturable(device, "auto", known, dtype, packed=packed, mesh=mesh)
    names = options.ways or [name for name, way in WAYS.items()
                             if (device.type == "cuda" or not way.gpu) and not (way.graph and waits)]  # fmt: skip
    for name in names:
        if WAYS[name].gpu and device.type != "cuda":
            raise ValueError(f"--ways: got {name!r} on {device}, needs a GPU")
        if WAYS[name].graph and waits:
            raise ValueError(f"--ways: got {name!r} with {waits}")
    if options.context is not None and options.context < LEAST_BYTES:
        raise ValueError(f"--context: got {options.context} bytes, allowed: at least {LEAST_BYTES}")
    with byte_bar("weights", options.progress) as progress:
        spec, params = load(
            folder, device=device, dtype=dtype, expand=options.expand_weights, progress=progress, mesh=mesh
        )
    tokenizer = tokenizer_of(folder, spec)
    if tokenizer is None:
        raise ValueError(f"--model: {folder} holds no tokenizer.json, and its vocabulary is not that of bytes")
    context = options.context or min(DEFAULT_CONTEXT, spec.max_positions)
    texts = [encode(document, tokenizer) for document in text_documents(options.documents, context)]
    asked = [encode(document, tokenizer) for document in retrieval_documents(options.documents, context, options.seed)]
    longest = max(len(document.ids) for document in (*texts, *asked))
    if longest > spec.max_positions:
        raise ValueError(
            f"--context: got {context} bytes, {longest} tokens, allowed: {spec.max_positions}, the model's positions"
        )
    say(
        f"{options.model} on {report.device_name(device)}, {options.dtype or str(dtype).removeprefix('torch.')}: "
        f"{len(texts)} texts and {len(asked)} documents of {context} bytes, top-k {spec.index.top_k}"
    )  # fmt: skip
    print(f"{'way':<10} {'bits/byte':>10} {'of dense':>9} {'retrieval':>10} {'right':>12} {'seconds':>8}", flush=True)
    found: dict[str, Quality] = {}
    for name in names:
        found[name] = measure(
            spec, params, WAYS[name], texts, asked, prefill_activations=options.prefill_activations, mesh=mesh
        )
        print(_row(name, found), flush=True)
    if options.json and not torchrun.rank():
        written = {
            "model": options.model, "device": report.device_name(device), "dtype": str(dtype).removeprefix("torch."),
            "context": context, "documents": options.documents, "seed": options.seed, "top_k": spec.index.top_k,
            "prefill_activations": options.prefill_activations, "versions": report.versions(), "ranks": show_mesh(mesh),
            "ways": {name: quality._asdict() | {"retrieval": quality.retrieval} for name, quality in found.items()},
        }  # fmt: skip
        write_json(options.json, written)
    return 0


def _row(name: str, found: dict[str, Quality]) -> str:
    mine = found[name]
    dense = found["dense"].bits_per_byte if "dense" in found else None
    beside = f"{mine.bits_per_byte / dense:.4f}" if mine.bits_per_byte and dense else ""
    right = f"{mine.right}/{mine.asked}"
    return (
        f"{name:<10} {mine.bits_per_byte:>10.4f} {beside:>9} {mine.retrieval:>10.2%} {right:>12} {mine.seconds:>8.1f}"
    )


def _ways(given: str) -> list[str]:
    names = given.split(",")
    unknown = [name for name in names if name not in WAYS]
    if unknown:
        refuse(f"got {unknown[0]!r}, allowed: {', '.join(WAYS)}")
    return names
