"""Reports: versions, the machine, Dynamo's counts, and the JSON of `generate`."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import platform

import torch

from sparse_attn import explanation, ops
from sparse_attn.cli.explain_calls import CALLS
from sparse_attn.framework.registration import OPERATORS
from sparse_attn.framework.target import Target, interpreting, resolve_impl, target_of
from sparse_attn.framework.torch_private import dynamo_counts
from sparse_attn.generation.generate import Generation
from sparse_attn.types import Logprobs
from sparse_attn.version import __version__


def versions() -> dict[str, str | None]:
    """Versions of this package and of what it needs; None for what is absent."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "sparse_attn": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def device_name(device: torch.device) -> str:
    """ "cpu", or the device with the GPU's name."""
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def generation_report(
    result: Generation, prompt_tokens: int, device: torch.device, *, since: tuple[int, int], **facts: object
) -> dict[str, object]:
    """The JSON of one generated continuation. tokens_per_s counts the tokens after the first over the time they took.
    accepted_per_step and drafter: where it speculated.

    since: dynamo_counts() before it.
    """
    compilations, breaks = (now - before for now, before in zip(dynamo_counts(), since))
    later = len(result.tokens[0]) - 1
    return {
        "prompt_tokens": prompt_tokens,
        "tokens": result.tokens[0],
        "timing": {
            "prefill_s": result.prefill_s,
            "setup_s": result.setup_s,
            "decode_s": result.decode_s,
            "tokens_per_s": later / result.decode_s if later > 0 else 0.0,
        },
        "rank_cache_bytes": result.cache_bytes,
        "collective_bytes_per_step": result.step_bytes,
        "graph_captures": result.graph_captures,
        "graph_replays": result.graph_replays,
        "compilations": compilations,
        "graph_breaks": breaks,
        **({"accepted_per_step": result.accepted_per_step, "drafter": result.drafter} if result.drafter else {}),
        "device": device_name(device),
        "versions": versions(),
        **facts,
    }


def logprobs_report(logprobs: Logprobs) -> list[dict[str, object]]:
    """The JSON of log-probabilities: by token its own, and [id, log-probability] of the most likely ones. Those of
    tokens that cannot be drawn are null."""
    finite = lambda value: value if math.isfinite(value) else None
    return [
        {"drawn": finite(drawn), "best": [[token, finite(value)] for token, value in zip(ids, values)]}
        for drawn, ids, values in zip(*(part.tolist() for part in logprobs))
    ]


def implementations(device: torch.device) -> list[tuple[str, str, str]]:
    """(package, operator, implementation that "auto" takes on ``device``) of every operator: "torch" where the package
    has no kernel, "triton" where it has one, else the kernels that "auto" chooses between."""
    chosen = kernels(target_of(device))
    rows = []
    for package in ops.packages():
        module = importlib.import_module(f"{ops.__name__}.{package}").__name__
        if not (names := sorted(name for name, value in OPERATORS.items() if value.__module__ == module)):
            rows.append((package, "-", "torch"))
        impl = resolve_impl("auto", device)
        for name in names:
            named = impl != "reference" and name in chosen
            rows.append((package, name, ", ".join(chosen[name]) if named else impl))
    return rows


def kernels(target: Target) -> dict[str, tuple[str, ...]]:
    """By operator, the kernels that ``target`` has, in the order in which they are asked; of one that scores and
    selects, those that select."""
    return dict(
        explanation.kernels_on(target, op, *args, **kwargs)
        for op, args, kwargs in (call.arguments(**call.defaults) for call in CALLS.values())
    )


def describe_target(target: Target) -> str:
    if target.vendor == "cpu":
        return "cpu, Triton through its interpreter" if interpreting() else "cpu"
    fp8 = "multiplies e4m3fn" if target.fp8_dot else "decodes fp8 to bf16"
    return f"{target.vendor} {target.name}, {target.num_sms} SMs, {target.shared_memory} bytes of shared memory, {fp8}"


def info(device: torch.device, *, short: bool = False) -> str:
    """The machine and, unless ``short``, which implementation each operator takes on ``device``, as text."""
    lines = [f"{name:<12} {version}" for name, version in versions().items() if version]
    lines += [f"{'device':<12} {device_name(device)}", f"{'target':<12} {describe_target(target_of(device))}"]
    if short:
        return "\n".join(lines)
    rows = implementations(device)
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines.append(f"\n{'package':<{widths[0]}}  {'operator':<{widths[1]}}  implementation")
    lines += [f"{package:<{widths[0]}}  {name:<{widths[1]}}  {impl}" for package, name, impl in rows]
    return "\n".join(lines)
