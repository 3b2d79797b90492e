"""Other libraries' call sites over our operators: their names, arguments, shapes and conventions.

``compat.flash_mla``, ``compat.deep_gemm`` and ``compat.vllm`` each hold functions of the library they are named after.
They are thin: they view, check and call operators of ``sparse_attn``. README.md beside this file shows call sites
before and after, and lists the differences.
"""
