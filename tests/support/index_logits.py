"""Calls of the index scores of any size, without memory: what dispatch.py and the launchers ask of them. And what
scores with the highest of every group must be."""

from __future__ import annotations

import torch
from support.extremes import INF, NAN

from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, PlainLayout
from sparse_attn.ops.indexer.scores import dispatch, reference
from sparse_attn.ops.indexer.scores.plan import Paged
from sparse_attn.ops.topk.select.fake import GROUP
from sparse_attn.testing.compare import assert_same_diff

U8, I32 = torch.uint8, torch.int32
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def prefill_arguments(rows=100, keys=5000, heads=64, dim=128, flavour="e4m3fn", dtype=U8):
    """Of mqa_logits."""
    bounds = meta(rows, dtype=I32)
    if flavour == "mxfp4":
        q, k, k_scale = (
            meta(*shape, dtype=U8)
            for shape in ((rows, heads, dim // 2 + dim // 32), (keys, dim // 2), (keys, dim // 32))
        )
        return q, k, k_scale, meta(rows, heads), bounds, bounds, flavour
    k_scale = None if flavour == "none" else meta(keys)
    q, k = meta(rows, heads, dim, dtype=dtype), meta(keys, dim, dtype=dtype)
    return q, k, k_scale, meta(rows, heads), bounds, bounds, flavour


def paged_arguments(
    requests=3, next_n=2, heads=64, dim=128, max_context_len=5000, flavour="e4m3fn", dtype=U8, blocks=700, block_size=64
):
    """Of paged_mqa_logits."""
    if flavour == "mxfp4":
        layout = IndexMxfp4Layout(dim)
    else:
        layout = PlainLayout(NAMES[dtype], dim) if flavour == "none" else IndexFp8Layout(dim, flavour)
    return (
        meta(requests, next_n, heads, layout.row if flavour == "mxfp4" else dim, dtype=dtype), meta(blocks, block_size, layout.row, dtype=layout.dtype),
        meta(requests * next_n, heads), meta(requests, next_n, dtype=I32),
        meta(requests, -(-max_context_len // block_size), dtype=I32), max_context_len, layout.name,
    )  # fmt: skip


def prefill_problem(*sizes, **others):
    return prefill_problem_of(*prefill_arguments(*sizes, **others))


def paged_problem(*sizes, **others):
    return paged_problem_of(*paged_arguments(*sizes, **others))


def prefill_problem_of(q, k, k_scale, weights, kv_start, kv_end, flavour, **scored):
    """Of all that mqa_logits takes."""
    return dispatch.prefill_problem(q, k, k_scale, weights, flavour, **scored)


def paged_problem_of(q, cache, weights, context_lens, block_table, max_context_len, layout, **scored):
    return dispatch.paged_problem(q, cache, max_context_len, layout, **scored)


def check_highest(launch, rows, width, limits, device):
    """launch(out, maxima, group): the scores' bits are what they are without, groups are whole, what lies around is
    untouched."""
    room = -(-width // GROUP) * GROUP

    def dirt(columns):
        return torch.full((rows + 1, columns), 12345.0, device=device)

    plain, wide, highest = dirt(room + 3), dirt(room + 3), dirt(room // GROUP + 3)
    launch(plain[:rows, :width], None, 1)
    launch(wide[:rows, :width], highest[:rows, : room // GROUP], GROUP)
    limits = limits.reshape(-1, 1).clamp(0, width)
    column = torch.arange(room, device=device)
    scores = wide[:rows, :room]
    seen, whole = column < limits, column < -(-limits // GROUP) * GROUP
    assert torch.equal(scores[seen].view(torch.int32), plain[:rows, :room][seen].view(torch.int32))
    assert (scores[whole & ~seen] == -INF).all()
    groups = scores.masked_fill(~whole, -INF).unflatten(1, (-1, GROUP))
    want = groups.masked_fill(groups.isnan(), -INF).amax(2).masked_fill(groups.isnan().all(2), NAN)
    there = whole[:, ::GROUP]
    torch.testing.assert_close(highest[:rows, : room // GROUP][there], want[there], rtol=0, atol=0, equal_nan=True)
    for around in (wide[rows], wide[:, room:], highest[rows], highest[:, room // GROUP :]):
        assert (around == 12345.0).all()


def check_graph_replays(paged, q, cache, layout):
    """The kernel ``paged`` (Paged) in a captured graph, over two requests whose lengths change between replays."""
    torch.manual_seed(0)
    weights, table = torch.randn(2, 64, device="cuda"), torch.randperm(70, device="cuda").int().view(2, 35)
    lens, out = torch.tensor([[9], [2000]], dtype=torch.int32, device="cuda"), torch.empty(2, 2240, device="cuda")
    flavour = "mxfp4" if isinstance(layout, IndexMxfp4Layout) else layout.flavour

    def launch():
        paged(Paged(q, cache, weights, lens, table, 2240, flavour, out))

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for new in ([9, 2000], [0, 2240], [700, 1]):
        lens.copy_(torch.tensor(new, device="cuda")[:, None])
        graph.replay()
        assert_same_diff(out, reference.paged_mqa_logits(q, cache, weights, lens, table, 2240, layout.name))
