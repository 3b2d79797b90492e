"""Compile a kernel ahead of time for a GPU this machine does not have, and read what the compiler says of it."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass


@dataclass(frozen=True)
class Compiled:
    """What is known of a kernel compiled ahead of time. shared_memory: Triton's and what inline PTX claims beside it.
    claimed: the latter alone. registers: of a thread (AMD: of a lane, accumulation registers among them). spill_bytes:
    of a thread's stack, where what does not fit in registers goes."""

    shared_memory: int
    claimed: int
    registers: int
    spill_bytes: int
    threads: int  # of a program
    warp_size: int
    tensor_memory: int  # columns, where the architecture has it
    assembly: dict

    @functools.cached_property
    def sass(self) -> str:
        """The instructions (NVIDIA)."""
        return _disassemble(self.assembly["cubin"])

    def count(self, instruction: str) -> int:
        """How often ``instruction`` (a regular expression) stands in the SASS."""
        return len(re.findall(instruction, self.sass))


def compile_kernel(
    kernel, signature: dict[str, str], constants: dict[str, object], *, arch: int | str = 90, aligned=(), **options
) -> Compiled:
    """Compile ``kernel`` for ``arch`` (90, "gfx942", ...).

    signature: run-time argument -> Triton type ("*bf16", "i32", "fp32"); constants: constexpr argument -> value
    (PDL, where nobody says: as launchers give it); aligned: scalar arguments known to be multiples of 16 (pointers
    always are);
    options: num_warps, num_stages.
    """
    from sparse_attn.device.triton_private import compile_for

    names = kernel.arg_names
    if "PDL" in names:
        constants = {"PDL": isinstance(arch, int) and arch >= 90} | constants
    missing = [name for name in names if name not in signature and name not in constants]
    if missing:
        raise ValueError(f"signature: lacks {', '.join(missing)}")
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    aligned = {
        name for name, kind in types.items() if kind.startswith("*") or name in aligned and name not in constants
    }
    return read(compile_for(kernel, arch, types, constants, aligned, options))


def read(program) -> Compiled:
    """What the compiler says of a compiled ``program`` of Triton's."""
    facts = _read_cubin if "cubin" in program.asm else _read_amdgcn
    columns = getattr(program.metadata, "tmem_size", None) or 0
    claimed, registers, spills, threads, lanes = facts(program.asm)
    shared = program.metadata.shared + claimed
    return Compiled(shared, claimed, registers, spills, threads, lanes, columns, dict(program.asm))


def _read_cubin(assembly) -> tuple[int, int, int, int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembly["cubin"])
        file.flush()
        usage = _nvidia_tool("cuobjdump", "-res-usage", file.name)
    registers, stack = _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage)
    # Declared arrays: from sm_90 on the tool also counts a KiB that the system takes, beside what a launch may ask for.
    claimed = sum(map(int, re.findall(r"\.shared\s[^;\[]*\[(\d+)\];", assembly["ptx"])))
    return claimed, registers, stack, _number(r"\.(?:reqntid|maxntid) (\d+)", assembly["ptx"]), 32


def _read_amdgcn(assembly) -> tuple[int, int, int, int, int]:
    def field(name: str) -> int:
        return _number(rf"\.{name}:\s+(\d+)", assembly["amdgcn"])

    registers, spills = field("vgpr_count"), field("private_segment_fixed_size")
    return 0, registers, spills, field("max_flat_workgroup_size"), field("wavefront_size")


def _number(pattern: str, text: str) -> int:
    """What the only group of ``pattern`` holds where it is found first."""
    found = re.search(pattern, text)
    assert found is not None, pattern
    return int(found[1])


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _nvidia_tool("nvdisasm", "-c", file.name)


def _nvidia_tool(tool: str, *arguments: str) -> str:
    import triton

    path = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", tool)
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout
