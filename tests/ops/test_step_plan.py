"""The step plan against plain Python, and the kernel against the reference."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline
from support.extremes import INT_MIN

from sparse_attn.framework.torch_private import fake_mode
from sparse_attn.ops.ragged.step_plans import build_step_plan, build_window_plan, reference
from sparse_attn.testing.ops import opcheck, schema


def tensors(starts, lens, slots, device="cpu"):
    return (
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        torch.tensor(slots, dtype=torch.int64, device=device),
    )


# Two decode requests of two rows (the second is padding), then prefill requests: 3 of 5 tokens, none of 4, 2 of 2.
MIXED = ([0, 2, 4, 7, 7, 9], [6, 0, 5, 4, 2], [10, 11, -1, -1, 20, 21, 22, 30, 31, -1, -1])


def slow_plan(starts, lens, slots, num_decodes, next_n):
    rows = [(-1, -1)] * len(slots)
    for b, length in enumerate(lens):
        first, last = (b * next_n, (b + 1) * next_n) if b < num_decodes else (starts[b], starts[b + 1])
        for row in range(max(first, 0), min(last, len(slots))):
            position = length - (last - first) + row - first
            if length > 0 and position >= 0 and slots[row] >= 0 and (b < num_decodes or row >= num_decodes * next_n):
                rows[row] = (b, position)
    indptr = [0]
    for b in range(num_decodes, len(lens)):
        indptr.append(indptr[-1] + (max(lens[b], 0) if starts[b + 1] > starts[b] else 0))
    prefill = rows[num_decodes * next_n :]
    start = [indptr[b - num_decodes] if b >= 0 else 0 for b, _ in prefill]
    return (
        [b for b, _ in rows],
        [p for _, p in rows],
        [p + 1 for _, p in rows],
        [slot if p >= 0 else -1 for slot, (_, p) in zip(slots, rows)],
        indptr,
        start,
        [s + p + 1 for s, (_, p) in zip(start, prefill)],
    )


CASES = [
    (*MIXED, 2, 2),
    ([0, 1, 2, 3], [5, 1, 9], [3, 4, 5], 3, 1),
    ([0, 4, 4, 9], [4, 7, 5], list(range(9)), 0, 1),
    ([0, 3], [2], [1, 2, 3, 4, 5], 0, 1),  # more queries than tokens: the first has no position
    ([0, 2, 3], [INT_MIN, -1], [1, 2, 3], 1, 2),
    ([0], [], [1, 2], 0, 1),
    ([0, 0], [0], [], 0, 1),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_reference_matches_python(case):
    starts, lens, slots, num_decodes, next_n = CASES[case]
    query_start_loc, seq_lens, slot_mapping = tensors(starts, lens, slots)
    got = reference.step_plan(query_start_loc, seq_lens, slot_mapping, num_decodes, next_n)
    assert tuple(x.tolist() for x in got) == slow_plan(starts, lens, slots, num_decodes, next_n)


def test_plan_golden():
    query_start_loc, seq_lens, slot_mapping = tensors(*MIXED)
    plan = build_step_plan(
        query_start_loc,
        seq_lens,
        torch.zeros(5, 3, dtype=torch.int32),
        slot_mapping,
        num_decodes=2,
        next_n=2,
        kv_capacity=16,
        max_context=64,
    )
    fields = ("request_ids", "positions", "limits", "slot_mapping", "context_lens", "kv_indptr", "kv_start", "kv_end")
    assert_expected_inline(
        "\n".join(f"{name:12} {getattr(plan, name).tolist()}" for name in fields),
        """\
