"""What the launchers launch on a GPU this machine does not have: recorded from their own code, compiled ahead of
time."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

from sparse_attn.framework import target
from sparse_attn.framework.target import TARGETS
from sparse_attn.testing.aot import Compiled, read


class Launch(NamedTuple):
    """A kernel as a launcher asked for it: all that compiling it depends on. specialisation: Triton's own record of
    signature, constants, alignment and options."""

    target: str
    module: str
    kernel: str
    specialisation: str


@contextlib.contextmanager
def recording(name: str) -> Iterator[list[Launch]]:
    """Launchers of tensors on the meta device see target ``name``; the kernels they launch are noted and neither
    compiled nor run."""
    from triton import knobs

    from sparse_attn.device.triton_private import launching_on

    launches: list[Launch] = []

    def note(*, fn, compile, **_):
        launches.append(Launch(name, fn.module, fn.name, compile["specialization_data"]))
        return True  # instead of compiling

    with mock.patch.object(target, "CPU", TARGETS[name]), launching_on(TARGETS[name].arch), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        yield launches


def compile_launch(launch: Launch) -> Compiled:
    """Compile what ``recording`` noted."""
    from sparse_attn.device.triton_private import launching_on

    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    with launching_on(TARGETS[launch.target].arch):
        return read(kernel.preload(launch.specialisation))
