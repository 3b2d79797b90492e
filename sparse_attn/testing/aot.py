"""Compile a kernel ahead of time for a GPU this machine does not have, and read what the compiler says of it."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass


@dataclass(frozen=True)
class Compiled:
    """What ahead-of-time compilation tells. registers, spill_bytes and sass are known for NVIDIA targets only."""

    shared_memory: int
    registers: int | None
    spill_bytes: int | None
    sass: str
    assembly: dict

    def count(self, instruction: str) -> int:
        """How often ``instruction`` (a regular expression) stands in the SASS."""
        return len(re.findall(instruction, self.sass))


def compile_kernel(
    kernel, signature: dict[str, str], constants: dict[str, object], *, arch: int | str = 90, aligned=(), **options
) -> Compiled:
    """Compile ``kernel`` for ``arch`` (90, "gfx942", ...).

    signature: run-time argument -> Triton type ("*bf16", "i32", "fp32"); constants: constexpr argument -> value;
    aligned: scalar arguments known to be multiples of 16 (pointers always are); options: num_warps, num_stages.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    names = kernel.arg_names
    missing = [name for name in names if name not in signature and name not in constants]
    if missing:
        raise ValueError(f"signature: lacks {', '.join(missing)}")
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    attributes = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(names)
        if name not in constants and (signature[name].startswith("*") or name in aligned)
    }
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    if isinstance(arch, str):
        target = GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    else:
        target = GPUTarget("cuda", arch, 32)
    program = triton.compile(
        source(fn=kernel, signature=types, constexprs=values, attrs=attributes), target=target, options=options
    )
    registers = spills = None
    sass = ""
    if "cubin" in program.asm:
        registers, spills, sass = _read_cubin(program.asm["cubin"])
    return Compiled(program.metadata.shared, registers, spills, sass, program.asm)


def _read_cubin(cubin: bytes) -> tuple[int, int, str]:
    import triton

    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(os.path.join(tools, "cuobjdump"), "-res-usage", file.name)
        sass = _output(os.path.join(tools, "nvdisasm"), "-c", file.name)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return registers, stack, sass


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
