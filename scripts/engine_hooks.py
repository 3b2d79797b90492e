#!/usr/bin/env python
"""Compare the places of vLLM and SGLang that sparse_attn.integrations builds on with those of the versions it takes.

    python scripts/engine_hooks.py vllm==0.33.0     # fetches the wheel by pip, and reads its sources
    python scripts/engine_hooks.py FILE.whl --write       # or reads a wheel, and adds its version to the table

The table is tests/integrations/engine_hooks.json: by engine and version, the parameters of a function, or the fields of
a class. Exits with 1 where something moved against the newest version of the table.
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

TABLE = Path(__file__).resolve().parents[1] / "tests" / "integrations" / "engine_hooks.json"
SGLANG = {
    "srt/layers/attention/dsa/dsa_topk_backend.py": ["DSATopKBackend.topk_func", "DSATopKBackend.topk_transform"],
    "srt/plugins/__init__.py": ["load_plugins"],
    "srt/plugins/hook_registry.py": ["HookRegistry.register"],
}
VLLM = {
    "compilation/breakable_cudagraph.py": ["eager_break_during_capture"],
    "forward_context.py": ["ForwardContext"],
    "model_executor/custom_op.py": ["PluggableLayer.register_oot"],
    "model_executor/layers/mla.py": [
        "MultiHeadLatentAttentionWrapper.__init__", "MultiHeadLatentAttentionWrapper.forward", "MLAModules",
    ],
    "model_executor/models/deepseek_v2.py": ["DeepseekV32IndexerCache.__init__", "Indexer.__init__", "Indexer.forward"],
    "model_executor/models/registry.py": ["_ModelRegistry.register_model"],
    "models/deepseek_v4/attention.py": ["DeepseekV4Attention.__init__", "DeepseekV4Attention.get_attn_backend"],
    "models/deepseek_v4/compressor.py": ["CompressorMetadata", "CompressorStateCache.get_attn_backend"],
    "models/deepseek_v4/cpu/cpu_sparse.py": [
        "DeepseekV4CPUAttention.__init__", "DeepseekV4CPUAttention._sparse_indexer_and_attn",
        "DeepseekV4CPUIndexer.forward",
    ],
    "models/deepseek_v4/cpu/model.py": ["DeepseekV4DecoderLayer.__init__", "DeepseekV4ForCausalLM.__init__"],
    "platforms/interface.py": ["Platform.get_attn_backend_cls"],
    "plugins/__init__.py": ["load_general_plugins"],
    "utils/torch_utils.py": ["direct_register_custom_op"],
    "v1/attention/backend.py": [
        "AttentionBackend.get_builder_cls", "AttentionMetadataBuilder", "AttentionMetadataBuilder.__init__",
        "AttentionMetadataBuilder.build",
        "CommonAttentionMetadata",
        "MLAAttentionImpl.__init__", "MLAAttentionImpl.do_kv_cache_update", "MLAAttentionImpl.forward_mqa",
    ],
    "v1/attention/backends/mla/indexer.py": ["DeepseekV4IndexerBackend.supported_kv_cache_layouts"],
    "v1/attention/backends/registry.py": ["register_backend"],
    "v1/attention/backends/utils.py": ["split_decodes_and_prefills"],
}  # fmt: skip
HOOKS = {"sglang": SGLANG, "vllm": VLLM}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", help="a requirement such as vllm==0.33.0, or a wheel's file")
    parser.add_argument("--write", action="store_true", help="put the version into the table")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(options.wheel) if options.wheel.endswith(".whl") else fetch(options.wheel, folder)
        package, version = file.name.split("-")[:2]
        engine = package.removesuffix("_cpu")
        if engine not in HOOKS:
            parser.error(f"wheel: got {package}, allowed: {', '.join(HOOKS)}")
        found = hooks_of(zipfile.ZipFile(file), engine)
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    known = table.setdefault(engine, {})
    newest = max(known, key=lambda one: [int(part) for part in one.split(".")], default=version)
    before = known.get(newest, found)
    moved = [
        f"{name}\n  {newest}: {before.get(name)}\n  {version}: {found.get(name)}"
        for name in sorted({*before, *found})
        if before.get(name) != found.get(name)
    ]
    print("\n".join(moved) or f"{engine} {version}: as {newest}")
    if options.write:
        known[version] = found
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
    return 1 if moved else 0


def fetch(requirement: str, folder: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
    subprocess.run([*command, requirement], check=True)
    return next(Path(folder).glob("*.whl"))


def hooks_of(wheel: zipfile.ZipFile, engine: str) -> dict[str, str | None]:
    """By "file:name"; None where there is no such thing."""
    inside = set(wheel.namelist())
    return {
        f"{file}:{name}": signature(ast.parse(wheel.read(path)), name) if path in inside else None
        for file, names in HOOKS[engine].items()
        for path in [f"{engine}/{file}"]
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
