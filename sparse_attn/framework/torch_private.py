"""What torch offers under private names alone, each tried with every version the README names."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = (
    "EagerDispatchMode", "OpOverload", "TorchDispatchMode", "all_gather", "all_reduce", "all_to_all",
    "assert_on_device", "copy_all", "counters", "current_stream", "dispatch_modes", "dynamo_counts", "dynamo_hooks",
    "exported", "exported_as", "fake_mode", "fake_processes", "has_forward_hooks", "is_view", "leaves", "map_leaves",
    "mark_sizes", "mark_static_address",
    "no_torch_function", "occupy", "operators", "parameters", "recompile_limit", "run_what_does_not_compile", "schema",
    "storage_key", "stream_handle", "triton_hooks",
)  # fmt: skip

leaves, map_leaves = _pytree.tree_iter, _pytree.tree_map
dispatch_modes = torch._C._len_torch_dispatch_stack  # how many TorchDispatchModes see every operator: tracers are such
no_torch_function = torch._C._disabled_torch_function_impl  # __torch_function__ of a subclass whose results are tensors
Named = TypeVar("Named", bound=tuple)
_streams: dict[tuple[int | None, int], torch.cuda.Stream] = {}  # by device and handle


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode that Dynamo never sees, and so does not take the seconds to import it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def mark_sizes(tensor: torch.Tensor, dynamic: Iterable[int] = (), static: Iterable[int] = ()) -> torch.Tensor:
    """``tensor``, its ``dynamic`` dimensions symbols of their own for Dynamo and its ``static`` ones constants.

    Says what torch._dynamo.maybe_mark_dynamic and mark_static say, without the seconds it takes to import torch._dynamo
    where nothing is ever compiled. A view or a copy of the tensor carries no marks.
    """
    if not torch.compiler.is_compiling():
        if tensor._base is not None:  # Dynamo looks at what a view is a view of, too
            mark_sizes(tensor._base, dynamic=range(tensor._base.dim()))
        marks: Any = tensor
        marks._dynamo_weak_dynamic_indices = set(dynamic)
        marks._dynamo_static_indices = set(static)
        marks._has_dynamo_dim_marking = True
    return tensor


def exported(kind: type[Named]) -> type[Named]:
    """Let torch.export save and load programs that take or return this NamedTuple, under its own name."""
    return exported_as(kind.__module__)(kind)


def exported_as(module: str) -> Callable[[type[Named]], type[Named]]:
    """As ``exported``, under the name of the ``module`` where it lay when programs were first saved with it."""

    def register(kind: type[Named]) -> type[Named]:
        name = f"{module}.{kind.__qualname__}"
        torch.serialization.add_safe_globals([kind, (kind, name)])
        _pytree._register_namedtuple(kind, serialized_type_name=name)
        return kind

    return register


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each of ``sources`` into the tensor of ``targets`` in its place, of the same shape and dtype: within a GPU
    in a few launches for all, from the host to a GPU by a copy each, in the order of its current stream. The host does
    not wait where sources are pinned."""
    functions: Any = torch
    functions._foreach_copy_(targets, sources, non_blocking=True)


def stream_handle(device: torch.device) -> int:
    """The handle of the current stream of a tensor's device."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """torch.cuda.current_stream of a tensor's device, the same object for the same stream; four calls less."""
    place = device.index, stream_handle(device)
    if (stream := _streams.get(place)) is None:
        stream = _streams[place] = torch.cuda.current_stream(device)
    return stream


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Stop the device where a tensor of one bool is False. The host does not wait. Compiles, and can be captured."""
    torch.ops.aten._assert_async.msg(condition, message)


def mark_static_address(tensor: torch.Tensor) -> None:
    """Where ``tensor`` lies is a constant to Dynamo, as CUDA graphs in compiled code need it."""
    import torch._dynamo

    torch._dynamo.mark_static_address(tensor)


def counters() -> dict[str, Counter]:
    """What Dynamo and Inductor have counted in this process, by kind; a live view."""
    from torch._dynamo import utils

    return utils.counters


def dynamo_counts() -> tuple[int, int]:
    """(graphs compiled, graph breaks) of this process so far; both 0 where Dynamo was never loaded."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0, 0
    return counters()["stats"]["unique_graphs"], sum(counters()["graph_break"].values())


