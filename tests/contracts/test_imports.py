"""What importing costs, and that imports go down the floors only."""

import ast
import graphlib
import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import support
from expecttest import assert_expected_inline

import sparse_attn
from sparse_attn import moved
from sparse_attn.generation.graph import check_capturable
from sparse_attn.testing.ops import public_functions

PACKAGE = Path(sparse_attn.__file__).parent
PACKAGES = sparse_attn.ops.packages()

FLOORS = {
    "framework.autocast": -1, "framework.checks": -1, "framework.lanes": -1, "framework.streams": -1, "framework.torch_private": -1,
    "framework": 0, "fp8": -1, "moved": -1, "mxfp4": -1, "mesh": 0, "types": 0, "layout": 0, "framework.target": 0, "spec": 0,
    "cache": 0.5, "framework.debug": 0.5, "framework.dispatch": 0.5, "version": 0, "data": 0, "ops": 0, "files": 0,
    "roofline": 0, "weight_layout": 0, "workspace": 1, "device": 1, "framework.gradients": 1,
    "framework.registration": 1.5, "explanation": 4, "pipeline": 4, "integrations": 5, "models": 5, "checkpoints.names": 4.5, "checkpoints": 5.2,
    "generation": 5.4, "cli": 5.6, "testing": 6, "": 7, "__main__": 7,
}  # fmt: skip
# What a file of an operator package is follows from where it lies. At the top: the contract (__init__), what kernels
# and references may know of it (BASE), one file of kernels where one is enough, launchers, and other host code (op,
# dispatch, plan, config, ...). In a folder (portable, hopper, algorithms, primitives, ...): kernels, but for
# launch.py and config.py.
BASE = ("fake", "shapes", "reference", "debug")
KINDS = {"base": 1.5, "kernel": 1.5, "host": 2, "launch": 2, "contract": 3}  # floors
# Files that have no folder yet: they leave this table with it.
UNSORTED = {
    "layers.rope": {"table": "base"},
}
# What a fused op takes from another package: how it is dispatched and launched, and its oracle; never its kernels.
FUSED = ("dispatch", "plan", "config", "launch", "reference")


def module_name(path):
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def split(name):
    """(operator package or None, file): where a module is."""
    parts = name.split(".")
    if parts[0] == "ops" and len(parts) > 2:
        return ".".join(parts[1:3]), ".".join(parts[3:])
    return None, name


def kind(package, file):
    """What a file of an operator package is."""
    *folders, leaf = file.split(".")
    if not file:
        return "contract"
    if not folders and file in UNSORTED.get(package, ()):
        return UNSORTED[package][file]
    if leaf == "launch":
        return "launch"
    if folders:
        return "host" if leaf == "config" else "kernel"
    return "base" if leaf in BASE else "kernel" if leaf == "kernels" else "host"


def floor(name):
    package, file = split(name)
    if package:
        return KINDS[kind(package, file)]
    while name not in FLOORS:
        name = name.rpartition(".")[0]
    return FLOORS[name]


def imports(name, top_level_only=False):
    """Modules of this package that ``name`` imports, relative to it; of others the whole name."""
    tree = ast.parse(MODULES[name].read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                inner = whole.removeprefix("sparse_attn.")
                yield whole if whole.startswith("sparse_attn.") and inner in MODULES else node.module


def inner_imports(name):
    for whole in imports(name):
        if whole == "sparse_attn" or whole.startswith("sparse_attn."):
            yield whole.removeprefix("sparse_attn").removeprefix(".")


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)


