"""Many prompts from a file of JSON lines, answered into another one, which an interrupted run goes on with."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from sparse_attn.cli import torchrun
from sparse_attn.cli.answer_files import Answer, AnswerFile, Fingerprint, answer_line, hash_of
from sparse_attn.cli.sources import Source
from sparse_attn.files import parse_json
from sparse_attn.framework import checks
from sparse_attn.generation import processes
from sparse_attn.generation.blocks import blocks_for
from sparse_attn.generation.inputs import checked_prompts, checked_sampling
from sparse_attn.generation.model import Model
from sparse_attn.generation.sampling import Sampling
from sparse_attn.generation.scheduler import Batching, Occupancy
from sparse_attn.generation.text import StopStrings, Tokenizer, check_text
from sparse_attn.ops.layers.sampling import row_seeds
from sparse_attn.pipeline import default_block_size
from sparse_attn.spec import CompressedSpec, Spec

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency")
PENALTIES = {f"{name}_penalty": name for name in ("repetition", "presence", "frequency")}  # as options have them
KEYS = ("id", "prompt", "prompt_ids", "max_new_tokens", "seed", "stop", *SAMPLING, *PENALTIES)
SHOWN_S = 0.2  # between two pictures of the table


class Asked(NamedTuple):
    """A line: its id, what to continue, and how."""

    id: str | int
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stops: tuple[str, ...]


class Job(NamedTuple):
    """What is to be done. fingerprints: of each of ``asked``. done: ids whose answers stay; stale: lines of those that
    do not."""

    asked: list[Asked]
    fingerprints: list[Fingerprint]
    file: AnswerFile
    done: set[str | int]
    stale: set[int]


def read_prompts(
    path: Path, spec: Spec | CompressedSpec, tokenizer: Tokenizer | None, *, max_new_tokens: int, sampling: Sampling,
    stops: Sequence[str] = (),
) -> list[Asked]:  # fmt: skip
    """The lines of ``path``: JSON objects with an id (a text or an integer, each once) and a prompt (a text), or
    prompt_ids. max_new_tokens, seed, stop (a text or several) and the fields of Sampling may be given too, penalties
    under the names of PENALTIES as well, else the keywords hold. Without a seed the n-th line, from 0, draws from the
    random stream (seed of the sampling, n).

    ValueError or TypeError names the line at fault.
    """
    found: list[Asked] = []
    lines = [(n, line) for n, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    streams = row_seeds(sampling.seed, len(lines)).tolist() if lines else []
    seen: set[str | int] = set()
    for (number, line), stream in zip(lines, streams):
        try:
            one = _asked(_object(line), spec, tokenizer, max_new_tokens, sampling, stream, stops)
            if one.id in seen:
                raise ValueError(f"id: got {one.id!r} again, allowed: each once")
        except (ValueError, TypeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError  # others take other arguments
            raise kind(f"{path}, line {number}: {error}") from error
        seen.add(one.id)
        found.append(one)
    if not found:
        raise ValueError(f"{path}: got no line, allowed: one prompt a line")
    return found


def hashes_of(one: Asked, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Of the settings and of the prompt, for the fingerprint of an answer to ``one``. settings: of the model, for all
    prompts. What only rounds in another order has no part in it: rows, blocks, kernels, torch.compile, graphs, drafts,
    ranks, the device."""
    sampling = one.sampling
    drawn = [one.seed, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p]
    asked = [
        one.max_new_tokens, sorted(set(one.stops)), sorted(set(sampling.stop_ids)),
        drawn if sampling.temperature else [], sampling.repetition, sampling.presence, sampling.frequency,
    ]  # fmt: skip
    return hash_of([dict(settings), asked]), hash_of(one.prompt)


