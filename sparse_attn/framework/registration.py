"""One way to define an operator: schema, fake, and real implementations: a reference, and a launcher that is imported
when it first runs.

Every schema ends with ``str impl``. The fake, the reference, the launcher and the rules of debug mode take the same
arguments without ``impl``. Where ``impl`` may name a kernel of the package's table (see dispatch.py), the launcher
takes that as ``kernel=``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparse_attn import workspace
from sparse_attn.framework import checks, debug, gradients, streams
from sparse_attn.framework.autocast import no_autocast
from sparse_attn.framework.dispatch import Kernel
from sparse_attn.framework.target import resolve_impl
from sparse_attn.framework.torch_private import schema

NAMESPACE = "sparse_attn"
SCALARS = {
    "int": checks.check_integer, "float": checks.check_number, "bool": checks.check_flag, "str": checks.check_text,
}  # fmt: skip


def define_op(
    name: str,
    signature: str,
    *,
    fake: Callable,
    reference: Callable,
    rules: Callable[..., None],
    launch: Callable[[], Callable],
    kernels: Sequence[Kernel] = (),
) -> Callable:
    """Define ``sparse_attn::name`` with ``signature`` (as in "(Tensor x, str impl) -> Tensor").

    rules: of debug mode. launch: imports the launcher and gives it. kernels: those that ``impl`` may name.

    The returned function calls the operator and ends gradients there; numbers, flags and strings of another type are a
    TypeError that names them. Its ``overload`` is the operator; the other attributes are what is given here.
    """
    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, signature, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    arguments = schema(overload).arguments
    names = [argument.name for argument in arguments]
    tensors = tuple(place for place, argument in enumerate(arguments) if "Tensor" in str(argument.type))
    launch = functools.cache(launch)  # every eager call asks
    named = tuple(kernel.name for kernel in kernels)
    real = _implementation(name, names, tensors, reference=reference, rules=rules, launch=launch, kernels=named)

    def no_gradient(*args):  # of whoever calls the operator by its own name
        return gradients.call(overload, qualified, args) if gradients.wanted(args, tensors) else real(*args)

    scalars = [
        (place, argument.name, SCALARS[str(argument.real_type)])  # a dtype's type is int, too
        for place, argument in enumerate(arguments)
        if str(argument.real_type) in SCALARS
    ]

    def call(*args):
        for place, name, check in scalars:
            check(name, args[place])
        return gradients.call(overload, qualified, args) if gradients.wanted(args, tensors) else overload(*args)

    torch.library.impl(qualified, ("cpu", "cuda"))(no_gradient)
    torch.library.register_fake(qualified)(lambda *args: fake(*args[:-1]))
    call.__name__, call.overload, call.kernels = name, overload, kernels
    call.reference, call.rules, call.launch = reference, rules, launch
    return call


def _too_large(
    error: Any, name: str, names: Sequence[str], tensors: Sequence[int], arguments: Sequence[Any]
) -> ValueError | None:
    """The error for sizes whose kernel takes more than the GPU has, which Triton finds before the launch; None for any
    other ``error``."""
    from triton import OutOfResources

    if not isinstance(error, OutOfResources):
        return None
    given = ", ".join(
        f"{names[place]} {list(arguments[place].shape)}" for place in tensors if arguments[place] is not None
    )
    needed = f"for which a kernel takes {error.required} of the GPU's {error.name}"
    return ValueError(f"{name}: got {given}, {needed}, allowed: {error.limit}")


def _implementation(
    name: str,
    names: Sequence[str],
    tensors: Sequence[int],
    *,
    reference: Callable,
    rules: Callable[..., None],
    launch: Callable[[], Callable],
    kernels: Sequence[str] = (),
) -> Callable:
    """The real implementation. It runs on the device of the tensors, whichever is current. It keeps its workspace until
    its last launch.

    names: of the arguments. tensors: places of those that are tensors or None. kernels: kernels that ``impl`` may name.
    """

    def run(device: torch.device, args: tuple):
        *arguments, impl = args
        impl = resolve_impl(impl, device, kernels)
        if debug.on():
            debug.look(name, rules, *arguments)
        if impl == "reference":
            return reference(*arguments)
        launcher = launch()
        with workspace.launching():
            try:
                return launcher(*arguments) if impl == "triton" else launcher(*arguments, kernel=impl)
            except Exception as error:
                if (refusal := _too_large(error, name, names, tensors, arguments)) is not None:
                    raise refusal from error
                raise

    @no_autocast
    def real(*args):
        home = None
        for place in tensors:
            if (value := args[place]) is None:
                continue
            if home is None:
                home, first = value.device, place
            elif value.device != home:
                found = f"{names[place]}: got device {value.device}"
                raise ValueError(f"{name}: {found}, allowed: {home} (that of {names[first]})")
        assert home is not None, "an operator without tensors"
        if streams.is_current(home):
            return run(home, args)
        with streams.entered(home):
            return run(home, args)

    return real
