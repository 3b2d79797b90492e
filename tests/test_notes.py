"""scripts/results/notes: every page is listed, has its headings, and names code, pages and sections that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTES = ROOT / "scripts" / "results" / "notes"
PAGES = sorted(path.name for path in NOTES.glob("*.md") if path.name != "README.md")
HEADINGS = ["What it does now", "Bound", "Measured", "Tried and kept", "Tried and dropped"]
NO_KERNEL = {"changes.md", "distributed.md", "inductor.md", "measurement.md", "sharing.md", "training.md"}


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


@pytest.mark.parametrize("page", [*PAGES, "README.md"])
def test_links_lead_to_pages_and_headings(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", (NOTES / page).read_text()):
        linked = NOTES / (target or page)
        assert linked.exists(), target
        slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings(linked)}
        assert not anchor or anchor in slugs, anchor


@pytest.mark.parametrize("page", sorted(set(PAGES) - NO_KERNEL))
def test_sections_it_points_to_exist(page):
    text, titles = (NOTES / page).read_text(), headings(NOTES / page)
    for section in re.findall(r"\| \*([^*|]+)\*(?:, last line)? \|", text):
        assert any(title.startswith(section) for title in titles), section


def headings(page):
    return re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
