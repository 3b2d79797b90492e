#!/usr/bin/env python3
"""Pictures of README.md and of the pages: plain SVG, light or dark as the reader's browser is.

    scripts/docs/pictures.py            names the pictures that differ; exits with 1 where there are any
    scripts/docs/pictures.py --write    mends them

`v32` and `v4` show a layer; bytes are those of the cache layouts. `ratios` is drawn from results/nvidia-h200.json:
every suite that is measured beside FlashMLA, DeepGEMM or vLLM is in it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS, PICTURES = HERE.parent, HERE / "pages" / "pictures"
sys.path[:0] = [str(SCRIPTS.parent), str(SCRIPTS)]

from figures import GATE  # noqa: E402
from gpu_gate import records_of  # noqa: E402

from sparse_attn.layout import IndexFp8Layout, LatentFp8Layout, PlanarFp8Layout  # noqa: E402

WIDTH = 880
COLOURS = {  # class: light, dark
    "page": ("#ffffff", "#0d1117"),
    "edge": ("#d0d7de", "#3d444d"),
    "box": ("#f6f8fa", "#161b22"),
    "ink": ("#1f2328", "#e6edf3"),
    "grey": ("#59636e", "#9198a1"),
    "cell": ("#dbe2ea", "#2d333b"),
    "chosen": ("#0969da", "#58a6ff"),
    "other": ("#bf5b04", "#f0883e"),
}
ARROW = 5  # half the width of an arrow's head, and its length

# Of the chart: what each suite measures, in the order of its bars.
SUITES = {
    "prefill_v32": "attention, prefill, V3.2",
    "prefill_v4": "attention, prefill, V4",
    "prefill_ragged": "attention, prefill, ragged lists",
    "prefill_prompt": "attention, a prompt's first tokens",
    "prefill_few_heads": "attention, prefill, few heads *",
    "decode_v32": "attention, decode, V3.2",
    "decode_v4": "attention, decode, V4",
    "decode_few_heads": "attention, decode, few heads *",
    "decode_bf16": "attention, decode, bf16 cache **",
    "sustained": "attention, for a second on end",
    "prefill_scores": "index scores, prefill",
    "paged_scores": "index scores, decode",
    "topk_prefill": "top-k, prefill",
    "topk_decode": "top-k, decode",
    "experts_few": "MXFP4 experts, 1 to 64 tokens",
    "experts_many": "MXFP4 experts, 512 and 4096 tokens",
    "select_prefill": "score and select, prefill",
    "select_decode": "score and select, decode",
    "select_few": "score and select, 1 to 8 requests",
    "prefill_chain": "score, select, attend: prefill, V3.2",
    "layer_v32": "score, select, attend: decode, V3.2",
    "layer_v4": "score, select, attend: decode, V4",
    "layer_v4_mxfp4": "the same, MXFP4 index keys ***",
}
PEERS = ("FlashMLA", "DeepGEMM", "vLLM")
FOOTNOTES = (
    "* FlashMLA's queries are padded to its 64 heads, outside of what is timed.",
    "** Beside FlashMLA's prefill kernel, as vLLM calls it.     *** The peers' index keys are fp8.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="mend the pictures")
    options = parser.parse_args()
    there = {path.name: path.read_text() for path in PICTURES.glob("*.svg")}
    mended = {name: text for name, text in pictures().items() if there.get(name) != text}
    for name, text in mended.items():
        print(f"{name}: {'written' if options.write else 'differs'}")
        if options.write:
            PICTURES.mkdir(exist_ok=True)
            (PICTURES / name).write_text(text)
    return 1 if mended and not options.write else 0


def pictures() -> dict[str, str]:
    """Every picture by the name of its file."""
    return {"v32.svg": v32(), "v4.svg": v4(), "ratios.svg": ratios(json.loads(GATE.read_text()))}


# --- what pictures are drawn with


def picture(height: float, title: str, parts: Iterable[str]) -> str:
    def style(at: int) -> str:
        return "".join(f".{name}{{fill:{both[at]}}}.l-{name}{{stroke:{both[at]}}}" for name, both in COLOURS.items())

    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
            f'viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            "<style>text{font:13px -apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
            ".code{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}.bold{font-weight:600}"
            f".line{{fill:none}}{style(0)}",
            f"@media(prefers-color-scheme:dark){{{style(1)}}}</style>",
            rect(0.5, 0.5, WIDTH - 1, height - 1, "page l-edge", 8),
            *parts,
            "</svg>\n",
        ]
    )


def rect(x: float, y: float, width: float, height: float, kind: str, radius: float = 2) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{kind}"/>'


def write(x: float, y: float, text: str, kind: str = "ink", anchor: str = "start") -> str:
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" class="{kind}"{at}>{escape(text)}</text>'


def line(kind: str, *points: tuple[float, float], width: float = 1.2) -> str:
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path d="{path}" class="line l-{kind}" stroke-width="{width:g}"/>'


def arrow(kind: str, *points: tuple[float, float]) -> str:
    """A line with a head at its end, whose last piece is level or upright."""
    (x0, y0), (x, y) = points[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    corners = ((x - ARROW * (dx + way * dy), y - ARROW * (dy + way * dx)) for way in (1, -1))
    head = "L".join(f"{a:g} {b:g}" for a, b in ((x, y), *corners))
    return line(kind, *points) + f'<path d="M{head}Z" class="{kind}"/>'


def box(x: float, y: float, width: float, height: float, lines: Iterable[tuple[str, str]]) -> list[str]:
    """A frame with lines of (text, kind) in its middle."""
    lines = list(lines)
    top = y + height / 2 - 17 * len(lines) / 2 + 13
    texts = [write(x + width / 2, top + 17 * n, text, kind, "middle") for n, (text, kind) in enumerate(lines)]
    return [rect(x, y, width, height, "box l-edge", 6), *texts]


# --- a layer

CELL, GAP = 11, 2


def scores_of(count: int) -> list[int]:
    """Numbers that look like scores."""
    return [8 + (n * n * 37 + 11 * n) % 53 for n in range(count)]


def winners(scores: list[int], k: int) -> list[int]:
    """Of equal scores the first, ascending: as top_k_per_row selects."""
    return sorted(sorted(range(len(scores)), key=lambda n: (-scores[n], n))[:k])


def v32() -> str:
    left, scores = 306, scores_of(42)
    chosen = winners(scores, 8)
    at = [left + n * (CELL + GAP) for n in range(len(scores))]
    middle, clear = CELL / 2, at[23] - 2  # words stand where no arrow is
    index, latent = IndexFp8Layout(128).row, LatentFp8Layout(512, 64).row
    parts = [
        *box(20, 92, 84, 216, [("hidden", "ink bold"), ("[T, D]", "code grey")]),
        *box(136, 92, 140, 76, [("index query, key", "ink"), ("write_index_keys", "code chosen")]),
        *box(136, 232, 140, 76, [("query, latent", "ink"), ("write_latents", "code other")]),
        arrow("grey", (104, 130), (135, 130)),
        arrow("grey", (104, 270), (135, 270)),
        arrow("grey", (276, 136), (left - 4, 136)),
        arrow("grey", (276, 246), (left - 4, 246)),
        write(left, 34, "1  score every cached key: a few fp8 heads, cheap", "ink bold"),
        write(left, 52, "sum over heads of weight x relu(q . k)", "grey"),
        write(clear, 162, f"index keys: {index} bytes a token", "grey"),
        write(clear, 196, "2  select the best k, exactly", "ink bold"),
        write(clear, 214, "index_select", "code chosen"),
        write(clear, 271, f"latents: {latent} bytes a token", "grey"),
    ]
    for n, (x, score) in enumerate(zip(at, scores)):
        picked = n in chosen
        parts.append(rect(x, 122 - score, CELL, score, "chosen" if picked else "cell"))
        parts.append(rect(x, 130, CELL, 14, "chosen" if picked else "cell"))
        parts.append(rect(x, 240, CELL, 14, "other" if picked else "cell"))
    for n in chosen:
        parts.append(arrow("chosen", (at[n] + middle, 148), (at[n] + middle, 237)))
        parts.append(line("other", (at[n] + middle, 255), (at[n] + middle, 282)))
    first, last = at[chosen[0]] + middle, at[chosen[-1]] + middle
    parts += [
        line("other", (first, 282), (last, 282)),
        arrow("other", (520, 282), (520, 303)),
        *box(left, 304, 400, 58, [("3  attend to the selected rows alone", "ink bold"), ("attend", "code other")]),
        line("grey", (206, 308), (206, 333)),
        arrow("grey", (206, 333), (left - 1, 333)),
        arrow("grey", (left + 400, 333), (left + 434, 333)),
        write(left + 440, 330, "out [T, H, d_v]", "code ink"),
        write(left + 440, 347, "lse [T, H]", "code ink"),
    ]
    return picture(382, "A layer of DeepSeek-V3.2 and GLM-5: score every cached key, select, attend", parts)


def v4() -> str:
    left, ratio, window = 306, 4, 10
    tokens = 42
    at = [left + n * (CELL + GAP) for n in range(tokens)]
    right = at[-1] + CELL
    entries = [at[n] + (ratio * (CELL + GAP) - GAP) / 2 for n in range(0, tokens - ratio + 1, ratio)]
    scores = scores_of(len(entries))
    chosen = winners(scores, 4)
    row, index = PlanarFp8Layout(448, 64).row, IndexFp8Layout(128).row
    raw = at[-window]
    parts = [
        *box(20, 60, 84, 270, [("hidden", "ink bold"), ("[T, D]", "code grey")]),
        *box(136, 60, 140, 62, [("raw key", "ink"), ("write_kv_cache", "code other")]),
        *box(136, 152, 140, 62, [("compressors", "ink"), ("compress_and_cache", "code chosen")]),
        *box(136, 268, 140, 62, [("queries", "ink")]),
        *(arrow("grey", (104, y), (135, y)) for y in (91, 183, 299)),
        arrow("grey", (276, 81), (left - 4, 81)),
        arrow("grey", (276, 174), (left - 4, 174)),
        write(left, 34, f"the last 128 tokens stay as raw keys, in a ring: {row} bytes each", "ink bold"),
        write(left, 144, f"one entry every {ratio} tokens: {row} bytes, and an index key: {index} bytes", "ink bold"),
    ]
    for n, x in enumerate(at):
        parts.append(rect(x, 74, CELL, 14, "other" if n >= tokens - window else "cell"))
    wide = ratio * (CELL + GAP) - GAP
    for n, x in enumerate(entries):
        kind = "chosen" if n in chosen else "cell"
        parts.append(line("grey", (x - wide / 2, 91), (x - wide / 2, 96), (x + wide / 2, 96), (x + wide / 2, 91)))
        parts.append(arrow("grey", (x, 96), (x, 122)))
        parts.append(rect(x - wide / 2 + 6, 154, wide - 12, 40, "box l-edge"))
        parts.append(rect(x - wide / 2 + 6, 194 - scores[n] * 0.6, wide - 12, scores[n] * 0.6, kind))
    parts += [
        write(raw, 64, "window", "other"),
        write(left, 214, "ratio 4: the indexer scores and selects entries; ratio 128: all; other layers: none", "grey"),
    ]
    both = [("one softmax over both, with a sink", "ink bold"), ("sparse_attn_decode", "code other")]
    for n in chosen:
        parts.append(line("chosen", (entries[n], 222), (entries[n], 242)))
    parts += [
        line("chosen", (entries[chosen[0]], 242), (entries[chosen[-1]], 242)),
        arrow("chosen", (470, 242), (470, 267)),
        arrow("other", (right, 81), (right + 12, 81), (right + 12, 299), (left + 431, 299)),
        *box(left, 268, 430, 62, both),
        arrow("grey", (276, 299), (left - 1, 299)),
    ]
    return picture(350, "A layer of DeepSeek-V4: a window of raw keys and pooled entries in one softmax", parts)


# --- the chart


def ratios(record: dict) -> str:
    by_suite: dict[str, list[dict]] = {}
    for one in records_of(record):
        if one["ratio"] is not None and any(peer in one["peer"] for peer in PEERS):
            by_suite.setdefault(one["suite"], []).append(one)
    if by_suite.keys() != SUITES.keys():
        raise ValueError(f"SUITES: {sorted(by_suite.keys() ^ SUITES.keys())}: in the record alone, or here alone")
    groups: dict[tuple[str, ...], list[str]] = {}
    for suite in SUITES:
        peers = tuple(peer for peer in PEERS if any(peer in one["peer"] for one in by_suite[suite]))
        groups.setdefault(peers, []).append(suite)
    left, scale, most = 272, 152, 3.0  # where bars begin, pixels of 1, where the axis ends
    y, parts = 66, []
    for peers, suites in groups.items():
        parts.append(write(20, y + 12, f"beside {' + '.join(peers)}", "ink bold"))
        y += 22
        for suite in suites:
            those = [one["ratio"] for one in by_suite[suite]]
            mean, worst, best = math.prod(those) ** (1 / len(those)), min(those), max(those)
            end = left + scale * min(best, most)
            parts += [
                write(left - 10, y + 12, SUITES[suite], "ink", "end"),
                rect(left, y + 2, scale * mean, 13, "chosen"),
                line("ink", (left + scale * worst, y + 8.5), (end, y + 8.5), width=1.6),
                write(WIDTH - 66, y + 12, f"{mean:.2f}", "ink bold", "end"),
                write(WIDTH - 20, y + 12, f"{worst:.2f}", "grey", "end"),
            ]
            if best > most:
                parts.append(write(end + 4, y + 12, f"{best:.1f}", "grey"))
            y += 19
        y += 8
    versions = record["versions"]
    under = (
        f"{record['gpu']}, commit {record['commit'][:7]}, torch {versions['torch']}, triton {versions['triton']}. "
        "Peers as vLLM 0.25 ships them, top-k and Marlin as 0.33 does."
    )
    axis = [line("grey", (left + scale, 58), (left + scale, y - 6), width=1)]
    axis += [write(left + scale * n, 54, f"{n} x", "grey", "middle") for n in (1, 2, 3)]
    head = [
        write(20, 28, "Times as fast as the peer", "ink bold"),
        write(232, 28, "bar: geometric mean of all cases; line: worst to best", "grey"),
        write(WIDTH - 66, 54, "mean", "grey", "end"),
        write(WIDTH - 20, 54, "worst", "grey", "end"),
    ]
    foot = [write(20, y + 14 + 18 * n, text, "grey") for n, text in enumerate((*FOOTNOTES, under))]
    title = f"Times as fast as FlashMLA, DeepGEMM and vLLM on {record['gpu']}"
    return picture(y + 66, title, head + parts + axis + foot)


if __name__ == "__main__":
    sys.exit(main())
