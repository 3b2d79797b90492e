"""Plans of compressed entries and of windows, derived from a step plan: plain Python, the reference, the kernel."""

import pytest
import torch
from expecttest import assert_expected_inline
from support.extremes import INT_MAX, INT_MIN

from sparse_attn.ops.ragged.step_plans import build_compressed_plan, build_step_plan, build_window_plan
from sparse_attn.testing.ops import opcheck, schema


def plan_of(lengths, fed, num_decodes, next_n=1, blocks=6, dead=(), extra=0, hole=True):
    """lengths: of requests; fed: rows of each; dead: rows whose slot is -1; extra: rows behind the last request."""
    starts = torch.tensor([0, *fed]).cumsum(0).int()
    rows = int(starts[-1]) + extra
    slots = torch.arange(100, 100 + rows)
    slots[list(dead)] = -1
    table = torch.arange(len(lengths) * blocks).flip(0).int().view(len(lengths), blocks)
    if hole and len(lengths) > 1:
        table[1, 1] = -1
    return build_step_plan(
        starts, torch.tensor(lengths, dtype=torch.int32), table, slots,
        num_decodes=num_decodes, next_n=next_n, kv_capacity=max(1, sum(lengths[num_decodes:])), max_context=200,
    )  # fmt: skip


CASES = {
    "mixed": plan_of([11, 0, 16, 9, 3], [2, 2, 5, 9, 1], 2, 2, dead=(3, 8), extra=2),
    "decode": plan_of([4, 8, 12, 200], [1, 1, 1, 1], 4),
    "prefill": plan_of([8, 130, 3], [8, 3, 0], 0),
    "dead first row": plan_of([8, 40], [4, 30], 0, dead=(0, 4, 5)),
    "dead request": plan_of([8, 7], [4, 3], 0, dead=(0, 1, 2, 3)),
    "nothing": plan_of([], [], 0),
}