request_ids  [0, 0, -1, -1, 2, 2, 2, 4, 4, -1, -1]
positions    [4, 5, -1, -1, 2, 3, 4, 0, 1, -1, -1]
limits       [5, 6, 0, 0, 3, 4, 5, 1, 2, 0, 0]
slot_mapping [10, 11, -1, -1, 20, 21, 22, 30, 31, -1, -1]
context_lens [[5, 6], [0, 0]]
kv_indptr    [0, 5, 5, 7]
kv_start     [0, 0, 0, 5, 5, 0, 0]
kv_end       [3, 4, 5, 6, 7, 0, 0]""",
    )


def test_schema():
    assert_expected_inline(
        schema("step_plan"),
        """sparse_attn::step_plan(Tensor query_start_loc, Tensor seq_lens, Tensor slot_mapping, SymInt num_decodes, SymInt next_n, str impl) -> (Tensor request_ids, Tensor positions, Tensor limits, Tensor slots, Tensor kv_indptr, Tensor kv_start, Tensor kv_end)""",
    )


def check_opcheck(impl, device):
    starts, lens, slots, num_decodes, next_n = CASES[0]
    opcheck("step_plan", *tensors(starts, lens, slots, device), num_decodes, next_n, impl)


def test_opcheck_reference():
    check_opcheck("reference", "cpu")


@pytest.mark.parametrize(
    "change,name,kind",
    [
        (dict(query_start_loc=torch.zeros(4, dtype=torch.int64)), "query_start_loc", TypeError),
        (dict(query_start_loc=torch.zeros(4, dtype=torch.int32)), "query_start_loc", ValueError),
        (dict(seq_lens=torch.zeros(2, 2, dtype=torch.int32)), "seq_lens", ValueError),
        (dict(block_table=torch.zeros(3, 2, dtype=torch.int32)), "block_table", ValueError),
        (dict(slot_mapping=torch.zeros(4, dtype=torch.int32)), "slot_mapping", TypeError),
        (dict(num_decodes=3), "num_decodes", ValueError),
        (dict(num_decodes=2, next_n=3), "slot_mapping", ValueError),
        (dict(next_n=0), "next_n", ValueError),
        (dict(kv_capacity=-1), "kv_capacity", ValueError),
        (dict(max_context=-1), "max_context", ValueError),
    ],
)
def test_errors_name_the_argument(change, name, kind):
    arguments = dict(
        query_start_loc=torch.zeros(3, dtype=torch.int32),
        seq_lens=torch.zeros(2, dtype=torch.int32),
        block_table=torch.zeros(2, 2, dtype=torch.int32),
        slot_mapping=torch.zeros(4, dtype=torch.int64),
        max_context=8,
    )
    with pytest.raises(kind, match=rf"^{name}: got"):
        build_step_plan(**(arguments | change))


@pytest.mark.kernel
def test_kernel_equals_reference(device):
    cases = list(CASES)
    generator = torch.Generator().manual_seed(0)
    for requests, num_decodes, next_n in ((3, 1, 1), (70, 2, 3), (130, 130, 1)):
        queries = torch.randint(0, 4, (requests,), generator=generator)
        queries[:num_decodes] = next_n
        starts = [0, *queries.cumsum(0).tolist()]
        lens = torch.randint(-1, 30, (requests,), generator=generator).tolist()
        slots = torch.randint(-3, 50, (starts[-1] + 5,), generator=generator).tolist()
        slots = [-(2**63) if slot == -3 else slot for slot in slots]
        cases.append((starts, lens, slots, num_decodes, next_n))
    for starts, lens, slots, num_decodes, next_n in cases:
        inputs = tensors(starts, lens, slots, device)
        got = torch.ops.sparse_attn.step_plan(*inputs, num_decodes, next_n, "triton")
        want = reference.step_plan(*tensors(starts, lens, slots), num_decodes, next_n)
        for mine, oracle in zip(got, want):
            assert torch.equal(mine.cpu(), oracle)


@pytest.mark.kernel
def test_opcheck_kernel(device):
    check_opcheck("triton", device)


WRONG = {
    "max_context": (
        dict(seq_lens=[3, 200], kv_capacity=200),
        "seq_lens[1]: got 200, allowed: at most 64 (max_context)",
    ),
    "kv_capacity": (dict(kv_capacity=4), "kv_capacity: got 4, allowed: at least 5 (seq_lens of prefill requests)"),
    "slots": (dict(slots=[2, 4, -59]), "slot_mapping[2]: got -59, allowed: at least -1 (-1 is none)"),
    "order": (dict(starts=[0, 1, 4]), "query_start_loc[2]: got 4, allowed: 0 to 3 (rows of the step)"),
    "rows": (dict(seq_lens=[3, 1]), "seq_lens[1]: got 1, allowed: at least 2 (the rows of this step count among them)"),
}


def planned(starts=(0, 1, 3), seq_lens=(3, 5), slots=(2, 4, 5), device="cpu", **bounds):
    table = torch.tensor([[0], [INT_MIN]], dtype=torch.int32, device=device)  # whose unused blocks mean nothing
    starts, seq_lens, slots = tensors(starts, seq_lens, slots, device)
    return build_step_plan(
        starts, seq_lens, table, slots, **dict(num_decodes=1, max_context=64, kv_capacity=5) | bounds
    )


@pytest.mark.parametrize("wrong", WRONG)
def test_values_on_the_host_that_cannot_be_right_are_refused(wrong):
    changed, said = WRONG[wrong]
    planned()
    with pytest.raises(ValueError, match=f"^(build_)?step_plan: {re.escape(said)}"):
        planned(**changed)


def test_a_plan_of_padding_is_legal_on_the_host():
    planned(seq_lens=(0, 0), slots=(-1, -1, -1), kv_capacity=0)
    planned(seq_lens=(INT_MIN, -1), slots=(-1, -1, -1), kv_capacity=0)
    planned(seq_lens=(65, 5), slots=(-1, 4, 5))
    planned(starts=(0, 1, 1), slots=(-1, -1, -1), kv_capacity=0)  # a request without rows gathers nothing
    plan = planned()
    with pytest.raises(ValueError, match=r"^window_plan: request_ids\[1\]: got 0, allowed: -1, or 1 to 1"):
        build_window_plan(plan._replace(request_ids=torch.tensor([0, 1, 0], dtype=torch.int32)), window=2)


@pytest.mark.parametrize("wrong", WRONG)
def test_only_plain_values_on_the_host_are_looked_at(wrong):
    """Stand-ins have none, compiled code has them later, and those of a device would be waited for."""
    changed, _ = WRONG[wrong]
    with fake_mode():
        planned(**changed)
    planned(**changed, device="meta")
    compiled = torch.compile(lambda: planned(**changed), fullgraph=True, backend="eager")
    assert compiled().request_ids.shape == (3,)
