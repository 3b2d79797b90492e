"""How tokens are drawn: what a caller asks for, as numbers, and what a step reads, as tensors with one value a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sparse_attn.framework import checks
from sparse_attn.framework.torch_private import exported_as
from sparse_attn.ops.layers.sampling import penalise_logits, sample

PENALTIES = ("repetition", "presence", "frequency")
DTYPES = dict(temperature=torch.float64, top_p=torch.float64, min_p=torch.float64, top_k=torch.int64)
DTYPES |= dict.fromkeys(PENALTIES, torch.float32)


class Sampling(NamedTuple):
    """How a request's tokens are drawn.

    Attributes:
        temperature: 0 is greedy, the lowest id on ties.
        seed: request n draws from the random stream (seed, n), unless it has a seed of its own.
        stop_ids: end a row; they belong to its output.
        top_k: which tokens may be drawn, see ops.layers.sampling.filter_logits; 0: all.
        top_p: as top_k; 1: all.
        min_p: as top_k; 0: all.
        repetition: penalty of tokens in the prompt or among those drawn, see ops.layers.sampling.penalise_logits; 1:
            none.
        presence: of those drawn, once; 0: none.
        frequency: of those drawn, each time; 0: none.
    """

    temperature: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def penalises(self) -> bool:
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)


@exported_as("sparse_attn.runtime.draws")
class Draws(NamedTuple):
    """The sampling of each of B rows, on their device. None: no row uses it, and a step spends no time on it.

    temperature, top_p, min_p: fp64 [B]. top_k: int64 [B]. repetition, presence, frequency: fp32 [B], of use with
    counts: int32 [B, vocab], how often each token was drawn, advanced in place. prompted: bool [B, vocab],
    tokens of the prompt. stop_ids: int64 [B, S], padded with -1.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    repetition: torch.Tensor | None = None
    presence: torch.Tensor | None = None
    frequency: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    prompted: torch.Tensor | None = None
    stop_ids: torch.Tensor | None = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Draws:
        """What ``function`` makes of each tensor."""
        return self._replace(**{name: function(value) for name, value in self._asdict().items() if value is not None})

    def rows(self, rows: slice | torch.Tensor) -> Draws:
        """Some rows: views of a slice, copies of indices."""
        return self.map(lambda value: value[rows])


def draws_of(
    samplings: Sequence[Sampling],
    vocab_size: int,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    device: torch.device | str = "cpu",
) -> Draws:
    """What a step reads to draw row n as ``samplings[n]`` says, after a prompt of ``prompts[n]``. Their seeds have no
    part in it: rows' seeds are beside it in Decode."""
    penalised, columns = any(sampling.penalises for sampling in samplings), {}
    for name, dtype in DTYPES.items():
        values = [getattr(sampling, name) for sampling in samplings]
        off = getattr(Sampling(), name)
        if name == "temperature" or (penalised if name in PENALTIES else any(value != off for value in values)):
            columns[name] = torch.tensor(values, dtype=dtype, device=device)
    if penalised:
        shape = len(samplings), vocab_size
        columns["counts"] = torch.zeros(shape, dtype=torch.int32, device=device)
        prompted = torch.zeros(shape, dtype=torch.bool, device="cpu")
        for row, prompt in enumerate(prompts or ()):
            prompted[row, torch.tensor(prompt, dtype=torch.int64, device="cpu")] = True
        columns["prompted"] = prompted.to(device)
    if longest := max((len(sampling.stop_ids) for sampling in samplings), default=0):
        padded = [[*sampling.stop_ids] + [-1] * (longest - len(sampling.stop_ids)) for sampling in samplings]
        columns["stop_ids"] = torch.tensor(padded, dtype=torch.int64, device=device)
    return Draws(**columns)


def row_draws(sampling: Sampling, vocab_size: int, *, prompt: Sequence[int], penalties: bool, stop_ids: int) -> Draws:
    """A row of draws on the host, with every field that some request may use. penalties: whether one may ask for them.
    stop_ids: how many it may have."""
    columns: dict[str, torch.Tensor] = {
        name: torch.tensor([getattr(sampling, name)], dtype=dtype, device="cpu")
        for name, dtype in DTYPES.items()
        if penalties or name not in PENALTIES
    }
    if penalties:
        columns["counts"] = torch.zeros(1, vocab_size, dtype=torch.int32, device="cpu")
        columns["prompted"] = torch.zeros(1, vocab_size, dtype=torch.bool, device="cpu")
        columns["prompted"][0, torch.tensor(prompt, dtype=torch.int64, device="cpu")] = True
    if stop_ids:
        padded = [*sampling.stop_ids] + [-1] * (stop_ids - len(sampling.stop_ids))
        columns["stop_ids"] = torch.tensor([padded], dtype=torch.int64, device="cpu")
    return Draws(**columns)


def check_counted(sampling: Sampling, draws: Draws | None) -> None:
    """ValueError where ``sampling`` asks for penalties and nothing counts the tokens."""
    if draws is None and sampling.penalises:
        raise ValueError("sampling: got penalties, allowed: with draws, which count the tokens")


def check_draws(draws: Draws | None, mine: Draws | None, rows: int) -> None:
    """ValueError unless ``draws`` holds for ``rows`` rows what the loop reads."""
    if (draws is None) != (mine is None):
        allowed = "None, the loop has none" if mine is None else "a Draws, the loop has one"
        raise ValueError(f"draws: got {'None' if draws is None else 'a Draws'}, allowed: {allowed}")
    for name, given, buffer in zip(Draws._fields, draws or (), mine or ()):
        if given is not None and buffer is not None:
            checks.check_dtype(f"draws.{name}", given, (buffer.dtype,))
            checks.check_shape(f"draws.{name}", given, (rows, *buffer.shape[1:]), "[rows, as in the loop]")
        elif given is not buffer:
            got, allowed = ("None" if value is None else "a tensor" for value in (given, buffer))
            raise ValueError(f"draws.{name}: got {got}, allowed: {allowed}")


def draw(
    logits: torch.Tensor,
    positions: torch.Tensor,
    sampling: Sampling,
    seeds: torch.Tensor,
    draws: Draws | None = None,
) -> torch.Tensor:
    """The token after each of ``positions``, int64 [B]. seeds: int64 [B], of the rows' streams. draws: of the rows, in
    place of ``sampling``."""
    check_counted(sampling, draws)
    if draws is None:
        return sample(
            logits,
            positions,
            temperature=sampling.temperature,
            seed=seeds,
            top_k=sampling.top_k or None,
            top_p=None if sampling.top_p == 1 else sampling.top_p,
            min_p=sampling.min_p or None,
        )
    if draws.counts is not None:
        given = {name: value for name in PENALTIES if (value := getattr(draws, name)) is not None}
        logits = penalise_logits(logits, draws.counts, prompted=draws.prompted, **given)
    return sample(
        logits, positions, temperature=draws.temperature, seed=seeds, top_k=draws.top_k, top_p=draws.top_p,
        min_p=draws.min_p,
    )  # fmt: skip


def count_drawn(
    draws: Draws | None, tokens: torch.Tensor, live: torch.Tensor, rows: torch.Tensor | None = None
) -> None:
    """Count the token of each row that is ``live``, bool, in place. rows: which of ``draws`` they are; None: all."""
    if draws is None or draws.counts is None:
        return
    if rows is None:
        at = tokens.unsqueeze(1)
        draws.counts.scatter_(1, at, draws.counts.gather(1, at) + live.unsqueeze(1).to(torch.int32))
    else:
        draws.counts[rows, tokens] += live.to(torch.int32)
