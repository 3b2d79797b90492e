"""Reading a config.json key by key, the same way for every architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_attn.spec.parts import YarnSpec, yarn_mscale


class Fields:
    """A config.json whose missing keys are errors that name them."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        self.model_type = config.get("model_type")

    def need(self, key: str, *aliases: str) -> Any:
        """The value of the first of these keys that is there."""
        for name in (key, *aliases):
            if self.config.get(name) is not None:
                return self.config[name]
        raise ValueError(f"config {key}: missing; {self.model_type} needs it")

    def refuse_unless(self, fixed: Mapping[str, Any]) -> None:
        """ValueError where a key asks for anything but what ``fixed`` says the forward computes."""
        for key, wanted in fixed.items():
            if self.config.get(key, wanted) != wanted:
                raise ValueError(f"config {key}: got {self.config[key]!r}, allowed: {wanted!r}")

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as none, one or a list."""
        value = self.config.get(key)
        if value is None:
            return ()
        return (value,) if isinstance(value, int) else tuple(value)


def yarn_of(rope: Mapping[str, Any], attention_factor: float | None = None) -> YarnSpec | None:
    """The yarn of one set of rope parameters, None where there is none.

    attention_factor: taken where the parameters give none; None: what mscale and mscale_all_dim make of it.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"config rope_type: got {kind!r}, allowed: 'default', 'yarn'")
    if not rope.get("truncate", True):
        raise ValueError("config rope truncate: got False, allowed: True")
    for key in ("factor", "original_max_position_embeddings"):
        if rope.get(key) is None:
            raise ValueError(f"config rope {key}: missing; yarn needs it")
    factor = float(rope["factor"])
    if rope.get("attention_factor") is not None:
        attention_factor = rope["attention_factor"]
    if attention_factor is None:
        mscale, all_dim = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
        both = mscale and all_dim
        attention_factor = (
            yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) if both else yarn_mscale(factor, 1.0)
        )
    return YarnSpec(
        factor,
        rope["original_max_position_embeddings"],
        float(rope.get("beta_fast") or 32.0),
        float(rope.get("beta_slow") or 1.0),
        float(attention_factor),
    )
