"""What hostile calls are drawn of: sizes, layouts, tensors that lie free, tables and slots."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from support.hostile import INT_MAX, INT_MIN, amid, flag, ints

from sparse_attn.layout import IndexFp8Layout, LatentFp8Layout, PlainLayout, PlanarFp8Layout

NAN = math.nan
WILD64 = (-(2**63), -(2**40), -1, 2**31, 2**40, 2**63 - 1)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INDEX_LAYOUTS = (
    IndexFp8Layout(32), IndexFp8Layout(20, "e4m3fnuz", "raw"), PlainLayout("fp32", 16), PlainLayout("bf16", 24)
)  # fmt: skip
KEY_LAYOUTS = (
    LatentFp8Layout(32, 8, 16), LatentFp8Layout(48, 4, 16, "e4m3fnuz", "pow2"), PlanarFp8Layout(24, 8, group=8),
    PlanarFp8Layout(48, 16, 16, "e4m3fnuz"), PlainLayout("bf16", 12, 4), PlainLayout("fp32", 16),
)  # fmt: skip
ROUNDED = {torch.bfloat16: (1e-3, 2**-7), torch.float16: (1e-4, 2**-10), torch.float32: (1e-5, 1e-5)}


def pick(draw, choices):
    return draw(st.sampled_from(choices))


def maybe(draw, value):
    return value if flag(draw) else None


def free(draw, tensor):
    return amid(draw, tensor, free=True)


def table(draw, requests, columns, blocks_there):
    """A block table: blocks that are there, and some that are not."""
    return amid(draw, ints(draw, (requests, columns), 0, max(blocks_there - 1, 0)))


def slot_mapping(draw, tokens, cache, dtype):
    """Distinct slots, -1, and wild ones."""
    count = cache.shape[0] * cache.shape[1]
    chosen = draw(st.permutations(range(count)))[:tokens]
    chosen = torch.tensor([*chosen, *[-1] * (tokens - len(chosen))], dtype=dtype)
    wild = ints(draw, (tokens,), 0, 0, dtype, WILD64 if dtype == torch.int64 else (INT_MIN, -1, INT_MAX, count))
    return free(draw, torch.where(wild == 0, chosen, wild))


# Caches.
