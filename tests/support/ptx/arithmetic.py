"""What PTX instructions compute, of 32 lanes at once. Registers are uint64, whatever their type; predicates 0 or 1."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import torch

Lanes = np.ndarray  # uint64 [32]
BITS32 = np.uint64(0xFFFFFFFF)
COMPARISONS = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
NUMPY = {"f32": np.float32, "s": {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}, "u": {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}}  # fmt: skip


def width(kind: str) -> int:
    return int(kind[1:])


def typed(lanes: Lanes, kind: str) -> np.ndarray:
    """As "f32", "s32", "u64", "b16", ..."""
    bits = width(kind)
    narrow = lanes if bits == 64 else (lanes & np.uint64((1 << bits) - 1)).astype(NUMPY["u"][bits])
    if kind == "f32":
        return narrow.view(np.float32)
    return narrow.view(NUMPY["s"][bits]) if kind[0] == "s" else narrow


def packed(values: np.ndarray, bits: int) -> Lanes:
    """Registers that hold ``values``, integers or fp32."""
    if values.dtype == np.float32:
        return values.view(np.uint32).astype(np.uint64)
    if values.dtype == np.uint64:
        return values
    wide = values.astype(np.int64)
    return wide.view(np.uint64) if bits == 64 else (wide & ((1 << bits) - 1)).astype(np.uint64)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """fp64 of integers whose low 16 bits are bf16."""
    return (bits.astype(np.uint64) << np.uint64(16) & BITS32).astype(np.uint32).view(np.float32).astype(np.float64)


def to_bf16(values: np.ndarray) -> Lanes:
    """The nearest, even of two."""
    rounded = torch.from_numpy(np.asarray(values, np.float64)).float().bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16).astype(np.uint64)


def compute(operation: tuple[str, ...], values: list[Lanes]) -> Lanes:
    """Of an instruction that only computes; KeyError where it is not known."""
    name, kind = operation[0], operation[-1]
    if kind == "pred":
        return _predicate(name, values)
    if name in SPECIAL:
        return SPECIAL[name](operation, values)
    if "wide" in operation:
        a, b = (typed(value, kind).astype(np.int64) for value in values[:2])
        return packed(a * b + (values[2].view(np.int64) if name == "mad" else 0), 64)
    bits = width(kind)
    if "hi" in operation:
        if (name, bits) != ("mul", 32):
            raise KeyError(".".join(operation))
        a, b = (typed(value, kind).astype(NUMPY[kind[0]][64]) for value in values)
        return packed(a * b >> 32, bits) & BITS32
    result = ARITHMETIC[name](*(typed(value, kind) for value in values))
    if "relu" in operation:
        result = np.maximum(result, 0)
    return packed(np.asarray(result), bits)


def _predicate(name: str, values: list[Lanes]) -> Lanes:
    bools = [value != 0 for value in values]
    result = {"and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": operator.invert, "mov": lambda x: x}
    return result[name](*bools).astype(np.uint64)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of fp32 as exactly as it holds the result; a GPU may be off by two units in the last place."""
    if a.dtype == np.float32:
        with np.errstate(all="ignore"):
            return a / b
    a, b = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
    return abs(a) // abs(b) * np.sign(a) * np.sign(b)


ARITHMETIC: dict[str, Callable] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mad": lambda a, b, c: a * b + c,
    "min": np.fmin, "max": np.fmax, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "not": operator.invert, "neg": operator.neg, "abs": np.abs, "div": _divide, "ex2": np.exp2,
    "rem": lambda a, b: a - _divide(a, b) * b,
}  # fmt: skip


def _shift(operation: tuple[str, ...], values: list[Lanes]) -> Lanes:
    kind = operation[-1]
    bits, by = width(kind), values[1] & BITS32
    value = typed(values[0], kind)
    if operation[0] == "shr" and kind[0] == "s":
        return packed(value >> np.minimum(by, np.uint64(bits - 1)).astype(value.dtype), bits)
    shift = np.left_shift if operation[0] == "shl" else np.right_shift
    wide = shift(packed(value, bits), np.minimum(by, np.uint64(63)))
    return packed(np.where(by >= bits, np.uint64(0), wide), bits) & np.uint64((1 << bits) - 1)