def slow_compressed(plan, ratio, block_size):
    positions, requests = plan.positions.tolist(), plan.request_ids.tolist()
    rows = plan.context_lens.numel()
    slots = []
    for p, b in zip(positions, requests):
        slot, entry = -1, p // ratio
        if p >= 0 and (p + 1) % ratio == 0 and entry // block_size < plan.block_table.shape[1]:
            block = int(plan.block_table[b, entry // block_size])
            slot = block * block_size + entry % block_size if block >= 0 else -1
        slots.append(slot)
    indptr = [0]
    for length in plan.kv_indptr.diff().tolist():
        indptr.append(indptr[-1] + length // ratio)
    first = plan.block_table.shape[0] - (len(indptr) - 1)
    starts = [indptr[b - first] if b >= 0 else 0 for b in requests[rows:]]
    limits = [(p + 1) // ratio for p in positions]
    return limits, slots, indptr, starts, [start + limit for start, limit in zip(starts, limits[rows:])]


def slow_window(plan, window):
    rows = plan.context_lens.numel()
    lengths = plan.kv_indptr.diff().tolist()
    first = plan.block_table.shape[0] - len(lengths)
    starts, indptr = [], [0]
    for b, length in enumerate(lengths):
        mine = [p for p, r in zip(plan.positions[rows:].tolist(), plan.request_ids[rows:].tolist()) if r == b + first]
        starts.append(max(min(mine) - window + 1, 0) if mine else length)
        indptr.append(indptr[-1] + length - starts[-1])
    offsets = [indptr[r - first] - starts[r - first] if r >= 0 else 0 for r in plan.request_ids[rows:].tolist()]
    return indptr, starts, offsets


def moved(plan, device):
    return plan._replace(**{k: v.to(device) for k, v in plan._asdict().items() if isinstance(v, torch.Tensor)})


def check_compressed(plan, impl, device):
    for ratio, block_size in ((4, 2), (4, 64), (128, 1), (3, 5), (1, 4)):
        got = build_compressed_plan(moved(plan, device), ratio=ratio, block_size=block_size, impl=impl)
        limits, slots, indptr, starts, ends = slow_compressed(plan, ratio, block_size)
        assert got.limits.tolist() == limits and got.slot_mapping.tolist() == slots
        assert got.kv_indptr.tolist() == indptr and got.kv_start.tolist() == starts and got.kv_end.tolist() == ends
        assert torch.equal(got.context_lens.cpu(), plan.context_lens // ratio)
        assert (got.kv_capacity, got.max_context) == (plan.kv_capacity // ratio, 200 // ratio)
        assert got.kv_capacity >= indptr[-1]


@pytest.mark.parametrize("name", CASES)
def test_compressed_reference(name):
    check_compressed(CASES[name], "reference", "cpu")


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_compressed_kernel(name, device):
    check_compressed(CASES[name], "triton", device)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("window", [1, 3, 128])
def test_windows(name, window):
    plan = CASES[name]
    got = build_window_plan(plan, window=window)
    assert (got.kv_indptr.tolist(), got.starts.tolist(), got.offsets.tolist()) == slow_window(plan, window)
    assert got.capacity >= int(got.kv_indptr[-1])


def test_a_plan_to_read():
    """Two decode rows of a request of 11 tokens, then a request of 16 tokens that feeds its last 5; ratio 4."""
    plan = plan_of([11, 16], [2, 5], 1, 2, hole=False)
    entries = build_compressed_plan(plan, ratio=4, block_size=2)
    lines = [
        f"request {b} position {p:2}: sees {n} entries, writes slot {s}"
        for b, p, n, s in zip(plan.request_ids, plan.positions, entries.limits, entries.slot_mapping)
    ]
    windows = build_window_plan(plan, window=4)
    lines.append(f"window keys from position {windows.starts.tolist()}, rows {windows.kv_indptr.tolist()}")
    assert_expected_inline(
        "\n".join(lines),
        """\
request 0 position  9: sees 2 entries, writes slot -1
request 0 position 10: sees 2 entries, writes slot -1
request 1 position 11: sees 3 entries, writes slot 8
request 1 position 12: sees 3 entries, writes slot -1
request 1 position 13: sees 3 entries, writes slot -1
request 1 position 14: sees 3 entries, writes slot -1
request 1 position 15: sees 4 entries, writes slot 9
window keys from position [8], rows [0, 8]""",
    )


def test_schema():
    assert_expected_inline(
        schema("compressed_plan"),
        """sparse_attn::compressed_plan(Tensor request_ids, Tensor positions, Tensor block_table, Tensor kv_indptr, SymInt decode_rows, int ratio, SymInt block_size, str impl) -> (Tensor limits, Tensor slots, Tensor kv_indptr, Tensor kv_start, Tensor kv_end)""",  # noqa: E501
    )


def check_wild(impl, device):
    """Ids that point nowhere, blocks that are none, non-contiguous views; slots are int64 and may be beyond int32."""
    requests, positions = [0, 1, INT_MAX, INT_MIN, -1, 2, 1, 0, 2, 3], [3, 7, 3, 3, 3, INT_MIN, 1199, 7, 11, 0]
    table = torch.tensor([[3, INT_MIN, 9], [INT_MAX, 2, 9], [4, 1, 9]], dtype=torch.int32, device=device)[:, :2]
    views = [torch.tensor(values, dtype=torch.int32, device=device).repeat_interleave(2)[::2]
             for values in (requests, positions, [0, 8, 20])]  # fmt: skip
    got = torch.ops.sparse_attn.compressed_plan(views[0], views[1], table, views[2], 4, 4, 1, impl)
    assert got[0].tolist() == [1, 2, 0, 0, 0, 0, 300, 2, 3, 0]
    assert got[1].tolist() == [3, 2, -1, -1, -1, -1, -1, -1, -1, -1]
    assert got[2].tolist() == [0, 2, 5]
    # Request 0 decodes: its row among the prefill rows has no range.
    assert got[3].tolist() == [0, 0, 0, 0, 2, 0] and got[4].tolist() == [0, 0, 300, 0, 5, 0]
    far = torch.ops.sparse_attn.compressed_plan(views[0], views[1], table, views[2], 4, 4, 64, impl)[1]
    assert far.tolist()[:2] == [3 * 64, INT_MAX * 64 + 1]
    for empty in (table[:0], table[:, :0]):
        got = torch.ops.sparse_attn.compressed_plan(views[0], views[1], empty, views[2][:1], 4, 4, 1, impl)
        assert got[1].tolist() == [-1] * 10


def test_wild_reference():
    check_wild("reference", "cpu")


@pytest.mark.kernel
def test_wild_kernel(device):
    check_wild("triton", device)


def test_traces_without_breaks_or_recompiles():
    def step(plan):
        return *build_compressed_plan(plan, ratio=4, block_size=2), *build_window_plan(plan, window=3)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for count, prefills in enumerate((2, 3, 5, 9)):
        fed = [2] * (prefills + 1) + [4 + n for n in range(prefills)]
        plan = plan_of([9 + n for n in range(len(fed))], fed, prefills + 1, 2)
        with torch.compiler.set_stance("default" if count < 2 else "fail_on_recompile"):
            got = compiled(plan)
        for mine, want in zip(got, step(plan), strict=True):
            assert torch.equal(mine, want) if isinstance(want, torch.Tensor) else mine == want


def check_opcheck(impl, device):
    for name in ("mixed", "decode", "nothing"):
        plan = moved(CASES[name], device)
        rows = plan.context_lens.numel()
        arguments = plan.request_ids, plan.positions, plan.block_table, plan.kv_indptr
        opcheck("compressed_plan", *arguments, rows, 4, 2, impl)


def test_opcheck():
    check_opcheck("auto", "cpu")


@pytest.mark.kernel
def test_opcheck_kernel(device):
    check_opcheck("triton", device)


@pytest.mark.parametrize(
    "function, change, message",
    [
        (build_compressed_plan, dict(ratio=0, block_size=2), "ratio: got 0"),
        (build_compressed_plan, dict(ratio=4, block_size=0), "block_size: got 0"),
        (build_compressed_plan, dict(ratio=4, block_size=2, impl="cuda"), "impl: got 'cuda'"),
        (build_window_plan, dict(window=0), "window: got 0"),
        (build_window_plan, dict(window=4, plan=CASES["mixed"]._replace(kv_indptr=CASES["mixed"].kv_indptr[1:])),
         r"plan.kv_indptr: got shape \[3\]"),
        (build_window_plan, dict(window=4, plan=CASES["mixed"]._replace(
            context_lens=torch.zeros(1, 99, dtype=torch.int32))), r"plan.context_lens: got shape \[1, 99\], allowed: no more rows"),
        (build_compressed_plan, dict(ratio=4, block_size=2, plan=CASES["mixed"]._replace(
            block_table=CASES["mixed"].block_table.T.contiguous().T)), "plan.block_table: got stride"),
        (build_window_plan, dict(window=4, impl="cuda"), "impl: got 'cuda'"),
    ],
)  # fmt: skip
def test_errors(function, change, message):
    with pytest.raises(ValueError, match=message):
        function(**dict(plan=CASES["mixed"]) | change)


def test_wrong_dtypes_are_named():
    wrong = CASES["mixed"]._replace(positions=CASES["mixed"].positions.long())
    for function, sizes in ((build_compressed_plan, dict(ratio=4, block_size=2)), (build_window_plan, dict(window=4))):
        with pytest.raises(TypeError, match="plan.positions: got dtype int64"):
            function(wrong, **sizes)
