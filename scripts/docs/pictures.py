#!/usr/bin/env python3
"""Pictures of README.md and of the pages: plain SVG, light or dark as the reader's browser is.

    scripts/docs/pictures.py            names the pictures that differ; exits with 1 where there are any
    scripts/docs/pictures.py --write    mends them

`v32` and `v4` show a layer; bytes are those of the cache layouts. `seesaw` is the schedule of Hopper's prefill kernel.
`ratios`, `latency` and `floors` are drawn from results/nvidia-h200.json; in `ratios` is every suite that is measured
beside FlashMLA, DeepGEMM or vLLM. `selected.png`, which no two versions of matplotlib draw alike, is another command's:
docs/pages/checkpoints.md names it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
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
# Of the latencies: a panel's suite, and how the names of its cases begin.
LAYERS = {
    "V3.2: 128 heads, top-k 2048": ("layer_v32", ""),
    "V4: 64 heads, top-k 128 + 512": ("layer_v4", r"heads 64, top-k 128\+512, "),
    "V4: 128 heads, top-k 128 + 1024": ("layer_v4", r"heads 128, top-k 128\+1024, "),
}
TIMES = {"chosen": "us", "other": "peer_us"}
FLOORS = {  # groups of suites whose records have a floor
    "attention": ("prefill_v32", "prefill_v4", "prefill_ragged", "decode_v32", "decode_v4", "decode_bf16"),
    "index scores and top-k": ("prefill_scores", "paged_scores", "topk_prefill", "topk_decode"),
    "linear layers and experts": ("linears_few", "linears_many", "experts_few", "experts_many"),
    "several at once": ("select_prefill", "select_decode", "prefill_chain", "layer_v32", "layer_v4"),
}
PRODUCTS = {"linears_few": "fp8 weights, 1 to 128 tokens", "linears_many": "fp8 weights, 512 and 4096 tokens"}
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
    record = json.loads(GATE.read_text())
    charts = {f"{chart.__name__}.svg": chart(record) for chart in (ratios, latency, floors)}
    return {"v32.svg": v32(), "v4.svg": v4(), "seesaw.svg": seesaw(), **charts}


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


def dot(x: float, y: float, kind: str) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="3.5" class="{kind}"/>'


def key(x: float, y: float, kind: str, text: str) -> list[str]:
    """A colour, and what it means."""
    return [rect(x, y - 10, 10, 10, kind), write(x + 15, y, text, "grey")]


def source_of(record: dict) -> str:
    versions = record["versions"]
    return f"{record['gpu']}, commit {record['commit'][:7]}, torch {versions['torch']}, triton {versions['triton']}."


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


# --- charts


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
    under = f"{source_of(record)} Peers as vLLM 0.25 ships them, top-k and Marlin as 0.33 does."
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


def latency(record: dict) -> str:
    points: dict[tuple[str, int], dict[int, dict]] = {}
    for one in records_of(record):
        for title, (suite, what) in LAYERS.items():
            if one["suite"] == suite and (found := re.fullmatch(what + r"requests (\d+), context (\d+)", one["case"])):
                points.setdefault((title, int(found[1])), {})[int(found[2])] = one
    if missing := {*LAYERS} - {title for title, _ in points}:
        raise ValueError(f"LAYERS: {sorted(missing)}: not in the record")
    top, bottom, least, scale = 88, 470, 12, 234  # where axes end; microseconds at the bottom; pixels of ten times
    wide = (WIDTH - 40) / len(LAYERS)
    parts = [
        write(20, 28, "A layer's decode step, microseconds by context", "ink bold"),
        *key(20, 50, "chosen", "ours"),
        *key(84, 50, "other", "DeepGEMM + vLLM + FlashMLA"),
        write(WIDTH - 20, 50, "score, select, attend; both axes are logarithmic", "grey", "end"),
    ]
    for number, title in enumerate(LAYERS):
        left, right = 20 + wide * number + 26, 20 + wide * (number + 1) - 8
        lines = {count: those for (of, count), those in points.items() if of == title}
        contexts = sorted({context for those in lines.values() for context in those})
        first, last = math.log2(contexts[0]) - 0.65, math.log2(contexts[-1]) + 0.65

        def at(context: int, us: float, left=left, right=right, first=first, last=last) -> tuple[float, float]:
            across = (math.log2(context) - first) / (last - first)
            return round(left + (right - left) * across, 1), round(bottom - scale * math.log10(us / least), 1)

        parts.append(write((left + right) / 2, 78, title, "ink bold", "middle"))
        for us in (20, 50, 100, 200, 400):
            y = at(contexts[0], us)[1]
            parts += [line("edge", (left, y), (right, y), width=1), write(left - 4, y + 4, f"{us}", "grey", "end")]
        for context in contexts:
            x = at(context, least)[0]
            parts += [line("edge", (x, top), (x, bottom), width=1)]
            parts.append(write(x, bottom + 18, f"context {context // 1024}K", "grey", "middle"))
        parts.append(line("grey", (left, bottom), (right, bottom), width=1))
        beside: dict[int, list[tuple[float, str, str]]] = {context: [] for context in contexts}  # figures
        for count, those in sorted(lines.items()):
            ends = {kind: [at(n, those[n][name]) for n in sorted(those)] for kind, name in TIMES.items()}
            (x0, y0), (x1, y1) = ends["other"][0], ends["other"][-1]
            said = f"{count} request{'s' * (count > 1)}"
            if len(those) == 1:
                shift, anchor = (8, "start") if contexts[0] in those else (-8, "end")
                parts.append(write(x0 + shift, (y0 + ends["chosen"][0][1]) / 2 + 4.5, said, "ink", anchor))
            else:
                corners = "L".join(f"{x:g} {y:g}" for x, y in (*ends["chosen"], *reversed(ends["other"])))
                parts.append(f'<path d="M{corners}Z" class="cell" fill-opacity="0.5"/>')
                parts += [line(kind, *ends[kind], width=2) for kind in TIMES]
                steep = (y0 - y1) / (x1 - x0)
                along, up, anchor = (0.5, 5, "end") if steep > 0.2 else (0.64, 5 + 36 * steep, "middle")
                x, y = x0 + along * (x1 - x0), y0 + along * (y1 - y0) - up
                parts.append(write(round(x, 1), round(y, 1), said, "ink", anchor))
            for kind, name in TIMES.items():
                for context, (x, y) in zip(sorted(those), ends[kind]):
                    parts.append(dot(x, y, kind))
                    beside[context].append((y, f"{those[context][name]:.0f}", kind))
        for context, figures in beside.items():
            shift, anchor = (-8, "end") if context == contexts[0] else (8, "start")
            y = 0.0
            for wanted, figure, kind in sorted(figures):
                y = max(wanted, y + 13)  # figures stand below one another
                parts.append(write(at(context, least)[0] + shift, y + 4.5, figure, kind, anchor))
    parts.append(write(20, bottom + 48, source_of(record), "grey"))
    title = f"A decode step of a layer on {record['gpu']}: microseconds at contexts of 32K and 128K tokens"
    return picture(bottom + 64, title, parts)


def floors(record: dict) -> str:
    shares: dict[str, list[float]] = {}
    for one in records_of(record):
        if one["floor_us"] is not None:
            shares.setdefault(one["suite"], []).append(one["floor_us"] / one["us"])
    left, right, y = 272, WIDTH - 190, 84
    wide, parts = right - left, []
    for group, suites in FLOORS.items():
        parts.append(write(20, y + 12, group, "ink bold"))
        y += 22
        for suite in suites:
            shown = (SUITES | PRODUCTS)[suite].rstrip(" *")
            if suite not in shares:
                raise ValueError(f"FLOORS: {suite}: not in the record")
            those = sorted(shares[suite])
            middle = statistics.median(those)
            parts.append(write(left - 10, y + 12, shown, "ink", "end"))
            parts.append(rect(left, y + 2, wide, 13, "box"))
            for share in those:
                x = round(left + wide * min(share, 1), 1)
                parts.append(line("chosen", (x, y + 2), (x, y + 15), width=1.4))
            x = round(left + wide * middle, 1)
            parts.append(line("other", (x, y), (x, y + 17), width=3))
            for at, share, kind in ((70, middle, "other"), (20, those[-1], "ink")):
                parts.append(write(WIDTH - at, y + 12, f"{100 * share:.0f}%", kind, "end"))
            parts.append(write(WIDTH - 128, y + 12, f"{len(those)}", "grey", "end"))
            y += 19
        y += 8
    axis = [write(left + wide * n / 4, 72, f"{25 * n}%", "grey", "middle") for n in range(5)]
    axis += [line("edge", (left + wide * n / 4, 78), (left + wide * n / 4, y - 6), width=1) for n in range(5)]
    head = [
        write(
            20, 28, "Share of the floor: the least time of memory or of matrix units, over the time taken", "ink bold"
        ),
        *(write(WIDTH - at, 72, text, "grey", "end") for at, text in ((128, "cases"), (70, "median"), (20, "best"))),
        *key(20, 48, "chosen", "a case"),
        *key(100, 48, "other", "the median of a suite"),
    ]
    foot = [
        write(
            20,
            y + 14,
            "Calls of a few rows are bound by launches and by loads that wait for one another: no floor counts these.",
            "grey",
        ),
        write(20, y + 32, source_of(record), "grey"),
    ]
    title = f"How near each suite's cases come to the floor of bytes and operations on {record['gpu']}"
    return picture(y + 48, title, head + axis + parts + foot)


# --- the seesaw


def seesaw() -> str:
    left, unit = 124, 7.75  # pixels
    rows = {"wg0 mma": 62, "wg0": 100, "wg2": 208, "wg1": 316, "wg1 mma": 354}
    tall = 34
    at0, at1 = rows["wg0"] + tall, rows["wg1"]  # where consumers begin, seen from the producer
    mma0, mma1 = rows["wg0 mma"] + tall, rows["wg1 mma"]
    above, below = rows["wg2"], rows["wg2"] + tall
    copied = "box l-edge"

    def x(time: float) -> float:
        return round(left + unit * time, 1)

    def block(row: str, start: float, end: float, kind: str, *texts: str) -> list[str]:
        y, middle = rows[row], x((start + end) / 2)
        top, ink = y + tall / 2 - 7.5 * len(texts) + 11.5, "page" if kind in ("chosen", "other") else "ink"
        said = (write(middle, top + 15 * n, text, ink, "middle") for n, text in enumerate(texts))
        return [rect(x(start) + 0.5, y, x(end) - x(start) - 1, tall, kind, 3), *said]

    def signal(kind: str, name: str, where: tuple[float, float], *points: tuple[float, float]) -> list[str]:
        way = arrow(kind, *((x(time), y) for time, y in points))
        return [way, write(x(where[0]), where[1], name, f"code {kind}")]

    parts = [
        write(20, 28, "The seesaw: a pair of tiles, K0 and K1", "ink bold"),
        *key(330, 28, "chosen", "scores"),
        *key(404, 28, "other", "P times values"),
        *key(530, 28, "cell", "softmax"),
        write(WIDTH - 20, 28, "time goes right, not to scale", "grey", "end"),
        write(20, 80, "wg0", "ink bold"),
        write(20, 98, "scores K0", "chosen"),
        write(20, 116, "columns [0, 256)", "other"),
        write(20, 222, "wg2", "ink bold"),
        write(20, 240, "copies"),
        write(20, 257, "half-tiles"),
        write(20, 336, "wg1", "ink bold"),
        write(20, 354, "scores K1", "chosen"),
        write(20, 372, "columns [256, 512)", "other"),
    ]
    for row, start, end, kind, *texts in (
        ("wg0 mma", 0, 9, "chosen", "Q K0l"),
        ("wg0 mma", 9, 18, "chosen", "Q K0r"),
        ("wg0", 18, 27, "cell", "max of", "K0"),
        ("wg0", 27, 35, "cell", "P0"),
        ("wg0 mma", 35, 49, "other", "P0 V0l"),
        ("wg0", 50.5, 58.5, "cell", "rescale,", "store P0"),
        ("wg0 mma", 62.5, 78, "other", "P1 V1l"),
        ("wg0 mma", 78, 87, "chosen", "Q K0l'"),
        ("wg0 mma", 87, 96, "chosen", "Q K0r'"),
        ("wg1 mma", 6, 15, "chosen", "Q K1r"),
        ("wg1 mma", 15, 24, "chosen", "Q K1l"),
        ("wg1", 24, 32, "cell", "max of", "K1"),
        ("wg1", 32, 39.5, "cell", "max of", "both"),
        ("wg1", 39.5, 46, "cell", "P1"),
        ("wg1 mma", 46, 61, "other", "P1 V1r"),
        ("wg1", 46, 54, "cell", "store P1"),
        ("wg1 mma", 61, 77, "other", "P0 V0r"),
        ("wg1 mma", 84, 93, "chosen", "Q K1r'"),
        ("wg2", 0, 6, copied, "K0r"),
        ("wg2", 7, 15, copied, "K1l"),
        ("wg2", 48.2, 57, copied, "K0l'"),
        ("wg2", 63.5, 72, copied, "K1r'"),
        ("wg2", 76, 84.5, copied, "K0r'"),
        ("wg2", 85.5, 93.5, copied, "K1l'"),
    ):
        parts += block(row, start, end, kind, *texts)
    for kind, name, where, *points in (
        ("grey", "full", (10, 160), (3, above), (3, 172), (9.5, 172), (9.5, mma0)),
        ("grey", "full", (16.2, 286), (11, below), (11, 282), (15.5, 282), (15.5, mma1)),
        ("ink", "max0_full", (18, 160), (27, at0), (27, 172), (33, 172), (33, at1)),
        ("ink", "max1_full", (39.3, 190), (38.5, at1), (38.5, 172), (51.5, 172), (51.5, at0)),
        ("ink", "p1_full", (46, 300), (53, at1), (53, 268), (60.2, 268), (60.2, 180), (63.5, 180), (63.5, mma0)),
        ("ink", "p0_full", (54.8, 336), (58, at0), (58, 296), (62, 296), (62, mma1)),
        ("grey", "empty", (49.6, 196), (48.8, mma0), (48.8, above)),
        ("grey", "empty", (65.2, 286), (64.6, mma1), (64.6, below)),
        ("grey", "empty", (77.3, 286), (76.5, mma1), (76.5, below)),
        ("grey", "empty", (79.6, 160), (79, mma0), (79, 172), (86.5, 172), (86.5, above)),
    ):
        parts += signal(kind, name, where, *points)
    parts += [
        write(
            20,
            418,
            "K0l, K0r: left and right 256 columns of K0; V0l, V0r: the same as values. K0l and K1r were full before.",
            "grey",
        ),
        write(20, 436, "A consumer multiplies its own P out of registers, the other's out of shared memory.", "grey"),
        write(WIDTH - 20, 418, "': of the next pair", "grey", "end"),
    ]
    title = "The seesaw of prefill_bf16: a producer and two consumer warpgroups over a pair of tiles"
    return picture(454, title, parts)


if __name__ == "__main__":
    sys.exit(main())
