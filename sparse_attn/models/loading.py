"""Read a Hugging Face checkpoint folder: config.json and safetensors, one file or shards with an index.

Both spellings are read: the one DeepSeek and Zhipu publish (a tensor per expert, fp8 weights with 128 x 128 block
scales) and what transformers' save_pretrained writes (the same, or fused experts). A missing, extra or misshaped weight
is an error that names it. Left out on purpose: layers beyond num_hidden_layers (multi-token prediction) and rotary
tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from sparse_attn.models.params import hold, model_rope_table, param_dtype, param_shapes
from sparse_attn.spec import Spec, from_hf_config

SCALE_SUFFIX = "_scale_inv"
_SHOWN = 8  # names an error lists before it counts the rest


class Checkpoint:
    """Tensors of a folder by name, read when asked for."""

    def __init__(self, folder: Path, block: tuple[int, int] = (128, 128)):
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError("reading a checkpoint needs safetensors: pip install 'sparse_attn[models]'") from error
        self.block = block
        self._home = {}
        for path in self._files(folder):
            handle = safe_open(str(path), framework="pt", device="cpu")
            for name in handle.keys():
                if name in self._home:
                    raise ValueError(f"weight {name}: found twice, the second time in {path.name}")
                self._home[name] = handle

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

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor called ``name``; fp8 weights come back dequantised, in fp32."""
        if name not in self._home:
            raise ValueError(f"weight {name}: missing")
        value = self._home[name].get_tensor(name)
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
        scale = self._home[scale_name].get_tensor(scale_name)
        if tuple(scale.shape) != grid:
            raise ValueError(f"weight {scale_name}: got shape {list(scale.shape)}, allowed: {list(grid)}")
        return dequantise(value, scale, self.block)


