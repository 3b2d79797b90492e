"""Kernels are the compiler's language, not Python's: tl.constexpr annotates values, static_range is no iterator, and
a launch takes what no signature names. So all of Triton is Any to a type checker; the compiler checks kernels."""

from typing import Any

def __getattr__(name: str) -> Any: ...
