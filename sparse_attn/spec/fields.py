"""Reading a config.json key by key, the same way for every architecture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from sparse_attn.spec.parts import YarnSpec, yarn_mscale

# What a config may say, so that a wrong one ends at once. Positions are exact in fp32, which rope is computed in, up to
# 2^24.
MAX_SIZE, MAX_LAYERS, MAX_EXPERTS, MAX_POSITIONS = 2**31 - 1, 4096, 65536, 2**24

Rope = TypeVar("Rope", bound=tuple[Any, ...])  # a NamedTuple with a field yarn, among others


class Fields:
    """A config.json, or an object in it, whose missing keys and values of a wrong kind are errors that name the key.

    within: the key it stands under.
    """

    def __init__(self, config: Mapping[str, Any], within: str = "", model_type: str | None = None):
        self.config = config
        self.within = within and f"{within} "
        self.model_type = model_type or config.get("model_type")

    def need(self, key: str, *aliases: str) -> Any:
        """The value of the first of these keys that is there."""
        return self._found(key, *aliases)[1]

    def size(self, key: str, *aliases: str, at_least: int = 1, at_most: int = MAX_SIZE) -> int:
        """A count."""
        name, value = self._found(key, *aliases)
        if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
            self.refuse(name, f"an integer from {at_least} to {at_most}")
        return value

    def number(
        self, key: str, *, at_least: float = -math.inf, above: float = -math.inf, default: float | None = None
    ) -> float:
        """A finite number; ``default`` where there is none."""
        if default is not None and self.config.get(key) is None:
            return default
        value = self.need(key)
        known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e300
        if not known or not at_least <= value or not above < value:
            bounds = (
                f" of at least {at_least:g}"
                if at_least > -math.inf
                else f" above {above:g}"
                if above > -math.inf
                else ""
            )
            self.refuse(key, f"a number{bounds}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false; ``default`` where there is none."""
        if default is not None and self.config.get(key) is None:
            return default
        value = self.need(key)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def names(self, key: str, allowed: Mapping[str, Any], count: int, *, longer: bool = False) -> list[str] | None:
        """``count`` of the ``allowed`` names, one per layer; None where the key is missing. longer: more may follow."""
        value = self.config.get(key)
        if value is None:
            return None
        fits = isinstance(value, (list, tuple, str)) and (len(value) == count or longer and len(value) > count)
        if not fits or not all(isinstance(name, str) and name in allowed for name in value[:count]):
            more = "or more " if longer else ""
            self.refuse(key, f"{count} {more}times {' or '.join(map(repr, allowed))}, one per layer")
        return list(value[:count])

    def part(self, key: str) -> Mapping[str, Any]:
        """An object in the file; empty where the key is missing."""
        value = self.config.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return value

    def refuse_unless(self, fixed: Mapping[str, Any]) -> None:
        """ValueError where a key asks for anything but what ``fixed`` says the forward computes."""
        for key, wanted in fixed.items():
            if self.config.get(key, wanted) != wanted:
                self.refuse(key, repr(wanted))

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as none, one or a list."""
        value = self.config.get(key)
        if value is None:
            return ()
        ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= MAX_SIZE for one in ids):
            self.refuse(key, "a token id or a list of token ids")
        return ids

    def refuse(self, key: str, allowed: str) -> None:
        raise ValueError(f"config {self.within}{key}: got {short(self.config.get(key))}, allowed: {allowed}")

    def _found(self, key: str, *aliases: str) -> tuple[str, Any]:
        for name in (key, *aliases):
            if self.config.get(name) is not None:
                return name, self.config[name]
        raise ValueError(f"config {self.within}{key}: missing; {self.model_type} needs it")


def short(value: Any) -> str:
    """``value`` as an error shows it."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def rope_of(fields: Fields, read: Callable[[Mapping[str, Any]], Rope]) -> Rope:
    """What ``read`` makes of a file's rope_scaling, or of its rope_parameters. ValueError where both are there and
    disagree: transformers takes the first, and all that the second says is lost."""
    tables = [fields.part(key) for key in ("rope_scaling", "rope_parameters")]
    first, *others = [read(table) for table in tables if table] or [read({})]
    for other in others:
        if other != first:
            raise ValueError(
                f"config rope_scaling and rope_parameters: got {_differences(first, other)}, allowed: one of them, or "
                "two that agree"
            )
    return first


def _differences(first: Any, second: Any) -> str:
    """What two readings of a rope say differently, by name."""
    ours, theirs = (
        {"rope_type": "yarn" if rope.yarn else "default", **rope._asdict(), **(asdict(rope.yarn) if rope.yarn else {})}
        for rope in (first, second)
    )
    both = [name for name in ours if name != "yarn" and name in theirs and ours[name] != theirs[name]]
    return ", ".join(f"{name} {short(ours[name])} and {short(theirs[name])}" for name in both)


def yarn_of(rope: Mapping[str, Any], attention_factor: float | None = None) -> YarnSpec | None:
    """The yarn of one set of rope parameters, None where there is none.

    attention_factor: taken where the parameters give none; None: what mscale and mscale_all_dim make of it.
    """
    fields = Fields(rope, "rope", "yarn")
    key = "type" if "rope_type" not in rope and "type" in rope else "rope_type"
    kind = rope.get(key, "default")
    if rope.get("type", kind) != kind:
        fields.refuse("type", f"{short(kind)}, as rope_type says")
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"config rope_type: got {short(kind)}, allowed: 'default', 'yarn'")
    factor = fields.number("factor", above=0)
    if rope.get("attention_factor") is not None or attention_factor is None:
        mscale, all_dim = fields.number("mscale", default=0.0), fields.number("mscale_all_dim", default=0.0)
        both = mscale and all_dim
        derived = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) if both else yarn_mscale(factor, 1.0)
        attention_factor = fields.number("attention_factor", default=derived)
    beta_slow = fields.number("beta_slow", at_least=0, default=0.0) or 1.0
    beta_fast = fields.number("beta_fast", at_least=0, default=0.0) or 32.0
    if beta_fast < beta_slow:
        fields.refuse("beta_fast", f"at least beta_slow = {beta_slow:g}")
    return YarnSpec(
        factor,
        fields.size("original_max_position_embeddings"),
        beta_fast,
        beta_slow,
        attention_factor,
        fields.flag("truncate", True),
    )
