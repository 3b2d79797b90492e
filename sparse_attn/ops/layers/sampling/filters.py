"""Top-k, top-p and min-p, penalties and log-probabilities, in plain torch: the same on every device.

Floating-point sums depend on their order, and so on the device, the compiler and the batch. Probabilities are therefore
summed as integers, multiples of 2**-42 of the row's largest. Products are exact or stand alone, so that a compiler that
fuses them with a sum changes nothing.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from sparse_attn.ops.layers.sampling.reference import drawable, inverse

UNIT_BITS = 42
MAX_VOCAB = 2**20  # as many weights of 2**UNIT_BITS add up to 2**62
SCANNED = 1024  # columns of one scan

Number = float | torch.Tensor


def filter_logits(
    logits: torch.Tensor,
    temperature: Number,
    top_k: int | torch.Tensor | None,
    top_p: Number | None,
    min_p: Number | None,
) -> torch.Tensor:
    scores, scale = drawable(logits), inverse(temperature)
    kept = scores
    if top_k is not None or top_p is not None:
        kept = torch.where(_ranked_before_border(scores, scale, top_k, top_p), kept, float("-inf"))
    if min_p is not None:
        least = _column(min_p, torch.float64, logits.device).clamp(max=1.0)
        unlikely = _distance(scores, scores.amax(1, keepdim=True), scale).exp() < least
        kept = torch.where(unlikely, float("-inf"), kept)
    return kept


def _ranked_before_border(
    scores: torch.Tensor, scale: Number, top_k: int | torch.Tensor | None, top_p: Number | None
) -> torch.Tensor:
    """bool [rows, vocab]: the tokens from the most likely one down to the last that top-k and top-p keep."""
    vocab, device = scores.shape[1], scores.device
    ids = torch.arange(vocab, dtype=torch.int64, device=device)
    zeros_alike = torch.where(scores == 0, 0.0, scores)  # -0.0 ranks with 0.0
    ranked, order = zeros_alike.sort(dim=1, descending=True, stable=True)
    inside = torch.ones_like(ranked, dtype=torch.bool)
    if top_k is not None:
        k = _column(top_k, torch.int64, device)
        inside = inside & ((ids < k) | (k < 1))
    if top_p is not None:
        p = _column(top_p, torch.float64, device)
        mass = torch.where(inside, _weights(ranked, ranked[:, :1], scale), 0)
        before = _running_sum(mass) - mass
        wanted = mass.sum(1, keepdim=True).double() * p
        inside = inside & ((before.double() < wanted) | (p >= 1) | (ids == 0))
    last = inside.sum(1, keepdim=True) - 1
    border, border_id = ranked.gather(1, last), order.gather(1, last)
    return (scores > border) | ((scores == border) & (ids <= border_id))


def _running_sum(values: torch.Tensor) -> torch.Tensor:
    """cumsum(1) of int64 [rows, columns], in two levels. One long scan of a few rows is what Inductor splits between
    programs, which torch 2.11 cannot compile for more than one row."""
    rows, columns = values.shape
    pieces = -(-columns // SCANNED)
    within = F.pad(values, (0, pieces * SCANNED - columns)).view(rows, pieces, SCANNED).cumsum(2)
    totals = within[:, :, -1]
    return (within + (totals.cumsum(1) - totals).unsqueeze(2)).view(rows, pieces * SCANNED)[:, :columns]


def penalise(
    logits: torch.Tensor,
    counts: torch.Tensor,
    prompted: torch.Tensor | None,
    repetition: Number,
    presence: Number,
    frequency: Number,
) -> torch.Tensor:
    """Parameters are rounded to fp32: a product of two such numbers, or of one and a count, is exact in fp64."""
    scores, drawn = drawable(logits).double(), counts > 0
    factor, once, each = (
        _column(value, torch.float32, logits.device).double() for value in (repetition, presence, frequency)
    )
    seen = drawn if prompted is None else drawn | prompted
    scores = torch.where(seen, torch.where(scores > 0, scores / factor, scores * factor), scores)
    return (scores - torch.where(drawn, once + each * counts, 0.0)).float()


def count_tokens(counts: torch.Tensor, tokens: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    at = tokens.unsqueeze(1)
    more = 1 if live is None else live.unsqueeze(1)
    return counts.scatter(1, at, (counts.gather(1, at) + more).to(counts.dtype))


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, best: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(fp32 [rows], int64 [rows, best], fp32 [rows, best])."""
    scores = drawable(logits)
    ranked, order = torch.where(scores == 0, 0.0, scores).sort(dim=1, descending=True, stable=True)
    most = ranked[:, :1]
    total = _weights(scores, most, 1.0).sum(1, keepdim=True).double().log() - UNIT_BITS * math.log(2.0)
    drawn = _distance(scores.gather(1, tokens.unsqueeze(1)), most, 1.0) - total
    return drawn.float().squeeze(1), order[:, :best], (_distance(ranked[:, :best], most, 1.0) - total).float()


def _distance(scores: torch.Tensor, most: torch.Tensor, scale: Number) -> torch.Tensor:
    """fp64 (scores - most) * scale, at most 0; 0 where both are the same infinity."""
    return torch.where(scores == most, 0.0, scores.double() - most.double()) * scale


def _weights(scores: torch.Tensor, most: torch.Tensor, scale: Number) -> torch.Tensor:
    """int64 [rows, vocab]: each token's probability over the largest one's, in units of 2**-UNIT_BITS."""
    return (_distance(scores, most, scale).exp() * 2.0**UNIT_BITS).round().long()


def _column(value: Number, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[rows, 1] of a tensor [rows], [1, 1] of a number."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype).unsqueeze(1)
    return torch.full((1, 1), value, dtype=dtype, device=device)
