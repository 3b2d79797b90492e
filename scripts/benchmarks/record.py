"""What a suite yields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """One measured case. us: microseconds of ours; peer, peer_us: who else does this and how fast; floor_us: the
    bound. ValueError where a time is negative or no number."""

    case: str
    us: float
    peer: str | None = None
    peer_us: float | None = None
    floor_us: float | None = None

    def __post_init__(self) -> None:
        for name, us in (("us", self.us), ("peer_us", self.peer_us)):
            if us is not None and not us >= 0:
                raise ValueError(f"{name}: got {us}, allowed: 0 or more ({self.case})")

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the peer."""
        return None if self.peer_us is None or not self.us else self.peer_us / self.us

    def as_dict(self, suite_name: str) -> dict[str, object]:
        return {
            "suite": suite_name,
            "case": self.case,
            "us": round(self.us, 3),
            "peer": self.peer,
            "peer_us": _rounded(self.peer_us),
            "ratio": _rounded(self.ratio),
            "floor_us": _rounded(self.floor_us),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
