"""scripts/results/notes: every page is listed, has its headings, and names code and pages that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTES = ROOT / "scripts" / "results" / "notes"
PAGES = sorted(path.name for path in NOTES.glob("*.md") if path.name != "README.md")
HEADINGS = ["What it does now", "Bound", "Measured", "Tried and kept", "Tried and dropped"]
NO_KERNEL = {"compilers.md", "distributed.md", "inductor.md", "measurement.md", "sharing.md", "training.md"}


def test_index_lists_every_page_once():
    assert sorted(re.findall(r"^\| \[(\S+)\]\(\1\) \|", (NOTES / "README.md").read_text(), re.MULTILINE)) == PAGES


@pytest.mark.parametrize("page", sorted(set(PAGES) - NO_KERNEL))
def test_a_kernel_page_has_the_five_headings(page):
    assert re.findall(r"^## (.*)$", (NOTES / page).read_text(), re.MULTILINE) == HEADINGS


@pytest.mark.parametrize("page", PAGES)
def test_code_it_names_exists(page):
    line = re.search(r"^Code: .*?(?:Suites:|Records:|\n\n)", (NOTES / page).read_text(), re.MULTILINE | re.DOTALL)[0]
    names = [name for name in re.findall(r"`([^`]+)`", line) if "/" in name or "." in name]
    assert names
    for name in names:
        found = [path for folder in ("sparse_attn", "scripts") for path in (ROOT / folder).glob(f"**/{name}")]
        assert found or (ROOT / name).exists(), name
