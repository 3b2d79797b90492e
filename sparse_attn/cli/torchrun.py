"""Processes that run one model together, as torchrun starts them."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sparse_attn.cli.arguments import Group, positive
from sparse_attn.generation.processes import LostRankError, checked_tensor, make_mesh
from sparse_attn.mesh import ONE_RANK, Mesh, check_expert, planned_mesh

OPTIONS = {
    "tensor": "ranks that share heads, MLPs and the vocabulary (default: what the others leave)",
    "context": "ranks that share the paged caches (default: 1)",
    "data": "groups of ranks that serve prompts of their own (default: 1)",
    "expert": "ranks that share routed experts; over data ranks, too, if more than T x C (default: 1, T cuts each)",
}
TIMEOUT = datetime.timedelta(minutes=30)  # of a collective outside of a graph; a rank may compile before it
PATIENCE_S = 3.0  # before a rank says what another one or torchrun is expected to say
_LOST = re.compile(r"connection (closed|reset)|broken pipe|timed? ?out|remote process exited|peer", re.IGNORECASE)
T = TypeVar("T")


class StartError(ValueError):
    """The variables that torchrun sets are missing or wrong."""


def rank() -> int:
    """This process's number by torchrun; 0 without it. StartError where torchrun cannot have set what is set."""
    return _started()[0]


def world_size() -> int:
    """Processes by torchrun; 1 without it. StartError as of rank()."""
    return _started()[1]


def _started() -> tuple[int, int]:
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if not given:
        return 0, 1
    world = _variable("WORLD_SIZE", least=1, beside=given[0])
    return _variable("RANK", most=world - 1, beside="WORLD_SIZE"), world


def _variable(name: str, *, least: int = 0, most: int = 2**16, beside: str = "WORLD_SIZE") -> int:
    """An integer that torchrun sets whenever it sets ``beside``."""
    given = os.environ.get(name)
    if given is None:
        raise StartError(f"{name}: got none beside {beside}, allowed: what torchrun sets, which is both or neither")
    if not re.fullmatch("[0-9]{1,9}", given) or not least <= int(given) <= most:
        raise StartError(f"{name}: got {given!r}, allowed: an integer from {least} to {most}")
    return int(given)


def add(parser: Group) -> None:
    for name, told in OPTIONS.items():
        parser.add_argument(f"--{name}-parallel", type=positive, metavar=name[0].upper(), help=told)


def sizes_of(options: argparse.Namespace) -> dict[str, int | None]:
    """Sizes by dimension, of --tensor-parallel and the others; tensor None where it follows from the others."""
    given = {name: getattr(options, f"{name}_parallel") for name in OPTIONS}
    return {name: size if size is not None or name == "tensor" else 1 for name, size in given.items()}


def planned(options: argparse.Namespace) -> list[Mesh]:
    """The mesh of the first of --gpus processes; none where these are not given. ValueError where sizes do not fit."""
    sizes = sizes_of(options)
    if options.gpus is None:
        if given := [name for name, size in sizes.items() if size not in (None, 1)]:
            raise ValueError(f"--{given[0]}-parallel: got it without --gpus, allowed: with --gpus")
        return []
    context, data, expert = (sizes[name] or 1 for name in ("context", "data", "expert"))
    tensor = checked_tensor(sizes["tensor"], context, data, options.gpus)
    return [planned_mesh(tensor=tensor, context=context, data=data, expert=expert)]


@contextlib.contextmanager
def joined(options: argparse.Namespace) -> Iterator[Mesh]:
    """The mesh of this process, while it is one of a group; ONE_RANK where torchrun did not start it. On a GPU, that of
    its place on this host is current. RuntimeErrors of a lost rank become LostRankError."""
    world, sizes = world_size(), sizes_of(options)
    if world == 1:
        _check_alone(sizes, options.arguments)
        yield ONE_RANK
        return
    place, here = _variable("LOCAL_RANK", most=world - 1), world
    if "LOCAL_WORLD_SIZE" in os.environ:
        here = _variable("LOCAL_WORLD_SIZE", least=1, most=world)
    if not os.environ.get("MASTER_ADDR"):
        raise StartError(f"MASTER_ADDR: got {os.environ.get('MASTER_ADDR')!r}, allowed: a host, as torchrun sets it")
    _variable("MASTER_PORT", most=2**16 - 1)
    if here < world:
        raise ValueError(f"WORLD_SIZE: got {world}, {here} of them on this host, allowed: processes of one host")
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        if place >= torch.cuda.device_count():
            raise ValueError(
                f"--device: got {torch.cuda.device_count()} GPUs for process {place} of this host, allowed: one each"
            )
        torch.cuda.set_device(place)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT)
        yield make_mesh(**sizes, device="cuda" if on_gpu else "cpu")
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not _LOST.search(str(error)):
            raise
        raise LostRankError(f"rank {rank()}: another process ended or did not answer: {error}") from error
    finally:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


def _check_alone(sizes: dict[str, int | None], arguments: Sequence[str]) -> None:
    """ValueError that says how to start more processes where ``sizes`` are those of more than one."""
    named = [(name, size) for name, size in sizes.items() if size not in (None, 1)]
    if not named:
        return
    tensor, context, data, expert = sizes["tensor"], *(sizes[name] or 1 for name in ("context", "data", "expert"))
    if tensor is None:  # as many as the others need: with ``expert`` of them, experts always suit the grid
        tensor = next(t for t in range(1, expert + 1) if _suits(expert, t, context, data))
    check_expert(expert, tensor, context, data)
    (name, size), count = named[0], tensor * context * data
    raise ValueError(
        f"--{name}-parallel: got {size} in one process, allowed: 1, or {count} processes: "
        f"torchrun --nproc-per-node {count} -m sparse_attn {shlex.join(arguments)}"
    )


def _suits(expert: int, tensor: int, context: int, data: int) -> bool:
    with contextlib.suppress(ValueError):
        check_expert(expert, tensor, context, data)
        return True
    return False


def say_error(prog: str, error: Exception) -> None:
    """One line on stderr. Where every process meets the same error, or one dies, torchrun ends the others before they
    say so, too."""
    alone = isinstance(error, StartError) or world_size() == 1
    if not alone and (rank() or isinstance(error, LostRankError)):
        time.sleep(PATIENCE_S)
    print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


def of_first(compute: Callable[[], T]) -> T:
    """What ``compute`` gives on the first process, which alone calls it; what it raises is raised on all. Every process
    calls this."""
    found: list[Any] = [None, None]
    if not rank():
        try:
            found[0] = compute()
        except (ValueError, TypeError, ImportError, OSError) as error:
            found[1] = error
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
    if found[1] is not None:
        raise found[1]
    return found[0]


def barrier() -> None:
    """Wait for all processes of a group; at once where there is none."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
