"""Where modules lay until 0.2, and what else stood at the top. Old names go on for one release, with a
DeprecationWarning that says the new one."""

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
    "ops.layers.experts": "ops.layers.products",
    "ops.layers.linears": "ops.layers.products",
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
LEFT = {  # names of the package's top, by the module that has them
    "explanation": "Explanation",
    "framework.target": "Target",
    "layout": "parse_layout",
    "mesh": "Mesh Ranks mesh_of planned_mesh",
    "ops.attention.sparse": "lse_to_base2 lse_to_flashmla sparse_attn_into",
    "ops.indexer.queries": "hadamard_transform",
    "ops.indexer.scores": "bf16_mqa_logits bf16_paged_mqa_logits mxfp4_mqa_logits mxfp4_paged_mqa_logits",
    "ops.layers.hyper_connection": "hyper_head hyper_merge hyper_mix",
    "ops.layers.products": "grouped_linear linear packed_experts",
    "ops.layers.rope": "Yarn",
    "ops.layers.router": "biased_grouped_topk hash_routed_experts",
    "ops.layers.sampling": "count_tokens filter_logits penalise_logits token_logprobs",
    "ops.ragged.lists": (
        "combine_topk_swa_indices_ragged compute_global_topk_ragged_indices_and_indptr entry_indices window_indices"
    ),
    "ops.ragged.step_plans": "build_compressed_plan build_window_plan",
    "ops.topk.ranks": "count_digits count_ties merge_candidates pack_candidates take_winners",
    "pipeline": "Selection",
    "spec": "CompressedSpec IndexSpec MoeSpec Spec YarnSpec",
    "types": "AttentionOutput Caches CompressedPlan HyperMix IndexKeys Logprobs StepPlan WindowCaches WindowPlan",
    "workspace": "Workspace WorkspaceSize release",
}
NAMES = {name: module for module, names in LEFT.items() for name in names.split()}


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


def left_the_top(name: str) -> object:
    """What ``sparse_attn.name`` was; AttributeError where there was none."""
    if name not in NAMES:
        raise AttributeError(f"module 'sparse_attn' has no attribute {name!r}")
    module = PACKAGE + NAMES[name]
    warnings.warn(f"{PACKAGE}{name} is {module}.{name} now", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(module), name)
