"""Sparse attention: prefill over rows, decode over one cache or two, split and whole rows, and their combine."""

from __future__ import annotations

from collections.abc import Iterator

from aot_cases.form import BF16, FP16, FP32, Case, cache_of, floats, integers, tensor
from sparse_attn.layout import LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.sparse import launch
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import CompressedSpec, preset

MANY = 2048  # rows that fill every machine, so that none is split


def cases() -> Iterator[Case]:
    yield from _prefill()
    yield from _decode()
    yield from _merge()
    yield from _into()


def _prefill() -> Iterator[Case]:
    for name, dtype, more in (
        ("deepseek_v32", BF16, False), ("deepseek_v32", FP16, True), ("deepseek_v32", FP32, True), ("glm5", BF16, True),
        ("deepseek_v4_pro", BF16, True), ("deepseek_v4_pro", FP32, True), ("tiny_v32", BF16, True),
        ("tiny_v32", FP32, False), ("tiny_v4", BF16, True),
    ):  # fmt: skip
        spec = preset(name)
        kind = str(dtype).removeprefix("torch.")
        yield _rows(f"{name} {kind}", spec.num_heads, *_dims(spec), MANY, dtype, more=more)
    yield _rows("deepseek_v32 of 8 devices", 16, 576, 512, MANY, BF16, more=True, where="hopper")
    yield _rows("deepseek_v4_pro of 4 devices", 32, 512, 512, MANY, BF16, sink=True, more=True, where="hopper")
    yield _rows("deepseek_v32 of 8 devices, a row", 16, 576, 512, 1, BF16, more=True)
    yield _rows("deepseek_v32, a row", 128, 576, 512, 1, BF16, more=True)
    yield _rows("deepseek_v32, three rows", 128, 576, 512, 3, BF16)
    yield _rows("deepseek_v4_flash, a row and a sink", 64, 512, 512, 1, BF16, sink=True, more=True)
    yield _rows("few keys", 128, 576, 512, 1, BF16, keys=40, more=True)


def _decode() -> Iterator[Case]:
    latent, planar = LatentFp8Layout(512, 64), PlanarFp8Layout(448, 64)
    heads_too = ((1, 128, True), (128, 128, False), (4, 128, True), (128, 16, True), (64, 16, True), (64, 32, True))
    for batch, heads, more in heads_too:
        name = f"deepseek_v32 fp8, batch {batch}, {heads} heads"
        yield _paged(name, batch, heads, latent, more=more, where="hopper" if batch in (4, 64) else "")
    combining = "sm_90 sparse_attn.ops.attention.sparse.hopper.combine"
    yield _paged("deepseek_v32 fp8, batch 34 in two parts", 34, 128, latent, more=True, where=combining)
    whole_and_split = "sm_90 sparse_attn.ops.attention.sparse.hopper.decode_fp8"
    yield _paged("deepseek_v32 fp8, batch 67 in two parts", 67, 128, latent, where=whole_and_split)
    fnuz = LatentFp8Layout(512, 64, flavour="e4m3fnuz")
    yield _paged("deepseek_v32 fnuz", 4, 128, fnuz, more=True, where="gfx942")
    yield _paged("deepseek_v32 fp8, blocks apart", 4, 128, latent, gap=64, more=True)
    yield _paged("deepseek_v32 fp8, 32 heads, blocks apart", 4, 32, latent, gap=64, more=True)
    yield _paged("deepseek_v32 bf16, 8 heads", 64, 8, PlainLayout("bf16", 512, 64), more=True)
    yield _paged("deepseek_v32 bf16", 4, 128, PlainLayout("bf16", 512, 64), more=True)
    yield _paged("deepseek_v32 bf16, blocks apart", 4, 128, PlainLayout("bf16", 512, 64), gap=64, more=True)
    yield _paged("deepseek_v32 fp32 queries, fp8", 4, 128, latent, dtype=FP32, more=True)
    yield _paged("deepseek_v32 fp32", 4, 128, PlainLayout("fp32", 512, 64), dtype=FP32, more=True)
    heads_too = ((1, 64, True), (128, 128, False), (4, 64, True), (128, 16, True), (64, 16, True), (64, 32, True))
    for batch, heads, more in heads_too:
        name = f"deepseek_v4, batch {batch}, {heads} heads"
        where = "hopper" if (batch, heads) in ((4, 64), (64, 32)) else ""
        yield _paged(name, batch, heads, planar, extra=planar, sink=True, more=more, where=where)
    name = "deepseek_v4, batch 67 in two parts"
    yield _paged(name, 67, 128, planar, extra=planar, sink=True, more=True, where=whole_and_split)
    fnuz = PlanarFp8Layout(448, 64, flavour="e4m3fnuz")
    yield _paged("deepseek_v4 fnuz", 4, 128, fnuz, extra=fnuz, sink=True, more=True)
    yield _paged("deepseek_v4, window layer", 128, 64, planar, sink=True, more=True)
    yield _paged("deepseek_v4, window layer, 32 heads", 128, 32, planar, sink=True, more=True)
    yield _paged(
        "deepseek_v4 bf16", 4, 128, PlainLayout("bf16", 512), extra=PlainLayout("bf16", 512), sink=True, more=True
    )
    yield _paged("deepseek_v4, bf16 window, fp8 entries", 128, 128, PlainLayout("bf16", 512), extra=planar, more=True)
    for name in ("tiny_v32", "tiny_v4"):
        spec = preset(name)
        for kind in ("fp8", "fp32"):
            layout = cache_layouts(spec, kind).kv
            dtype = FP32 if kind == "fp32" else BF16
            extra = layout if isinstance(spec, CompressedSpec) else None
            yield _paged(f"{name} {kind}", 2, spec.num_heads, layout, extra=extra, dtype=dtype, keys=64, more=True)


