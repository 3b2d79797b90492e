"""Launch parameters of a rank's steps. None of them takes scratch."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.target import Target

COLUMNS = 2048  # that a CTA looks at together
CTAS_AN_SM = 4
CHUNK = 256  # blocks whose winners a CTA counts together


@dataclass(frozen=True)
class RankConfig:
    """columns: that a CTA looks at together. splits: CTAs of a row. radix: whether digits are counted in shared
    memory."""

    columns: int
    splits: int
    radix: bool
    num_warps: int = 8

    @property
    def threads(self) -> int:
        return 32 * self.num_warps if self.radix else 0


def config(rows: int, width: int, target: Target) -> RankConfig:
    """Rows are split until CTAs fill the machine a few times, but no finer than COLUMNS."""
    splits = max(1, min(-(-width // COLUMNS), CTAS_AN_SM * target.num_sms // max(rows, 1)))
    return RankConfig(COLUMNS, 1 << (splits.bit_length() - 1), target.vendor == "nvidia" or target.interpreted)
