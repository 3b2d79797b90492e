"""The statements of a PTX kernel, and where its labels stand."""

from __future__ import annotations

import re
from typing import NamedTuple

Scopes = tuple[int, ...]


class Instruction(NamedTuple):
    """``@guard operation operands``. scopes: of the braces around it, the innermost last, for labels."""

    text: str
    guard: str | None
    negated: bool
    operation: tuple[str, ...]  # "ld.shared.b32" in its parts
    operands: tuple[str, ...]
    scopes: Scopes


class Program(NamedTuple):
    instructions: list[Instruction]
    labels: dict[tuple[int, str], int]  # by scope
    branch_targets: dict[str, list[str]]
    parameters: list[tuple[str, bool]]  # name, and whether it is a tensor map
    threads: int
    cluster: int  # CTAs
    shared: dict[str, int]  # bytes declared, by name


def parse(ptx: str) -> Program:
    head, _, body = ptx[ptx.index(".entry") :].partition("{")
    declared = re.findall(r"\.param\s.*?(\w+_param_\d+)(\[128\])?", head)
    threads = re.search(r"\.reqntid (\d+)", head)
    assert threads is not None, "no .reqntid"
    cluster = re.search(r"\.reqnctapercluster (\d+)", head)
    shared = {name: int(nbytes) for name, nbytes in re.findall(r"\.shared \.align 16 \.b8 (\w+)\[(\d+)\]", body)}
    instructions: list[Instruction] = []
    labels: dict[tuple[int, str], int] = {}
    branch_targets: dict[str, list[str]] = {}
    scopes, opened, last_label = [0], 0, ""
    for statement in _statements(re.sub(r"//[^\n]*|/\*.*?\*/", "", body)):
        if statement == "{":
            opened += 1
            scopes.append(opened)
        elif statement == "}":
            if len(scopes) > 1:
                scopes.pop()
        elif statement.endswith(":"):
            last_label = statement[:-1]
            labels[scopes[-1], last_label] = len(instructions)
        elif statement.startswith(".branchtargets"):
            branch_targets[last_label] = [name.strip() for name in statement.split(maxsplit=1)[1].split(",")]
        elif not statement.startswith("."):
            instructions.append(_instruction(statement, tuple(scopes)))
    return Program(
        instructions, labels, branch_targets, [(name, bool(map_)) for name, map_ in declared], int(threads[1]),
        int(cluster[1]) if cluster else 1, shared,
    )  # fmt: skip


def _statements(body: str) -> list[str]:
    """Statements without their semicolons, braces of scopes and labels ("name:") by themselves."""
    found, text = [], ""
    for line in map(str.strip, body.split("\n")):
        if line.startswith((".loc", ".file", ".section")) or not line:
            continue
        text = f"{text} {line}".strip()
        while text:
            if text[0] == "}" or (text[0] == "{" and not re.match(r"\{\s*%", text)):
                found.append(text[0])
                text = text[1:].strip()
            elif label := re.match(r"(\$?[\w$]+):\s*(?!:)", text):
                found.append(f"{label[1]}:")
                text = text[label.end() :]
            elif ";" in text:
                statement, _, text = text.partition(";")
                found.append(statement.strip())
                text = text.strip()
            else:
                break
    return found


def _instruction(statement: str, scopes: Scopes) -> Instruction:
    parts = re.match(r"(?:@(!?)(\S+)\s+)?(\S+)\s*(.*)$", statement, re.DOTALL)
    assert parts is not None, statement
    operation = tuple(part for part in re.split(r"\.|::", parts[3]) if part)
    return Instruction(statement, parts[2], parts[1] == "!", operation, tuple(_operands(parts[4])), scopes)


def _operands(text: str) -> list[str]:
    """Between commas that no bracket encloses."""
    found, depth, operand = [], 0, ""
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            found.append(operand.strip())
            operand = ""
        else:
            operand += character
    return [*found, operand.strip()] if operand.strip() else found


def names(operand: str) -> list[str]:
    """Registers of "{%r1, %r2}", or of "%r1" that one."""
    return [name.strip() for name in operand.strip("{} ").split(",")]
