"""Progress bars of the command line: on stderr, of a terminal or where they are asked for; none without tqdm."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Container, Iterator

from sparse_attn.cli.arguments import Group
from sparse_attn.generation.generate import Bar, Progress, Quiet

_UNITS = {"prefill": "chunk", "decode": "tok"}


def add_progress(parser: Group) -> None:
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction,
                        help="bars on stderr (default: where that is a terminal)")  # fmt: skip


def step_bars(shown: bool | None, without: Container[str] = ()) -> Progress:
    """Bars of generate's steps, but for some. shown: None where stderr decides."""
    return lambda what, total: _bar(
        False if what in without else shown, total=total, desc=what, unit=_UNITS[what]
    )  # fmt: skip


@contextlib.contextmanager
def byte_bar(what: str, shown: bool | None) -> Iterator[Callable[[int, int], object]]:
    """A bar of bytes with their rate. It is told how many more were done, and how many there are."""
    bars: list[Bar] = []

    def told(nbytes: int, total: int) -> None:
        if not bars:
            bars.append(_bar(shown, total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024))
        bars[0].update(nbytes)

    try:
        yield told
    finally:
        for bar in bars:
            bar.close()


def _bar(shown: bool | None, **options) -> Bar:
    try:
        from tqdm import tqdm
    except ImportError:
        return Quiet()
    return tqdm(**options, file=sys.stderr, disable=None if shown is None else not shown)
