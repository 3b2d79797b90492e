"""Launch parameters of a rank's steps. None of them takes scratch."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.target import Target

COLUMNS = 1024  # that a CTA looks at together
CTAS_AN_SM = 4


@dataclass(frozen=True)
class RankConfig:
    columns: int
    splits: int  # CTAs of a row
    num_warps: int = 8


def config(rows: int, width: int, target: Target) -> RankConfig:
    """Rows are split until CTAs fill the machine a few times, but no finer than COLUMNS."""
    splits = max(1, min(-(-width // COLUMNS), CTAS_AN_SM * target.num_sms // max(rows, 1)))
    return RankConfig(COLUMNS, splits)
