"""What a config.json says of how weights are quantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sparse_attn.spec.fields import Fields, short

# What other tools call formats that are not read. A config names them under keys of its own.
_OTHER_KEYS = ("quant_algo", "moe_quant_algo", "kv_cache_quant_algo", "format")


class Quantisation(NamedTuple):
    """block: rows and columns under one scale of an e4m3 weight. The others are None where the config does not say.

    expert_dtype: "fp4" (MXFP4) or "fp8". scale_fmt: "float" or "ue8m0", which files of fp32 scales may say as well,
    because their scales are powers of two.
    """

    block: tuple[int, int] = (128, 128)
    expert_dtype: str | None = None
    scale_fmt: str | None = None


def quantisation_of(config: Mapping[str, Any]) -> Quantisation:
    """The quantisation of a config.json; ValueError names the key that asks for another than is read."""
    found = Fields(config).part("quantization_config")
    expert_dtype = _choice(config, "config expert_dtype", "expert_dtype", ("fp4", "fp8"))
    if not found:
        return Quantisation(expert_dtype=expert_dtype)
    within = "config quantization_config"
    method, block = found.get("quant_method"), found.get("weight_block_size")
    others = [f"{key} {short(found[key])}" for key in _OTHER_KEYS if found.get(key) is not None]
    pair = tuple(block) if isinstance(block, list) and all(type(step) is int and step > 0 for step in block) else ()
    if method != "fp8" or len(pair) != 2 or others:
        more = "".join(f" and {other}" for other in others)
        raise ValueError(
            f"{within}: got quant_method {short(method)} with weight_block_size {short(block)}{more}, "
            "allowed: 'fp8' with two block sizes"
        )
    _choice(found, f"{within} fmt", "fmt", ("e4m3",))
    inner = _choice(found, f"{within} expert_dtype", "expert_dtype", ("fp4", "fp8"))
    if inner and expert_dtype and inner != expert_dtype:
        raise ValueError(f"config expert_dtype: got {expert_dtype!r}, allowed: {inner!r}, as quantization_config says")
    scale_fmt = _choice(found, f"{within} scale_fmt", "scale_fmt", ("float", "ue8m0"))
    return Quantisation(pair, inner or expert_dtype, scale_fmt)


def quantisation_config(block: tuple[int, int], *, e8m0: bool, expert_dtype: str | None) -> dict[str, Any]:
    """What a config.json says of e4m3 weights with a scale for every ``block``: the inverse of quantisation_of.

    e8m0: whether scales are powers of two, however they are stored. expert_dtype: None where the architecture's configs
    say nothing of it.
    """
    said: dict[str, Any] = {
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(block),
            "scale_fmt": "ue8m0" if e8m0 else "float",
        }
    }  # fmt: skip
    return said | ({} if expert_dtype is None else {"expert_dtype": expert_dtype})


def _choice(config: Mapping[str, Any], what: str, key: str, allowed: tuple[str, ...]) -> str | None:
    value = config.get(key)
    if value is not None and value not in allowed:
        raise ValueError(f"{what}: got {short(value)}, allowed: {', '.join(map(repr, allowed))}")
    return value
