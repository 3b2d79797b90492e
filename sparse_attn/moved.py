"""Where modules lay until 0.2. Old names go on for one release, with a DeprecationWarning that says the new one."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "sparse_attn."
FOLDERS = {"compat": "integrations", "runtime": "generation"}  # that are gone: nothing but what MOVED says is in them
MOVED = {
    "compat.deep_gemm": "integrations.deep_gemm",
    "compat.flash_mla": "integrations.flash_mla",
    "compat.vllm": "integrations.vllm_ops",
    "debug": "framework.debug",
    "dispatch": "framework.dispatch",
    "models.loading": "checkpoints.load",
    "runtime.batching": "generation.scheduler",
    "runtime.generate": "generation.generate",
    "runtime.graph": "generation.graph",
    "runtime.model": "generation.model",  # of pickled models
    "runtime.paging": "generation.blocks",
    "runtime.plan_cache": "generation.plan_cache",
    "runtime.prefixes": "generation.prefixes",
    "runtime.selections": "generation.selections",
    "runtime.steps": "generation.steps",
    "runtime.text": "generation.text",
    "target": "framework.target",
}


class Finder:
    """Finds a module under its old name: the module itself, or for a folder an empty one."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        old = name.removeprefix(PACKAGE)
        known = name.startswith(PACKAGE) and (old in MOVED or old in FOLDERS)
        return ModuleSpec(name, cls, is_package=old in FOLDERS) if known else None  # pyright: ignore[reportArgumentType]

    @classmethod
    def create_module(cls, spec: ModuleSpec) -> ModuleType | None:
        old = spec.name.removeprefix(PACKAGE)
        if old in FOLDERS:
            return None
        new = PACKAGE + MOVED[old]
        warnings.warn(f"{spec.name} is {new} now", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__  # which importing replaces
        return module

    @classmethod
    def exec_module(cls, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


def install() -> None:
    """Ask first: a folder that is left over, of bytecode alone, would be taken for a package."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
