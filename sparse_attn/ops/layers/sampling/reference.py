"""Gumbel-max with counter-based noise, in plain torch."""

from __future__ import annotations

import torch

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9 - 2**32  # the same modulo 2**32; Inductor adds it to ids that it holds as int32
GREEDY_BELOW = 2.0**-160  # noise spans less than 2**5, two fp32 logits that differ do so by 2**-149 or more
LARGEST = torch.finfo(torch.float64).max  # temperature; its inverse is above 0, so that -inf times it stays -inf


def sample(
    logits: torch.Tensor, positions: torch.Tensor, temperature: float | torch.Tensor, seed: int | torch.Tensor
) -> torch.Tensor:
    scores = drawable(logits)
    if not isinstance(temperature, torch.Tensor) and temperature < GREEDY_BELOW:
        return scores.argmax(1)
    noise = gumbel(uniform_bits(positions, logits.shape[1], seed))
    if isinstance(temperature, torch.Tensor):
        noise = torch.where((temperature.double() >= GREEDY_BELOW).unsqueeze(1), noise, 0.0)
    return (scores.double() * inverse(temperature) + noise).argmax(1)


def drawable(logits: torch.Tensor) -> torch.Tensor:
    """fp32, NaN as -inf."""
    return torch.where(torch.isnan(logits), float("-inf"), logits.float())


def inverse(temperature: float | torch.Tensor) -> float | torch.Tensor:
    """1 / temperature, fp64 [rows, 1] of a tensor; 1 where the draw is greedy."""
    if isinstance(temperature, torch.Tensor):
        exact = temperature.double().clamp(max=LARGEST)
        return torch.where(exact >= GREEDY_BELOW, 1.0 / exact, 1.0).unsqueeze(1)
    return 1.0 / temperature if temperature >= GREEDY_BELOW else 1.0


def row_seeds(seed: int, rows: int, device: torch.device | str) -> torch.Tensor:
    """A Feistel network over the two words of ``seed``, keyed by the row: for every row a bijection of seeds."""
    row = torch.arange(rows, dtype=torch.int64, device=device)
    low, high, key = seed & WORD, (seed >> 32) & WORD, row
    for _ in range(2):
        key = _mix(key)
        high = high ^ _mix(low ^ key)
        key = _mix(key)
        low = low ^ _mix(high ^ key)
    return torch.where(row == 0, seed, (high << 32) | low)


def uniform_bits(positions: torch.Tensor, vocab: int, seed: int | torch.Tensor) -> torch.Tensor:
    """int64 [rows, vocab] holding 32 random bits that depend on (seed, position, vocabulary id) and on nothing else."""
    where = positions.long()
    key = seed if isinstance(seed, torch.Tensor) else torch.full_like(where, seed)
    row = _mix(_mix(where & WORD) ^ (key & WORD))
    row = _mix(_mix(row ^ ((where >> 32) & WORD)) ^ ((key >> 32) & WORD))
    ids = torch.arange(vocab, dtype=torch.int64, device=positions.device)
    return _mix(_mix(ids).unsqueeze(0) ^ row.unsqueeze(1))


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """fp64 Gumbel noise from 32-bit integers; never infinite."""
    return -torch.log(-torch.log((bits.double() + 0.5) * 2.0**-32))


def _mix(word: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit words in int64 (the finaliser of MurmurHash3, off its fixed point 0)."""
    word = (word + GOLDEN) & WORD
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & WORD
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & WORD
    return word ^ (word >> 16)
