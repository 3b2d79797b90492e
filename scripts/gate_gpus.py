"""A pytest plugin of the gate: leaves out the tests that need more GPUs than there are, and says which and why.

A test that needs several GPUs is marked `gpus(count)`. Elsewhere it is skipped where there are fewer; a gate counts
skipped tests as bad, and lists these instead.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deselected", type=Path, metavar="FILE", help="write there, by test, why it is left out")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    there = torch.cuda.device_count()
    why = {}
    for item in items:
        marker = item.get_closest_marker("gpus")
        if marker is not None and marker.args[0] > there:
            why[item.nodeid] = f"needs {marker.args[0]} GPUs"
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in why])
    items[:] = [item for item in items if item.nodeid not in why]
    config.getoption("--deselected").write_text(json.dumps(why))
