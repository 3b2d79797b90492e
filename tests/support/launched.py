"""What runs on the device by the profiler, and what is compiled for one ahead of time."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from sparse_attn.testing.aot import Compiled
from sparse_attn.testing.launches import compile_launch, recording


def launched(work) -> list[str]:
    """Names of what ran on the device, kernels and copies, in order."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    events = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def compiled_case(name: str, **options) -> list[Compiled]:
    """What a case of scripts/aot_cases, "operator: name", launches on sm_90. options: of the launcher, such as kernel."""
    from aot_cases import all_cases

    (case,) = (one for one in all_cases() if f"{one.op}: {one.name}" == name)
    with recording("sm_90") as launches:
        case.launcher(*case.arguments, **options)
    return [compile_launch(launch) for launch in launches]
