#!/usr/bin/env python3
"""Tables of CHANGELOG.md, docs/pages and results/notes whose figures are those of the records in results/.

    scripts/figures.py            names the documents that say something else; exits with 1 where there are any
    scripts/figures.py --write    mends them

A table stands between `<!-- scripts/figures.py WHAT -->` and `<!-- end -->`. WHAT is `ratios`: in each row the
geometric mean and the worst of a suite's ratios; `readers` or `published`: what the models that ship here are worth; or
suites, all of whose records are listed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT, RESULTS = HERE.parent, HERE / "results"
sys.path[:0] = [str(HERE)]

from gpu_gate import records_of  # noqa: E402

GATE, READERS = RESULTS / "nvidia-h200.json", RESULTS / "readers-cpu.json"
PAGES = HERE / "docs" / "pages"
DOCUMENTS = (ROOT / "CHANGELOG.md", *sorted(PAGES.glob("*.md")), *sorted(RESULTS.glob("notes/*.md")))
BLOCK = re.compile(r"<!-- scripts/figures\.py ([\w ]+) -->(.*?)<!-- end -->", re.DOTALL)
ROW = re.compile(r"^(\| `?(\w+)`? \|.*? )[\d.]+(, | / )[\d.]+(?= \|)", re.MULTILINE)
WAYS = {
    "dense": "dense attention", "sparse": "sparse, the reference", "triton": "sparse, Triton", "fp8": "fp8 caches",
    "mxfp4": "fp8 caches, MXFP4 index keys", "compiled": "fp8 caches, compiled",
    "chunked": "fp8 caches, prefilled 96 tokens a step", "decoded": "fp8 caches, token by token",
    "replayed": "the same, a captured graph replayed",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="mend the documents")
    options = parser.parse_args(arguments)
    texts = {path: path.read_text() for path in DOCUMENTS}
    mended = {path: new for path, text in texts.items() if (new := written(text, path.parent)) != text}
    for path, new in mended.items():
        print(f"{path.relative_to(ROOT)}: {'written' if options.write else 'differs from the records'}")
        if options.write:
            path.write_text(new)
    return 1 if mended and not options.write else 0


def written(text: str, folder: Path) -> str:
    """``text``, of a document in ``folder``, with tables as the records have them."""
    if text.count("<!-- scripts/figures.py") != len(BLOCK.findall(text)):
        raise ValueError("document: a table of scripts/figures.py has no end")
    return BLOCK.sub(lambda found: _block(found[1], found[2], folder), text)


def _block(what: str, old: str, folder: Path) -> str:
    path = READERS if what == "published" else GATE
    record = json.loads(path.read_text())
    versions = record["versions"]
    link = f"({os.path.relpath(path, folder)})"
    name = f"`{path.relative_to(ROOT)}`" if folder == PAGES else f"[`{path.name}`]{link}"  # a site holds pages alone
    source = (
        f"Record: {name}, {record['gpu']}, torch {versions['torch']}, triton "
        f"{versions['triton']}, at {record['commit'][:7]}."
    )
    table = {"ratios": _ratios, "readers": _readers, "published": _published}.get(what)
    rows = table(record, old.strip()) if table else _records(record, what.split())
    return f"<!-- scripts/figures.py {what} -->\n\n{source}\n\n{rows}\n\n<!-- end -->"


def _ratios(record: dict, old: str) -> str:
    ratios: dict[str, list[float]] = {}
    for one in records_of(record):
        if one["ratio"] is not None:
            ratios.setdefault(one["suite"], []).append(one["ratio"])

    def figures(found: re.Match) -> str:
        if not (those := ratios.get(found[2])):
            raise ValueError(f"{GATE.name}: it has no ratio of {found[2]}")
        return f"{found[1]}{math.prod(those) ** (1 / len(those)):.2f}{found[3]}{min(those):.2f}"

    return ROW.sub(figures, old[old.index("| suite |") :])


def _readers(record: dict, old: str) -> str:
    reports = {name: said for part in record["parts"].values() for name, said in part.get("reports", {}).items()}
    worth: dict[tuple[str, str], str] = {}
    for name, said in reports.items():
        if found := re.fullmatch(r"test_reads_as_well_on_a_gpu\[(reader-v\w+)-\w+\]", name):
            worth |= {(found[1], way): quality for way, quality in said.items()}
    models = sorted({model for model, _ in worth}, key=lambda model: (len(model), model), reverse=True)
    rows = [f"| {shown} | {' | '.join(worth[model, way] for model in models)} |" for way, shown in WAYS.items()]
    return "\n".join([f"| | {' | '.join(models)} |", "|---" * (1 + len(models)) + "|", *rows])


def _published(record: dict, old: str) -> str:
    rows: dict[str, list[str]] = {}
    for one in record["records"]:
        shown = f"{one['bits_per_byte']:.4f} bits/byte, {one['right']} of {one['asked']} values"
        rows.setdefault(one["form"], []).append(shown)
    models = list(dict.fromkeys(one["model"] for one in record["records"]))
    head = [f"| | {' | '.join(models)} |", "|---" * (1 + len(models)) + "|"]
    return "\n".join([*head, *(f"| {form} | {' | '.join(shown)} |" for form, shown in rows.items())])


def _records(record: dict, suites: list[str]) -> str:
    rows = ["| suite | case | us | floor, us | beside | us | ratio |", "|---|---|---|---|---|---|---|"]
    for one in sorted(
        (one for one in records_of(record) if one["suite"] in suites), key=lambda it: suites.index(it["suite"])
    ):
        cells = [
            f"{one['us']:.1f}",
            *("" if one[name] is None else f"{one[name]:.1f}" for name in ("floor_us", "peer_us")),
        ]
        cells.insert(2, one["peer"] or "")
        cells.append("" if one["ratio"] is None else f"{one['ratio']:.2f}")
        rows.append(f"| `{one['suite']}` | {one['case']} | {' | '.join(cells)} |")
    missing = [suite for suite in suites if not any(row.startswith(f"| `{suite}` |") for row in rows)]
    return "\n".join(rows) + (f"\n\nNot in it: {', '.join(missing)}." if missing else "")


if __name__ == "__main__":
    sys.exit(main())
