"""What `generate` prints in the terminal, and what it draws."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from sparse_attn.cli.documents import asked_record
from sparse_attn.cli.plot import Steps
from sparse_attn.generation import text
from sparse_attn.generation.selections import attended, by_layer, indexed_layers
from sparse_attn.spec import CompressedSpec, Spec

PROMPT_TAIL = 300  # characters of a prompt worth showing


def show(written: dict, spec: Spec | CompressedSpec, prompt: str | None, expected: str | None) -> None:
    """The continuation on stdout; on stderr the ``prompt`` it answers, and what ``written`` (report.generation_report)
    says.

    expected: what the prompt asks for.
    """
    if prompt is not None:
        print(f"...{text.printable(prompt[-PROMPT_TAIL:])}", file=sys.stderr)
    shown = written["text"] if written["text"] is not None else " ".join(map(str, written["tokens"]))
    text.say(text.printable(shown))
    if expected is not None:
        found = shown[: len(expected)]
        answer = f"answered {found}" if found == expected else f"answered {found!r}, which is wrong"
        print(f"\nrecorded {expected}, {answer}", file=sys.stderr)
    timing, count = written["timing"], len(written["tokens"])
    read, there = attended(spec, written["prompt_tokens"] + count - 1)
    print(
        f"{written['model']} ({written['impl']} on {written['device']}, {written['dtype']}, {written['cache']} cache): "
        f"each query attended to {read:.1f} of {there:.1f} keys in the mean; "
        f"{timing['tokens_per_s']:.1f} tokens a second",
        file=sys.stderr,
    )
    parts = {"reading": timing["prefill_s"], "set-up": timing["setup_s"], "writing": timing["decode_s"]}
    whole = max(sum(parts.values()), 1e-9)
    spent = ", ".join(
        f"{what} {seconds:.2f} s ({seconds / whole:.0%})" for what, seconds in parts.items() if seconds / whole > 5e-3
    )
    print(f"{written['prompt_tokens']} tokens read, {count} written: {spent}", file=sys.stderr)


def check_plot(spec: Spec | CompressedSpec) -> None:
    """ValueError for a model without an indexer."""
    if not indexed_layers(spec):
        raise ValueError(f"--plot: got {spec.name}, which has no indexer, allowed: models with one")


def steps(
    spec: Spec | CompressedSpec,
    prompt: Sequence[int],
    tokens: Sequence[int],
    selected: list[torch.Tensor],
    tokenizer: text.Tokenizer | None,
    name: str,
    expected: str | None,
) -> Steps:
    """What the indexers ``selected`` while ``tokens`` were written behind ``prompt``, to draw.

    expected: what the prompt asks for, if it is documents.question.
    """
    shown = [tokenizer.decode([token]) if tokenizer else str(token) for token in (*prompt, *tokens)]
    ratio = spec.indexed_ratio if isinstance(spec, CompressedSpec) else 1
    record = asked_record("".join(shown[: len(prompt)])) if expected else None
    return Steps(
        name, shown, len(prompt), indexed_layers(spec), by_layer(selected, spec), spec.index.top_k, ratio, record,
        len(expected or ""),
    )  # fmt: skip
