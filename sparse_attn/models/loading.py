"""Read a Hugging Face checkpoint folder: config.json and safetensors.

Both spellings are read: the one DeepSeek and Zhipu publish (a tensor per expert) and what transformers' save_pretrained
writes (the same, or fused experts). Weights are bf16, fp16, fp32, or e4m3 with a scale for every block of 128 x 128;
experts are MXFP4, too. A missing, extra or misshaped weight is an error that names it, and so is one whose dtype,
shape, scale and config disagree. Left out on purpose: layers beyond num_hidden_layers (multi-token prediction) and
rotary tables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from sparse_attn.files import read_json_object
from sparse_attn.models.checkpoint import SCALE_SUFFIX, Checkpoint
from sparse_attn.models.params import INTEGER_NAMES, hold, model_rope_tables, param_dtype
from sparse_attn.models.quantisation import quantisation_of
from sparse_attn.models.shapes import Shapes, param_shapes
from sparse_attn.models.spelling import Spelling, spelling_of
from sparse_attn.spec import CompressedSpec, Spec, from_hf_config

_SHOWN = 8  # names an error lists before it counts the rest
_COUNTED = 1000  # missing names after which it stops to look


def load(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> tuple[Spec | CompressedSpec, dict[str, torch.Tensor]]:  # fmt: skip
    """(spec, params) of the checkpoint in ``folder``, weights in ``dtype`` on ``device``.

    progress: wraps the iteration over parameter names, as tqdm does. ValueError names the config key or the weight at
    fault, and the file it is in. Faults that headers show are found before a weight is read.
    """
    folder = Path(folder)
    config, spec = read_config(folder)
    spelling, shapes = spelling_of(spec), param_shapes(spec)
    with _naming(folder / "config.json"):
        quantisation = quantisation_of(config)
    checkpoint = Checkpoint(folder, quantisation, spelling.rename)
    _check_weights(checkpoint, spec, spelling, shapes)
    params: dict[str, torch.Tensor] = {}
    for name in progress(list(shapes)):
        if name in params:  # came with another of the same source
            continue
        targets = {
            one: torch.empty(shapes[one], dtype=param_dtype(one, dtype), device=device)
            for one in spelling.together(name)
        }
        spelling.fill(targets, checkpoint)
        params |= {one: hold(target) for one, target in targets.items()}
    return spec, params | model_rope_tables(spec, device)


def read_config(folder: Path) -> tuple[dict, Spec | CompressedSpec]:
    """(config.json, its spec) of a checkpoint folder; ValueError names the file and the key at fault."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"checkpoint: {folder} holds no config.json")
    config = read_json_object(path)
    with _naming(path):
        return config, from_hf_config(config)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put ``path`` in front of what a ValueError says."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_weights(checkpoint: Checkpoint, spec: Spec | CompressedSpec, spelling: Spelling, shapes: Shapes) -> None:
    """ValueError that names every weight that is missing, that nothing reads or that cannot be read. No weight has been
    read then."""
    wanted, missing = {}, []
    for name, shape in shapes.items():
        sources = spelling.sources(name, checkpoint)
        each = spelling.source_shape(name, shape, sources)
        wanted |= dict.fromkeys(sources, (each, name.endswith(INTEGER_NAMES)))
        missing += [source for source in sources if source not in checkpoint]
        if len(missing) > _COUNTED:
            break
    if missing:
        raise ValueError(f"weight {_listed(sorted(set(missing)))}: missing; in {checkpoint.folder}")
    known = wanted.keys() | {name + SCALE_SUFFIX for name in wanted}
    if spec.tie_embeddings:
        known |= {"lm_head.weight", "lm_head.weight" + SCALE_SUFFIX}
    extra = [
        name for name in checkpoint.names()
        if name not in known and not spelling.ignores(name) and not checkpoint.is_empty(name)
    ]  # fmt: skip
    if extra:
        raise ValueError(
            f"weight {_listed(sorted(extra))}: extra, no part of the model reads it; in {checkpoint.folder}"
        )
    for name, (shape, integers) in wanted.items():
        checkpoint.check(name, shape, integers=integers)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    if len(names) > _COUNTED:
        more = f" and {_COUNTED - _SHOWN} or more others"
    return ", ".join(names[:_SHOWN]) + more
