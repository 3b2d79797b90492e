"""Caches of a layout: made, marked for torch.compile, measured and checked; and the index queries read beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_attn.framework import checks
from sparse_attn.framework.torch_private import mark_sizes
from sparse_attn.layout import (
    BF16_BYTES,
    SCALE_BYTES,
    IndexFp8Layout,
    IndexMxfp4Layout,
    LatentFp8Layout,
    Layout,
    PlainLayout,
    PlanarFp8Layout,
)
from sparse_attn.mxfp4 import GROUP

SLOT_DTYPES = (torch.int64, torch.int32)
PIECE = 256  # bytes, of which caches that lie side by side begin at multiples


def check_cache(name: str, cache: torch.Tensor, layout: Layout, *, padded_rows: bool = False) -> None:
    """TypeError or ValueError unless ``cache`` can hold blocks of ``layout``: dtype, row size, contiguous blocks.

    padded_rows: records of a layout that is not planar may lie apart.
    """
    if not isinstance(cache, torch.Tensor):
        raise TypeError(f"{name}: got {type(cache).__name__}, allowed: a torch.Tensor")
    if cache.dtype != layout.dtype:
        raise TypeError(f"{name}: got dtype {cache.dtype}, allowed: {layout.dtype} for layout {layout.name}")
    if cache.dim() != 3 or cache.shape[2] != layout.row:
        raise ValueError(
            f"{name}: got shape {list(cache.shape)}, "
            f"allowed: [num_blocks, block_size, {layout.row}] for layout {layout.name}"
        )
    if cache.shape[1] < 1:
        raise ValueError(f"{name}: got block_size {cache.shape[1]}, allowed: at least 1")
    padded_rows = padded_rows and isinstance(layout, (PlainLayout, LatentFp8Layout))
    step = max(cache.stride(1), layout.row) if padded_rows else layout.row
    least = (cache.shape[1] - 1) * step + layout.row
    wrong = cache.stride(0) < least, cache.stride(1) != step, cache.stride(2) != 1
    if any(wrong[dim] and checks.leads(cache, dim) for dim in range(3)):
        row = f"at least {layout.row}" if padded_rows else layout.row
        raise ValueError(f"{name}: got strides {cache.stride()}, allowed: (at least {least}, {row}, 1)")
    _check_index_block(name, layout, cache.shape[1])
    word = alignment(layout)
    for dim, stride in enumerate(("block stride", "row stride") if padded_rows else ("block stride",)):
        if cache.stride(dim) % word and checks.leads(cache, dim):
            raise ValueError(
                f"{name}: got {stride} {cache.stride(dim)}, allowed: a multiple of {word}, as its words are long"
            )
    # Dynamo cannot trace storage_offset; a compiled function is handed the caches an eager one would be.
    if word > 1 and not torch.compiler.is_compiling() and cache.storage_offset() % word:
        raise ValueError(
            f"{name}: got storage offset {cache.storage_offset()}, allowed: a multiple of {word}, as its words are long"
        )


def check_slot_mapping(slot_mapping: torch.Tensor, name: str, values: torch.Tensor) -> None:
    """TypeError or ValueError unless ``slot_mapping`` has slots of no more tokens than ``values``, which ``name``
    names."""
    checks.check_dtype("slot_mapping", slot_mapping, SLOT_DTYPES)
    checks.check_rank("slot_mapping", slot_mapping, 1)
    slots, tokens = slot_mapping.shape[0], values.shape[0]
    if slots > tokens:
        raise ValueError(f"slot_mapping: got {slots} slots, allowed: at most the {tokens} tokens of {name}")


def check_gathering(
    cache: torch.Tensor, block_table: torch.Tensor, kv_indptr: torch.Tensor, capacity: int, layout: Layout
) -> None:
    """TypeError or ValueError unless rows of requests can be gathered from ``cache``."""
    check_cache("cache", cache, layout, padded_rows=True)
    checks.check_dtype("block_table", block_table, (torch.int32,))
    checks.check_rank("block_table", block_table, 2)
    checks.check_unit_stride("block_table", block_table)
    checks.check_dtype("kv_indptr", kv_indptr, (torch.int32,))
    checks.check_bounds("kv_indptr", kv_indptr, block_table.shape[0], "[requests + 1]")
    checks.check_unit_stride("kv_indptr", kv_indptr)
    checks.check_at_least("capacity", capacity, 0)


def check_mxfp4_keys(q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor) -> None:
    """TypeError or ValueError unless they are gathered keys and queries of an IndexMxfp4Layout."""
    for name, value, rank in (("q", q, 3), ("k", k, 2), ("k_scale", k_scale, 2)):
        checks.check_dtype(name, value, (torch.uint8,))
        checks.check_rank(name, value, rank)
        checks.check_unit_stride(name, value)
    keys, code_bytes = k.shape
    if code_bytes < 1 or code_bytes % (GROUP // 2):
        raise ValueError(f"k: got {code_bytes} code bytes a key, allowed: multiples of {GROUP // 2}")
    checks.check_shape("k_scale", k_scale, (keys, code_bytes * 2 // GROUP), "[keys, dim / 32]")
    check_heads_together(q)
    checks.check_same_device(q=q, k=k, k_scale=k_scale)


def check_heads_together(q: torch.Tensor) -> None:
    """ValueError unless the heads of an MXFP4 query's row lie side by side."""
    if q.stride(-2) != q.shape[-1] and checks.leads(q, -2):
        raise ValueError(f"q: got strides {q.stride()}, allowed: {q.shape[-1]} from head to head")


