"""What the profiler sees on the device."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile


def launched(work) -> list[str]:
    """Names of what ran on the device, kernels and copies, in order."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    events = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]
