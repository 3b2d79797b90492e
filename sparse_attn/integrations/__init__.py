"""Other libraries' models and call sites on the operators of this one.

``transformers`` imports its library where it is registered, ``vllm`` and ``sglang`` where SPARSE_ATTN_VLLM and
SPARSE_ATTN_SGLANG ask for it. ``flash_mla``, ``deep_gemm`` and ``vllm_ops`` hold functions of the library they are
named after, and import none: they view, check and call operators of ``sparse_attn``. README.md beside this file shows
call sites before and after, and lists the differences.
"""
