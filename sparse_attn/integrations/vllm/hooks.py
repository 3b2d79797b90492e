"""Where vLLM is told of the backend and the layer."""

# pyright: reportMissingImports=false, reportFunctionMemberAccess=false

from __future__ import annotations

from collections.abc import Callable

import vllm
from vllm.platforms import current_platform

from sparse_attn.integrations.vllm.versions import VARIABLE, VERSIONS

WINDOWED_MODEL = "sparse_attn.integrations.vllm.windowed:DeepseekV4ForCausalLM"
BACKEND = "sparse_attn.integrations.vllm.backend.SparseAttnBackend"


def install(check_failure: Callable[[], None]) -> None:
    """Have every sparse MLA layer ask for our backend. No option of vLLM's names it: on a CPU vLLM refuses sparse
    attention whatever is named, and on a GPU the variable alone is to do."""
    platform = type(current_platform)
    theirs = platform.get_attn_backend_cls
    if hasattr(theirs, "sparse_attn"):
        return

    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        if attn_selector_config.use_mla and attn_selector_config.use_sparse:
            check_failure()
            return BACKEND
        return theirs(selected_backend, attn_selector_config, num_heads)

    get_attn_backend_cls.sparse_attn = True
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    from vllm.model_executor.models import ModelRegistry

    ModelRegistry.register_model("DeepseekV4ForCausalLM", WINDOWED_MODEL)  # it asks no platform for a backend


def check(asked: str) -> None:
    """Register backend and layer, of a vLLM that was run.

    Raises:
        ValueError: another value of the variable, another version of vLLM.
    """
    if asked != "1":
        raise ValueError(f"{VARIABLE}: got {asked!r}, allowed: 1, or 0 for vLLM's own")
    if not vllm.__version__.startswith(tuple(f"{version}." for version in VERSIONS)):
        raise ValueError(f"vllm: got version {vllm.__version__}, allowed: {', '.join(VERSIONS)}")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from sparse_attn.integrations.vllm import layer  # noqa: F401  registers itself, once

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
