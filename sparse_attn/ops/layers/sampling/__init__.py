"""Drawing the next token: greedy, or Gumbel-max with noise that is a function of (seed, position, token id).

Plain torch without a generator: capturable, the same draw on every device (up to the last bit of a float64 logarithm),
and independent of the batch a row stands in. Parameters are numbers, or tensors with one a row, which the host never
reads: a captured step takes what they hold when it is replayed.
"""

from __future__ import annotations

import torch

from sparse_attn.framework import checks
from sparse_attn.ops.layers.sampling import filters, reference
from sparse_attn.types import Logprobs

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOATS, INTEGERS = (torch.float32, torch.float64), (torch.int32, torch.int64)


def sample(
    logits: torch.Tensor,
    positions: torch.Tensor,
    *,
    temperature: float | torch.Tensor,
    seed: int | torch.Tensor,
    top_k: int | torch.Tensor | None = None,
    top_p: float | torch.Tensor | None = None,
    min_p: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Token ids int64 [rows], drawn from softmax(logits / temperature), or the largest logit when temperature is 0.

    Greedy ties go to the lowest id, a row without a logit above -inf to 0. Rows with equal position, seed and logits
    draw the same token. Take seeds from row_seeds where they should not.

    Args:
        logits: fp32, bf16 or fp16 [rows, vocab]; NaN counts as -inf, which is never drawn unless the whole row is.
        positions: int32 or int64 [rows], any value.
        temperature: one for all rows, or fp32 or fp64 [rows], one a row. Below 2**-160, where no noise outweighs a
            difference of two fp32 numbers, it is greedy. The values in tensors are not read: a temperature in one is
            greedy where it is negative or NaN, and the largest fp64 number where it is above.
        seed: one for all rows, or int64 [rows], one a row.
        top_k: what may be drawn, as in ``filter_logits``; None: every token.
        top_p: as top_k.
        min_p: as top_k.

    Returns:
        int64 [rows].

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, an empty vocabulary, a temperature that is negative or not finite, a seed outside
            int64, or a filter's parameter outside its range.
    """
    _check_logits(logits)
    checks.check_dtype("positions", positions, INTEGERS)
    checks.check_shape("positions", positions, (logits.shape[0],), "[rows]")
    checks.check_same_device(logits=logits, positions=positions)
    _check_temperature(temperature, logits)
    if isinstance(seed, torch.Tensor):
        _check_rows("seed", seed, logits, (torch.int64,))
    else:
        checks.check_seed("seed", seed)
    _check_filters(logits, top_k, top_p, min_p)
    if top_k is not None or top_p is not None or min_p is not None:
        logits = filters.filter_logits(logits, temperature, top_k, top_p, min_p)
    return reference.sample(logits, positions, temperature, seed)


def filter_logits(
    logits: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor | None = None,
    top_p: float | torch.Tensor | None = None,
    min_p: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 [rows, vocab]: ``logits`` where a token may be drawn, -inf elsewhere. The most likely token always may.

    Tokens are ranked by logit, equal ones by id, the lowest first. Probabilities are counted in units of 2**-42 of the
    largest, so the set is the same on every device, compiled and in any batch. Each parameter is a number, or a tensor
    with one a row. The values in tensors are not read: there, what lies outside a range counts as its nearest end, and
    NaN keeps only the most likely token for top_p, all for min_p.

    Args:
        logits: fp32, bf16 or fp16 [rows, vocab].
        temperature: fp32 or fp64. Probabilities are those at it, at 1 where it is greedy.
        top_k: int32 or int64, keeps the k first; 0: all.
        top_p: fp32 or fp64, keeps of those the fewest first ones whose probabilities, of all that top_k kept, add up to
            top_p; 1: all.
        min_p: fp32 or fp64, keeps a token at least min_p times as likely as the most likely one; 0: all.

    Returns:
        fp32 [rows, vocab].

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: a top_k below 0, a top_p or min_p outside 0 to 1, and more than 2**20 tokens with top_p.
    """
    _check_logits(logits)
    _check_temperature(temperature, logits)
    _check_filters(logits, top_k, top_p, min_p)
    return filters.filter_logits(logits, temperature, top_k, top_p, min_p)


def penalise_logits(
    logits: torch.Tensor,
    counts: torch.Tensor,
    *,
    prompted: torch.Tensor | None = None,
    repetition: float | torch.Tensor = 1.0,
    presence: float | torch.Tensor = 0.0,
    frequency: float | torch.Tensor = 0.0,
) -> torch.Tensor:
    """fp32 [rows, vocab]: ``logits`` less likely, or with penalties of the other sign likelier, where a token occurred.

    Each penalty is a number, or fp32 or fp64 [rows], and is rounded to fp32. 1, 0 and 0 change nothing but NaN, to
    -inf. The sum is made in fp64 and rounded once, so it is the same on every device.

    Args:
        logits: fp32, bf16 or fp16 [rows, vocab].
        counts: int32 or int64 [rows, vocab], how often each token was drawn; see ``count_tokens``.
        prompted: bool [rows, vocab], which tokens are in the row's prompt.
        repetition: logits above 0 of tokens that were drawn or prompted are divided by it, others multiplied.
        presence: then subtracted once, from tokens that were drawn. The prompt has no part in it.
        frequency: as presence, for each time.

    Returns:
        fp32 [rows, vocab].

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, numbers that are not finite, a repetition not above 0.
    """
    _check_logits(logits)
    checks.check_dtype("counts", counts, INTEGERS)
    checks.check_shape("counts", counts, tuple(logits.shape), "[rows, vocab]")
    if prompted is not None:
        checks.check_dtype("prompted", prompted, (torch.bool,))
        checks.check_shape("prompted", prompted, tuple(logits.shape), "[rows, vocab]")
    checks.check_same_device(logits=logits, counts=counts, prompted=prompted)
    for name, value in (("repetition", repetition), ("presence", presence), ("frequency", frequency)):
        if isinstance(value, torch.Tensor):
            _check_rows(name, value, logits, FLOATS)
        else:
            checks.check_penalty(name, value, positive=name == "repetition")
    return filters.penalise(logits, counts, prompted, repetition, presence, frequency)


def count_tokens(counts: torch.Tensor, tokens: torch.Tensor, *, live: torch.Tensor | None = None) -> torch.Tensor:
    """``counts`` with one more of each row's token.

    Args:
        counts: int32 or int64 [rows, vocab].
        tokens: int64 [rows].
        live: bool [rows], the rows that count; None: all.

    Returns:
        A new tensor, as counts.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    checks.check_dtype("counts", counts, INTEGERS)
    checks.check_rank("counts", counts, 2)
    checks.check_dtype("tokens", tokens, (torch.int64,))
    checks.check_shape("tokens", tokens, (counts.shape[0],), "[rows]")
    if live is not None:
        checks.check_dtype("live", live, (torch.bool,))
        checks.check_shape("live", live, (counts.shape[0],), "[rows]")
    checks.check_same_device(counts=counts, tokens=tokens, live=live)
    return filters.count_tokens(counts, tokens, live)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, *, best: int = 0) -> Logprobs:
    """Log-probabilities under softmax(logits) of each row's token, int64 [rows], and of the ``best`` most likely ones.

    Give the model's own logits for its own probabilities, or what ``penalise_logits`` and ``filter_logits`` return for
    those of the draw at temperature 1. A row's values are the same in any batch, eager, compiled and captured.

    Args:
        logits: fp32, bf16 or fp16 [rows, vocab]. NaN counts as -inf. Equal logits go by id, the lowest first.
        tokens: int64 [rows]. A token that cannot be drawn has -inf.
        best: 0 to vocab.

    Returns:
        Logprobs(drawn fp32 [rows], ids int64 [rows, best], values fp32 [rows, best]).

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, best outside 0 to vocab, more than 2**20 tokens.
    """
    _check_logits(logits)
    _check_vocab(logits)
    _check_rows("tokens", tokens, logits, (torch.int64,))
    checks.check_at_least("best", best, 0)
    if best > logits.shape[1]:
        raise ValueError(f"best: got {best}, allowed: 0 to {logits.shape[1]}, the tokens there are")
    return Logprobs(*filters.token_logprobs(logits, tokens, best))


def row_seeds(seed: int, rows: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [rows], the random streams (seed, 0), (seed, 1), ... as seeds of ``sample``.

    Row 0's is ``seed`` itself; no two seeds share the stream of one row.

    Args:
        seed: a signed 64-bit integer.
        rows: 0 or more.
        device: of the result.

    Returns:
        int64 [rows].

    Raises:
        TypeError: what is no integer.
        ValueError: a seed outside int64, rows below 0.
    """
    checks.check_seed("seed", seed)
    checks.check_at_least("rows", rows, 0)
    return reference.row_seeds(int(seed), rows, device)


def _check_logits(logits: torch.Tensor) -> None:
    checks.check_dtype("logits", logits, LOGIT_DTYPES)
    checks.check_rank("logits", logits, 2)
    if logits.shape[1] < 1:
        raise ValueError(f"logits: got shape {list(logits.shape)}, allowed: [rows, at least 1]")


def _check_vocab(logits: torch.Tensor) -> None:
    if logits.shape[1] > filters.MAX_VOCAB:
        raise ValueError(f"logits: got {logits.shape[1]} tokens, allowed: at most {filters.MAX_VOCAB}")


def _check_rows(name: str, value: torch.Tensor, logits: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    checks.check_dtype(name, value, dtypes)
    checks.check_shape(name, value, (logits.shape[0],), "[rows]")
    checks.check_same_device(**{"logits": logits, name: value})


def _check_temperature(temperature: float | torch.Tensor, logits: torch.Tensor) -> None:
    if isinstance(temperature, torch.Tensor):
        _check_rows("temperature", temperature, logits, FLOATS)
    else:
        checks.check_temperature(temperature)


def _check_filters(
    logits: torch.Tensor,
    top_k: int | torch.Tensor | None,
    top_p: float | torch.Tensor | None,
    min_p: float | torch.Tensor | None,
) -> None:
    if isinstance(top_k, torch.Tensor):
        _check_rows("top_k", top_k, logits, INTEGERS)
    elif top_k is not None:
        checks.check_at_least("top_k", top_k, 0)
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if isinstance(value, torch.Tensor):
            _check_rows(name, value, logits, FLOATS)
        elif value is not None:
            checks.check_share(name, value)
    if top_p is not None:
        _check_vocab(logits)
