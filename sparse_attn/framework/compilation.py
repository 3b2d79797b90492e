"""The time in which this process compiles: torch.compile, and Triton kernels at their first launch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from sparse_attn.framework.torch_private import dynamo_hooks, triton_hooks

TORCH_COMPILE = "torch.compile"


class Compilation(contextlib.ExitStack):
    """Inside ``with Compilation(...)``, the seconds that this process compiled.

    dynamo: what torch.compile takes. triton: what kernels take, or to read them from Triton's cache. told: called as
    one begins, with TORCH_COMPILE or a kernel's name.
    """

    def __init__(self, *, dynamo: bool, triton: bool, told: Callable[[str], object] = lambda what: None):
        super().__init__()
        self._of_dynamo, self._of_triton, self._told = dynamo, triton, told
        self._done, self._since, self._depth = 0.0, 0.0, 0

    def __enter__(self):
        if self._of_dynamo:
            self.enter_context(dynamo_hooks(lambda: self._begin(TORCH_COMPILE), self._end))
        if self._of_triton:
            self.enter_context(triton_hooks(self._begin, self._end))
        return super().__enter__()

    @property
    def seconds(self) -> float:
        return self._done + (time.perf_counter() - self._since if self._depth else 0.0)

    def _begin(self, what: str) -> None:
        self._depth += 1
        if self._depth == 1:  # what torch.compile compiles kernels for is its own
            self._since = time.perf_counter()
            self._told(what)

    def _end(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._done += time.perf_counter() - self._since
