"""Whether a kernel whose launch may start early waits for what was launched before it, wherever it reads."""

from __future__ import annotations

import re

WAITS = "griddepcontrol.wait"
HANDS_OUT = "barrier.sync 1;"  # at which warps that specialise are told what to run
# What comes to the L2 alone gives the launch nothing, whenever it is asked for.
GLOBAL = re.compile(r"(?!cp\.async\.bulk\.prefetch\.L2)(?:ld|st|atom|red|cp|prefetch)\.\S*global")
INSTRUCTION = re.compile(r"(@\S+ )?(.*)")
TARGET = re.compile(r"\$\w+")


def reaches_memory_early(ptx: str) -> str:
    """An instruction that reaches global memory on a path without a wait; empty where there is none. Of warps that
    specialise each has to wait, unless those that tell them what to run have done so before."""
    program = _Program(ptx)
    begun = program.reached({WAITS, HANDS_OUT})
    stops = {WAITS, HANDS_OUT} if any(WAITS in line for line in begun) else {WAITS}
    return next((line for line in program.reached(stops) if GLOBAL.match(INSTRUCTION.match(line)[2])), "")


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
