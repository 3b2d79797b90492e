"""hopper.prefill_bf16: its plans, compiled ahead of time, and on a GPU FlashMLA's kinds of case at its tolerances."""

import math

import pytest
import torch
from support.extremes import INF, INT_MAX, INT_MIN
from support.launched import compiled_case

from sparse_attn import (
    PlainLayout,
    Ragged,
    build_ragged_indices_from_dense,
    sparse_attn_decode,
    sparse_attn_prefill,
    workspace,
)
from sparse_attn.device.triton_private import VERSION
from sparse_attn.framework.target import H200, target_of
from sparse_attn.ops.attention.sparse import dispatch, launch
from sparse_attn.ops.attention.sparse.hopper import config
from sparse_attn.ops.attention.sparse.problem import packed_decode, packed_prefill
from sparse_attn.testing.compare import PREFILL_LSE, PREFILL_OUT, assert_close

ROWS = PlainLayout("bf16", 512, 64)


def test_rows_for_every_third_sm():
    """No row is split: fewer of them would leave most of the GPU idle."""
    for heads, rows in ((64, 44), (128, 22)):
        chosen, passed_over = (
            dispatch.choose(packed_prefill(tokens, heads, ROWS, tokens * 2048), H200) for tokens in (rows, rows - 1)
        )
        assert (chosen.kernel.name, passed_over.kernel.name) == ("hopper.prefill_bf16", "portable")
        reasons = dict(passed_over.passed_over)
        assert reasons["hopper.prefill_bf16"] == f"tokens: got {rows - 1}, faster from {rows}"
    invariant = dispatch.choose(packed_prefill(1, 64, ROWS, 2048, batch_invariant=True), H200)
    assert invariant.kernel.name == "hopper.prefill_bf16", "as of many rows"


def test_ctas_take_work_tiles_in_turn():
    def plan(tokens, heads=128):
        return config.plan_prefill_bf16(packed_decode(tokens, heads, ROWS, tokens * 2048), H200)

    assert [(plan(n).blocks, plan(n).tiles, plan(n).ctas) for n in (22, 66, 67)] == [
        (2, 44, 44),
        (2, 132, 132),
        (2, 134, 132),
    ]
    assert [plan(tokens, 64).launch_dependents for tokens in (99, 100)] == [True, False]
    assert plan(4096).scratch == config.TILE_COUNTER


@pytest.mark.aot
@pytest.mark.parametrize("form", ["deepseek_v32 bfloat16", "deepseek_v4_pro bfloat16"])
def test_compiles_for_hopper_without_spills(form):
    (compiled,) = compiled_case(f"sparse_attn_prefill: {form}")
    assert compiled.spill_bytes <= (0 if VERSION < (3, 9) else 120) and compiled.shared_memory <= H200.shared_memory
    assert compiled.count("HGMMA") and compiled.count("LDGSTS") and compiled.count("DEPBAR") <= 16


def case(tokens, heads, d_qk, rows, width, *, lengths="full", sink=None, poison=True, seed=0):
    """q and kv as views of wider tensors full of NaN; unread rows are NaN; wild indices between good ones."""
    torch.manual_seed(seed)
    wide_q = torch.full((tokens, heads, d_qk + 16), math.nan, device="cuda", dtype=torch.bfloat16)
    wide_q[..., :d_qk] = torch.randn(tokens, heads, d_qk, device="cuda") / 10
    wide_kv = torch.full((rows, d_qk + 32), math.nan, device="cuda", dtype=torch.bfloat16)
    wide_kv[:, :d_qk] = torch.randn(rows, d_qk, device="cuda") / 10
    dense = torch.randint(0, rows, (tokens, width), device="cuda", dtype=torch.int32)
    if lengths == "random":
        length = torch.randint(0, width + 1, (tokens,), device="cuda", dtype=torch.int32)
    elif lengths == "none":
        length = torch.zeros(tokens, device="cuda", dtype=torch.int32)
    else:
        length = torch.full((tokens,), width, device="cuda", dtype=torch.int32)
    indptr = torch.nn.functional.pad(length.cumsum(0, dtype=torch.int32), (1, 0))
    column = torch.arange(width, device="cuda")
    if poison:
        wild = torch.tensor([-1, INT_MIN, INT_MAX, rows, -rows], device="cuda", dtype=torch.int32)
        dense = torch.where(column % 7 == 3, wild[column % 5], dense)
    indices = torch.full((tokens * width,), INT_MAX, dtype=torch.int32, device="cuda")
    packed = dense[column < length.unsqueeze(1)]
    indices[: packed.numel()] = packed
    if poison:
        unread = torch.ones(rows, dtype=torch.bool, device="cuda")
        unread[packed[(packed >= 0) & (packed < rows)].long()] = False
        wide_kv[unread] = math.nan
    given = None
    if sink is not None:
        given = torch.full((heads + 5,), math.nan, device="cuda")
        given[:heads] = torch.randn(heads, device="cuda") if sink == "random" else sink
    return wide_q[..., :d_qk], wide_kv[:, :d_qk], Ragged(indices, indptr), given


