"""Docstrings of public functions and values, from which the site makes tables: Args, Returns and Raises."""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import sparse_attn
from sparse_attn.pipeline import latent, windowed
from sparse_attn.testing.ops import public_functions

ELSEWHERE = {
    "sparse_attn.checkpoints.load": ("load",),
    "sparse_attn.checkpoints.save": ("save",),
    "sparse_attn.checkpoints.convert": ("convert",),
    "sparse_attn.checkpoints.published": ("write_published",),
    "sparse_attn.checkpoints.random_packed": ("random_packed_params",),
    "sparse_attn.explanation": ("Explanation",),
    "sparse_attn.generation.generate": ("Generation",),
    "sparse_attn.integrations.deep_gemm": (
        "fp8_mqa_logits",
        "fp8_fp4_mqa_logits",
        "fp8_paged_mqa_logits",
        "fp8_fp4_paged_mqa_logits",
        "get_paged_mqa_logits_metadata",
    ),
    "sparse_attn.integrations.flash_mla": (
        "flash_mla_sparse_fwd",
        "flash_mla_with_kvcache",
        "get_mla_metadata",
    ),
    "sparse_attn.integrations.vllm_ops": (
        "cp_gather_indexer_k_quant_cache",
        "indexer_k_quant_and_cache",
        "top_k_per_row_decode",
        "top_k_per_row_prefill",
    ),
    "sparse_attn.mesh": ("Mesh", "Ranks", "mesh_of", "planned_mesh"),
    "sparse_attn.models.deepseek_v32": ("allocate_caches", "forward"),
    "sparse_attn.models.deepseek_v4": ("allocate_caches", "forward"),
    "sparse_attn.models.params": ("random_params",),
    "sparse_attn.ops.layers.rope": ("Yarn",),
    "sparse_attn.spec": (
        "IndexSpec",
        "MoeSpec",
        "YarnSpec",
        "leading_dense",
        "shared_index_layers",
        "softmax_scale",
        "to_hf_config",
    ),
    "sparse_attn.types": (
        "AttentionOutput",
        "Caches",
        "CompressedPlan",
        "HyperMix",
        "IndexKeys",
        "Logprobs",
        "StepPlan",
        "WindowCaches",
        "WindowPlan",
    ),
    "sparse_attn.workspace": ("Workspace", "WorkspaceSize", "current", "release", "reserve", "use"),
}
METHODS = {
    "Model": ("allocate_caches", "forward", "predictor"),
    "Batching": ("cancel", "drain", "step", "submit"),
    "DecodeGraph": ("join", "leave", "load", "run"),
}
# plain torch, and what refuses nothing itself
RAISE_NOTHING = {
    "Batching.cancel",
    "Batching.drain",
    "Batching.step",
    "integrations.flash_mla.get_mla_metadata",
    "inverse_frequencies",
    "lse_to_base2",
    "lse_to_flashmla",
    "models.params.random_params",
    "spec.leading_dense",
    "spec.shared_index_layers",
    "spec.softmax_scale",
    "use",
    "workspace.current",
    "workspace.release",
    "workspace.use",
}


def public() -> dict[str, Callable[..., Any]]:
    found: dict[str, Any] = dict(public_functions())
    found |= {name: getattr(sparse_attn, name) for name in sparse_attn.__all__ if name != "__version__"}
    for module in (latent, windowed):
        own = {
            name: value
            for name, value in vars(module).items()
            if inspect.getmodule(value) is module and not name.startswith("_") and name != "join"
        }
        found |= {f"{module.__name__.rpartition('.')[2]}.{name}": value for name, value in own.items()}
    for module, names in ELSEWHERE.items():
        place = module.partition(".")[2]
        found |= {f"{place}.{name}": getattr(importlib.import_module(module), name) for name in names}
    for owner, names in METHODS.items():
        found |= {f"{owner}.{name}": getattr(getattr(sparse_attn, owner), name) for name in names}
    return found


PUBLIC = public()


def sections(doc: str) -> dict[str, list[str]]:
    """Of each section of a docstring, the lines that begin an item."""
    found: dict[str, list[str]] = {}
    lines = None
    for line in inspect.cleandoc(doc).splitlines():
        if re.fullmatch(r"[A-Z]\w+:", line):
            lines = found[line[:-1]] = []
        elif line and not line.startswith(" "):
            lines = None
        elif lines is not None and re.match(r" {4}\S", line):
            lines.append(line.strip())
    return found


def faults(name: str, value: Any, doc: str) -> list[str]:
    """What a docstring lacks, or says of what is not there."""
    said, wrong = sections(doc), []
    names = {kind: [item.partition(":")[0] for item in said.get(kind, [])] for kind in ("Args", "Attributes")}
    fields = field_names(value)
    if fields is not None:
        wanted = {"Args": [], "Attributes": fields}
    else:
        parameters = inspect.signature(value).parameters.values()
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        wanted = {
            "Args": [stars.get(it.kind, "") + it.name for it in parameters if it.name != "self"],
            "Attributes": [],
        }
    wrong += [f"{kind}: {names[kind]} for {wanted[kind]}" for kind in wanted if names[kind] != wanted[kind]]
    if not inspect.isclass(value):
        gives = inspect.signature(value).return_annotation not in (None, "None")
        if gives != bool(said.get("Returns")):
            wrong.append("Returns")
    raises = said.get("Raises", [])
    if fields is None and bool(raises) == (name in RAISE_NOTHING):
        wrong.append("Raises")
    return wrong + [item for item in raises if not re.match(r"\w+Error(, \w+Error)*: ", item)]


def field_names(value: Any) -> list[str] | None:
    """Of a dataclass and of a named tuple; None for all else."""
    if inspect.isclass(value) and dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return list(value._fields) if inspect.isclass(value) and issubclass(value, tuple) else None


@pytest.mark.parametrize("name", PUBLIC)
def test_says_every_argument_what_comes_back_and_what_is_refused(name):
    assert not faults(name, PUBLIC[name], PUBLIC[name].__doc__ or "")


def example(rows: int, *, cols: int) -> int: ...


WHOLE = "X.\n\nArgs:\n    rows: a.\n        b: c.\n    cols: d.\n\nReturns:\n    e.\n\nRaises:\n    ValueError: f."


@pytest.mark.parametrize(
    "doc, count",
    [
        (WHOLE, 0),
        (WHOLE.replace("    cols: d.\n", ""), 1),
        (WHOLE.replace("cols", "columns"), 1),
        (WHOLE.replace("Returns:\n    e.\n", ""), 1),
        (WHOLE.replace("Raises:\n    ValueError: f.", ""), 1),
        (WHOLE.replace("ValueError: f", "f"), 1),
        ("X. rows: a. cols: d.", 3),
    ],
)
def test_a_fault_is_found(doc, count):
    assert len(faults("example", example, doc)) == count