@contextlib.contextmanager
def prepared(
    options: argparse.Namespace, source: Source, tokenizer: Tokenizer | None, sampling: Sampling,
    settings: Mapping[str, Any], device: torch.device,
) -> Iterator[Job]:  # fmt: skip
    """What --prompts and --out ask for, while this run holds --out; before there are weights. Nothing is written.
    settings: of the model, those that change tokens. ValueError names what is refused."""
    asked = read_prompts(
        options.prompts, source.spec, tokenizer, max_new_tokens=options.max_new_tokens, sampling=sampling,
        stops=options.stop,
    )  # fmt: skip
    hashes = [hashes_of(one, settings) for one in asked]

    def looked() -> tuple[str, set[str | int], set[int]]:
        answers, model = file.take(), hash_of([source.identity(), device.type if source.form else None])
        wanted = {one.id: Fingerprint(model, *both) for one, both in zip(asked, hashes)}
        return model, *_sorted_out(answers, wanted, options.out, options.redo)

    with contextlib.closing(AnswerFile(options.out)) as file:
        model, done, stale = torchrun.of_first(looked)
        yield Job(asked, [Fingerprint(model, *both) for both in hashes], file, done, stale)


def _sorted_out(
    answers: Sequence[Answer], wanted: Mapping[str | int, Fingerprint], out: Path, redo: bool
) -> tuple[set[str | int], set[int]]:
    """(ids of answers that stay, lines of those that differ from what is wanted now)."""
    done: set[str | int] = set()
    stale: set[int] = set()
    for number, name, fingerprint in answers:
        if name not in wanted:
            raise ValueError(f"--out: got an answer of id {name!r} in {out}, line {number}, allowed: ids of --prompts")
        others = [part for part in Fingerprint._fields
                  if fingerprint and getattr(fingerprint, part) != getattr(wanted[name], part)]  # fmt: skip
        if others and not redo:
            raise ValueError(
                f"--out: got an answer of id {name!r} in {out}, line {number}, by another "
                f"{' and another '.join(others)}, allowed: by those of this run; --redo computes it anew"
            )
        if others:
            stale.add(number)
        else:
            done.add(name)
    if unsaid := sum(answer.fingerprint is None for answer in answers):
        print(
            f"warning: {unsaid} answers in {out} have no fingerprint, as earlier versions wrote them; they are taken "
            "as they are",
            file=sys.stderr,
        )
    return done, stale


def answer(
    model: Model, job: Job, tokenizer: Tokenizer | None, *, rows: int, num_blocks: int | None, block_size: int,
    prefill_tokens: int, compile: bool, graph: bool, speculate: int = 0,
) -> Occupancy:  # fmt: skip
    """Continue every prompt of ``job`` that has no answer, and append its line as soon as it is finished: id, text
    (None without a tokenizer; up to a stop text), tokens, finish_reason ("stop" or "length") and fingerprint. Data
    ranks take every so many-th prompt each, and the first rank of each of them writes.

    rows: prompts that run at a time. num_blocks: of the caches; None: what ``rows`` of the longest take. speculate:
    drafts that a decode step verifies, see Batching."""
    mesh, asked, file = model.mesh, job.asked, job.file
    left = [pair for pair in zip(asked, job.fingerprints) if pair[0].id not in job.done]
    left = left[mesh.data.rank :: mesh.data.size]
    writes = mesh.tensor.rank == mesh.context.rank == 0
    longest = max(len(one.prompt) + one.max_new_tokens - 1 for one in asked)
    rows = max(1, min(rows, len(asked)))
    least = blocks_for(longest, block_size)
    if num_blocks is not None and num_blocks < least:
        raise ValueError(f"--blocks: got {num_blocks}, allowed: at least {least}, which the longest prompt takes")
    batching = Batching(
        model, rows=rows, num_blocks=num_blocks or rows * least, max_context=longest, block_size=block_size,
        prefill_tokens=prefill_tokens, snapshots=rows, max_waiting=rows,
        penalties=any(one.sampling.penalises for one in asked),
        stop_ids=max(len(one.sampling.stop_ids) for one in asked), compile=compile, graph=graph,
        speculate=speculate,
    )  # fmt: skip
    torchrun.of_first(lambda: file.settle(job.stale))
    if writes and torchrun.rank():
        file.join(torchrun.rank())
    torchrun.barrier()  # all hold the file
    table, running, queue = Table(sys.stderr, len(asked), len(job.done)), {}, iter(left)
    try:
        following = next(queue, None)
        while following is not None or not batching.idle:
            while following is not None and batching.occupancy().waiting < batching.max_waiting:
                one, fingerprint = following
                watch = StopStrings(tokenizer.decode, one.stops) if tokenizer and one.stops else None
                number = batching.submit(
                    one.prompt, max_new_tokens=one.max_new_tokens, sampling=one.sampling, seed=one.seed,
                    on_token=_watched(watch),
                )  # fmt: skip
                running[number], following = (one.id, fingerprint, watch), next(queue, None)
            finished = batching.step()
            for ended in finished:
                name, fingerprint, watch = running.pop(ended.request)
                if writes:
                    text, reason = _ending(watch, ended.tokens, ended.reason, tokenizer)
                    file.write(answer_line(name, text, ended.tokens, reason, fingerprint))
            table.show(batching.occupancy(), len(finished))
            if not finished and batching.model.device.type == "cuda":
                time.sleep(1e-4)
        file.finish()
    finally:
        table.close(batching.occupancy())
    return batching.occupancy()


