"""What `generate` and `plan` are asked: their options, and how each is read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from sparse_attn.checkpoints.formats import FORMS
from sparse_attn.cli import chat, sources, torchrun
from sparse_attn.cli.arguments import (
    DTYPES,
    Group,
    add_expand_weights,
    add_prefill_activations,
    positive,
    refuse,
    spec_of_preset,
)
from sparse_attn.cli.bars import add_progress
from sparse_attn.cli.shipped import shipped_models
from sparse_attn.framework.target import IMPLEMENTATIONS
from sparse_attn.pipeline import CACHE_KINDS, INDEX_CACHE_KINDS, LOGITS_BYTES
from sparse_attn.spec import PRESETS

FINITE = 2.0**127  # what a penalty may be, as fp32
BLOCK_SIZE_HELP = "tokens a block of the paged caches covers (default: what suits the model)"


def _add_cache(parser: Group) -> None:
    parser.add_argument("--cache", choices=CACHE_KINDS, default="fp8", help="default: %(default)s")
    parser.add_argument("--index-cache", choices=INDEX_CACHE_KINDS,
                        help="of index keys; default: mxfp4 beside an fp8 cache for DeepSeek-V4 with fp4 experts, "
                        "which was trained with it, else that of --cache")  # fmt: skip


def add_generate(parser: argparse.ArgumentParser) -> None:
    _add_asked(parser)
    _add_computed(parser)
    group = parser.add_argument_group("drawing", "example: --temperature 0.7 --top-p 0.9 --stop END")
    _add_drawing(group)
    group = parser.add_argument_group("output", "example: --json out.json --plot picture.png")
    group.add_argument("--logprobs", type=_fitting(int, 0), metavar="N",
                       help="write log-probabilities of each new token and of the N most likely ones to --json"
                       )  # fmt: skip
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw what each layer's indexer selected over the context for the tokens of the answer, or for the last "
        "ones: .png, .svg, .pdf (needs matplotlib)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write ids, timing and counts")
    group.add_argument("--dump-logits", type=Path, metavar="FILE",
                       help="write fp32 logits of every position, [prompt + generated - 1, vocab], as safetensors"
                       )  # fmt: skip
    add_progress(group)
    group = parser.add_argument_group("many GPUs", "example: --context-parallel 2, under torchrun --nproc-per-node 2")
    torchrun.add(group)


def _add_asked(parser: argparse.ArgumentParser) -> None:
    sources.add(parser.add_argument_group("model", "example: --model reader-v4"))
    group = parser.add_argument_group("prompt", "example: --prompt 'Once upon a time' --max-new-tokens 64")
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="default: records amid a text and the key of one for models "
                        "that ship here, else the opening of a novel")  # fmt: skip
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 text")
    prompt.add_argument("--chat", type=Path, nargs="?", const=chat.SHIPPED, metavar="FILE.json",
                        help="a conversation with DeepSeek-V4: a list of messages, or an object with messages, tools, "
                        "tool_choice, thinking, reasoning_effort (needs deepseek-recipe). Models that ship here read "
                        "its texts, one behind the other; without FILE.json one that ships, too")  # fmt: skip
    prompt.add_argument("--prompt-ids", type=_ids, metavar="1,2,3", help="token ids")
    prompt.add_argument("--prompts", type=Path, metavar="FILE.jsonl",
                        help="many prompts, a JSON object a line: id, prompt or prompt_ids; max_new_tokens, seed, "
                        "stop, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty and "
                        "frequency_penalty of its own where it has them")  # fmt: skip
    group.add_argument("--max-new-tokens", type=positive, default=32, metavar="N", help="default: %(default)s")
    many = parser.add_argument_group("many prompts", "example: --prompts in.jsonl --out out.jsonl --rows 16")
    many.add_argument("--out", type=Path, metavar="FILE.jsonl",
                      help="of --prompts: answers as they finish: id, text, tokens, finish_reason, fingerprint. "
                      "Those it holds already are not computed again")  # fmt: skip
    many.add_argument("--redo", action="store_const", const=True,
                      help="compute answers in --out anew that another model, other settings or another prompt made "
                      "(default: refuse them)")  # fmt: skip
    many.add_argument("--rows", type=positive, metavar="N", help="prompts of --prompts that run at a time (default: 8)")
    many.add_argument("--blocks", type=positive, metavar="N",
                      help="blocks of the caches for --prompts (default: what N rows of the longest take)"
                      )  # fmt: skip


def _add_computed(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it is computed", "example: --device cuda --dtype bf16 --compile --graph")
    group.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    group.add_argument(
        "--dtype", choices=tuple(DTYPES), help="of the weights; default: bf16 for --model on cuda, else fp32"
    )
    add_expand_weights(group)
    add_prefill_activations(group)
    _add_cache(group)
    group.add_argument("--impl", choices=IMPLEMENTATIONS, default="auto", help="default: %(default)s")
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="no row's bits depend on the other rows of a step: attention, products, router, experts",
    )
    group.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=False, help="torch.compile the forward"
    )
    group.add_argument("--graph", action=argparse.BooleanOptionalAction, default=False, help="capture the decode step")
    group.add_argument("--speculate", type=_fitting(int, 0), default=0, metavar="N",
                       help="draft N tokens a decode step by the model's layer of multi-token prediction, which the "
                       "checkpoint has to hold; the text stays the same (default: %(default)s)")  # fmt: skip
    group.add_argument("--prefill-tokens", type=positive, default=1024, metavar="N",
                       help="tokens per prefill step (default: %(default)s)")  # fmt: skip
    group.add_argument("--block-size", type=positive, metavar="N", help=BLOCK_SIZE_HELP)


def _add_drawing(group: Group) -> None:
    group.add_argument("--temperature", type=_temperature, default=0.0, help="0 is greedy (default)")
    group.add_argument(
        "--seed", type=int, default=0, help="of the draws at a temperature above 0 (default: %(default)s)"
    )
    group.add_argument("--top-k", type=_fitting(int, 0), default=0, metavar="K",
                       help="draw from the K most likely tokens; 0: from all (default)")  # fmt: skip
    group.add_argument("--top-p", type=_fitting(float, 0, 1), default=1.0, metavar="P",
                       help="draw from the most likely tokens whose probabilities add up to P; 1: from all (default)"
                       )  # fmt: skip
    group.add_argument("--min-p", type=_fitting(float, 0, 1), default=0.0, metavar="P",
                       help="draw from tokens at least P times as likely as the most likely; 0: from all (default)"
                       )  # fmt: skip
    group.add_argument("--repetition-penalty", type=_fitting(float, 2.0**-126), default=1.0, metavar="X",
                       help="divide logits above 0 of tokens read or written by X, multiply others; 1: off (default)"
                       )  # fmt: skip
    group.add_argument("--presence-penalty", type=_fitting(float, -FINITE), default=0.0, metavar="X",
                       help="subtract X from the logits of tokens written; 0: off (default)")  # fmt: skip
    group.add_argument("--frequency-penalty", type=_fitting(float, -FINITE), default=0.0, metavar="X",
                       help="subtract X for each time a token was written; 0: off (default)")  # fmt: skip
    group.add_argument("--stop", type=_text, action="append", default=[], metavar="TEXT",
                       help="end before this text; may be given several times")  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-text token")


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example: plan --preset deepseek-v3.2 --max-batch 8 --gpus 8"
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", type=spec_of_preset, dest="spec", metavar="|".join(PRESETS))
    model.add_argument("--model", metavar="NAME|DIR",
                       help=f"a folder with a config.json, or a model that ships here: {', '.join(shipped_models())}"
                       )  # fmt: skip
    parser.add_argument("--max-batch", type=positive, default=1, metavar="N", help="requests (default: %(default)s)")
    parser.add_argument("--max-batched-tokens", type=positive, default=8192, metavar="N",
                        help="tokens of a step (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--max-model-len", type=positive, metavar="N", help="tokens of a request (default: the model's)"
    )
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--next-n", type=positive, default=1, metavar="N", help="rows a decode request owns")
    rows.add_argument("--speculate", type=_fitting(int, 0), default=0, metavar="N",
                      help="of generate: count N + 1 rows a request, and the layer that drafts")  # fmt: skip
    parser.add_argument("--kv-rows", type=positive, metavar="N",
                        help="keys gathered for a step's prefill requests (default: --max-model-len)")  # fmt: skip
    parser.add_argument("--format", choices=FORMS, help="of the weights, as write-checkpoint has it; bf16: expanded "
                        "(default: published, or what config.json says)")  # fmt: skip
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of the model (default: %(default)s)")
    parser.add_argument("--block-size", type=positive, metavar="N", help=BLOCK_SIZE_HELP)
    parser.add_argument("--logits-bytes", type=positive, default=LOGITS_BYTES, metavar="N",
                        help="of index scores held at a time (default: %(default)s)")  # fmt: skip
    _add_cache(parser)
    add_prefill_activations(parser)
    parser.add_argument("--gpus", type=positive, metavar="N", help="count a rank of N GPUs, laid out as generate lays "
                        "them out (default: of 1, 2, 4 and 8, as tensor and expert ranks)")  # fmt: skip
    torchrun.add(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")


def _ids(given: str) -> list[int]:
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        refuse(f"got {given!r}, allowed: integers with commas between them")


def _fitting(kind: type[int] | type[float], least: float, most: float | None = None) -> Callable[[str], int | float]:
    """Reads a number from ``least`` to ``most``; None: without end for an integer, FINITE for others."""
    most = FINITE if most is None and kind is float else most
    name = "an integer" if kind is int else "a number"
    bounds = f"of at least {least:g}" if most is None else f"from {least:g} to {most:g}"

    def read(given: str) -> int | float:
        try:
            value = kind(given)
        except ValueError:
            value = math.nan
        if not least <= value or most is not None and value > most:
            refuse(f"got {given!r}, allowed: {name} {bounds}")
        return value

    return read


def _text(given: str) -> str:
    if not given:
        refuse("got an empty text, allowed: at least one character")
    return given


def _temperature(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        refuse(f"got {given!r}, allowed: 0 (greedy) or a positive number")
    return value
