"""The lightning indexer: queries, key caches, scores, selection."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from aot_cases.form import BF16, FP32, I32, I64, U8, Case, cache_of, floats, integers, tensor
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, PlainLayout
from sparse_attn.ops.indexer.keys import launch as index_cache
from sparse_attn.ops.indexer.queries import launch as index_query
from sparse_attn.ops.indexer.scores import launch as index_logits
from sparse_attn.ops.topk.fused import launch as index_topk
from sparse_attn.ops.topk.ranks import fake
from sparse_attn.ops.topk.ranks import launch as rank_topk
from sparse_attn.ops.topk.select import launch as topk

FN, FNUZ, MXFP4 = IndexFp8Layout(128), IndexFp8Layout(128, "e4m3fnuz"), IndexMxfp4Layout(128)
BUDGET = 1 << 28  # bytes of logits


def cases() -> Iterator[Case]:
    yield from _query()
    yield from _cache()
    yield from _prefill_scores()
    yield from _decode_scores()
    yield from _selection()
    yield from _ranks()
    yield from _fused()


def _query() -> Iterator[Case]:
    for name, heads, dim, start, interleaved, hadamard, layout, dtype, more in (
        ("deepseek_v32", 64, 128, 0, False, True, FN, BF16, False),
        ("deepseek_v32 fnuz", 64, 128, 0, False, True, FNUZ, BF16, True),
        ("glm5", 32, 128, 0, True, False, FN, BF16, True),
        ("deepseek_v4", 64, 128, 64, True, True, FN, BF16, True),
        ("deepseek_v4 bf16", 64, 128, 64, True, True, PlainLayout("bf16", 128), BF16, True),
        ("deepseek_v4 mxfp4", 64, 128, 64, True, True, MXFP4, BF16, False),
        ("tiny_v32", 4, 32, 0, False, True, IndexFp8Layout(32), BF16, True),
        ("tiny_v4 fp32", 4, 32, 16, True, True, PlainLayout("fp32", 32), FP32, True),
    ):
        rope = floats(4096, 64 if dim == 128 else 16)
        arguments = (
            tensor(128, heads, dim, dtype=dtype), floats(128, heads), integers(128), rope, start, interleaved, hadamard,
            0.1, layout.name,
        )  # fmt: skip
        yield Case("indexer_q_rope_quant", name, index_query.indexer_q_rope_quant, arguments, more)


def _cache() -> Iterator[Case]:
    for name, layout, dtype, more in (
        ("fp8", FN, BF16, False),
        ("fnuz", FNUZ, BF16, True),
        ("bf16", PlainLayout("bf16", 128), BF16, True),
        ("mxfp4", MXFP4, BF16, False),
        ("tiny", IndexFp8Layout(32), BF16, True),
        ("tiny fp32", PlainLayout("fp32", 32), FP32, True),
    ):
        cache = cache_of(layout)
        write = tensor(128, layout.dim, dtype=dtype), cache, tensor(128, dtype=I64), layout.name
        yield Case("indexer_k_quant_and_cache", name, index_cache.indexer_k_quant_and_cache, write, more)
        gather = cache, integers(4, 256), integers(5), 8192, layout.name
        yield Case("gather_indexer_k", name, index_cache.gather_indexer_k, gather, more)


def _prefill_scores() -> Iterator[Case]:
    """Few rows of few keys, and many of many; index_topk scores with the same kernel, but leaves the rest unwritten."""
    for name, heads, dim, flavour, dtype, more in (
        ("deepseek_v32", 64, 128, "e4m3fn", U8, False),
        ("deepseek_v32 fnuz", 64, 128, "e4m3fnuz", U8, True),
        ("deepseek_v32 bf16", 64, 128, "none", BF16, False),
        ("deepseek_v32 fp32", 64, 128, "none", FP32, True),
        ("glm5", 32, 128, "e4m3fn", U8, True),
        ("glm5 bf16", 32, 128, "none", BF16, True),
        ("tiny_v32", 4, 32, "e4m3fn", U8, True),
        ("tiny_v32 fp32", 4, 32, "none", FP32, False),
        ("128 heads", 128, 128, "e4m3fn", U8, True),
        ("128 heads of 256", 128, 256, "e4m3fn", U8, True),
        ("128 heads of 256 fnuz", 128, 256, "e4m3fnuz", U8, True),
        ("128 heads of 256 bf16", 128, 256, "none", BF16, False),
        ("6 heads of 100 bf16", 6, 100, "none", BF16, True),
    ):
        for rows, keys in ((2048, 32768), (128, 1024)):
            arguments = (
                tensor(rows, heads, dim, dtype=dtype), tensor(keys, dim, dtype=dtype),
                floats(keys) if flavour != "none" else None, floats(rows, heads), integers(rows), integers(rows),
                flavour,
            )  # fmt: skip
            yield Case("mqa_logits", f"{name}, {rows} rows", index_logits.mqa_logits, arguments, more or rows == 128)
    for name, heads, dim, more in (("deepseek_v4 mxfp4", 64, 128, False), ("glm5 mxfp4", 32, 128, True)):
        for rows, keys in ((2048, 32768), (128, 1024)):
            arguments = (
                tensor(rows, heads, dim // 2 + dim // 32, dtype=U8), tensor(keys, dim // 2, dtype=U8),
                tensor(keys, dim // 32, dtype=U8), floats(rows, heads), integers(rows), integers(rows), "mxfp4",
            )  # fmt: skip
            yield Case("mqa_logits", f"{name}, {rows} rows", index_logits.mqa_logits, arguments, more or rows == 128)
            portable = functools.partial(index_logits.mqa_logits, kernel="portable")
            yield Case("mqa_logits", f"{name}, portable, {rows} rows", portable, arguments, more or rows == 128)
    arguments = (  # weights that no TMA copies
        tensor(2048, 64, 128, dtype=U8), tensor(32768, 128, dtype=U8), floats(32768), floats(2048, 66)[:, :64],
        integers(2048), integers(2048), "e4m3fn",
    )  # fmt: skip
    yield Case("mqa_logits", "deepseek_v32, weights between lines", index_logits.mqa_logits, arguments)


def _decode_scores() -> Iterator[Case]:
    for name, heads, dim, next_n, kind, dtype, more in (
        ("deepseek_v32", 64, 128, 1, "e4m3fn", U8, False),
        ("deepseek_v32, 2 tokens", 64, 128, 2, "e4m3fn", U8, False),
        ("deepseek_v32, 4 tokens", 64, 128, 4, "e4m3fn", U8, True),
        ("glm5", 32, 128, 1, "e4m3fn", U8, True),
        ("deepseek_v32 fnuz", 64, 128, 2, "e4m3fnuz", U8, False),
        ("deepseek_v32 bf16", 64, 128, 1, "bf16", BF16, False),
        ("deepseek_v32 bf16, 2 tokens", 64, 128, 2, "bf16", BF16, True),
        ("deepseek_v32 fp32", 64, 128, 1, "fp32", FP32, True),
        ("deepseek_v32 fp32, 2 tokens", 64, 128, 2, "fp32", FP32, True),
        ("glm5, 4 tokens", 32, 128, 4, "e4m3fn", U8, True),
        ("glm5 fp32", 32, 128, 1, "fp32", FP32, True),
        ("tiny_v32", 4, 32, 1, "e4m3fn", U8, True),
        ("tiny_v32 fp32", 4, 32, 1, "fp32", FP32, True),
        ("128 heads, 3 tokens", 128, 128, 3, "e4m3fn", U8, True),
        ("128 heads of 256", 128, 256, 1, "e4m3fn", U8, True),
        ("128 heads of 256 fnuz", 128, 256, 1, "e4m3fnuz", U8, True),
        ("128 heads of 256 bf16", 128, 256, 1, "bf16", BF16, True),
    ):
        layout = IndexFp8Layout(dim, kind) if dtype == U8 else PlainLayout(kind, dim)
        arguments = (
            tensor(4, next_n, heads, dim, dtype=dtype), cache_of(layout), floats(4 * next_n, heads),
            integers(4, next_n), integers(4, 1024), 65536, layout.name,
        )  # fmt: skip
        yield Case("paged_mqa_logits", name, index_logits.paged_mqa_logits, arguments, more)
    for name, heads, next_n, block_size, context, more in (
        ("deepseek_v4 mxfp4", 64, 1, 64, 65536, False),
        ("deepseek_v4 mxfp4, many keys", 64, 1, 64, 1 << 18, True),
        ("deepseek_v4 mxfp4, 2 tokens", 64, 2, 64, 65536, True),
        ("glm5 mxfp4, 4 tokens, blocks of 16", 32, 4, 16, 65536, True),
        ("tiny_v4 mxfp4", 4, 1, 64, 65536, True),
    ):
        layout = IndexMxfp4Layout(128 if heads > 4 else 32)
        arguments = (
            tensor(4, next_n, heads, layout.row, dtype=U8), cache_of(layout, block_size=block_size),
            floats(4 * next_n, heads), integers(4, next_n), integers(4, context // 64), context, layout.name,
        )  # fmt: skip
        yield Case("paged_mqa_logits", name, index_logits.paged_mqa_logits, arguments, more)
        if block_size == 64 and heads > 4:
            portable = functools.partial(index_logits.paged_mqa_logits, kernel="portable")
            yield Case("paged_mqa_logits", f"{name}, portable", portable, arguments, more)
    for next_n in (1, 2):
        arguments = (
            tensor(4, next_n, 64, 128, dtype=U8), cache_of(FN, block_size=32), floats(4 * next_n, 64),
            integers(4, next_n), integers(4, 2048), 65536, FN.name,
        )  # fmt: skip
        name = f"deepseek_v32, blocks of 32, {next_n} tokens"
        yield Case("paged_mqa_logits", name, index_logits.paged_mqa_logits, arguments, next_n == 2)


def _selection() -> Iterator[Case]:
    """Rows one program holds, rows several programs share, rows of one program each, and k too large to cut down to."""
    for rows, width, k, more in (
        (128, 96, 64, True),
        (128, 512, 512, True),
        (8, 1024, 512, True),
        (4096, 96, 64, True),
        (4096, 1024, 512, True),
        (128, 2048, 512, True),
        (128, 4096, 2048, True),
        (128, 8192, 2048, False),
        (4096, 8192, 2048, True),
        (1, 131072, 512, True),
        (1, 131072, 2048, False),
        (4, 131072, 2048, True),
        (16, 65536, 2048, False),
        (24, 131072, 1000, True),
        (64, 131072, 1000, True),
        (32, 131072, 2048, True),
        (96, 65536, 2048, True),
        (128, 262144, 2048, False),
        (2048, 32768, 512, True),
        (2048, 32768, 2048, False),
        (2048, 131072, 2048, False),
        (64, 131072, 7000, False),
    ):
        for line in ("", ", unaligned"):
            logits = floats(rows, width + (1 if line else 0))[:, :width]
            arguments = logits, None, integers(rows), k
            yield Case(
                "top_k_per_row", f"{k} of {rows} x {width}{line}", topk.top_k_per_row, arguments, more or bool(line)
            )


def _ranks() -> Iterator[Case]:
    for rows, width, block_size in ((64, 16384, 64), (1, 131072, 64), (3, 1000, 300)):
        logits, ends, state = floats(rows, width), integers(rows), integers(rows, 2)
        size = f"{rows} x {width}"
        blocks = -(-width // block_size)
        ties = tensor(8, rows, blocks, dtype=U8 if block_size < 256 else I32)
        for level in (0, 1, 2):
            before = (integers(rows, 2048), state) if level else (None, None)
            yield Case(
                "count_digits", f"digit {level} of {size}", rank_topk.count_digits,
                (logits, None, ends, *before, 2048, level), rows != 64,
            )  # fmt: skip
        yield Case(
            "count_ties", size, rank_topk.count_ties, (logits, None, ends, integers(rows, 1024), state, block_size),
            rows != 64,
        )  # fmt: skip
        yield Case(
            "take_winners",
            size,
            rank_topk.take_winners,
            (logits, None, ends, ties, ties[0], state, 2048, block_size, 3),
            rows != 64,
        )
        for ranks, k in ((4, 2048), (8, 2048), (8, 512), (3, 100)):
            columns, words = integers(rows, k), k + fake.count_words(width, block_size)
            if ranks != 8:
                yield Case(
                    "pack_candidates", f"{k} of {size}", rank_topk.pack_candidates,
                    (logits, columns, None, block_size), rows != 64,
                )  # fmt: skip
            yield Case(
                "merge_candidates", f"{k} of {ranks} ranks, {size}", rank_topk.merge_candidates,
                (tensor(ranks, rows, words, dtype=I32), columns, block_size, 1), rows != 64,
            )  # fmt: skip


def _fused() -> Iterator[Case]:
    for name, heads, layout, k, width, more in (
        ("deepseek_v32", 64, FN, 2048, 65536, True),
        ("deepseek_v32 fnuz", 64, FNUZ, 2048, 65536, True),
        ("deepseek_v4_flash", 64, FN, 512, 8192, True),
    ):
        dim = layout.dim
        prefill = (
            tensor(2048, heads, dim, dtype=U8), floats(2048, heads), tensor(width, dim, dtype=U8), floats(width),
            integers(2048), integers(2048), k, layout.flavour, BUDGET,
        )  # fmt: skip
        yield Case("index_topk_prefill", name, index_topk.index_topk_prefill, prefill, more)
        decode = (
            tensor(4, 1, heads, dim, dtype=U8), floats(4, heads), cache_of(layout), integers(4, 1), integers(4, 1024),
            k, width, layout.name, BUDGET,
        )  # fmt: skip
        yield Case("index_topk_decode", name, index_topk.index_topk_decode, decode, more)
    for name, requests, next_n, k, width, more, where in (
        ("deepseek_v32", 1, 1, 2048, 32768, True, "sm_90"),
        ("deepseek_v32, 131072", 12, 1, 2048, 131072, False, "sm_90"),
        ("deepseek_v32, 64 x 131072", 64, 1, 2048, 131072, True, ""),
        ("deepseek_v32, 1024 rows", 1024, 1, 2048, 32768, True, ""),
        ("deepseek_v32, 1024 of 2 tokens x 131072", 1024, 2, 2048, 131072, True, ""),
        ("deepseek_v4_flash", 64, 1, 512, 8192, False, ""),
        ("deepseek_v4_flash, 8 x 1024", 8, 1, 512, 1024, True, "sm_90"),
        ("deepseek_v4, 64 of 4 tokens x 65536", 64, 4, 512, 65536, True, ""),
    ):
        slots = (
            tensor(requests, next_n, 64, 128, dtype=U8), floats(requests * next_n, 64), cache_of(FN),
            integers(requests, next_n), integers(requests, 2048), k, width, FN.name, BUDGET,
        )  # fmt: skip
        yield Case("index_topk_decode_slots", name, index_topk.index_topk_decode_slots, slots, more, where)
