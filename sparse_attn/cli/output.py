"""What `generate` prints in the terminal, while it runs and behind it, and what it draws."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence

import torch

from sparse_attn.cli.documents import KEY_BYTES, Question, asked_record
from sparse_attn.cli.plot import Steps
from sparse_attn.framework.compilation import TORCH_COMPILE
from sparse_attn.generation import text
from sparse_attn.generation.generate import Generation
from sparse_attn.generation.selections import attended, by_layer, indexed_layers
from sparse_attn.spec import CompressedSpec, Spec

PROMPT_TAIL = 300  # characters of a prompt worth showing
PATIENCE_S = 1.0  # of kernels, before it is said that they take long
INTERRUPTED = "interrupted"  # a finish_reason


class Answer:
    """The tokens of one request as they come, and its text, which ends before a stop text. live: whether stdout is
    shown them as they come."""

    def __init__(self, tokenizer: text.Tokenizer | None, stops: Sequence[str], live: bool):
        self.tokens: list[int] = []
        self._decode = tokenizer and tokenizer.decode
        self._watch = text.StopStrings(tokenizer.decode, stops) if tokenizer else None
        self._withheld = max(map(len, stops), default=1) - 1  # characters that may begin a stop text
        self._live, self._shown = live, ""
        self._begun, self._first, self._compiled = time.perf_counter(), None, 0.0
        self._seconds: Callable[[], float] = lambda: 0.0

    @property
    def stop(self) -> str | None:
        """The stop text that ended it."""
        return self._watch.found if self._watch else None

    @property
    def text(self) -> str | None:
        """None without a tokenizer."""
        return self._watch.text if self._watch and self.stop else self._decode and self._decode(self.tokens)

    def begin(self, compiled: Callable[[], float]) -> None:
        """Count time from now. compiled: the seconds spent compiling so far."""
        self._begun, self._seconds = time.perf_counter(), compiled

    def push(self, request: int, token: int) -> bool:
        """Whether ``token`` ends a stop text; generate's on_token."""
        if self._first is None:
            self._first, self._compiled = time.perf_counter(), self._seconds()
        self.tokens.append(token)
        stopped = self._watch.push(token) if self._watch else False
        if self._live and self._watch:
            self._show(self._watch.text if stopped or not self._withheld else self._watch.text[: -self._withheld])
        elif self._live:
            self._show(" ".join(map(str, self.tokens)))
        return stopped

    def finish(self) -> None:
        """Show what was not shown."""
        whole = " ".join(map(str, self.tokens)) if self.text is None else self.text
        if whole.startswith(self._shown):
            self._show(whole)
        text.say("")

    def so_far(self) -> Generation:
        """What an interrupted generation has given."""
        now, compiled = time.perf_counter(), self._seconds()
        first = now if self._first is None else self._first
        before = compiled if self._first is None else self._compiled
        times = first - self._begun - before, compiled, now - first - (compiled - before)
        return Generation([self.tokens], None, *times)

    def _show(self, whole: str) -> None:
        if len(whole) > len(self._shown):
            text.say(text.printable(whole[len(self._shown) :]), end="")
            self._shown = whole


class Compiling:
    """Says on stderr, once of each, that torch.compile or Triton compiles. seconds: spent at it so far."""

    def __init__(self, seconds: Callable[[], float]):
        self._seconds, self._said = seconds, set()

    def __call__(self, what: str) -> None:
        kernels = what != TORCH_COMPILE
        if kernels in self._said or (kernels and self._seconds() < PATIENCE_S):  # kernels may lie in Triton's cache
            return
        self._said.add(kernels)
        told = "Triton kernels, which its cache keeps" if kernels else "the model by torch.compile"
        print(f"set-up: compiling {told} ...", file=sys.stderr, flush=True)


def ask(asked: Question) -> None:
    """On stderr, the task that a model is set, before it begins."""
    records = len(re.findall(rf"\[[A-Z]{{{KEY_BYTES}}}=\d", asked.text))
    print(
        f"task: {len(asked.text):,} bytes of text hold {records} records like [{asked.key}=0000] and end with the key "
        f"of one: what is recorded under {asked.key}?\n...{text.printable(asked.text[-PROMPT_TAIL:])}",
        file=sys.stderr,
    )


def show(written: dict, spec: Spec | CompressedSpec, asked: Question | None) -> None:
    """On stderr, behind the text, what ``written`` (report.generation_report) says, and whether it answers what was
    ``asked``."""
    tokens, read = written["tokens"], written["prompt_tokens"]
    keys = "window keys and entries" if isinstance(spec, CompressedSpec) else "keys"
    if asked is not None and (written["finish_reason"] != INTERRUPTED or len(written["text"]) >= len(asked.value)):
        _show_answer(written["text"], spec, asked, read, keys)
    if not tokens:
        print("interrupted before the first token", file=sys.stderr)
        return
    if written["finish_reason"] == INTERRUPTED:
        print(f"\ninterrupted behind {len(tokens)} tokens", file=sys.stderr)
    timing, count = written["timing"], len(tokens)
    query, there = attended(spec, read + count - 1)
    drafted = f", {written['accepted_per_step']:.2f} a step" if written.get("accepted_per_step") else ""
    print(
        f"{written['model']} ({written['impl']} on {written['device']}, {written['dtype']}, {written['cache']} cache): "
        f"each query attended to {query:.1f} of {there:.1f} {keys} in the mean; "
        f"{timing['tokens_per_s']:.1f} tokens a second{drafted}",
        file=sys.stderr,
    )
    parts = {"reading": timing["prefill_s"], "set-up": timing["setup_s"], "writing": timing["decode_s"]}
    whole = max(sum(parts.values()), 1e-9)
    spent = ", ".join(
        f"{what} {seconds:.2f} s ({seconds / whole:.0%})" for what, seconds in parts.items() if seconds / whole > 5e-3
    )
    print(f"{read} tokens read, {count} written: {spent}", file=sys.stderr)


def _show_answer(shown: str, spec: Spec | CompressedSpec, asked: Question, read: int, keys: str) -> None:
    """What was found, and what the step that began to write it read."""
    found = shown[: len(asked.value)]
    answer = f"answered {found}" if found == asked.value else f"answered {found!r}, which is wrong"
    back = len(asked.text) - asked.record
    query, _ = attended(spec, read, read - 1)
    print(
        f"\nrecorded {asked.value}, {answer}: the record stands at byte {asked.record:,}, {back:,} before the end\n"
        f"in the step that answered, a dense model reads {read:,} keys in each layer, this one {query:,.0f} {keys} "
        f"({query / read:.1%})",
        file=sys.stderr,
    )


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
    asked: Question | None,
) -> Steps:
    """What the indexers ``selected`` while ``tokens`` were written behind ``prompt``, to draw.

    asked: what the prompt is, if it is documents.question.
    """
    shown = [tokenizer.decode([token]) if tokenizer else str(token) for token in (*prompt, *tokens)]
    ratio = spec.indexed_ratio if isinstance(spec, CompressedSpec) else 1
    record = asked_record(asked.text) if asked else None
    return Steps(
        name, shown, len(prompt), indexed_layers(spec), by_layer(selected, spec), spec.index.top_k, ratio, record,
        len(asked.value) if asked else 0,
    )  # fmt: skip