def check_options(options: argparse.Namespace) -> None:
    """ValueError where --prompts does not go with what else is given."""
    if (options.prompts is None) != (options.out is None):
        raise ValueError("--prompts: got it or --out alone, allowed: both or neither")
    with_prompts, without = ("rows", "blocks", "redo"), ("json", "plot", "dump_logits", "logprobs")
    for name in with_prompts if options.prompts is None else without:
        if getattr(options, name) is not None:
            allowed = "with" if options.prompts is None else "without"
            raise ValueError(f"--{name.replace('_', '-')}: got it, allowed: {allowed} --prompts")


def run(options: argparse.Namespace, model: Model, tokenizer: Tokenizer | None, job: Job) -> int:
    """`generate --prompts`; the exit code."""
    processes.check_same_everywhere(**{"--prompts": job.asked})
    block_size = default_block_size(model.spec) if options.block_size is None else options.block_size
    begun, several, asked = time.monotonic(), model.mesh.data.size > 1, len(job.asked)
    try:
        now = answer(
            model, job, tokenizer, rows=options.rows or 8, num_blocks=options.blocks, block_size=block_size,
            prefill_tokens=options.prefill_tokens, compile=options.compile, graph=options.graph,
            speculate=options.speculate,
        )  # fmt: skip
    except KeyboardInterrupt:
        if not torchrun.rank():
            done = job.file.count(wait=False)
            print(f"{done} of {asked} finished; the same command goes on", file=sys.stderr)
        return 130
    seconds = max(time.monotonic() - begun, 1e-9)
    if not torchrun.rank():
        if (found := job.file.count(wait=several)) not in (asked, None):
            raise OSError(f"{options.out}: got {found} answers, allowed: {asked}; something else changed it meanwhile")
        rate = f"{now.tokens} tokens, {now.tokens / seconds:.1f} a second"
        ranks = f" on the first of {model.mesh.data.size} data ranks" if several else ""
        print(f"{asked} prompts in {options.out}, {len(job.done)} were there already; {rate}{ranks}", file=sys.stderr)
    return 0


