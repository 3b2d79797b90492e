"""Read a Hugging Face checkpoint folder: config.json and safetensors.

Both spellings are read: the one DeepSeek and Zhipu publish (a tensor per expert, fp8 weights with 128 x 128 block
scales) and what transformers' save_pretrained writes (the same, or fused experts). A missing, extra or misshaped weight
is an error that names it. Left out on purpose: layers beyond num_hidden_layers (multi-token prediction) and rotary
tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from sparse_attn.models.checkpoint import SCALE_SUFFIX, Checkpoint
from sparse_attn.models.params import hold, model_rope_tables, param_dtype
from sparse_attn.models.shapes import param_shapes
from sparse_attn.models.spelling import Spelling, spelling_of
from sparse_attn.spec import CompressedSpec, Spec, from_hf_config

_SHOWN = 8  # names an error lists before it counts the rest


def load(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> tuple[Spec | CompressedSpec, dict[str, torch.Tensor]]:  # fmt: skip
    """(spec, params) of the checkpoint in ``folder``, weights in ``dtype`` on ``device``.

    progress: wraps the iteration over parameter names, as tqdm does. ValueError names the config key or the weight at
    fault.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"checkpoint: {folder} holds no config.json")
    config = json.loads((folder / "config.json").read_text())
    spec = from_hf_config(config)
    spelling = spelling_of(spec)
    checkpoint = Checkpoint(folder, _weight_block(config), spelling.rename)
    shapes = param_shapes(spec)
    _check_names(checkpoint, spec, spelling)
    params = {}
    for name in progress(list(shapes)):
        target = torch.empty(shapes[name], dtype=param_dtype(name, dtype), device=device)
        spelling.fill(target, name, checkpoint)
        params[name] = hold(target)
    return spec, params | model_rope_tables(spec, device)


def _weight_block(config: dict) -> tuple[int, int]:
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return (128, 128)
    method, block = quantisation.get("quant_method"), quantisation.get("weight_block_size")
    if method != "fp8" or not block or len(block) != 2:
        raise ValueError(
            f"config quantization_config: got quant_method {method!r} with weight_block_size {block!r}, allowed: 'fp8' "
            "with two block sizes"
        )
    return tuple(block)


def _check_names(checkpoint: Checkpoint, spec: Spec | CompressedSpec, spelling: Spelling) -> None:
    """ValueError that names every weight that is missing or that nothing reads, before anything is read."""
    wanted = {source for name in param_shapes(spec) for source in spelling.sources(name, checkpoint)}
    missing = [name for name in sorted(wanted) if name not in checkpoint]
    if missing:
        raise ValueError(f"weight {_listed(missing)}: missing")
    if spec.tie_embeddings:
        wanted.add("lm_head.weight")
    scales = {name + SCALE_SUFFIX for name in wanted}
    extra = [name for name in checkpoint.names() if name not in wanted | scales and not spelling.ignores(name)]
    if extra:
        raise ValueError(f"weight {_listed(sorted(extra))}: extra, no part of the model reads it")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
