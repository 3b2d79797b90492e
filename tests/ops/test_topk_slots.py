"""Selection that stores cache slots, packed row by row: what selects says where, on every path."""

import pytest
import torch
from expecttest import assert_expected_inline
from support.extremes import INT_MAX
from support.index_topk import LAYOUTS, decode_case, to
from support.topk import EXACT, KINDS, PLANS, chosen, for_rows, group_maxima, scores

from sparse_attn import workspace
from sparse_attn.framework.target import H200
from sparse_attn.layout import IndexFp8Layout
from sparse_attn.ops.ragged.lists import compute_global_topk_ragged_indices_and_indptr
from sparse_attn.ops.topk.fused import config as index_topk_config
from sparse_attn.ops.topk.fused import index_topk_decode, index_topk_decode_slots
from sparse_attn.ops.topk.select import dispatch, reference
from sparse_attn.ops.topk.select.plan import GroupMaxima, Problem

DIRT = 12345
PLANS = PLANS | {"group_maxima": ("group_maxima", EXACT, 8 * 1000)}
FORMS = (
    "thresholds.single_cta", "single_cta", "single_cta windowed", "single_cta_bf16", "single_cta_bf16 coalesced", "multi_cta",
    "group_maxima",
)  # fmt: skip


def tables(requests, columns, seed=0):
    """Distinct blocks for every request, non-contiguous."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(requests * columns, generator=generator).view(requests, columns).int()
    return torch.cat([ids, torch.full_like(ids, INT_MAX)], 1)[:, :columns]


def expected(x, ends, k, table, block_size, next_n):
    chosen = reference.top_k_per_row(x, None, ends, k)
    requests = torch.arange(len(x), dtype=torch.int32) // next_n
    return compute_global_topk_ragged_indices_and_indptr(chosen, requests, table, block_size, impl="reference")


def packed(x, ends, k, form, table, block_size, next_n, device):
    from sparse_attn.ops.topk.select.plan import Selection, Slots

    """form: a name of PLANS, or what dispatch chose."""
    rows, width = x.shape
    if isinstance(form, str):
        kernel, plan, _ = PLANS[form]
        form = chosen(kernel, for_rows(plan, rows))
    kernel, plan, _ = form
    assert plan.packs(rows, H200)
    around = torch.full((rows * k + 2 * 64,), DIRT, dtype=torch.int32, device=device)
    indptr = torch.full((rows + 3,), DIRT, dtype=torch.int32, device=device)
    views, counters = workspace.take("test", plan.scratch, torch.device(device))
    if isinstance(plan, GroupMaxima):
        x = x.masked_fill(torch.arange(width) >= ends[:, None], -torch.inf)
        top = group_maxima(x)
        views[0][:, : top.shape[1]] = top
    states = torch.zeros(rows, dtype=torch.int64, device=device)
    slots = Slots(indptr[1:-1], states, table.to(device), block_size, next_n)
    selection = Selection(x.to(device), None, ends.to(device), around[64:-64], views, counters, slots)
    kernel.launcher(selection, plan)
    assert not states.any() and not counters.any()
    assert (around[:64] == DIRT).all() and (around[-64:] == DIRT).all() and indptr[0] == indptr[-1] == DIRT
    return around[64:-64].cpu(), indptr[1:-1].cpu()


@pytest.mark.kernel
@pytest.mark.parametrize("form", FORMS)
def test_kernel(form, device, dirty_workspace):
    """Rows of several kinds, two to a request; longer and shorter than k, and empty ones."""
    width = PLANS[form][2]
    kinds = ("normal", "zeros", "relu", "nothing", "special", "narrow")
    x = torch.cat([scores(kind, 1, width) for kind in kinds])
    ends = torch.tensor([width - 3, 0, INT_MAX, width, 9, width], dtype=torch.int32)
    for k, block_size in ((24, 32), (1100, 64))[: 1 if form in ("multi_cta", "group_maxima") else 2]:
        table = tables(3, -(-width // block_size))
        got = packed(x, ends, k, form, table, block_size, 2, device)
        want = expected(x, ends, k, table, block_size, 2)
        assert torch.equal(got[1], want.indptr) and torch.equal(got[0], want.indices), k


@pytest.mark.sampled(3)
@pytest.mark.kernel
@pytest.mark.parametrize("width", [100, 256, 257, 512, 1000, 1024])
def test_few_narrow_rows(width, device, dirty_workspace):
    """As launched on Hopper: eight warps, however few slots."""
    kinds = ("normal", "zeros", "relu", "nothing", "special", "narrow")
    x = torch.cat([scores(kind, 1, width) for kind in kinds])
    ends = torch.tensor([width - 3, 0, INT_MAX, width, 9, width], dtype=torch.int32)
    for k, block_size in ((24, 32), (600, 64)):
        choice, table = dispatch.choose(Problem(len(x), width, k), H200), tables(3, -(-width // block_size))
        assert choice.plan.spread and choice.plan.num_warps == 8
        got = packed(x, ends, k, choice, table, block_size, 2, device)
        want = expected(x, ends, k, table, block_size, 2)
        assert torch.equal(got[1], want.indptr) and torch.equal(got[0], want.indices), k


@pytest.mark.kernel
def test_columns_of_a_short_table_are_not_read(device, dirty_workspace):
    """Columns behind the table's last block, none of which competes."""
    for form in ("single_cta windowed", "multi_cta", "thresholds.single_cta", "single_cta_bf16", "group_maxima"):
        width = PLANS[form][2]
        x, ends = scores("normal", 2, width), torch.full((2,), width, dtype=torch.int32)
        x[:, 96:] = -float("inf")
        table = tables(2, 3)
        got, want = packed(x, ends, 24, form, table, 32, 1, device), expected(x, ends, 24, table, 32, 1)
        assert torch.equal(got[1], want.indptr) and torch.equal(got[0], want.indices), form


