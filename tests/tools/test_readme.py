"""README and the site's pages: examples run as they stand, under the backend they name; what compiles serves any length;
README is short, shows pictures, and leads to every page."""

import functools
import importlib
import re
from pathlib import Path

import pytest
import support_table
import torch
from conftest import long

ROOT = Path(__file__).parents[2]
README, PAGES = ROOT / "README.md", ROOT / "scripts" / "docs" / "pages"
WITH_EXAMPLES = {"README", "compile", "debug", "decode-loop", "golden-tests", "kernels", "training", "transformers"}


def blocks_of(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


EXAMPLES = {
    f"{path.stem}-{number}": code
    for path in (README, *sorted(PAGES.rglob("*.md")))
    for number, code in enumerate(blocks_of(path))
}
COMPILED = EXAMPLES["compile-0"]


def examples():
    for name, code in EXAMPLES.items():
        marks = [pytest.mark.gpu] if code.startswith("# on a GPU\n") else []
        if code is not COMPILED:
            yield pytest.param(code, marks=marks, id=name)


def run(code):
    if "transformers" in code:
        pytest.importorskip("transformers", minversion="5.24")
    names = {"__name__": "readme"}
    try:
        exec(compile(code, str(README), "exec"), names)
    finally:
        torch.set_default_device(None)  # setting what was the default leaves a mode that Dynamo cannot trace
        if "bridge.register()" in code:
            bridge = importlib.import_module("sparse_attn.integrations.transformers")
            bridge.unregister()
    return names


@pytest.mark.parametrize("code", list(examples()))
def test_example_runs(code):
    run(code)


def test_every_block_of_python_is_an_example():
    """None is set off by another word behind the ticks, which a site may not know, nor needs a GPU by chance."""
    assert {name.rpartition("-")[0] for name in EXAMPLES} == WITH_EXAMPLES
    for path in (README, *sorted(PAGES.rglob("*.md"))):
        if path.name == "command-line.md":  # which is made of the parsers' help
            continue
        fences = re.findall(r"^```(.*)$", path.read_text(), re.MULTILINE)
        assert set(fences[::2]) <= {"python", "sh", "bibtex"} and set(fences[1::2]) <= {""}, path
    for name, code in EXAMPLES.items():
        assert ('"cuda"' in code or "DecodeGraph(" in code) == code.startswith("# on a GPU\n"), name


def test_readme_is_short_and_shows_pictures():
    text = README.read_text()
    assert len(text.splitlines()) <= 200 and len(text.split()) <= 2200
    shown = re.findall(r"^!\[.{20,}\]\((.*)\)$", text, re.MULTILINE)
    assert len(shown) >= 3 and all((ROOT / name).suffix == ".svg" and (ROOT / name).exists() for name in shown)


def test_readme_leads_to_every_page():
    linked = {(ROOT / target).resolve() for target in re.findall(r"\]\(([^)#]+)", README.read_text())}
    assert set(PAGES.glob("*.md")) <= linked
    for name in ("CHANGELOG.md", ".github/CONTRIBUTING.md", "scripts/README.md", "sparse_attn/README.md"):
        assert ROOT / name in linked


def test_readme_cites_this_version():
    (said,) = re.findall(r"^  version = \{(.*)\}$", README.read_text(), re.MULTILINE)
    assert f'__version__ = "{said}"' in (ROOT / "sparse_attn" / "version.py").read_text()


# Bytes of a cache's row, tokens of a block, heads and blocks of a table; and what nothing else is.
LENGTHS = (100, 64, 8, 57, 83, 200)


@pytest.mark.parametrize("length", [100, *(pytest.param(n, marks=pytest.mark.few(1)) for n in LENGTHS if n != 100)])
def test_the_compiled_forward_serves_any_length(length, monkeypatch):
    """Whatever length came first, no other one compiles again. The example's own length, and with --long every one, is
    compiled by the backend that the example names; it compiles no further."""
    code = COMPILED
    assert "length = 100" in code and "backend" not in code
    if length != 100 and not long():
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    names = run(code.replace("length = 100", f"length = {length}"))
    with torch.compiler.set_stance("fail_on_recompile"):
        for other in LENGTHS:
            names["length"] = other
            exec(compile(code[code.index("plan = build_step_plan") :], "compile.md", "exec"), names)


def test_ci_runs_a_row_of_the_table_of_versions():
    page = (PAGES / "index.md").read_text()
    rows = re.findall(r"^\| (\d[^|]*) \| (\d[^|]*) \| (\d[^|]*) \| (.*) \|$", page, re.MULTILINE)
    pins = dict(re.findall(r"^(\w+)==(.*)$", (ROOT / "scripts" / "constraints.txt").read_text(), re.MULTILINE))
    (ran,) = (ran for *versions, ran in rows if versions == [pins["torch"], pins["triton"], pins["transformers"]])
    assert ran.startswith("yes | yes | yes | ")
    asked = re.findall(r"(torch|triton|transformers)>=(\d+)\.(\d+)", (ROOT / "setup.cfg").read_text())
    oldest = [min((int(a), int(b)) for it, a, b in asked if it == name) for name in ("torch", "triton", "transformers")]
    assert [f"{a}.{b}.0" for a, b in oldest] == list(rows[0][:3])


def test_what_kernels_refuse_is_told_as_what_they_take():
    refusals = (
        "heads: got 48, allowed: a multiple of 64", "rows: got 9, allowed: at most 8 (7 columns take 16 CTAs)",
        "rows: got 40, allowed: at most 33 (5 columns take 4 CTAs)", "k: got 3, faster up to 2 (at most 5 rows)",
        "q strides: got (9, 8), allowed: multiples of 16", "q address: got 2 bytes behind a multiple of 16, allowed: 0",
        "kv address: got 8 bytes behind a multiple of 16, allowed: 0", "cache dtype: got fp16, allowed: bf16, as q has",
    )  # fmt: skip
    assert support_table.conditions(refusals) == [
        "heads: a multiple of 64", "rows: at most 8..33", "k: faster up to 2 (at most 5 rows)",
        "q strides: multiples of 16", "q address, kv address: a multiple of 16", "cache dtype: as q has",
    ]  # fmt: skip
