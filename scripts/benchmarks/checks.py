"""Is the result right? Asked once per case, before it is timed. AssertionError where it is not.

Some rows are held against the reference at the library's own levels. All rows are held against the peer: where each of
two answers may be off by a level's error, they may differ by twice that, and in cosine, which is quadratic, by four
times.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparse_attn.testing.compare import assert_close, assert_same_diff
from sparse_attn.types import AttentionOutput

SHARP = 64.0  # timed queries weigh all keys about alike; scaled by this they tell a wrong score from a right one
Level = tuple[float, float, float]


def sampled(rows: int, count: int, device: torch.device | str) -> torch.Tensor:
    """``count`` row numbers (all, where there are fewer), first and last among them."""
    return torch.linspace(0, rows - 1, min(rows, count), dtype=torch.float32, device=device).round().long()


def check_attention(
    q: torch.Tensor,  # [tokens, heads, d_qk]
    ours: Callable[[torch.Tensor], AttentionOutput],
    reference: Callable[[torch.Tensor, torch.Tensor], AttentionOutput],
    theirs: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]] | None,
    levels: tuple[Level, Level],
) -> None:
    """reference(q, rows) attends for q[rows]; theirs(q) gives (out, lse or None)."""
    q = q * SHARP
    rows = sampled(q.shape[0], 8, q.device)
    got, want = ours(q), reference(q, rows)
    assert_close(got.out[rows], want.out, levels[0], "out")
    assert_close(got.lse[rows], want.lse, levels[1], "lse")
    if theirs is not None:
        out, lse = theirs(q)
        check_vectors(got.out, out, 4 * levels[0][2])
        if lse is not None:
            doubled = (2 * levels[1][0], 2 * levels[1][1], 1.0)
            assert_close(got.lse[rows], lse[rows], doubled, "lse beside the peer's")


def check_vectors(got: torch.Tensor, want: torch.Tensor, bound: float, what: str = "out beside the peer's") -> None:
    """Every vector of the last dimension: 1 - 2 xy / (xx + yy) within ``bound``."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} against {tuple(want.shape)}"
    worst = torch.zeros((), dtype=torch.float64, device=got.device)
    for x, y in zip(got.split(256), want.split(256)):
        x, y = x.double(), y.double()
        power = ((x * x) + (y * y)).sum(-1)
        difference = 1 - 2 * (x * y).sum(-1) / power
        worst = torch.maximum(worst, torch.where(power == 0, 0.0, difference).amax())  # NaN stays
    assert worst <= bound, f"{what}: a vector differs by {float(worst):.3e}, allowed {bound:.1e}"


def check_scores(got: torch.Tensor, want: torch.Tensor, start: torch.Tensor | None, end: torch.Tensor) -> None:
    """Rows of scores inside [start, end); what ``want`` holds outside is not looked at, ``got`` must be -inf there."""
    column = torch.arange(got.shape[1], device=got.device)
    inside = column < end.unsqueeze(1)
    if start is not None:
        inside &= column >= start.unsqueeze(1)
    assert_same_diff(got, torch.where(inside, want, -torch.inf))


def check_top_k(got: torch.Tensor, logits: torch.Tensor, starts: torch.Tensor | None, best: torch.Tensor) -> None:
    """Distinct columns whose logits are exactly ``best`` [rows, k], descending, -inf where a row is short."""
    columns = got.sort(1).values
    assert ((columns[:, 1:] > columns[:, :-1]) | (columns[:, 1:] < 0)).all(), "top-k: a column twice"
    at = got.long() + (0 if starts is None else starts.long().unsqueeze(1))
    values = logits.gather(1, at.clamp(0, logits.shape[1] - 1))
    values = torch.where(got >= 0, values, -torch.inf).sort(1, descending=True).values
    assert torch.equal(values, best), f"top-k: {int((values != best).sum())} of {values.numel()} values differ"


def check_selection(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Two selections [rows, k] out of scores that were rounded differently: near ties may go either way, 1 in 128."""
    want = want.sort(1).values
    place = torch.searchsorted(want, got.contiguous()).clamp_max(want.shape[1] - 1)
    missing = (want.gather(1, place) != got).sum(1).amax()
    assert missing <= got.shape[1] // 128, f"{what}: a row differs in {int(missing)} of {got.shape[1]} keys"
