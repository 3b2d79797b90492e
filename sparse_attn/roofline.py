"""The two floors of a call: the bytes it must move over a GPU's bandwidth, its operations over the GPU's rate.

No implementation gets below the greater one. What a call must do is counted here, once: explain takes it from shapes,
the benchmarks from the data that they measure with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Gpu(NamedTuple):
    """name: torch's. copy: bytes/s; bf16, fp8: operations/s of the matrix unit, of dense operands summed in fp32; fp8
    is that of bf16 where the unit has none. source: where the numbers are from."""

    name: str
    target: str
    copy: float
    bf16: float
    fp8: float
    source: str

    @property
    def measured(self) -> bool:
        return self.source == MEASURED


MEASURED = "measured: a large copy, large matrix products"
# The first of a target is the card that stands for it where there is no GPU.
GPUS = (
    Gpu("NVIDIA A100-SXM4-80GB", "sm_80", 2.039e12, 312e12, 312e12, "NVIDIA A100 datasheet"),
    Gpu("NVIDIA A40", "sm_86", 0.696e12, 149.7e12, 149.7e12, "NVIDIA A40 datasheet"),
    Gpu("NVIDIA L40S", "sm_89", 0.864e12, 362e12, 733e12, "NVIDIA L40S datasheet"),
    Gpu("NVIDIA H200", "sm_90", 4.26e12, 805e12, 1531e12, MEASURED),
    Gpu("NVIDIA H100 80GB HBM3", "sm_90", 2.98e12, 784e12, 1487e12, MEASURED),
    Gpu("NVIDIA B200", "sm_100", 7.7e12, 2250e12, 4500e12, "NVIDIA HGX B200 datasheet"),
    Gpu("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "sm_120", 1.792e12, 503.8e12, 1007.6e12,
        "NVIDIA RTX Blackwell PRO architecture paper"),
    Gpu("AMD Instinct MI300X", "gfx942", 5.3e12, 1307.4e12, 2614.9e12, "AMD MI300X datasheet"),
    Gpu("AMD Instinct MI355X", "gfx950", 8e12, 2516.6e12, 5033.2e12, "AMD MI355X datasheet"),
)  # fmt: skip
CARDS: dict[str, Gpu] = dict(zip("a100 a40 l40s h200 h100 b200 rtx-pro-6000 mi300x mi355x".split(), GPUS))


class Link(NamedTuple):
    """What GPUs of a host send through. call_us: of a captured collective of few bytes. rate: bytes/s that a rank
    sends in one of many."""

    name: str
    call_us: float
    rate: float

    def us(self, calls: int, nbytes: float) -> float:
        """Microseconds of ``calls`` collectives, in which a rank sends ``nbytes``, where no rank waits for another."""
        return calls * self.call_us + 1e6 * nbytes / self.rate


LINK = Link("NVLink between two H200, measured: suite distributed_collectives", 11.5, 120e9)


def gpu_named(name: str) -> Gpu | None:
    """The GPU that torch calls ``name``."""
    return next((gpu for gpu in GPUS if gpu.name == name), None)


def gpu_of(target: str) -> Gpu | None:
    """The card that stands for a target."""
    return next((gpu for gpu in GPUS if gpu.target == target), None)


class Work(NamedTuple):
    """What no implementation of a call can leave out. fp8: whether fp8 operands are multiplied."""

    nbytes: float = 0.0
    operations: float = 0.0
    fp8: bool = False


class Floors(NamedTuple):
    """Microseconds on ``gpu``."""

    gpu: str
    bytes_us: float
    operations_us: float
    source: str


def floors(work: Work, gpu: Gpu) -> Floors:
    rate = gpu.fp8 if work.fp8 else gpu.bf16
    return Floors(gpu.name, 1e6 * work.nbytes / gpu.copy, 1e6 * work.operations / rate, gpu.source)


def attention(
    q: Sequence[int], d_v: int, pairs: int, key_bytes: int, itemsize: int = 2, *, listed: bool = True
) -> Work:
    """q: (..., heads, d_qk), of ``itemsize`` bytes a value as the output. pairs: of a row and a key, ``listed`` by an
    index each. key_bytes: of the keys that any row names."""
    *rows, heads, d_qk = q
    moved = itemsize * math.prod(rows) * heads * (d_qk + d_v) + 4 * pairs * listed
    return Work(moved + key_bytes, 2 * pairs * heads * (d_qk + d_v))


def scores(q: Sequence[int], pairs: int, key_bytes: int, itemsize: float = 1) -> Work:
    """q: (..., heads, dim), of ``itemsize`` bytes a value; 1 is fp8, less is MXFP4, multiplied as fp8. pairs: of a row
    and a key, each an fp32 score."""
    work = selected_scores(q, pairs, key_bytes, 0, itemsize)
    return work._replace(nbytes=work.nbytes + 4 * pairs)


def selected_scores(q: Sequence[int], pairs: int, key_bytes: int, indices: int, itemsize: float = 1) -> Work:
    """The same of scores that need not be stored, by which ``indices`` keys are selected in all."""
    *rows, heads, dim = q
    queries = math.prod(rows) * heads * (dim * itemsize + 4)  # and their weights
    return Work(queries + key_bytes + 4 * indices, 2 * pairs * heads * dim, itemsize <= 1)


def product(rows: int, columns: int, outputs: int, weight_bytes: int, itemsize: int = 2, fp8: bool = False) -> Work:
    """weight_bytes: of the weights that any row takes. itemsize: of a value of rows and outputs. fp8: whether rows are
    quantised."""
    return Work(itemsize * rows * (columns + outputs) + weight_bytes, 2 * rows * columns * outputs, fp8)


def selection(scores: int) -> Work:
    """scores: fp32, that compete."""
    return Work(4 * scores)
