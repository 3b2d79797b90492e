"""What arguments of the command line mean, where several commands take them."""

from __future__ import annotations

import argparse
from typing import NoReturn

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def device_of(name: str | None) -> torch.device:
    """"cpu", "cuda", or None for cuda where there is one."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("--device: got 'cuda', which torch finds none of here, allowed: 'cpu'")
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def positive(given: str) -> int:
    """An integer of at least 1."""
    value = int(given) if given.isdecimal() else 0
    if value < 1:
        refuse(f"got {given!r}, allowed: an integer of at least 1")
    return value


def refuse(message: str) -> NoReturn:
    raise argparse.ArgumentTypeError(message)
