"""Step metadata on the device: from request lengths to what every row needs, without a host sync."""

from __future__ import annotations

import torch

from sparse_attn.framework import checks
from sparse_attn.framework.debug import look
from sparse_attn.framework.registration import define_op
from sparse_attn.framework.target import IMPLEMENTATIONS
from sparse_attn.framework.torch_private import mark_sizes
from sparse_attn.ops.ragged.step_plans import fake, reference
from sparse_attn.ops.ragged.step_plans.reference import window_plan
from sparse_attn.types import CompressedPlan, StepPlan, WindowPlan

_STEP = checks.Guard()


def _launchers():
    from sparse_attn.ops.ragged.step_plans import launch

    return launch


_step_plan = define_op(
    "step_plan",
    "(Tensor query_start_loc, Tensor seq_lens, Tensor slot_mapping, SymInt num_decodes, SymInt next_n, str impl)"
    " -> (Tensor request_ids, Tensor positions, Tensor limits, Tensor slots, Tensor kv_indptr, Tensor kv_start, "
    "Tensor kv_end)",
    fake=fake.step_plan,
    reference=reference.step_plan,
    rules=reference.rules_of_step_plan,
    launch=lambda: _launchers().step_plan,
)
_compressed_plan = define_op(
    "compressed_plan",
    "(Tensor request_ids, Tensor positions, Tensor block_table, Tensor kv_indptr, SymInt decode_rows, int ratio,"
    " SymInt block_size, str impl) -> (Tensor limits, Tensor slots, Tensor kv_indptr, Tensor kv_start, Tensor kv_end)",
    fake=fake.compressed_plan,
    reference=reference.compressed_plan,
    rules=reference.rules_of_compressed_plan,
    launch=lambda: _launchers().compressed_plan,
)


def build_step_plan(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    max_context: int,
    num_decodes: int = 0,
    next_n: int = 1,
    kv_capacity: int = 0,
    impl: str = "auto",
) -> StepPlan:
    """Describe one step of fixed capacity: B requests, T token rows, decode rows first.

    A row's position is L - q + j (L seq_len, q rows of the request, j the row's place in it). A row is padding (request
    -1, position -1, limit 0, slot -1, empty range) when it lies beyond query_start_loc[-1], its slot is negative, its
    request has L <= 0, or its position is negative.

    Args:
        query_start_loc: int32 [B + 1], first row of each request.
        seq_lens: int32 [B], tokens of each request including those of this step.
        block_table: int32 [B, max_blocks].
        slot_mapping: int64 [T], cache slot each row writes, -1 for padding.
        max_context: host bound on every row's position + 1.
        num_decodes: so many requests, the first ones, own ``next_n`` rows each, rows [0, num_decodes * next_n),
            whatever query_start_loc says of them; the others are prefill requests and own rows [query_start_loc[b],
            query_start_loc[b + 1]).
        next_n: rows of a decode request.
        kv_capacity: host bound on the sum of the prefill requests' seq_lens.
        impl: "auto", "reference" or "triton".

    Returns:
        A StepPlan; see its docstring for shapes.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or devices. Where all values lie on the host, and on the device in debug mode, it names
            what cannot be right: rows out of order or beyond the step, a prefill request of fewer tokens than rows,
            slots below -1, and bounds that do not hold.
    """
    if new := _STEP.new(
        query_start_loc, seq_lens, block_table, slot_mapping, max_context, num_decodes, next_n, kv_capacity
    ):
        for name, value in (("query_start_loc", query_start_loc), ("seq_lens", seq_lens), ("block_table", block_table)):
            checks.check_dtype(name, value, (torch.int32,))
        checks.check_dtype("slot_mapping", slot_mapping, (torch.int64,))
        checks.check_rank("seq_lens", seq_lens, 1)
        requests = seq_lens.shape[0]
        checks.check_bounds("query_start_loc", query_start_loc, requests, "[requests + 1]")
        checks.check_shape("block_table", block_table, (requests, None), "[requests, max_blocks]")
        checks.check_rank("slot_mapping", slot_mapping, 1)
        checks.check_at_least("num_decodes", num_decodes, 0)
        checks.check_at_least("next_n", next_n, 1)
        checks.check_at_least("kv_capacity", kv_capacity, 0)
        checks.check_at_least("max_context", max_context, 0)
        if num_decodes > requests:
            raise ValueError(f"num_decodes: got {num_decodes}, allowed: at most the {requests} requests of seq_lens")
        if num_decodes * next_n > slot_mapping.shape[0]:
            raise ValueError(
                f"slot_mapping: got {slot_mapping.shape[0]} rows, "
                f"allowed: at least num_decodes * next_n = {num_decodes * next_n}"
            )
        checks.check_same_device(
            query_start_loc=query_start_loc, seq_lens=seq_lens, block_table=block_table, slot_mapping=slot_mapping
        )
        _STEP.passed(new)
    values = query_start_loc, seq_lens, slot_mapping, num_decodes, next_n
    look("step_plan", reference.rules_of_step_plan, *values, always_on_host=True)
    request_ids, positions, limits, slots, kv_indptr, kv_start, kv_end = _step_plan(*values, impl)
    found = seq_lens, request_ids, limits, kv_indptr
    look("build_step_plan", reference.rules_of_build_step_plan, *found, max_context, kv_capacity, always_on_host=True)
    context_lens = limits[: num_decodes * next_n].view(num_decodes, next_n)
    for value in (request_ids, positions, limits, slots, kv_indptr, kv_start, kv_end):
        mark_sizes(value, dynamic=(0,))
    for value in (block_table, context_lens):
        mark_sizes(value, dynamic=(0, 1))
    return StepPlan(
        request_ids=request_ids,
        positions=positions,
        limits=limits,
        slot_mapping=slots,
        block_table=block_table,
        context_lens=context_lens,
        kv_indptr=kv_indptr,
        kv_start=kv_start,
        kv_end=kv_end,
        kv_capacity=kv_capacity,
        max_context=max_context,
    )