class Table:
    """Throughput and occupancy, drawn over itself on a terminal and nowhere else."""

    def __init__(self, stream: TextIO, prompts: int, done: int):
        self._stream, self._prompts, self._done = stream, prompts, done
        self._live, self._begun = stream.isatty() and not torchrun.rank(), time.monotonic()
        self._drawn = False
        self._last = 0.0

    def show(self, now: Occupancy, finished: int) -> None:
        self._done += finished
        if self._live and time.monotonic() - self._last >= SHOWN_S:
            self._draw(now)

    def close(self, now: Occupancy) -> None:
        if self._live:
            self._draw(now)

    def _draw(self, now: Occupancy) -> None:
        self._last = time.monotonic()
        rate = now.tokens / max(self._last - self._begun, 1e-9)
        cells = {
            "finished": f"{self._done}/{self._prompts}",
            "running": f"{now.running}/{now.rows}",
            "blocks in use": f"{now.blocks - now.free}/{now.blocks}",
            "tokens": f"{now.tokens}",
            "tokens/s": f"{rate:.1f}",
            "reused": f"{now.reused}",
            "preempted": f"{now.preempted}",
        }
        widths = [max(len(name), len(value), 9) for name, value in cells.items()]
        rows = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) for row in (cells, cells.values())]
        up = "\x1b[2A" if self._drawn else ""
        self._stream.write(up + "".join(f"\r\x1b[K{row}\n" for row in rows))
        self._stream.flush()
        self._drawn = True


def _watched(watch: StopStrings | None):
    return None if watch is None else lambda _, token: watch.push(token)


def _ending(
    watch: StopStrings | None, tokens: list[int], reason: str, tokenizer: Tokenizer | None
) -> tuple[str | None, str]:
    """(text, finish_reason)."""
    if watch is not None and watch.found is not None:
        return watch.text, "stop"
    return tokenizer.decode(tokens) if tokenizer else None, reason


def _object(line: bytes) -> dict[str, Any]:
    value = parse_json(line.decode("utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"got JSON of type {type(value).__name__}, allowed: an object")
    return value


def _asked(
    given: dict[str, Any], spec: Spec | CompressedSpec, tokenizer: Tokenizer | None, max_new_tokens: int,
    sampling: Sampling, stream: int, stops: Sequence[str],
) -> Asked:  # fmt: skip
    if unknown := sorted(set(given) - set(KEYS)):
        raise ValueError(f"{unknown[0]}: got a key that is unknown, allowed: {', '.join(KEYS)}")
    name = given.get("id")
    if not isinstance(name, str) and type(name) is not int:
        raise TypeError(f"id: got {name!r}, allowed: a text or an integer")
    if isinstance(name, str):
        check_text("id", name)
    if ("prompt" in given) == ("prompt_ids" in given):
        raise ValueError("prompt: got both or neither of prompt and prompt_ids, allowed: one of them")
    if "prompt" in given:
        if not isinstance(given["prompt"], str):
            raise TypeError(f"prompt: got {type(given['prompt']).__name__}, allowed: a text")
        if tokenizer is None:
            raise ValueError("prompt: got a text, allowed: prompt_ids, the model has no tokenizer.json")
        check_text("prompt", given["prompt"])
        ids = tokenizer.encode(given["prompt"])
    else:
        ids = given["prompt_ids"]
    most = given.get("max_new_tokens", max_new_tokens)
    ids = checked_prompts([ids], spec, most)[0]
    fields = {PENALTIES.get(key, key): value for key, value in given.items() if key in SAMPLING or key in PENALTIES}
    for key, field in PENALTIES.items():
        if key in given and field in given:
            raise ValueError(f"{key}: got it and {field}, allowed: one of them")
    own = sampling._replace(**fields)
    seed = given.get("seed", stream)
    checks.check_seed("seed", seed)
    own_stops = given.get("stop", stops)
    own_stops = (own_stops,) if isinstance(own_stops, str) else own_stops
    if not isinstance(own_stops, (list, tuple)) or not all(isinstance(stop, str) and stop for stop in own_stops):
        raise ValueError(f"stop: got {own_stops!r}, allowed: a text or several, of at least one character")
    for stop in own_stops:
        check_text("stop", stop)
    if own_stops and tokenizer is None:
        raise ValueError("stop: got a text, allowed: none, the model has no tokenizer.json")
    return Asked(name, ids, int(most), checked_sampling(own, spec.vocab_size), int(seed), tuple(own_stops))