def _compare(operation: tuple[str, ...], values: list[Lanes]) -> Lanes:
    how, kind = operation[1], operation[-1]
    a, b = (typed(value, kind) for value in values[:2])
    if kind == "f32":
        ordered = ~(np.isnan(a) | np.isnan(b))
        if how in ("num", "nan"):
            result = ordered if how == "num" else ~ordered
        else:  # "ltu" holds of NaN, "lt" does not
            result = COMPARISONS[how[:2]](a, b) & ordered | (~ordered if how.endswith("u") else False)
    else:
        result = COMPARISONS[how](a, b)
    result = result.astype(np.uint64)
    return _predicate(operation[2], [result, values[2]]) if len(values) > 2 else result


def _permute(operation: tuple[str, ...], values: list[Lanes]) -> Lanes:
    """prmt: a byte for each of four selectors; of a selector's high bit, that byte's sign in every bit."""
    both = values[0] & BITS32 | (values[1] & BITS32) << np.uint64(32)
    result = np.zeros(32, np.uint64)
    for place in range(4):
        selector = values[2] >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> (selector & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
        result |= np.where(selector >> np.uint64(3), sign, byte) << np.uint64(8 * place)
    return result


def _logic(operation: tuple[str, ...], values: list[Lanes]) -> Lanes:
    """lop3: bit n of the table where a, b and c have the bits of n."""
    a, b, c, table = values
    result = np.zeros(32, np.uint64)
    for n in range(8):
        if int(table[0]) >> n & 1:
            result |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    return result & BITS32


def _extract(operation: tuple[str, ...], values: list[Lanes]) -> Lanes:
    """bfe: some bits of a word, with the sign of the highest as s32."""
    mask = (np.uint64(1) << values[2]) - np.uint64(1)
    field = (values[0] & BITS32) >> values[1] & mask
    if operation[-1] == "s32":
        field = np.where(field > mask >> np.uint64(1), field | ~mask, field) & BITS32
    return field


def _multiply_add(operation: tuple[str, ...], values: list[Lanes]) -> Lanes:
    if operation[-1] == "f32":
        a, b, c = (typed(value, "f32") for value in values)
        return packed((a.astype(np.float64) * b + c).astype(np.float32), 32)
    assert operation[-1] == "bf16x2", operation
    low, high = (
        to_bf16(a * b + c) for a, b, c in (map(from_bf16, values), (from_bf16(v >> np.uint64(16)) for v in values))
    )
    return high << np.uint64(16) | low


def _convert(operation: tuple[str, ...], values: list[Lanes]) -> Lanes:
    """Between integers; of fp32 to bf16."""
    if operation[-1] == "f32":
        assert operation[-2] in ("bf16", "bf16x2") and operation[1] == "rn", operation
        *high, low = (to_bf16(typed(value, "f32")) for value in values)
        return high[0] << np.uint64(16) | low if high else low
    bits = width(operation[-2])
    return packed(typed(values[0], operation[-1]).astype(np.int64), bits)


def _count_bits(operation: tuple[str, ...], values: list[Lanes]) -> Lanes:
    return np.array([int(value).bit_count() for value in values[0]], np.uint64)


def _highest_bit(operation: tuple[str, ...], values: list[Lanes]) -> Lanes:
    """bfind; of none -1."""
    return packed(np.array([int(value & BITS32).bit_length() - 1 for value in values[0]], np.int64), 32)


SPECIAL: dict[str, Callable[[tuple[str, ...], list[Lanes]], Lanes]] = {
    "shl": _shift, "shr": _shift, "setp": _compare, "prmt": _permute, "lop3": _logic, "bfe": _extract, "cvt": _convert,
    "popc": _count_bits, "bfind": _highest_bit, "selp": lambda _, values: np.where(values[2] != 0, values[0], values[1]),
    "cvta": lambda _, values: values[0], "fma": _multiply_add,
}  # fmt: skip
