"""The documents beside the code: what they link to and name exists, and every script is listed."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    "README.md", "CHANGELOG.md", ".github/CONTRIBUTING.md", "scripts/README.md", "sparse_attn/README.md",
    *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("sparse_attn/ops/*/*/README.md"))),
)  # fmt: skip
PATH = re.compile(r"`((?:[\w.]+/)*[\w.-]+\.(?:py|sh|md|json|toml|txt|cfg)|(?:[\w.]+/)+)(?:::\w+)?`")
NOT_HERE = {"model.safetensors.index.json", "config.json", "out.json"}  # of checkpoints, and written by users
EXAMPLES = ("test_x", "blackwell", "backward")  # of what somebody may add


def documents():
    return [name for name in DOCUMENTS if (ROOT / name).exists()]


TODAY = [name for name in documents() if name != "CHANGELOG.md"]  # that names what is gone


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
    return {slug(title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("name", documents())
def test_links_lead_to_files_and_headings(name):
    path = ROOT / name
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        linked = (path.parent / target).resolve() if target else path
        assert linked.exists(), target
        assert not anchor or anchor in headings(linked), f"{target}#{anchor}"


@pytest.mark.parametrize("name", TODAY)
def test_paths_it_names_exist(name):
    prose = re.sub(r"\[[^]]*\]\([^)]*\)", "", (ROOT / name).read_text())  # links have a test of their own
    named = {found for found in PATH.findall(prose) if not any(word in found for word in EXAMPLES)} - NOT_HERE
    assert named
    there = ends_of_paths()
    assert not [found for found in named if found.rstrip("/") not in there]


def test_examples_of_the_architecture_page_run():
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "sparse_attn" / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert blocks
    for block in blocks:
        exec(compile(block, "sparse_attn/README.md", "exec"), {"__name__": "readme"})


def test_every_script_is_described():
    listed = subprocess.run(["git", "ls-files", "scripts"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() if listed.returncode == 0 else [f"scripts/{p.name}" for p in ROOT.glob("scripts/*.*")]
    described = (ROOT / "scripts" / "README.md").read_text()
    for script in (name.removeprefix("scripts/") for name in names if re.fullmatch(r"scripts/\w+\.(py|sh)", name)):
        assert f"`{script}" in described or f" {script}" in described, script


@pytest.mark.parametrize("name", TODAY)
def test_options_it_gives_a_script_exist(name):
    """Of the commands in code blocks and in backticks."""
    text = (ROOT / name).read_text()
    for script, arguments in re.findall(r"(?:scripts/|`)(\w+\.(?:py|sh))((?: [^`\n#|;]*)?)", text):
        path = ROOT / "scripts" / script
        if path.exists() and script not in ("demo.sh", "test.sh"):  # these pass on what they do not know
            for option in re.findall(r"(?<!\S)--[a-z-]+", arguments):
                assert f'"{option}"' in path.read_text() or f"{option})" in path.read_text(), f"{script} {option}"


def test_the_changelog_begins_with_the_version():
    version = re.search(r'^__version__ = "(.*)"', (ROOT / "sparse_attn" / "version.py").read_text(), re.MULTILINE)[1]
    sections = re.findall(r"^## \[(.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] in ("Unreleased", version) and version in sections
