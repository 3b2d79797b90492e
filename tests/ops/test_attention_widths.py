"""Widths that no published model has: a launch fits into the GPU's memory, or is refused before it is one."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from sparse_attn.layout import LatentFp8Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.sparse import dispatch, reference, sparse_attn_prefill
from sparse_attn.ops.attention.sparse.portable import config
from sparse_attn.ops.attention.sparse.problem import packed_decode
from sparse_attn.testing import compare
from sparse_attn.testing.launches import TARGETS
from sparse_attn.types import Ragged

REPORTED = (576, 576), (640, 640), (528, 513)
BF16, FP32 = torch.bfloat16, torch.float32


def shared_bytes(d_qk, d_v, heads, size, fp8, target):
    """What a plan reckons with, or None where the width is refused."""
    tile, fits = config.fitting(heads, d_qk, d_v, size, fp8, False, False, target)
    assert tile.block_m >= 16 and tile.block_n >= 16 and tile.num_stages >= 1
    return config.shared_bytes(tile, d_qk, d_v, size, fp8, target) if fits else None


@pytest.mark.parametrize("name", TARGETS)
def test_every_width_fits_or_is_refused(name):
    target = TARGETS[name]
    widths = [1, 16, 17, 64, 100, 448, 512, 513, 576, 640, 1000, 1024, 1025, 2048, 3000, 9000]
    for d_v, rest, heads in itertools.product(widths, (0, 1, 64, 500, 3000), (1, 16, 64, 128)):
        for size, fp8 in ((2, False), (4, False), (2, True), (4, True)):
            needed = shared_bytes(d_v + rest, d_v, heads, size, fp8, target)
            assert needed is None or needed <= target.shared_memory
            if d_v <= 512 and rest <= 64 and size == 2:
                assert needed is not None
    for d_qk, d_v in REPORTED:
        assert shared_bytes(d_qk, d_v, 64, 2, False, target) is not None
    assert shared_bytes(9000, 9000, 64, 2, False, target) is None


def test_the_error_says_what_fits():
    with pytest.raises(ValueError) as error:
        dispatch.choose(packed_decode(64, 64, PlainLayout("bf16", 2048, 64), 64 * 2048), TARGETS["sm_86"])
    assert str(error.value) == (
        "d_qk: got 2112 values of 2 bytes, of which 2048 are a key's value, allowed: what fits into 101376 bytes of shared "
        "memory, 16 queries and 16 keys at a time, d_v and the rest rounded up to powers of two"
    )


def empty(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(target, layout, dtype=BF16, heads=64):
    """The attending kernel over a cache of ``layout`` as the compiler makes it, and the room that there is for it."""
    from sparse_attn.ops.attention.sparse import launch
    from sparse_attn.testing.launches import compile_launch, recording

    q, cache = empty(64, heads, layout.dim, dtype=dtype), empty(64, 64, layout.row, dtype=layout.dtype)
    keys, none = (cache, empty(64 * 2048), empty(65)), (None, None, None, "", None)
    with recording(target) as launches:
        launch.sparse_attn_decode(q, *keys, 0.1, layout.name, *none, kernel="portable")
    return compile_launch(next(one for one in launches if one.kernel == "attend")), TARGETS[target].shared_memory


COMPILED = [
    ("sm_80", PlainLayout("bf16", 513, 15)),
    ("sm_86", PlainLayout("bf16", 513, 15)),
    ("sm_90", PlainLayout("bf16", 576)),
    ("sm_100", PlainLayout("bf16", 640)),
    ("gfx942", PlainLayout("bf16", 576)),
    ("sm_80", LatentFp8Layout(1024, 64)),
]
MORE = [
    *itertools.product(
        ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"),
        [PlainLayout("bf16", 576), PlainLayout("bf16", 640), PlainLayout("bf16", 513, 15), PlanarFp8Layout(960, 64)],
    ),
    ("sm_90", PlanarFp8Layout(704, 64)),
    ("sm_90", LatentFp8Layout(640, 64)),
    ("gfx950", LatentFp8Layout(640, 64)),
]


@pytest.mark.aot
@pytest.mark.parametrize("target, layout", COMPILED + (MORE if os.environ.get("SPARSE_ATTN_LONG") else []))
def test_compiled_kernels_fit(target, layout):
    kernel, room = compiled(target, layout)
    assert kernel.shared_memory <= room and kernel.tensor_memory <= 512


@pytest.mark.kernel
@pytest.mark.parametrize("d_qk, d_v", REPORTED)
def test_reported_widths_attend(device, d_qk, d_v):
    torch.manual_seed(d_v)
    heads = 64 if device.type == "cuda" else 3
    q = torch.randn(3, heads, d_qk, device=device).to(BF16)
    kv = (torch.randn(70, d_qk, device=device) / 10).to(BF16)  # as the level is for
    ragged = Ragged(
        torch.arange(90, device=device).remainder(71).int(), torch.tensor([0, 64, 64, 90], device=device).int()
    )
    got = sparse_attn_prefill(q, kv, ragged, scale=d_qk**-0.5, d_v=d_v, impl="triton")
    want = reference.sparse_attn_prefill(q.float(), kv, *ragged, d_qk**-0.5, d_v, None)
    compare.assert_close(got.out, want[0], compare.PREFILL_OUT)
    compare.assert_close(got.lse, want[1], compare.PREFILL_LSE)


@pytest.mark.gpu
@pytest.mark.parametrize("d_v, rest", [(1024, 64), (2048, 0), (1000, 24), (16, 2000), (4096, 0)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_wide_rows_attend_or_are_refused(d_v, rest, dtype):
    from sparse_attn.framework.target import target_of

    target = target_of(torch.device("cuda", 0))
    q, kv = ((torch.randn(*shape, d_v + rest, device="cuda") / 3).to(dtype) for shape in ((5, 64), (40,)))
    ragged = Ragged(torch.arange(100, device="cuda").remainder(40).int(), torch.arange(0, 101, 20, device="cuda").int())
    if shared_bytes(d_v + rest, d_v, 64, q.element_size(), False, target) is None:
        with pytest.raises(ValueError, match="^d_qk: got"):
            sparse_attn_prefill(q, kv, ragged, scale=0.02, d_v=d_v)
        return
    got = sparse_attn_prefill(q, kv, ragged, scale=0.02, d_v=d_v)
    want = reference.sparse_attn_prefill(q.float(), kv, *ragged, 0.02, d_v, None)
    compare.assert_close(got.out, want[0], compare.PREFILL_OUT)
    compare.assert_close(got.lse, want[1], compare.PREFILL_LSE)


@pytest.mark.kernel
def test_what_takes_more_than_the_gpu_has_is_a_value_error(monkeypatch, device):
    """Of any operator: Triton says so before it launches."""
    from triton import OutOfResources

    from sparse_attn.ops.indexer.scores import bf16_mqa_logits, dispatch

    def raise_it(*_):
        raise OutOfResources(132372, 101376, "shared memory")

    monkeypatch.setattr(dispatch, "choose_prefill", raise_it)
    ends = torch.zeros(3, dtype=torch.int32, device=device)
    q, k, weights = (torch.zeros(shape, device=device) for shape in ((3, 2, 8), (5, 8), (3, 2)))
    with pytest.raises(ValueError) as error:
        bf16_mqa_logits(q, k, weights, ends, ends, impl="triton")
    assert str(error.value) == (
        "mqa_logits: got q [3, 2, 8], k [5, 8], weights [3, 2], kv_start [3], kv_end [3], for which a kernel takes 132372 of "
        "the GPU's shared memory, allowed: 101376"
    )


@pytest.mark.gpu
def test_index_keys_too_wide_for_the_gpu_are_a_value_error():
    from sparse_attn.ops.indexer.scores import bf16_mqa_logits

    ends = torch.zeros(3, dtype=torch.int32, device="cuda")
    q, k, weights = (torch.zeros(shape, device="cuda") for shape in ((3, 64, 2048), (5, 2048), (3, 64)))
    with pytest.raises(
        ValueError, match=r"^mqa_logits: got q \[3, 64, 2048\], .* of the GPU's shared memory, allowed: "
    ):
        bf16_mqa_logits(q, k, weights, ends, ends)
