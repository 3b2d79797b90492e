"""A GPU on a machine without one: tensors of the CPU of which some say that they lie on cuda:0.

A function that meets tensors of both devices is an error, as on a GPU. So is a step of a decode loop that reads a value,
or takes a tensor from the host. A captured step runs again when it is replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from sparse_attn.framework import torch_private
from sparse_attn.framework.target import H200
from sparse_attn.framework.torch_private import map_leaves, no_torch_function
from sparse_attn.generation import batch, graph
from sparse_attn.generation.loop import DecodeRows

DEVICE = torch.device("cuda", 0)
READS = {"tolist", "item", "numpy", "nonzero", "equal", "cpu", "__bool__", "__int__", "__index__", "__float__"}
COPIES = {"copy_", "_foreach_copy_"}
MOVES = {"to", "cpu", *COPIES}
FACTS = {"device": DEVICE, "is_cuda": True, "_base": None}


class OnGpu(torch.Tensor):
    """A tensor of the GPU, by its own account."""

    __torch_function__ = no_torch_function


class Gpu(TorchFunctionMode):
    """Results lie where tensors do, or where ``device`` says. stepping: within a step of a decode loop."""

    def __init__(self):
        super().__init__()
        self.stepping = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == "__get__" and isinstance(args[0], OnGpu) and func.__self__.__name__ in FACTS:
            return FACTS[func.__self__.__name__]
        given = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, torch.Tensor)]
        here = any(isinstance(value, OnGpu) for value in given)
        there = [value for value in given if not isinstance(value, OnGpu) and value.dim()]
        if here and there and name not in MOVES:
            raise RuntimeError(
                f"{name}: Expected all tensors to be on the same device, got {list(there[0].shape)} on cpu"
            )
        args, kwargs, made = _placed(name, args, kwargs, here)
        if self.stepping and (here and name in READS or there and (made or name in COPIES)):
            raise RuntimeError(f"{name}: a step reads the device, or takes a tensor from the host")
        out = func(*args, **kwargs)
        if name in ("to", "cpu") and out is args[0] and made != here:
            out = out.clone()
        if isinstance(out, torch.Tensor):
            return _on(out, made)
        return map_leaves(lambda value: _on(value, made) if isinstance(value, torch.Tensor) else value, out)


def _flat(values: tuple | list) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def _on(value: torch.Tensor, gpu: bool) -> torch.Tensor:
    return value if isinstance(value, OnGpu) == gpu else value.as_subclass(OnGpu if gpu else torch.Tensor)


def _placed(name: str, args: tuple, kwargs: dict[str, Any], here: bool) -> tuple[tuple, dict[str, Any], bool]:
    """The call without devices and pinned memory, and whether its result is on the GPU."""
    kwargs.pop("pin_memory", None)
    said = kwargs.pop("device", None)
    if name == "to":
        said = next((value for value in args[1:] if isinstance(value, (str, torch.device))), said)
        args = tuple(value for value in args if not isinstance(value, (str, torch.device)))
        if len(args) == 1 and "dtype" not in kwargs:
            kwargs["dtype"] = args[0].dtype
    if name == "cpu":
        return args, kwargs, False
    return args, kwargs, here if said is None else torch.device(said).type == DEVICE.type


class Nobody:
    """A stream, an event or a graph, of which whatever is asked is done."""

    device = DEVICE

    def __init__(self, *_: object, **__: object):
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class Graph(Nobody):
    """A captured step."""

    def __init__(self):
        self.replay = lambda: None


@contextlib.contextmanager
def _captured(graph: Graph, **_: object) -> Iterator[None]:
    """The step that runs within, again at every replay."""
    step = DecodeRows._decode
    with mock.patch.object(DecodeRows, "_decode", autospec=True, side_effect=step) as called:
        yield
    (loop, rows), _ = called.call_args
    graph.replay = lambda: step(loop, rows)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[Gpu]:
    nothing, gpu, decode = contextlib.nullcontext, Gpu(), DecodeRows._decode
    cuda = dict(
        Stream=Nobody, Event=Nobody, CUDAGraph=Graph, current_stream=lambda *_: Nobody(), graph=_captured,
        synchronize=lambda *_: None, stream=lambda *_: nothing(), device=lambda *_: nothing(),
        current_device=lambda: 0, set_stream=lambda *_: None, is_current_stream_capturing=lambda: False,
    )  # fmt: skip

    def step(loop: DecodeRows, rows: int) -> None:
        gpu.stepping = True
        try:
            decode(loop, rows)
        finally:
            gpu.stepping = False

    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.multiple(torch_private, current_stream=lambda _: Nobody(), stream_handle=lambda _: 0),
        mock.patch.multiple(torch.Tensor, record_stream=lambda *_: None, pin_memory=lambda self: self.clone()),
        mock.patch.object(DecodeRows, "_decode", step),
        mock.patch.object(batch, "target_of", lambda _: H200),
        mock.patch.object(graph, "target_of", lambda _: H200),
        gpu,
    ):
        yield gpu
