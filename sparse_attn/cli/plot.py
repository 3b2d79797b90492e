"""A picture of what each layer's indexer selected over the context, step by step."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from sparse_attn.files import write_output
from sparse_attn.generation.selections import shares

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.text import Text

BINS = 200  # of the context, at most
ROWS = 64  # of all panels together, where they have more than one each
STEPS = 8  # of a panel, at most
AROUND = 5  # positions beside the record that are drawn enlarged
INCHES = 0.145  # height of a row
LEAST_HEIGHT = 3.6  # inches, in which the colour bar's label fits
ANSWER = "#d1480f"


class Steps(NamedTuple):
    """What is drawn of one request."""

    model: str
    tokens: Sequence[str]  # text of the prompt's and of the written tokens
    prompt: int  # tokens of the prompt
    layers: Sequence[int]
    chosen: Sequence[torch.Tensor]  # a layer: int32 [positions, top_k] entries, -1 for none
    top_k: int
    ratio: int  # tokens an entry stands for
    record: range | None = None  # positions of the record that holds the answer
    answer: int = 0  # written tokens that are the answer, the first ones

    @property
    def context(self) -> int:
        """Tokens that the last step of ``drawn`` sees."""
        return self.prompt + self.drawn().stop - 1

    def drawn(self) -> range:
        """Written tokens that have a row: from the first on where it begins the answer, else the last ones."""
        written = len(self.tokens) - self.prompt
        count = min(max(ROWS // len(self.layers), 1), STEPS, written)
        return range(count) if self.answer else range(written - count, written)


def check_picture(path: Path) -> None:
    """ValueError for a suffix whose format cannot be written. No suffix means PNG. ImportError without matplotlib."""
    formats = sorted(_figure()().canvas.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ValueError(f"--plot: got {str(path)!r}, allowed: a name that ends in .{', .'.join(formats)}")


def save(path: Path, figure: Figure) -> None:
    """Write ``figure`` as an image in the format of ``path``'s suffix."""
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:].lower() or "png")
    write_output(path, image.getvalue())


