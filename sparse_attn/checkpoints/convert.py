"""A checkpoint in another of the forms that are published.

Weights in bf16, fp16 or fp32 are quantised, which rounds. Weights that are quantised already are never rounded again:
codes and scales stay as they are, or become others of exactly the same values, or the conversion is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from sparse_attn.checkpoints.files import INDEX
from sparse_attn.checkpoints.formats import (
    Entry,
    Form,
    dtype_of,
    form_of,
    layout_of,
    said_of,
    scale_name,
    shards_of,
    write_shards,
)
from sparse_attn.checkpoints.load import DSPARK, Opened, open_checkpoint, readings_of
from sparse_attn.checkpoints.read import reading_of
from sparse_attn.checkpoints.save import in_blocks, parts_of
from sparse_attn.checkpoints.weights_to_device import fill, is_finite
from sparse_attn.fp8 import exponent_of, power_of
from sparse_attn.models.params import INTEGER_NAMES
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.weight_layout import (
    PackedWeight,
    Weight,
    WeightLayout,
    dequantise,
    packed_weight,
    parse_weight_layout,
    quantise,
    weight_entry,
    weight_shape,
)

_OF_THE_FORM = ("quantization_config", "expert_dtype", "torch_dtype")
_BESIDE = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*")  # what a folder holds beside weights


def convert(
    source: str | Path, folder: str | Path, form: str,
    progress: Callable[[int, int], object] = lambda nbytes, total: None,
) -> tuple[Spec | CompressedSpec, int]:  # fmt: skip
    """Write the checkpoint in ``source`` into ``folder``, empty or missing, in a form that write_published knows.

    A shard at a time; the folder is there whole or not at all. Tokenizer and other texts are copied. Layers of
    multi-token prediction come along, but for "fused", which has none; a DSpark drafter does not, a warning says so.

    Args:
        source: the checkpoint's folder.
        folder: of the new one.
        form: "published", "flash-base", "fp8-e8m0", "fused" or "bf16".
        progress: is told the bytes of every tensor once it is written, and of all.

    Returns:
        The spec and the bytes of the weights.

    Raises:
        ValueError: names a weight that the form cannot hold as it is.
    """
    source, folder = Path(source), Path(folder)
    opened = open_checkpoint(source, mtp=None)
    readings_of(opened, expand=True)  # finds what is missing, extra or in disagreement
    made = form_of(opened.spec, form)
    predicted = 0 if made.fused else opened.spelling.predicted
    config = {
        key: value for key, value in opened.config.items() if key not in _OF_THE_FORM and not key.startswith(DSPARK)
    }
    total = write_shards(
        folder, shards_of(opened.spec, made, predicted), made, config | said_of(opened.spec, made, predicted),
        _Converter(opened, made).tensors, progress, beside=lambda fresh: _copy_texts(source, fresh),
    )  # fmt: skip
    return opened.spec, total


class _Converter:
    """The tensors of every entry of a form, out of a checkpoint of any."""

    def __init__(self, opened: Opened, form: Form):
        self.opened, self.form = opened, form
        self._joined: tuple[str, Weight] | None = None  # the weight of the forward that was read last

    def tensors(self, entry: Entry) -> dict[str, torch.Tensor]:
        weight, layout = self._weight(entry), layout_of(entry.kind, self.form)
        if layout is None:
            values = dequantise(weight) if isinstance(weight, PackedWeight) else weight
            return {entry.name: values.to(dtype_of(entry)).contiguous()}
        codes, scales, _ = _each(weight, lambda one: _converted(entry.name, one, layout))
        return {
            entry.name: codes.view(torch.int8) if layout.codes == "e2m1" else codes,
            scale_name(entry, self.form): scales.view(torch.float8_e8m0fnu) if layout.scale == "e8m0" else scales,
        }

    def _weight(self, entry: Entry) -> Weight:
        """The entry's weight, as the source has it."""
        _, spec, checkpoint, spelling, shapes = self.opened
        sources, shape = spelling.sources(entry.param, checkpoint), shapes[entry.param]
        if spelling.source_shape(entry.param, shape, sources) == entry.shape:
            source = sources[entry.part]
            layout = checkpoint.layout(source, entry.shape, integers=entry.kind.endswith(INTEGER_NAMES))
            weight = checkpoint.values(source) if layout is None else checkpoint.packed(source, layout)
            if isinstance(weight, PackedWeight) and not is_finite(weight):
                raise ValueError(f"weight {source}: got values that are NaN or infinite; in {checkpoint.file(source)}")
            return weight
        if self._joined is None or self._joined[0] != entry.param:  # experts are fused here or there
            dtype = checkpoint.values(sources[0]).dtype
            reading = reading_of(entry.param, shape, spelling, checkpoint, expand=False)
            found = fill([reading], checkpoint, spec, device="cpu", dtype=dtype, told=lambda nbytes: None)
            self._joined = entry.param, found[0]
        weight = self._joined[1]
        if isinstance(weight, PackedWeight):
            return list(parts_of(weight, entry.shape))[entry.part]
        return weight.view(-1, *entry.shape)[entry.part]


def _each(weight: Weight, change: Callable[[Weight], PackedWeight]) -> PackedWeight:
    """``change`` of every matrix of ``weight``, one after the other."""
    if len(weight_shape(weight)) == 2:
        return change(weight)
    parts = [change(weight_entry(weight, at)) for at in range(weight_shape(weight)[0])]
    return PackedWeight(
        torch.stack([part.codes for part in parts]), torch.stack([part.scales for part in parts]), parts[0].layout
    )


def _converted(name: str, weight: Weight, layout: WeightLayout) -> PackedWeight:
    """A matrix in ``layout``: quantised where it is not, and never rounded where it is."""
    if not isinstance(weight, PackedWeight):
        try:
            return quantise(weight, layout)
        except ValueError as error:
            raise ValueError(f"weight {name}: {error}") from error
    have = parse_weight_layout(weight.layout)
    powers = have.scale == "e8m0" or _are_powers(weight.scales)
    if have.codes == layout.codes and have.block[1] == layout.block[1] and (powers or layout.scale == "fp32"):
        return packed_weight(weight.codes, _rescaled(in_blocks(name, weight, layout.block[0]), have, layout), layout)
    values = dequantise(weight)
    found = quantise(values, layout, powers=True)
    lost = int((dequantise(found) != values).sum())
    if lost or not powers:
        raise ValueError(
            f"weight {name}: got {have.name}, values that {layout.name} does not hold ({lost} of {values.numel()}), "
            "allowed: a form that holds them exactly, or bf16"
        )
    return found


def _are_powers(scales: torch.Tensor) -> bool:
    """Whether fp32 scales are normal powers of two: no sign and no mantissa."""
    bits = scales.view(torch.int32)
    return bool(((bits & ~0x7F800000) == 0).all() and (bits != 0).all())


def _rescaled(scales: torch.Tensor, have: WeightLayout, layout: WeightLayout) -> torch.Tensor:
    """The same scales as numbers or as bytes."""
    if have.scale == layout.scale:
        return scales
    return exponent_of(scales) if layout.scale == "e8m0" else power_of(scales)


def _copy_texts(source: Path, folder: Path) -> None:
    """Tokenizer, generation config and the like: what a folder holds beside weights and its config.json."""
    for path in sorted({path for pattern in _BESIDE for path in source.glob(pattern)}):
        if path.is_file() and path.name not in (INDEX, "config.json"):
            shutil.copyfile(path, folder / path.name)
