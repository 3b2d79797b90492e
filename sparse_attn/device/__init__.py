"""Device functions that kernels share, and repairs of Triton's interpreter."""

from sparse_attn.framework.target import interpreting

if interpreting():
    from sparse_attn.device.triton_private import mend_interpreter

    mend_interpreter()
