"""The README's examples run as they stand; torch.compile with Dynamo alone, so that no C++ compiler is needed."""

import functools
import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python(?: (\w+))?\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def code_blocks():
    for number, (marker, code) in enumerate(BLOCKS):
        yield pytest.param(code, marks=[getattr(pytest.mark, marker)] if marker else [], id=f"block{number}")


def test_there_is_one_per_kind_of_user_and_one_per_part_of_a_server():
    assert len(BLOCKS) == 3 + 3
    assert all(len(code.splitlines()) <= 32 for _, code in BLOCKS)


@pytest.mark.parametrize("code", list(code_blocks()))
def test_block_runs(code, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    try:
        exec(compile(code, str(README), "exec"), {"__name__": "readme"})
    finally:
        torch.set_default_device(None)  # setting what was the default leaves a mode that Dynamo cannot trace


def test_scripts_and_flags_it_names_exist():
    text = README.read_text()
    for script in set(re.findall(r"scripts/\w+\.(?:sh|py)", text)):
        assert (README.parent / script).exists(), script