def dequantise(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """fp8 [N, K] times its scale per block of ``block`` elements, in fp32."""
    rows = torch.arange(codes.shape[0]) // block[0]
    columns = torch.arange(codes.shape[1]) // block[1]
    return codes.float() * scale.float()[rows][:, columns]


def load(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> tuple[Spec, dict[str, torch.Tensor]]:  # fmt: skip
    """(spec, params) of the checkpoint in ``folder``, weights in ``dtype`` on ``device``.

    progress: wraps the iteration over parameter names, as tqdm does. ValueError names the config key or the weight at
    fault.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"checkpoint: {folder} holds no config.json")
    config = json.loads((folder / "config.json").read_text())
    spec = from_hf_config(config)
    checkpoint = Checkpoint(folder, _weight_block(config))
    shapes = param_shapes(spec)
    _check_names(checkpoint, spec)
    params = {}
    for name in progress(list(shapes)):
        target = torch.empty(shapes[name], dtype=param_dtype(name, dtype), device=device)
        _fill(target, name, checkpoint, spec)
        params[name] = hold(target)
    params["rope"] = hold(model_rope_table(spec, device))
    return spec, params


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


# The forward's name of a weight -> the checkpoint's, for those that are read as they are.
_DIRECT = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "attn.q_a": "self_attn.q_a_proj.weight",
    "attn.q_a_norm": "self_attn.q_a_layernorm.weight",
    "attn.q_b": "self_attn.q_b_proj.weight",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "attn.o": "self_attn.o_proj.weight",
    "index.q_b": "self_attn.indexer.wq_b.weight",
    "index.k": "self_attn.indexer.wk.weight",
    "index.k_norm": "self_attn.indexer.k_norm.weight",
    "index.k_norm_bias": "self_attn.indexer.k_norm.bias",
    "index.weights": "self_attn.indexer.weights_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
    "moe.gate": "mlp.gate.weight",
    "moe.bias": "mlp.gate.e_score_correction_bias",
    "moe.shared_down": "mlp.shared_experts.down_proj.weight",
}
# Gate rows, then up rows.
_PAIRED = {"mlp.gate_up": "mlp.", "moe.shared_gate_up": "mlp.shared_experts."}
_KV_B = "self_attn.kv_b_proj.weight"
_FUSED_GATE_UP, _FUSED_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def _place(name: str) -> tuple[str, str]:
    """(checkpoint prefix, name inside its layer) of a parameter."""
    match = re.match(r"layers\.(\d+)\.(.*)", name)
    return (f"model.layers.{match[1]}.", match[2]) if match else ("", name)


def _fill(target: torch.Tensor, name: str, checkpoint: Checkpoint, spec: Spec) -> None:
    """Copy a parameter's values from the checkpoint into ``target``."""
    prefix, kind = _place(name)
    shape = tuple(target.shape)
    if kind in _DIRECT:
        target.copy_(checkpoint.read(prefix + _DIRECT[kind], shape))
    elif kind in _PAIRED:
        _fill_pair(target, prefix + _PAIRED[kind], checkpoint)
    elif kind in ("attn.w_uk", "attn.w_uv"):
        heads, both = spec.num_heads, spec.nope_dim + spec.v_dim
        kv_b = checkpoint.read(prefix + _KV_B, (heads * both, spec.kv_lora)).unflatten(0, (heads, both))
        target.copy_(kv_b[:, : spec.nope_dim] if kind == "attn.w_uk" else kv_b[:, spec.nope_dim :].transpose(1, 2))
    elif kind == "moe.gate_up":
        if prefix + _FUSED_GATE_UP in checkpoint:
            target.copy_(checkpoint.read(prefix + _FUSED_GATE_UP, shape))
        else:
            for expert in range(shape[0]):
                _fill_pair(target[expert], f"{prefix}mlp.experts.{expert}.", checkpoint)
    elif kind == "moe.down":
        if prefix + _FUSED_DOWN in checkpoint:
            target.copy_(checkpoint.read(prefix + _FUSED_DOWN, shape))
        else:
            for expert in range(shape[0]):
                target[expert].copy_(checkpoint.read(f"{prefix}mlp.experts.{expert}.down_proj.weight", shape[1:]))
    else:
        raise AssertionError(f"no rule loads {name}")


def _fill_pair(target: torch.Tensor, prefix: str, checkpoint: Checkpoint) -> None:
    half = target.shape[0] // 2
    target[:half].copy_(checkpoint.read(prefix + "gate_proj.weight", (half, target.shape[1])))
    target[half:].copy_(checkpoint.read(prefix + "up_proj.weight", (half, target.shape[1])))


def _sources(name: str, checkpoint: Checkpoint, spec: Spec) -> list[str]:
    """The checkpoint names a parameter is read from."""
    prefix, kind = _place(name)
    if kind in _DIRECT:
        return [prefix + _DIRECT[kind]]
    if kind in _PAIRED:
        return [f"{prefix}{_PAIRED[kind]}{part}_proj.weight" for part in ("gate", "up")]
    if kind in ("attn.w_uk", "attn.w_uv"):
        return [prefix + _KV_B]
    fused, parts = (_FUSED_GATE_UP, ("gate", "up")) if kind == "moe.gate_up" else (_FUSED_DOWN, ("down",))
    if prefix + fused in checkpoint:
        return [prefix + fused]
    experts = range(spec.moe.num_experts)
    return [f"{prefix}mlp.experts.{expert}.{part}_proj.weight" for expert in experts for part in parts]


def _check_names(checkpoint: Checkpoint, spec: Spec) -> None:
    """ValueError that names every weight that is missing or that nothing reads, before anything is read."""
    wanted = {source for name in param_shapes(spec) for source in _sources(name, checkpoint, spec)}
    missing = [name for name in sorted(wanted) if name not in checkpoint]
    if missing:
        raise ValueError(f"weight {_listed(missing)}: missing")
    if spec.tie_embeddings:
        wanted.add("lm_head.weight")
    scales = {name + SCALE_SUFFIX for name in wanted}
    extra = [n for n in checkpoint.names() if n not in wanted and n not in scales and not _ignored(n, spec.num_layers)]
    if extra:
        raise ValueError(f"weight {_listed(sorted(extra))}: extra, no part of the model reads it")


def _ignored(name: str, num_layers: int) -> bool:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return (match is not None and int(match[1]) >= num_layers) or name.endswith("rotary_emb.inv_freq")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
