"""What is written of rows of a decode loop while the device lags behind: it reads what was noted, however late."""

from __future__ import annotations

import contextlib
import ctypes
import random
from array import array
from collections import deque
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from support.pretended_gpu import DEVICE, OnGpu, pretended_gpu

from sparse_attn.framework.torch_private import EagerDispatchMode, occupy
from sparse_attn.generation.row_settings import MAX_BUFFERS, MAX_COPIES, MAX_FORMS, RowEdits, rows_of

pretending = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
ROWS = 24


class Lagging(EagerDispatchMode):
    """A device that copies and fills when it is told to, in order. pinned: pieces of memory that were asked for on the
    host."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[list[tuple[torch.Tensor, torch.Tensor]]] = deque()  # targets and what is copied there
        self.done = self.pinned = self.launched = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        pairs = {
            "copy_": lambda target, source, _=False: [(target, source)],
            "_foreach_copy_": lambda targets, sources, _=False: list(zip(targets, sources)),
            "fill_": lambda target, value: [(target, torch.full_like(target, value))],
        }
        if name not in pairs:
            return func(*args, **(kwargs or {}))
        self.queue.append(pairs[name](*args))
        self.launched += name == "_foreach_copy_" and isinstance(args[1][0], OnGpu)
        return None if name == "_foreach_copy_" else args[0]

    def run(self, count: int = 2**31) -> None:
        for _ in range(min(count, len(self.queue))):
            for target, source in self.queue.popleft():
                ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
            self.done += 1

    def event(self) -> mock.Mock:
        """Passed once all has run that was given before it was recorded."""
        self.pinned += 1  # each piece has one
        found = mock.Mock(at=0)
        found.record.side_effect = lambda _: setattr(found, "at", self.done + len(self.queue))
        found.query.side_effect = lambda: self.done >= found.at
        return found


@contextlib.contextmanager
def lagging() -> Iterator[Lagging]:
    device = Lagging()
    with pretended_gpu(), mock.patch.object(torch.cuda, "Event", device.event), device:
        yield device


class Loop:
    """Tensors of whom rows are set, and what was set last."""

    def __init__(self, device: torch.device = DEVICE) -> None:
        self.edits = RowEdits(device, contextlib.nullcontext)
        self.held = [torch.zeros(ROWS, width, dtype=torch.int32, device=device) for width in (3, 1)]
        self._rows = [rows_of(value) for value in self.held]
        self.wanted = [value.tolist() for value in self.held]

    def note(self, which: int, row: int, word: int) -> None:
        target = self._rows[which][row]
        words = self.wanted[which][row] = [word + place for place in range(len(target))]
        self.edits[str(which), row] = (target,), (len(words),), array("i", words).tobytes()

    def holds_what_was_set(self) -> bool:
        return [torch.Tensor.tolist(value) for value in self.held] == self.wanted


@pretending
def test_memory_is_used_again_only_once_it_was_read():
    with lagging() as device:
        loop = Loop()
        for turn in range(3 * MAX_BUFFERS):
            loop.note(0, turn % ROWS, turn)
            loop.edits.write()
        assert device.pinned == 3 * MAX_BUFFERS and not loop.held[0].any()
        device.run()
        assert loop.holds_what_was_set()
        for turn in range(MAX_BUFFERS):  # what is kept was read
            loop.note(0, turn, -turn)
            loop.edits.write()
        assert device.pinned == 3 * MAX_BUFFERS
        loop.note(0, ROWS - 1, 7)
        loop.edits.write()
        assert device.pinned == 3 * MAX_BUFFERS + 1  # and no more is kept
        device.run()
        assert loop.holds_what_was_set()


@pretending
@pytest.mark.parametrize(("rows", "given"), [(1, 1), (MAX_COPIES, 1), (MAX_COPIES + 1, 2)])
def test_few_tensors_are_copied_to_and_many_are_launched(rows, given):
    with lagging() as device:
        loop = Loop()
        for row in range(rows):
            loop.note(0, row, row << 4)
        loop.edits.write()
        assert len(device.queue) == given and device.launched == given - 1
        device.run()
        assert loop.holds_what_was_set()


@pretending
@pytest.mark.parametrize("seed", range(4))
def test_what_was_noted_arrives_however_late(seed):
    """Of two loops, in forms of one row to many and more forms than are kept."""
    draw = random.Random(seed)
    with lagging() as device:
        loops = [Loop(), Loop()]
        for turn in range(300):
            loop = draw.choice(loops)
            for row in draw.sample(range(ROWS), draw.choice((1, 1, 2, 3, draw.randrange(1, ROWS)))):
                loop.note(draw.randrange(2), row, turn << 4)
            loop.edits.write()
            assert not loop.edits
            if draw.random() < 0.4:
                device.run(draw.randrange(12))
        device.run()
        assert all(loop.holds_what_was_set() for loop in loops)


def test_on_a_cpu_nothing_is_pinned():
    draw = random.Random(0)
    loop = Loop(torch.device("cpu"))
    with mock.patch.object(torch.cuda, "Event", side_effect=AssertionError):
        for turn in range(3 * MAX_FORMS):
            for row in draw.sample(range(ROWS), draw.randrange(1, ROWS)):
                loop.note(draw.randrange(2), row, turn << 4)
            loop.edits.write()
            assert loop.holds_what_was_set()


@pytest.mark.gpu
def test_what_was_noted_arrives_behind_a_busy_gpu():
    """Of one row, which is copied, and of all, which are launched. Nobody waits, once there is memory for it."""
    loop = Loop(torch.device("cuda", 0))
    for again in (False, True):
        for busy in (False, True):  # a kernel's first launch loads it, and loading waits for what runs
            if busy:
                occupy(2_000_000_000)
            end = torch.cuda.current_stream().record_event()
            for turn in range(2 * MAX_BUFFERS if busy else 2):
                for row in range(ROWS if turn % 2 else 1):
                    loop.note(0, (row + turn) % ROWS, turn << 4)
                loop.edits.write()
            assert not (again and busy and end.query())
            torch.cuda.synchronize()
            assert loop.holds_what_was_set()
