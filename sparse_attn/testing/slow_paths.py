"""Calls that leave the kernels made for their GPU for the one that every GPU has, each by one condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sparse_attn.cli.explain_calls import CALLS

META = torch.device("meta")
Change = Callable[[tuple], tuple]


class Call(NamedTuple):
    """A call of ``python -m sparse_attn explain``: its OP and the sizes that are no defaults."""

    op: str
    sizes: dict[str, object]

    def arguments(self, change: Change | None = None, **other: object) -> tuple[str, tuple, dict]:
        """(public function, arguments, keyword arguments) with ``other`` sizes, positional arguments changed."""
        made = CALLS[self.op]
        name, args, kwargs = made.arguments(**made.defaults | self.sizes | other)
        return name, args if change is None else change(args), kwargs


class Case(NamedTuple):
    """What of a call that one of Hopper's kernels takes is another, so that none does."""

    call: Call
    sizes: dict[str, object] = {}
    change: Change | None = None
    target: str = "sm_90"


def at(place: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """A change of the argument at ``place``."""
    return lambda args: (*args[:place], change(args[place]), *args[place + 1 :])


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """Its like, so many elements behind an aligned address."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size() + elements
    return torch.empty(count, dtype=tensor.dtype, device=META).as_strided(tensor.shape, tensor.stride(), elements)


def strided(tensor: torch.Tensor, *strides: int) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=META)


def apart(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """Its like, with so many elements between one row of the last dimension and the next."""
    *rows, columns = tensor.shape
    return torch.empty(*rows, columns + elements, dtype=tensor.dtype, device=META)[..., :columns]


def blocks_apart(cache: torch.Tensor, elements: int) -> torch.Tensor:
    return strided(cache, cache.stride(0) + elements, *cache.stride()[1:])


Q, KEYS, K_SCALE, WEIGHTS = 0, 1, 2, 3  # places of arguments
V4 = "planar_fp8/448+64/64/e4m3fn"
FP8, FEW, PLAIN, PREFILL = (
    Call("attention_decode", {}), Call("attention_decode", {"heads": 16}), Call("attention_decode", {"layout": "bf16"}),
    Call("attention_prefill", {}),
)  # fmt: skip
TWO = Call("attention_decode", {"layout": V4, "extra_layout": V4, "extra_top_k": 128})
ATTENTION = {
    "scale 0": Case(FP8, {"scale": 0.0}),
    "scale below 0": Case(FEW, {"scale": -1.0}),
    "plain blocks apart": Case(PLAIN, {}, at(KEYS, lambda cache: blocks_apart(cache, 16))),
    "plain cache with a second": Case(PLAIN, {"extra_layout": "bf16", "extra_top_k": 128}),
    "query address": Case(FP8, {}, at(Q, lambda q: shifted(q, 1))),
    "query strides": Case(PREFILL, {}, at(Q, lambda q: apart(q, 8))),
    "heads far apart": Case(FP8, {}, at(Q, lambda q: strided(q, 16, 1 << 31, 1))),
    "kv address": Case(PREFILL, {}, at(KEYS, lambda kv: shifted(kv, 1))),
    "kv row stride": Case(PREFILL, {}, at(KEYS, lambda kv: apart(kv, 4))),
    "kv dtype": Case(PLAIN, {"layout": "fp32"}),
    "two caches, not planar": Case(FP8, {"extra_layout": "fp8", "extra_top_k": 128}),
    "two caches, not alike": Case(TWO, {"extra_layout": "planar_fp8/448+64/64/e4m3fnuz"}),
    "empty cache": Case(FP8, {}, at(KEYS, lambda cache: cache[:0])),
    "cache address": Case(FP8, {}, at(KEYS, lambda cache: shifted(cache, 4))),
    "block stride": Case(FP8, {}, at(KEYS, lambda cache: blocks_apart(cache, 4))),
    "block over 8 GiB": Case(FP8, {"block_size": (8 << 30) // 656 + 1}),
    "another GPU": Case(FP8, target="sm_100"),
    "query dtype": Case(FP8, {"dtype": "fp32"}),
    "d_v": Case(PREFILL, {"d_v": 256, "d_qk": 320}),
    "d_qk": Case(PREFILL, {"d_qk": 544}),
    "few rows, plain": Case(PREFILL, {"tokens": 21}),
    "latent or rope": Case(FP8, {"layout": "latent_fp8/256+64/128/e4m3fn/raw"}),
    "flavour": Case(FP8, {"layout": "latent_fp8/512+64/128/e4m3fnuz/raw"}),
    "group": Case(FP8, {"layout": "latent_fp8/512+64/256/e4m3fn/raw"}),
    "group, planar": Case(TWO, dict.fromkeys(("layout", "extra_layout"), "planar_fp8/448+64/32/e4m3fn")),
}

PAGED, SCORES = Call("paged_scores", {}), Call("prefill_scores", {})
MXFP4, MXFP4_ROWS = Call("paged_scores", {"layout": "mxfp4"}), Call("prefill_scores", {"layout": "mxfp4"})
INDEX = {
    "another GPU": Case(PAGED, target="sm_89"),
    "heads": Case(PAGED, {"heads": 16}),
    "dim": Case(SCORES, {"layout": "index_fp8/64/e4m3fn/pow2"}),
    "plain keys": Case(PAGED, {"layout": "bf16"}),
    "flavour": Case(SCORES, {"layout": "index_fp8/128/e4m3fnuz/pow2"}),
    "block size": Case(PAGED, {"block_size": 32}),
    "empty cache": Case(PAGED, {}, at(KEYS, lambda cache: cache[:0])),
    "cache address": Case(PAGED, {}, at(KEYS, lambda cache: shifted(cache, 4))),
    "block stride": Case(PAGED, {}, at(KEYS, lambda cache: blocks_apart(cache, 4))),
    "MXFP4 block size": Case(MXFP4, {"block_size": 32}),
    "MXFP4 empty cache": Case(MXFP4, {}, at(KEYS, lambda cache: cache[:0])),
    "MXFP4 block stride": Case(MXFP4, {}, at(KEYS, lambda cache: blocks_apart(cache, 4))),
    "MXFP4 query strides": Case(MXFP4, {}, at(Q, lambda q: strided(q, q.stride(0) + 8, *q.stride()[1:]))),
    "MXFP4 query address": Case(MXFP4, {}, at(Q, lambda q: shifted(q, 4))),
    "MXFP4 query stride, contiguous keys": Case(
        MXFP4_ROWS, {}, at(Q, lambda q: strided(q, q.stride(0) + 8, *q.stride()[1:]))
    ),
    "MXFP4 query address, contiguous keys": Case(MXFP4_ROWS, {}, at(Q, lambda q: shifted(q, 4))),
    "MXFP4 key stride": Case(MXFP4_ROWS, {}, at(KEYS, lambda k: apart(k, 8))),
    "MXFP4 key address": Case(MXFP4_ROWS, {}, at(KEYS, lambda k: shifted(k, 8))),
    "MXFP4 scale stride": Case(MXFP4_ROWS, {}, at(K_SCALE, lambda k_scale: apart(k_scale, 4))),
    "MXFP4 scale address": Case(MXFP4_ROWS, {}, at(K_SCALE, lambda k_scale: shifted(k_scale, 4))),
    "query strides": Case(PAGED, {}, at(Q, lambda q: apart(q, 128))),
    "query strides, contiguous keys": Case(SCORES, {}, at(Q, lambda q: apart(q, 128))),
    "query address": Case(PAGED, {}, at(Q, lambda q: shifted(q, 1))),
    "query address, contiguous keys": Case(SCORES, {}, at(Q, lambda q: shifted(q, 1))),
    "key stride": Case(SCORES, {}, at(KEYS, lambda k: apart(k, 8))),
    "key address": Case(SCORES, {}, at(KEYS, lambda k: shifted(k, 8))),
    "scale address": Case(SCORES, {}, at(K_SCALE, lambda k_scale: shifted(k_scale, 1))),
    "scale stride": Case(
        SCORES, {}, at(K_SCALE, lambda k_scale: strided(k_scale, *(2 * stride for stride in k_scale.stride())))
    ),
    "weights address": Case(SCORES, {}, at(WEIGHTS, lambda weights: shifted(weights, 1))),
    "weights stride": Case(SCORES, {}, at(WEIGHTS, lambda weights: apart(weights, 1))),
}
