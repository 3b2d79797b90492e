"""Checkpoints of random weights in exactly the forms that are published: names, dtypes, shapes, scales, shards.

Codes are random bytes. Scales give every weight unit gain, as models.params draws it. A tensor depends on the seed and
its name alone.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparse_attn.models.params import INTEGER_NAMES, param_dtype
from sparse_attn.models.quantisation import quantisation_config
from sparse_attn.models.shapes import param_shapes, prediction_shapes
from sparse_attn.models.shards import INDEX, WEIGHTS
from sparse_attn.models.spelling import PREDICTED, kind_of, spelling_of
from sparse_attn.spec import CompressedSpec, Spec, to_hf_config
from sparse_attn.weight_layout import E2M1_VALUES, WeightLayout

BLOCK = (128, 128)
_FP8_FP32, _FP8_E8M0 = WeightLayout("e4m3", BLOCK, "fp32"), WeightLayout("e4m3", BLOCK, "e8m0")
_MXFP4 = WeightLayout("e2m1", (1, 32), "e8m0")
_EXPERTS = ("moe.gate_up", "moe.down")
_LINEARS = (
    "attn.q_a", "attn.q_b", "attn.kv_a", "attn.w_uk", "attn.kv", "attn.o", "attn.o_a", "attn.o_b", "index.q_b",
    "index.k", "mlp.gate_up", "mlp.down", "moe.shared_gate_up", "moe.shared_down", "e_proj", "h_proj",
)  # fmt: skip
_BF16 = ("moe.gate", "index.weights")  # which the forward holds in fp32


class Form(NamedTuple):
    """How a checkpoint is written. linears, experts: layouts, None for bf16. suffix: of DeepSeek-V4's scales. fused:
    by transformers' names, experts in one tensor, without the layers of multi-token prediction."""

    linears: WeightLayout | None
    experts: WeightLayout | None
    suffix: str = "scale"
    fused: bool = False


_V4_FORMS = {
    "published": Form(_FP8_E8M0, _MXFP4),
    "flash-base": Form(_FP8_FP32, _FP8_FP32),
    "fp8-e8m0": Form(_FP8_E8M0, _FP8_E8M0, "weight_scale_inv"),
    "fused": Form(_FP8_E8M0, _MXFP4, fused=True),
    "bf16": Form(None, None),
}
_LATENT_FORMS = {
    "published": Form(_FP8_FP32, _FP8_FP32),
    "fp8-e8m0": Form(_FP8_E8M0, _FP8_E8M0),
    "fused": Form(_FP8_FP32, _FP8_FP32, fused=True),
    "bf16": Form(None, None),
}
FORMS = tuple(_V4_FORMS)


class Entry(NamedTuple):
    """A weight of the files. kind: which weight of the forward it is a part of."""

    name: str
    shape: tuple[int, ...]
    kind: str


