"""What a layer does beside attention: hyper-connections and the router."""

from __future__ import annotations

from collections.abc import Iterator

from aot_cases.form import BF16, FP32, Case, floats, tensor
from sparse_attn.ops.hyper_connection import launch as hyper_connection
from sparse_attn.ops.router import launch as router

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
    for name, experts, top_k, groups, kept, score, more in (
        ("deepseek_v32", 256, 8, 8, 4, "sigmoid", False),
        ("glm5", 256, 8, 1, 1, "sigmoid", True),
        ("deepseek_v4_flash", 256, 6, 1, 1, "sqrtsoftplus", True),
        ("deepseek_v4_pro", 384, 6, 1, 1, "sqrtsoftplus", True),
        ("tiny_v32", 8, 2, 4, 2, "sigmoid", True),
    ):
        arguments = floats(TOKENS, experts), floats(experts), top_k, groups, kept, True, 2.5, score
        yield Case("biased_grouped_topk", name, router.biased_grouped_topk, arguments, more)
