"""Write a Hugging Face checkpoint folder: the inverse of models.loading, by transformers' names, experts fused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from sparse_attn.files import replacing
from sparse_attn.models.params import INTEGER_NAMES, param_dtype
from sparse_attn.models.shapes import param_shapes
from sparse_attn.models.shards import WEIGHTS, stale_files
from sparse_attn.models.spelling import layer_of, spelling_of
from sparse_attn.spec import CompressedSpec, Spec, to_hf_config


class _Fused:
    """A checkpoint of which a spelling may take every name to be there, that of fused experts too."""

    def __contains__(self, name: str) -> bool:
        return True


def save(
    folder: str | Path,
    spec: Spec | CompressedSpec,
    params: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Write config.json and model.safetensors into ``folder``, which is made where it is missing.

    Both files are replaced or neither is: where writing fails, the old checkpoint stays. The index and the shards of an
    old checkpoint are removed. Other files stay.

    params: the forward's weights; rope tables among them are left out. dtype: of the weights, but for those the forward
    keeps in fp32. Returns the bytes of the weights. ValueError names a weight that is missing or misshaped, or the part
    of the spec that no config.json can express.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("writing a checkpoint needs safetensors: pip install 'sparse_attn[models]'") from error
    config = to_hf_config(spec) | {"dtype": str(dtype).removeprefix("torch.")}
    tensors = checkpoint_tensors(spec, params, dtype)
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
            fresh_config.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except BaseException:
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    return sum(value.numel() * value.itemsize for value in tensors.values())


def checkpoint_tensors(
    spec: Spec | CompressedSpec, params: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The weights on the CPU, by the names that models.loading reads them by."""
    spelling, tensors = spelling_of(spec), {}
    for name, shape in param_shapes(spec).items():
        if name not in params:
            raise ValueError(f"weight {name}: missing")
        if tuple(params[name].shape) != shape:
            raise ValueError(f"weight {name}: got shape {list(params[name].shape)}, allowed: {list(shape)}")
        stored = torch.int64 if name.endswith(INTEGER_NAMES) else param_dtype(name, dtype)
        value = params[name].detach().to("cpu", stored)
        kind, sources = layer_of(name)[1], spelling.sources(name, _Fused())
        if kind == "attn.w_uv":  # kv_b holds both and was written with w_uk
            continue
        if kind == "attn.w_uk":
            other = params[name.removesuffix("w_uk") + "w_uv"].detach().to("cpu", stored)
            value = torch.cat([value, other.transpose(1, 2)], dim=1)
        if value.dim() == 3 and kind not in ("moe.gate_up", "moe.down"):
            value = value.flatten(0, 1)
        for source, part in zip(sources, value.chunk(len(sources))):
            tensors[source] = part.contiguous().clone()
    return tensors | _no_shared_experts(spec, dtype)


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
