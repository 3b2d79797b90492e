"""Which models of transformers the bridge runs, and how their classes are told.

A family's attention class keeps its own forward: projections, gates and sharing are transformers' code. Three of its
parts are replaced where the model's implementation is ours: the indexer, the expansion of latents per head, and the
cache that it writes. Where it is another, what was there runs.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple, NoReturn

from sparse_attn.integrations.transformers import indexer, latent, windowed
from sparse_attn.integrations.transformers.bounds import is_bounds, row_bounds
from sparse_attn.integrations.transformers.private import forget, implementation
from sparse_attn.integrations.transformers.refusals import (
    check_absorbable,
    check_call,
    check_filled,
    refuse,
)

NAME = "sparse_attn"


class Family(NamedTuple):
    """A family over MLA: its module, the prefix of its classes, and how its indexer rotates.

    interleaved: pairs of neighbours, else halves. last: the rotated part comes last in an index head. from_hidden:
    index queries come from the hidden state, not from the queries' latent.
    """

    module: str
    prefix: str
    interleaved: bool
    last: bool = False
    from_hidden: bool = False


FAMILIES = (
    Family("deepseek_v32", "DeepseekV32", interleaved=False),
    Family("glm_moe_dsa", "GlmMoeDsa", interleaved=True),
    Family("axk2", "AXK2", interleaved=False),
    Family("mistral_large4", "MistralLarge4Text", interleaved=True, from_hidden=True),
    Family("hy_v4", "HYV4", interleaved=False, last=True),
    Family("hy_v4_vl", "HYV4VL", interleaved=False, last=True),
)
# Models with an indexer that the bridge does not run, and why.
REFUSED = {
    "dots3_note": ("Dots3NoteText", "some layers attend to a sliding window of expanded keys"),
    "glm5_next": ("Glm5NextText", "its indexer scores pools of tokens, which are made anew in every step"),
    "minimax_m3_vl": ("MiniMaxM3VL", "its indexer selects blocks of grouped keys, not latents"),
    "qwen4_exp": ("Qwen4ExpText", "its indexer selects for grouped keys, not latents"),
}
WINDOWED = "deepseek_v4"
_replaced: list[tuple[type, str, Any]] = []


def register() -> None:
    """Add ``attn_implementation="sparse_attn"`` to transformers. A second call changes nothing.

    ImportError where transformers is missing or older than 5.24.
    """
    from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if _replaced:
        return
    modules = {name: _modeling(name) for name in (*(family.module for family in FAMILIES), WINDOWED, *REFUSED)}
    for family in FAMILIES:
        _replace(family, modules[family.module])
    v4 = modules[WINDOWED]
    _set(v4.DeepseekV4Attention, "forward", _windowed_forward)
    for name, (prefix, reason) in REFUSED.items():
        _refuse_model(name, getattr(modules[name], f"{prefix}Attention"), reason)
    for layer_type in v4.COMPRESSOR_CLASSES:
        STATIC_LAYER_TYPE_MAPPING.setdefault(layer_type, _no_static_layer)
    ALL_ATTENTION_FUNCTIONS.register(NAME, latent.attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, row_bounds)


def unregister() -> None:
    """Take back what ``register`` did. Models that run on it must be switched to another implementation before."""
    from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)
    for layer_type in [name for name, made in STATIC_LAYER_TYPE_MAPPING.items() if made is _no_static_layer]:
        del STATIC_LAYER_TYPE_MAPPING[layer_type]
    forget(AttentionInterface, NAME)
    forget(AttentionMaskInterface, NAME)


def check_family(config: Any) -> None:
    """Refuse a text config of transformers whose model the bridge does not run."""
    name = config.model_type.removesuffix("_text")
    if name in REFUSED:
        refuse("model", f"{name}: {REFUSED[name][1]}", ", ".join(_names()))
    if name not in _names():
        refuse("model", name, ", ".join(_names()))


def _names() -> tuple[str, ...]:
    return (*(family.module for family in FAMILIES), WINDOWED)


def _modeling(name: str) -> Any:
    try:
        return importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ModuleNotFoundError as error:
        raise ImportError(f"transformers: got a version without {name}, allowed: 5.24") from error


def _set(owner: type, name: str, wrapper: Any) -> None:
    original = getattr(owner, name)
    _replaced.append((owner, name, original))
    setattr(owner, name, functools.wraps(original)(wrapper(original)))


def _is_ours(module: Any) -> bool:
    return implementation(module.config) == NAME


def _replace(family: Family, module: Any) -> None:
    attention = getattr(module, f"{family.prefix}Attention")
    rotate = module.apply_rotary_pos_emb_interleave if family.interleaved else module.apply_rotary_pos_emb
    _set(attention, "forward", _attention_forward)
    _set(attention, "expand_kv", _expand_kv)
    wrapper = _indexer_from_hidden if family.from_hidden else _indexer
    rotation = indexer.Rotation(rotate, family.last)
    _set(getattr(module, f"{family.prefix}Indexer"), "forward", functools.partial(wrapper, rotation))


def _attention_forward(original: Any) -> Any:
    def forward(self, hidden_states, *args, cache=None, **others):
        ours = _is_ours(self)
        if cache is not None:
            check_filled(self, cache, ours)
        if ours:
            check_call(self, hidden_states, cache, others)
            check_absorbable(self.kv_b_proj)
            cache = None if cache is None else latent.RowCache(cache)
        return original(self, hidden_states, *args, cache=cache, **others)

    return forward


def _expand_kv(original: Any) -> Any:
    def expand_kv(self, kv_nope, k_rot):
        if not _is_ours(self):
            return original(self, kv_nope, k_rot)
        width = self.kv_lora_rank + self.qk_rope_head_dim
        return (kv_nope, k_rot) if kv_nope.shape[-1] == width else latent.cached_rows(kv_nope, k_rot)

    return expand_kv


def _indexer(rotation: indexer.Rotation, original: Any) -> Any:
    def forward(
        self, hidden_states, q_resid, position_embeddings, attention_mask, position_ids=None, cache=None, **others
    ):
        if is_bounds(attention_mask):
            arguments = hidden_states, q_resid, position_embeddings, attention_mask, position_ids, cache
            return indexer.run(self, *arguments, rotation)
        arguments = hidden_states, q_resid, position_embeddings, attention_mask, position_ids
        return original(self, *arguments, cache=cache, **others)

    return forward


def _indexer_from_hidden(rotation: indexer.Rotation, original: Any) -> Any:
    def forward(self, hidden_states, position_embeddings, attention_mask, position_ids=None, cache=None, **others):
        if is_bounds(attention_mask):
            source = self.q_input_norm(hidden_states)
            arguments = hidden_states, source, position_embeddings, attention_mask, position_ids, cache
            return indexer.run(self, *arguments, rotation)
        return original(self, hidden_states, position_embeddings, attention_mask, position_ids, cache=cache, **others)

    return forward


def _windowed_forward(original: Any) -> Any:
    def forward(self, hidden_states, position_embeddings, position_ids, attention_mask=None, cache=None, **others):
        if not _is_ours(self):
            return original(
                self, hidden_states, position_embeddings, position_ids, attention_mask, cache=cache, **others
            )
        check_call(self, hidden_states, cache, others)
        arguments = hidden_states, position_embeddings, position_ids, attention_mask, cache
        return windowed.attention(self, *arguments), None

    return forward


def _no_static_layer(config: Any, **others: Any) -> NoReturn:
    """In the place of a layer of StaticCache that transformers does not have."""
    refuse(
        "cache", f"a StaticCache (as of cache_implementation) for {config.model_type}, for which transformers has none",
        "a DynamicCache, or under sparse_attn cache=bridge.static_cache(model, max_len)",
    )  # fmt: skip


def _refuse_model(name: str, attention: type, reason: str) -> None:
    def wrapper(original: Any) -> Any:
        def forward(self, *args, **others):
            if _is_ours(self):
                refuse("attn_implementation", f"{NAME} for {name}: {reason}", "eager, or sdpa where the model has it")
            return original(self, *args, **others)

        return forward

    _set(attention, "forward", wrapper)
