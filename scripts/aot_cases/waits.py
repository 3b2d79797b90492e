"""Whether a kernel whose launch may start early waits for what was launched before it, wherever it reads."""

from __future__ import annotations

import re
from collections.abc import Collection

WAITS = "griddepcontrol.wait"
HANDS_OUT = "barrier.sync 1;"  # at which warps that specialise are told what to run
# What comes to the L2 alone gives the launch nothing, whenever it is asked for.
GLOBAL = re.compile(r"(?!cp\.async\.bulk\.prefetch\.L2)(?:ld|st|atom|red|cp|prefetch)\.\S*global")
INSTRUCTION = re.compile(r"(@\S+ )?(.*)")
TARGET = re.compile(r"\$\w+")
REGISTER = re.compile(r"%\w+")
POINTER = re.compile(
    r"\.param (?:\.u64 \.ptr \.global .*_param_(\d+)|\.align 64 \.b8 \w+_param_(\d+)\[128\]),?$"
)  # or TMA descriptor
ARGUMENT = re.compile(r"(?:ld\.param\S+ (%\w+), \[\w+_param_(\d+)\]|mov\.b64 (%\w+), \w+_param_(\d+));")
LOAD = re.compile(r"ld\.global\S* [^\[]*\[([^\]]*)\]|cp\.async\.bulk\.tensor\.\dd\.shared\S* \[[^\]]*\], \[(%\w+),")
ENTRY = re.compile(r"tt\.func public @\w+\((.*)\) attributes")


def reaches_memory_early(ptx: str, early: Collection[int] = ()) -> str:
    """An instruction that reaches global memory on a path without a wait; empty where there is none. Of warps that
    specialise each has to wait, unless those that tell them what to run have done so before. early: arguments from
    whose memory loads need not wait."""
    program = _Program(ptx)
    begun = program.reached({WAITS, HANDS_OUT})
    stops = {WAITS, HANDS_OUT} if any(WAITS in line for line in begun) else {WAITS}
    reaching = (line for line in program.reached(stops) if GLOBAL.match(INSTRUCTION.match(line)[2]))
    return next((line for line in reaching if not program.loads_from(line, early)), "")


def arguments(ttir: str) -> list[str]:
    """The kernel's, without constants, as its PTX counts them."""
    return re.findall(r"%([\w.]+): ", ENTRY.search(ttir)[1])


class _Program:
    """Lines of PTX, and where each goes."""

    def __init__(self, ptx: str):
        code = (" ".join(line.split("//")[0].split()) for line in ptx.splitlines())
        self.lines = [line for line in code if line]
        self.labels = {line.split(":")[0]: at for at, line in enumerate(self.lines) if re.match(r"[\w$]+:", line)}

    def reached(self, stops: set[str]) -> list[str]:
        """The lines on paths from the first one that do not lead past any of ``stops``, these included."""
        seen, ahead = set(), [0]
        while ahead:
            at = ahead.pop()
            if at in seen or at >= len(self.lines):
                continue
            seen.add(at)
            if not any(stop in self.lines[at] for stop in stops):
                ahead += self._next(at)
        return [self.lines[at] for at in sorted(seen)]

    def loads_from(self, line: str, allowed: Collection[int]) -> bool:
        """Whether ``line`` is a load whose address comes of ``allowed`` pointers among the arguments, and no others."""
        instruction = INSTRUCTION.match(line)[2]
        load = LOAD.match(instruction)
        if not allowed or not load:
            return False
        pointers = {int(found[1] or found[2]) for line in self.lines if (found := POINTER.match(line))}
        found_all = (ARGUMENT.match(line) for line in self.lines)
        given = {found[1] or found[3]: int(found[2] or found[4]) for found in found_all if found}
        made: dict[str, set[str]] = {}
        for other in self.lines:
            registers = REGISTER.findall(INSTRUCTION.match(other)[2])
            if registers and not other.startswith(("st.", "ld.param")) and "ld.global" not in other:
                made.setdefault(registers[0], set()).update(registers[1:])
        seen, ahead = set(), set(REGISTER.findall(load[1] or load[2]))
        while ahead:
            seen |= ahead
            ahead = {source for register in ahead for source in made.get(register, ())} - seen
        found = {given[register] for register in seen if register in given} & pointers
        return bool(found) and found <= set(allowed)

    def _next(self, at: int) -> list[int]:
        condition, instruction = INSTRUCTION.match(self.lines[at]).groups()
        on = [at + 1] if condition else []
        if instruction.startswith(("ret", "exit", "trap")):
            return on
        if instruction.startswith("brx"):
            return on + self._listed(re.split(r"[ ,;]+", instruction)[2])
        if instruction.startswith("bra") and (
            target := TARGET.search(instruction)
        ):  # others stay in one piece of assembly
            return [*on, self.labels[target[0]]]
        return [at + 1]

    def _listed(self, table: str) -> list[int]:
        """Where the targets are that follow ``table``."""
        text = "".join(self.lines[self.labels[table] :]).split(";")[0].split(".branchtargets")[1]
        return [self.labels[target] for target in TARGET.findall(text)]
