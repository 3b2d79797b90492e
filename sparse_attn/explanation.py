"""Which kernel an operator's call takes, how it is launched, what bounds it, and why the kernels before it do not run.

The public function checks the arguments, as in every call, and hands them to its operator. There they are looked at
instead of run: their shapes, strides, addresses and numbers make the same problem that the launcher makes of them, and
the operator's table answers. Nothing is launched, no value on the device is read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sparse_attn import roofline
from sparse_attn.device.rows import is_aligned
from sparse_attn.framework import dispatch
from sparse_attn.framework.dispatch import Choice, Kernel
from sparse_attn.framework.registration import OPERATORS, taking
from sparse_attn.framework.target import H200, TARGETS, Target, resolve_impl, target_of
from sparse_attn.framework.torch_private import EagerDispatchMode, OpOverload, schema
from sparse_attn.ops.attention.sparse import dispatch as attention
from sparse_attn.ops.attention.sparse import sparse_attn_decode, sparse_attn_prefill
from sparse_attn.ops.indexer.scores import (
    bf16_mqa_logits,
    bf16_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    mxfp4_mqa_logits,
    mxfp4_paged_mqa_logits,
)
from sparse_attn.ops.indexer.scores import dispatch as scoring
from sparse_attn.ops.layers.products import dispatch as products
from sparse_attn.ops.layers.products import grouped_linear, packed_experts
from sparse_attn.ops.layers.products.problem import as_weight, experts_problem, problem_of
from sparse_attn.ops.ragged.lists import config as ragged
from sparse_attn.ops.topk.fused import config as fused
from sparse_attn.ops.topk.fused import index_topk_decode, index_topk_decode_slots, index_topk_prefill
from sparse_attn.ops.topk.select import dispatch as selection
from sparse_attn.ops.topk.select import top_k_per_row
from sparse_attn.weight_layout import PackedWeight, weight_bytes
from sparse_attn.workspace import Buffer, Scratch, size_of

REFERENCE, NOTHING = "reference", "none"


@dataclass(frozen=True)
class Explanation:
    """Which kernel a call takes, and why.

    Attributes:
        op: the public function.
        target: where it runs.
        kernel: "reference" where PyTorch runs instead, "none" where there is nothing to compute.
        plan: the kernel's own, see its operator; None without a kernel.
        floors: None for a GPU that is not in roofline.GPUS; they count every list of keys full, every range whole, and
            rows in as many groups as there can be.
        passed_over: (kernel, reason) of those that come before it in the table.
        scratch: of all launches.
        facts: (name, value) of what the plan does not say: CTAs of a launch, rows that are scored and selected at once,
            whether top_k_per_row reads four scores at a time (aligned).
        scores: of an operator that scores and selects, how it scores; the rest is of the selection.
    """

    op: str
    target: Target
    kernel: str
    plan: Any = None
    floors: roofline.Floors | None = None
    passed_over: tuple[tuple[str, str], ...] = ()
    scratch: Scratch = Scratch()
    facts: tuple[tuple[str, object], ...] = ()
    scores: Explanation | None = None

    def as_dict(self) -> dict[str, Any]:
        """What json.dumps takes."""
        found = {
            "op": self.op,
            "target": self.target.name,
            "kernel": self.kernel,
            "plan": self._plan(),
            "floors": self.floors and self.floors._asdict(),
            "passed_over": [{"kernel": kernel, "reason": reason} for kernel, reason in self.passed_over],
        }
        return found if self.scores is None else found | {"scores": self.scores.as_dict()}

    def _plan(self) -> dict[str, Any] | None:
        if self.plan is None:
            return None
        found = _plain(self.plan) | dict(self.facts)
        if "ctas" in found and "waves" not in found:
            found["waves"] = round(found["ctas"] / self.target.num_sms, 2)
        size = size_of(self.scratch)
        return found | {
            "scratch": {
                "buffers": [_plain(buffer) for buffer in self.scratch.buffers],
                "bytes": size.nbytes,
                "counters": size.counters,
            }
        }

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.target.name}: {self.kernel}"]
        if (plan := self._plan()) is not None:
            scratch = plan.pop("scratch")
            lines.append(
                "  plan: " + ", ".join(f"{key} {_text(value)}" for key, value in plan.items() if value is not None)
            )
            lines.append(f"  scratch: {scratch['bytes']:,} bytes, {scratch['counters']:,} counters")
            lines += [f"    {_text(buffer)}" for buffer in self.scratch.buffers]
        if self.floors is not None:
            gpu, nbytes, operations, source = self.floors
            lines.append(f"  floors on {gpu}: bytes {nbytes:,.1f} us, operations {operations:,.1f} us ({source})")
        if self.passed_over:
            lines.append("  passed over:")
            lines += [f"    {kernel}: {reason}" for kernel, reason in self.passed_over]
        if self.scores is not None:
            lines += [f"  {line}" for line in str(self.scores).splitlines()]
        return "\n".join(lines)


def explain(op: str, *args: object, target: Target | str | None = None, **kwargs: object) -> Explanation:
    """Which kernel a call takes and why, without the call.

    Args:
        op: a public function that has several kernels, such as "top_k_per_row".
        *args: its own; tensors may be real, of any device, or on the meta device, whose addresses count as aligned.
        target: a name such as "sm_90", a card such as "h100", or what ``target_of`` returns; None: where the tensors
            are, and of those on the meta device this machine's GPU, or an H200 where it has none.
        **kwargs: its own, ``impl`` among them.

    Returns:
        An Explanation, which prints.

    Raises:
        TypeError, ValueError: what the call raises for its arguments; an operator without a choice.
    """
    card = None
    if isinstance(target, str):
        card = roofline.CARDS.get(target)
        name = card.target if card else target
        if name not in TARGETS:
            raise ValueError(f"target: got {target!r}, allowed: {', '.join((*TARGETS, *roofline.CARDS))}")
        target = TARGETS[name]
    name, (*arguments, impl) = reach(op, *args, **kwargs)
    question = ask(name, arguments)
    device = next(value.device for value in arguments if isinstance(value, torch.Tensor))
    runs_on = device if target is None and device.type != "meta" else torch.device("cuda")
    impl = resolve_impl(impl, runs_on, tuple(kernel.name for kernel in question.kernels))
    target, gpu = _target(target, device)
    return _answer(op, question, impl, card or gpu, target)


def kernels_on(target: Target, op: str, *args: object, **kwargs: object) -> tuple[str, tuple[str, ...]]:
    """The operator that a public function calls, and of its kernels those that ``target`` has. args, kwargs: of any
    call."""
    name, (*arguments, _) = reach(op, *args, **kwargs)
    question = ask(name, arguments)
    return name, dispatch.on_target(question.kernels, question.problem, target)


class Question(NamedTuple):
    """What one operator chooses between, and by which function of its dispatch.py. problem: None where there is nothing
    to compute. scratch, facts, scores: see Explanation."""

    kernels: Sequence[Kernel]
    choose: Callable[..., Choice]
    problem: Any
    work: roofline.Work
    scratch: Callable[[Any, Target], Scratch] = lambda plan, target: plan.scratch
    facts: Callable[[Any], dict[str, object]] = lambda plan: {}
    scores: Question | None = None


class _Reached(Exception):
    """(operator, what it was given)"""


class _Asking(EagerDispatchMode):
    """Whatever operator of this package is reached does not run."""

    def __torch_dispatch__(self, func: OpOverload, types, args=(), kwargs=None):
        if func.namespace == "sparse_attn":
            raise _Reached(func.name().partition("::")[2], args)
        return func(*args, **(kwargs or {}))


def reach(op: str, *args: object, **kwargs: object) -> tuple[str, tuple]:
    """The operator that a call of a public function comes to, and all that it is given, ``impl`` last."""
    if not isinstance(op, str) or op not in FUNCTIONS:
        raise ValueError(f"op: got {op!r}, allowed: {', '.join(FUNCTIONS)}")
    try:
        with torch.no_grad(), _Asking():
            FUNCTIONS[op](*args, **kwargs)
    except _Reached as reached:
        return reached.args
    raise AssertionError(f"{op} reaches no operator")


def _target(target: Target | None, device: torch.device) -> tuple[Target, roofline.Gpu | None]:
    """What is asked about, and the GPU that its floors are of."""
    if target is None and device.type != "meta":
        gpu = roofline.gpu_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        return target_of(device), gpu
    if target is None:
        target = target_of(torch.device("cuda")) if torch.cuda.is_available() else H200
    return target, roofline.gpu_of(target.name)


def _answer(op: str, question: Question, impl: str, gpu: roofline.Gpu | None, target: Target) -> Explanation:
    if impl == REFERENCE:
        return Explanation(op, target, REFERENCE)
    if question.problem is None:
        return Explanation(op, target, NOTHING)
    forced = None if impl == "triton" else impl
    choice = question.choose(question.problem, target, forced)
    floors = gpu and roofline.floors(question.work, gpu)
    return Explanation(
        op, target, choice.kernel.name, choice.plan, floors, choice.passed_over,
        question.scratch(choice.plan, target), tuple(question.facts(choice.plan).items()),
        question.scores and _answer("scores", question.scores, "triton", gpu, target),
    )  # fmt: skip


def ask(name: str, arguments: Sequence[object]) -> Question:
    """What operator ``name`` chooses between for its arguments, ``impl`` left out."""
    names = [argument.name for argument in schema(OPERATORS[name].overload).arguments]
    return taking(QUESTIONS[name], names[:-1])(*arguments)


# --- what each operator asks, of those of its arguments that it names


def _sparse_attn_prefill(q, kv, indices, indptr, scale, d_v, batch_invariant) -> Question:
    problem = attention.prefill_problem(q, kv, indices, indptr, scale, d_v, batch_invariant)
    read = _bytes_named(indices, kv.shape[0], kv.shape[1] * kv.element_size())
    work = roofline.attention(q.shape, d_v, indices.numel(), read, q.element_size())
    return Question(attention.KERNELS, attention.choose, problem if q.numel() else None, work)


def _sparse_attn_decode(
    q, cache, indices, indptr, scale, layout, extra_cache, extra_indices, extra_indptr, extra_layout, batch_invariant
) -> Question:
    caches = cache, indices, indptr, layout, extra_cache, extra_indices, extra_indptr, extra_layout
    problem = attention.decode_problem(q, scale, batch_invariant, *caches)
    pairs = read = 0
    for some, named in ((cache, indices), (extra_cache, extra_indices)):
        if some is not None:
            pairs += named.numel()
            read += _bytes_named(named, some.shape[0] * some.shape[1], some.shape[2] * some.element_size())
    work = roofline.attention(q.shape, problem.d_v, pairs, read, q.element_size())
    return Question(attention.KERNELS, attention.choose, problem if q.numel() else None, work)


def _bytes_named(indices: torch.Tensor, slots: int, row_bytes: int) -> int:
    """Of keys, where no two rows name the same unless they must."""
    return min(indices.numel(), slots) * row_bytes


def _mqa_logits(q, k, k_scale, weights, kv_start, kv_end, flavour) -> Question:
    problem = scoring.prefill_problem(q, k, k_scale, weights, flavour)
    pairs = q.shape[0] * k.shape[0]
    work = roofline.scores(_query_shape(q, problem), pairs, _key_bytes(k, k_scale), _value_bytes(q, problem))
    return Question(scoring.PREFILL_KERNELS, scoring.choose_prefill, problem if pairs else None, work)


def _paged_mqa_logits(q, cache, weights, context_lens, block_table, max_context_len, layout) -> Question:
    problem = scoring.paged_problem(q, cache, max_context_len, layout)
    pairs = context_lens.numel() * max_context_len
    work = roofline.scores(
        _query_shape(q, problem), pairs, _cached_bytes(q, cache, max_context_len), _value_bytes(q, problem)
    )
    return Question(scoring.PAGED_KERNELS, scoring.choose_paged, problem if pairs else None, work)


def _query_shape(q: torch.Tensor, problem: Any) -> tuple[int, ...]:
    """Of its values, which MXFP4 packs."""
    return (*q.shape[:-1], problem.dim)


def _value_bytes(q: torch.Tensor, problem: Any) -> float:
    return q.element_size() * q.shape[-1] / problem.dim


def _key_bytes(k: torch.Tensor, k_scale: torch.Tensor | None) -> int:
    return k.nbytes + (0 if k_scale is None else k_scale.nbytes)


def _cached_bytes(q: torch.Tensor, cache: torch.Tensor, context: int) -> int:
    return q.shape[0] * context * cache.shape[2] * cache.element_size()


def _top_k_per_row(logits, row_starts, row_ends, k) -> Question:
    rows, width = logits.shape
    problem = selection.problem_of(logits, row_starts, row_ends, k) if rows * width else None
    return Question(
        selection.KERNELS,
        selection.choose,
        problem,
        roofline.selection(rows * width),
        facts=lambda plan: {"ctas": plan.ctas(rows), "aligned": is_aligned(logits)},
    )


def _index_topk_prefill(*arguments) -> Question:
    call = fused.Prefill(*arguments)
    scores = _mqa_logits(call.q, call.k, call.k_scale, call.weights, call.kv_start, call.kv_end, call.flavour)
    if scores.problem is None:
        return scores._replace(kernels=selection.KERNELS)
    problem = fused.prefill_problem(call)

    def scratch(plan: Any, target: Target) -> Scratch:
        scored = scoring.choose_prefill(problem.scoring, target).plan.scratch
        return fused.scratch_of(problem.step, problem.width, plan, scored)

    return _scored_and_selected(call, problem, scores, _key_bytes(call.k, call.k_scale), scratch)


def _index_topk_decode(*arguments, slots: bool = False) -> Question:
    call = fused.Decode(*arguments)
    q, weights, cache, context_lens, block_table, _, width, layout, _ = call
    scores = _paged_mqa_logits(q, cache, weights, context_lens, block_table, width, layout)
    if scores.problem is None:
        return scores._replace(kernels=selection.KERNELS)
    problem = fused.decode_problem(call)

    def scratch(plan: Any, target: Target) -> Scratch:
        packing = ragged.scratch(problem.rows, target) if slots else Scratch()
        return fused.scratch_of(problem.step, problem.width, plan, packing=packing)

    return _scored_and_selected(call, problem, scores, _cached_bytes(q, cache, width), scratch)


def _scored_and_selected(
    call: fused.Prefill | fused.Decode,
    problem: fused.Problem,
    scores: Question,
    read: int,
    scratch: Callable[[Any, Target], Scratch],
) -> Question:
    """read: bytes of keys."""
    q, scored = call.q, problem.scoring
    pairs, columns = problem.rows * problem.width, problem.rows * call.top_k
    return Question(
        selection.KERNELS,
        selection.choose,
        problem.selecting,
        roofline.selected_scores(_query_shape(q, scored), pairs, read, columns, _value_bytes(q, scored)),
        scratch,
        lambda plan: {"ctas": plan.ctas(problem.step), "rows_at_once": problem.step},
        scores._replace(problem=scored),
    )


def _grouped_linear(rows, ends, codes, scales, layout, batch_invariant, *, fp8: bool = False) -> Question:
    problem = problem_of(rows, ends, as_weight(codes, scales, layout), batch_invariant)
    n, groups, outputs, columns = problem[:4]
    read = (codes.nbytes + (0 if scales is None else scales.nbytes)) // groups * min(n, groups)
    return Question(
        products.FP8_KERNELS if fp8 else products.KERNELS,
        products.choose_fp8 if fp8 else products.choose,
        problem if n * outputs else None,
        roofline.product(n, columns, outputs, read, rows.element_size(), fp8),
        facts=lambda plan: {"ctas": plan.ctas(outputs)} if plan.tiles else {},  # torch does not say
    )


def _packed_experts(
    x, ids, gate_up, gate_up_scales, gate_up_layout, down, down_scales, down_layout, num_experts, activations,
    batch_invariant,
) -> Question:  # fmt: skip
    first, second = PackedWeight(gate_up, gate_up_scales, gate_up_layout), PackedWeight(down, down_scales, down_layout)
    problem = experts_problem(x, ids, first, second, num_experts, activations, batch_invariant)
    (tokens, hidden), experts, intermediate = x.shape, problem.gate_up.groups, problem.down.columns
    read = (weight_bytes(first) + weight_bytes(second)) // experts * min(problem.rows, experts)
    moved = 2 * x.element_size() * tokens * hidden + 8 * problem.rows
    return Question(
        products.EXPERTS_KERNELS,
        products.choose_experts,
        problem if problem.rows * hidden * intermediate else None,
        roofline.Work(moved + read, 6 * problem.rows * hidden * intermediate, activations == "fp8"),
    )


FUNCTIONS: dict[str, Callable] = {
    function.__name__: function
    for function in (
        sparse_attn_prefill, sparse_attn_decode, fp8_mqa_logits, bf16_mqa_logits, mxfp4_mqa_logits,
        fp8_paged_mqa_logits, bf16_paged_mqa_logits, mxfp4_paged_mqa_logits, top_k_per_row, index_topk_prefill,
        index_topk_decode, index_topk_decode_slots, grouped_linear, packed_experts,
    )
}  # fmt: skip
QUESTIONS: dict[str, Callable[..., Question]] = {
    "sparse_attn_prefill": _sparse_attn_prefill,
    "sparse_attn_decode": _sparse_attn_decode,
    "mqa_logits": _mqa_logits,
    "paged_mqa_logits": _paged_mqa_logits,
    "top_k_per_row": _top_k_per_row,
    "index_topk_prefill": _index_topk_prefill,
    "index_topk_decode": _index_topk_decode,
    "index_topk_decode_slots": functools.partial(_index_topk_decode, slots=True),
    "grouped_linear": _grouped_linear,
    "grouped_linear_fp8": functools.partial(_grouped_linear, fp8=True),
    "packed_experts": _packed_experts,
}


# --- as text


def _plain(value: Any) -> Any:
    """``value`` of what JSON has."""
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)):
        return {name: _plain(one) for name, one in zip(names, value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _text(value: Any) -> str:
    if isinstance(value, Buffer):
        return f"{value.name} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_text(one)}" for key, one in value.items()) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