def alignment(layout: Layout) -> int:
    """A block of ``layout`` starts at a multiple of so many elements. fp8 blocks are read in words of 4 bytes: fp32
    scales, or four scale bytes of a planar record. Where planar records are no multiple of 4 bytes long, their scales
    are read byte by byte, and the words are bf16 values of 2 bytes. MXFP4 blocks are read byte by byte."""
    if layout.dtype != torch.uint8 or isinstance(layout, IndexMxfp4Layout):
        return 1
    return BF16_BYTES if isinstance(layout, PlanarFp8Layout) and layout.token_bytes % SCALE_BYTES else SCALE_BYTES


def _check_index_block(name: str, layout: Layout, block_size: int) -> None:
    if isinstance(layout, IndexFp8Layout) and block_size * layout.dim % SCALE_BYTES:
        raise ValueError(
            f"{name}: got {block_size} x {layout.dim} code bytes before a block's fp32 scales, allowed: "
            f"a multiple of {SCALE_BYTES}"
        )


def block_bytes(layout: Layout, block_size: int) -> int:
    """Bytes from block to block of a cache that allocate_cache made."""
    if isinstance(layout, PlanarFp8Layout):
        return layout.block_stride(block_size)
    return block_size * layout.row * layout.dtype.itemsize


def allocate_cache(layout: Layout, num_blocks: int, block_size: int, device: torch.device | str) -> torch.Tensor:
    """A zeroed cache [num_blocks, block_size, row] of ``layout``, as mark_cache marks it; blocks of a planar KV layout
    stand apart as the field pads them.

    Args:
        layout: what the bytes mean, such as ``cache_layouts(...).kv``.
        num_blocks: 0 or more.
        block_size: tokens of a block, at least 1.
        device: of the cache.

    Returns:
        [num_blocks, block_size, layout.row] of layout.dtype.

    Raises:
        TypeError: what is no layout or no number.
        ValueError: sizes that check_cache would refuse.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout: got {layout!r}, allowed: a layout, such as cache_layouts returns")
    checks.check_at_least("num_blocks", num_blocks, 0)
    checks.check_at_least("block_size", block_size, 1)
    _check_index_block("block_size", layout, block_size)
    if isinstance(layout, PlanarFp8Layout):
        shape, stride = (num_blocks, block_size, layout.row), layout.block_stride(block_size)
        memory = torch.zeros(num_blocks, stride, dtype=layout.dtype, device=device)
        if torch.compiler.is_compiling():  # Dynamo cannot trace set_
            return memory.as_strided(shape, (stride, layout.row, 1))
        # No view: a compiled or exported program would be guarded by what it is a view of.
        cache = torch.empty(0, dtype=layout.dtype, device=device)
        return mark_cache(cache.set_(memory.untyped_storage(), 0, shape, (stride, layout.row, 1)))
    return mark_cache(torch.zeros(num_blocks, block_size, layout.row, dtype=layout.dtype, device=device))


def allocate_side_by_side(
    kinds: Sequence[tuple[int, int, torch.dtype]], num_blocks: int, device: torch.device | str
) -> list[torch.Tensor]:
    """Zeroed caches [num_blocks, block_size, row], marked, one for each (block_size, row, dtype) of ``kinds``. Block n
    of all of them is one piece of memory, so that it can be copied at once. Not for torch.compile, which takes tensors
    that share memory for one another's."""
    starts, end = [], 0
    for block_size, row, dtype in kinds:
        starts.append(end)
        end += -(-block_size * row * dtype.itemsize // PIECE) * PIECE
    memory, caches = torch.zeros(num_blocks, end, dtype=torch.uint8, device=device).untyped_storage(), []
    for start, (block_size, row, dtype) in zip(starts, kinds):
        place, shape = start // dtype.itemsize, (num_blocks, block_size, row)
        cache = torch.empty(0, dtype=dtype, device=device).set_(memory, place, shape, (end // dtype.itemsize, row, 1))
        caches.append(mark_cache(cache))
    return caches


def mark_cache(cache: torch.Tensor) -> torch.Tensor:
    """``cache`` [num_blocks, block_size, row], marked for torch.compile.

    Its row is a constant, and its first two sizes are symbols of their own, so that none is taken for a batch size or a
    length that happens to be equal. Caches that this library allocates are marked. Mark caches made by hand, views and
    copies before you pass them to a compiled function.

    Args:
        cache: [num_blocks, block_size, row].

    Returns:
        ``cache`` itself.

    Raises:
        TypeError: no tensor.
    """
    checks.check_tensor("cache", cache)
    return mark_sizes(cache, dynamic=(0, 1), static=(2,))
