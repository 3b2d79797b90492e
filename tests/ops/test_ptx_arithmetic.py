"""PTX instructions that would give another number if a part of their name were overlooked."""

import numpy as np
import pytest
from support.ptx.arithmetic import compute


@pytest.mark.parametrize("operation, a, b, want", [
    ("mul.hi.u32", 0xFFFF_FFFF, 0xFFFF_FFFF, 0xFFFF_FFFE),
    ("mul.hi.s32", 0xFFFF_FFFF, 3, 0xFFFF_FFFF),
    ("mul.hi.s32", 0x4000_0000, 12, 3),
    ("mul.lo.s32", 0x4000_0001, 4, 4),
    ("mul.wide.u32", 0xFFFF_FFFF, 0xFFFF_FFFF, 0xFFFF_FFFE_0000_0001),
])  # fmt: skip
def test_multiplication(operation, a, b, want):
    lanes = [np.full(32, value, np.uint64) for value in (a, b)]
    assert (compute(tuple(operation.split(".")), lanes) == np.uint64(want)).all()


def test_what_it_does_not_know():
    lanes = [np.ones(32, np.uint64)] * 3
    for operation in ("mul.hi.u64", "mad.hi.s32"):
        with pytest.raises(KeyError, match=operation):
            compute(tuple(operation.split(".")), lanes)
