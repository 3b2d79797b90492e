"""Which kernel runs a call: one table an operator, asked in order; the first kernel that supports the problem runs.

An operator package has a ``dispatch.py`` with ``KERNELS``, a tuple of ``Kernel``, and a ``Problem``: the facts of a
call that the choice and the launch depend on, none of them a tensor. Both functions of a kernel are pure, so what runs
is known without a GPU, and scratch is the sum of what plans ask for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from sparse_attn.framework.target import Target

Problem = TypeVar("Problem")
Plan = TypeVar("Plan")


class Support(NamedTuple):
    """Whether a kernel is taken for a problem, and if not, why, in the words of an error: "k: got 7000, allowed: at
    most 6553".

    able: whether it would run the problem all the same; then another kernel is faster. of_target: whether the reason is
    the target. A kernel asks for it first, so nothing else is known then.
    """

    ok: bool
    reason: str = ""
    able: bool = True
    of_target: bool = False


YES = Support(True)


def no(reason: str) -> Support:
    """The kernel cannot run the problem."""
    return Support(False, reason, False)


def slower(reason: str) -> Support:
    """The kernel can run the problem, but a later one of the table is faster there; ``choose`` takes it only if forced
    to."""
    return Support(False, reason, True)


def not_on(target: Target, allowed: str) -> Support:
    """The kernel cannot run on ``target``."""
    return no(f"target: got {target.name}, allowed: {allowed}")._replace(of_target=True)


@dataclass(frozen=True, eq=False)
class Kernel(Generic[Problem, Plan]):
    """One way to run an operator.

    name: what ``impl`` takes to force it, such as "hopper.decode_fp8". plan: how it is launched, a frozen dataclass
    with its ``scratch``; called only where ``supports`` answers that it is able. launch: imports the launcher and gives
    it, as in ``lambda: launchers().decode_fp8``; called when the kernel is taken.
    """

    name: str
    supports: Callable[[Problem, Target], Support]
    plan: Callable[[Problem, Target], Plan]
    launch: Callable[[], Callable[..., Any]]

    @property
    def folder(self) -> str | None:
        """Where the launcher of a kernel lies that is made for one architecture, as its name begins; None of others.
        Importing it tells."""
        folder, dot, _ = self.name.partition(".")
        return folder if dot and f".{folder}." in self.launcher.__module__ else None

    @functools.cached_property  # every eager call asks
    def launcher(self) -> Callable[..., Any]:
        return self.launch()


class Choice(NamedTuple, Generic[Plan]):
    """refusals: of the kernels that come before the chosen one in the table."""

    kernel: Kernel
    plan: Plan
    refusals: tuple[tuple[Kernel, Support], ...] = ()

    @property
    def passed_over(self) -> tuple[tuple[str, str], ...]:
        """(name, reason) of the kernels that come before the chosen one."""
        return tuple((kernel.name, support.reason) for kernel, support in self.refusals)

    @property
    def slow_path(self) -> tuple[str, ...]:
        """What each kernel refuses that is made for the target's architecture. Nothing where there is no such kernel,
        and where one runs, or could and would be slower."""
        refusals = [(kernel, support) for kernel, support in self.refusals if not support.of_target and kernel.folder]
        if self.kernel.folder or any(support.able for _, support in refusals):
            return ()
        return tuple(f"{kernel.name}: {support.reason}" for kernel, support in refusals)


def choose(
    kernels: Sequence[Kernel[Problem, Plan]], problem: Problem, target: Target, forced: str | Choice[Plan] | None = None
) -> Choice[Plan]:
    """The kernel that runs ``problem`` on ``target``, and how.

    forced: a kernel's name, which is taken wherever it is able; ValueError where it is not. Or a choice made
    beforehand, which stands: tests run every kernel with small shapes.
    """
    if isinstance(forced, Choice):
        return forced
    if forced is not None:
        return _forced(kernels, problem, target, forced)
    refusals = []
    for kernel in kernels:
        support = kernel.supports(problem, target)
        if support.ok:
            return Choice(kernel, kernel.plan(problem, target), tuple(refusals))
        refusals.append((kernel, support))
    raise ValueError("; ".join(f"{kernel.name}: {support.reason}" for kernel, support in refusals))


def _forced(kernels: Sequence[Kernel[Problem, Plan]], problem: Problem, target: Target, name: str) -> Choice:
    kernel = find(kernels, name)
    support = kernel.supports(problem, target)
    if not (support.ok or support.able):
        raise ValueError(f"{support.reason} (impl={name!r})")
    return Choice(kernel, kernel.plan(problem, target))


def on_target(kernels: Sequence[Kernel[Problem, Plan]], problem: Problem, target: Target) -> tuple[str, ...]:
    """The kernels that do not refuse ``target``, whatever the problem: any one tells."""
    return tuple(kernel.name for kernel in kernels if not kernel.supports(problem, target).of_target)


def find(kernels: Sequence[Kernel], name: str) -> Kernel:
    """The kernel called ``name``."""
    for kernel in kernels:
        if kernel.name == name:
            return kernel
    raise ValueError(f"impl: got {name!r}, allowed: {', '.join(kernel.name for kernel in kernels)}")
