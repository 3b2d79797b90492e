"""Read a Hugging Face checkpoint folder: config.json and safetensors.

Both spellings are read: the one DeepSeek and Zhipu publish (a tensor per expert) and what transformers' save_pretrained
writes (the same, or fused experts). Weights are bf16, fp16, fp32, or e4m3 with a scale for every block of 128 x 128;
experts are MXFP4, too. Weights that files have quantised stay as they are, as PackedWeight, but for those of
models.params.EXPANDED. A missing, extra or misshaped weight is an error that names it, and so is one whose dtype,
shape, scale and config disagree. Left out on purpose: layers of multi-token prediction, unless they are asked for, and
rotary tables; with a warning, indexers of layers that the config has share a selection.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparse_attn.checkpoints.files import no_checkpoint
from sparse_attn.checkpoints.folder import SCALE_SUFFIX, Checkpoint
from sparse_attn.checkpoints.names import PREDICTED, Spelling, spelling_of
from sparse_attn.checkpoints.pinned_copies import Staging
from sparse_attn.checkpoints.quantisation import quantisation_of
from sparse_attn.checkpoints.read import Reading, reading_of
from sparse_attn.checkpoints.sharding import check_mesh
from sparse_attn.checkpoints.weights_to_device import fill
from sparse_attn.files import read_json_object
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models.params import hold_weight, model_rope_tables
from sparse_attn.models.shapes import Shapes, param_shapes, prediction_shapes
from sparse_attn.spec import CompressedSpec, Spec, from_hf_config
from sparse_attn.spec.fields import short
from sparse_attn.weight_layout import Weight

_SHOWN = 8  # names an error lists before it counts the rest
_MOST_PREDICTED = 64
DSPARK = "dspark_"  # what the keys of a DSpark drafter begin with in a config.json
_DSPARK_WEIGHT = re.compile(r"mtp\.\d+\.(main_proj|markov_head)\.")
_COUNTED = 1000  # missing names after which it stops to look


def load(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16,
    expand: bool = False, mtp: bool = False, mesh: Mesh = ONE_RANK,
    progress: Callable[[int, int], object] = lambda nbytes, total: None,
) -> tuple[Spec | CompressedSpec, dict[str, Weight]]:  # fmt: skip
    """(spec, params) of the checkpoint in ``folder`` on ``device``. Every tensor is copied straight to its place there.

    Args:
        folder: holds a config.json and safetensors files.
        device: where weights lie.
        dtype: of weights that are not quantised, and of those that are expanded.
        expand: expand all quantised weights to ``dtype``; False: they stay packed, as the files have them, but for
            those of models.params.EXPANDED.
        mtp: read the layers of multi-token prediction, too, by the names of models.shapes.prediction_shapes.
        mesh: the ranks that this process is one of, which reads its part of the weights (checkpoints.sharding) and
            nothing else; bytes told are those of its part.
        progress: is told the bytes of each tensor of the files once it is read, and those of all that are.

    Returns:
        The spec, and weights by name, as Model takes them.

    Raises:
        ValueError: names the config key or the weight at fault, and the file it is in. Faults that headers show are
            found before anything is allocated.
    """
    opened = open_checkpoint(folder, mtp=mtp)
    spec, checkpoint = opened.spec, opened.checkpoint
    check_mesh(spec, mesh)
    readings = readings_of(opened, expand, mesh)
    nbytes: dict[str, int] = {}
    for one in readings.values():
        nbytes |= one.nbytes(checkpoint)
    total, copy = sum(nbytes.values()), torch.Tensor.copy_
    if torch.device(device).type == "cuda":
        copy = Staging(device, max(nbytes.values()), checkpoint.place).copy
    params: dict[str, Weight] = {}
    for name in readings:
        if name in params:  # came with another of the same source
            continue
        names = opened.spelling.together(name)
        found = fill(
            [readings[one] for one in names], checkpoint, spec,
            device=device, dtype=dtype, told=lambda nbytes: progress(nbytes, total), copy=copy,
        )  # fmt: skip
        params |= {one: hold_weight(weight) for one, weight in zip(names, found)}
    return spec, params | model_rope_tables(spec, device)


class Opened(NamedTuple):
    """A checkpoint of which nothing but config and headers have been read. shapes: of the weights that it must hold."""

    config: dict[str, Any]
    spec: Spec | CompressedSpec
    checkpoint: Checkpoint
    spelling: Spelling
    shapes: Shapes


def open_checkpoint(folder: str | Path, *, mtp: bool | None) -> Opened:
    """The checkpoint in ``folder``. mtp: with its layers of multi-token prediction; None: where the files have any."""
    folder = Path(folder)
    config, spec = read_config(folder)
    with _naming(folder / "config.json"):
        quantisation = quantisation_of(config)
    checkpoint = Checkpoint(folder, quantisation, spelling_of(spec).rename)
    prefix, predicted = spelling_of(spec).prediction_prefix(0), 0
    if mtp:
        check_predicts(config, "mtp: got True", folder, checkpoint.names())
    if mtp or mtp is None and any(name.startswith(prefix) for name in checkpoint.names()):
        if _dspark_of(config, checkpoint.names()):
            warnings.warn(f"{folder}: its DSpark drafter (mtp.*) is left out", stacklevel=3)
        else:
            with _naming(folder / "config.json"):
                predicted = _predicted(config)
    shapes = param_shapes(spec) | prediction_shapes(spec, predicted)
    return Opened(config, spec, checkpoint, spelling_of(spec, predicted), shapes)


def read_config(folder: Path) -> tuple[dict, Spec | CompressedSpec]:
    """(config.json, its spec) of a checkpoint folder; ValueError names the file and the key at fault."""
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"checkpoint: {folder} holds no config.json{no_checkpoint(folder)}")
    config = read_json_object(path)
    with _naming(path):
        return config, from_hf_config(config)


def check_predicts(config: Mapping[str, Any], got: str, folder: Path, names: Iterable[str] = ()) -> None:
    """ValueError for a checkpoint with a DSpark drafter. got: the request for drafts, which the error begins with.
    names: of the weights."""
    if told := _dspark_of(config, names):
        raise ValueError(
            f"{got}, and {folder} holds a DSpark drafter ({told}), which is not read, allowed: layers of multi-token "
            "prediction; without drafts the checkpoint loads, and generate takes a drafter of yours"
        )


def _dspark_of(config: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The config key, or the weight, that tells of a DSpark drafter where other files hold layers of multi-token
    prediction; None where nothing does."""
    key = next((key for key in config if key.startswith(DSPARK)), None)
    return f"config {key}" if key else next(filter(_DSPARK_WEIGHT.match, names), None)


