"""A picture of a text under its indexers: the more often a byte was selected, the darker it lies."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from sparse_attn.files import write_output

COLUMNS = 112
INCHES = 0.105, 0.2  # of a character
NEW = "#b03020"


def check_picture(path: Path) -> None:
    """ValueError for a suffix whose format cannot be written. No suffix means PNG. ImportError without matplotlib."""
    formats = sorted(_figure()().canvas.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ValueError(f"--plot: got {str(path)!r}, allowed: a name that ends in .{', .'.join(formats)}")


def draw(path: Path, read: str, written: str, share: torch.Tensor, title: str) -> None:
    """Draw ``read``, shaded by ``share``, and ``written`` behind it in a colour of its own, as an image in the format
    of ``path``'s suffix. share: [characters of ``read``], or more for those of ``written``."""
    from matplotlib.patches import Rectangle

    lines = _lines(read + written)
    figure = _figure()(figsize=(COLUMNS * INCHES[0] + 0.4, (len(lines) + 2) * INCHES[1] + 0.3), dpi=120)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-2, COLUMNS + 2)
    axes.set_ylim(len(lines) + 0.6, -2.0)
    axes.axis("off")
    most = max(share.max().item(), 1e-9)
    for row, line in enumerate(lines):
        for column, place in enumerate(line):
            shade = (share[place].item() / most) ** 0.5 if place < len(share) else 0.0
            if shade > 0.02:
                axes.add_patch(Rectangle((column, row - 0.5), 1, 1, color="#1f6fb4", alpha=0.85 * shade, linewidth=0))
            is_new = place >= len(read)
            axes.text(
                column + 0.5, row, _shown((read + written)[place]), family="monospace", fontsize=8, ha="center",
                va="center",
                color=NEW if is_new else ("white" if shade > 0.75 else "black"), weight="bold" if is_new else "normal",
            )  # fmt: skip
    axes.text(0, -1.2, title, fontsize=9, va="center")
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:].lower() or "png")
    write_output(path, image.getvalue())


def _figure() -> type:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'sparse_attn[plot]'") from error
    return Figure


def _lines(text: str) -> list[range]:
    """Places of the characters of every line, none longer than COLUMNS; a newline stands at its line's end."""
    lines, start = [], 0
    for place, character in enumerate(text):
        if character == "\n" or place - start + 1 == COLUMNS:
            lines.append(range(start, place + 1))
            start = place + 1
    return lines + ([range(start, len(text))] if start < len(text) else [])


def _shown(character: str) -> str:
    if character == "\n":
        return "\u21b5"
    return character if character.isprintable() else "\u00b7"
