"""Grids: no launch has more programs along its second or third dimension than a GPU takes, and together they do it
all."""

from __future__ import annotations

import pytest
import torch
from support.index_logits import prefill_problem_of

from sparse_attn.device import grid
from sparse_attn.layout import IndexFp8Layout
from sparse_attn.ops.attention.sparse import merge_attn_states
from sparse_attn.ops.indexer.scores import bf16_mqa_logits

MOST = 2**16 - 1
IMPLS = "triton", "reference"


class Spy:
    """Stands for a kernel: notes grids and arguments, launches nothing."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, size):
        assert all(programs <= MOST for programs in size[1:]), size
        return lambda *arguments, **constants: self.launches.append((size, arguments, constants))


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    "rows, keys, dtype, launches",
    [
        (524_280, 7, torch.bfloat16, 1),
        (524_281, 7, torch.bfloat16, 2),
        (1_500_000, 2, torch.bfloat16, 3),
        (1_048_561, 70, torch.float32, 2),  # 16 rows of a program
        (5_000_000, 3000, torch.bfloat16, 2),  # 64
    ],
)
def test_rows_of_few_keys_take_several_launches(rows, keys, dtype, launches, monkeypatch):
    from sparse_attn.ops.indexer.scores import dispatch
    from sparse_attn.ops.indexer.scores.plan import Prefill
    from sparse_attn.ops.indexer.scores.portable import kernels
    from sparse_attn.testing.launches import TARGETS

    spy = Spy()
    monkeypatch.setattr(kernels, "mqa_logits", spy)
    q, k = empty(rows, 3, 32, dtype=dtype), empty(keys, 32, dtype=dtype)
    weights, start, end = empty(rows, 3), empty(rows, dtype=torch.int32), empty(rows, dtype=torch.int32)
    arguments, out = (q, k, None, weights, start, end, "none"), empty(rows, keys)
    choice = dispatch.choose_prefill(prefill_problem_of(*arguments), TARGETS["sm_80"])
    choice.kernel.launcher(Prefill(*arguments, out), choice.plan)
    assert len(spy.launches) == launches
    done = 0
    for size, (some, _, _, weight, first, last, to, count, *_), constants in spy.launches:
        assert some.storage_offset() == done * 3 * 32 and to.storage_offset() == done * keys
        assert weight.storage_offset() == 3 * done and first.storage_offset() == last.storage_offset() == done
        assert size[1] * constants["BLOCK_Q"] >= count == len(some) == len(to)
        done += count
    assert done == rows


@pytest.mark.parametrize("heads, launches", [(MOST, 1), (MOST + 1, 2), (3 * MOST, 4)])
def test_combining_many_heads_takes_several_launches(heads, launches, monkeypatch):
    from sparse_attn.ops.attention.sparse.portable import kernels, launch

    spy = Spy()
    monkeypatch.setattr(kernels, "combine", spy)
    states = empty(2, 5, heads, 8), empty(2, 5, heads), empty(2, 5, heads)
    launch.combine(*states, empty(heads), empty(5, heads, 8), empty(5, heads), empty(5, heads), 1.0)
    done = 0
    for size, (outs, lses, maxima, sink, out, lse, largest, *_), _ in spy.launches:
        assert outs.storage_offset() == out.storage_offset() == 8 * done
        places = {value.storage_offset() for value in (lses, maxima, sink, lse, largest)}
        assert places == {done}
        done += size[1]
    assert (len(spy.launches), done) == (launches, heads)


def test_what_no_launch_has_room_for_is_refused():
    from sparse_attn.layout import PlainLayout
    from sparse_attn.ops.attention.compressor import launch as compressor
    from sparse_attn.ops.attention.sparse.portable import launch
    from sparse_attn.ops.indexer.queries import launch as query
    from sparse_attn.ops.layers.hyper_connection import launch as hyper

    d_v = 4096 * MOST + 1
    with pytest.raises(ValueError, match=f"^outs d_v: got {d_v}, allowed: at most {d_v - 1}, "):
        launch.combine(empty(2, 1, 1, d_v), empty(2, 1, 1), None, None, empty(1, 1, d_v), empty(1, 1), None, 1.0)
    many, positions, table = 16 * MOST + 1, empty(1, dtype=torch.int32), empty(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^q heads: got {many}, allowed: at most {many - 1}, "):
        layout = IndexFp8Layout(128).name
        query.indexer_q_rope_quant(
            empty(1, many, 128), empty(1, many), positions, empty(9, 64), 0, True, False, 1.0, layout
        )
    hidden = 4096 * MOST + 1
    with pytest.raises(ValueError, match=f"^streams hidden: got {hidden}"):
        hyper.hyper_merge(empty(1, hidden), empty(1, 1, hidden), empty(1, 1), empty(1, 1, 1))
    width = 2**27 + 4
    with pytest.raises(ValueError, match=f"^kv width: got {width}"):
        compressor.compress_and_cache(
            *(empty(1, width),) * 3, empty(width), positions, positions, empty(1, 4, 2 * width), table,
            empty(0, 1, width), empty(1, dtype=torch.int64), empty(9, 64), 4, False, 1e-6, 0, False,
            PlainLayout("fp32", width).name,
        )  # fmt: skip


def test_spans_meet_and_start_where_the_compiler_knows():
    for count, each in ((1, 1), (grid.ALIGNED, 1), (grid.ALIGNED + 1, 1), (10**6, 8), (10**7, 3)):
        spans = list(grid.spans(count, each))
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])] and spans[-1].stop == count
        assert all(span.start % 16 == 0 and -(-(span.stop - span.start) // each) <= MOST for span in spans)


@pytest.mark.gpu
def test_more_rows_than_one_launch_takes():
    rows = 524_280 + 1003
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(rows, 2, 32, device="cuda", generator=generator)
    k, weights = torch.randn(3, 32, device="cuda", generator=generator), torch.rand(rows, 2, device="cuda")
    start = torch.zeros(rows, dtype=torch.int32, device="cuda")
    end = torch.arange(rows, device="cuda").remainder(5).int()
    for dtype in (torch.float32, torch.bfloat16):
        got, want = (bf16_mqa_logits(q.to(dtype), k.to(dtype), weights, start, end, impl=impl) for impl in IMPLS)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_more_heads_than_one_launch_combines():
    outs, lses = torch.randn(3, 2, MOST + 9, 5, device="cuda"), torch.randn(3, 2, MOST + 9, device="cuda")
    sink = torch.randn(MOST + 9, device="cuda")
    got, want = (merge_attn_states(outs, lses, sink=sink, impl=impl) for impl in IMPLS)
    torch.testing.assert_close(tuple(got), tuple(want))
