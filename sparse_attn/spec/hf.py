"""The spec of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_attn.spec import hf_compressed, hf_latent
from sparse_attn.spec.compressed import CompressedSpec
from sparse_attn.spec.fields import short
from sparse_attn.spec.latent import Spec


def from_hf_config(config: Mapping[str, Any]) -> Spec | CompressedSpec:
    """The spec of a Hugging Face config.json, as its maker publishes it or as save_pretrained writes it.

    Args:
        config: the object in the file.

    Returns:
        Its spec.

    Raises:
        ValueError: a key is missing or asks for something the forward does not compute.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config: got {type(config).__name__}, allowed: an object")
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in hf_latent.MODEL_TYPES:
        return hf_latent.latent_spec(config)
    if model_type == hf_compressed.MODEL_TYPE:
        return hf_compressed.compressed_spec(config)
    allowed = ", ".join((*hf_latent.MODEL_TYPES, hf_compressed.MODEL_TYPE))
    raise ValueError(f"config model_type: got {short(model_type)}, allowed: {allowed}")
