"""The calls that `python -m sparse_attn explain` explains: public functions, and their arguments on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sparse_attn.cache import allocate_cache
from sparse_attn.cli.arguments import DTYPES
from sparse_attn.fp8 import FP8_DTYPE
from sparse_attn.layout import (
    IndexFp8Layout,
    IndexLayout,
    IndexMxfp4Layout,
    LatentFp8Layout,
    Layout,
    PlainLayout,
    PlanarFp8Layout,
    parse_layout,
    query_row,
)
from sparse_attn.mxfp4 import MXFP4
from sparse_attn.pipeline import CACHE_KINDS, INDEX_CACHE_KINDS, cache_layouts
from sparse_attn.spec import deepseek_v32
from sparse_attn.types import Ragged
from sparse_attn.weight_layout import CODE_DTYPE, CODES_PER_BYTE, SCALE_DTYPE, PackedWeight, parse_weight_layout

MODEL = deepseek_v32()  # whose sizes are the defaults
DECODE_TOKENS, PREFILL_TOKENS, BLOCK = 128, 8192, 64
META = torch.device("meta")

Arguments = tuple[str, tuple, dict]  # a public function's name, and what it is called with


PASSED = ("activations", "batch_invariant", "scale")  # which public functions take as they are


class Call(NamedTuple):
    """inputs: from the options that ``defaults`` names, but for those of PASSED."""

    inputs: Callable[..., Arguments]
    defaults: dict[str, Any]

    def arguments(self, **given: Any) -> Arguments:
        """From all options that ``defaults`` names."""
        op, args, kwargs = self.inputs(**{name: value for name, value in given.items() if name not in PASSED})
        return op, args, kwargs | {name: given[name] for name in PASSED if given.get(name) is not None}


def attention_decode(
    tokens: int, heads: int, layout: str, top_k: int, context: int, dtype: str, d_qk: int | None, d_v: int | None,
    block_size: int, extra_layout: str | None, extra_top_k: int | None,
) -> Arguments:  # fmt: skip
    kind = _kv_layout(layout, d_qk, d_v)
    keys, ragged = _cache(kind, tokens, context, block_size), _ragged(tokens, top_k)
    options = dict(scale=kind.dim**-0.5, layout=kind)
    if extra_layout is not None and extra_top_k is not None:
        extra = _kv_layout(extra_layout, None, None)
        options |= dict(
            extra_layout=extra, extra_cache=_cache(extra, tokens, context, block_size),
            extra_ragged=_ragged(tokens, extra_top_k),
        )  # fmt: skip
    elif (extra_layout, extra_top_k) != (None, None):
        raise ValueError("--extra-layout, --extra-top-k: got one of them, allowed: both or none")
    q = torch.empty(tokens, heads, kind.dim, dtype=DTYPES[dtype], device=META)
    return "sparse_attn_decode", (q, keys, ragged), options


def attention_prefill(tokens: int, heads: int, top_k: int, context: int, dtype: str, d_qk: int, d_v: int) -> Arguments:
    q = torch.empty(tokens, heads, d_qk, dtype=DTYPES[dtype], device=META)
    options = dict(scale=d_qk**-0.5, d_v=d_v)
    return "sparse_attn_prefill", (q, q.new_empty(context, d_qk), _ragged(tokens, top_k)), options


def paged_scores(tokens: int, next_n: int, heads: int, layout: str, context: int, block_size: int) -> Arguments:
    kind = _index_layout(layout)
    q, weights, cache, lengths, table = _decode_index(kind, tokens, next_n, heads, context, block_size)
    return f"{_form(kind)}_paged_mqa_logits", (q, cache, weights, lengths, table, context, kind), {}


def prefill_scores(tokens: int, heads: int, layout: str, context: int) -> Arguments:
    kind = _index_layout(layout)
    q, weights, k, k_scale, *ranges = _prefill_index(kind, tokens, heads, context)
    scales = () if isinstance(kind, PlainLayout) else (k_scale,)
    options = {"flavour": kind.flavour} if isinstance(kind, IndexFp8Layout) else {}
    return f"{_form(kind)}_mqa_logits", (q, k, *scales, weights, *ranges), options


def _form(layout: IndexLayout) -> str:
    """Which of the functions that score."""
    if isinstance(layout, IndexMxfp4Layout):
        return MXFP4
    return "fp8" if isinstance(layout, IndexFp8Layout) else "bf16"


def topk(tokens: int, width: int, top_k: int) -> Arguments:
    return "top_k_per_row", (torch.empty(tokens, width, dtype=torch.float32, device=META), top_k), {}


def index_topk_decode(
    tokens: int, next_n: int, heads: int, layout: str, top_k: int, context: int, block_size: int
) -> Arguments:
    kind = _index_layout(layout)
    inputs = _decode_index(kind, tokens, next_n, heads, context, block_size)
    return "index_topk_decode", (*inputs, top_k, context, kind), {}


def index_topk_decode_slots(**sizes: Any) -> Arguments:
    _, args, kwargs = index_topk_decode(**sizes)
    return "index_topk_decode_slots", args, kwargs


def index_topk_prefill(tokens: int, heads: int, layout: str, top_k: int, context: int) -> Arguments:
    kind = _index_layout(layout)
    options = {} if isinstance(kind, PlainLayout) else {"flavour": getattr(kind, "flavour", MXFP4)}
    return "index_topk_prefill", (*_prefill_index(kind, tokens, heads, context), top_k), options


def grouped_linear(tokens: int, groups: int, outputs: int, columns: int, layout: str, dtype: str) -> Arguments:
    rows = torch.empty(tokens, columns, dtype=DTYPES[dtype], device=META)
    ends = _ints(groups) if groups > 1 else None  # one group: a linear
    if layout == "plain":
        return "grouped_linear", (rows, ends, rows.new_empty(groups, outputs, columns)), {}
    weight = _packed(groups, outputs, columns, layout, "--columns")
    return "grouped_linear", (rows, ends, weight), {}


def packed_experts(
    tokens: int, groups: int, experts_per_token: int, hidden: int, intermediate: int, layout: str, dtype: str
) -> Arguments:
    x = torch.empty(tokens, hidden, dtype=DTYPES[dtype], device=META)
    gate_up = _packed(groups, 2 * intermediate, hidden, layout, "--hidden")
    down = _packed(groups, hidden, intermediate, layout, "--intermediate")
    weights = torch.empty(tokens, experts_per_token, dtype=torch.float32, device=META)
    return "packed_experts", (x, weights, _ints(tokens, experts_per_token), gate_up, down), {}


def _packed(groups: int, outputs: int, columns: int, layout: str, option: str) -> PackedWeight:
    """option: that columns are from."""
    try:
        kind = parse_weight_layout(layout)
    except ValueError as error:
        raise ValueError(f"--{error}, or plain") from None
    if columns % CODES_PER_BYTE[kind.codes]:
        raise ValueError(f"{option}: got {columns}, allowed: whole bytes of {kind.codes}")
    codes = (groups, outputs, columns // CODES_PER_BYTE[kind.codes])
    return PackedWeight(
        torch.empty(codes, dtype=CODE_DTYPE[kind.codes], device=META),
        torch.empty((groups, *kind.grid(outputs, columns)), dtype=SCALE_DTYPE[kind.scale], device=META), kind.name,
    )  # fmt: skip


_ATTENTION: dict[str, Any] = dict(
    heads=MODEL.num_heads, top_k=MODEL.index.top_k, context=MODEL.max_positions, dtype="bf16", scale=None,
    batch_invariant=False,
)  # fmt: skip
_INDEX: dict[str, Any] = dict(heads=MODEL.index.num_heads, layout="fp8", context=MODEL.max_positions)
_PAGED: dict[str, Any] = dict(tokens=DECODE_TOKENS, next_n=1, block_size=BLOCK)
_PRODUCT: dict[str, Any] = dict(
    groups=MODEL.moe.num_experts, layout="e4m3/128x128/fp32", dtype="bf16", activations="exact", batch_invariant=False
)
CALLS: dict[str, Call] = {
    "attention_decode": Call(
        attention_decode,
        _ATTENTION | dict(tokens=DECODE_TOKENS, layout="fp8", block_size=BLOCK)
        | dict.fromkeys(("d_qk", "d_v", "extra_layout", "extra_top_k")),
    ),
    "attention_prefill": Call(
        attention_prefill, _ATTENTION | dict(tokens=PREFILL_TOKENS, d_qk=MODEL.latent_dim, d_v=MODEL.kv_lora)
    ),
    "paged_scores": Call(paged_scores, _INDEX | _PAGED),
    "prefill_scores": Call(prefill_scores, _INDEX | dict(tokens=PREFILL_TOKENS)),
    "topk": Call(topk, dict(tokens=DECODE_TOKENS, width=MODEL.max_positions, top_k=MODEL.index.top_k)),
    "index_topk_decode": Call(index_topk_decode, _INDEX | _PAGED | dict(top_k=MODEL.index.top_k)),
    "index_topk_decode_slots": Call(index_topk_decode_slots, _INDEX | _PAGED | dict(top_k=MODEL.index.top_k)),
    "index_topk_prefill": Call(index_topk_prefill, _INDEX | dict(tokens=PREFILL_TOKENS, top_k=MODEL.index.top_k)),
    "grouped_linear": Call(
        grouped_linear,
        _PRODUCT | dict(
            tokens=DECODE_TOKENS * MODEL.moe.experts_per_token, outputs=2 * MODEL.moe.intermediate_size,
            columns=MODEL.hidden_size,
        ),
    ),
    "packed_experts": Call(
        packed_experts,
        _PRODUCT | dict(
            tokens=DECODE_TOKENS, experts_per_token=MODEL.moe.experts_per_token, hidden=MODEL.hidden_size,
            intermediate=MODEL.moe.intermediate_size,
        ),
    ),
}  # fmt: skip
FUNCTIONS: dict[str, tuple[str, dict[str, Any]]] = {  # by a function's name, the call and what the name says of it
    "sparse_attn_decode": ("attention_decode", {}),
    "sparse_attn_prefill": ("attention_prefill", {}),
    "top_k_per_row": ("topk", {}),
}
for _kind in ("fp8", MXFP4, "bf16"):
    FUNCTIONS[f"{_kind}_paged_mqa_logits"] = "paged_scores", dict(layout=_kind)
    FUNCTIONS[f"{_kind}_mqa_logits"] = "prefill_scores", dict(layout=_kind)


def _kv_layout(name: str, d_qk: int | None, d_v: int | None) -> LatentFp8Layout | PlanarFp8Layout | PlainLayout:
    """``name`` is a layout's own, or a kind of cache: of the model's widths, but for those that are given."""
    if name in CACHE_KINDS:
        d_v = MODEL.kv_lora if d_v is None else d_v
        rope = (d_v + MODEL.rope_dim if d_qk is None else d_qk) - d_v
        if name != "fp8":
            return PlainLayout(name, d_v, rope)
        return LatentFp8Layout(d_v, rope, group=128 if d_v % 128 == 0 else d_v)
    layout = _parsed(name)
    if isinstance(layout, (IndexFp8Layout, IndexMxfp4Layout)):
        raise ValueError(f"--layout: got {name!r}, allowed: a layout of keys and values")
    for option, given, has in (("--d-qk", d_qk, layout.dim), ("--d-v", d_v, layout.value_dim)):
        if given not in (None, has):
            raise ValueError(f"{option}: got {given}, allowed: {has} (that of {name})")
    return layout


def _index_layout(name: str) -> IndexLayout:
    if name in INDEX_CACHE_KINDS:
        return cache_layouts(MODEL, "fp8", index_kind=name).index
    layout = _parsed(name)
    if not isinstance(layout, (IndexFp8Layout, IndexMxfp4Layout, PlainLayout)):
        raise ValueError(f"--layout: got {name!r}, allowed: a layout of index keys")
    return layout


def _parsed(name: str) -> Layout:
    try:
        return parse_layout(name)
    except ValueError as error:
        raise ValueError(f"--{error}, or one of {', '.join(CACHE_KINDS)}") from None


def _cache(layout: Layout, requests: int, context: int, block_size: int) -> torch.Tensor:
    return allocate_cache(layout, requests * -(-context // block_size), block_size, META)


def _ragged(tokens: int, top_k: int) -> Ragged:
    return Ragged(_ints(tokens * top_k), _ints(tokens + 1))


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def _queries(layout: IndexLayout, *shape: int) -> torch.Tensor:
    dtype = FP8_DTYPE[layout.flavour] if isinstance(layout, IndexFp8Layout) else layout.dtype
    return torch.empty(*shape, query_row(layout), dtype=dtype, device=META)


def _weights(rows: int, heads: int) -> torch.Tensor:
    return torch.empty(rows, heads, dtype=torch.float32, device=META)


def _decode_index(
    layout: IndexLayout, tokens: int, next_n: int, heads: int, context: int, block_size: int
) -> tuple[torch.Tensor, ...]:
    """(q, weights, cache, context_lens, block_table)"""
    if tokens % next_n:
        raise ValueError(f"--tokens: got {tokens}, allowed: multiples of --next-n, {next_n}")
    requests = tokens // next_n
    return (
        _queries(layout, requests, next_n, heads), _weights(tokens, heads),
        _cache(layout, requests, context, block_size),
        _ints(requests, next_n), _ints(requests, -(-context // block_size)),
    )  # fmt: skip


def _prefill_index(layout: IndexLayout, tokens: int, heads: int, context: int) -> tuple[torch.Tensor | None, ...]:
    """(q, weights, k, k_scale, kv_start, kv_end)"""
    k, k_scale = _queries(layout, context), None
    if isinstance(layout, IndexFp8Layout):
        k_scale = torch.empty(context, dtype=torch.float32, device=META)
    elif isinstance(layout, IndexMxfp4Layout):
        k, k_scale = k[:, : layout.code_bytes].clone(), k[:, layout.code_bytes :].clone()
    return _queries(layout, tokens, heads), _weights(tokens, heads), k, k_scale, _ints(tokens), _ints(tokens)
