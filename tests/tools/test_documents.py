"""The documents beside the code: what they link to and name exists, and every script is listed."""

import argparse
import functools
import re
import subprocess
from pathlib import Path

import pytest

from sparse_attn.cli.main import build_parser

ROOT = Path(__file__).parents[2]
FOLDERS = (".github/", "scripts/", "scripts/docs/pages/**/", "scripts/results/notes/", "sparse_attn/**/", "")
PAGES = ROOT / "scripts" / "docs" / "pages"
DOCUMENTS = sorted({str(path.relative_to(ROOT)) for folder in FOLDERS for path in ROOT.glob(f"{folder}*.md")})
TODAY = [name for name in DOCUMENTS if name != "CHANGELOG.md" and "notes/" not in name]  # what these name may be gone
PATH = re.compile(r"`((?:[\w.]+/)*[\w.-]+\.(?:py|sh|md|json|toml|txt|cfg)|(?:[\w.]+/)+)(?:::\w+)?`")
NOT_HERE = {"model.safetensors.index.json", "config.json", "out.json"}  # of checkpoints, and written by users
EXAMPLES = ("test_x", "blackwell", "backward")  # of what somebody may add


def ends_of_paths():
    """Of every file and folder, the ends of its path that a document may name it by: c, b/c and a/b/c."""
    folders = [ROOT / name for name in (".github", "scripts", "sparse_attn", "tests")]
    paths = [
        *ROOT.iterdir(),
        *(path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts),
    ]
    parts = [path.relative_to(ROOT).parts for path in paths]
    return {"/".join(names[first:]) for names in parts for first in range(len(names))}


def slug(title):
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def headings(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"^::: (\S+)", text, re.MULTILINE)  # which the site makes headings of
    return {slug(title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)} | {*named}


def broken_links(path, text):
    """What links of ``text``, a document at ``path``, do not lead to: files, headings, definitions."""
    text = re.sub(r"^```.*?^```|`[^`]+`", "``", text, flags=re.MULTILINE | re.DOTALL)
    defined = dict(re.findall(r"^\[([^]]+)\]: +(\S+)", text, re.MULTILINE))
    used = [name or shown for shown, name in re.findall(r"\[([^][]+)\]\[([^][]*)\]", text)]
    used += re.findall(r"^#+ \[([^]]+)\](?![([])", text, re.MULTILINE)
    targets = [*re.findall(r"\]\(([^)]*)\)", text), *defined.values()]
    broken = [f"[{name}]" for name in used if name not in defined]
    for target in (target for target in targets if not target.startswith(("http://", "https://"))):
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        if not linked.exists() or anchor and anchor not in headings(linked):
            broken.append(target)
    return broken


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files_and_headings(name):
    assert not broken_links(ROOT / name, (ROOT / name).read_text())


@pytest.mark.parametrize("text, broken", [
    ("[a](b.md)", ["b.md"]), ("[a](CHANGELOG.md#b)", ["CHANGELOG.md#b"]), ("[a](#b)", ["#b"]), ("[a][b]", ["[b]"]),
    ("[a][]", ["[a]"]), ("[a][b]\n\n[b]: c.md", ["c.md"]), ("## [1.0]\n", ["[1.0]"]), ("[a][b]\n\n[b]: LICENSE", []),
    ("`x[a][b]`, [a](LICENSE)", []),
])  # fmt: skip
def test_a_broken_link_is_found(text, broken):
    assert broken_links(ROOT / "README.md", text) == broken


@pytest.mark.parametrize("name", TODAY)
def test_paths_it_names_exist(name):
    prose = re.sub(r"\[[^]]*\]\([^)]*\)", "", (ROOT / name).read_text())  # links have a test of their own
    named = {found for found in PATH.findall(prose) if not any(word in found for word in EXAMPLES)} - NOT_HERE
    assert named or (ROOT / name).is_relative_to(PAGES) or name == "README.md"  # which may name none
    there = ends_of_paths()
    assert not [found for found in named if found.rstrip("/") not in there]


def test_pages_link_to_pages_alone():
    """A site has nothing else of the repository."""
    linked = []
    for path in PAGES.rglob("*.md"):
        targets = re.findall(r"\]\(([^)#]+)", path.read_text())
        linked += [(path.parent / target).resolve() for target in targets if "://" not in target]
    assert len(linked) > 10 and all(target.is_relative_to(PAGES) for target in linked)


