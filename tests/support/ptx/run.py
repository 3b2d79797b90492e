"""Launch a kernel as a launcher would, on CPU tensors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from support.ptx.machine import GLOBAL_AT, Cta, TensorMap
from support.ptx.program import parse

from sparse_attn.testing.launches import Launch, compile_launch, recording

MEMORY = 64 << 20  # bytes, of all tensors
BETWEEN = 256  # bytes, between two of them


class _Recorder:
    def __init__(self, kernel):
        self.kernel, self.calls = kernel, []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.calls.append((grid, arguments, options))
            return self.kernel[grid](*arguments, **options)

        return launch


class _Memory:
    """Global memory with a copy of every tensor's storage."""

    def __init__(self):
        self.bytes, self.top = np.zeros(MEMORY, np.uint8), BETWEEN
        self.storages: dict[int, tuple[int, np.ndarray]] = {}

    def address(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.storages:
            raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self.bytes[self.top : self.top + raw.size] = raw
            self.storages[storage.data_ptr()] = self.top, raw
            self.top = (self.top + raw.size + 2 * BETWEEN - 1) // BETWEEN * BETWEEN
        place, _ = self.storages[storage.data_ptr()]
        return GLOBAL_AT + place + tensor.storage_offset() * tensor.element_size()

    def write_back(self) -> None:
        for place, raw in self.storages.values():
            raw[:] = self.bytes[place : place + raw.size]


def _bits(value: float) -> int:
    """Of an int32 or an fp32."""
    if isinstance(value, float):
        return int(np.float32(value).view(np.uint32))
    return int(value) & 0xFFFFFFFF


def execute(module: ModuleType, name: str, launch: Callable[[], None], seed: int = 0) -> int:
    """``launch()`` launches kernel ``name`` of ``module`` with CPU tensors, which then hold what it writes. Returns the
    number of instructions that its warps issued."""
    recorder = _Recorder(getattr(module, name))
    with mock.patch.object(module, name, recorder), recording("sm_90") as launches:
        launch()
    found = [one for one in launches if (one.module, one.kernel) == (module.__name__, name)]
    assert found
    calls = zip(found, recorder.calls, strict=True)
    return sum(_execute(recorder.kernel, recorded, *call, seed) for recorded, call in calls)


def _execute(
    kernel: Any, recorded: Launch, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any], seed: int
) -> int:
    """The same of one launch."""
    program = parse(compile_launch(recorded).assembly["ptx"])
    kinds = json.loads(recorded.specialisation)["signature"]
    values = dict(zip(kernel.arg_names, arguments)) | options
    memory, known, maps = _Memory(), {}, {}
    parameters = iter(program.parameters)
    for argument in kernel.arg_names:
        if kinds[argument] == "constexpr":
            continue
        value = values[argument]
        parameter, is_map = next(parameters)
        if is_map:
            known[parameter] = place = 1 + len(maps)
            layout, itemsize = value.layout.swizzle_byte_width, value.base.element_size()
            *box, last = value.block_shape  # one copy has no more bytes of a row than are swizzled together
            box.append(min(last, layout // itemsize) if layout else last)
            maps[place] = TensorMap(
                memory.address(value.base), list(value.shape), list(value.strides), box, itemsize, layout
            )
            known |= {next(parameters)[0]: int(number) for number in (*value.shape, *value.strides)}
        else:
            known[parameter] = memory.address(value) if isinstance(value, torch.Tensor) else _bits(value)
    known |= {parameter: 0 for parameter, _ in parameters}  # Triton's own scratch
    issued = 0
    size = program.cluster
    whole = (grid[0] * size, *grid[1:])
    places = list(itertools.product(*map(range, whole)))
    assert size == 1 or len(whole) == 1
    for number in range(0, len(places), size):
        cluster = [
            Cta(program, memory.bytes, known, maps, place, whole, seed + number)
            for place in places[number : number + size]
        ]
        for cta in cluster:
            cta.join(cluster)
        with np.errstate(all="ignore"):  # infinities are the kernel's
            cluster[0].run()
        issued += sum(cta.issued for cta in cluster)
    memory.write_back()
    return issued
