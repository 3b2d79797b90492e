"""Score and select: the same as top_k_per_row of the whole logits, whatever the byte budget."""

import dataclasses

import pytest
import torch
from support.extremes import INT_MAX, INT_MIN
from support.index_topk import DIM, HEADS, LAYOUTS, codes, decode_case, mxfp4_query, to
from support.topk import EXACT, chosen, for_rows

from sparse_attn import workspace
from sparse_attn.framework.target import H200, target_of
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, PlainLayout
from sparse_attn.mxfp4 import mxfp4_quantise
from sparse_attn.ops.indexer import scores
from sparse_attn.ops.topk.fused import (
    DECODE_LOGITS_BYTES,
    config,
    fake,
    index_topk_decode,
    index_topk_decode_slots,
    index_topk_prefill,
)
from sparse_attn.ops.topk.select import dispatch, top_k_per_row
from sparse_attn.ops.topk.select.plan import THRESHOLDS, Bound, Sampled
from sparse_attn.testing.ops import opcheck, schema

WIDEST = 262144  # with group maxima


def prefill_case(rows, keys, flavour="e4m3fn", seed=0):
    generator = torch.Generator().manual_seed(seed)
    if flavour == "none":
        q = torch.randn(rows, HEADS, DIM, generator=generator).bfloat16()
        k, scale = torch.randn(keys, DIM, generator=generator).bfloat16(), None
    elif flavour == "mxfp4":
        q = mxfp4_query(torch.randn(rows, HEADS, DIM, generator=generator))
        k, scale = mxfp4_quantise(torch.randn(keys, DIM, generator=generator))
    else:
        q, k = codes((rows, HEADS, DIM), generator).clamp_min(1), codes((keys, DIM), generator).clamp_min(1)
        scale = torch.rand(keys, generator=generator)
    weights = torch.randn(rows, HEADS, generator=generator)
    start = torch.randint(-2, keys // 3 + 1, (rows,), generator=generator, dtype=torch.int32)
    end = torch.randint(0, keys + 5, (rows,), generator=generator, dtype=torch.int32)
    odd = [(0, keys), (3, 3), (INT_MIN, INT_MAX), (INT_MAX, INT_MIN)]
    for row, (first, last) in enumerate(odd[:rows]):
        start[row], end[row] = first, last
    return q, weights, k, scale, start, end


def full_logits(case, layout=None, context=None, flavour="e4m3fn", impl="auto"):
    if layout is not None:
        q, weights, cache, lens, table = case
        form = {IndexFp8Layout: "fp8", IndexMxfp4Layout: "mxfp4", PlainLayout: "bf16"}[type(layout)]
        return getattr(scores, f"{form}_paged_mqa_logits")(q, cache, weights, lens, table, context, layout, impl=impl)
    q, weights, k, scale, start, end = case
    if scale is None:
        return scores.bf16_mqa_logits(q, k, weights, start, end, impl=impl)
    if flavour == "mxfp4":
        return scores.mxfp4_mqa_logits(q, k, scale, weights, start, end, impl=impl)
    return scores.fp8_mqa_logits(q, k, scale, weights, start, end, flavour=flavour, impl=impl)


# --- reference


@pytest.mark.parametrize("flavour", ["e4m3fn", "e4m3fnuz", "none", "mxfp4"])
@pytest.mark.parametrize("logits_bytes", [0, 700, 1 << 20])
def test_prefill_is_topk_of_the_logits(flavour, logits_bytes):
    case = prefill_case(9, 41, flavour)
    want = top_k_per_row(full_logits(case, flavour=flavour), 6, case[4], case[5])
    scale = {} if flavour == "none" else {"flavour": flavour}
    assert torch.equal(index_topk_prefill(*case, 6, **scale, logits_bytes=logits_bytes), want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("logits_bytes", [0, 700, 1 << 20])
def test_decode_is_topk_of_the_logits(layout, logits_bytes):
    layout = LAYOUTS[layout]
    for next_n in (1, 2):
        case = decode_case(layout, 4, next_n, 23)
        want = top_k_per_row(full_logits(case, layout, 23), 6, row_ends=case[3].reshape(-1))
        got = index_topk_decode(*case, 6, 23, layout, logits_bytes=logits_bytes)
        assert torch.equal(got, want)


def test_zero_sizes():
    assert index_topk_prefill(*prefill_case(0, 5), 3).shape == (0, 3)
    assert index_topk_prefill(*prefill_case(2, 0), 3).tolist() == [[-1] * 3] * 2
    layout = LAYOUTS["fp8"]
    q, weights, cache, lens, table = decode_case(layout, 2, 1, 8)
    assert index_topk_decode(q[:0], weights[:0], cache, lens[:0], table[:0], 3, 8, layout).shape == (0, 3)
    assert index_topk_decode(q, weights, cache, lens, table, 3, 0, layout).tolist() == [[-1] * 3] * 2


def test_budget():
    assert fake.rows_at_once(100, 64, 256 * 7) == 7
    assert fake.rows_at_once(100, 65, 512 * 7 + 511) == 7
    assert fake.rows_at_once(100, 64, 0) == 1
    assert fake.rows_at_once(100, 64, 256 * 7, group=2) == 6
    assert fake.rows_at_once(4, 64, 1 << 30, group=2) == 4
    for rows, width in ((4096, 131072), (64, 131072), (1, 5000)):
        size = workspace.size_of(config.scratch(rows, width, 2048, 512 << 20, H200))
        assert size.nbytes <= (512 << 20) + (16 << 20)


@pytest.mark.parametrize("top_k", [512, 2048, 4096])
def test_room_for_the_most_columns_serves_fewer(top_k):
    """Though more rows of them are held at once."""
    for budget in (40 << 20, 512 << 20):
        widths = (8192, 32768, 32769, 40000, 65536, 131072, 163840, 1 << 19, 1 << 20)
        buffers = [config.scratch(8192, width, top_k, budget, H200).buffers for width in widths]
        rooms = [sum(buffer.nbytes for buffer in some if buffer.name != "logits") for some in buffers]
        assert max(rooms) == rooms[-1] and 15 << 20 < rooms[-1] < 16 << 20, rooms


# --- contract


def test_schema_and_opcheck():
    assert schema("index_topk_prefill") == (
        "sparse_attn::index_topk_prefill(Tensor q, Tensor weights, Tensor k, Tensor? k_scale, Tensor kv_start, "
        "Tensor kv_end, int top_k, str flavour, int logits_bytes, str impl) -> Tensor"
    )
    assert schema("index_topk_decode") == (
        "sparse_attn::index_topk_decode(Tensor q, Tensor weights, Tensor cache, Tensor context_lens, "
        "Tensor block_table, int top_k, SymInt max_context_len, str layout, int logits_bytes, str impl) -> Tensor"
    )
    opcheck("index_topk_prefill", *prefill_case(3, 9), 4, "e4m3fn", 200, "auto")
    opcheck("index_topk_prefill", *prefill_case(3, 9, "none"), 4, "none", 200, "auto")
    opcheck("index_topk_prefill", *prefill_case(3, 9, "mxfp4"), 4, "mxfp4", 200, "auto")
    opcheck("index_topk_decode", *decode_case(LAYOUTS["fp8"], 2, 2, 9), 4, 9, LAYOUTS["fp8"].name, 200, "auto")


def broken(case, place, value):
    return (*case[:place], value, *case[place + 1 :])


def test_errors_name_the_argument():
    case = prefill_case(3, 9)
    for error, name, place, value in (
        (ValueError, "q", 0, case[0][0]),
        (TypeError, "q", 0, case[0].float()),
        (ValueError, "weights", 1, case[1][:, :2]),
        (TypeError, "weights", 1, case[1].double()),
        (ValueError, "k", 2, case[2][:, :-1]),
        (TypeError, "k", 2, case[2].int()),
        (ValueError, "k_scale", 3, case[3][:-1]),
        (TypeError, "k_scale", 3, case[3].half()),
        (TypeError, "kv_start", 4, case[4].long()),
        (ValueError, "kv_end", 5, case[5][:-1]),
    ):
        with pytest.raises(error, match=f"^{name}: got .*allowed"):
            index_topk_prefill(*broken(case, place, value), 3)
    with pytest.raises(ValueError, match="^top_k: "):
        index_topk_prefill(*case, 0)
    with pytest.raises(ValueError, match="^flavour: "):
        index_topk_prefill(*case, 3, flavour="e5m2")
    with pytest.raises(ValueError, match="^logits_bytes: "):
        index_topk_prefill(*case, 3, logits_bytes=-1)

    layout = LAYOUTS["fp8"]
    case = decode_case(layout, 2, 2, 9)
    for error, name, place, value in (
        (ValueError, "q", 0, case[0][0]),
        (TypeError, "q", 0, case[0].float()),
        (ValueError, "weights", 1, case[1][:-1]),
        (TypeError, "cache", 2, case[2].int()),
        (ValueError, "cache", 2, case[2][:, :, :-1]),
        (ValueError, "context_lens", 3, case[3][:, :1]),
        (TypeError, "context_lens", 3, case[3].long()),
        (ValueError, "block_table", 4, case[4][:1]),
        (TypeError, "block_table", 4, case[4].long()),
    ):
        with pytest.raises(error, match=f"^{name}: got .*allowed"):
            index_topk_decode(*broken(case, place, value), 3, 9, layout)
    with pytest.raises(ValueError, match="^max_context_len: "):
        index_topk_decode(*case, 3, -1, layout)
    with pytest.raises(ValueError, match="^layout: "):
        index_topk_decode(*case, 3, 9, "fp8")
    with pytest.raises(ValueError, match="^top_k: got .*allowed"):
        index_topk_decode_slots(*case, 2**29, 9, layout)  # four rows


# --- kernels

LONG = Sampled(32, 2, 1, 2, chunk=32, span=32, bound=Bound(16, 32, 4), search=THRESHOLDS)


def kernels(rows):
    shared = dataclasses.replace(LONG, ctas_per_row=2, rows_in_flight=rows)
    return None, *(chosen("thresholds.sampled", plan) for plan in (LONG, shared))


@pytest.mark.kernel
@pytest.mark.parametrize("flavour", ["e4m3fn", "none", "mxfp4"])
def test_prefill_kernel(flavour, device, dirty_workspace):
    from sparse_attn.ops.topk.fused import launch

    case = to(device, prefill_case(5, 70, flavour))
    want = top_k_per_row(full_logits(case, flavour=flavour, impl="triton").cpu(), 9, case[4].cpu(), case[5].cpu())
    step = fake.rows_at_once(5, 70, 1024)
    assert step == 2
    for kernel in kernels(step):
        got = launch.index_topk_prefill(*case, 9, flavour, 1024, kernel)
        assert torch.equal(got.cpu(), want)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", ["fp8", "bf16"])
def test_decode_kernel(layout, device, dirty_workspace):
    from sparse_attn.ops.topk.fused import launch

    layout = LAYOUTS[layout]
    case = to(device, decode_case(layout, 3, 2, 70))
    want = top_k_per_row(full_logits(case, layout, 70, impl="triton").cpu(), 9, row_ends=case[3].cpu().reshape(-1))
    step = fake.rows_at_once(6, 70, 2048, 2)
    assert step == 4
    for kernel in kernels(step):
        got = launch.index_topk_decode(*case, 9, 70, layout.name, 2048, kernel)
        assert torch.equal(got.cpu(), want)


@pytest.mark.few(1)
@pytest.mark.kernel
@pytest.mark.parametrize("layout", ["fp8", "fp32"])
def test_decode_kernel_with_group_maxima(layout, device, dirty_workspace):
    """Rows of more keys than are held at once, and a budget that two requests exceed."""
    from sparse_attn.ops.topk.fused import launch

    layout, context = LAYOUTS[layout], 2605
    case = to(device, decode_case(layout, 3, 2, context))
    case[3][2] = torch.tensor([context - 2, 2100], dtype=torch.int32)
    want = top_k_per_row(
        full_logits(case, layout, context, impl="triton").cpu(), 200, row_ends=case[3].cpu().reshape(-1)
    )
    for logits_bytes in (1 << 20, 4 * 4 * 2624):
        got = launch.index_topk_decode(
            *case, 200, context, layout.name, logits_bytes, chosen("group_maxima", for_rows(EXACT, 4))
        )
        assert torch.equal(got.cpu(), want)


def test_grouped_decode_takes_as_much_as_is_planned():
    """Most at the most columns, of those that are selected so."""
    assert config.widths_of_most_scratch(1 << 20) == (1 << 20, WIDEST)
    for rows in (1, 128, 1000):
        sizes = [
            workspace.size_of(config.slots_scratch(rows, width, 2048, 1 << 32, H200)).nbytes
            for width in (32768, 32769, 65536, 131072, WIDEST)
        ]
        assert sizes == sorted(sizes) and sizes[-1] <= rows * (WIDEST * 9 // 2 + 256)


@pytest.mark.parametrize("top_k", [512, 1024, 2048, 4096])
def test_a_decode_selection_takes_less_than_half_of_its_logits(top_k):
    step = fake.rows_at_once(128, 163840, DECODE_LOGITS_BYTES)
    scratches = (
        config.scratch_of(
            step, 163840, dispatch.choose(config.selecting(step, 163840, top_k, group_maxima=True), H200).plan
        ),
        config.slots_scratch(128, 163840, top_k, DECODE_LOGITS_BYTES, H200),
    )
    for scratch in scratches:
        assert 0 < workspace.size_of(scratch).nbytes < 128 * 163840 * 4 // 2


@pytest.mark.kernel
def test_scratch_is_exact(device):
    case = to(device, prefill_case(3, 40))
    owner = workspace.Workspace((1 << 16, 8), device)
    with workspace.use(owner):
        index_topk_prefill(*case, 4, logits_bytes=600, impl="triton")
    assert owner.high_water == workspace.size_of(config.scratch(3, 40, 4, 600, target_of(device)))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_decode(layout, device):
    layout = LAYOUTS[layout]
    for requests, next_n, context in ((1, 1, 60000), (5, 2, 20000), (8, 1, 4000)):
        case = to(device, decode_case(layout, requests, next_n, context, block=64))
        want = top_k_per_row(full_logits(case, layout, context, impl="triton"), 2048, row_ends=case[3].reshape(-1))
        for logits_bytes in (1 << 20, 1 << 29):
            got = index_topk_decode(*case, 2048, context, layout, logits_bytes=logits_bytes)
            assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("flavour", ["e4m3fn", "e4m3fnuz", "none", "mxfp4"])
def test_gpu_prefill(flavour, device):
    scale = {} if flavour == "none" else {"flavour": flavour}
    for rows, keys in ((400, 20001), (33, 3000), (3, 70000)):
        case = to(device, prefill_case(rows, keys, flavour))
        want = top_k_per_row(full_logits(case, flavour=flavour, impl="triton"), 2048, case[4], case[5])
        for logits_bytes in (1 << 22, 1 << 29):
            assert torch.equal(index_topk_prefill(*case, 2048, **scale, logits_bytes=logits_bytes), want)
