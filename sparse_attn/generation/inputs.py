"""The arguments of the generation loop, checked and converted: lists of ints, a Sampling of ints and a float."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from operator import countOf
from typing import Any

import torch

from sparse_attn.framework import checks
from sparse_attn.generation.sampling import Sampling
from sparse_attn.ops.layers.sampling import row_seeds
from sparse_attn.spec import CompressedSpec, Spec

PLAIN = float, int, tuple, int, float, float, float, float, float  # the fields of a Sampling
OFF = [1.0, 0.0, 0.0]  # its penalties where it asks for none
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def checked_prompts(
    prompts: Sequence[Sequence[int] | torch.Tensor], spec: Spec | CompressedSpec, max_new_tokens: int
) -> list[list[int]]:
    """The prompts' ids; TypeError or ValueError for what cannot be continued by ``max_new_tokens`` tokens."""
    checks.check_at_least("max_new_tokens", max_new_tokens, 1)
    if not _is_sequence(prompts):
        raise TypeError(f"prompts: got {_shown(prompts)}, allowed: a sequence of prompts")
    found = [
        checked_prompt(f"prompts[{number}]", prompt, spec, max_new_tokens)[0] for number, prompt in enumerate(prompts)
    ]
    if not found:
        raise ValueError("prompts: got none, allowed: at least one")
    return found


def checked_prompt(
    name: str, prompt: Sequence[int] | torch.Tensor, spec: Spec | CompressedSpec, max_new_tokens: int
) -> tuple[list[int], Sequence[int]]:
    """The ids of one prompt, ``name`` in errors; as ``checked_prompts``. The same once more, as words of 32 bits where
    they fit, from which keys are made (Prefixes)."""
    checks.check_at_least("max_new_tokens", max_new_tokens, 1)
    ids = integers(name, prompt)
    if not ids:
        raise ValueError(f"{name}: got no token, allowed: at least one")
    words = _check_ids(name, ids, spec.vocab_size)
    if len(ids) + max_new_tokens - 1 > spec.max_positions:
        raise ValueError(
            f"{name}: got {len(ids)} tokens to be followed by {max_new_tokens}, allowed: "
            f"{spec.max_positions + 1} in all, the model knows {spec.max_positions} positions"
        )
    return ids, words


def checked_sampling(sampling: Sampling, vocab_size: int | None = None) -> Sampling:
    """``sampling`` in plain numbers; TypeError or ValueError names the field at fault. vocab_size: None where it is
    unknown."""
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling: got {_shown(sampling)}, allowed: a Sampling")
    if _is_ordinary(sampling):
        return sampling
    checks.check_temperature(sampling.temperature)
    checks.check_seed("seed", sampling.seed)
    stop_ids = integers("stop_ids", sampling.stop_ids)
    _check_ids("stop_ids", stop_ids, vocab_size)
    checks.check_at_least("top_k", sampling.top_k, 0)
    for name in ("top_p", "min_p"):
        checks.check_share(name, getattr(sampling, name))
    for name in ("repetition", "presence", "frequency"):
        checks.check_penalty(name, getattr(sampling, name), positive=name == "repetition")
    return Sampling(
        float(sampling.temperature), int(sampling.seed), tuple(stop_ids), min(int(sampling.top_k), 2**63 - 1),
        *(float(getattr(sampling, name)) for name in ("top_p", "min_p", "repetition", "presence", "frequency")),
    )  # fmt: skip


def _is_ordinary(sampling: Sampling) -> bool:
    """Whether ``sampling`` is in plain numbers, within limits and asks for no penalties or stop ids: seen at a glance,
    because a scheduler looks at each request's."""
    temperature, seed, stop_ids, top_k, top_p, min_p, *penalties = sampling
    return (
        tuple(map(type, sampling)) == PLAIN
        and 0 <= temperature < math.inf
        and -(2**63) <= seed < 2**63
        and not stop_ids
        and 0 <= top_k < 2**63
        and 0 <= top_p <= 1
        and 0 <= min_p <= 1
        and penalties == OFF
    )


