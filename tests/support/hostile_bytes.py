"""Bytes of a cache row by row, in plain Python: what oracles read and write."""

from __future__ import annotations

import math

import numpy
import torch

from sparse_attn.fp8 import FP8_DTYPE, FP8_MAX
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.mxfp4 import mxfp4_decode

INF = math.inf
MOST_ROWS = 2**31
F = numpy.float32


def decoded(codes: torch.Tensor, flavour: str) -> torch.Tensor:
    table = torch.arange(256, dtype=torch.uint8).view(FP8_DTYPE[flavour]).double()
    return table[codes.view(torch.uint8).long()]


# Caches: where the bytes of a token lie, and what they say.


def flat(cache: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage())


def fields(cache: torch.Tensor, layout, slot: int) -> list[slice]:
    """Elements of the cache's memory that hold a token: [values], or [codes, scales] or [codes, scales, rope]."""
    size = cache.shape[1]
    block, within = divmod(slot, size)
    base = cache.storage_offset() + block * cache.stride(0)
    if isinstance(layout, PlainLayout):
        return [slice(base + within * layout.dim, base + (within + 1) * layout.dim)]
    if isinstance(layout, IndexFp8Layout):
        at, scale = base + within * layout.dim, base + size * layout.dim + 4 * within
        return [slice(at, at + layout.dim), slice(scale, scale + 4)]
    if isinstance(layout, IndexMxfp4Layout):
        codes, groups = layout.dim // 2, layout.dim // 32
        at, scale = base + within * codes, base + size * codes + groups * within
        return [slice(at, at + codes), slice(scale, scale + groups)]
    if isinstance(layout, LatentFp8Layout):
        at = base + within * layout.row
        scale = at + layout.latent
        rope = scale + 4 * (layout.latent // layout.group)
        return [slice(at, scale), slice(scale, rope), slice(rope, rope + 2 * layout.rope)]
    record, scales = layout.latent + 2 * layout.rope, -(-(layout.latent // layout.group) // 8) * 8
    at, scale = base + within * record, base + size * record + within * scales
    return [slice(at, at + layout.latent), slice(scale, scale + scales), slice(at + layout.latent, at + record)]


def put(cache: torch.Tensor, layout, slot: int, values: torch.Tensor) -> None:
    memory, places = flat(cache), fields(cache, layout, slot)
    if isinstance(layout, PlainLayout):
        memory[places[0]] = values.to(layout.dtype)
        return
    values = values.float()
    if isinstance(layout, PlanarFp8Layout):
        values = values.bfloat16().float()
    group = layout.dim if isinstance(layout, IndexFp8Layout) else layout.group
    latent = layout.dim if isinstance(layout, IndexFp8Layout) else layout.latent
    floor = F(448.0) * F(2.0**-126) if isinstance(layout, LatentFp8Layout) else F(1e-4)
    codes, scales = [], []
    for first in range(0, latent, group):
        part = values[first : first + group].numpy()
        scale = F(max(abs(part).max(), floor)) / F(FP8_MAX[layout.flavour])
        if layout.scale_rule == "pow2":
            mantissa, exponent = math.frexp(float(scale))
            scale = F(math.ldexp(1.0, exponent - (mantissa == 0.5)))
        limit = F(FP8_MAX[layout.flavour])
        codes.append(
            torch.from_numpy((part / scale).clip(-limit, limit)).to(FP8_DTYPE[layout.flavour]).view(torch.uint8)
        )
        scales.append(float(scale))
    memory[places[0]] = torch.cat(codes)
    if isinstance(layout, PlanarFp8Layout):
        exponents = [int(math.log2(scale)) + 127 for scale in scales]
        written = torch.tensor(
            exponents + [0] * (8 * math.ceil(len(exponents) / 8) - len(exponents)), dtype=torch.uint8
        )
        memory[places[1]] = written
    else:
        memory[places[1]] = torch.tensor(scales, dtype=torch.float32).view(torch.uint8)
    if len(places) == 3:
        memory[places[2]] = values[latent:].bfloat16().contiguous().view(torch.uint8)


def parts(cache: torch.Tensor, layout, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes or values, fp32 scales) of a token."""
    memory, places = flat(cache), fields(cache, layout, slot)
    if isinstance(layout, PlainLayout):
        return memory[places[0]], torch.ones(1)
    scales = memory[places[1]]
    if isinstance(layout, IndexMxfp4Layout):
        return mxfp4_decode(memory[places[0]], scales), torch.ones(1)
    if isinstance(layout, PlanarFp8Layout):
        scales = 2.0 ** (scales[: layout.latent // layout.group].double() - 127)
    else:
        scales = scales.clone().view(torch.float32)
    return memory[places[0]], scales


def value(cache: torch.Tensor, layout, slot: int) -> torch.Tensor:
    """float64 of a token."""
    codes, scales = parts(cache, layout, slot)
    if isinstance(layout, PlainLayout):
        return codes.double()
    values = (decoded(codes, layout.flavour).unflatten(0, (len(scales), -1)) * scales.double().unsqueeze(1)).flatten()
    places = fields(cache, layout, slot)
    if len(places) == 3:
        values = torch.cat([values, flat(cache)[places[2]].clone().view(torch.bfloat16).double()])
    return values


def slot_of(cache_or_size, table, request: int, position: int, *, ring: bool = False, blocks: int | None = None):
    """The slot of a request's position, None for nowhere. blocks: how many the cache has."""
    size = cache_or_size if isinstance(cache_or_size, int) else cache_or_size.shape[1]
    if not 0 <= request < table.shape[0] or position < 0 or not table.shape[1]:
        return None
    column = position // size
    if ring:
        column %= table.shape[1]
    if column >= table.shape[1]:
        return None
    block = int(table[request, column])
    if block < 0 or (blocks is not None and block >= blocks):
        return None
    return block * size + position % size


def rotated(vector, position, cos_sin, start, interleaved, inverse=False):
    """float64 of a vector, its slice turned; zeros there for a position outside the table."""
    vector, width = vector.double().clone(), cos_sin.shape[1]
    if not 0 <= position < cos_sin.shape[0]:
        vector[start : start + width] = 0
        return vector
    for i in range(width // 2):
        a, b = (start + 2 * i, start + 2 * i + 1) if interleaved else (start + i, start + width // 2 + i)
        turn = complex(cos_sin[position, i], cos_sin[position, width // 2 + i])
        turned = complex(vector[a], vector[b]) * (turn.conjugate() if inverse else turn)
        vector[a], vector[b] = turned.real, turned.imag
    return vector


def transformed(vector):
    """Hadamard's matrix, entry by entry."""
    dim = len(vector)
    sign = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)], dtype=torch.float64)
    return sign @ vector.double() / math.sqrt(dim)
