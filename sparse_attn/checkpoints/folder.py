"""Tensors of a checkpoint folder by the names they are asked for; quantised weights in their layouts.

The format of a weight follows from its dtype, its shape, the dtype and shape of its scale, and the config together.
What disagrees is an error that names the weight.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import torch

from sparse_attn.checkpoints.files import offsets_of, tensors_of
from sparse_attn.checkpoints.quantisation import Quantisation
from sparse_attn.weight_layout import PackedWeight, WeightLayout, packed_weight

SCALE_SUFFIX = "_scale_inv"
_WIDE = {"F64", "F32", "F16", "BF16"}
_FP8 = "F8_E4M3"
_SCALES = {"F32": "fp32", "F16": "fp32", "BF16": "fp32", "F8_E8M0": "e8m0"}  # fp16 and bf16 are widened, exactly
_INTEGERS = {"I64", "I32"}
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}  # of a value; others that are read take one
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FP4_BYTES = {"I8", "U8"}  # what files call two fp4 values in a byte
_MXFP4 = WeightLayout("e2m1", (1, 32), "e8m0")
_UNSAID = Quantisation()
_ALLOWED = "bf16, fp16, fp32, F8_E4M3 with block scales, or experts in MXFP4"


class Checkpoint:
    """Tensors of a folder by name, read when asked for.

    quantisation: what the config says of quantised weights. rename: from a name in the files to the one it is asked for
    by.
    """

    def __init__(self, folder: Path, quantisation: Quantisation = _UNSAID, rename: Callable[[str], str] = str):
        self.folder, self.quantisation = folder, quantisation
        self._home = {}
        self._headers: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._mapped: dict[Path, tuple[int, int]] = {}  # address and bytes of a file in memory
        self._read: collections.deque[Path] = collections.deque(maxlen=2)  # files read last: of a weight and its scales
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

    def nbytes(self, name: str) -> int:
        """Bytes of ``name`` in its file, and of its scales."""
        names = [name, name + SCALE_SUFFIX] if name + SCALE_SUFFIX in self else [name]
        headers = map(self._header, names)
        return sum(_BYTES.get(dtype, 1) * math.prod(shape) for dtype, shape in headers)

    def layout(self, name: str, shape: tuple[int, ...], *, integers: bool = False) -> WeightLayout | None:
        """The layout of ``name``, a weight of ``shape``; None where it holds plain values. Reads headers alone.

        ValueError unless it is there in a form that is read, and dtype, shape, scale and config agree on it.
        """
        if name not in self._home:
            raise ValueError(f"weight {name}: missing")
        dtype, found = self._header(name)
        if integers and dtype not in _INTEGERS:
            self._refuse(name, dtype, "int64 or int32")
        layout = None if integers else self._layout(name, shape)
        if layout is None and found != shape:
            self._refuse(name, f"shape {list(found)}", str(list(shape)))
        return layout

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of ``name``, None where it is not one of plain floating point."""
        return _DTYPES.get(self._header(name)[0])

    def values(self, name: str) -> torch.Tensor:
        """The tensor called ``name`` as it lies in its file, a view of mapped memory."""
        return self._get(name)

    def place(self, part: torch.Tensor) -> tuple[Path, int] | None:
        """The file and the first byte there of a contiguous part of what was read last; None for any other tensor."""
        for path in self._read:
            address, size = self._mapped[path]
            first = part.data_ptr() - address
            if part.is_contiguous() and 0 <= first and first + part.nbytes <= size:
                return path, first
        return None

    def packed(self, name: str, layout: WeightLayout) -> PackedWeight:
        """The weight called ``name`` as it lies in its file; scales in fp16 and bf16 are widened. ValueError for a
        negative scale, which no quantisation gives; zero is that of a block of zeros. NaN and infinite ones are left to
        whoever looks at the values."""
        codes, scales = self._get(name), self._get(name + SCALE_SUFFIX)
        if layout.scale == "fp32" and scales.numel() and -math.inf < scales.amin().item() < 0:
            self._refuse(name + SCALE_SUFFIX, "a negative scale", "at least 0")
        if layout.codes == "e2m1":
            codes = codes.view(torch.uint8)
        return packed_weight(codes, scales.view(torch.uint8) if layout.scale == "e8m0" else scales.float(), layout)

    def _layout(self, name: str, shape: tuple[int, ...]) -> WeightLayout | None:
        """The layout of a weight of ``shape``, None for plain values; ValueError where nothing fits all that is known
        of it."""
        scale = name + SCALE_SUFFIX
        dtype, found = self._header(name)
        scale_dtype, grid = self._header(scale) if scale in self else ("", ())
        if dtype in _FP4_BYTES and found and scale_dtype and (*found[:-1], 2 * found[-1]) == shape:
            layout, what = _MXFP4, f"MXFP4 values ({dtype}, two to a byte)"
            if scale_dtype == _FP8:
                self._refuse(name, f"NVFP4 ({dtype}, two values to a byte, scales in {scale_dtype})", _ALLOWED)
            self._check_experts(name, what, "fp4")
            if scale_dtype != "F8_E8M0":
                self._refuse(scale, f"{scale_dtype} beside {what}", "F8_E8M0")
        elif dtype in _WIDE:
            if scale_dtype:
                raise ValueError(f"weight {scale}: extra, {name} is {dtype} and takes no scale; in {self.file(scale)}")
            self._check_experts(name, f"{dtype} values", None)
            return None
        elif dtype != _FP8:
            self._refuse(name, dtype, _ALLOWED)
        elif not scale_dtype or len(shape) < 2:
            self._refuse(name, f"{dtype} without a {scale}", _ALLOWED)
        elif found != shape:
            self._refuse(name, f"shape {list(found)}", str(list(shape)))
        else:
            self._check_experts(name, f"{dtype} values", "fp8")
            if scale_dtype not in _SCALES:
                self._refuse(scale, scale_dtype, "fp32, bf16, fp16 or e8m0")
            if scale_dtype == "F8_E8M0" and self.quantisation.scale_fmt == "float":
                self._refuse(scale, f"{scale_dtype} where the config's scale_fmt says 'float'", "fp32, bf16 or fp16")
            layout = WeightLayout("e4m3", self.quantisation.block, _SCALES[scale_dtype])
        wanted = (*shape[:-2], *layout.grid(*shape[-2:]))
        if grid != wanted:
            self._refuse(scale, f"shape {list(grid)}", str(list(wanted)))
        return layout

    def _check_experts(self, name: str, what: str, expert_dtype: str | None) -> None:
        """ValueError where the config says that experts are anything but ``expert_dtype``, and for fp4 elsewhere. None:
        they are not quantised."""
        said = self.quantisation.expert_dtype
        if ".experts." in name:
            if said not in (None, expert_dtype):
                self._refuse(name, f"{what} where the config's expert_dtype says {said!r}", f"experts in {said}")
        elif expert_dtype == "fp4":
            self._refuse(name, what, "MXFP4 for routed experts alone")

    def _header(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name not in self._headers:
            handle, stored, _ = self._home[name]
            header = handle.get_slice(stored)
            self._headers[name] = header.get_dtype(), tuple(header.get_shape())
        return self._headers[name]

    def _get(self, name: str) -> torch.Tensor:
        handle, stored, path = self._home[name]
        found = handle.get_tensor(stored)
        if found.numel() and path not in self._mapped:
            self._mapped[path] = found.data_ptr() - offsets_of(path)[stored], path.stat().st_size
        if found.numel() and path not in self._read:
            self._read.append(path)
        return found

    def _refuse(self, name: str, got: str, allowed: str) -> NoReturn:
        raise ValueError(f"weight {name}: got {got}, allowed: {allowed}; in {self.file(name)}")
