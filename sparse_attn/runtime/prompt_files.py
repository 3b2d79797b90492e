"""Many prompts from a file of JSON lines, answered into another one, which an interrupted run goes on with."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from sparse_attn import checks
from sparse_attn.files import check_output, read_text
from sparse_attn.ops.sampling import row_seeds
from sparse_attn.pipeline import default_block_size
from sparse_attn.runtime import processes
from sparse_attn.runtime.batching import Batching, Occupancy
from sparse_attn.runtime.draws import Sampling
from sparse_attn.runtime.inputs import checked_prompts, checked_sampling
from sparse_attn.runtime.paging import blocks_for
from sparse_attn.runtime.steps import Model
from sparse_attn.runtime.text import StopStrings, Tokenizer

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency")
KEYS = ("id", "prompt", "prompt_ids", "max_new_tokens", "seed", "stop", *SAMPLING)
SHOWN_S = 0.2  # between two pictures of the table


class Asked(NamedTuple):
    """A line: its id, what to continue, and how."""

    id: str | int
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stops: tuple[str, ...]


def read_prompts(
    path: Path, model: Model, tokenizer: Tokenizer | None, *, max_new_tokens: int, sampling: Sampling,
    stops: Sequence[str] = (),
) -> list[Asked]:  # fmt: skip
    """The lines of ``path``: JSON objects with an id (a text or an integer, each once) and a prompt (a text), or
    prompt_ids. max_new_tokens, seed, stop (a text or several) and the fields of Sampling may be given too, else the
    keywords hold. Without a seed the n-th line, from 0, draws from the random stream (seed of the sampling, n).

    ValueError or TypeError names the line at fault.
    """
    found: list[Asked] = []
    lines = [(n, line) for n, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    streams = row_seeds(sampling.seed, len(lines)).tolist() if lines else []
    seen: set[str | int] = set()
    for (number, line), stream in zip(lines, streams):
        try:
            one = _asked(_object(line), model, tokenizer, max_new_tokens, sampling, stream, stops)
            if one.id in seen:
                raise ValueError(f"id: got {one.id!r} again, allowed: each once")
        except (ValueError, TypeError) as error:
            raise type(error)(f"{path}, line {number}: {error}") from error
        seen.add(one.id)
        found.append(one)
    if not found:
        raise ValueError(f"{path}: got no line, allowed: one prompt a line")
    return found


def finished_ids(path: Path) -> set[str | int]:
    """The ids that ``path`` has an answer of. A last line that was cut short is taken off the file. ValueError for any
    other line that is none of an answer."""
    if not path.exists():
        return set()
    data, found = path.read_bytes(), set()
    whole = data.rfind(b"\n") + 1
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            found.add(_object(line.decode("utf-8"))["id"])
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{path}, line {number}: got no answer, allowed: a file that this command wrote"
            ) from error
    if whole < len(data):
        os.truncate(path, whole)
    return found


def answer(
    model: Model, asked: Sequence[Asked], out: Path, tokenizer: Tokenizer | None, *, rows: int, num_blocks: int | None,
    block_size: int, prefill_tokens: int, compile: bool, graph: bool, speculate: int = 0,
) -> Occupancy:  # fmt: skip
    """Continue every prompt of ``asked`` that ``out`` has no answer of, and append its line as soon as it is finished:
    id, text (None without a tokenizer; up to a stop text), tokens and finish_reason ("stop" or "length"). Data ranks
    take every so many-th prompt each, and the first rank of each of them writes.

    rows: prompts that run at a time. num_blocks: of the caches; None: what ``rows`` of the longest take. speculate:
    drafts that a decode step verifies, see Batching."""
    mesh = model.mesh
    if processes.rank():
        processes.barrier()  # the first has taken off a line that was cut short
    done = finished_ids(out)
    if not processes.rank():
        processes.barrier()
    processes.barrier()  # all have read it
    if unknown := sorted(map(repr, done - {one.id for one in asked})):
        raise ValueError(f"--out: got an answer of id {unknown[0]} in {out}, allowed: ids of --prompts")
    left = [one for one in asked if one.id not in done][mesh.data.rank :: mesh.data.size]
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
    table, running, queue = Table(sys.stderr, len(asked), len(done)), {}, iter(left)
    with open(out if writes else os.devnull, "ab", buffering=0) as file:
        try:
            following = next(queue, None)
            while following is not None or not batching.idle:
                while following is not None and batching.occupancy().waiting < batching.max_waiting:
                    watch = StopStrings(tokenizer.decode, following.stops) if tokenizer and following.stops else None
                    number = batching.submit(
                        following.prompt, max_new_tokens=following.max_new_tokens, sampling=following.sampling,
                        seed=following.seed, on_token=_watched(watch),
                    )  # fmt: skip
                    running[number], following = (following, watch), next(queue, None)
                finished = batching.step()
                for one in finished:
                    of, watch = running.pop(one.request)
                    file.write(_line(of, watch, one.tokens, one.reason, tokenizer))
                table.show(batching.occupancy(), len(finished))
                if not finished and batching.model.device.type == "cuda":
                    time.sleep(1e-4)
        finally:
            table.close(batching.occupancy())
    return batching.occupancy()


def check_options(options: argparse.Namespace) -> None:
    """ValueError where --prompts does not go with what else is given."""
    if (options.prompts is None) != (options.out is None):
        raise ValueError("--prompts: got it or --out alone, allowed: both or neither")
    with_prompts = ("rows", "blocks") if options.prompts is None else ("json", "plot", "dump_logits", "logprobs")
    for name in with_prompts:
        if getattr(options, name) is not None:
            allowed = "with" if options.prompts is None else "without"
            raise ValueError(f"--{name.replace('_', '-')}: got it, allowed: {allowed} --prompts")
    if options.out is not None:
        check_output("--out", options.out)
        if options.out.exists() and options.out.samefile(options.prompts):
            raise ValueError(f"--out: got {str(options.out)!r}, the file of --prompts")


def run(options: argparse.Namespace, model: Model, tokenizer: Tokenizer | None, sampling: Sampling) -> int:
    """`generate --prompts`; the exit code."""
    asked = read_prompts(
        options.prompts, model, tokenizer, max_new_tokens=options.max_new_tokens, sampling=sampling, stops=options.stop
    )
    block_size = default_block_size(model.spec) if options.block_size is None else options.block_size
    begun = time.monotonic()
    try:
        now = answer(
            model, asked, options.out, tokenizer, rows=options.rows or 8, num_blocks=options.blocks,
            block_size=block_size, prefill_tokens=options.prefill_tokens, compile=options.compile, graph=options.graph,
            speculate=options.speculate,
        )  # fmt: skip
    except KeyboardInterrupt:
        done = len(finished_ids(options.out))
        print(f"{done} of {len(asked)} finished; the same command goes on", file=sys.stderr)
        return 130
    seconds = max(time.monotonic() - begun, 1e-9)
    if not processes.rank():
        rate = f"{now.tokens} tokens, {now.tokens / seconds:.1f} a second"
        ranks = "" if model.mesh.data.size == 1 else f" on each of {model.mesh.data.size} data ranks"
        print(f"{len(asked)} prompts in {options.out}; {rate}{ranks}", file=sys.stderr)
    return 0


class Table:
    """Throughput and occupancy, drawn over itself on a terminal and nowhere else."""

    def __init__(self, stream: TextIO, prompts: int, done: int):
        self._stream, self._prompts, self._done = stream, prompts, done
        self._live, self._begun = stream.isatty() and not processes.rank(), time.monotonic()
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


def _line(
    asked: Asked, watch: StopStrings | None, tokens: list[int], reason: str, tokenizer: Tokenizer | None
) -> bytes:
    text = tokenizer.decode(tokens) if tokenizer else None
    if watch is not None and watch.found is not None:
        text, reason = watch.text, "stop"
    line = {"id": asked.id, "text": text, "tokens": tokens, "finish_reason": reason}
    return (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"got JSON of type {type(value).__name__}, allowed: an object")
    return value


def _asked(
    given: dict[str, Any], model: Model, tokenizer: Tokenizer | None, max_new_tokens: int, sampling: Sampling,
    stream: int, stops: Sequence[str],
) -> Asked:  # fmt: skip
    if unknown := sorted(set(given) - set(KEYS)):
        raise ValueError(f"{unknown[0]}: got a key that is unknown, allowed: {', '.join(KEYS)}")
    name = given.get("id")
    if not isinstance(name, str) and type(name) is not int:
        raise TypeError(f"id: got {name!r}, allowed: a text or an integer")
    if ("prompt" in given) == ("prompt_ids" in given):
        raise ValueError("prompt: got both or neither of prompt and prompt_ids, allowed: one of them")
    if "prompt" in given:
        if not isinstance(given["prompt"], str):
            raise TypeError(f"prompt: got {type(given['prompt']).__name__}, allowed: a text")
        if tokenizer is None:
            raise ValueError("prompt: got a text, allowed: prompt_ids, the model has no tokenizer.json")
        ids = tokenizer.encode(given["prompt"])
    else:
        ids = given["prompt_ids"]
    most = given.get("max_new_tokens", max_new_tokens)
    ids = checked_prompts([ids], model.spec, most)[0]
    own = sampling._replace(**{field: given[field] for field in SAMPLING if field in given})
    seed = given.get("seed", stream)
    checks.check_seed("seed", seed)
    own_stops = given.get("stop", stops)
    own_stops = (own_stops,) if isinstance(own_stops, str) else own_stops
    if not isinstance(own_stops, (list, tuple)) or not all(isinstance(stop, str) and stop for stop in own_stops):
        raise ValueError(f"stop: got {own_stops!r}, allowed: a text or several, of at least one character")
    if own_stops and tokenizer is None:
        raise ValueError("stop: got a text, allowed: none, the model has no tokenizer.json")
    return Asked(name, ids, int(most), checked_sampling(own, model.spec.vocab_size), int(seed), tuple(own_stops))
