"""Tensors of a checkpoint folder by the names they are asked for; fp8 weights dequantised by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from sparse_attn.models.shards import tensors_of

SCALE_SUFFIX = "_scale_inv"
_WIDE = {"F64", "F32", "F16", "BF16"}
_FP8 = {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
_SCALES = {"F32", "F16", "BF16", "F8_E8M0"}
_INTEGERS = {"I64", "I32"}
_FP4_BYTES = {"I8", "U8", "F4"}  # what files call two fp4 values in a byte
_ALLOWED = "bf16, fp16, fp32, or fp8 with block scales"


class Checkpoint:
    """Tensors of a folder by name, read when asked for.

    block: elements of an fp8 weight under one scale. rename: from a name in the files to the one it is asked for by.
    """

    def __init__(self, folder: Path, block: tuple[int, int] = (128, 128), rename: Callable[[str], str] = str):
        self.folder, self.block = folder, block
        self._home = {}
        for stored, (handle, path) in tensors_of(folder).items():
            name = rename(stored)
            if name in self._home:
                raise ValueError(f"weight {name}: found twice, as {self._home[name][1]} and as {stored}, in {path}")
            self._home[name] = handle, stored, path

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def names(self) -> Iterable[str]:
        return self._home

    def file(self, name: str) -> Path:
        """The file that ``name`` is in."""
        return self._home[name][2]

    def is_empty(self, name: str) -> bool:
        """Whether ``name`` has no elements, as shared experts have where there are none."""
        return 0 in self._header(name)[1]

    def check(self, name: str, shape: tuple[int, ...], *, integers: bool = False) -> None:
        """ValueError unless ``name`` is there in a form that read() takes. Reads headers, no values."""
        if name not in self._home:
            raise ValueError(f"weight {name}: missing")
        dtype, found = self._header(name)
        scaled = name + SCALE_SUFFIX in self
        if dtype in _FP4_BYTES and found and (*found[:-1], 2 * found[-1]) == shape and scaled:
            self._refuse(name, f"MXFP4-packed values ({dtype}, two to a byte, a scale for every 32)", _ALLOWED)
        if len(shape) == 3 and dtype in _FP8:
            self._refuse(
                name,
                f"fused experts in {dtype}",
                "fused experts in bf16, fp16 or fp32, or fp8 with a tensor per expert",
            )
        if found != shape:
            self._refuse(name, f"shape {list(found)}", str(list(shape)))
        if integers:
            if dtype not in _INTEGERS:
                self._refuse(name, dtype, "int64 or int32")
        elif dtype in _WIDE:
            if scaled:
                raise ValueError(f"weight {name + SCALE_SUFFIX}: extra, {name} is {dtype} and takes no scale")
        elif dtype not in _FP8:
            self._refuse(name, dtype, _ALLOWED)
        elif not scaled or len(shape) != 2:
            self._refuse(name, f"{dtype} without a {name + SCALE_SUFFIX}", _ALLOWED)
        else:
            self._check_scale(name + SCALE_SUFFIX, shape)

    def read(self, name: str, shape: tuple[int, ...], *, integers: bool = False) -> torch.Tensor:
        """The tensor called ``name``; fp8 weights come back dequantised, in fp32."""
        self.check(name, shape, integers=integers)
        value = self._get(name)
        return dequantise(value, self._get(name + SCALE_SUFFIX), self.block) if value.dtype.itemsize == 1 else value

    def _check_scale(self, name: str, shape: tuple[int, ...]) -> None:
        dtype, found = self._header(name)
        grid = tuple(-(-size // step) for size, step in zip(shape, self.block))
        if found != grid:
            self._refuse(name, f"shape {list(found)}", str(list(grid)))
        if dtype not in _SCALES:
            self._refuse(name, dtype, "fp32, bf16, fp16 or e8m0")

    def _header(self, name: str) -> tuple[str, tuple[int, ...]]:
        handle, stored, _ = self._home[name]
        header = handle.get_slice(stored)
        return header.get_dtype(), tuple(header.get_shape())

    def _get(self, name: str) -> torch.Tensor:
        handle, stored, _ = self._home[name]
        return handle.get_tensor(stored)

    def _refuse(self, name: str, got: str, allowed: str) -> None:
        raise ValueError(f"weight {name}: got {got}, allowed: {allowed}; in {self.file(name)}")


def dequantise(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """fp8 [N, K] times its scale per block of ``block`` elements, in fp32."""
    rows = torch.arange(codes.shape[0], device=codes.device) // block[0]
    columns = torch.arange(codes.shape[1], device=codes.device) // block[1]
    return codes.float() * scale.float()[rows][:, columns]
