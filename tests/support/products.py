"""Rows, ends, and what a product of packed weights may be off by."""

from __future__ import annotations

import torch

from sparse_attn.ops.layers.products.problem import Problem
from sparse_attn.ops.layers.products.reference import quantised_rows
from sparse_attn.weight_layout import PackedWeight, dequantise

NAN = float("nan")
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def rows_of(n, columns, dtype, device="cpu", seed=0):
    """Rows in a view whose rows and columns lie apart, NaN between them."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((n, 3 * columns + 5), NAN, dtype=dtype, device=device)
    wide[:, 1 : 1 + 2 * columns : 2] = torch.randn(n, columns, generator=generator).to(dtype).to(device)
    return wide[:, 1 : 1 + 2 * columns : 2]


def exact(rows, ends, weight):
    """(fp64 products, fp64 sums of their terms' magnitudes), on the CPU; 0 for rows behind the last end."""
    values = (dequantise(weight) if isinstance(weight, PackedWeight) else weight).cpu().double()
    rows = rows.cpu().double()
    out = rows.new_zeros(rows.shape[0], values.shape[1])
    size, start = out.clone(), 0
    for group, end in enumerate([rows.shape[0]] if ends is None else ends):
        out[start:end] = rows[start:end] @ values[group].t()
        size[start:end] = rows[start:end].abs() @ values[group].abs().t()
        start = end
    return out, size


def check(got, rows, ends, weight):
    """Each term is exact up to its scale's product, and sums in fp32 lose at most 2**-24 of their terms a step; on a
    GPU matrix units may drop bits of fp32 below 2**-22 of the largest term."""
    want, size = exact(rows, ends, weight)
    steps = rows.shape[1] + 4
    allowed = size * (steps * 2.0**-24 + 2.0**-21) + want.abs() * EPSILON[got.dtype]
    assert got.dtype == rows.dtype and got.shape == want.shape and got.is_contiguous()
    off = (got.cpu().double() - want).abs() - allowed
    assert off.max().item() <= 0 if off.numel() else True, f"{off.max()} beyond the bound of {allowed.max()}"


def check_quantised(got, rows, ends, weight):
    """Two bounds. Beside the rows as they are: an e4m3 value is off by 2**-4 of itself, or by 2**-10 of the scale where
    it is subnormal, and a scale is at most 2 / 448 of the largest magnitude of its 128 columns. Beside the quantised
    rows: what sums lose, on fp8 units 2**-13 of a product of 128 columns, or a little more where one term is larger than
    all others together: they drop of each term what lies 13 bits below the largest. So rows are drawn by a seed."""
    values, rows = dequantise(weight).cpu().double(), rows.cpu()
    blocks = torch.nn.functional.pad(rows.double().abs(), (0, -rows.shape[1] % 128)).unflatten(1, (-1, 128))
    least = (blocks.amax(-1, keepdim=True) * (2 / 448 * 2.0**-10)).expand_as(blocks).flatten(1)[:, : rows.shape[1]]
    off = torch.maximum(rows.double().abs() * 2.0**-4, least)
    exact, held = rows.double(), quantised_rows(rows).double()
    assert ((held - exact).abs() <= off).all()
    start = 0
    for group, end in enumerate([rows.shape[0]] if ends is None else ends):
        mine, weights = slice(start, end), values[group].t()
        size = held[mine].abs() @ weights.abs()
        slack = size * (2.0**-13 + rows.shape[1] * 2.0**-24)
        here = got[mine].cpu().double()
        for want, beside in ((held[mine] @ weights, 0), (exact[mine] @ weights, off[mine] @ weights.abs())):
            allowed = slack + beside + want.abs() * EPSILON[got.dtype] * 1.1 + beside * EPSILON[got.dtype]
            assert ((here - want).abs() <= allowed).all(), ((here - want).abs() - allowed).max()
        start = end
    assert not got[start:].any()


def tensor_of(ends, device="cpu"):
    """Ends that lie apart, wild ones between them."""
    wild = torch.full((2 * len(ends),), 2**31 - 1, dtype=torch.int32, device=device)
    wild[::2] = torch.tensor(ends, dtype=torch.int32, device=device)
    return wild[::2]


def drawn_ends(n, groups):
    """int64 [2, groups]: two ways to spread at most n rows over groups."""
    return torch.randint(0, n + 1, (2, groups), generator=torch.Generator().manual_seed(1)).sort(dim=1).values


def check_replays(multiply, given, spread, checked):
    """A captured product follows its ends: ``given``, which multiply() reads, becomes each of ``spread``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = multiply()
    for ends in spread:
        given.copy_(ends)
        graph.replay()
        checked(out, ends.tolist())


def in_line(tensor):
    """A copy whose rows begin at multiples of 16 bytes."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


def problem(rows, groups, **more):
    """Of bf16 rows and a weight of e4m3 in blocks of 128 x 128."""
    facts = dict(outputs=4096, columns=7168, dtype=torch.bfloat16, ends=groups > 1, codes="e4m3", scale="fp32")
    return Problem(rows, groups, **facts | dict(block=(128, 128)) | more)
