"""KV caches and the compressor."""

from __future__ import annotations

from collections.abc import Iterator

from aot_cases.form import BF16, FP32, I64, Case, cache_of, floats, integers, tensor
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.compressor import launch as compressor
from sparse_attn.ops.attention.kv_cache import launch as kv_cache

TOKENS = 128


def cases() -> Iterator[Case]:
    yield from _kv_cache()
    yield from _compressor()


def _kv_cache() -> Iterator[Case]:
    for name, layout, dtype, more in (
        ("deepseek_v32", LatentFp8Layout(512, 64), BF16, False),
        ("deepseek_v32 fnuz", LatentFp8Layout(512, 64, flavour="e4m3fnuz"), BF16, True),
        ("deepseek_v32 bf16", PlainLayout("bf16", 512, 64), BF16, True),
        ("deepseek_v4", PlanarFp8Layout(448, 64), BF16, False),
        ("deepseek_v4 fnuz", PlanarFp8Layout(448, 64, flavour="e4m3fnuz"), BF16, True),
        ("deepseek_v4 bf16", PlainLayout("bf16", 512), BF16, True),
        ("tiny_v32", LatentFp8Layout(64, 16, 64), BF16, True),
        ("tiny_v4", PlanarFp8Layout(48, 16, 16), BF16, True),
        ("tiny_v32 fp32", PlainLayout("fp32", 64, 16), FP32, True),
    ):
        cache = cache_of(layout)
        latent, rope = tensor(TOKENS, layout.latent, dtype=dtype), tensor(TOKENS, layout.rope, dtype=dtype)
        write = latent, rope, cache, tensor(TOKENS, dtype=I64), layout.name
        yield Case("write_kv_cache", name, kv_cache.write_kv_cache, write, more)
        starts = integers(4) if isinstance(layout, PlanarFp8Layout) else None
        gather = cache, integers(4, 256), integers(5), starts, 8192, layout.name, dtype
        yield Case("gather_kv_cache", name, kv_cache.gather_kv_cache, gather, more)


def _compressor() -> Iterator[Case]:
    for name, layout, ratio, hadamard, more in (
        ("entries of 4", PlanarFp8Layout(448, 64), 4, False, False),
        ("entries of 128", PlanarFp8Layout(448, 64), 128, False, True),
        ("index entries", IndexFp8Layout(128), 4, True, False),
        ("index entries, mxfp4", IndexMxfp4Layout(128), 4, True, True),
        ("entries of 4, fnuz", PlanarFp8Layout(448, 64, flavour="e4m3fnuz"), 4, False, True),
        ("index entries, fnuz", IndexFp8Layout(128, "e4m3fnuz"), 4, True, True),
        ("entries of 128, bf16", PlainLayout("bf16", 512), 128, False, True),
        ("tiny entries", PlanarFp8Layout(48, 16, 16), 4, False, True),
        ("tiny entries of 128, fp32", PlainLayout("fp32", 64), 128, False, True),
    ):
        dim, overlap = layout.dim, ratio == 4
        parts = 2 if overlap else 1
        rope = 64 if dim >= 128 else 16
        values, state = floats(TOKENS, parts * dim), floats(256, parts * ratio, 2 * parts * dim)
        arguments = (
            values, values, floats(ratio, parts * dim), tensor(dim), integers(TOKENS), integers(TOKENS), state,
            integers(64, 1), cache_of(layout, 1024, 256 // ratio), tensor(TOKENS, dtype=I64), floats(4096, rope), ratio,
            overlap, 1e-6, dim - rope, hadamard, layout.name,
        )  # fmt: skip
        yield Case("compress_and_cache", name, compressor.compress_and_cache, arguments, more)
