"""What a layer does beside attention: hyper-connections, the router, products with packed weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from aot_cases.form import BF16, FP16, FP32, U8, Case, floats, integers, tensor
from sparse_attn.ops.layers.hyper_connection import launch as hyper_connection
from sparse_attn.ops.layers.products import launch as products_launch
from sparse_attn.ops.layers.rope import launch as rope
from sparse_attn.ops.layers.router import launch as router
from sparse_attn.weight_layout import SCALE_DTYPE, parse_weight_layout

TOKENS = 128


def cases() -> Iterator[Case]:
    for name, count, hidden, dtype, more in (
        ("deepseek_v4_flash", 4, 4096, BF16, True),
        ("deepseek_v4_pro", 4, 7168, BF16, False),
        ("tiny_v4 fp32", 4, 128, FP32, True),
        ("16 streams", 16, 7168, BF16, True),
    ):
        streams, comb = tensor(TOKENS, count, hidden, dtype=dtype), floats(TOKENS, count, count)
        mixed = streams, floats(TOKENS, 2 * count + count * count), floats(2 * count + count * count), floats(3)
        yield Case("hyper_mix", name, hyper_connection.hyper_mix, (*mixed, 20, 1e-6, 1e-6), more)
        merged = tensor(TOKENS, hidden, dtype=dtype), streams, floats(TOKENS, count), comb
        yield Case("hyper_merge", name, hyper_connection.hyper_merge, merged, more)
    for name, heads, dim, start, width, interleaved, inverse, dtype, more in (
        ("deepseek_v32 queries", 128, 64, 0, 64, True, False, BF16, False),
        ("deepseek_v32 index keys", 0, 128, 0, 64, False, False, BF16, True),
        ("deepseek_v4 outputs", 64, 512, 448, 64, True, True, BF16, True),
        ("tiny_v4 fp32", 4, 32, 24, 8, True, True, FP32, True),
    ):
        x = tensor(TOKENS, heads, dim, dtype=dtype) if heads else tensor(TOKENS, dim, dtype=dtype)
        arguments = x, integers(TOKENS), floats(4096, width), start, interleaved, inverse
        yield Case("apply_rope", name, rope.apply_rope, arguments, more)
    for name, experts, top_k, groups, kept, score, more in (
        ("deepseek_v32", 256, 8, 8, 4, "sigmoid", False),
        ("glm5", 256, 8, 1, 1, "sigmoid", True),
        ("deepseek_v4_flash", 256, 6, 1, 1, "sqrtsoftplus", True),
        ("deepseek_v4_pro", 384, 6, 1, 1, "sqrtsoftplus", True),
        ("tiny_v32", 8, 2, 4, 2, "sigmoid", True),
    ):
        arguments = floats(TOKENS, experts), floats(experts), top_k, groups, kept, True, 2.5, score
        yield Case("biased_grouped_topk", name, router.biased_grouped_topk, arguments, more)
    yield from products()
    yield from routed()
    for name, rows, groups, outputs, columns, layout, more in (
        ("fp8 linear", 4096, 1, 24576, 1536, "e4m3/128x128/fp32", False),
        ("MXFP4 experts", 24576, 256, 4096, 4096, "e2m1/1x32/e8m0", False),
        ("fp8 groups of heads", 32768, 8, 1024, 4096, "e4m3/128x128/e8m0", False),
        ("fp8 experts", 4096, 256, 4096, 7168, "e4m3/128x128/e8m0", True),
        ("fp8 experts, many rows", 32768, 256, 4096, 7168, "e4m3/128x128/fp32", True),
        ("fp8 experts, fp32 scales", 8192, 256, 4096, 7168, "e4m3/128x128/fp32", False),
    ):
        arguments = tensor(rows, columns), None if groups == 1 else integers(groups)
        arguments += (*packed(layout, groups, outputs, columns), False)
        yield Case("grouped_linear_fp8", name, products_launch.grouped_linear_fp8, arguments, more)


def products() -> Iterator[Case]:
    for name, dtype, rows, groups, outputs, columns, layout, more in (
        ("MXFP4 experts", BF16, 48, 256, 4096, 4096, "e2m1/1x32/e8m0", False),
        ("MXFP4 experts, many rows", BF16, 24576, 256, 4096, 4096, "e2m1/1x32/e8m0", False),
        ("MXFP4 experts fp16", FP16, 4096, 256, 4096, 4096, "e2m1/1x32/e8m0", True),
        ("MXFP4 experts fp32", FP32, 4096, 256, 4096, 4096, "e2m1/1x32/e8m0", True),
        ("fp8 experts, fp32 scales", BF16, 512, 256, 4096, 7168, "e4m3/128x128/fp32", False),
        ("fp8 experts, many rows", BF16, 32768, 256, 4096, 7168, "e4m3/128x128/fp32", True),
        ("fp8 experts, e8m0 scales", BF16, 8192, 256, 4096, 7168, "e4m3/64x128/e8m0", True),
        ("fp8 linear", BF16, 1, 1, 24576, 1536, "e4m3/128x128/fp32", False),
        ("fp8 linear, splits", BF16, 1, 1, 7168, 16384, "e4m3/128x128/fp32", False),
        ("fp8 linear, 32 rows", BF16, 32, 1, 24576, 1536, "e4m3/128x128/fp32", False),
        ("fp8 linear, 64 rows", BF16, 64, 1, 24576, 1536, "e4m3/128x128/fp32", False),
        ("fp8 linear, splits, 64 rows", BF16, 64, 1, 7168, 16384, "e4m3/128x128/fp32", False),
        ("fp8 linear, splits, 128 rows", BF16, 128, 1, 7168, 16384, "e4m3/128x128/fp32", False),
        ("fp8 linear, many rows", BF16, 4096, 1, 24576, 1536, "e4m3/128x128/e8m0", False),
        ("fp8 linear, many rows, fp32 scales", BF16, 4096, 1, 7168, 16384, "e4m3/128x128/fp32", False),
        ("fp8 linear, many rows and columns", BF16, 4096, 1, 4096, 8192, "e4m3/128x128/e8m0", False),
        ("fp8 linear, 600 rows", BF16, 600, 1, 576, 7168, "e4m3/128x128/fp32", False),
        ("MXFP4 linear, many rows", BF16, 4096, 1, 4096, 4096, "e2m1/1x32/e8m0", True),
        ("fp8 groups of heads, many rows", BF16, 32768, 8, 1024, 4096, "e4m3/128x128/e8m0", False),
        ("fp8 linear fp16, 32 x 32", FP16, 64, 1, 4096, 5120, "e4m3/32x32/e8m0", True),
        ("fp8 linear fp32", FP32, 64, 1, 7168, 2048, "e4m3/128x128/fp32", False),
        ("plain experts", BF16, 512, 64, 1024, 2048, "plain", True),
    ):
        if layout == "plain":
            codes, scales = tensor(groups, outputs, columns, dtype=dtype), None
        else:
            codes, scales, _ = packed(layout, groups, outputs, columns)
        ends = None if groups == 1 else integers(groups)
        arguments = tensor(rows, columns, dtype=dtype), ends, codes, scales, layout, False
        yield Case("grouped_linear", name, products_launch.grouped_linear, arguments, more)


def routed() -> Iterator[Case]:
    made = {}
    for name, tokens, top_k, count, hidden, intermediate, layout, more in (
        ("deepseek_v4_flash", 8, 6, 256, 4096, 2048, "e2m1/1x32/e8m0", False),
        ("deepseek_v4_flash, many tokens", 4096, 6, 256, 4096, 2048, "e2m1/1x32/e8m0", False),
        ("deepseek_v4_flash, 512 tokens", 512, 6, 256, 4096, 2048, "e2m1/1x32/e8m0", False),
        ("deepseek_v4_flash, 1024 tokens", 1024, 6, 256, 4096, 2048, "e2m1/1x32/e8m0", True),
        ("deepseek_v4_flash, 2048 tokens", 2048, 6, 256, 4096, 2048, "e2m1/1x32/e8m0", True),
        ("deepseek_v32", 8, 8, 256, 7168, 2048, "e4m3/128x128/fp32", False),
        ("deepseek_v32, 64 tokens", 64, 8, 256, 7168, 2048, "e4m3/128x128/fp32", False),
        ("deepseek_v32, many tokens", 4096, 8, 256, 7168, 2048, "e4m3/128x128/fp32", True),
        ("fp8 experts, e8m0 scales", 8, 8, 256, 7168, 2048, "e4m3/128x128/e8m0", True),
    ):
        gate_up = packed(layout, count, 2 * intermediate, hidden)
        down = packed(layout, count, hidden, intermediate)
        routes = floats(tokens, top_k), integers(tokens, top_k)
        made[name] = tensor(tokens, hidden), *routes, *gate_up, *down, 10.0, count
        yield Case("packed_experts", name, products_launch.packed_experts, (*made[name], "exact", False), more)
    for name, source, tokens, batch_invariant, more in (
        ("512 tokens", "deepseek_v4_flash, 512 tokens", 512, False, False),
        ("512 tokens, batch-invariant", "deepseek_v4_flash, 512 tokens", 512, True, False),
        ("2048 tokens", "deepseek_v4_flash, many tokens", 2048, False, True),
        ("many tokens", "deepseek_v4_flash, many tokens", 4096, False, False),
    ):
        x, *routes = (part[:tokens] for part in made[source][:3])
        arguments = x, *routes, *made[source][3:], "fp8", batch_invariant
        yield Case("packed_experts", f"fp8 rows, {name}", products_launch.packed_experts, arguments, more)


def packed(layout: str, groups: int, outputs: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """(codes, scales, layout) of that shape."""
    parsed = parse_weight_layout(layout)
    stored = columns // 2 if parsed.codes == "e2m1" else columns
    grid = groups, *parsed.grid(outputs, columns)
    return tensor(groups, outputs, stored, dtype=U8), tensor(*grid, dtype=SCALE_DTYPE[parsed.scale]), layout
