"""The forms that checkpoints are published in: which weights are quantised, and how; names, shards, config."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparse_attn.checkpoints.files import INDEX, WEIGHTS
from sparse_attn.checkpoints.folder import SCALE_SUFFIX
from sparse_attn.checkpoints.names import PREDICTED, kind_of, spelling_of
from sparse_attn.checkpoints.quantisation import quantisation_config, quantisation_of
from sparse_attn.files import naming, replacing
from sparse_attn.models.params import INTEGER_NAMES, NARROW, param_dtype
from sparse_attn.models.shapes import param_shapes, prediction_shapes
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.weight_layout import WeightLayout, packed_bytes

BLOCK = (128, 128)
FP8_FP32, FP8_E8M0 = WeightLayout("e4m3", BLOCK, "fp32"), WeightLayout("e4m3", BLOCK, "e8m0")
MXFP4 = WeightLayout("e2m1", (1, 32), "e8m0")
EXPERTS = ("moe.gate_up", "moe.down")
_LINEARS = (
    "attn.q_a", "attn.q_b", "attn.kv_a", "attn.w_uk", "attn.kv", "attn.o", "attn.o_a", "attn.o_b", "index.q_b",
    "index.k", "mlp.gate_up", "mlp.down", "moe.shared_gate_up", "moe.shared_down", "e_proj", "h_proj",
)  # fmt: skip


class Form(NamedTuple):
    """How a checkpoint is written. linears, experts: layouts, None for bf16. suffix: of DeepSeek-V4's scales. fused:
    by transformers' names, experts in one tensor, without the layers of multi-token prediction."""

    linears: WeightLayout | None
    experts: WeightLayout | None
    suffix: str = "scale"
    fused: bool = False


_V4_FORMS = {
    "published": Form(FP8_E8M0, MXFP4),
    "flash-base": Form(FP8_FP32, FP8_FP32),
    "fp8-e8m0": Form(FP8_E8M0, FP8_E8M0, "weight_scale_inv"),
    "fused": Form(FP8_E8M0, MXFP4, fused=True),
    "bf16": Form(None, None),
}
_LATENT_FORMS = {
    "published": Form(FP8_FP32, FP8_FP32),
    "fp8-e8m0": Form(FP8_E8M0, FP8_E8M0),
    "fused": Form(FP8_FP32, FP8_FP32, fused=True),
    "bf16": Form(None, None),
}
FORMS = tuple(_V4_FORMS)


class Entry(NamedTuple):
    """A weight of the files. kind: which weight of the forward it is a part of. param, part: that weight's name, and
    which of its parts this is."""

    name: str
    shape: tuple[int, ...]
    kind: str
    param: str
    part: int


def form_of(spec: Spec | CompressedSpec, form: str) -> Form:
    forms = _V4_FORMS if isinstance(spec, CompressedSpec) else _LATENT_FORMS
    if form not in forms:
        raise ValueError(f"format: got {form!r}, allowed for {spec.name}: {', '.join(forms)}")
    return forms[form]


def form_said_by(config: Mapping[str, Any], spec: Spec | CompressedSpec) -> str:
    """The form that a config.json speaks of."""
    said = quantisation_of(config)
    if "quantization_config" not in config and said.expert_dtype is None:
        return "bf16"
    if not isinstance(spec, CompressedSpec) or said.expert_dtype != "fp8":
        return "published"
    return "flash-base" if said.scale_fmt == "float" else "fp8-e8m0"


def first_layers(spec: Spec | CompressedSpec, layers: int) -> Spec | CompressedSpec:
    """``spec`` with its first ``layers`` alone."""
    if not 1 <= layers <= spec.num_layers:
        raise ValueError(f"layers: got {layers}, allowed: 1 to the {spec.num_layers} of {spec.name}")
    names = ("layer_kinds", "hash_layers") if isinstance(spec, CompressedSpec) else ("moe_layers", "index_layers")
    return replace(spec, num_layers=layers, **{name: getattr(spec, name)[:layers] for name in names})


def said_of(spec: Spec | CompressedSpec, form: Form, predicted: int) -> dict[str, Any]:
    """What the config says of the form."""
    said: dict[str, Any] = {"dtype": "bfloat16", PREDICTED: predicted}
    if form.linears is None:
        return said
    compressed = isinstance(spec, CompressedSpec)
    expert_dtype = None if not compressed else "fp4" if form.experts == MXFP4 else "fp8"
    e8m0 = not compressed or form.linears.scale == "e8m0"
    return said | quantisation_config(BLOCK, e8m0=e8m0, expert_dtype=expert_dtype)


def predicted_of(form: Form) -> int:
    """How many layers of multi-token prediction files of random weights hold, as every published model does."""
    return 0 if form.fused else 1


class Names:
    """A checkpoint of which a spelling may take experts to be fused, or not to be."""

    def __init__(self, fused: bool):
        self.fused = fused

    def __contains__(self, name: str) -> bool:
        return self.fused


