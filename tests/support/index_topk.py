"""Inputs of scores that are selected from."""

from __future__ import annotations

import torch
from support.extremes import INT_MAX, INT_MIN

from sparse_attn.cache import allocate_cache
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, PlainLayout

HEADS, DIM = 3, 32
LAYOUTS = {
    "fp8": IndexFp8Layout(DIM),
    "fnuz": IndexFp8Layout(DIM, "e4m3fnuz"),
    "bf16": PlainLayout("bf16", DIM),
    "fp32": PlainLayout("fp32", DIM),
    "mxfp4": IndexMxfp4Layout(DIM),
}


def codes(shape, generator):
    """fp8 codes without NaN or the largest exponents."""
    return torch.randint(0, 0x60, shape, generator=generator, dtype=torch.uint8) | (
        torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) << 7
    )


def mxfp4_query(values):
    """Queries [rows, heads, layout.row] of fp32 values [rows, heads, dim]: a row is a block of keys, one a head."""
    layout = IndexMxfp4Layout(values.shape[-1])
    query = torch.full((*values.shape[:2], layout.row), 0xFF, dtype=torch.uint8)
    layout.encode(query, torch.arange(values.shape[0] * values.shape[1]), values.flatten(0, 1))
    return query


def decode_case(layout, requests, next_n, context, block=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    columns = -(-context // block)
    blocks = requests * columns + 2
    cache = allocate_cache(layout, blocks, block, "cpu")
    shape = (requests, next_n, HEADS, DIM)
    if isinstance(layout, IndexFp8Layout):
        layout.encode(cache, torch.arange(blocks * block), torch.randn(blocks * block, DIM, generator=generator))
        q = codes(shape, generator).clamp_min(1)
    elif isinstance(layout, IndexMxfp4Layout):
        layout.encode(cache, torch.arange(blocks * block), torch.randn(blocks * block, DIM, generator=generator))
        q = mxfp4_query(torch.randn(requests * next_n, HEADS, DIM, generator=generator)).unflatten(0, shape[:2])
    else:
        cache.copy_(torch.randn(cache.shape, generator=generator))
        q = torch.randn(shape, generator=generator).to(layout.dtype)
    weights = torch.randn(requests * next_n, HEADS, generator=generator)
    lens = torch.randint(0, context + 3, (requests, next_n), generator=generator, dtype=torch.int32)
    for row, value in enumerate((context, 0, INT_MIN, INT_MAX)[: lens.numel()]):
        lens.view(-1)[row] = value
    table = torch.randperm(blocks, generator=generator)[: requests * columns].view(requests, columns).int()
    wild = torch.tensor([-1, INT_MIN, INT_MAX, blocks], dtype=torch.int32)
    table[-1, -1] = wild[seed % 4]
    return q, weights, cache, lens, table


def to(device, case):
    return [None if value is None else value.to(device) for value in case]