def checked_samplings(
    sampling: Sampling | Sequence[Sampling], count: int, vocab_size: int | None = None
) -> list[Sampling]:
    """``sampling`` of each of ``count`` prompts, checked: one for all, or one each."""
    if isinstance(sampling, Sampling):
        return [checked_sampling(sampling, vocab_size)] * count
    if not _is_sequence(sampling):
        raise TypeError(f"sampling: got {_shown(sampling)}, allowed: a Sampling")
    if len(sampling) != count:
        raise ValueError(f"sampling: got {len(sampling)}, allowed: one for all, or {count}, one a prompt")
    checked = []
    for number, own in enumerate(sampling):
        try:
            checked.append(checked_sampling(own, vocab_size))
        except (TypeError, ValueError) as error:
            message = str(error).removeprefix("sampling: ")
            name = f"sampling[{number}]"
            raise type(error)(f"{name}: {message}" if message != str(error) else f"{name}.{message}") from error
    return checked


def checked_seeds(seeds: Sequence[int | None] | None, samplings: Sequence[Sampling]) -> torch.Tensor:
    """int64, one of each sampling: the prompt's own seed, or else the seed of the stream (seed of the sampling, its
    place)."""
    count = len(samplings)
    by_seed = {sampling.seed: row_seeds(sampling.seed, count) for sampling in samplings}
    streams = torch.stack([by_seed[sampling.seed][place] for place, sampling in enumerate(samplings)])
    if seeds is None:
        return streams
    given = seeds if not isinstance(seeds, torch.Tensor) and _is_sequence(seeds) else integers("seeds", seeds)
    if len(given) != count:
        raise ValueError(f"seeds: got {len(given)}, allowed: {count}, one a prompt")
    for number, own in enumerate(given):
        if own is not None:
            checks.check_seed(f"seeds[{number}]", own)
            streams[number] = int(own)
    return streams


def checked_best(logprobs: int, vocab_size: int) -> int:
    """``logprobs``, a number of tokens; TypeError or ValueError where there are not so many."""
    checks.check_at_least("logprobs", logprobs, 0)
    if logprobs > vocab_size:
        raise ValueError(f"logprobs: got {logprobs}, allowed: 0 to {vocab_size}, the tokens there are")
    return int(logprobs)


def integers(name: str, values: Any) -> list[int]:
    """A sequence of integers, or a tensor or array of one dimension, as a list; TypeError for anything else."""
    if hasattr(values, "__array__") and not isinstance(values, torch.Tensor):
        values = torch.from_numpy(values.__array__())
    if isinstance(values, torch.Tensor):
        if values.dim() != 1 or values.dtype not in INTEGERS:
            raise TypeError(f"{name}: got {_shown(values)}, allowed: one dimension of integers")
        return values.tolist()
    if type(values) is list and countOf(map(type, values), int) == len(values):
        return values.copy()
    if not _is_sequence(values):
        raise TypeError(f"{name}: got {_shown(values)}, allowed: a sequence of integers")
    for place, value in enumerate(values):
        if type(value) is not int:
            checks.check_integer(f"{name}[{place}]", value)
    return [int(value) for value in values]


def _is_sequence(values: object) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) or getattr(values, "ndim", 0) > 0


def _check_ids(name: str, ids: list[int], vocab_size: int | None) -> Sequence[int]:
    """``ids``, as words of 32 bits where they fit; ValueError names the first that is no token."""
    most = 2**63 - 1 if vocab_size is None else vocab_size - 1
    try:
        words = array("I", ids)  # none is negative then
    except OverflowError:
        words = ids
    if ids and (words is ids or max(ids) > most):
        for token in ids:
            if not 0 <= token <= most:
                raise ValueError(f"{name}: got id {token}, allowed: 0 to {most}")
    return words


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
