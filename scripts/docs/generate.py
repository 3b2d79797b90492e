#!/usr/bin/env python3
"""The pages of the site that follow from the code: the command line, from its parsers, and which kernel runs where.

scripts/docs/generate.py            names those that are not current
scripts/docs/generate.py --write    writes them
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import support_table  # noqa: E402

from sparse_attn.cli.main import build_parser  # noqa: E402

PAGES = Path(__file__).parent / "pages"
MADE = "<!-- made by scripts/docs/generate.py --write -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="the pages, where they are not current")
    options = parser.parse_args()
    old = [name for name in GENERATED if stale(name)]
    for name in old:
        if options.write:
            (PAGES / name).write_text(GENERATED[name]())
        else:
            print(f"{name}: not current; run scripts/docs/generate.py --write")
    return int(bool(old) and not options.write)


def stale(name: str) -> bool:
    path = PAGES / name
    return not path.exists() or path.read_text() != GENERATED[name]()


# --- the command line


def command_line() -> str:
    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    lines = ["# Command line", "", MADE, "", f"`{parser.prog} COMMAND`, or `sparse_attn COMMAND` once it is installed."]
    lines += ["", "| command | |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {_cell(helps.get(name, ''))} |" for name in commands.choices]
    for name, command in commands.choices.items():
        lines += ["", f"## {name}", "", _sentence(command.description or helps.get(name, ""))]
        for group in command._action_groups:
            lines += _group(command, group)
        if command.epilog:
            lines += ["", "```", command.epilog.strip("\n") % {"prog": command.prog}, "```"]
    return "\n".join(lines) + "\n"


def _group(command: argparse.ArgumentParser, group: Any) -> Iterator[str]:
    shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    if not shown:
        return
    if group.title not in ("options", "positional arguments"):
        yield from ("", f"### {command.prog.split()[-1]}: {group.title}")
    if group.description:
        yield from ("", group.description)
    yield from ("", "| option | meaning |", "|---|---|")
    for action in shown:
        text = (action.help or "") % {"prog": command.prog, **vars(action)}
        required = "; required" if action.required and action.option_strings else ""
        yield f"| {_option(action)} | {_cell(text)}{required} |"


def _option(action: argparse.Action) -> str:
    metavar = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else None)
    value = metavar if isinstance(metavar, str) else " ".join(metavar) if metavar else action.dest.upper()
    names = ", ".join(action.option_strings)
    text = names if names and action.nargs == 0 else f"{names} {value}".strip()
    return "<code>" + text.replace("|", "&#124;") + "</code>" if "|" in text else f"`{text}`"


def _cell(text: str) -> str:
    """``text`` in a cell of a table: argparse does not wrap it, and markdown does not read it."""
    text = " ".join(text.split())
    for sign in "\\|*_<>`":
        text = text.replace(sign, f"\\{sign}" if sign in "\\|*_`" else {"<": "&lt;", ">": "&gt;"}[sign])
    return text


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


# --- support


def support() -> str:
    """The page as it is, with the table of today."""
    return support_table.written((PAGES / "support.md").read_text(), support_table.table(fold=True))


GENERATED: dict[str, Callable[[], str]] = {"command-line.md": command_line, "support.md": support}

if __name__ == "__main__":
    sys.exit(main())