def build_compressed_plan(plan: StepPlan, *, ratio: int, block_size: int, impl: str = "auto") -> CompressedPlan:
    """What the step described by ``plan`` needs of entries that each stand for ``ratio`` tokens.

    A row sees the entries that are complete at its position, (position + 1) // ratio, its own included. The row that
    completes entry e writes block_table[request, e // block_size] * block_size + e % block_size; a block that is
    negative or beyond the table gives -1.

    Args:
        plan: of the step.
        ratio: tokens of an entry.
        block_size: entries a block of the compressed caches holds; they share ``plan.block_table``.
        impl: "auto", "reference" or "triton".

    Returns:
        A CompressedPlan; see its docstring for shapes.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    _check_plan(plan)
    checks.check_unit_stride("plan.block_table", plan.block_table)
    checks.check_at_least("ratio", ratio, 1)
    checks.check_at_least("block_size", block_size, 1)
    num_decodes, next_n = plan.context_lens.shape
    decode_rows = num_decodes * next_n
    limits, slots, kv_indptr, kv_start, kv_end = _compressed_plan(
        plan.request_ids, plan.positions, plan.block_table, plan.kv_indptr, decode_rows, ratio, block_size, impl
    )
    return CompressedPlan(
        limits=limits,
        context_lens=limits[:decode_rows].view(num_decodes, next_n),
        slot_mapping=slots,
        kv_indptr=kv_indptr,
        kv_start=kv_start,
        kv_end=kv_end,
        kv_capacity=plan.kv_capacity // ratio,
        max_context=plan.max_context // ratio,
    )


def build_window_plan(plan: StepPlan, *, window: int, impl: str = "auto") -> WindowPlan:
    """How raw keys are gathered for the step's prefill rows: for each request, from ``window`` - 1 positions before its
    first row on.

    A request without rows gathers none. Plain torch on every device: it runs once per step, and only for prefill.

    Args:
        plan: of the step.
        window: keys that a row sees, its own included.
        impl: "auto", "reference" or "triton".

    Returns:
        A WindowPlan; see its docstring for shapes.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    _check_plan(plan)
    checks.check_at_least("window", window, 1)
    checks.check_choice("impl", impl, IMPLEMENTATIONS)
    num_decodes, next_n = plan.context_lens.shape
    rows = num_decodes * next_n
    values = plan.request_ids[rows:], plan.positions[rows:], plan.kv_indptr, num_decodes
    look("window_plan", reference.rules_of_window_plan, *values, always_on_host=True)
    requests = plan.block_table.shape[0] - num_decodes
    kv_indptr, starts, offsets = window_plan(
        plan.request_ids[rows:], plan.positions[rows:], plan.kv_indptr, requests, num_decodes, window
    )
    return WindowPlan(kv_indptr, starts, offsets, plan.positions.shape[0] - rows + requests * (window - 1))


def _check_plan(plan: StepPlan) -> None:
    if not isinstance(plan, StepPlan):
        raise TypeError(f"plan: got {type(plan).__name__}, allowed: a StepPlan")
    ranks = dict(request_ids=1, positions=1, block_table=2, context_lens=2, kv_indptr=1)
    tensors = {f"plan.{name}": (getattr(plan, name), rank) for name, rank in ranks.items()}
    for name, (value, rank) in tensors.items():
        checks.check_dtype(name, value, (torch.int32,))
        checks.check_rank(name, value, rank)
    checks.check_shape("plan.request_ids", plan.request_ids, plan.positions.shape, "[tokens]")
    if plan.context_lens.numel() > plan.positions.shape[0]:
        raise ValueError(
            f"plan.context_lens: got shape {list(plan.context_lens.shape)}, "
            f"allowed: no more rows than the {plan.positions.shape[0]} of plan.positions"
        )
    prefills = plan.block_table.shape[0] - plan.context_lens.shape[0]
    checks.check_bounds("plan.kv_indptr", plan.kv_indptr, prefills, "[prefill requests + 1]")
    checks.check_same_device(**{name: value for name, (value, _) in tensors.items()})
