"""The README's examples run as they stand, under the backend they name; what compiles serves any length."""

import functools
import re
from pathlib import Path

import pytest
import torch
from conftest import long

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python(?: (\w+))?\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def code_blocks():
    for number, (marker, code) in enumerate(BLOCKS):
        yield pytest.param(code, marks=[getattr(pytest.mark, marker)] if marker else [], id=f"block{number}")


def test_there_is_one_per_kind_of_user_and_one_per_part_of_a_server():
    assert len(BLOCKS) == 3 + 3
    assert all(len(code.splitlines()) <= 32 for _, code in BLOCKS)


def run(code):
    names = {"__name__": "readme"}
    try:
        exec(compile(code, str(README), "exec"), names)
    finally:
        torch.set_default_device(None)  # setting what was the default leaves a mode that Dynamo cannot trace
    return names


@pytest.mark.parametrize("code", list(code_blocks())[1:])
def test_block_runs(code):
    run(code)


# Bytes of a cache's row, tokens of a block, heads and blocks of a table; and what nothing else is.
LENGTHS = (100, 64, 8, 57, 83, 200)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_compiled_forward_serves_any_length(length, monkeypatch):
    """Whatever length came first, no other one compiles again. The example's own length, and with --long every one, is
    compiled by the backend that the example names; it compiles no further."""
    code = BLOCKS[0][1]
    assert "length = 100" in code and "backend" not in code
    if length != 100 and not long():
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    names = run(code.replace("length = 100", f"length = {length}"))
    with torch.compiler.set_stance("fail_on_recompile"):
        for other in LENGTHS:
            names["length"] = other
            exec(compile(code[code.index("plan = build_step_plan") :], str(README), "exec"), names)


def test_scripts_and_flags_it_names_exist():
    text = README.read_text()
    for script in set(re.findall(r"scripts/\w+\.(?:sh|py)", text)):
        assert (README.parent / script).exists(), script
