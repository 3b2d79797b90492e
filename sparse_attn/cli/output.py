"""What `generate` prints in the terminal, and the picture it draws."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from sparse_attn.cli.plot import draw
from sparse_attn.generation import text
from sparse_attn.generation.selections import attended, by_layer, indexed_layers, shares
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


def check_plot(prompt: Sequence[int], tokenizer: text.Tokenizer | None) -> None:
    """ValueError for a model whose tokens are longer than a character: the picture has one place a character."""
    if tokenizer is None or any(len(tokenizer.decode([token])) != 1 for token in prompt):
        raise ValueError("--plot: got a vocabulary of more than bytes, allowed: models that read ASCII byte by byte")


def plot(
    path: Path,
    spec: Spec | CompressedSpec,
    prompt: Sequence[int],
    tokens: Sequence[int],
    selected: list[torch.Tensor],
    tokenizer: text.Tokenizer,
    name: str,
) -> None:
    """Draw what the indexers ``selected`` while ``tokens`` were written behind ``prompt``."""
    check_plot(prompt, tokenizer)
    read, new = ([tokenizer.decode([token]) for token in ids] for ids in (prompt, tokens))
    layers = indexed_layers(spec)
    ratio = spec.indexed_ratio if isinstance(spec, CompressedSpec) else 1
    share = shares(by_layer(selected, spec), slice(len(prompt) - 1, None), len(prompt) + len(tokens), ratio)
    title = (
        f"{name}: what {len(layers)} indexers selected for the {len(tokens)} bytes behind it "
        f"(dark: by all, every time), {spec.index.top_k} {'keys' if ratio == 1 else f'entries of {ratio} bytes'} each "
        f"out of up to {len(share) // ratio}"
    )
    draw(path, "".join(read), "".join(character[:1] for character in new), share, title)
