"""Caches of nothing but poison, and caches of which only what is read is not."""

from __future__ import annotations

import math

import torch
from support.extremes import INT_MAX

from sparse_attn.layout import PlanarFp8Layout


def poison(dtype):
    """NaN, which a byte of 0xFF is as a code and as a scale; of other integers the highest."""
    if dtype == torch.uint8:
        return 0xFF
    return math.nan if dtype.is_floating_point or dtype.is_complex else INT_MAX


def nans(dtype, *shape):
    """NaN of many bits: quiet and signalling, of both signs, with payloads; and numbers and infinities between."""
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    number, infinity = torch.tensor([1.5, math.inf], dtype=dtype).view(integer).tolist()
    most = torch.iinfo(integer).max
    quiet = infinity + (most - infinity + 1) // 2
    bits = [quiet, quiet + 5, infinity + 1, most, most - 1, infinity, 0, number]
    both = torch.tensor([*bits, *(one - most - 1 for one in bits)], dtype=integer).view(dtype)
    return both[torch.randint(len(both), shape, generator=torch.Generator().manual_seed(0))]


def check_nans(values, written):
    """Stored NaN is one NaN; nothing else is."""
    integer = torch.int32 if written.dtype == torch.float32 else torch.int16
    assert values.isnan().any() and torch.equal(written.view(integer) == torch.iinfo(integer).max, values.isnan())


def same(a, b):
    """Equal bits."""
    return torch.equal(a.contiguous().view(torch.uint8).cpu(), b.contiguous().view(torch.uint8).cpu())


def poisoned_cache(layout, num_blocks, block_size, device="cpu", padding=0):
    """(cache, the memory it lies in [num_blocks, elements]): blocks stand ``padding`` elements apart, all is poison."""
    size = block_size * layout.row
    memory = torch.full((num_blocks, size + padding), poison(layout.dtype), dtype=layout.dtype, device=device)
    return memory[:, :size].unflatten(1, (block_size, layout.row)), memory


def live(ragged, count):
    """Which of 0 to ``count`` - 1 some row names."""
    named = ragged.indices[: int(ragged.indptr[-1])].long()
    return named[(named >= 0) & (named < count)].unique()


def poison_unread(rows, ragged):
    """NaN in every row of ``rows`` that no live index names."""
    read = live(ragged, len(rows))
    poisoned = torch.full_like(rows, math.nan)
    poisoned[read] = rows[read]
    return poisoned


def filled_cache(layout, num_blocks, block_size, ragged, device, seed=0, padding=0):
    """Slots that ``ragged`` names hold values; all else is poison, the pad bytes beside planar scales too."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_blocks * block_size, layout.dim, generator=generator).to(device) / 10
    cache, _ = poisoned_cache(layout, num_blocks, block_size, device, padding)
    read = live(ragged, len(values))
    layout.encode(cache, read, values[read])
    if isinstance(layout, PlanarFp8Layout):
        plane = cache.flatten(1)[:, block_size * layout.token_bytes :].unflatten(1, (block_size, layout.scale_bytes))
        plane[..., layout.groups :] = 0xFF
    return cache