def _merge() -> Iterator[Case]:
    for states, dtype, more in ((2, BF16, False), (8, FP32, True), (132, BF16, False)):
        arguments = tensor(states, 4, 128, 512, dtype=dtype), floats(states, 4, 128), floats(128)
        yield Case("merge_attn_states", f"{states} states", launch.merge_attn_states, arguments, more)
    arguments = tensor(8, 64, 16, 512, dtype=BF16), floats(8, 64, 128)[..., 16:32], None
    yield Case("merge_attn_states", "16 heads of 8 ranks", launch.merge_attn_states, arguments)


def _into() -> Iterator[Case]:
    """What other libraries' call sites ask for: lengths, lse inf of empty rows, and in prefill the largest scores."""
    latent, planar, bf16 = LatentFp8Layout(512, 64), PlanarFp8Layout(448, 64), PlainLayout("bf16", 512, 64)
    for lengths in (False, True):
        kind = "with lengths" if lengths else "without lengths"
        for batch, heads, where in ((1, 128, ""), (128, 128, ""), (67, 128, "hopper"), (64, 16, "hopper")):
            yield _written(f"deepseek_v32 fp8, batch {batch}, {heads} heads, {kind}", batch, heads, latent,
                           lengths=lengths, more=True, where=where)  # fmt: skip
        for batch, heads, where in ((4, 64, ""), (128, 128, "hopper"), (64, 32, "hopper")):
            yield _written(f"deepseek_v4, batch {batch}, {heads} heads, {kind}", batch, heads, planar, extra=planar,
                           sink=True, lengths=lengths, more=True, where=where)  # fmt: skip
        yield _written(f"deepseek_v32 rows, {kind}", MANY, 128, bf16, rows=True, maxima=True, lengths=lengths)
    for tokens, heads in ((MANY, 16), (64, 16), (64, 32), (4, 128)):
        yield _written(f"deepseek_v32 rows, {tokens} of {heads} heads", tokens, heads, bf16, rows=True, maxima=True,
                       lengths=True, more=True)  # fmt: skip
    yield _written("512 wide rows and a sink", MANY, 64, PlainLayout("bf16", 512), rows=True, maxima=True, sink=True,
                   more=True, where="hopper")  # fmt: skip
    yield _written("deepseek_v32 rows, lse alone", MANY, 128, bf16, rows=True, more=True, where="hopper")


def _written(name, tokens, heads, layout, *, extra=None, keys=2048, rows=False, maxima=False, lengths=False, sink=False,
             more=False, where="") -> Case:  # fmt: skip
    cache = tensor(65536, layout.dim, dtype=BF16) if rows else cache_of(layout)
    second = (None, None, None, None, "")
    if extra is not None:
        some = integers(tokens) if lengths else None
        second = (cache_of(extra), integers(tokens * 512), integers(tokens + 1), some, extra.name)
    q, out = tensor(tokens, heads, layout.latent + layout.rope, dtype=BF16), tensor(tokens, heads, 512, dtype=BF16)
    arguments = (
        q, cache, integers(tokens * keys), integers(tokens + 1), integers(tokens) if lengths else None, 0.1,
        layout.name, *second, floats(heads) if sink else None, False, out, floats(tokens, heads),
        floats(tokens, heads) if maxima else None, True,
    )  # fmt: skip
    return Case("sparse_attn_into", name, launch.sparse_attn_into, arguments, more, where)


def _rows(name, heads, d_qk, d_v, tokens, dtype, *, keys=2048, sink=False, more=False, where="") -> Case:
    q, kv = tensor(tokens, heads, d_qk, dtype=dtype), tensor(65536, d_qk, dtype=dtype)
    arguments = q, kv, integers(tokens * keys), integers(tokens + 1), 0.1, d_v, floats(heads) if sink else None
    return Case("sparse_attn_prefill", name, launch.sparse_attn_prefill, arguments, more, where)


def _paged(
    name, batch, heads, layout, *, extra=None, dtype=BF16, keys=2048, gap=0, sink=False, more=False, where=""
) -> Case:
    width = layout.latent + layout.rope
    cache = cache_of(layout)
    if gap:
        memory = tensor(cache.shape[0], cache[0].numel() + gap, dtype=cache.dtype)
        cache = memory[:, :-gap].unflatten(1, cache.shape[1:])
    second = (None, None, None, "")
    if extra is not None:
        second = (cache_of(extra), integers(batch * 512), integers(batch + 1), extra.name)
    arguments = (
        tensor(batch, heads, width, dtype=dtype), cache, integers(batch * keys), integers(batch + 1), 0.1, layout.name,
        *second, floats(heads) if sink else None,
    )  # fmt: skip
    return Case("sparse_attn_decode", name, launch.sparse_attn_decode, arguments, more, where)


def _dims(spec) -> tuple[int, int]:
    return (spec.head_dim, spec.head_dim) if isinstance(spec, CompressedSpec) else (spec.latent_dim, spec.kv_lora)
