"""vLLM runs DSA models with these operators where SPARSE_ATTN_VLLM=1 is set, and as ever where it is not.

``register`` is the entry point that vLLM loads in each of its processes (group vllm.general_plugins in setup.cfg).
Without the variable it does nothing, and imports nothing beyond this package. With it, layers of DSA take their
indexer, selection, cache writes and attention from here (``layer`` and ``backend`` for DeepSeek-V3.2 and GLM-5,
``windowed`` for DeepSeek-V4); the rest of the model stays vLLM's. A vLLM that is not in ``versions``, or a model or
setting that was never run, is refused by name before weights are read.
"""

from __future__ import annotations

import logging
import os

from sparse_attn.integrations.vllm.versions import VARIABLE

_failure: Exception | None = None


def register() -> None:
    """Take over the sparse layers of the process's vLLM, where the variable asks for it. Calls after the first do
    nothing. Raises nothing: what goes wrong is raised by the first sparse layer, for vLLM may log what a plugin raises
    and go on without it."""
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return
    global _failure
    try:
        from sparse_attn.integrations.vllm import hooks

        hooks.install(check_failure)
        hooks.check(os.environ[VARIABLE])
    except Exception as error:
        logging.getLogger("vllm.sparse_attn").error("%s is set, and this vLLM is not served: %s", VARIABLE, error)
        _failure = error


def check_failure() -> None:
    """Raise what ``register`` kept."""
    if _failure is not None:
        raise RuntimeError(f"{VARIABLE} is set, and sparse_attn cannot serve this vLLM: {_failure}") from _failure