def sentences(text):
    """Of ten words and more, as words alone; but for what scripts/figures.py says of a record."""
    text = re.sub(r"^```.*?^```|<!-- .*? -->(\n\nRecord: .*?$)?", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    cut = re.split(r"(?<=[.:;!?])\s+|\n\n+|\||\n(?=[-#]|\d+\.)", text)
    said = (" ".join(re.findall(r"[a-z]\w*", one.lower())) for one in cut)
    return [one for one in said if one.count(" ") >= 9]


def test_no_sentence_stands_twice():
    there = {}
    generated = ("scripts/docs/pages/command-line.md", "scripts/docs/pages/support.md")
    for name in sorted({*DOCUMENTS} - {*generated}):
        for one in sentences((ROOT / name).read_text()):
            there.setdefault(one, []).append(name)
    twice = {one: names for one, names in there.items() if len(names) > 1}
    assert len(there) > 800 and not twice


def test_every_script_is_described():
    listed = subprocess.run(["git", "ls-files", "scripts"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() or [f"scripts/{path.name}" for path in ROOT.glob("scripts/*.*")]
    scripts = [name.removeprefix("scripts/") for name in names if re.fullmatch(r"scripts/\w+\.(py|sh)", name)]
    described = (ROOT / "scripts" / "README.md").read_text()
    assert scripts and not [script for script in scripts if not re.search(rf"[` ]{re.escape(script)}", described)]


@functools.cache
def options_of_programs():
    """The options of each command, and of each script what may be one, by name."""
    (commands,) = (it.choices for it in build_parser()._actions if isinstance(it, argparse._SubParsersAction))
    found = {name: frozenset(parser._option_string_actions) for name, parser in commands.items()}
    for pattern, option in (("*.py", r'"(--[a-z-]+)"'), ("*.sh", r"--[a-z-]+")):
        found |= {it.name: frozenset(re.findall(option, it.read_text())) for it in ROOT.glob(f"scripts/{pattern}")}
    return found


def unknown_options(text):
    """What ``text`` names, in code blocks and backticks, that no program has: scripts, and options."""
    programs, passing_on = options_of_programs(), ("demo.sh", "test.sh")  # what these do not know
    anyone = frozenset().union(*programs.values(), {"--help", "--version"})
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    unknown = []
    for line in [*"\n".join(blocks).splitlines(), *(" ".join(span.split()) for span in spans)]:
        line = re.split(r" [#|;]|;", line)[0]
        named = re.match(
            rf"(?:.*-m sparse_attn )?({'|'.join(name for name in programs if '.' not in name)})(?= |$)", line
        )
        named = named or re.match(r"(?:.*scripts/|python )?(\w+\.(?:py|sh))(?= |$)", line)
        if named and named[1] not in programs:
            unknown += [named[1]] if "scripts/" in named[0] else []
        elif named and named[1] not in passing_on:
            options = re.findall(r"(?<!\S)--[a-z-]+", line[named.end() :])
            unknown += [f"{named[1]} {option}" for option in options if option not in programs[named[1]] | {"--help"}]
        elif line.startswith("--"):
            unknown += [option for option in re.findall(r"(?<!\S)--[a-z-]+", line) if option not in anyone]
    return unknown


@pytest.mark.parametrize("name", TODAY)
def test_scripts_and_options_it_names_exist(name):
    assert not unknown_options((ROOT / name).read_text())


@pytest.mark.parametrize("text, unknown", [
    ("```sh\npython -m sparse_attn info --bogus-flag\n```\n", ["info --bogus-flag"]),
    ("```sh\ntorchrun -m sparse_attn plan --gpus 2 --bogus  # --not-this\n```\n", ["plan --bogus"]),
    ("`generate\n--bogus 3` and `generate --speculate n`", ["generate --bogus"]),
    ("`scripts/bench.py --bogus` and `bench.py --dry`", ["bench.py --bogus"]),
    ("`scripts/nowhere.py`", ["nowhere.py"]), ("`--bogus`, `--expand-weights`", ["--bogus"]),
])  # fmt: skip
def test_an_option_that_nobody_has_is_found(text, unknown):
    assert unknown_options(text) == unknown


def test_the_changelog_begins_with_the_version():
    version = re.search(r'^__version__ = "(.*)"', (ROOT / "sparse_attn" / "version.py").read_text(), re.MULTILINE)[1]
    sections = re.findall(r"^## \[(.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] in ("Unreleased", version) and version in sections


def test_the_changelog_of_a_version_is_read_in_minutes():
    for section in re.split(r"^## \[", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]:
        assert len(section.splitlines()) <= 120 and len(section.split()) <= 1500, section[:20]