def predicted_layers(config: Mapping[str, Any]) -> int:
    """How many layers of multi-token prediction a config.json says there are, none among the answers."""
    return _predicted(config) if config.get(PREDICTED) else 0


def _predicted(config: Mapping[str, Any]) -> int:
    """How many layers of multi-token prediction a config.json says there are."""
    layers = config.get(PREDICTED, 0)
    if type(layers) is not int or not 1 <= layers <= _MOST_PREDICTED:
        raise ValueError(
            f"config {PREDICTED}: got {short(layers)}, allowed: 1 to {_MOST_PREDICTED}, or mtp=False, which reads none"
        )
    return layers


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put ``path`` in front of what a ValueError says."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def readings_of(opened: Opened, expand: bool, mesh: Mesh = ONE_RANK) -> dict[str, Reading]:
    """How every weight is read. ValueError that names every weight that is missing, that nothing reads or that cannot
    be read. No weight has been read then."""
    _, spec, checkpoint, spelling, shapes = opened
    wanted, missing = set(), []
    for name in shapes:
        sources = spelling.sources(name, checkpoint)
        wanted.update(sources)
        missing += [source for source in sources if source not in checkpoint]
        if len(missing) > _COUNTED:
            break
    if missing:
        raise ValueError(f"weight {_listed(sorted(set(missing)))}: missing; in {checkpoint.folder}")
    known = wanted | {name + SCALE_SUFFIX for name in wanted}
    if spec.tie_embeddings:
        known |= {"lm_head.weight", "lm_head.weight" + SCALE_SUFFIX}
    extra = [
        name for name in checkpoint.names()
        if name not in known and not spelling.ignores(name) and not checkpoint.is_empty(name)
    ]  # fmt: skip
    unused = {name: layer for name in extra if (layer := spelling.unused_indexer(name)) is not None}
    extra = [name for name in extra if name not in unused]
    if extra:
        place = checkpoint.file(extra[0]) if len(extra) == 1 else checkpoint.folder
        raise ValueError(f"weight {_listed(sorted(extra))}: extra, no part of the model reads it; in {place}")
    if unused:
        layers = [str(layer) for layer in sorted(set(unused.values()))]
        warnings.warn(
            f"{checkpoint.folder}: indexers of {len(layers)} layers are left out ({len(unused)} tensors), which by the "
            f"config share the selection of another layer: {_listed(layers)}",
            stacklevel=3,
        )
    return {name: reading_of(name, shape, spelling, checkpoint, expand, mesh=mesh) for name, shape in shapes.items()}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    if len(names) > _COUNTED:
        more = f" and {_COUNTED - _SHOWN} or more others"
    return ", ".join(names[:_SHOWN]) + more
