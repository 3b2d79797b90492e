"""What Triton offers under private names alone, or in what compiles and launches; each tried with every version the
README names."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def aggregate(cls):
    """Class decorator: a named tuple of values that a kernel carries, made from its fields in their order or by name.

    A field is declared with its type: ``gl.tensor``, ``gl.shared_memory_descriptor``, ``gl.tuple``, another
    aggregate, or ``gl.constexpr``, which plain numbers become. Triton 3.8 has a public gluon.aggregate, and makes
    the constructor; before that the name is private and there is none."""
    from triton.language import core

    fields = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in cls.__annotations__]
    signature = inspect.Signature(fields)

    def __init__(self, *values, **named):
        for name, value in signature.bind(*values, **named).arguments.items():
            setattr(self, name, value if isinstance(value, core.base_value) else core.constexpr(value))

    __init__.__triton_builtin__ = True  # what a kernel's cache key leaves out
    cls.__init__ = __init__
    return core._aggregate(cls)


VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# What comes out of inline assembly with effects is not computed anew in the layout that a load wants.
ASSEMBLY_HOLDS_LAYOUTS = tl.constexpr(VERSION >= (3, 9))
REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # triton 3.9


@gluon.jit
def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Shared memory as another type, shape and layout."""
    if REINTERPRET_IS_PUBLIC:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


def compile_for(
    kernel, arch: int | str, types: dict[str, str], constants: dict[str, object], aligned: set[str], options: dict
):
    """``kernel`` compiled for an architecture (gpu_target). types: of the arguments by name, "constexpr" of
    ``constants``;
    aligned: names of those that are multiples of 16."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    place = kernel.arg_names.index
    program = source(
        fn=kernel,
        signature=types,
        constexprs={(place(name),): value for name, value in constants.items()},
        attrs={(place(name),): [["tt.divisibility", 16]] for name in kernel.arg_names if name in aligned},
    )
    return triton.compile(program, target=gpu_target(arch), options=options)


def gpu_target(arch: int | str):
    """Triton's name for an architecture: 90, "gfx942", ..."""
    from triton.backends.compiler import GPUTarget

    if isinstance(arch, str):
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    return GPUTarget("cuda", arch, 32)


@contextlib.contextmanager
def launching_on(arch: int | str) -> Iterator[None]:
    """Triton takes this for the current GPU's architecture; what it would launch cannot run."""
    from triton.runtime.driver import driver

    before = driver._active  # its property looks for a GPU
    driver.set_active(_Driver(arch))
    try:
        yield
    finally:
        driver.set_active(before)


class _Driver:
    """What Triton asks a driver before it launches."""

    def __init__(self, arch: int | str):
        self.arch = arch
        self.device = object()  # Triton keeps kernels by device, and would launch one that it has compiled before

    def get_current_target(self):
        return gpu_target(self.arch)

    def get_current_device(self) -> object:
        return self.device

    def get_current_stream(self, device) -> int:
        return 0


def mend_interpreter() -> None:
    """In the interpreter, what comparing integers gives is bool and is called an integer. Broadcast, it becomes one,
    and Triton 3.9 refuses it as a mask. A scalar is an array of one element, which Triton 3.6 takes for an integer and
    numpy 2.4 does not."""
    import numpy as np
    from triton.runtime import interpreter

    binary_op = interpreter.InterpreterBuilder.binary_op
    patch = interpreter._patch_lang_tensor

    def with_its_type(self, lhs, rhs, op):
        result = binary_op(self, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            result.dtype = tl.int1
        return result

    def with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter.InterpreterBuilder.binary_op = with_its_type
    if VERSION < (3, 7):
        interpreter._patch_lang_tensor = with_index