@contextmanager
def dynamo_hooks(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """Inside, Dynamo calls ``begin`` and ``end`` around what it compiles."""
    from torch._dynamo.callback import callback_handler

    handler: Any = callback_handler
    hooks = [(handler.start_callbacks, lambda *_: begin()), (handler.end_callbacks, lambda *_: end())]
    for callbacks, hook in hooks:
        callbacks.append(hook)
    try:
        yield
    finally:
        for callbacks, hook in hooks:
            with suppress(ValueError):  # torch.compiler.reset removes all
                callbacks.remove(hook)


@contextmanager
def triton_hooks(begin: Callable[[str], object], end: Callable[[], object]) -> Iterator[None]:
    """Inside, Triton calls ``begin`` with a kernel's name before it compiles it or reads it from its cache, and ``end``
    behind that. Hooks that are there already are called as before."""
    from triton import knobs

    before, behind = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook

    def started(**kwargs: Any) -> bool | None:
        if handled := before(**kwargs) if before else None:
            return handled
        begin(kwargs["fn"].name)
        return None

    def ended(**kwargs: Any) -> bool | None:
        end()
        return behind(**kwargs) if behind else None

    knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = started, ended
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = before, behind


def recompile_limit() -> int:
    """Compilations of one code object behind which Dynamo gives up on it."""
    from torch._dynamo import config

    return config.recompile_limit


def run_what_does_not_compile() -> None:
    """From now on in this process, what torch.compile fails on runs as it is."""
    from torch._dynamo import config

    config.suppress_errors = True


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd takes ``tensor`` for a view of another."""
    return tensor._is_view()


def storage_key(tensor: torch.Tensor) -> int:
    """The same of tensors that share memory, fake ones too."""
    return tensor.untyped_storage()._cdata


def parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of ``module`` itself by name, a live view."""
    held: Any = module._parameters  # of which torch says that they may be None
    return held


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of ``module`` calls hooks of its own before or after its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def uncompiled(step: object) -> object:
    """The module that torch.compile was given, of what it made of it; anything else as it is."""
    return getattr(step, "_orig_mod", step)


def schema(overload: OpOverload):
    """The schema of an operator: its name, arguments and returns."""
    return overload._schema


def operators(namespace: str) -> Iterator[str]:
    """The names of a namespace's operators."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(f"{namespace}::"):
            yield name.removeprefix(f"{namespace}::")


def fake_mode() -> AbstractContextManager:
    """Tensors made inside have a shape and no memory, and operators run their fakes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


@contextmanager
def fake_processes(rank: int, size: int) -> Iterator[None]:
    """Inside, this process is torch.distributed's ``rank`` of ``size``, of which no other runs: collectives give back
    what it sends."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives  # noqa: F401
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
            for key in ("CPU", "CUDA"):  # torch's own leaves its output as it was allocated before 2.14
                library.impl("all_to_all_single", lambda sent, *_: sent.clone(), key)
            yield
    finally:
        dist.destroy_process_group()


def occupy(cycles: int) -> None:
    """Keep the current stream of the GPU busy for so many clock cycles."""
    torch.cuda._sleep(cycles)


def all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over the processes of ``group`` (its name), as a fresh tensor; torch.compile traces it."""
    import torch.distributed._functional_collectives  # noqa: F401 (defines the operators)

    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_reduce(tensor.contiguous(), "sum", group))


def all_gather(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """The tensors of all ``size`` processes of ``group`` (its name), one after the other along the first dimension."""
    import torch.distributed._functional_collectives  # noqa: F401

    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_gather_into_tensor(tensor.contiguous(), size, group))


def all_to_all(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Exchange parts: tensor[n] of ``tensor`` [size, ...] goes to process n of ``group`` (its name), whose part for
    this process is the result's [n]."""
    import torch.distributed._functional_collectives  # noqa: F401

    collectives, parts = torch.ops._c10d_functional, [1] * size
    return collectives.wait_tensor(collectives.all_to_all_single(tensor.contiguous(), parts, parts, group))
