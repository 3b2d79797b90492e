"""Argument checks shared by every public function: they name the argument, what came and what is allowed.

They look at shapes, dtypes, strides and devices only, so they cost no synchronisation and vanish under torch.compile.
An eager call that looks like one that passed is not checked again (``Guard``).
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Collection, Sequence
from typing import Any

import torch

from sparse_attn.framework.torch_private import dispatch_modes

MAX_CAPACITY = 2**31 - 1  # indices that rows hold in all: int32 says where each starts


def check_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, allowed: a torch.Tensor")


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """TypeError unless ``tensor`` is a tensor of one of ``allowed``."""
    check_tensor(name, tensor)
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name}: got dtype {str(tensor.dtype).removeprefix('torch.')}, allowed: {names}")


def check_rank(name: str, tensor: torch.Tensor, *ranks: int) -> None:
    check_tensor(name, tensor)
    if tensor.dim() not in ranks:
        allowed = " or ".join(str(rank) for rank in ranks)
        raise ValueError(f"{name}: got {tensor.dim()} dimensions {tuple(tensor.shape)}, allowed: {allowed}")


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int | None], meaning: str) -> None:
    """ValueError unless the shape equals ``expected`` (None: any size); ``meaning`` spells it, as in "[tokens,
    heads]"."""
    check_rank(name, tensor, len(expected))
    for got, want in zip(tensor.shape, expected):
        if want is not None and got != want:
            wanted = ", ".join("any" if size is None else str(size) for size in expected)
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, allowed: {meaning} = [{wanted}]")


def check_bounds(name: str, tensor: torch.Tensor, parts: int, meaning: str) -> None:
    """ValueError unless ``tensor`` is [parts + 1]; ``meaning`` spells it."""
    check_rank(name, tensor, 1)
    # Cubed, or torch solves it: an export at two parts would take one size for the other plus one, which is 3 at least.
    if (tensor.shape[0] - parts) ** 3 != 1:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, allowed: {meaning} = [{parts + 1}]")


def leads(tensor: torch.Tensor, dim: int) -> bool:
    """Whether the stride of ``dim`` leads to an element. That of a dim of one does not, nor does one of an empty
    tensor: torch lets them be any. Asked of a wrong stride alone: the answer guards a compiled function by sizes."""
    return tensor.shape[dim] > 1 and tensor.numel() > 0


def check_unit_stride(name: str, tensor: torch.Tensor) -> None:
    """ValueError unless the last dimension is contiguous; other strides are free."""
    if tensor.dim() and tensor.stride(-1) != 1 and leads(tensor, -1):
        raise ValueError(f"{name}: got stride {tensor.stride(-1)} in the last dimension, allowed: 1")


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """ValueError unless all given tensors live on one device; the first one sets it."""
    home: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if home is None:
            home = (name, tensor.device)
        elif tensor.device != home[1]:
            raise ValueError(f"{name}: got device {tensor.device}, allowed: {home[1]} (that of {home[0]})")


def check_integer(name: str, value: object) -> None:
    """TypeError unless ``value`` is an integer; torch's and numpy's are, True and tensors are not."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, numbers.Integral)):
        raise TypeError(f"{name}: got {value!r}, allowed: an integer")


def check_flag(name: str, value: object) -> None:
    """TypeError unless ``value`` is True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{name}: got {value!r}, allowed: True or False")


def check_text(name: str, value: object) -> None:
    """TypeError unless ``value`` is a str."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: got {value!r}, allowed: a str")


def check_at_least(name: str, value: int, minimum: int) -> None:
    """TypeError unless ``value`` is an integer, ValueError below ``minimum``."""
    check_integer(name, value)
    if value < minimum:
        raise ValueError(f"{name}: got {value}, allowed: at least {minimum}")


def check_room(name: str, rows: int, width: int) -> None:
    if rows * width > MAX_CAPACITY:
        raise ValueError(f"{name}: got {rows} rows of up to {width} indices, allowed: fewer than 2**31 in all")


def check_choice(name: str, value: object, allowed: Collection[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, allowed: {', '.join(map(repr, allowed))}")


NUMBER = float, int, numbers.Real, torch.SymFloat  # an abstract class is slow to ask, so it comes behind two


def check_number(name: str, value: object) -> None:
    """TypeError unless ``value`` is a number; True and tensors are not."""
    if isinstance(value, bool) or not isinstance(value, NUMBER):
        raise TypeError(f"{name}: got {value!r}, allowed: a number")


def check_temperature(temperature: float) -> None:
    """TypeError unless it is a number, ValueError unless it is 0 or positive and finite."""
    check_number("temperature", temperature)
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: got {temperature}, allowed: 0 (greedy) or positive and finite")


def check_share(name: str, value: float) -> None:
    """TypeError unless it is a number, ValueError outside 0 to 1."""
    check_number(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: got {value}, allowed: 0 to 1")


def check_penalty(name: str, value: float, *, positive: bool) -> None:
    """TypeError unless it is a number, ValueError unless fp32 holds it as a finite number, above 0 if ``positive``."""
    check_number(name, value)
    least, most = 2.0**-126 if positive else -(2.0**127), 2.0**127
    if not least <= value <= most:
        raise ValueError(f"{name}: got {value}, allowed: {'positive' if positive else 'finite'} fp32 numbers")


def check_seed(name: str, seed: int) -> None:
    """TypeError unless it is an integer, ValueError unless it fits 64 bits with a sign."""
    check_integer(name, seed)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"{name}: got {seed}, allowed: a signed 64-bit integer")


class Guard:
    """Spares an eager call the checks that a call which looked the same has passed before:

        if new := _GUARD.new(x, start):
            check_dtype("x", x, FLOATS)
            _GUARD.passed(new)

    Two calls look the same where tensors agree in dtype, shape, strides, storage offset and device, all other
    arguments are equal and of one type, and grad mode is the same. It holds no tensor, and threads may share it.
    Whatever is traced is always checked; so are calls with tensors without strides, with subclasses of Tensor, and
    with values that may change or have no hash.
    """

    MOST = 64  # looks it remembers: call sites of a model times its kinds of steps

    def __init__(self):
        self._passed: set[tuple] = set()

    def new(self, *arguments: Any) -> tuple | None:
        """What a call looks like, for ``passed``; None where that has passed already."""
        if torch.compiler.is_compiling() or dispatch_modes():
            return UNKNOWN
        looks: list = [torch.is_grad_enabled()]
        waiting = list(arguments)
        for value in waiting:  # which grows
            kind = type(value)
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                if value.layout is not torch.strided:
                    return UNKNOWN
                looks += kind, value.dtype, value.shape, value.stride(), value.storage_offset(), value.device
            elif kind in VALUES or _is_value(kind):
                looks += kind, value
            elif isinstance(value, tuple):
                looks += kind, len(value)
                waiting += value
            else:
                return UNKNOWN
        found = tuple(looks)
        try:
            return None if found in self._passed else found
        except TypeError:  # a frozen value may hold what has no hash
            return UNKNOWN

    def passed(self, new: tuple) -> None:
        if new is UNKNOWN:
            return
        if len(self._passed) >= self.MOST:
            self._passed = set()
        self._passed.add(new)


UNKNOWN = ("unknown",)  # what a call looks like that is always checked
VALUES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


@functools.lru_cache
def _is_value(kind: type) -> bool:
    """Whether objects of this type never change and can be compared: frozen dataclasses without tensors."""
    frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # pyright: ignore
    return frozen and not any("Tensor" in str(field.type) for field in dataclasses.fields(kind))