def test_which_selections_pack():
    """Those whose programs hold all rows, and run all at once."""

    def packs(rows, width, k=2048):
        return dispatch.choose(Problem(rows, width, k), H200).plan.packs(rows, H200)

    assert all(packs(rows, width) for rows in (1, 8, 64, 132) for width in (100, 4096, 32768))
    assert all(packs(rows, 131072) for rows in (1, 8, 16)) and not packs(32, 131072) and not packs(1, 1 << 20)
    grouped = dispatch.choose(Problem(132, 131072, 2048, group_maxima=True), H200).plan
    assert grouped.packs(132, H200) and not grouped.packs(133, H200)
    assert packs(8, 131072, 8192) and not packs(9, 131072, 8192)
    assert not any(packs(rows, width) for rows in (133, 4096) for width in (4096, 131072))


def test_which_blocks_are_mapped():
    assert index_topk_config.packs_blocks(1 << 20, 64) and index_topk_config.packs_blocks(1 << 26, 32)
    assert not index_topk_config.packs_blocks((1 << 26) + 1, 32)  # its last slot is no int32
    assert not any(index_topk_config.packs_blocks(9, size) for size in (1, 16, 48, 65))


def launches(monkeypatch):
    """Names of the packing launches that follow."""
    from sparse_attn.ops.ragged.lists import launch

    seen, pack_rows = [], launch.pack_rows
    monkeypatch.setattr(launch, "pack_rows", lambda *a, **k: (seen.append("pack_rows"), pack_rows(*a, **k)))
    return seen


@pytest.mark.kernel
@pytest.mark.parametrize(
    "block, logits_bytes, apart", [(32, 1 << 20, False), (64, 1 << 20, False), (4, 1 << 20, True), (32, 2000, True)]
)
def test_packs_itself_or_by_another_launch(block, logits_bytes, apart, device, dirty_workspace, monkeypatch):
    """A launch of its own where a line of columns lies in several blocks, or the budget holds few rows."""
    seen, layout = launches(monkeypatch), LAYOUTS["fp8"]
    case = to(device, decode_case(layout, 2, 2, 90, block=block))
    got = index_topk_decode_slots(*case, 9, 90, layout, logits_bytes=logits_bytes, impl="triton")
    want = index_topk_decode(*case, 9, 90, layout, impl="triton")
    requests = torch.arange(4, dtype=torch.int32, device=device) // 2
    want = compute_global_topk_ragged_indices_and_indptr(want, requests, case[-1], block, impl="triton")
    assert torch.equal(got.indptr, want.indptr) and torch.equal(got.indices, want.indices)
    assert seen == ["pack_rows"] * (1 + apart)


def test_index_table_golden():
    """Two requests of two rows: 3 and 4 keys in blocks of 2, one of them in a block that is none."""
    layout = IndexFp8Layout(32)
    q, weights, cache, lens, table = decode_case(layout, 2, 2, 4, block=2)
    lens = torch.tensor([[2, 3], [3, 4]], dtype=torch.int32)
    table = torch.tensor([[5, 2], [-1, 3]], dtype=torch.int32)
    got = index_topk_decode_slots(q, weights, cache, lens, table, 3, 4, layout)
    assert_expected_inline(
        f"indices {got.indices.tolist()}\nindptr  {got.indptr.tolist()}",
        """\
indices [10, 11, 10, 11, 4, 6, 6, 7, -1, -1, -1, -1]
indptr  [0, 2, 5, 6, 8]""",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["fp8", "bf16"])
def test_gpu(layout, device, monkeypatch):
    """One row and many, one row a program and shared ones, two rows a request, too many rows, and twenty times the same
    bits."""
    seen, layout = launches(monkeypatch), LAYOUTS[layout]
    for requests, next_n, context, k, apart in (
        (1, 1, 4000, 2048, 0), (1, 1, 32768, 2048, 0), (1, 1, 131072, 2048, 0), (7, 2, 131072, 512, 0),
        (14, 2, 65536, 2048, 0), (64, 2, 8192, 512, 0), (132, 1, 30000, 2048, 0), (3, 1, 9000, 8192, 0),
        (64, 1, 131072, 2048, 0), (3, 1, 40000, 4096, 0),
        (67, 2, 3000, 512, 1), (67, 2, 131072, 2048, 1), (9, 1, 40000, 8192, 1),
    ):  # fmt: skip
        case = to(device, decode_case(layout, requests, next_n, context, block=64))
        chosen = index_topk_decode(*case, k, context, layout)
        ids = torch.arange(requests * next_n, dtype=torch.int32, device=device) // next_n
        want = compute_global_topk_ragged_indices_and_indptr(chosen, ids, case[-1], 64)
        seen.clear()
        for _ in range(20):
            got = index_topk_decode_slots(*case, k, context, layout)
            assert torch.equal(got.indptr, want.indptr) and torch.equal(got.indices, want.indices), (requests, context)
        assert len(seen) == 20 * apart, (requests, context)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_kinds_of_scores(kind, device):
    for rows, width in ((1, 32768), (64, 8192), (3, 131072), (20, 4096), (130, 16384)):
        x = scores(kind, rows, width)
        ends = torch.randint(-5, width + 5, (rows,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
        table = tables(rows, width // 64)
        for k in (512, 2048):
            choice = dispatch.choose(Problem(rows, width, k), H200)
            got, want = packed(x, ends, k, choice, table, 64, 1, device), expected(x, ends, k, table, 64, 1)
            assert torch.equal(got[1], want.indptr) and torch.equal(got[0], want.indices), (rows, width, k)