class Part(NamedTuple):
    """A weight of the forward, by the name of the weight and the shape of each of its sources in the files."""

    name: str
    kind: str
    shape: tuple[int, ...]
    sources: list[str]
    each: tuple[int, ...]


def parts_of(spec: Spec | CompressedSpec, form: Form, predicted: int) -> Iterator[Part]:
    """Every weight of the forward, those of ``predicted`` layers of multi-token prediction among them."""
    spelling, fused = spelling_of(spec, predicted), Names(form.fused)
    for name, shape in (param_shapes(spec) | prediction_shapes(spec, predicted)).items():
        sources = spelling.sources(name, fused)
        yield Part(name, kind_of(name), shape, sources, spelling.source_shape(name, shape, sources))


def shards_of(spec: Spec | CompressedSpec, form: Form, predicted: int) -> list[list[Entry]]:
    """Embedding, every layer, ``predicted`` layers of multi-token prediction, and what follows the layers."""
    spelling, found = spelling_of(spec, predicted), {}
    for name, kind, _, sources, each in parts_of(spec, form, predicted):
        if kind == "attn.w_uv":  # kv_b holds both
            continue
        part = ".".join(name.split(".")[:2]) if kind != name else "embed" if name == "embed" else "head"
        entries = found.setdefault(part, [])
        for number, source in enumerate(sources):
            entries.append(Entry(source if form.fused else spelling.published(source), each, kind, name, number))
    layers = [f"layers.{layer}" for layer in range(spec.num_layers)] + [f"mtp.{layer}" for layer in range(predicted)]
    return [found[part] for part in ("embed", *layers, "head")]


def layout_of(kind: str, form: Form) -> WeightLayout | None:
    """The layout of a weight in files of a form, None where it is not quantised."""
    return form.experts if kind in EXPERTS else form.linears if kind in _LINEARS else None


def dtype_of(entry: Entry) -> torch.dtype:
    return torch.int64 if entry.kind.endswith(INTEGER_NAMES) else stored_dtype(entry.kind)


def stored_dtype(kind: str) -> torch.dtype:
    """The dtype of a weight of floating point in files that have not quantised it."""
    return torch.bfloat16 if kind.endswith(NARROW) else param_dtype(kind, torch.bfloat16)


def nbytes_of(entry: Entry, form: Form) -> int:
    layout = layout_of(entry.kind, form)
    return math.prod(entry.shape) * dtype_of(entry).itemsize if layout is None else packed_bytes(entry.shape, layout)


def scale_name(entry: Entry, form: Form) -> str:
    """What the scale of a quantised weight is called."""
    if entry.name.startswith(("layers.", "mtp.")):  # DeepSeek's names
        return entry.name.removesuffix("weight") + form.suffix
    return entry.name + SCALE_SUFFIX


def write_shards(
    folder: Path, shards: list[list[Entry]], form: Form, config: dict[str, Any],
    make: Callable[[Entry], dict[str, torch.Tensor]], progress: Callable[[int, int], object],
    beside: Callable[[Path], object] = lambda fresh: None,
) -> int:  # fmt: skip
    """Write what ``make`` gives for every entry into ``folder``, a shard at a time, with index and config.

    The folder must be empty or missing. It is there whole or not at all. beside: writes what else it holds into the
    folder it is given. Returns the bytes of the weights.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("writing a checkpoint needs safetensors: pip install 'sparse_attn[models]'") from error
    total, home = sum(nbytes_of(entry, form) for shard in shards for entry in shard), {}
    with _new_folder(folder) as fresh:
        free = shutil.disk_usage(fresh).free
        if free < total:
            raise OSError(f"{folder}: {total:,} bytes of weights, and the disk has {free:,}")
        for number, shard in enumerate(shards, start=1):
            file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors = {}
            for entry in shard:
                made = make(entry)
                tensors |= made
                progress(sum(value.nbytes for value in made.values()), total)
            # on the disk, and with the mode of other files
            with naming(folder / file), replacing([fresh / file]) as (shard_file,):
                try:
                    save_file(tensors, shard_file, metadata={"format": "pt"})
                except SafetensorError as error:
                    raise OSError(f"{folder / file}: {error}") from error
            home |= dict.fromkeys(tensors, file)
        index = {"metadata": {"total_size": total}, "weight_map": home}
        for name, value in ((INDEX, index), ("config.json", config)):
            with naming(folder / name):
                (fresh / name).write_text(json.dumps(value, indent=2) + "\n")
        beside(fresh)
    return total


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside ``folder``, to be filled inside the block, that takes its place after it; nothing stays of it
    after an error."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder: got {folder}, which holds files, allowed: an empty or a new one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name[:200]}.{secrets.token_hex(4)}.tmp")
    fresh.mkdir()
    try:
        yield fresh
        fresh.replace(folder)  # an empty folder is replaced
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
