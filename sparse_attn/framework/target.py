"""The only home of questions about the machine: vendor, architecture, fp8 flavour, shared memory, interpreter.

Nothing is asked at import; every answer is a pure function of a device or an environment variable read when called.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch

IMPLEMENTATIONS = ("auto", "reference", "triton")


@dataclass(frozen=True)
class Target:
    """What a launch configuration may depend on.

    Attributes:
        vendor: "nvidia", "amd" or "cpu".
        arch: compute capability as major * 10 + minor on NVIDIA (90), the gfx number on AMD ("gfx942"), "" elsewhere.
        num_sms: multiprocessors, or compute units.
        shared_memory: bytes one program may hold.
        warp_size: threads that execute together.
        interpreted: whether Triton's interpreter runs kernels.
    """

    vendor: str  # "nvidia", "amd", "cpu"
    arch: int | str
    num_sms: int
    shared_memory: int
    warp_size: int = 32
    interpreted: bool = False

    @property
    def name(self) -> str:
        """The architecture as compilers spell it."""
        return f"sm_{self.arch}" if self.vendor == "nvidia" else str(self.arch) or self.vendor

    @property
    def is_hopper(self) -> bool:
        return (self.vendor, self.arch) == ("nvidia", 90)

    @property
    def fp8_dot(self) -> bool:
        """Whether the matrix unit multiplies e4m3fn directly."""
        if self.interpreted:
            return False
        if self.vendor == "nvidia":
            return isinstance(self.arch, int) and self.arch >= 89
        return self.arch == "gfx950"

    @property
    def fp8_cast(self) -> bool:
        """Whether a cast of fp32 to e4m3fn rounds once. On sm_89 Triton casts to fp16 first."""
        return self.fp8_dot and self.vendor == "nvidia" and self.arch != 89

    @property
    def reads_shared_operands(self) -> bool:
        """Whether the matrix unit takes operands from shared memory (wgmma, tcgen05), not out of registers."""
        return self.vendor == "nvidia" and isinstance(self.arch, int) and 90 <= self.arch < 120

    @property
    def has_pdl(self) -> bool:
        """Whether a launch can start before the one in front of it ends, and wait for that itself."""
        return self.vendor == "nvidia" and isinstance(self.arch, int) and self.arch >= 90


CPU, INTERPRETED = Target("cpu", "", 1, 1 << 20), Target("cpu", "", 4, 1 << 20, interpreted=True)
YES = ("1", "true", "on", "yes")
H200 = Target("nvidia", 90, 132, 232448)
# Architectures that kernels are compiled for: multiprocessors of a common card, shared memory of a program, a warp.
TARGETS = {
    "sm_80": Target("nvidia", 80, 108, 166912),  # A100
    "sm_86": Target("nvidia", 86, 84, 101376),  # A40
    "sm_89": Target("nvidia", 89, 142, 101376),  # L40S
    "sm_90": H200,
    "sm_100": Target("nvidia", 100, 148, 232448),  # B200
    "sm_120": Target("nvidia", 120, 188, 101376),  # RTX PRO 6000
    "gfx942": Target("amd", "gfx942", 304, 65536, 64),  # MI300X
    "gfx950": Target("amd", "gfx950", 256, 163840, 64),  # MI355X
}


def interpreting() -> bool:
    """Whether Triton kernels of this process run through Triton's interpreter (TRITON_INTERPRET)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in YES


@functools.cache
def _of_cuda(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        shared = 163840 if arch == "gfx950" else 65536
        return Target("amd", arch, properties.multi_processor_count, shared, properties.warp_size)
    arch = properties.major * 10 + properties.minor
    return Target("nvidia", arch, properties.multi_processor_count, properties.shared_memory_per_block_optin)


def target_of(device: torch.device) -> Target:
    """The target behind a torch device.

    Args:
        device: a CUDA or HIP device, or a CPU.

    Returns:
        A Target.

    Raises:
        RuntimeError: torch's, for a GPU that is not there.
    """
    if device.type == "cuda":
        return _of_cuda(torch.cuda.current_device() if device.index is None else device.index)
    return INTERPRETED if os.environ.get("TRITON_INTERPRET", "0").lower() in YES else CPU


@functools.lru_cache(maxsize=1024)  # every eager call asks
def resolve_impl(impl: str, device: torch.device, kernels: tuple[str, ...] = ()) -> str:
    """Turn ``impl`` ("auto", "reference", "triton", or one of ``kernels``) into what runs on ``device``: "reference",
    "triton", or that kernel.

    Raises ValueError for an unknown name, and for all but "reference" on a CPU whose process does not interpret Triton.
    """
    if impl not in IMPLEMENTATIONS and impl not in kernels:
        raise ValueError(f"impl: got {impl!r}, allowed: {', '.join((*IMPLEMENTATIONS, *kernels))}")
    if impl == "auto":
        return "triton" if device.type == "cuda" else "reference"
    if impl != "reference" and device.type != "cuda" and not interpreting():
        raise ValueError(
            f"impl: {impl!r} needs a CUDA or HIP tensor, got one on {device}; on a CPU use 'reference', or start the "
            "process with TRITON_INTERPRET=1"
        )
    return impl
