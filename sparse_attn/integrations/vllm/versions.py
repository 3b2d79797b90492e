"""What asks for the integration, and which versions of vLLM it was run with."""

VARIABLE = "SPARSE_ATTN_VLLM"
VERSIONS = ("0.32",)  # scripts/engine_hooks.py says what another one moved