def draw(steps: Steps) -> Figure:
    """A panel a layer, a row a written token: the share of every bin's keys that were selected for it. Beside it the
    record and what surrounds it, position by position."""
    rows, record, layers = steps.drawn(), steps.record, len(steps.layers)
    queries = torch.arange(rows.start, rows.stop, device="cpu") + steps.prompt - 1
    entries = (queries + 1) // steps.ratio  # that each query sees
    width = -(-max(int(entries.max()), 1) // BINS)
    binned = [shares(chosen[queries], entries, width) for chosen in steps.chosen]
    most = max(max(share.nan_to_num().max().item() for share in binned), 1e-9)

    height = max(layers * (len(rows) * INCHES + 0.12) + 1.75, LEAST_HEIGHT)
    figure = _figure()(figsize=(10, height), dpi=120)
    figure.set_layout_engine("constrained", h_pad=0.03, w_pad=0.04)
    columns = {"width_ratios": (2.6, 1)} if record else {}
    panels = figure.subplots(layers, 1 + bool(record), squeeze=False, sharex="col", gridspec_kw=columns)
    for layer, chosen, share, axes in zip(steps.layers, steps.chosen, binned, panels):
        panel = axes[0]
        image = _show(panel, share, width * steps.ratio, most)
        panel.set_yticks(range(len(rows)), [_label(steps.tokens[steps.prompt + row]) for row in rows])
        for row, text in zip(rows, panel.get_yticklabels()):
            _write(text, row < steps.answer)
        panel.set_ylabel(f"layer {layer}", rotation=0, ha="right", va="center", fontsize=9)
        panel.set_xlim(-0.5, queries[-1].item() + 0.5)
        panel.locator_params(axis="x", integer=True, min_n_ticks=1)
        if record:
            _show(axes[1], shares(chosen[queries], entries, 1), steps.ratio, most=1)
            for each in axes:
                _outline(each, record, len(rows))
    unseen = " (grey: no key yet)" if any(share.isnan().any() for share in binned) else ""
    panels[-1, 0].set_xlabel(f"position in the context, tokens{unseen}", fontsize=9)
    if record:
        _enlarge([*panels[:, 1]], steps, record)
        panels[0, 0].annotate(
            "record that holds the answer", xy=(record[len(record) // 2], 1), xycoords=("data", "axes fraction"),
            xytext=(0, 4), textcoords="offset points", ha="center", fontsize=8, color=ANSWER,
        )  # fmt: skip
    figure.supylabel(f"token that the step wrote{' (bold: the answer)' if steps.answer else ''}", fontsize=9)
    _scale(figure, image, panels, steps, width * steps.ratio)
    figure.suptitle(_title(steps, rows), fontsize=10)
    return figure


def _figure() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'sparse_attn[plot]'") from error
    return Figure


def _show(axes: Axes, share: torch.Tensor, width: int, most: float) -> AxesImage:
    """``share`` [rows, bins of ``width`` positions], the first row on top; grey what a row does not see."""
    rows, bins = share.shape
    axes.set_facecolor("0.88")
    axes.tick_params(labelsize=8, length=2)
    axes.tick_params(which="minor", length=0)
    axes.set_yticks([row + 0.5 for row in range(rows - 1)], minor=True)
    axes.grid(which="minor", color="0.8", linewidth=0.5)
    return axes.imshow(
        share.numpy(), cmap="Blues", vmin=0, vmax=most, aspect="auto", interpolation="nearest",
        extent=(-0.5, bins * width - 0.5, rows - 0.5, -0.5),
    )  # fmt: skip


def _outline(axes: Axes, record: range, rows: int) -> None:
    from matplotlib.patches import Rectangle

    corner = record.start - 0.5, -0.5
    axes.add_patch(
        Rectangle(corner, len(record), rows, fill=False, color=ANSWER, linewidth=1.5, clip_on=False, zorder=3)
    )


def _enlarge(column: Sequence[Axes], steps: Steps, record: range) -> None:
    """Let ``column`` show the record and AROUND it, a tick a token."""
    shown = range(max(record.start - AROUND, 0), min(record.stop + AROUND, len(steps.tokens)))
    for axes in column:
        axes.tick_params(axis="x", length=0)
        axes.set_yticks([])
    last = column[-1]  # which shares its horizontal axis with the others
    last.set_xlim(shown.start - 0.5, shown.stop - 0.5)
    last.set_xticks(shown, [_label(steps.tokens[place]) for place in shown])
    last.set_xticks([place + 0.5 for place in shown[:-1]], minor=True)
    for place, text in zip(shown, last.get_xticklabels()):
        _write(text, place in record)
    last.set_xlabel("the record, token by token", fontsize=9)


def _scale(figure: Figure, image: AxesImage, panels: np.ndarray, steps: Steps, width: int) -> None:
    """The colour bar, and on it what a selection spread evenly would be."""
    from matplotlib.ticker import PercentFormatter

    bar = figure.colorbar(image, ax=panels, pad=0.012, aspect=35, fraction=0.05, format=PercentFormatter(1))
    bar.ax.tick_params(labelsize=8)
    evenly = min(steps.top_k / max(steps.context // steps.ratio, 1), 1)
    bar.ax.axhline(evenly, color=ANSWER, linewidth=1.5)
    binned = f"share of a bin of {width} tokens that is selected"
    what = binned if width > steps.ratio else "selected (100%) or not (0%)"
    bar.set_label(f"{what}\nline: {100 * evenly:.3g}%, a selection spread evenly", fontsize=9)


def _title(steps: Steps, rows: range) -> str:
    what = "keys" if steps.ratio == 1 else f"entries of {steps.ratio} tokens"
    which = f"tokens {rows.start + 1} to {rows.stop}" if len(rows) > 1 else f"token {rows.stop}"
    written = f"{which} of {len(steps.tokens) - steps.prompt} written"
    return (
        f"{steps.model}: what each layer's indexer selected\n"
        f"top-k {steps.top_k} of {steps.context // steps.ratio} {what}, context of {steps.context} tokens, {written}"
    )


def _label(token: str) -> str:
    """``token`` in printable ASCII, cut where it is long."""
    shown = ascii(token)[1:-1].replace(" ", "\u2423")
    return shown if len(shown) <= 10 else f"{shown[:9]}\u2026"


def _write(text: Text, stressed: bool) -> None:
    text.set(family="monospace", parse_math=False)
    if stressed:
        text.set(color=ANSWER, weight="bold")
