"""Which kernel an operator's call takes, how it is launched, what bounds it, and why the kernels before it do not run.

The public function checks the arguments, as in every call, and hands them to its operator. There they are looked at
instead of run: their shapes, strides, addresses and numbers make the same problem that the launcher makes of them, and
the operator's table answers. Nothing is launched, no value on the device is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sparse_attn import dispatch, roofline
from sparse_attn.dispatch import Choice, Kernel
from sparse_attn.ops import topk
from sparse_attn.ops.topk import dispatch as selection
from sparse_attn.target import CPU, H200, TARGETS, Target, resolve_impl, target_of
from sparse_attn.torch_private import EagerDispatchMode, OpOverload
from sparse_attn.workspace import Buffer, Scratch, size_of

REFERENCE, NOTHING = "reference", "none"


@dataclass(frozen=True)
class Explanation:
    """kernel: "reference" where PyTorch runs instead, "none" where there is nothing to compute. plan: the kernel's own,
    see the plan.py of its operator; None without a kernel. ctas: launched at once, where that is known. floors: None for
    a GPU that is not in roofline.GPUS; they count every list of keys full and every range whole. passed_over: (kernel,
    reason) of those that come before it in the table. scores: of an operator that scores and selects, how it scores.
    """

    op: str
    target: Target
    kernel: str
    plan: Any = None
    floors: roofline.Floors | None = None
    passed_over: tuple[tuple[str, str], ...] = ()
    ctas: int | None = None
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
        found = _plain(self.plan)
        if self.ctas is not None:
            found |= {"ctas": self.ctas, "waves": round(self.ctas / self.target.num_sms, 2)}
        scratch: Scratch = self.plan.scratch
        size = size_of(scratch)
        return found | {
            "scratch": {
                "buffers": [_plain(buffer) for buffer in scratch.buffers],
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
            lines += [f"    {_text(buffer)}" for buffer in self.plan.scratch.buffers]
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

    op: a public function that has several kernels, such as "top_k_per_row". args, kwargs: its own, ``impl`` among them;
    tensors may be real, of any device, or on the meta device, whose addresses count as aligned. target: a name such as
    "sm_90", or what ``target_of`` returns; None: where the tensors are, and of those on the meta device this machine's
    GPU, or an H200 where it has none.

    Raises what the call raises for its arguments, and ValueError for an operator without a choice.
    """
    if isinstance(target, str):
        if target not in TARGETS:
            raise ValueError(f"target: got {target!r}, allowed: {', '.join(TARGETS)}")
        target = TARGETS[target]
    asked = _reach(op, *args, **kwargs)
    *arguments, impl = asked.arguments
    device = next(value.device for value in arguments if isinstance(value, torch.Tensor))
    return _answer(op, QUESTIONS[asked.name](*arguments), impl, device, target)


def kernels_on(target: Target, op: str, *args: object, **kwargs: object) -> tuple[str, ...]:
    """Of the kernels of a public function, those that ``target`` has. args, kwargs: of any call."""
    asked = _reach(op, *args, **kwargs)
    question = QUESTIONS[asked.name](*asked.arguments[:-1])
    return dispatch.on_target(question.kernels, question.problem, target)


def slow_path(name: str, target: Target, *arguments: object) -> str | None:
    """Why no kernel of an architecture's own room takes a call of operator ``name`` on a target that has such: what each
    of them refuses. None where one of them runs, or could and would be slower."""
    if name not in QUESTIONS:
        return None
    question = QUESTIONS[name](*arguments)
    refusals = []
    for part in (question, question.scores) if question.scores else (question,):
        refusals += [] if part.problem is None else _refusals(part, target)
    return "; ".join(refusals) or None


def _refusals(question: Question, target: Target) -> list[str]:
    found = []
    for kernel in question.kernels:
        if kernel.name.partition(".")[0] not in dispatch.ROOMS:
            continue
        support = kernel.supports(question.problem, target)
        if support.able:
            return []
        if not dispatch.of_target(support):
            found.append(f"{kernel.name}: {support.reason}")
    return found


class Question(NamedTuple):
    """What one operator chooses between. problem: None where there is nothing to compute."""

    kernels: Sequence[Kernel]
    problem: Any
    work: roofline.Work
    ctas: Callable[[Any], int] | None = None
    scores: Question | None = None


class _Asked(Exception):
    """An operator was reached."""

    def __init__(self, name: str, arguments: Sequence[object]):
        super().__init__(name)
        self.name, self.arguments = name, arguments


class _Asking(EagerDispatchMode):
    """Whatever operator of this package is reached does not run."""

    def __torch_dispatch__(self, func: OpOverload, types, args=(), kwargs=None):
        if func.namespace == "sparse_attn":
            raise _Asked(func.name().partition("::")[2], args)
        return func(*args, **(kwargs or {}))


def _reach(op: str, *args: object, **kwargs: object) -> _Asked:
    """The operator that a call of a public function comes to, and what that is given."""
    if not isinstance(op, str) or op not in FUNCTIONS:
        raise ValueError(f"op: got {op!r}, allowed: {', '.join(FUNCTIONS)}")
    try:
        with torch.no_grad(), _Asking():
            FUNCTIONS[op](*args, **kwargs)
    except _Asked as asked:
        return asked
    raise AssertionError(f"{op} reaches no operator")


def _answer(op: str, question: Question, impl: str, device: torch.device, target: Target | None) -> Explanation:
    names = [kernel.name for kernel in question.kernels]
    if target is None and device.type != "meta":
        impl = resolve_impl(impl, device, names)
        target, gpu = target_of(device), _gpu(device)
    else:
        resolve_impl(impl, torch.device("cuda"), names)  # the name alone
        target = target or _target_here()
        gpu = roofline.gpu_of(target.name)
    if impl == REFERENCE:
        return Explanation(op, target, REFERENCE)
    if question.problem is None:
        return Explanation(op, target, NOTHING)
    forced = None if impl in ("auto", "triton") else impl
    choice: Choice = dispatch.choose(question.kernels, question.problem, target, forced)
    floors = gpu and roofline.floors(question.work, gpu)
    ctas = question.ctas and question.ctas(choice.plan)
    scores = question.scores and _answer("scores", question.scores, "auto", torch.device("meta"), target)
    return Explanation(op, target, choice.kernel.name, choice.plan, floors, choice.passed_over, ctas, scores)


def _target_here() -> Target:
    here = target_of(torch.device("cuda")) if torch.cuda.is_available() else CPU
    return H200 if here == CPU else here


def _gpu(device: torch.device) -> roofline.Gpu | None:
    return roofline.gpu_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


# --- what each operator asks, of its own arguments


def _top_k_per_row(logits, row_starts, row_ends, k) -> Question:
    rows, width = logits.shape
    problem = selection.problem_of(logits, row_starts, row_ends, k) if rows * width else None
    return Question(selection.KERNELS, problem, roofline.selection(rows * width), lambda plan: plan.ctas(rows))


FUNCTIONS: dict[str, Callable] = {"top_k_per_row": topk.top_k_per_row}
QUESTIONS: dict[str, Callable[..., Question]] = {"top_k_per_row": _top_k_per_row}


# --- as text


def _plain(value: Any) -> Any:
    """``value`` of what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(one) for name, one in value._asdict().items()}
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
