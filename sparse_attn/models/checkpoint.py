"""Tensors of a checkpoint folder: safetensors, one file or shards with an index; fp8 weights dequantised by block."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

SCALE_SUFFIX = "_scale_inv"


class Checkpoint:
    """Tensors of a folder by name, read when asked for.

    block: elements of an fp8 weight under one scale. rename: from a name in the files to the one it is asked for by.
    """

    def __init__(self, folder: Path, block: tuple[int, int] = (128, 128), rename: Callable[[str], str] = str):
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError("reading a checkpoint needs safetensors: pip install 'sparse_attn[models]'") from error
        self.block = block
        self._home = {}
        for path in self._files(folder):
            handle = safe_open(str(path), framework="pt", device="cpu")
            for stored in handle.keys():
                name = rename(stored)
                if name in self._home:
                    raise ValueError(f"weight {name}: found twice, the second time in {path.name}")
                self._home[name] = handle, stored

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        index = folder / "model.safetensors.index.json"
        if not index.exists():
            files = sorted(folder.glob("*.safetensors"))
            if not files:
                raise ValueError(f"checkpoint: {folder} holds no .safetensors file")
            return files
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        for path in files:
            if not path.exists():
                raise ValueError(f"checkpoint: {index.name} names {path.name}, which {folder} does not hold")
        return files

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def names(self) -> Iterable[str]:
        return self._home

    def _get(self, name: str) -> torch.Tensor:
        handle, stored = self._home[name]
        return handle.get_tensor(stored)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor called ``name``; fp8 weights come back dequantised, in fp32."""
        if name not in self._home:
            raise ValueError(f"weight {name}: missing")
        value = self._get(name)
        if tuple(value.shape) != tuple(shape):
            raise ValueError(f"weight {name}: got shape {list(value.shape)}, allowed: {list(shape)}")
        scale_name = name + SCALE_SUFFIX
        if value.dtype.itemsize > 1:
            if scale_name in self._home:
                raise ValueError(f"weight {scale_name}: extra, {name} is {value.dtype} and takes no scale")
            return value
        if scale_name not in self._home or value.dim() != 2:
            raise ValueError(
                f"weight {name}: got {value.dtype} without a {scale_name}, allowed: bf16, fp16, fp32, or fp8 "
                "with block scales"
            )
        grid = tuple(-(-size // step) for size, step in zip(shape, self.block))
        scale = self._get(scale_name)
        if tuple(scale.shape) != grid:
            raise ValueError(f"weight {scale_name}: got shape {list(scale.shape)}, allowed: {list(grid)}")
        return dequantise(value, scale, self.block)


def dequantise(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """fp8 [N, K] times its scale per block of ``block`` elements, in fp32."""
    rows = torch.arange(codes.shape[0]) // block[0]
    columns = torch.arange(codes.shape[1]) // block[1]
    return codes.float() * scale.float()[rows][:, columns]