def check(q, kv, ragged, sink, some=None):
    """Against the reference, of all rows or of ``some``."""
    arguments = (q, kv, *ragged, 0.05, 512, sink)
    chosen = dispatch.choose(dispatch.prefill_problem(*arguments[:-1]), target_of(q.device))
    assert chosen.kernel.name == "hopper.prefill_bf16"
    out, lse = launch.sparse_attn_prefill(*arguments)
    again = launch.sparse_attn_prefill(*arguments)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    if some is not None:
        starts, ends = ragged.indptr[some], ragged.indptr[some + 1]
        width = int((ends - starts).max())
        at = starts.unsqueeze(1) + torch.arange(width, device=q.device)
        inside = at < ends.unsqueeze(1)
        rows = torch.where(inside, ragged.indices[at.clamp_max(len(ragged.indices) - 1).long()], -1)
        q, ragged, out, lse = q[some], build_ragged_indices_from_dense(rows), out[some], lse[some]
    want = sparse_attn_prefill(q, kv, ragged, scale=0.05, d_v=512, sink=sink, impl="reference")
    assert_close(out, want.out, PREFILL_OUT)
    assert_close(lse, want.lse, PREFILL_LSE)


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [None, "random", INF, -INF])
@pytest.mark.parametrize("lengths", ["full", "random", "none"])
@pytest.mark.parametrize("heads, d_qk", [(64, 576), (128, 576), (64, 512), (128, 512)])
def test_kinds_of_rows(heads, d_qk, lengths, sink):
    """Odd numbers of rows, widths that are no multiple of a tile, lists longer than the rows there are."""
    for rows, width in ((1, 3), (1017, 129), (333, 640), (4099, 2048)):
        check(*case(140, heads, d_qk, rows, width, lengths=lengths, sink=sink, seed=width))


@pytest.mark.gpu
def test_rows_without_a_valid_index():
    q, kv, ragged, sink = case(150, 64, 576, 50, 200, sink="random")
    ragged.indices.fill_(50)
    out, lse = launch.sparse_attn_prefill(q, kv, *ragged, 0.05, 512, sink)
    assert not out.any() and (lse == -INF).all()


@pytest.mark.gpu
def test_decode_from_contiguous_plain_blocks():
    """The same rows, as a cache of 64-token blocks; with gaps between its blocks the portable kernel reads it."""
    q, kv, ragged, sink = case(80, 128, 576, 640, 300, sink="random", poison=False)
    layout = PlainLayout("bf16", 512, 64)
    cache = kv.contiguous().view(10, 64, 576)
    wide = torch.full((10, 65, 576), math.nan, device="cuda", dtype=torch.bfloat16)
    wide[:, :64] = cache
    want = launch.sparse_attn_prefill(q, kv, *ragged, 0.05, 512, sink)
    for blocks in (cache, wide[:, :64]):
        got = sparse_attn_decode(q, blocks, ragged, scale=0.05, layout=layout, sink=sink)
        assert_close(got.out, want[0], PREFILL_OUT)
        assert_close(got.lse, want[1], PREFILL_LSE)


@pytest.mark.gpu
def test_seventy_thousand_rows():
    q, kv, ragged, sink = case(70_000, 64, 576, 9001, 130, lengths="random", sink="random")
    check(q, kv, ragged, sink, some=torch.randint(0, 70_000, (64,), device="cuda"))


@pytest.mark.gpu
def test_offsets_beyond_2_31():
    kv = torch.zeros(4_000_000, 576, device="cuda", dtype=torch.bfloat16)
    kv[-9:] = torch.randn(9, 576, device="cuda") / 10
    rows = torch.randint(kv.shape[0] - 9, kv.shape[0], (140, 70), device="cuda", dtype=torch.int32)
    q = torch.randn(140, 64, 576, device="cuda", dtype=torch.bfloat16) / 10
    check(q, kv, build_ragged_indices_from_dense(rows), None)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [66, 132, 133, 400])
def test_replays_take_their_work_tiles_anew(tokens):
    """As many work tiles as CTAs, one more, several each; the tile counter is zero again afterwards."""
    q, kv, ragged, sink = case(tokens, 128, 576, 700, 300, lengths="random", sink="random", seed=tokens)
    want = launch.sparse_attn_prefill(q, kv, *ragged, 0.05, 512, sink)
    mine = workspace.Workspace((0, 0), "cuda")
    graph = torch.cuda.CUDAGraph()
    with workspace.use(mine):
        launch.sparse_attn_prefill(q, kv, *ragged, 0.05, 512, sink)
        mine.lock()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), workspace.use(mine), torch.cuda.graph(graph, stream=stream):
            got = launch.sparse_attn_prefill(q, kv, *ragged, 0.05, 512, sink)
    for _ in range(20):
        got[0].fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    _, counters = mine.take("the test", config.TILE_COUNTER)
    assert not counters.any()


@pytest.mark.gpu
def test_what_it_cannot_copy_takes_the_portable_kernel():
    """Rows that start between two 16-byte lines."""
    q, kv, ragged, sink = case(140, 64, 576, 500, 128, poison=False)
    shifted = torch.empty(500, 577, device="cuda", dtype=torch.bfloat16)[:, 1:]
    shifted.copy_(kv)
    want = launch.sparse_attn_prefill(q, kv, *ragged, 0.05, 512, sink)
    got = launch.sparse_attn_prefill(q, shifted, *ragged, 0.05, 512, sink)
    assert_close(got[0], want[0], PREFILL_OUT)
