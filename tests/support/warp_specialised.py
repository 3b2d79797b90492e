"""A warp-specialised kernel as its compiled TTGIR has it, and as the tables of a README.md describe it.

A README has a section ``## `kernel` `` for each kernel, and in it tables whose first header says what they list:

    role          | warps | registers        a line for each partition, in the order of gl.warp_specialize
    barrier       | stages | count | bytes | arrives | waits | first phase      without stages: 1, without bytes: none
    shared memory | shape | bytes            in the order of allocation, then "mbarriers", "Triton's own" and "total"

A role in the plural stands for all that begin with it: "consumers" for "consumer 0", "consumer 1". count: may be a sum,
"1 + 128". first phase: what the first wait asks for; 1 passes at once.

Of a kernel in several forms a cell may have a value for each, "1 + 128 / 1", and a column "in" says which forms have a
line; ``of_form`` makes tables of one form of them.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

Table = list[dict[str, str]]


class Barrier(NamedTuple):
    """Of one allocation. bytes: that TMA brings for each phase. arrives, waits: partitions. first_phase: of waits."""

    stages: int
    count: int
    bytes: int
    arrives: frozenset[int]
    waits: frozenset[int]
    first_phase: int


class Kernel(NamedTuple):
    """warps, registers: of each partition, the default one first. memory: (shape, bytes) of what is allocated, but for
    barriers, whose bytes follow."""

    warps: tuple[int, ...]
    registers: tuple[int, ...]
    memory: tuple[tuple[tuple[int, ...], int], ...]
    barriers: tuple[Barrier, ...]
    barrier_bytes: int
    shared_memory: int


# --- the compiled kernel

BYTES = {"f8E4M3FN": 1, "f8E5M2": 1, "i8": 1, "bf16": 2, "f16": 2, "f32": 4, "i32": 4, "i64": 8}
ALLOCATION = re.compile(r"(%\S+) = ttg\.local_alloc\b.*?!ttg\.memdesc<((?:\d+x)+)(\w+),")
INDEX = re.compile(r"(%\S+) = ttg\.memdesc_(?:index|subslice) (%[\w.]+)\[")
SPECIALISE = re.compile(r"ttg\.warp_specialize\((.*?)\).*?requestedRegisters = array<i32: ([\d, ]+)>")
PARTITION = re.compile(r"^\s*partition\d+\((.*)")
INIT = re.compile(r"ttng\.init_barrier (%[\w.]+), (\d+)")
WAIT = re.compile(r"ttng\.wait_barrier (%[\w.]+), (%[\w.]+)")
EXPECT = re.compile(r"ttng\.barrier_expect (%[\w.]+), (\d+)")
ARRIVE = re.compile(r"ttng\.(?:arrive_barrier|async_copy_mbarrier_arrive) (%[\w.]+)")


class _Use(NamedTuple):
    barrier: int
    partition: int
    what: str  # "init", "wait", "expect" or "arrive"
    value: int  # a count, a first phase, bytes


def kernel_of(compiled) -> Kernel:
    """What the TTGIR of a compiled kernel (testing.aot.Compiled) says."""
    lines = compiled.assembly["ttgir"].splitlines()
    allocations = [found.groups() for line in lines if (found := ALLOCATION.search(line))]
    places = {name: place for place, (name, _, _) in enumerate(allocations)}
    shapes = [tuple(map(int, dims.rstrip("x").split("x"))) for _, dims, _ in allocations]
    sizes = [math.prod(shape) * BYTES[kind] for shape, (_, _, kind) in zip(shapes, allocations)]
    captured, requested = next(found.groups() for line in lines if (found := SPECIALISE.search(line)))
    captures = captured.replace(" ", "").split(",")
    uses = list(_uses(lines, places, captures))
    inits = {use.barrier for use in uses if use.what == "init"}
    barriers = tuple(
        _barrier(shapes[place][0], [use for use in uses if use.barrier == place]) for place in sorted(inits)
    )
    workers = tuple(map(int, requested.split(",")))
    warps = tuple(int(found[1]) for line in lines if (found := re.search(r"num_warps\((\d+)\)", line)))
    groups = compiled.threads // 128
    # ptxas gives registers to whole warpgroups: a partition of them, or single warps together.
    singles = [asked for asked, number in zip(workers, warps, strict=True) if number < 4]
    shared = max(singles, default=0)
    assert groups == 1 + len(warps) - len(singles) + bool(singles) and set(singles) <= {shared}
    first = groups * compiled.registers - sum(workers) + shared * (len(singles) - bool(singles))
    memory = tuple((shape, size) for place, (shape, size) in enumerate(zip(shapes, sizes)) if place not in inits)
    barrier_bytes = sum(size for place, size in enumerate(sizes) if place in inits)
    return Kernel((4, *warps), (first, *workers), memory, barriers, barrier_bytes, compiled.shared_memory)


def _uses(lines: list[str], places: dict[str, int], captures: list[str]):
    """Of barriers, by partition; names are found anew in each, where arguments are called what they capture."""
    roots, values, partition = dict(places), _FirstValues(), 0
    for line in lines:
        if found := PARTITION.match(line):
            partition += 1
            arguments = re.findall(r"(%[\w.]+): ", found[1])
            roots = {name: places[value] for name, value in zip(arguments, captures) if value in places}
            values = _FirstValues()
        elif found := INDEX.search(line):
            if found[2] in roots:
                roots[found[1]] = roots[found[2]]
        elif values.take(line):
            pass
        elif found := INIT.search(line):
            yield _Use(roots[found[1]], partition, "init", int(found[2]))
        elif found := WAIT.search(line):
            yield _Use(roots[found[1]], partition, "wait", values.of(found[2]))
        elif found := EXPECT.search(line):
            yield _Use(roots[found[1]], partition, "expect", int(found[2]))
        elif found := ARRIVE.search(line):
            yield _Use(roots[found[1]], partition, "arrive", 0)


class _FirstValues:
    """What integers are when a line runs for the first time, as far as constants, arithmetic and loops tell; of others
    whether they were flipped last."""

    ARITHMETIC = {
        "addi": operator.add, "subi": operator.sub, "muli": operator.mul, "andi": operator.and_, "ori": operator.or_,
        "xori": operator.xor, "divsi": operator.floordiv, "remsi": operator.mod, "shrsi": operator.rshift,
    }  # fmt: skip

    def __init__(self):
        self.known: dict[str, int] = {}
        self.flipped: set[str] = set()
        self.condition: list[str] = []  # what a while loop hands to its body

    def of(self, name: str) -> int:
        return self.known.get(name, int(name in self.flipped))

    def take(self, line: str) -> bool:
        """Whether the line is one of these."""
        if found := re.match(r"\s*(%[\w.]+) = arith\.constant (-?\d+|true|false)\b(?! :.*tensor)", line):
            self.known[found[1]] = {"true": 1, "false": 0}[found[2]] if found[2].isalpha() else int(found[2])
        elif found := re.match(r"\s*(%[\w.]+) = arith\.(\w+) (%[\w.]+), (%[\w.]+) : i", line):
            self._arithmetic(*found.groups())
        elif re.search(r"= scf\.(for|while)\b|\bscf\.for\b", line):
            self._carry(re.findall(r"(%[\w.]+) = (%[\w.]+)", line))
        elif found := re.match(r"\s*scf\.condition\(%[\w.]+\) (.*) : ", line):
            self.condition = found[1].split(", ")
        elif line.lstrip().startswith("^bb0("):
            self._carry(zip(re.findall(r"(%[\w.]+): ", line), self.condition))
        else:
            return False
        return True

    def _arithmetic(self, result: str, operation: str, *operands: str) -> None:
        (self.flipped.add if operation == "xori" else self.flipped.discard)(result)
        self.known.pop(result, None)
        if operation in self.ARITHMETIC and all(name in self.known for name in operands):
            self.known[result] = self.ARITHMETIC[operation](*(self.known[name] for name in operands))

    def _carry(self, pairs: Iterable[tuple[str, str]]) -> None:
        pairs = list(pairs)
        carried = {name: self.known[value] for name, value in pairs if value in self.known}
        for name, _ in pairs:
            self.known.pop(name, None)
        self.known |= carried


def _barrier(stages: int, uses: list[_Use]) -> Barrier:
    def only(values: set[int]) -> int:
        (value,) = values
        return value

    def partitions(*what: str) -> frozenset[int]:
        return frozenset(use.partition for use in uses if use.what in what)

    inits = [use.value for use in uses if use.what == "init"]
    assert len(inits) == stages
    return Barrier(
        stages,
        only(set(inits)),
        only({use.value for use in uses if use.what == "expect"} or {0}),
        partitions("expect", "arrive"),
        partitions("wait"),
        only(set({use.partition: use.value for use in reversed(uses) if use.what == "wait"}.values())),
    )


# --- the README


def sections(path: Path) -> dict[str, list[Table]]:
    """The tables below each heading ``## `kernel` ``."""
    found: dict[str, list[Table]] = {}
    for block in re.split(r"^## ", path.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, body = block.partition("\n")
        if name := re.match(r"`([\w.]+)`", heading):
            found[name[1]] = list(map(_table, re.findall(r"(?:^\|.*\n)+", body, re.MULTILINE)))
    return found


def _table(text: str) -> Table:
    rows = [[cell.strip().strip("`") for cell in line.strip().strip("|").split("|")] for line in text.splitlines()]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def of_form(tables: list[Table], names: set[str], place: int) -> list[Table]:
    """Tables of one form: lines that are "in" ``all`` or one of ``names``, and of values for several forms the one at
    ``place``, or the last. A line without a count is of other forms."""

    def pick(cell: str) -> str:
        values = cell.split(" / ")
        return values[min(place, len(values) - 1)]

    lines = [
        [row for row in table if not {"all", *names}.isdisjoint(row.get("in", "all").split(", "))] for table in tables
    ]
    picked = [[{key: pick(cell) for key, cell in row.items()} for row in table] for table in lines]
    return [[row for row in table if "-" not in (row.get("count"), row.get("registers"))] for table in picked if table]


def documented(tables: list[Table]) -> tuple[Kernel, list[str]]:
    """What the tables of a section say, and the names of its barriers."""
    by_kind = {next(iter(table[0])): table for table in tables}
    roles, barriers, memory = (by_kind[kind] for kind in ("role", "barrier", "shared memory"))
    names = [row["role"] for row in roles]
    nbytes = {row["shared memory"]: _number(row["bytes"]) for row in memory}
    assert sum(nbytes.values()) == 2 * nbytes["total"], "the total is not the sum of its lines"
    rest = {"mbarriers", "Triton's own", "total"}
    kernel = Kernel(
        tuple(int(row["warps"]) for row in roles),
        tuple(int(row["registers"]) for row in roles),
        tuple((_shape(row["shape"]), _number(row["bytes"])) for row in memory if row["shared memory"] not in rest),
        tuple(
            Barrier(
                int(row.get("stages", 1)), _number(row["count"]), _number(row.get("bytes", "")), _partitions(names, row["arrives"]),
                _partitions(names, row["waits"]), int(row["first phase"]),
            )
            for row in barriers
        ),
        nbytes["mbarriers"],
        nbytes["total"],
    )  # fmt: skip
    return kernel, [row["barrier"] for row in barriers]


def _partitions(names: list[str], cell: str) -> frozenset[int]:
    """Of roles named in a cell."""
    asked = cell.split(", ")
    assert all(any(_is(name, role) for name in names) for role in asked), f"{cell}: no such role"
    return frozenset(place for place, name in enumerate(names) if any(_is(name, role) for role in asked))


def _is(name: str, role: str) -> bool:
    return name == role or (role.endswith("s") and name.split()[0] == role[:-1])


def _number(cell: str) -> int:
    return sum(int(part.replace(",", "") or 0) for part in cell.split(" + "))


def _shape(cell: str) -> tuple[int, ...]:
    """Of "8 x 64 x 128 fp8"."""
    return tuple(map(int, re.findall(r"\d+(?= x|\s|$)", re.sub(r" \w+$", "", cell))))