def write_published(
    folder: str | Path, spec: Spec | CompressedSpec, form: str, seed: int = 0,
    progress: Callable[[int, int], object] = lambda nbytes, total: None,
) -> int:  # fmt: skip
    """Write random weights of ``spec`` into ``folder``, which must be empty or missing; a shard per layer.

    progress: is told the bytes of every tensor once it is drawn, and of all. Returns the bytes of all. ValueError for a
    form that checkpoints of the architecture do not have, and OSError where the disk has no room.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("writing a checkpoint needs safetensors: pip install 'sparse_attn[models]'") from error
    made, config, folder = _form(spec, form), to_hf_config(spec), Path(folder)
    shards, total = list(_shards(spec, made)), published_bytes(spec, form)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder: got {folder}, which holds files, allowed: an empty or a new one")
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < total:
        raise OSError(f"{folder}: {total:,} bytes of weights, and the disk has {free:,}")
    home = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for entry in shard:
            drawn = _draw(entry, made, spec, seed)
            tensors |= drawn
            progress(sum(value.nbytes for value in drawn.values()), total)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        home |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": home}, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config | _said(spec, made), indent=2) + "\n")
    return total


def published_bytes(spec: Spec | CompressedSpec, form: str) -> int:
    """Bytes of the weights that write_published writes."""
    made = _form(spec, form)
    return sum(_nbytes(entry, made) for shard in _shards(spec, made) for entry in shard)


def _form(spec: Spec | CompressedSpec, form: str) -> Form:
    forms = _V4_FORMS if isinstance(spec, CompressedSpec) else _LATENT_FORMS
    if form not in forms:
        raise ValueError(f"format: got {form!r}, allowed for {spec.name}: {', '.join(forms)}")
    return forms[form]


def first_layers(spec: Spec | CompressedSpec, layers: int) -> Spec | CompressedSpec:
    """``spec`` with its first ``layers`` alone."""
    if not 1 <= layers <= spec.num_layers:
        raise ValueError(f"layers: got {layers}, allowed: 1 to the {spec.num_layers} of {spec.name}")
    names = ("layer_kinds", "hash_layers") if isinstance(spec, CompressedSpec) else ("moe_layers", "index_layers")
    return replace(spec, num_layers=layers, **{name: getattr(spec, name)[:layers] for name in names})


def _said(spec: Spec | CompressedSpec, form: Form) -> dict[str, Any]:
    """What the config says of the form."""
    said: dict[str, Any] = {"dtype": "bfloat16", PREDICTED: 0 if form.fused else 1}
    if form.linears is None:
        return said
    compressed = isinstance(spec, CompressedSpec)
    expert_dtype = None if not compressed else "fp4" if form.experts == _MXFP4 else "fp8"
    e8m0 = not compressed or form.linears.scale == "e8m0"
    return said | quantisation_config(BLOCK, e8m0=e8m0, expert_dtype=expert_dtype)


class _Names:
    """A checkpoint of which a spelling may take experts to be fused, or not to be."""

    def __init__(self, fused: bool):
        self.fused = fused

    def __contains__(self, name: str) -> bool:
        return self.fused


def _shards(spec: Spec | CompressedSpec, form: Form) -> Iterator[list[Entry]]:
    """Embedding, every layer, the layer of multi-token prediction, and what follows the layers."""
    predicted = 0 if form.fused else 1
    spelling, found = spelling_of(spec, predicted), {}
    for name, shape in (param_shapes(spec) | prediction_shapes(spec, predicted)).items():
        kind = kind_of(name)
        if kind == "attn.w_uv":  # kv_b holds both
            continue
        sources = spelling.sources(name, _Names(form.fused))
        each = spelling.source_shape(name, shape, sources)
        part = ".".join(name.split(".")[:2]) if kind != name else "embed" if name == "embed" else "head"
        entries = found.setdefault(part, [])
        entries += [Entry(source if form.fused else spelling.published(source), each, kind) for source in sources]
    layers = [f"layers.{layer}" for layer in range(spec.num_layers)] + [f"mtp.{layer}" for layer in range(predicted)]
    return iter([found[part] for part in ("embed", *layers, "head")])


def _layout(entry: Entry, form: Form) -> WeightLayout | None:
    return form.experts if entry.kind in _EXPERTS else form.linears if entry.kind in _LINEARS else None


def _dtype(entry: Entry) -> torch.dtype:
    if entry.kind.endswith(INTEGER_NAMES):
        return torch.int64
    return torch.bfloat16 if entry.kind.endswith(_BF16) else param_dtype(entry.kind, torch.bfloat16)


def _nbytes(entry: Entry, form: Form) -> int:
    layout, values = _layout(entry, form), math.prod(entry.shape)
    if layout is None:
        return values * _dtype(entry).itemsize
    scales = math.prod(entry.shape[:-2]) * math.prod(layout.grid(*entry.shape[-2:]))
    return values // (2 if layout.codes == "e2m1" else 1) + scales * (4 if layout.scale == "fp32" else 1)


def _draw(entry: Entry, form: Form, spec: Spec | CompressedSpec, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of an entry by their names."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed}/{entry.name}".encode()))
    layout = _layout(entry, form)
    if layout is not None:
        scale = entry.name + "_scale_inv"
        if entry.name.startswith(("layers.", "mtp.")):
            scale = entry.name.removesuffix("weight") + form.suffix
        codes, scales = _packed(entry.shape, layout, generator)
        return {entry.name: codes, scale: scales}
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
    return {entry.name: noise.to(_dtype(entry))}


def _packed(
    shape: tuple[int, ...], layout: WeightLayout, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    *leading, rows, columns = shape
    if layout.codes == "e2m1":
        codes = torch.randint(256, (*leading, rows, columns // 2), dtype=torch.uint8, device="cpu", generator=generator)
        codes, values = codes.view(torch.int8), torch.tensor(E2M1_VALUES, dtype=torch.float32, device="cpu")
    else:
        codes = torch.randint(254, shape, dtype=torch.uint8, device="cpu", generator=generator)
        codes += (codes >= 127).to(torch.uint8)  # 127 and 255 are NaN
        codes = codes.view(torch.float8_e4m3fn)
        values = torch.arange(127, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
    usual = math.log2((1 / columns) ** 0.5 / values.square().mean().sqrt().item())
    grid = (*leading, *layout.grid(rows, columns))
    exponents = usual + torch.rand(grid, dtype=torch.float32, device="cpu", generator=generator) - 0.5
    if layout.scale == "fp32":
        return codes, torch.exp2(exponents)
    return codes, (exponents.round() + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
