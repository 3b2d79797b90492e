"""Write a Hugging Face checkpoint folder: the inverse of checkpoints.load, packed weights as they came.

By transformers' names, experts fused; or by those of published files, a tensor an expert.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sparse_attn.checkpoints.files import WEIGHTS, stale_files
from sparse_attn.checkpoints.folder import SCALE_SUFFIX
from sparse_attn.checkpoints.formats import EXPERTS, Names
from sparse_attn.checkpoints.names import PREDICTED, Spelling, kind_of, spelling_of
from sparse_attn.checkpoints.quantisation import Quantisation, quantisation_config
from sparse_attn.files import naming, replacing
from sparse_attn.framework import checks
from sparse_attn.models.params import INTEGER_NAMES, NARROW, param_dtype
from sparse_attn.models.shapes import Shapes, param_shapes, prediction_shapes
from sparse_attn.spec import CompressedSpec, Spec, to_hf_config
from sparse_attn.weight_layout import (
    PackedWeight,
    Weight,
    WeightLayout,
    parse_weight_layout,
    weight_entry,
    weight_rows,
    weight_shape,
)

NAMES = ("transformers", "published")


def save(
    folder: str | Path,
    spec: Spec | CompressedSpec,
    params: Mapping[str, Weight],
    dtype: torch.dtype = torch.bfloat16,
    *,
    names: str = "transformers",
) -> int:
    """Write config.json and model.safetensors into ``folder``, which is made where it is missing.

    Both files are replaced or neither is: where writing fails, the old checkpoint stays. The index and the shards of an
    old checkpoint are removed. Other files stay.

    Args:
        folder: of the checkpoint.
        spec: of the model.
        params: the forward's weights, and those of multi-token prediction if they are there; rope tables among them are
            left out. Codes and scales of packed weights are written as they are, and the config says what they mean.
        dtype: of the other weights, kv_b among them, but for those the forward keeps in fp32.
        names: "transformers" (experts fused) or "published" (a tensor an expert; DeepSeek-V4 by DeepSeek's names).

    Returns:
        The bytes of the weights.

    Raises:
        ValueError: names a weight that is missing or misshaped, or the part of the spec that no config.json can
            express.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("writing a checkpoint needs safetensors: pip install 'sparse_attn[models]'") from error
    checks.check_choice("names", names, NAMES)
    config = to_hf_config(spec) | {"dtype": str(dtype).removeprefix("torch.")} | _said(spec, params)
    tensors = checkpoint_tensors(spec, params, dtype, names)
    folder = Path(folder)
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / WEIGHTS
    try:
        # Weights first: whoever reads meanwhile finds no new config beside old weights.
        with replacing([weights, folder / "config.json"], removing=stale_files(folder)) as (fresh, fresh_config):
            try:
                save_file(tensors, fresh, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{weights}: {error}") from error
            with naming(folder / "config.json"):
                fresh_config.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except BaseException:
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    return sum(value.numel() * value.itemsize for value in tensors.values())


def checkpoint_tensors(
    spec: Spec | CompressedSpec, params: Mapping[str, Weight], dtype: torch.dtype, names: str = "transformers"
) -> dict[str, torch.Tensor]:
    """The weights on the CPU, by the names that checkpoints.load reads them by."""
    fused, tensors = names == "transformers", {}
    spelling, shapes = _needed(spec, params)
    block, short = _e4m3_block(params), not fused and _has_short_scales(spec, params)
    for name, shape in shapes.items():
        if name not in params:
            raise ValueError(f"weight {name}: missing")
        weight, kind = params[name], kind_of(name)
        if weight_shape(weight) != shape:
            raise ValueError(f"weight {name}: got shape {list(weight_shape(weight))}, allowed: {list(shape)}")
        if kind == "attn.w_uv":  # kv_b holds both and was written with w_uk
            continue
        sources = spelling.sources(name, Names(fused))
        if isinstance(weight, PackedWeight):
            each = spelling.source_shape(name, shape, sources)
            for source, part in zip(sources, parts_of(weight, each)):
                codes, scales = _packed(name, part, block[0])
                scale = source.removesuffix("weight") + "scale" if short else source + SCALE_SUFFIX
                tensors |= {source: codes, scale: scales}
            continue
        stored = torch.int64 if name.endswith(INTEGER_NAMES) else param_dtype(name, dtype, weight.dtype)
        value = weight.detach().to("cpu", stored)
        if kind == "attn.w_uk":
            other = params[name.removesuffix("w_uk") + "w_uv"]
            assert isinstance(other, torch.Tensor)
            value = torch.cat([value, other.detach().to("cpu", stored).transpose(1, 2)], dim=1)
        if not fused and name.endswith(NARROW) and torch.equal(value.to(dtype).to(stored), value):
            value = value.to(dtype)
        if value.dim() == 3 and not (fused and kind in EXPERTS):
            value = value.flatten(0, 1)
        for source, part in zip(sources, value.chunk(len(sources))):
            tensors[source] = part.contiguous().clone()
    tensors |= _no_shared_experts(spec, dtype)
    return tensors if fused else {spelling.published(source): value for source, value in tensors.items()}


def _needed(spec: Spec | CompressedSpec, params: Mapping[str, Weight]) -> tuple[Spelling, Shapes]:
    """How the weights are spelt, and the shapes of all there have to be."""
    layers = {int(name.split(".")[1]) for name in params if name.startswith("mtp.")}
    predicted = max(layers, default=-1) + 1
    return spelling_of(spec, predicted), param_shapes(spec) | prediction_shapes(spec, predicted)


def _layouts(params: Mapping[str, Weight], experts: bool | None = None) -> set[WeightLayout]:
    """Those of the packed weights. experts: of routed experts alone, or of all others; None: of both."""
    return {
        parse_weight_layout(weight.layout) for name, weight in params.items()
        if isinstance(weight, PackedWeight) and experts in (None, name.endswith(EXPERTS))
    }  # fmt: skip


def _e4m3_block(params: Mapping[str, Weight]) -> tuple[int, int]:
    """The block of all e4m3 weights in the files: the highest of those that are held, because parts that end inside of
    a block are held in lower ones. ValueError where there are blocks of several widths."""
    blocks = {layout.block for layout in _layouts(params) if layout.codes == "e4m3"} or {Quantisation().block}
    if len({columns for _, columns in blocks}) > 1:
        raise ValueError(f"params: got e4m3 weights in blocks {sorted(blocks)}, allowed: one width of blocks")
    return max(blocks)


def _said(spec: Spec | CompressedSpec, params: Mapping[str, Weight]) -> dict[str, Any]:
    """What the config says of packed weights and of multi-token prediction."""
    layouts, experts = _layouts(params), {layout.codes for layout in _layouts(params, experts=True)}
    predicted = _needed(spec, params)[0].predicted
    said: dict[str, Any] = {PREDICTED: predicted} if predicted else {}
    if not layouts:
        return said
    compressed = isinstance(spec, CompressedSpec)
    expert_dtype = None
    if len(experts) == 1 and (compressed or experts == {"e2m1"}):
        expert_dtype = "fp4" if experts == {"e2m1"} else "fp8"
    powers = not compressed or all(layout.scale == "e8m0" for layout in layouts)
    said |= quantisation_config(_e4m3_block(params), e8m0=powers, expert_dtype=expert_dtype)
    if not compressed:
        said["quantization_config"]["modules_to_not_convert"] = ["kv_b_proj"]  # which the forward holds expanded
    return said


def parts_of(weight: PackedWeight, each: tuple[int, ...]) -> Iterator[PackedWeight]:
    """``weight`` in parts of shape ``each``, along its rows, as views."""
    shape = weight_shape(weight)
    if len(each) == len(shape) and each[-2] == shape[-2]:
        yield weight
        return
    if each[-2] != shape[-2]:  # parts of an entry, or several entries: the blocks of all of them follow each other
        weight = PackedWeight(weight.codes.flatten(0, -2), weight.scales.flatten(0, -2), weight.layout)
        entries = [weight_rows(weight, at, at + each[-2]) for at in range(0, weight_shape(weight)[-2], each[-2])]
    else:
        entries = [weight_entry(weight, at) for at in range(shape[0])]
    for entry in entries:
        assert isinstance(entry, PackedWeight)
        yield entry


def _has_short_scales(spec: Spec | CompressedSpec, params: Mapping[str, Weight]) -> bool:
    """Whether published files call a scale ".scale", as DeepSeek-V4's do; not where they have been packed again, to fp8
    experts with e8m0 scales."""
    again = any(layout.codes == "e4m3" and layout.scale == "e8m0" for layout in _layouts(params, experts=True))
    return isinstance(spec, CompressedSpec) and not again


def _packed(name: str, part: PackedWeight, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a packed weight as files have them."""
    layout = parse_weight_layout(part.layout)
    scales = part.scales if layout.codes == "e2m1" else in_blocks(name, part, rows)
    codes, scales = (value.detach().to("cpu").contiguous().clone() for value in (part.codes, scales))
    return (
        codes.view(torch.int8) if layout.codes == "e2m1" else codes,
        scales.view(torch.float8_e8m0fnu) if layout.scale == "e8m0" else scales,
    )


def in_blocks(name: str, weight: PackedWeight, rows: int) -> torch.Tensor:
    """The scales of ``weight`` in blocks of ``rows`` rows that begin with it."""
    layout = parse_weight_layout(weight.layout)
    if layout.block[0] == rows and not layout.first_row:
        return weight.scales
    count = weight_shape(weight)[-2]
    at = (torch.arange(count, device=weight.scales.device) + layout.first_row) // layout.block[0]
    of_row = weight.scales[..., at, :]
    found = of_row[..., ::rows, :]
    if not torch.equal(found.repeat_interleave(rows, -2)[..., :count, :], of_row):
        raise ValueError(
            f"weight {name}: got scales that differ within {rows} rows, the blocks of other weights, allowed: one a "
            "block; under published names gate and up have blocks of their own"
        )
    return found


def _no_shared_experts(spec: Spec | CompressedSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What transformers reads where there are no shared experts: weights without elements."""
    if isinstance(spec, CompressedSpec) or spec.moe.num_shared:
        return {}
    shapes = {"gate": (0, spec.hidden_size), "up": (0, spec.hidden_size), "down": (spec.hidden_size, 0)}
    return {
        f"model.layers.{layer}.mlp.shared_experts.{part}_proj.weight": torch.empty(shape, dtype=dtype, device="cpu")
        for layer, routed in enumerate(spec.moe_layers) if routed
        for part, shape in shapes.items()
    }  # fmt: skip
