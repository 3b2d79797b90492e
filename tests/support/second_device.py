"""A GPU that is not the current one, on a machine without any: tensors of the CPU that say they lie on cuda:1.

Streams, events and graphs are recorded, not run; ``log`` holds (what, device) of everything that was asked of a stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from sparse_attn.framework import torch_private

SECOND = torch.device("cuda", 1)


class Lying(TorchFunctionMode):
    """Tensors made or met inside are on ``SECOND``, by their own account."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return SECOND
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if func is torch.Tensor.record_stream:
            self.log.append(("record_stream", args[1].device))
            return None
        for name in ("device", "pin_memory"):
            kwargs.pop(name, None)
        return func(*args, **kwargs)


class Recorder:
    """Stands for torch.cuda: the current device is cuda:0."""

    def __init__(self):
        self.log: list[tuple[str, torch.device]] = []
        self.index = 0

    def stream_of(self, device=None):
        return Stream(self, torch.device("cuda", self.index) if device is None else torch.device(device))

    def set_stream(self, stream):
        self.index = stream.device.index

    @contextlib.contextmanager
    def device(self, device):
        before, self.index = self.index, torch.device(device).index
        try:
            yield
        finally:
            self.index = before

    @contextlib.contextmanager
    def graph(self, graph, *, stream, **_):
        with self.device(stream.device):
            self.log.append(("capture", stream.device))
            yield

    def replay(self):
        self.log.append(("replay", torch.device("cuda", self.index)))

    def is_current_stream_capturing(self):
        self.log.append(("capturing", torch.device("cuda", self.index)))
        return False


class Stream:
    cuda_stream = 7

    def __init__(self, recorder, device):
        self.device, self._recorder = device, recorder

    def __getattr__(self, name):
        def asked(*others):
            for who in (self, *others):
                if isinstance(who, Stream):  # no event that is to be recorded
                    self._recorder.log.append((name, who.device))
            return self  # an event, as far as anyone asks

        return asked


@contextlib.contextmanager
def second_device() -> Iterator[Recorder]:
    recorder = Recorder()
    graph = mock.Mock(replay=recorder.replay)
    fakes = dict(
        current_device=lambda: recorder.index, current_stream=recorder.stream_of, Stream=recorder.stream_of,
        set_stream=recorder.set_stream, device=recorder.device, stream=lambda stream: recorder.device(stream.device), graph=recorder.graph,
        CUDAGraph=lambda: graph, is_current_stream_capturing=recorder.is_current_stream_capturing,
    )  # fmt: skip
    own = dict(current_stream=recorder.stream_of, stream_handle=lambda device: Stream.cuda_stream)
    with mock.patch.multiple(torch.cuda, **fakes), mock.patch.multiple(torch_private, **own), Lying(recorder.log):
        yield recorder
