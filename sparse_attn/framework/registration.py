"""One way to define an operator: schema, fake, and real implementations: a reference, and a launcher that is imported
when it first runs. ``OPERATORS`` is the table of all that are defined.

Every schema ends with ``str impl``. The launcher takes the same arguments without ``impl``; the fake, the reference and
the rules of debug mode take those of them that they name. Where ``impl`` may name a kernel of the package's table (see
dispatch.py), the launcher takes that as ``kernel=``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparse_attn import workspace
from sparse_attn.framework import checks, debug, gradients, streams
from sparse_attn.framework.dispatch import Kernel
from sparse_attn.framework.target import resolve_impl
from sparse_attn.framework.torch_private import OpOverload, schema

NAMESPACE = "sparse_attn"
SCALARS = {
    "int": (int, checks.check_integer), "float": (float, checks.check_number), "bool": (bool, checks.check_flag),
    "str": (str, checks.check_text),
}  # fmt: skip
OPERATORS: dict[str, Callable] = {}


def define_op(
    name: str,
    signature: str,
    *,
    fake: Callable,
    reference: Callable,
    rules: Callable[..., None],
    launch: Callable[[], Callable],
    kernels: Sequence[Kernel] = (),
    gradient: tuple[Callable, Callable] | None = None,
) -> Callable:
    """Define ``sparse_attn::name`` with ``signature`` (as in "(Tensor x, str impl) -> Tensor").

    rules: of debug mode. launch: imports the launcher and gives it. kernels: those that ``impl`` may name. gradient:
    what keeps a call's tensors and what makes the gradients of its arguments, as torch.library.register_autograd takes
    them.

    The returned function calls the operator, and ends gradients there if it has none; numbers, flags and strings of
    another type are a TypeError that names them. Its ``overload`` is the operator, its ``__module__`` the package of
    ``fake``; the other attributes are what is given here.
    """
    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, signature, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    arguments = schema(overload).arguments
    names = [argument.name for argument in arguments]
    tensors = tuple(place for place, argument in enumerate(arguments) if "Tensor" in str(argument.type))
    launch = functools.cache(launch)  # every eager call asks
    named = tuple(kernel.name for kernel in kernels)
    referred, ruled = (taking(function, names[:-1]) for function in (reference, rules))
    real = _implementation(
        name, names, tensors, reference=referred, rules=ruled, launch=launch, kernels=named,
        end=None if gradient else (overload, qualified),
    )  # fmt: skip
    scalars = [
        (place, argument.name, *SCALARS[str(argument.real_type)])  # a dtype's type is int, too
        for place, argument in enumerate(arguments)
        if str(argument.real_type) in SCALARS
    ]

    def call(*args):
        for place, name, kind, check in scalars:
            if type(args[place]) is not kind:
                check(name, args[place])
        ends = gradient is None and followed(args, tensors)
        return gradients.call(overload, qualified, args) if ends else overload(*args)

    torch.library.impl(qualified, ("cpu", "cuda"))(real)
    faked = taking(fake, names[:-1])
    torch.library.register_fake(qualified)(lambda *args: faked(*args[:-1]))
    if gradient is not None:
        torch.library.register_autograd(qualified, gradient[1], setup_context=gradient[0])
    call.__name__, call.__module__ = name, fake.__module__.rpartition(".")[0]
    call.overload, call.kernels, call.gradient = overload, kernels, gradient
    call.fake, call.reference, call.rules, call.launch = faked, referred, ruled, launch
    OPERATORS[name] = call
    return call


def followed(args: Sequence[Any], tensors: Sequence[int]) -> bool:
    """Whether autograd would follow what is computed from ``args``: tensors or None at the places ``tensors``."""
    if torch.is_grad_enabled():
        for place in tensors:
            if args[place] is not None and args[place].requires_grad:
                return True
    return False


def taking(function: Callable, names: Sequence[str]) -> Callable:
    """``function``, which takes some of the arguments ``names`` by their names, as one that takes all of them."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return function
    wanted = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    if unknown := set(wanted) - set(names):
        raise TypeError(f"{function.__module__}.{function.__name__}: takes {unknown}, allowed: {', '.join(names)}")
    if wanted == list(names):
        return function
    places = [names.index(name) for name in wanted]
    return functools.wraps(function)(lambda *args: function(*[args[place] for place in places]))


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
    end: tuple[OpOverload, str] | None = None,
) -> Callable:
    """The real implementation. It runs on the device of the tensors, whichever is current, and without autocast. It
    keeps its workspace until its last launch.

    names: of the arguments. tensors: places of those that are tensors or None. kernels: kernels that ``impl`` may name.
    end: the operator at which gradients end, for whoever calls it by its own name.
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

    def real(*args):
        if end is not None and followed(args, tensors):
            return gradients.call(*end, args)
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
        autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        if not autocast and (home.type == "cpu" or streams.is_current(home)):  # a CPU is asked nothing more
            return run(home, args)
        with streams.entered(home), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return run(home, args)

    return real
