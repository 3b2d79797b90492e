"""The site's pages: all are listed, the API has every public name once, and generated pages are current."""

import importlib
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

import sparse_attn
from sparse_attn.testing.ops import public_functions

DOCS = Path(__file__).parents[2] / "scripts" / "docs"
PAGES = DOCS / "pages"


def load_generator():
    spec = importlib.util.spec_from_file_location("generate_pages", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = load_generator()


def documented() -> list[str]:
    return [
        name for page in sorted(PAGES.glob("api/*.md")) for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    ]


def resolve(path: str) -> object:
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise AssertionError(path)


def test_every_page_is_listed_once():
    listed = re.findall(r"^ +- .*?([\w/-]+\.md)$", (DOCS / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(PAGES)) for page in PAGES.rglob("*.md"))


def test_the_api_has_every_public_function_once():
    wanted = {id(value): name for name, value in public_functions().items()}
    wanted |= {id(getattr(sparse_attn, name)): name for name in sparse_attn.__all__ if name != "__version__"}
    found = Counter(id(resolve(name)) for name in documented())
    assert not [name for value, name in wanted.items() if found[value] != 1]


def test_front_names_stand_under_the_name_they_are_imported_by():
    assert {f"sparse_attn.{name}" for name in sparse_attn.__all__} - {"sparse_attn.__version__"} <= {*documented()}


@pytest.mark.parametrize("name", generator.GENERATED)
def test_generated_pages_are_current(name):
    assert not generator.stale(name), "run scripts/docs/generate.py --write"


def test_a_page_that_is_not_current_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generator, "PAGES", tmp_path)
    monkeypatch.setattr(generator, "GENERATED", {"a.md": lambda: "new\n"})
    (tmp_path / "a.md").write_text("old\n")
    monkeypatch.setattr("sys.argv", ["generate.py"])
    assert generator.main() == 1 and "a.md: not current" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["generate.py", "--write"])
    assert generator.main() == 0 and (tmp_path / "a.md").read_text() == "new\n"


def test_the_command_line_has_every_option():
    text = (PAGES / "command-line.md").read_text()
    parser = generator.build_parser()
    (commands,) = (it for it in parser._actions if isinstance(it, generator.argparse._SubParsersAction))
    for name, command in commands.choices.items():
        part = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        shown = set(re.findall(r"--[a-z][\w-]*", part))
        options = {it for it in command._option_string_actions if it.startswith("--")} - {"--help"}
        assert part and not options - shown, name
