"""Checkpoints of random weights in exactly the forms that are published: names, dtypes, shapes, scales, shards.

Codes are random bytes. Scales give every weight unit gain, as models.params draws it. A tensor depends on the seed and
its name alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from sparse_attn.checkpoints.formats import (
    Entry,
    Form,
    dtype_of,
    form_of,
    layout_of,
    nbytes_of,
    predicted_of,
    said_of,
    scale_name,
    shards_of,
    write_shards,
)
from sparse_attn.models.params import INTEGER_NAMES
from sparse_attn.spec import CompressedSpec, Spec, to_hf_config
from sparse_attn.weight_layout import E2M1_VALUES, PackedWeight, WeightLayout


def write_published(
    folder: str | Path, spec: Spec | CompressedSpec, form: str, seed: int = 0,
    progress: Callable[[int, int], object] = lambda nbytes, total: None,
) -> int:  # fmt: skip
    """Write random weights of ``spec`` into ``folder``, which must be empty or missing; a shard per layer.

    Args:
        folder: of the checkpoint.
        spec: of the model.
        form: see checkpoints.convert.convert.
        seed: of the weights.
        progress: is told the bytes of every tensor once it is drawn, and of all.

    Returns:
        The bytes of all.

    Raises:
        ValueError: a form that checkpoints of the architecture do not have.
        OSError: the disk has no room.
    """
    made = form_of(spec, form)
    predicted = predicted_of(made)
    return write_shards(
        Path(folder), shards_of(spec, made, predicted), made, to_hf_config(spec) | said_of(spec, made, predicted),
        lambda entry: _draw(entry, made, spec, seed), progress,
    )  # fmt: skip


def published_bytes(spec: Spec | CompressedSpec, form: str) -> int:
    """Bytes of the weights that write_published writes."""
    made = form_of(spec, form)
    return sum(nbytes_of(entry, made) for shard in shards_of(spec, made, predicted_of(made)) for entry in shard)


def _draw(entry: Entry, form: Form, spec: Spec | CompressedSpec, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of an entry by their names."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed}/{entry.name}".encode()))
    layout = layout_of(entry.kind, form)
    if layout is not None:
        codes, scales, _ = random_packed_weight(entry.shape, layout, generator)
        if layout.codes == "e2m1":
            codes = codes.view(torch.int8)
        if layout.scale == "e8m0":
            scales = scales.view(torch.float8_e8m0fnu)
        return {entry.name: codes, scale_name(entry, form): scales}
    if entry.kind.endswith(INTEGER_NAMES):
        return {
            entry.name: torch.randint(
                spec.moe.num_experts, entry.shape, dtype=torch.int64, device="cpu", generator=generator
            )
        }
    noise = 2 * torch.rand(entry.shape, dtype=torch.float32, device="cpu", generator=generator) - 1
    if entry.kind.endswith(("norm", ".scale")):
        noise = 1 + 0.1 * noise
    elif entry.kind.endswith(("bias", ".base")):
        noise = 0.1 * noise
    elif entry.kind != "embed" and not entry.kind.endswith(".sink"):
        noise = noise * (3 / entry.shape[-1]) ** 0.5
    return {entry.name: noise.to(dtype_of(entry))}


def random_packed_weight(shape: tuple[int, ...], layout: WeightLayout, generator: torch.Generator) -> PackedWeight:
    """A weight of ``shape`` on the generator's device. Codes are random bytes, none NaN; scales give unit gain."""
    *leading, rows, columns = shape
    device = generator.device
    if layout.codes == "e2m1":
        codes = _random_bytes((*leading, rows, columns // 2), generator)
        values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device="cpu")
    else:
        codes = _random_bytes(shape, generator)
        for band in codes.flatten().split(1 << 26):
            band.masked_fill_((band & 127) == 127, 126)  # no NaN
        codes = codes.view(torch.float8_e4m3fn)
        values = torch.arange(127, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
    usual = math.log2((1 / columns) ** 0.5 / values.square().mean().sqrt().item())
    grid = (*leading, *layout.grid(rows, columns))
    exponents = usual + torch.rand(grid, dtype=torch.float32, device=device, generator=generator) - 0.5
    scales = torch.exp2(exponents) if layout.scale == "fp32" else (exponents.round() + 127).to(torch.uint8)
    return PackedWeight(codes, scales, layout.name)


def _random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Eight at a time, which on a CPU takes a quarter of the time."""
    count, device = math.prod(shape), generator.device
    words = torch.empty(-(-count // 8), dtype=torch.int64, device=device).random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:count].view(shape)
