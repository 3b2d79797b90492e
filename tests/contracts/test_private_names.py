"""Private names of torch and Triton stand in one file each, so that a new version is tried in one place."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOMES = {
    "sparse_attn/framework/torch_private.py",
    "tests/contracts/test_torch_private.py",
    "sparse_attn/device/triton_private.py",
}
OTHERS = {  # Python's
    "_replace", "_asdict", "_fields", "_make", "_getframe", "_SubParsersAction", "_ActionsContainer", "_actions",
    "_option_string_actions", "_action_groups", "_group_actions", "_choices_actions",
}  # fmt: skip
# Triton's own, though their names do not say so: what compiles and launches, which changes with every version.
INNARDS = ("triton.runtime", "triton.compiler", "triton.backends")


@functools.cache  # takes seconds, which are not those of whoever collects tests
def files():
    paths = (path for folder in ("sparse_attn", "scripts", "tests") for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def own_names(tree):
    """Private names that a file defines: variables, attributes, functions, parameters."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


@functools.cache
def own():
    return {name for file, tree in files().items() if file not in HOMES for name in own_names(tree) if is_private(name)}


def foreign(tree):
    """(line, name) of every private name that is none of ours, and of Triton's innards."""
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            modules = [ast.unparse(node)] if ast.unparse(node).startswith(INNARDS) else []
            vllms = ast.unparse(node) in ("torch.ops._C", "torch.ops._moe_C")  # namespaces of operators
            if is_private(node.attr) and not vllms and node.attr not in own() | OTHERS:
                yield node.lineno, node.attr
        for module in modules:
            if module.startswith(INNARDS) or any(is_private(part) and part not in own() for part in module.split(".")):
                yield node.lineno, module


def test_private_names_stand_in_one_file_each():
    found = {file: names for file, tree in files().items() if (names := sorted(set(foreign(tree))))}
    assert HOMES <= found.keys()
    assert {file: names for file, names in found.items() if file not in HOMES} == {}


def test_private_names_are_seen():
    source = """
import torch._dynamo.utils
from torch.utils._python_dispatch import TorchDispatchMode
from triton.compiler import ASTSource
torch._C.anything()
function._schema, plan._replace(a=1), torch.__version__
"""
    assert [name for _, name in sorted(foreign(ast.parse(source)))] == [
        "torch._dynamo.utils", "torch.utils._python_dispatch.TorchDispatchMode", "triton.compiler.ASTSource", "_C", "_schema",
    ]  # fmt: skip