@pytest.mark.parametrize("module", ("sparse_attn", "sparse_attn.models.deepseek_v32", "sparse_attn.cli.main"))
def test_import_loads_no_triton_and_no_gpu_runtime(module):
    done = run(
        f"import {module}, sys, torch; assert 'triton' not in sys.modules; assert not torch.cuda.is_initialized(); "
        "assert not [m for m in sys.modules if m.startswith('sparse_attn.') and m.endswith(('.launch', '.kernels'))]"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("old", moved.MOVED)
def test_old_names_of_modules_go_on_and_say_the_new_ones(old, monkeypatch):
    for name in ("sparse_attn." + old, "sparse_attn." + old.partition(".")[0]):
        if name.removeprefix("sparse_attn.") in moved.MOVED | moved.FOLDERS:
            monkeypatch.delitem(sys.modules, name, raising=False)
    new = importlib.import_module("sparse_attn." + moved.MOVED[old])
    spec = new.__spec__
    with pytest.warns(DeprecationWarning, match=f"sparse_attn.{old} is {new.__name__} now"):
        assert importlib.import_module("sparse_attn." + old) is new
    assert new.__spec__ is spec and spec.name == new.__name__
    with pytest.raises(ModuleNotFoundError, match="sparse_attn.runtime.nothing"):
        importlib.import_module("sparse_attn.runtime.nothing")


def test_names_at_the_top():
    """What a new name is for has to be worth one of 50 places."""
    names = sparse_attn.__all__
    assert len(names) <= 50 and dir(sparse_attn) == sorted(names)
    everything = {}
    exec("from sparse_attn import *", everything)
    assert everything.keys() - {"__builtins__"} == set(names)
    assert len({id(value) for value in everything.values()}) == len(names) + 1  # none stands there twice
    assert_expected_inline(
        "\n".join(textwrap.wrap(" ".join(names), 116)),
        """\
Batching Bounds CacheLayouts DecodeGraph IndexFp8Layout IndexMxfp4Layout LatentFp8Layout Model PlainLayout
PlanarFp8Layout QuantisedQuery Ragged Sampling __version__ allocate_cache apply_rope attend
build_ragged_indices_from_dense build_step_plan cache_layouts compress_and_cache explain fp8_mqa_logits
fp8_paged_mqa_logits from_hf_config gather_indexer_k gather_kv_cache generate index_select index_topk_decode
index_topk_decode_slots index_topk_prefill indexer_k_quant_and_cache indexer_q_rope_quant mark_cache
merge_attn_states preset reserve rope_table row_seeds sample sparse_attn_decode sparse_attn_prefill target_of
top_k_per_row use workspace_size write_index_keys write_kv_cache write_latents""",
    )


def test_the_architecture_page_lists_the_names_at_the_top():
    page = (PACKAGE / "README.md").read_text()
    table = page[page.index("## The front") : page.index("Every other public name")]
    listed = [name for row in re.findall(r"^\| .*? \| (`.*) \|$", table, re.MULTILINE) for name in row.split(", ")]
    assert sorted(listed) == sorted(f"`{name}`" for name in sparse_attn.__all__)


def test_every_public_function_has_one_home():
    """The top, or the contract of its package."""
    functions = public_functions()
    contracts = [PACKAGE.joinpath("ops", *package.split("."), "__init__.py") for package in PACKAGES]
    nodes = [node for path in contracts for node in ast.parse(path.read_text()).body]
    written = [node.name for node in nodes if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    assert len(set(written)) == len(written) > 40 and set(written) <= functions.keys()
    for name, function in functions.items():
        if name in sparse_attn.__all__:
            assert getattr(sparse_attn, name) is function
        else:
            assert name not in vars(sparse_attn), f"{name} is at the top and not in __all__"


def test_names_of_the_top_are_imported_from_one_place():
    """In the package from where they are defined, elsewhere those of generation from the top. A module may use a name,
    and so have it; nobody imports it from there."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imported for alias in node.names}
    root, paths = PACKAGE.parent, set()
    for folder in ("sparse_attn", "tests", "scripts"):
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if path != PACKAGE / "__init__.py" and isinstance(node, ast.ImportFrom):
                    paths |= {(folder, node.module or "", alias.name) for alias in node.names}
    for folder, module, name in sorted(paths):
        if name not in homes or not module.startswith("sparse_attn"):
            continue
        late = homes[name].startswith("sparse_attn.generation")
        allowed = (
            {homes[name]} if folder == "sparse_attn" else {"sparse_attn"} if late else {"sparse_attn", homes[name]}
        )
        if module not in allowed:
            value = getattr(sparse_attn, name)
            same = getattr(importlib.import_module(module), name, None) is value  # a launcher has the function's name
            assert not same or (module == value.__module__ and not late), f"{folder} imports {name} from {module}"


@pytest.mark.parametrize("name", moved.NAMES)
def test_names_that_left_the_top_go_on_and_say_where_they_are(name):
    place = f"sparse_attn.{moved.NAMES[name]}"
    with pytest.warns(DeprecationWarning, match=f"^sparse_attn.{name} is {place}.{name} now$") as said:
        value = getattr(sparse_attn, name)
    assert value is getattr(importlib.import_module(place), name) and said[0].filename == __file__
    assert name not in sparse_attn.__all__ and name not in vars(sparse_attn)


def test_what_never_was_at_the_top_is_no_name_of_it():
    with pytest.raises(AttributeError, match="^module 'sparse_attn' has no attribute 'nothing'$"):
        _ = sparse_attn.nothing
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from sparse_attn import nothing")


def test_the_top_loads_no_model_and_defines_every_operator():
    """Saved programs need the operators, and an operator needs no model."""
    done = run(
        "import sparse_attn, sys\n"
        "from sparse_attn.framework.torch_private import operators\n"
        "late = [m for m in sys.modules if m.startswith(('sparse_attn.generation', 'sparse_attn.models'))]\n"
        "assert not late, late\n"
        "defined = set(operators('sparse_attn'))\n"
        "from sparse_attn.testing.ops import public_functions\n"
        "assert len(public_functions()) > 40 and defined == set(operators('sparse_attn'))\n"
        "from sparse_attn import Batching, DecodeGraph, Model, Sampling, generate\n"
        "assert vars(sparse_attn)['Model'] is Model and Model.__module__ == 'sparse_attn.generation.model'"
    )
    assert done.returncode == 0, done.stderr


OLD_PATHS = {
    "batching": "Batching", "generate": "Model Sampling generate check_capturable", "graph": "DecodeGraph",
    "model": "Model", "steps": "Model Sampling",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("old", OLD_PATHS)
def test_names_that_readme_imported_from_runtime_are_there(old):
    module = importlib.import_module(f"sparse_attn.runtime.{old}")
    for name in OLD_PATHS[old].split():
        assert getattr(module, name) is getattr(sparse_attn, name, check_capturable)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down_only(name):
    for other in inner_imports(name):
        if name in ("", "__main__"):
            continue
        beside = floor(other) == floor(name) and (
            name.split(".")[0] == other.split(".")[0]
            and (split(name)[0] == split(other)[0] or split(other)[1].rpartition(".")[2] in FUSED)
        )
        assert floor(other) < floor(name) or beside, (
            f"{name} (floor {floor(name)}) imports {other} (floor {floor(other)})"
        )


@pytest.mark.parametrize("name", [name for name in MODULES if split(name)[0]])
def test_operator_packages_keep_to_themselves(name):
    package, file = split(name)
    for other in inner_imports(name):
        other_package, other_file = split(other)
        if other_package and other_package != package:
            assert other_file.rpartition(".")[2] in FUSED, (
                f"{name} imports {other}: packages share {', '.join(FUSED)} only"
            )
        if other_package == package:
            kinds = {kind(package, file), kind(package, other_file)}
            assert "reference" not in (file, other_file) or not kinds & {"kernel", "launch"}, f"{name} imports {other}"
    if file == "fake":
        allowed = {"torch", "__future__", f"sparse_attn.ops.{package}.shapes"}
        allowed |= {f"sparse_attn.{other}" for other in inner_imports(name) if floor(other) <= 0}
        assert set(imports(name)) <= allowed, f"{name} imports {set(imports(name)) - allowed}"


def circle(graph):
    """A circle of imports (module -> those it imports); None where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]


def written(path, modules):
    """Of ``modules``, those that the file at ``path`` imports by statement, for type checkers too, or names to
    import_module; a name of a package is the package's own only where there is no module of this name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules else node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (one.value for one in node.args if isinstance(one, ast.Constant))


@pytest.mark.parametrize("folder", ["scripts", "sparse_attn"])
def test_modules_import_each_other_in_no_circle(folder):
    """But for the package itself, which hands names on."""
    root = PACKAGE.parent if folder == "sparse_attn" else PACKAGE.parent / folder
    paths = sorted((PACKAGE.parent / folder).rglob("*.py"))
    modules = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    modules.pop("sparse_attn", None)
    found = {name: {*written(path, modules)} & modules.keys() - {name} for name, path in modules.items()}
    assert circle(found) is None


# Imports as they happen, and who asks: while the package is loaded, every operator runs its reference and its rules, and
# each launcher is looked up.
RECORDED = """
import builtins, collections, importlib, importlib.util, json, sys
found, load, load_module = collections.defaultdict(set), builtins.__import__, importlib.import_module

def note(importer, names):
    if importer.startswith("sparse_attn."):
        found[importer].update(name for name in names if name.startswith("sparse_attn."))

def loading(name, globals=None, locals=None, fromlist=(), level=0):
    module = load(name, globals, locals, fromlist, level)
    inner = [f"{name}.{one}" for one in fromlist or ()]
    note((globals or {}).get("__name__", ""), [one if one in sys.modules else name for one in inner] or [name])
    return module

def loading_module(name, package=None):
    note(sys._getframe(1).f_globals["__name__"], [name])
    return load_module(name, package)

builtins.__import__, importlib.import_module = loading, loading_module
import torch
from sparse_attn import ops
from sparse_attn.framework.registration import OPERATORS
from support.arguments import GOOD
ran = set()
for package in ops.packages():
    load_module(f"sparse_attn.ops.{package}")
for name, op in OPERATORS.items():
    op(*GOOD[name]().values(), "reference")
    ran.add(name)
    for kernel in op.kernels:
        kernel.launcher
    op.launch()
assert ran == GOOD.keys() and len(ran) >= 35, ran ^ GOOD.keys()
print(json.dumps({name: sorted(names - {name}) for name, names in found.items()}))
"""


def test_no_module_imports_in_a_circle_while_operators_run():
    environment = os.environ | {
        "SPARSE_ATTN_DEBUG": "1",
        "PYTHONPATH": f"{PACKAGE.parent}:{Path(support.__path__[0]).parent}",
    }
    done = subprocess.run([sys.executable, "-c", RECORDED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    launchers = {name for names in found.values() for name in names if name.endswith(".launch")}
    assert launchers == {f"sparse_attn.{name}" for name in MODULES if name.endswith(".launch")}
    assert "sparse_attn.framework.debug" in found["sparse_attn.framework.registration"]
    assert circle(found) is None


def test_no_test_imports_another_test():
    """What several share lies in tests/support."""
    tests = Path(__file__).parents[1]
    for path in sorted(tests.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[-1].startswith("test_")], path.relative_to(tests)
    assert {path.stem for path in tests.glob("*.py") if not path.stem.startswith("test_")} == {"conftest"}


def test_what_a_file_is_follows_from_where_it_lies():
    """A new architecture's files need no entry anywhere."""
    for file, expected in (
        ("", "contract"), ("op", "host"), ("fake", "base"), ("dispatch", "host"), ("plan", "host"), ("launch", "launch"),
        ("shapes", "base"), ("kernels", "kernel"), ("blackwell.launch", "launch"), ("blackwell.config", "host"),
        ("blackwell.prefill", "kernel"), ("primitives.histogram", "kernel"),
    ):  # fmt: skip
        assert kind("attention.sparse", file) == expected, file
    for package, files in UNSORTED.items():
        assert all((PACKAGE.joinpath("ops", *package.split(".")) / f"{file}.py").exists() for file in files), package


def test_the_architecture_page_lists_the_floors():
    rows = re.findall(r"^\| (-?[\d.]+) \| (.*?) \|", (PACKAGE / "README.md").read_text(), re.MULTILINE)
    listed = {name: float(number) for number, names in rows for name in re.findall(r"`([\w.]+)`", names)}
    assert listed == {name or "sparse_attn": number for name, number in FLOORS.items()}


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("testing")])
def test_nothing_shipped_imports_testing(name):
    assert not [other for other in inner_imports(name) if other.startswith("testing")]


@pytest.mark.parametrize("name", MODULES)
def test_triton_stays_behind_the_kernels(name):
    """Only kernels, launchers and device helpers import Triton when they are loaded."""
    package, file = split(name)
    if name.startswith("device") or (package and kind(package, file) in ("kernel", "launch")):
        return
    assert not [other for other in imports(name, top_level_only=True) if other.split(".")[0] == "triton"], name
